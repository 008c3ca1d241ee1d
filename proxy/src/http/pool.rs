//! HTTP/1 connections that are kept between requests, to an endpoint or to the application.
//!
//! Owns the choice of a connection and its end, and which requests are sent again when a kept connection turns out to
//! be dead. Refuses to connect.

use std::{error::Error as _, io, time::Duration};

use http::Request;
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::body::{Again, Body};

/// Idle connections, the most recent last.
#[derive(Default)]
pub(crate) struct Pool(Mutex<Vec<Idle>>);

struct Idle {
    sender: SendRequest<Body>,
    since: Instant,
}

/// A request on a kept connection, which the server may close just when the request comes.
pub(crate) struct Repetition {
    /// The request without its body.
    request: Box<Request<Body>>,
    body: Again,
}

impl Repetition {
    /// The request to send, and if it may reach the server twice (RFC 9110 section 9.2.2) and its body is kept, what
    /// sends it again.
    pub(crate) fn of(mut request: Box<Request<Body>>) -> (Request<Body>, Option<Self>) {
        let again = request.method().is_idempotent().then(|| request.body().again()).flatten();
        let Some(again) = again else { return (*request, None) };
        let body = request.body_mut().take();
        (copy_of_head(&request).map(|()| body), Some(Self { request, body: again }))
    }

    /// The request, if its connection ended without a whole head of a response.
    pub(crate) fn after(mut self, error: &hyper::Error) -> Option<Box<Request<Body>>> {
        let lost = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe, io::ErrorKind::NotConnected];
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        let has_ended = error.is_incomplete_message() || source.is_some_and(|source| lost.contains(&source.kind()));
        if !has_ended {
            return None;
        }
        *self.request.body_mut() = self.body.body()?;
        Some(self.request)
    }
}

/// A request's head, without its extensions.
pub(crate) fn copy_of_head(request: &Request<Body>) -> Request<()> {
    let mut head = Request::new(());
    *head.method_mut() = request.method().clone();
    *head.uri_mut() = request.uri().clone();
    *head.version_mut() = request.version();
    *head.headers_mut() = request.headers().clone();
    head
}

impl Pool {
    /// Takes the most recent connection that can carry a request. It checks only a few: connections below an expired
    /// one have been idle for longer.
    pub(crate) fn take(&self, idle_timeout: Duration) -> Option<SendRequest<Body>> {
        let mut idle = self.0.lock();
        let now = Instant::now();
        while idle.last().is_some_and(|last| last.sender.is_closed()) {
            idle.pop();
        }
        if idle.last().is_some_and(|last| now.duration_since(last.since) >= idle_timeout) {
            idle.clear();
        }
        // A connection that is not ready is still finishing its last exchange; it will be in a moment.
        let index =
            idle.iter().rposition(|idle| idle.sender.is_ready() && now.duration_since(idle.since) < idle_timeout)?;
        Some(idle.remove(index).sender)
    }

    /// Keeps a connection, unless `limit` are kept already.
    pub(crate) fn put(&self, sender: SendRequest<Body>, limit: usize) {
        let mut idle = self.0.lock();
        if idle.len() < limit && !sender.is_closed() {
            idle.push(Idle { sender, since: Instant::now() });
        }
    }

    /// Drops connections that are closed or were idle for longer than `timeout`. Returns whether none is left.
    pub(crate) fn purge(&self, timeout: Duration) -> bool {
        let now = Instant::now();
        let mut idle = self.0.lock();
        idle.retain(|Idle { sender, since }| !sender.is_closed() && now.duration_since(*since) < timeout);
        if idle.capacity() > 16 && idle.len() * 4 < idle.capacity() {
            let kept = idle.len();
            idle.shrink_to(kept * 2);
        }
        idle.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use hyper::client::conn::http1;
    use hyper_util::rt::TokioIo;
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(3);

    /// A connection, ready if it is driven, and the server's end of it.
    async fn connection(is_driven: bool) -> (SendRequest<Body>, DuplexStream) {
        let (client, server) = duplex(1024);
        let (mut sender, connection) = http1::handshake(TokioIo::new(client)).await.unwrap();
        if is_driven {
            tokio::spawn(connection);
            sender.ready().await.unwrap();
        } else {
            // Neither polled nor dropped, it is neither ready nor closed.
            std::mem::forget(connection);
        }
        (sender, server)
    }

    #[tokio::test(start_paused = true)]
    async fn the_freshest_ready_connection_is_taken_and_busy_ones_stay() {
        let pool = Pool::default();
        let mut servers = Vec::new();
        for is_ready in [true, true, false] {
            let (sender, server) = connection(is_ready).await;
            servers.push(server);
            pool.put(sender, 10);
        }
        assert!(pool.take(TIMEOUT).is_some());
        assert!(pool.take(TIMEOUT).is_some());
        assert!(pool.take(TIMEOUT).is_none(), "the last one is busy");
        assert!(!pool.purge(TIMEOUT), "and still there");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_were_idle_too_long_are_given_up() {
        let pool = Pool::default();
        let (sender, _server) = connection(true).await;
        pool.put(sender, 1);
        let (surplus, _other) = connection(true).await;
        pool.put(surplus, 1);
        tokio::time::advance(TIMEOUT).await;
        assert!(pool.take(TIMEOUT).is_none());
        assert!(pool.purge(TIMEOUT));
    }
}
