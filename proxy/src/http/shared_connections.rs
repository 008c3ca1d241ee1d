//! The HTTP/2 connections to an endpoint, which a worker's requests share, or to the application, which those of one
//! client share.
//!
//! Owns that a burst of requests makes one connection, in a task that outlives them, that no connection carries more
//! streams than its flow-control window can hold unread (so that slow readers never stall other requests), when a
//! connection is given up, and whether one ended because of slow readers. Refuses to connect.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use h2::{Reason, client::SendRequest};
use parking_lot::Mutex;

use crate::config::Windows;

/// The connections, the one that is filled first at the front. `E` is why an attempt fails.
pub(crate) struct SharedConnections<E> {
    open: Arc<Mutex<Vec<Open>>>,
    /// The last attempt to connect, which its task keeps until it has ended: a burst of requests makes one.
    attempt: Mutex<Option<WeakShared<Attempt<E>>>>,
    /// Streams for each connection.
    limit: usize,
}

/// An attempt to connect: the connection, or why there is none.
type Attempt<E> = BoxFuture<'static, Result<SendRequest<Bytes>, Arc<E>>>;

struct Open {
    sender: SendRequest<Bytes>,
    streams: Streams,
}

/// The streams on a connection whose responses were not read to their end.
#[derive(Clone, Debug)]
pub(crate) struct Streams(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    open: AtomicUsize,
    /// Those whose clients have not asked for more since they got the last frame.
    unread: AtomicUsize,
}

/// A stream's place on a connection, until its response was read.
#[derive(Debug)]
pub(crate) struct StreamPermit {
    streams: Streams,
    /// How many streams the peer allowed when it was begun, as far as that was known.
    allowed: usize,
    is_unread: bool,
}

/// Why there is no connection that takes a request.
#[derive(Debug)]
pub(crate) enum GetError<E> {
    /// The attempt that this request made or waited for has failed.
    Connect(Arc<E>),
    /// The new connection takes no request.
    Http2(h2::Error),
}

