//! HTTP/2 to an endpoint: connections, opened on demand, that a worker's requests share.
//!
//! Uses the h2 crate directly: hyper's client would cost a task and two channel hops per request. Owns the connection.

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll};

use ::h2::{
    Ping, PingPong, Reason,
    client::{self, ResponseFuture, SendRequest},
};
use bytes::Bytes;
use http::{Request, Response, Version};
use http_body::Body as _;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::oneshot,
};

use super::{
    balance::Balanced,
    endpoint::{ConnectError, Endpoint, Unprocessed},
};
use crate::{
    config::{LATE_FRAMES, RESET_STREAMS, SMALL_FRAMES, Windows},
    discover::endpoint::Pings,
    http::{
        body::{Again, Body, H2Body},
        informational::Informational,
        pool::copy_of_head,
        pump::Pump,
        serve::MAX_HEADER_LIST_BYTES,
        shared_connections::{GetError, StreamPermit, Streams},
    },
    io::{Corked, Uncork, cork},
    transport_header::SessionProtocol,
};

/// The most bytes of a request body that one stream buffers: hyper's number.
const SEND_BUFFER: usize = 1024 * 1024;
/// The number of a connection's first request (RFC 9113 section 5.1.1).
const FIRST_STREAM: u32 = 1;
/// The most streams at once before another proxy has announced its limit.
const PROXY_STREAMS: usize = 1000;
/// The most streams at once before a server, or the application, has announced its limit: as many as RFC 9113 section
/// 6.5.2 recommends to allow at least, so that a burst makes more connections instead of being refused on the first, or
/// waiting there.
pub(crate) const SERVER_STREAMS: usize = 100;

/// Why a request was not answered.
pub(crate) enum SendError {
    /// The endpoint did not process it; the request is unchanged.
    Unsent(Box<Request<Body>>, Unprocessed),
    /// It may have been processed. `is_own_bound` is what [`StreamPermit::is_own_bound`] says.
    Failed { error: ::h2::Error, is_own_bound: bool },
}

/// Sends a request over the endpoint's connection; calls `sent` when there is one. `balanced` is the endpoint's place
/// in its balancer, which gets the result of an attempt to connect, also of one whose requests were given up.
/// `informational` passes on what comes before the response.
///
/// # Errors
/// See [`SendError`].
pub(crate) async fn send(
    endpoint: &Arc<Endpoint>,
    balanced: Option<&Arc<Balanced>>,
    request: Box<Request<Body>>,
    informational: &Informational,
    sent: impl FnOnce(),
) -> Result<Response<H2Body>, SendError> {
    match sender(endpoint, balanced).await {
        Ok((sender, permit)) => {
            sent();
            send_over(sender, permit, request, informational).await
        }
        Err(error) => Err(SendError::Unsent(request, Unprocessed::Unreachable(error))),
    }
}

/// Sends a request over a connection that can take it.
///
/// # Errors
/// See [`SendError`].
#[expect(clippy::disallowed_methods, reason = "a request's rest ends with the stream of its response")]
pub(crate) async fn send_over(
    mut sender: SendRequest<Bytes>,
    permit: StreamPermit,
    request: Box<Request<Body>>,
    informational: &Informational,
) -> Result<Response<H2Body>, SendError> {
    let (begun, again) = begin(&mut sender, request);
    let (mut response, mut pump) = match begun {
        Ok(begun) => begun,
        Err(error) => return Err(failed(again, error, &sender, &permit, false)),
    };
    let answered = poll_fn(|cx| {
        if pump.as_mut().is_some_and(|pump| pump.poll_request(cx).is_ready()) {
            pump = None;
        }
        while let Poll::Ready(Some(Ok(head))) = response.poll_informational(cx) {
            informational.pass_on(head.status(), head.headers());
        }
        Pin::new(&mut response).poll(cx)
    })
    .await;
    let response = match answered {
        Ok(response) => response,
        Err(error) => {
            let is_first = response.stream_id().as_u32() == FIRST_STREAM;
            return Err(failed(again, error, &sender, &permit, is_first));
        }
    };
    let Some(mut pump) = pump else { return Ok(response.map(|body| H2Body::new(body, permit, None))) };
    // The answer began before the request ended. Both continue independently, because either may wait for the other.
    // But when the answer is given up, the server need not read the rest.
    let (given_up, is_given_up) = oneshot::channel();
    tokio::spawn(async move {
        tokio::select! {
            () = poll_fn(|cx| pump.poll_request(cx)) => {}
            Ok(()) = is_given_up => pump.reset(Reason::CANCEL),
        }
    });
    Ok(response.map(|body| H2Body::new(body, permit, Some(given_up))))
}

