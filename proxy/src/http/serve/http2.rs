//! Serves one client's HTTP/2 connection.
//!
//! Uses the h2 crate directly, as the client side does (`outbound/h2.rs`): hyper's server sends no informational
//! responses, has no bound for what small frames cost, ends a body cleanly whose client cancelled it, and looks for a
//! stream's reset only when its answer has begun.

mod pings;
mod window;

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use ::h2::{
    Reason, RecvStream,
    server::{self, SendResponse},
};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header::CONTENT_LENGTH};
use http_body::Body as _;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use weft_runtime::drain;

use super::{Closing, MAX_HEADER_LIST_BYTES, Reset, ServeError, ServerSettings};
use crate::{
    config::{Http2ServerConfig, LATE_FRAMES, RESET_STREAMS, SMALL_FRAMES},
    http::{
        body::{Body, H2Request, Observed, Observer, error::BodyError},
        headers::strip_for_http2,
        informational::{Informational, Responder},
        pump::Pump,
    },
    io::{Corked, Io, Uncork, cork},
};

use pings::{Pings, Pong};
use window::Window;
pub(crate) use window::WindowBudget;

/// The most bytes of a response that one stream buffers, unless the settings say otherwise: hyper's number.
const SEND_BUFFER: usize = 400 * 1024;

/// A client's connection, and what answers its requests.
struct Connection<'a, S, A> {
    connection: server::Connection<Corked<S>, Bytes>,
    uncork: &'a Uncork<S>,
    pings: Option<Pings>,
    window: Window,
    /// Each request has one until its body ends.
    uploads: Arc<()>,
    answer: A,
}

/// Serves a connection until the client ends it, or until the proxy drains, `closing` has begun or the connection is
/// too old, and its requests are answered.
///
/// # Errors
/// When the connection failed; its requests have their answers or cannot get any.
pub(super) async fn serve<S, A, F, O>(
    stream: Io<S>,
    settings: ServerSettings,
    drain: &drain::Watch,
    closing: &Closing,
    answer: A,
) -> Result<(), ServeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Box<Request<Body>>, Informational) -> F + Unpin,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    let config = settings.http2;
    let window = Window::new(&config, settings.windows);
    let (stream, uncork) = cork(stream);
    let mut connection = uncork.drive(pin!(builder(&config, window.size()).handshake(stream))).await?;
    let pings = Pings::new(&config, &mut connection);
    let mut connection = Connection { connection, uncork: &uncork, pings, window, uploads: Arc::default(), answer };
    let aged = async {
        match config.max_connection_age {
            Some(age) => tokio::time::sleep(age).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        served = uncork.drive(&mut connection) => return served,
        () = drain.signaled() => {}
        () = closing.begun() => {}
        () = aged => {}
    }
    connection.connection.graceful_shutdown();
    uncork.drive(&mut connection).await
}

fn builder(config: &Http2ServerConfig, window: u32) -> server::Builder {
    let send_buffer = config.max_send_buffer.map_or(SEND_BUFFER, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(config.stream_window)
        .initial_connection_window_size(window)
        .max_concurrent_streams(config.max_streams)
        .max_pending_accept_reset_streams(config.max_pending_resets)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .max_local_error_reset_streams(Some(LATE_FRAMES))
        .max_header_list_size(config.max_header_list_size.unwrap_or(MAX_HEADER_LIST_BYTES))
        .max_send_buffer_size(send_buffer);
    // For a window of the settings, h2's default: half of it.
    if config.connection_window.is_none() {
        builder.data_frame_budget(SMALL_FRAMES);
    }
    if let Some(bytes) = config.max_frame_size {
        builder.max_frame_size(bytes);
    }
    builder
}

impl<S, A, F, O> Future for Connection<'_, S, A>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Box<Request<Body>>, Informational) -> F + Unpin,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    type Output = Result<(), ServeError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        // The connection first: where this task had no turn for a while, an answer to a ping may be there, and unread.
        while let Poll::Ready(accepted) = this.connection.poll_accept(cx) {
            match accepted {
                Some(Ok((request, stream))) => this.begin(request, stream),
                Some(Err(error)) => return Poll::Ready(Err(error.into())),
                None => return Poll::Ready(Ok(())),
            }
        }
        let Some(pings) = &mut this.pings else { return Poll::Pending };
        match ready!(pings.poll(cx, this.uncork.received())) {
            // Nothing that is written now arrives.
            Pong::Missing => return Poll::Ready(Err(ServeError::Unanswered)),
            Pong::Window(bytes) => {
                if let Some(bytes) = this.window.grow_to(bytes) {
                    this.connection.set_target_window_size(bytes);
                }
                // It fails while the client has not acknowledged the one before it, which then stays.
                let _ = this.connection.set_initial_window_size(bytes);
                cx.waker().wake_by_ref();
            }
        }
        Poll::Pending
    }
}

