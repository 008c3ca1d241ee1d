//! gRPC over HTTP, for methods that take one message: reading the request, refusing it, and answering with bytes.
//!
//! tonic's own server encodes a message for each stream and keeps a buffer of the largest one for as long as the stream
//! lives. Here a message is encoded once for all streams that send it, so that an idle stream holds none.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::{Stream, stream};
use http::{HeaderMap, HeaderValue, Response, header};
use hyper::body::{Body as HttpBody, Frame};
use pin_project_lite::pin_project;
use prost::Message;
use tonic::{
    Code, Status,
    body::Body,
    codec::{BufferSettings, Streaming},
};
use tonic_prost::ProstDecoder;

use crate::metrics::Call;

/// The largest request, in bytes: the name of a destination, and the client's token.
pub(crate) const MAX_REQUEST_BYTES: usize = 16 * 1024;
/// A byte that says whether the message is compressed, and its length.
pub(crate) const HEADER_BYTES: usize = 5;

/// The body of a request: that of a connection, or bytes that a fuzz target has made up.
pub(crate) trait RequestBody: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static {}

impl<B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static> RequestBody for B {}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Reads the only message of a request.
///
/// # Errors
/// When the message is missing, too long, compressed, or no message of this type.
pub(crate) async fn read<M: Message + Default + 'static>(body: impl RequestBody) -> Result<M, Status> {
    // Nothing is set aside before the message arrives, where tonic has 8 KiB: when all clients come back at once,
    // thousands of requests wait for their bodies.
    let decoder = ProstDecoder::<M>::new(BufferSettings::new(0, MAX_REQUEST_BYTES));
    let mut messages = Streaming::new_request(decoder, body, None, Some(MAX_REQUEST_BYTES));
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
    let mut response = Response::new(Body::new(Answer { frames, call: Some(call) }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

pin_project! {
    /// The body of an answer. A client has dozens of them open for as long as it lives: nothing is in it that is not
    /// needed.
    struct Answer<S> {
        #[pin]
        frames: S,
        // Dropped before the end, the call counts as cancelled.
        call: Option<Call>,
    }
}

impl<S: Stream<Item = Bytes>> HttpBody for Answer<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.project();
        let Some(call) = this.call else { return Poll::Ready(None) };
        if let Some(frames) = ready!(this.frames.poll_next(cx)) {
            call.sent(messages(&frames));
            return Poll::Ready(Some(Ok(Frame::data(frames))));
        }
        call.end(Code::Ok);
        *this.call = None;
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Ok as i32));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}

/// Number of messages in frames that this process wrote.
fn messages(mut frames: &[u8]) -> u64 {
    let mut messages = 0;
    while frames.len() >= HEADER_BYTES {
        frames.advance(1);
        let length = usize::try_from(frames.get_u32()).unwrap_or(usize::MAX);
        frames = frames.get(length..).unwrap_or_default();
        messages += 1;
    }
    messages
}

/// The frames of a call with one message.
pub(crate) fn message(frame: Bytes) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::once(std::future::ready(frame))
}

/// The answer to a method that does not exist.
pub(crate) fn unimplemented() -> Response<Body> {
    Status::unimplemented("").into_http()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::metrics::{GrpcMetrics, Method};

    const METHOD: Method = Method { grpc_service: "s", grpc_method: "m", grpc_type: "server_stream" };

    #[test]
    fn messages_of_frames_are_counted() {
        let (empty, some) = (frame(&String::new()), frame(&"text".to_owned()));
        for (frames, expected) in [(vec![], 0), (vec![&empty], 1), (vec![&some, &empty, &some], 3)] {
            let frames: Vec<u8> = frames.into_iter().flatten().copied().collect();
            assert_eq!(messages(&frames), expected, "{frames:?}");
        }
    }

    #[tokio::test]
    async fn an_answer_is_its_frames_and_then_ok_and_counts_as_cancelled_until_then() {
        let mut registry = Registry::default();
        let metrics = GrpcMetrics::new(&mut registry);
        let frames =
            || stream::iter([frame(&"a".to_owned()), [frame(&"b".to_owned()), frame(&"c".to_owned())].concat().into()]);
        let whole = respond(metrics.start(METHOD), Ok(frames())).into_body().collect().await.unwrap();
        assert_eq!(whole.trailers().unwrap()[Status::GRPC_STATUS], "0");
        assert_eq!(messages(&whole.to_bytes()), 3);
        let mut dropped = respond(metrics.start(METHOD), Ok(frames())).into_body();
        dropped.frame().await.unwrap().unwrap();
        drop(dropped);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let method = r#"grpc_service="s",grpc_method="m",grpc_type="server_stream""#;
        for line in [
            format!("grpc_server_started_total{{{method}}} 2"),
            format!("grpc_server_msg_received_total{{{method}}} 2"),
            format!("grpc_server_msg_sent_total{{{method}}} 4"),
            format!("grpc_server_handled_total{{{method},grpc_code=\"OK\"}} 1"),
            format!("grpc_server_handled_total{{{method},grpc_code=\"Canceled\"}} 1"),
            format!("grpc_server_handling_seconds_count{{{method}}} 2"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
