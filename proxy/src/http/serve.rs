//! Serves one client's HTTP connection: hyper's server, limits of heads, and graceful shutdown.

mod http1;
mod timer;

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use weft_runtime::drain;

use super::body::{Observed, Observer};
use crate::{
    config::Http2ServerConfig,
    io::{Abort, Io, cork},
};

/// Largest head of an HTTP/1 message, in bytes. Larger ones are answered with 431.
pub(crate) const MAX_HEAD_BYTES: usize = 64 * 1024;
/// What one HTTP/1 connection reads ahead or holds for a peer that does not read, in bytes: a whole head, and twice
/// what the kernel takes at once. hyper's default is 400 KiB.
pub(crate) const MAX_BUFFER_BYTES: usize = 2 * MAX_HEAD_BYTES;
/// Largest head of an HTTP/2 message, in bytes as RFC 9113 section 6.5.2 counts them, which adds 32 for each field.
/// hyper accepts 100 fields of HTTP/1, and the proxies add some; so a message that passes as HTTP/1 at one proxy
/// passes the next as HTTP/2.
pub(crate) const MAX_HEADER_LIST_BYTES: u32 = MAX_HEAD_BYTES as u32 + 8 * 1024;

/// The version that a client speaks on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpVersion {
    /// HTTP/1.0 or 1.1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

/// The server reset a request's HTTP/2 stream; the client's is reset with the same reason.
#[derive(Debug, thiserror::Error)]
#[error("the server reset the stream")]
pub(crate) struct Reset(#[source] pub(crate) h2::Error);

/// Whether a client's connection ends as soon as its requests are answered. For HTTP/1 the answer's `connection: close`
/// says so, too.
#[derive(Debug, Default)]
pub(crate) struct Closing(AtomicBool);

impl Closing {
    /// Ends the connection. The caller then answers a request.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Waits for it beside the connection: what sends the answer wakes the connection's task, so that no request pays
    /// for a waker.
    async fn begun(&self) {
        poll_fn(|_| if self.0.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// Settings of HTTP connections from clients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerSettings {
    /// How long an HTTP/1 client may take from the end of one exchange to the end of the next request's head.
    pub(crate) http1_timeout: Duration,
    /// HTTP/2.
    pub(crate) http2: Http2ServerConfig,
}

/// Serves a connection until the client ends it, or until the proxy drains or `closing` has begun and its requests are
/// answered.
///
/// # Errors
/// When the connection failed; its requests have their answers or cannot get any.
pub(crate) async fn serve<S, A, F, O>(
    stream: Io<S>,
    version: HttpVersion,
    settings: ServerSettings,
    drain: &drain::Watch,
    closing: &Closing,
    answer: A,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    match version {
        HttpVersion::Http1 => http1::serve(stream, settings.http1_timeout, drain, answer).await,
        HttpVersion::Http2 => {
            let http2 = settings.http2;
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .auto_date_header(false)
                .timer(TokioTimer::new())
                .max_concurrent_streams(http2.max_streams)
                .max_pending_accept_reset_streams(http2.max_pending_resets)
                .max_frame_size(http2.max_frame_size)
                .max_header_list_size(http2.max_header_list_size.unwrap_or(MAX_HEADER_LIST_BYTES));
            if http2.adaptive_window {
                builder.adaptive_window(true);
            } else {
                builder
                    .initial_stream_window_size(http2.stream_window)
                    .initial_connection_window_size(http2.connection_window);
            }
            if let Some(keepalive) = http2.keepalive {
                builder.keep_alive_interval(keepalive.interval).keep_alive_timeout(keepalive.timeout);
            }
            if let Some(bytes) = http2.max_send_buffer {
                builder.max_send_buf_size(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            let (stream, uncork) = cork(stream);
            let has_reset = Arc::<AtomicBool>::default();
            // Boxed, because hyper moves what it gets several times, and this is some KiB large.
            let service = service_fn(move |request| unless_reset(Box::pin(answer(request)), Arc::clone(&has_reset)));
            // Boxed, so that a connection of HTTP/1 has no room for it.
            let mut server = Box::pin(builder.serve_connection(TokioIo::new(stream), service));
            let aged = async {
                match http2.max_connection_age {
                    Some(age) => tokio::time::sleep(age).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                served = uncork.drive(server.as_mut()) => return served,
                () = drain.signaled() => {}
                () = closing.begun() => {}
                () = aged => {}
            }
            server.as_mut().graceful_shutdown();
            uncork.drive(server).await
        }
    }
}

/// Answers a request of HTTP/2 on a connection whose client may have reset a stream before its answer. It may do so
/// again, at once, and hyper looks for a reset only when it has polled the answer. So from the first reset on, each
/// answer lets hyper look before it begins, and a stream that is reset already costs the application nothing. The
/// answer is on the heap, because an asynchronous function has room twice for what it is given and awaits.
async fn unless_reset<F: Future>(answer: Pin<Box<F>>, has_reset: Arc<AtomicBool>) -> F::Output {
    if has_reset.load(Ordering::Relaxed) {
        let mut has_looked = false;
        let look = poll_fn(|cx| {
            if std::mem::replace(&mut has_looked, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        });
        look.await;
    }
    let mut unanswered = Unanswered(Some(has_reset));
    let answer = answer.await;
    unanswered.0 = None;
    answer
}

/// An answer that is dropped before it is there: the client reset its stream, or is gone.
struct Unanswered(Option<Arc<AtomicBool>>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(has_reset) = &self.0 {
            has_reset.store(true, Ordering::Relaxed);
        }
    }
}
