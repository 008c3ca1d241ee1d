//! HTTP/1 to an endpoint: a connection per request in flight, kept for a while afterwards.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use http::{Request, Response};
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;

use super::{
    balance::Balanced,
    endpoint::{ConnectError, Endpoint, Unprocessed},
};
use crate::{
    http::{
        body::Body,
        informational::Informational,
        pool::Repetition,
        serve::{MAX_BUFFER_BYTES, MAX_HEAD_BYTES},
    },
    io::ReadOn,
    transport_header::SessionProtocol,
};

/// A connection that returns to its endpoint if its response ended well.
pub(crate) struct CheckedOut {
    endpoint: Arc<Endpoint>,
    sender: Option<SendRequest<Body>>,
}

/// An attempt to connect that goes on without its request.
struct GivenUp<'a>(&'a AtomicUsize);

/// Why a request was not answered.
pub(crate) enum SendError {
    /// The endpoint did not process it; the request is unchanged.
    Unsent(Box<Request<Body>>, Unprocessed),
    /// It may have been sent.
    Failed(hyper::Error),
}

/// Sends a request over an idle connection or a new one; calls `sent` when there is one. `balanced` is the endpoint's
/// place in its balancer, which gets the result of an attempt to connect, also of one whose request was given up.
/// `informational` passes on what comes before the response.
///
/// # Errors
/// See [`SendError`]. With [`Unprocessed::ConnectionEnded`], the peer has closed a kept connection, before the request,
/// or while it was sent and repeating it does no harm.
pub(crate) async fn send(
    endpoint: &Arc<Endpoint>,
    balanced: Option<&Arc<Balanced>>,
    request: Box<Request<Body>>,
    reuse: bool,
    informational: &Informational,
    sent: impl FnOnce(),
) -> Result<(Response<Incoming>, CheckedOut), SendError> {
    let idle_timeout = endpoint.shared.config.outbound.http1_idle_timeout;
    let pooled = if reuse { endpoint.h1.take(idle_timeout) } else { None };
    let (mut sender, mut request, again) = match pooled {
        Some(sender) => {
            let (request, again) = Repetition::of(request);
            (sender, request, again)
        }
        // Boxed: a request on a kept connection needs no room for what opens one.
        None => match Box::pin(connect(endpoint, balanced, reuse)).await {
            Ok(sender) => (sender, *request, None),
            Err(error) => return Err(SendError::Unsent(request, Unprocessed::Unreachable(Arc::new(error)))),
        },
    };
    sent();
    informational.follow(&mut request);
    match sender.try_send_request(request).await {
        Ok(response) => {
            let sender = reuse.then_some(sender);
            Ok((response, CheckedOut { endpoint: Arc::clone(endpoint), sender }))
        }
        Err(mut error) => Err(match error.take_message() {
            Some(request) => SendError::Unsent(Box::new(request), Unprocessed::ConnectionEnded),
            None => match again.and_then(|again| again.after(error.error())) {
                Some(request) => SendError::Unsent(request, Unprocessed::ConnectionEnded),
                None => SendError::Failed(error.into_error()),
            },
        }),
    }
}

/// Opens a connection in a task of its own. One whose request was given up is kept for the next if it may be; as many
/// attempts as connections that may be kept go on without their requests.
#[expect(clippy::disallowed_methods, reason = "ends with the attempt to connect, which has a deadline")]
async fn connect(
    endpoint: &Arc<Endpoint>,
    balanced: Option<&Arc<Balanced>>,
    reuse: bool,
) -> Result<SendRequest<Body>, ConnectError> {
    let (mut result, connected) = oneshot::channel();
    let (endpoint, balanced) = (Arc::clone(endpoint), balanced.cloned());
    let addr = endpoint.info.addr;
    tokio::spawn(async move {
        let opened = {
            let mut opening = pin!(open(&endpoint));
            tokio::select! {
                opened = &mut opening => opened,
                () = result.closed() => {
                    let Some(_given_up) = GivenUp::begin(&endpoint) else { return };
                    opening.await
                }
            }
        };
        if let Some(balanced) = balanced {
            balanced.connected(&opened);
        }
        if let Err(Ok(unused)) = result.send(opened)
            && reuse
        {
            endpoint.h1.put(unused, endpoint.shared.config.outbound.max_idle_connections);
        }
    });
    // There is no result if the worker ends.
    connected.await.unwrap_or(Err(ConnectError::Timeout(addr)))
}

#[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
async fn open(endpoint: &Endpoint) -> Result<SendRequest<Body>, ConnectError> {
    let stream = endpoint.connect(Some(SessionProtocol::Http1)).await?;
    let addr = endpoint.info.addr;
    let (sender, connection) = http1::Builder::new()
        .max_header_size(MAX_HEAD_BYTES)
        .max_buf_size(MAX_BUFFER_BYTES)
        .handshake(TokioIo::new(ReadOn::new(stream)))
        .await
        .map_err(|source| ConnectError::Http1 { addr, source })?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, dst.addr = %addr, "HTTP/1 connection ended");
        }
    });
    Ok(sender)
}

impl<'a> GivenUp<'a> {
    /// `None` if as many go on already as may.
    fn begin(endpoint: &'a Endpoint) -> Option<Self> {
        // One worker has an endpoint, so no other attempt is given up in between.
        if endpoint.given_up.load(Ordering::Relaxed) >= endpoint.shared.config.outbound.max_idle_connections {
            return None;
        }
        endpoint.given_up.fetch_add(1, Ordering::Relaxed);
        Some(Self(&endpoint.given_up))
    }
}

impl Drop for GivenUp<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CheckedOut {
    /// Returns the connection after the response was read to its end.
    pub(crate) fn give_back(mut self) {
        if let Some(sender) = self.sender.take() {
            self.endpoint.h1.put(sender, self.endpoint.shared.config.outbound.max_idle_connections);
        }
    }
}
