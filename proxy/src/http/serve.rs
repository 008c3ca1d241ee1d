//! Serves one client's HTTP connection: limits of heads, and graceful shutdown.

mod http1;
mod http2;
mod timer;

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use ::http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use weft_runtime::drain;

use super::{
    body::{Body, Observed, Observer},
    informational::Informational,
};
use crate::{
    config::Http2ServerConfig,
    io::{Abort, Io},
};

pub(crate) use http2::WindowBudget;

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

/// Why a client's connection failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// HTTP/1.
    #[error(transparent)]
    Http1(#[from] hyper::Error),
    /// HTTP/2.
    #[error(transparent)]
    Http2(#[from] ::h2::Error),
    /// HTTP/2: the client is silent.
    #[error("the client does not answer pings")]
    Unanswered,
}

impl ServeError {
    /// Whether it ended because the client was silent.
    pub(crate) fn is_timeout(&self) -> bool {
        match self {
            Self::Http1(error) => error.is_timeout(),
            Self::Http2(_) => false,
            Self::Unanswered => true,
        }
    }
}

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
#[derive(Clone, Debug)]
pub(crate) struct ServerSettings {
    /// How long an HTTP/1 client may take from the end of one exchange to the end of the next request's head.
    pub(crate) http1_timeout: Duration,
    /// HTTP/2.
    pub(crate) http2: Http2ServerConfig,
    /// What the windows of all HTTP/2 connections have together.
    pub(crate) windows: Arc<WindowBudget>,
}

/// Serves a connection until the client ends it, or until the proxy drains or `closing` has begun and its requests are
/// answered. `answer` gets them boxed: each asynchronous function on a request's way would keep it twice.
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
) -> Result<(), ServeError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
    A: Fn(Box<Request<Body>>, Informational) -> F + Unpin,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    match version {
        HttpVersion::Http1 => Ok(http1::serve(stream, settings.http1_timeout, drain, answer).await?),
        // Boxed, so that a connection of HTTP/1 has no room for it.
        HttpVersion::Http2 => Box::pin(http2::serve(stream, settings, drain, closing, answer)).await,
    }
}
