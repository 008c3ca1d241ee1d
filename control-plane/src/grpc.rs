//! gRPC over HTTP, for methods that take one message: reading the request, refusing it, and answering with bytes.
//!
//! tonic's own server encodes a message for each stream and keeps a buffer of the largest one for as long as the stream
//! lives. Here a message is encoded once for all streams that send it, so that an idle stream holds none.

use std::convert::Infallible;

use bytes::{BufMut, Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message;
use tonic::{Code, Status, body::Body, codec::Streaming};
use tonic_prost::ProstDecoder;
use weft_runtime::server::RequestBody;

use crate::metrics::Call;

/// The largest request, in bytes: the name of a destination, and the client's token.
const MAX_REQUEST_BYTES: usize = 16 * 1024;
/// A byte that says whether the message is compressed, and its length.
const HEADER_BYTES: usize = 5;

/// Reads the only message of a request.
///
/// # Errors
/// When the message is missing, too long, compressed, or no message of this type.
pub(crate) async fn read<M: Message + Default + 'static>(request: Request<RequestBody>) -> Result<M, Status> {
    let body = request.into_body();
    let mut messages = Streaming::new_request(ProstDecoder::<M>::default(), body, None, Some(MAX_REQUEST_BYTES));
    messages.message().await?.ok_or_else(|| Status::internal("Missing request message."))
}

/// A message as it travels.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(HEADER_BYTES + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).expect("a message is shorter than 4 GiB"));
    message.encode(&mut frame).expect("the buffer is long enough");
    frame.freeze()
}

/// The answer of a call: frames, each of which holds whole messages, then OK; or why it failed.
pub(crate) fn respond<S>(mut call: Call, frames: Result<S, Status>) -> Response<Body>
where
    S: Stream<Item = Bytes> + Send + 'static,
{
    let frames = match frames {
        Ok(frames) => frames,
        Err(status) => {
            call.end(status.code());
            return status.into_http();
        }
    };
    // Dropped before this, the call counts as cancelled.
    let end = stream::once(async move {
        call.end(Code::Ok);
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Ok as i32));
        Frame::trailers(trailers)
    });
    let body = frames.map(Frame::data).chain(end).map(Ok::<_, Infallible>);
    let mut response = Response::new(Body::new(StreamBody::new(body)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The frames of a call with one message.
pub(crate) fn message(frame: Bytes) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::once(std::future::ready(frame))
}

/// The answer to a method that does not exist.
pub(crate) fn unimplemented() -> Response<Body> {
    Status::unimplemented("").into_http()
}