impl<E: Send + Sync + 'static> SharedConnections<E> {
    /// No connection yet. `windows` are those that the connections announce.
    pub(crate) fn new(windows: Windows) -> Self {
        let limit = usize::try_from(windows.connection / windows.stream.max(1)).unwrap_or(usize::MAX).max(1);
        Self { open: Arc::default(), attempt: Mutex::default(), limit }
    }

    /// A connection that can take a request, made by `connect`, which gets the number of its streams, if there is none
    /// with room. An attempt to connect goes on when its request is given up: the next ones wait for it, not for one of
    /// their own.
    ///
    /// # Errors
    /// See [`GetError`].
    pub(crate) async fn get<F>(
        &self,
        connect: impl FnOnce(Streams) -> F,
    ) -> Result<(SendRequest<Bytes>, StreamPermit), GetError<E>>
    where
        F: Future<Output = Result<SendRequest<Bytes>, E>> + Send + 'static,
    {
        if let Some(known) = self.known().await {
            return Ok(known);
        }
        // Boxed: requests that find a connection need no room for what opens one.
        Box::pin(self.open(connect)).await
    }

    async fn open<F>(
        &self,
        connect: impl FnOnce(Streams) -> F,
    ) -> Result<(SendRequest<Bytes>, StreamPermit), GetError<E>>
    where
        F: Future<Output = Result<SendRequest<Bytes>, E>> + Send + 'static,
    {
        // One worker uses the connections, so no other request begins an attempt after this one found none.
        while let Some(attempt) = self.under_way() {
            attempt.await.map_err(GetError::Connect)?;
            if let Some(known) = self.known().await {
                return Ok(known);
            }
        }
        let streams = Streams(Arc::new(Counts { open: AtomicUsize::new(0), unread: AtomicUsize::new(0) }));
        // The place is taken before others find the connection.
        let mut permit = streams.permit(usize::MAX);
        let sender = self.begin(connect(streams.clone()), streams).await.map_err(GetError::Connect)?;
        permit.allowed = sender.current_max_send_streams();
        Ok((sender.ready().await.map_err(GetError::Http2)?, permit))
    }

    /// The attempt that has not ended.
    fn under_way(&self) -> Option<Shared<Attempt<E>>> {
        self.attempt.lock().as_ref().and_then(WeakShared::upgrade).filter(|attempt| attempt.peek().is_none())
    }

    /// Begins an attempt, in a task of its own.
    #[expect(clippy::disallowed_methods, reason = "ends with the attempt, which has a deadline")]
    fn begin<F>(&self, connect: F, streams: Streams) -> Shared<Attempt<E>>
    where
        F: Future<Output = Result<SendRequest<Bytes>, E>> + Send + 'static,
    {
        let open = Arc::clone(&self.open);
        let attempt = async move {
            let connected = connect.await.map_err(Arc::new);
            connected.inspect(|sender| open.lock().push(Open { sender: sender.clone(), streams }))
        };
        let attempt = attempt.boxed().shared();
        *self.attempt.lock() = attempt.downgrade();
        tokio::spawn(attempt.clone());
        attempt
    }

    /// A present connection with room; `None` if all are full or gone.
    async fn known(&self) -> Option<(SendRequest<Bytes>, StreamPermit)> {
        loop {
            let (sender, permit) = self.reserve()?;
            if let Ok(ready) = sender.ready().await {
                return Some((ready, permit));
            }
        }
    }

    /// A place on the first connection with room. Connections that take no more requests are dropped.
    fn reserve(&self) -> Option<(SendRequest<Bytes>, StreamPermit)> {
        let mut open = self.open.lock();
        open.retain_mut(Open::is_usable);
        open.iter().find_map(|open| {
            let allowed = open.sender.current_max_send_streams();
            let has_room = open.streams.count() < self.limit.min(allowed);
            has_room.then(|| (open.sender.clone(), open.streams.permit(allowed)))
        })
    }

    /// How many streams a new connection may begin before its peer has announced a limit: what it announced on the
    /// others, or `unknown`.
    pub(crate) fn initial_streams(&self, unknown: usize) -> usize {
        let open = self.open.lock();
        open.iter().map(|open| open.sender.current_max_send_streams().max(1)).min().unwrap_or(unknown)
    }

    /// Drops connections that take no more requests, for the task of a connection that has ended.
    pub(crate) fn drop_unusable(&self) {
        self.open.lock().retain_mut(Open::is_usable);
    }

    /// Drops connections without streams, except the first.
    pub(crate) fn purge(&self) {
        let mut open = self.open.lock();
        let mut is_first = true;
        open.retain(|open| std::mem::take(&mut is_first) || open.streams.count() > 0);
    }
}

impl Open {
    fn is_usable(&mut self) -> bool {
        !matches!(self.sender.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Err(_)))
    }
}

impl Streams {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    fn permit(&self, allowed: usize) -> StreamPermit {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        StreamPermit { streams: self.clone(), allowed, is_unread: false }
    }
}

impl StreamPermit {
    /// Notes whether the client has a frame of the response and has not asked for the next one since.
    pub(crate) fn set_unread(&mut self, is_unread: bool) {
        if is_unread == self.is_unread {
            return;
        }
        self.is_unread = is_unread;
        let unread = &self.streams.0.unread;
        if is_unread {
            unread.fetch_add(1, Ordering::Relaxed)
        } else {
            unread.fetch_sub(1, Ordering::Relaxed)
        };
    }

    /// How many streams the peer allowed when this one was begun, as far as that was known.
    pub(crate) fn allowed(&self) -> usize {
        self.allowed
    }

    /// Whether the connection ended with this error because the proxy would have had to hold too much for clients that
    /// read slowly. h2 has the same reason for floods of the peer's, so that a response has to be unread.
    pub(crate) fn is_own_bound(&self, error: &h2::Error) -> bool {
        let is_calmed = error.is_go_away() && error.is_library() && error.reason() == Some(Reason::ENHANCE_YOUR_CALM);
        is_calmed && self.streams.0.unread.load(Ordering::Relaxed) > 0
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.set_unread(false);
        self.streams.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use tokio::{sync::oneshot, task::yield_now};

    use super::*;

    fn shared<E: Send + Sync + 'static>(limit: u32) -> SharedConnections<E> {
        SharedConnections::new(Windows { stream: 1, connection: limit })
    }

