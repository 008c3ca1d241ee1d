//! The HTTP/2 connection to an endpoint that all of a worker's requests share.
//!
//! Owns that a burst of requests makes one connection, and when it is given up. Refuses to connect.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use h2::client::SendRequest;
use parking_lot::Mutex;

/// The connection, if there is one.
#[derive(Default)]
pub(crate) struct SharedConnection {
    ready: Mutex<Option<SendRequest<Bytes>>>,
    /// Held while connecting, so that a burst of requests opens one connection.
    connecting: tokio::sync::Mutex<()>,
    /// Number of failed attempts, so that a burst of requests also makes one attempt.
    failures: AtomicU64,
}

/// Why there is no connection that takes a request.
#[derive(Debug)]
pub(crate) enum GetError<E> {
    /// The attempt that this request waited for has failed, and so would the next.
    Awaited,
    /// The attempt that this request made has failed.
    Connect(E),
    /// The new connection takes no request.
    Http2(h2::Error),
}

impl SharedConnection {
    /// The connection when it can take a request, made by `connect` if there is none.
    ///
    /// # Errors
    /// See [`GetError`].
    pub(crate) async fn get<E, F>(&self, connect: impl FnOnce() -> F) -> Result<SendRequest<Bytes>, GetError<E>>
    where
        F: Future<Output = Result<SendRequest<Bytes>, E>>,
    {
        if let Some(ready) = self.known().await {
            return Ok(ready);
        }
        let failures = self.failures.load(Ordering::Relaxed);
        let _connecting = self.connecting.lock().await;
        if let Some(ready) = self.known().await {
            return Ok(ready);
        }
        if self.failures.load(Ordering::Relaxed) != failures {
            return Err(GetError::Awaited);
        }
        let sender = connect().await.map_err(|error| {
            self.failures.fetch_add(1, Ordering::Relaxed);
            GetError::Connect(error)
        })?;
        *self.ready.lock() = Some(sender.clone());
        sender.ready().await.map_err(GetError::Http2)
    }

    /// The present connection when it can take a request; `None` if it never will, or there is none.
    async fn known(&self) -> Option<SendRequest<Bytes>> {
        let known = self.ready.lock().clone()?;
        known.ready().await.ok()
    }

    /// Drops the connection if it takes no more requests. For the task of a connection that has ended: a newer one can
    /// only be here when the ended one was found unusable, and stays.
    pub(crate) fn drop_unusable(&self) {
        let mut ready = self.ready.lock();
        let unusable = ready.as_mut().is_some_and(|sender| {
            matches!(sender.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Err(_)))
        });
        if unusable {
            *ready = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_burst_of_requests_makes_one_attempt() {
        let shared = SharedConnection::default();
        let attempts = AtomicU64::new(0);
        let refused = || async {
            attempts.fetch_add(1, Ordering::Relaxed);
            yield_now().await;
            Err("refused")
        };
        let (first, second) = tokio::join!(shared.get(refused), shared.get(refused));
        assert!(matches!(first, Err(GetError::Connect("refused"))));
        assert!(matches!(second, Err(GetError::Awaited)));
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        assert!(matches!(shared.get(refused).await, Err(GetError::Connect("refused"))), "a later request tries again");
    }

    #[tokio::test]
    async fn a_connection_is_shared_until_it_has_ended() {
        let shared = SharedConnection::default();
        let (client, _server) = tokio::io::duplex(1024);
        let (sender, connection) = h2::client::handshake(client).await.unwrap();
        assert!(shared.get(|| async { Ok::<_, ()>(sender) }).await.is_ok());
        assert!(shared.get(|| async { Err(()) }).await.is_ok(), "the second request needs no connection of its own");
        shared.drop_unusable();
        assert!(shared.ready.lock().is_some());
        drop(connection);
        shared.drop_unusable();
        assert!(shared.ready.lock().is_none());
        assert!(matches!(shared.get(|| async { Err(()) }).await, Err(GetError::Connect(()))));
    }
}