/// A request whose head was sent: its response, and what sends its body.
type Begun = (ResponseFuture, Option<Pump<Body>>);

/// A request to be sent again if the endpoint refuses it before processing it.
type Repeatable = Option<(Box<Request<Body>>, Again)>;

/// Sends the head, and what is needed to send the body and to repeat the request.
fn begin(sender: &mut SendRequest<Bytes>, mut request: Box<Request<Body>>) -> (Result<Begun, ::h2::Error>, Repeatable) {
    // h2 expects HTTP/2 requests in absolute form. Without an authority there is none, and this version avoids its
    // refusal.
    *request.version_mut() = if request.uri().authority().is_some() { Version::HTTP_2 } else { Version::HTTP_11 };
    let body = request.body_mut().take();
    let is_end = body.is_end_stream();
    let (head, again) = match body.again() {
        Some(again) => (copy_of_head(&request), Some((request, again))),
        None => (request.map(|_| ()), None),
    };
    let sent = sender.send_request(head, is_end);
    (sent.map(|(response, stream)| (response, (!is_end).then(|| Pump::new(body, stream)))), again)
}

/// The error, or the request if it may be sent again. The first request of a connection may be what ends it: that one
/// is repeated only if the peer had no complaint.
fn failed(
    again: Repeatable,
    error: ::h2::Error,
    sender: &SendRequest<Bytes>,
    permit: &StreamPermit,
    is_first: bool,
) -> SendError {
    // What the peer declares that it did not process (RFC 9113 sections 6.8 and 8.7).
    let is_refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
    let has_complaint = error.reason() != Some(Reason::NO_ERROR);
    let went_away = error.is_go_away() && error.is_remote() && !(is_first && has_complaint);
    // As with HTTP/1, what may reach the server twice is sent again when a kept connection turns out to be dead.
    let may_repeat = |request: &Request<Body>| error.is_io() && !is_first && request.method().is_idempotent();
    let again = again.filter(|(request, _)| is_refused || went_away || may_repeat(request));
    let again = again.and_then(|(mut request, again)| {
        *request.body_mut() = again.body()?;
        Some(request)
    });
    match again {
        Some(request) if is_refused && sender.current_max_send_streams() < permit.allowed() => {
            SendError::Unsent(request, Unprocessed::LimitUnknown(error))
        }
        Some(request) if is_refused => SendError::Unsent(request, Unprocessed::Refused(error)),
        Some(request) => SendError::Unsent(request, Unprocessed::ConnectionEnded),
        None => SendError::Failed { is_own_bound: permit.is_own_bound(&error), error },
    }
}

/// A connection that can take a request, opened if there is none with room.
async fn sender(
    endpoint: &Arc<Endpoint>,
    balanced: Option<&Arc<Balanced>>,
) -> Result<(SendRequest<Bytes>, StreamPermit), Arc<ConnectError>> {
    let addr = endpoint.info.addr;
    let attempt = |streams| {
        let (endpoint, balanced) = (Arc::clone(endpoint), balanced.cloned());
        async move {
            let connected = connect(&endpoint, streams).await;
            if let Some(balanced) = balanced {
                balanced.connected(&connected);
            }
            connected
        }
    };
    endpoint.h2.get(attempt).await.map_err(|error| match error {
        GetError::Connect(error) => error,
        GetError::Http2(source) => {
            let error = ConnectError::Http2 { addr, source };
            if let Some(balanced) = balanced {
                balanced.failed(&error);
            }
            Arc::new(error)
        }
    })
}

/// Begins HTTP/2 on a new connection, which [`Uncork::drive`] drives. `initial_streams` are the most at once before the
/// peer has announced its limit.
pub(crate) async fn handshake<T>(
    stream: T,
    windows: Windows,
    initial_streams: usize,
) -> Result<(SendRequest<Bytes>, client::Connection<Corked<T>, Bytes>, Uncork<T>), ::h2::Error>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let (stream, uncork) = cork(stream);
    let (sender, connection) = client::Builder::new()
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .initial_max_send_streams(initial_streams)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .max_local_error_reset_streams(Some(LATE_FRAMES))
        .max_send_buffer_size(SEND_BUFFER)
        .data_frame_budget(SMALL_FRAMES)
        .enable_push(false)
        .handshake(stream)
        .await?;
    Ok((sender, connection, uncork))
}