    /// A connection whose server never answers; it lives as long as the returned parts.
    async fn connection() -> (SendRequest<Bytes>, impl Drop) {
        let (client, server) = tokio::io::duplex(1024);
        let (sender, connection) = h2::client::handshake(client).await.unwrap();
        (sender, Held(Some((connection, server))))
    }

    struct Held<T>(Option<T>);

    impl<T> Drop for Held<T> {
        fn drop(&mut self) {
            self.0.take();
        }
    }

    #[tokio::test]
    async fn a_burst_of_requests_makes_one_attempt_and_shares_its_failure() {
        let shared = shared(10);
        let attempts = Arc::<AtomicU64>::default();
        let refused = || {
            let attempts = Arc::clone(&attempts);
            move |_| async move {
                attempts.fetch_add(1, Ordering::Relaxed);
                yield_now().await;
                Err("refused")
            }
        };
        let (first, second) = tokio::join!(shared.get(refused()), shared.get(refused()));
        let (Err(GetError::Connect(first)), Err(GetError::Connect(second))) = (first, second) else {
            panic!("nothing can connect")
        };
        assert_eq!(*first, "refused");
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        let Err(GetError::Connect(later)) = shared.get(refused()).await else { panic!("nothing can connect") };
        assert!(!Arc::ptr_eq(&first, &later), "a later request tries again");
        assert_eq!(attempts.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn an_attempt_outlives_its_request() {
        let shared = shared(10);
        for is_made in [false, true] {
            let (sender, _held) = connection().await;
            let (answer, answered) = oneshot::channel::<bool>();
            let first =
                shared.get(|_| async move { if answered.await.unwrap() { Ok(sender) } else { Err("refused") } });
            assert!(first.now_or_never().is_none());
            let second = shared.get(|_| async { Err("a second attempt") });
            let mut second = std::pin::pin!(second);
            assert!(futures::poll!(second.as_mut()).is_pending());
            answer.send(is_made).unwrap();
            match second.await {
                Ok(_) => assert!(is_made),
                Err(GetError::Connect(error)) => assert_eq!((*error, is_made), ("refused", false)),
                Err(GetError::Http2(error)) => panic!("{error}"),
            }
        }
    }

    #[tokio::test]
    async fn a_connection_is_shared_until_it_has_ended() {
        let shared = shared(10);
        let (sender, held) = connection().await;
        assert!(shared.get(|_| async { Ok::<_, ()>(sender) }).await.is_ok());
        assert!(shared.get(|_| async { Err(()) }).await.is_ok(), "the second request needs no connection of its own");
        shared.drop_unusable();
        assert_eq!(shared.open.lock().len(), 1);
        drop(held);
        shared.drop_unusable();
        assert!(shared.open.lock().is_empty());
        assert!(matches!(shared.get(|_| async { Err(()) }).await, Err(GetError::Connect(_))));
    }

    #[tokio::test]
    async fn a_full_connection_is_followed_by_another_until_it_has_room() {
        let shared = shared(2);
        let (first, _first) = connection().await;
        let (second, _second) = connection().await;
        let (_, one) = shared.get(|_| async { Ok::<_, ()>(first) }).await.unwrap();
        let (_, two) = shared.get(|_| async { Err(()) }).await.unwrap();
        let (_, three) = shared.get(|_| async { Ok::<_, ()>(second) }).await.unwrap();
        shared.purge();
        assert_eq!(shared.open.lock().len(), 2);
        drop(one);
        let (_, four) = shared.get(|_| async { Err(()) }).await.unwrap();
        drop(three);
        assert_eq!(shared.open.lock().iter().map(|open| open.streams.count()).collect::<Vec<_>>(), [2, 0]);
        shared.purge();
        assert_eq!(shared.open.lock().len(), 1, "the second is not needed any more");
        drop((two, four));
    }
}
