//! Request bodies that can be sent again: what was read is kept, up to a limit.
//!
//! A worker keeps a bounded number of bytes for all of its requests; beyond it, bodies pass without being kept.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;

use super::{Body, error::BodyError};

/// The bytes that a worker keeps for all requests that may be sent again.
const WORKER_BYTES: usize = 32 * 1024 * 1024;

/// A worker's room for bodies. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplayRoom(Arc<AtomicUsize>);

/// A request's body that is kept while it is read. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Replay(Arc<Mutex<Kept>>);

/// One reading of a kept body.
#[derive(Debug)]
pub(crate) struct ReplayBody {
    replay: Replay,
    /// The next of the kept chunks.
    next: usize,
    /// Which reading this is; an earlier one ends when a later one begins.
    reading: u32,
    trailers_read: bool,
}

/// A body from the client, and what was read of it.
#[derive(Debug)]
struct Kept {
    body: Body,
    chunks: Vec<Bytes>,
    trailers: Option<HeaderMap>,
    bytes: usize,
    limit: usize,
    room: ReplayRoom,
    /// Whether something is missing in what is kept.
    is_incomplete: bool,
    has_ended: bool,
    reading: u32,
    /// The task of the reading, which ends it when the next one begins.
    reader: Option<Waker>,
}

impl Replay {
    /// Keeps `body` if it fits.
    ///
    /// # Errors
    /// The body itself, if it is known to be larger than `limit` bytes.
    pub(crate) fn new(body: Body, limit: usize, room: &ReplayRoom) -> Result<Self, Body> {
        if body.size_hint().lower() > limit as u64 {
            return Err(body);
        }
        Ok(Self(Arc::new(Mutex::new(Kept {
            body,
            chunks: Vec::new(),
            trailers: None,
            bytes: 0,
            limit,
            room: room.clone(),
            is_incomplete: false,
            has_ended: false,
            reading: 0,
            reader: None,
        }))))
    }

    /// The body from its beginning, after which an earlier reading fails; `None` if it was too large to keep, or
    /// failed.
    pub(crate) fn body(&self) -> Option<ReplayBody> {
        let mut kept = self.0.lock();
        if kept.is_incomplete {
            return None;
        }
        kept.reading += 1;
        let (reading, earlier) = (kept.reading, kept.reader.take());
        drop(kept);
        if let Some(earlier) = earlier {
            earlier.wake();
        }
        Some(ReplayBody { replay: self.clone(), next: 0, reading, trailers_read: false })
    }

    /// Whether [`Self::body`] would give one now.
    pub(crate) fn is_replayable(&self) -> bool {
        !self.0.lock().is_incomplete
    }
}

impl ReplayBody {
    /// What this is a reading of.
    pub(super) fn replay(&self) -> &Replay {
        &self.replay
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut kept = self.replay.0.lock();
        if self.reading != kept.reading {
            return Poll::Ready(Some(Err(BodyError::Superseded)));
        }
        if let Some(chunk) = kept.chunks.get(self.next) {
            self.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(chunk.clone()))));
        }
        if kept.has_ended {
            if std::mem::replace(&mut self.trailers_read, true) {
                return Poll::Ready(None);
            }
            return Poll::Ready(kept.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        }
        let Poll::Ready(frame) = kept.body.poll_inner(cx) else {
            kept.read_by(cx.waker());
            return Poll::Pending;
        };
        match &frame {
            None => {
                kept.has_ended = true;
                self.trailers_read = true;
            }
            Some(Err(_)) => kept.forget(),
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    let data = data.clone();
                    self.next += usize::from(kept.keep(data));
                } else if let Some(trailers) = frame.trailers_ref() {
                    kept.trailers = Some(trailers.clone());
                    kept.has_ended = true;
                    self.trailers_read = true;
                }
                if kept.body.is_end_stream() {
                    kept.has_ended = true;
                }
            }
        }
        Poll::Ready(frame)
    }

    /// Ready when a later reading has begun.
    pub(super) fn poll_superseded(&self, cx: &Context<'_>) -> Poll<()> {
        let mut kept = self.replay.0.lock();
        if self.reading != kept.reading {
            return Poll::Ready(());
        }
        kept.read_by(cx.waker());
        Poll::Pending
    }

    pub(super) fn is_end_stream_inner(&self) -> bool {
        let kept = self.replay.0.lock();
        let at_end = kept.has_ended || kept.body.is_end_stream();
        at_end && self.next >= kept.chunks.len() && (self.trailers_read || kept.trailers.is_none())
    }

    pub(super) fn size_hint_inner(&self) -> SizeHint {
        let kept = self.replay.0.lock();
        let ahead: usize = kept.chunks.iter().skip(self.next).map(Bytes::len).sum();
        let ahead = ahead as u64;
        let rest = if kept.has_ended { SizeHint::with_exact(0) } else { kept.body.size_hint() };
        let mut hint = SizeHint::new();
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(ahead));
        }
        hint.set_lower(rest.lower().saturating_add(ahead));
        hint
    }
}