#[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
async fn connect(endpoint: &Arc<Endpoint>, streams: Streams) -> Result<SendRequest<Bytes>, ConnectError> {
    let stream = endpoint.connect(Some(SessionProtocol::Http2)).await?;
    let addr = endpoint.info.addr;
    let unknown = if endpoint.identity().is_some() { PROXY_STREAMS } else { SERVER_STREAMS };
    let initial_streams = endpoint.h2.initial_streams(unknown);
    let (sender, mut connection, uncork) = handshake(stream, endpoint.windows(), initial_streams)
        .await
        .map_err(|source| ConnectError::Http2 { addr, source })?;
    let pings = endpoint.info.pings.zip(connection.ping_pong());
    let owner = Arc::downgrade(endpoint);
    tokio::spawn(async move {
        let ended = match pings {
            None => Some(uncork.drive(connection).await),
            Some((pings, sender)) => drive_and_ping(&uncork, connection, keep_alive(pings, sender, streams)).await,
        };
        match ended {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!(%error, dst.addr = %addr, "HTTP/2 connection ended"),
            None => tracing::debug!(dst.addr = %addr, "endpoint does not answer pings"),
        }
        if let Some(endpoint) = owner.upgrade() {
            endpoint.h2.drop_unusable();
        }
    });
    Ok(sender)
}

/// Drives a connection to its end, or until a ping has no answer, which is `None`.
async fn drive_and_ping<T: AsyncRead + AsyncWrite + Unpin>(
    uncork: &Uncork<T>,
    connection: client::Connection<Corked<T>, Bytes>,
    keep_alive: impl Future<Output = ()>,
) -> Option<Result<(), ::h2::Error>> {
    tokio::select! {
        // The connection first: where this task had no turn for a while, the answer may be there, and unread.
        biased;
        ended = uncork.drive(connection) => Some(ended),
        () = keep_alive => None,
    }
}

/// Pings until an answer is missing.
async fn keep_alive(Pings { keepalive, while_idle }: Pings, mut sender: PingPong, streams: Streams) {
    loop {
        tokio::time::sleep(keepalive.interval).await;
        if !while_idle && streams.count() == 0 {
            continue;
        }
        let answer = tokio::time::timeout(keepalive.timeout, sender.ping(Ping::opaque())).await;
        if !matches!(answer, Ok(Ok(_))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        time::advance,
    };

    use super::*;
    use crate::{
        config::Keepalive,
        http::{
            frames::{frame, next_frame},
            shared_connections::SharedConnections,
        },
        inbound::testing,
    };

    const SECOND: Duration = Duration::from_secs(1);

    /// The streams of a connection that is never made.
    async fn streams() -> Streams {
        let (sender, streams) = oneshot::channel();
        let shared = SharedConnections::new(Windows { stream: 1, connection: 1 });
        let refused = shared.get(|streams| async {
            let _ = sender.send(streams);
            Err(())
        });
        assert!(refused.await.is_err());
        streams.await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_came_before_the_task_had_its_turn_is_not_missing() {
        const SETTINGS: u8 = 4;
        const PING: u8 = 6;
        const ACK: u8 = 1;
        let pings = Pings { keepalive: Keepalive { interval: SECOND, timeout: SECOND }, while_idle: true };
        // Each time, either could have been looked at first.
        for _ in 0..20 {
            let (client, mut server) = duplex(4096);
            let (_sender, mut connection, uncork) =
                handshake(client, testing::config().http2.windows, 1).await.unwrap();
            let keep_alive = keep_alive(pings, connection.ping_pong().unwrap(), streams().await);
            let mut driven = std::pin::pin!(drive_and_ping(&uncork, connection, keep_alive));
            assert!(futures::poll!(driven.as_mut()).is_pending());
            advance(SECOND).await;
            // One begins the ping, the other sends it.
            for _ in 0..2 {
                assert!(futures::poll!(driven.as_mut()).is_pending());
            }
            server.read_exact(&mut [0; 24]).await.unwrap();
            let ping = loop {
                let received = next_frame(&mut server).await.unwrap();
                if received.kind == PING {
                    break received;
                }
            };
            let answer = [frame(SETTINGS, 0, 0, &[]), frame(PING, ACK, 0, &ping.payload)];
            server.write_all(&answer.concat()).await.unwrap();
            advance(SECOND).await;
            assert!(futures::poll!(driven.as_mut()).is_pending());
        }
    }
}