impl<S, A, F, O> Connection<'_, S, A>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Box<Request<Body>>, Informational) -> F,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    #[expect(clippy::disallowed_methods, reason = "ends with the stream, which ends with its connection")]
    fn begin(&mut self, request: Request<RecvStream>, stream: SendResponse<Bytes>) {
        let (head, body) = request.into_parts();
        let open = (!body.is_end_stream()).then(|| Arc::clone(&self.uploads));
        // This one, and the connection's.
        if open.is_some()
            && let Some(bytes) = self.window.grow(Arc::strong_count(&self.uploads) - 1)
        {
            self.connection.set_target_window_size(bytes);
        }
        let body = Body::H2Request(H2Request::new(body, &head.headers, open));
        let responder = Arc::new(Mutex::new(Responder::new(stream)));
        let informational = Informational::to_http2(&responder);
        // Boxed, because it is some KiB large, and the task would have room for it twice.
        let answer = Box::pin((self.answer)(Box::new(Request::from_parts(head, body)), informational));
        tokio::spawn(respond(responder, answer));
    }
}

/// Answers a request. A stream that its client resets costs the application nothing more.
async fn respond<F, O>(responder: Arc<Mutex<Responder>>, mut answer: Pin<Box<F>>)
where
    F: Future<Output = Result<Response<Observed<O>>, Reset>>,
    O: Observer + Unpin,
{
    let answered = poll_fn(|cx| {
        if responder.lock().poll_reset(cx).is_ready() {
            return Poll::Ready(None);
        }
        answer.as_mut().poll(cx).map(Some)
    })
    .await;
    drop(answer);
    let response = match answered {
        Some(Ok(response)) => response,
        Some(Err(Reset(error))) => {
            return responder.lock().reset(error.reason().unwrap_or(Reason::INTERNAL_ERROR));
        }
        None => return,
    };
    let (head, body) = response.into_parts();
    let mut head = Response::from_parts(head, ());
    strip_for_http2(head.headers_mut());
    let is_end = body.is_end_stream();
    if let Some(length) = body.size_hint().exact().filter(|_| !is_end) {
        head.headers_mut().entry(CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    let sent = responder.lock().respond(head, is_end);
    let stream = match sent {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "cannot send a response");
            return responder.lock().reset(Reason::INTERNAL_ERROR);
        }
    };
    // Nothing is passed on any more, and the body may take its time.
    drop(responder);
    if is_end {
        return;
    }
    let mut pump = Pump::new(body, stream);
    if let Err(error) = poll_fn(|cx| pump.poll_send(cx)).await {
        tracing::debug!(%error, "a response ended early");
        pump.reset(reason(&error));
    }
}

/// The reason with which the server reset the stream of a response, for the client.
fn reason(error: &BodyError) -> Reason {
    let reset = if let BodyError::H2(error) = error { error.reason() } else { None };
    reset.unwrap_or(Reason::INTERNAL_ERROR)
}