impl Kept {
    fn read_by(&mut self, task: &Waker) {
        match &mut self.reader {
            Some(reader) => reader.clone_from(task),
            None => self.reader = Some(task.clone()),
        }
    }

    /// Keeps a chunk; `false` if nothing is kept any more.
    fn keep(&mut self, chunk: Bytes) -> bool {
        if self.is_incomplete || chunk.is_empty() {
            return false;
        }
        let fits = self.bytes + chunk.len() <= self.limit && self.room.take(chunk.len());
        if !fits {
            self.forget();
            return false;
        }
        self.bytes += chunk.len();
        self.chunks.push(chunk);
        true
    }

    fn forget(&mut self) {
        self.is_incomplete = true;
        self.chunks = Vec::new();
        self.room.give_back(std::mem::take(&mut self.bytes));
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.room.give_back(self.bytes);
    }
}

impl ReplayRoom {
    fn take(&self, bytes: usize) -> bool {
        let fits = |taken: usize| taken.checked_add(bytes).filter(|sum| *sum <= WORKER_BYTES);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt as _;

    use super::*;

    fn body(chunks: &[&'static [u8]], trailers: bool) -> Body {
        let mut frames: Vec<_> = chunks.iter().map(|chunk| Frame::data(Bytes::from_static(chunk))).collect();
        if trailers {
            let mut map = HeaderMap::new();
            map.insert("grpc-status", "0".parse().unwrap());
            frames.push(Frame::trailers(map));
        }
        Body::frames(frames)
    }

    fn kept(body: Body, limit: usize) -> Replay {
        Replay::new(body, limit, &ReplayRoom::default()).unwrap()
    }

    async fn read(replay: &Replay) -> (Bytes, bool) {
        let collected = Body::Replay(replay.body().unwrap()).collect().await.unwrap();
        let has_trailers = collected.trailers().is_some();
        (collected.to_bytes(), has_trailers)
    }

    #[tokio::test]
    async fn a_body_is_the_same_again() {
        for trailers in [false, true] {
            let replay = kept(body(&[b"one", b"two"], trailers), 64);
            for _ in 0..3 {
                assert_eq!(read(&replay).await, (Bytes::from_static(b"onetwo"), trailers));
                assert_eq!(replay.body().unwrap().size_hint_inner().exact(), Some(6));
            }
        }
    }

    #[tokio::test]
    async fn an_attempt_that_read_a_part_is_followed_by_the_whole() {
        let replay = kept(body(&[b"one", b"two"], false), 64);
        let mut first = replay.body().unwrap();
        let frame = std::future::poll_fn(|cx| first.poll_inner(cx)).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "one");
        assert_eq!(read(&replay).await.0, "onetwo");
        let late = std::future::poll_fn(|cx| first.poll_inner(cx)).await.unwrap();
        assert!(matches!(late, Err(BodyError::Superseded)), "two readers would share the rest");
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_reading_ends_an_earlier_one_that_waits() {
        let (sender, body) = Body::channel();
        let replay = kept(body, 64);
        let mut first = replay.body().unwrap();
        let first = tokio::spawn(async move { std::future::poll_fn(|cx| first.poll_inner(cx)).await });
        // On this thread alone, so the other task waits for the client then.
        tokio::task::yield_now().await;
        let later = replay.body().unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(1), first).await.expect("it waits for the client");
        assert!(matches!(ended.unwrap(), Some(Err(BodyError::Superseded))));
        // The client sends nothing meanwhile.
        drop((sender, later));
    }

    #[tokio::test]
    async fn a_large_body_passes_once() {
        let (sender, unknown_length) = Body::channel();
        for chunk in [&b"one"[..], b"two"] {
            sender.send(Ok(Frame::data(Bytes::from_static(chunk)))).unwrap();
        }
        drop(sender);
        let replay = kept(unknown_length, 4);
        assert!(replay.is_replayable());
        assert_eq!(read(&replay).await.0, "onetwo");
        assert!(replay.body().is_none() && !replay.is_replayable());
        assert!(Replay::new(Body::Full(Bytes::from_static(b"12345")), 4, &ReplayRoom::default()).is_err());
    }

    #[tokio::test]
    async fn a_body_that_fails_is_not_sent_again() {
        let (sender, body) = Body::channel();
        let replay = kept(body, 64);
        sender.send(Err(BodyError::H2(h2::Reason::CANCEL.into()))).unwrap();
        assert!(Body::Replay(replay.body().unwrap()).collect().await.is_err());
        assert!(!replay.is_replayable());
    }

    #[tokio::test]
    async fn a_worker_keeps_a_bounded_number_of_bytes() {
        let room = ReplayRoom::default();
        assert!(room.take(WORKER_BYTES - 4));
        let first = Replay::new(body(&[b"one"], false), 64, &room).unwrap();
        assert_eq!(read(&first).await.0, "one");
        let second = Replay::new(body(&[b"two"], false), 64, &room).unwrap();
        assert_eq!(read(&second).await.0, "two");
        assert!(first.is_replayable() && !second.is_replayable(), "the second had no room");
        drop(first);
        assert_eq!(room.0.load(Ordering::Relaxed), WORKER_BYTES - 4, "what was kept is given back");
    }
}
