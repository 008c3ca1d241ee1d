//! Enforces the deadlines of an attempt: while its response's head is awaited, and until the response's body has ended.
//!
//! [`Deadlines`] says what expires when; this module has the timer. Frames of the request's body count as progress from
//! whatever task sends them, so the deadlines are shared with it. A body has a task with its timer, because nothing
//! polls the body while its client does not read.
//!
//! At a deadline that task reads what the server has sent. A response whose end is there came in time and is left to
//! its client, and a stream of which a frame waits for its client is not idle. Otherwise the response ends; the server
//! is at fault only if its client waited for more.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    task::{AbortHandle, yield_now},
    time::{Instant, Sleep, sleep_until},
};

use super::{Body, Peeked, error::BodyError};
use crate::request::deadlines::{Deadlines, Expired};

/// The most bytes that are read of a response at its deadline to find its end: more than a stream's default window, and
/// than the 512 KiB that the proxy holds of one over HTTP/1.
const MAX_READ: usize = 1024 * 1024;
/// What a small frame counts for among them: what h2 counts.
const SMALL_FRAME: usize = 256;

/// The deadlines of one attempt. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Arc<Mutex<Watched>>);

#[derive(Debug)]
struct Watched {
    deadlines: Deadlines,
    /// The task with the timer: the end of the request, which another task may send, begins the response's time.
    waiting: Option<Waker>,
    /// What has expired of the response's body.
    over: Option<Expired>,
    /// The task that sends the request's body.
    sending: Option<Waker>,
    /// Whether that task waits for the client.
    awaits_client: bool,
}

/// A request's body that reports its progress.
#[derive(Debug)]
pub(crate) struct Reporting {
    pub(super) body: Body,
    clock: Clock,
}

/// A response's body that ends when its time is over.
#[derive(Debug)]
pub(crate) struct Timed {
    rest: Arc<Mutex<Rest>>,
    clock: Clock,
    /// The task with the timer, from the first reading until the body has ended.
    watchdog: Option<AbortHandle>,
}

/// What is left of a response's body.
#[derive(Debug)]
enum Rest {
    Open(Open),
    /// Nothing: its time is over.
    Expired {
        expired: Expired,
        /// Whether its client waited for more.
        was_awaited: bool,
    },
}

/// A body, with the frames that were read at a deadline.
#[derive(Debug)]
struct Open {
    body: Peeked,
    /// Who waits for the next frame.
    reader: Option<Waker>,
}

/// What has come of a response until its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// All of it.
    End,
    /// A frame that its client has not read, so that its stream is not idle.
    Frame,
    /// Less than all.
    Part,
}

#[derive(Debug, Default)]
struct Timer(Option<Pin<Box<Sleep>>>);

impl Clock {
    /// Shares deadlines.
    pub(crate) fn new(deadlines: Deadlines) -> Self {
        Self(Arc::new(Mutex::new(Watched {
            deadlines,
            waiting: None,
            over: None,
            sending: None,
            awaits_client: false,
        })))
    }

    /// The request's body, whose progress is reported. An empty body has been sent already.
    pub(crate) fn watch_request(&self, body: Body) -> Body {
        if body.is_end_stream() {
            self.0.lock().deadlines.request_sent(Instant::now());
            return body;
        }
        Body::Reporting(Box::new(Reporting { body, clock: self.clone() }))
    }

    /// Whether the request goes on when its client does, so that its endpoint is not to blame for the time.
    pub(crate) fn awaits_client(&self) -> bool {
        self.0.lock().awaits_client
    }

    /// Awaits the response's head.
    ///
    /// # Errors
    /// What expired before.
    pub(crate) async fn until_head<F: Future>(&self, response: F) -> Result<F::Output, Expired> {
        let mut timer = Timer::default();
        let mut response = std::pin::pin!(response);
        poll_fn(|cx| match response.as_mut().poll(cx) {
            Poll::Ready(output) => {
                self.0.lock().deadlines.head_received(Instant::now());
                Poll::Ready(Ok(output))
            }
            Poll::Pending => timer.poll_expired(&self.0, cx).map(Err),
        })
        .await
    }

    /// The response's body under the deadlines, as far as any are left after its head.
    pub(crate) fn watch_response(self, body: Body) -> Body {
        if body.is_end_stream() || self.0.lock().deadlines.next().is_none() {
            return body;
        }
        let body = Peeked { frames: VecDeque::new(), rest: body };
        let rest = Arc::new(Mutex::new(Rest::Open(Open { body, reader: None })));
        Body::Timed(Box::new(Timed { rest, clock: self, watchdog: None }))
    }

    /// Ends a response's body at its deadline, whether or not the client reads, and the request's with it: the stream
    /// is reset, and its place on the connection is free.
    async fn enforce(self, rest: Weak<Mutex<Rest>>) {
        let mut timer = Timer::default();
        loop {
            let expired = poll_fn(|cx| timer.poll_expired(&self.0, cx)).await;
            let Some(rest) = rest.upgrade() else { return };
            match find(&rest, expired).await {
                Found::End => return,
                Found::Frame => self.0.lock().deadlines.frame(Instant::now()),
                Found::Part => {
                    // In this order: who is woken finds that it is over.
                    let reader = rest.lock().expire(expired);
                    let mut watched = self.0.lock();
                    watched.over = Some(expired);
                    reader.into_iter().chain(watched.sending.take()).for_each(Waker::wake);
                    return;
                }
            }
        }
    }
}

/// Reads what has come of a response. HTTP/1 takes bytes from its buffer only when the body is polled, by the task of
/// its connection, so that nothing more is there only when that task had its turn.
async fn find(rest: &Mutex<Rest>, expired: Expired) -> Found {
    let mut room = MAX_READ;
    let mut had_turn = false;
    loop {
        let before = room;
        let polled = poll_fn(|cx| Poll::Ready(rest.lock().read_on(expired, &mut room, cx))).await;
        match polled {
            Poll::Ready(found) => return found,
            Poll::Pending if had_turn && room == before => return Found::Part,
            Poll::Pending => yield_now().await,
        }
        had_turn = true;
    }
}

impl Rest {
    /// Reads what is there, as far as it matters to what has expired; pending if that is less than all.
    fn read_on(&mut self, expired: Expired, room: &mut usize, cx: &mut Context<'_>) -> Poll<Found> {
        let Self::Open(open) = self else { return Poll::Ready(Found::Part) };
        let found = ready!(open.read_on(expired, room, cx));
        if found != Found::Part
            && let Some(reader) = open.reader.take()
        {
            reader.wake();
        }
        Poll::Ready(found)
    }

    /// Drops what is left. Returns who waits for it.
    fn expire(&mut self, expired: Expired) -> Option<Waker> {
        let Self::Open(open) = self else { return None };
        let reader = open.reader.take();
        // Who waits has read all that came before the deadline.
        let was_awaited = reader.is_some();
        *self = Self::Expired { expired, was_awaited };
        reader
    }
}

impl Open {
    fn read_on(&mut self, expired: Expired, room: &mut usize, cx: &mut Context<'_>) -> Poll<Found> {
        let Peeked { frames, rest } = &mut self.body;
        loop {
            // More of what nobody reads is not taken: the server could send as much again.
            if expired == Expired::Idle && !frames.is_empty() {
                return Poll::Ready(Found::Frame);
            }
            let frame = ready!(rest.poll_inner(cx));
            let is_end = match &frame {
                Some(Ok(frame)) => frame.is_trailers() || rest.is_end_stream(),
                None | Some(Err(_)) => true,
            };
            let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()).map_or(0, Bytes::len);
            frames.extend(frame);
            if is_end {
                *rest = Body::Empty;
                return Poll::Ready(Found::End);
            }
            *room = room.saturating_sub(data.max(SMALL_FRAME));
            if *room == 0 {
                return Poll::Ready(Found::Part);
            }
        }
    }
}

impl Reporting {
    /// The deadlines that it reports to.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Ready when nothing more of the body is needed.
    pub(super) fn poll_superseded(&self, cx: &Context<'_>) -> Poll<()> {
        {
            let mut watched = self.clock.0.lock();
            if watched.over.is_some() {
                return Poll::Ready(());
            }
            watched.sending = Some(cx.waker().clone());
        }
        self.body.poll_superseded(cx)
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = self.body.poll_inner(cx);
        let now = Instant::now();
        let mut watched = self.clock.0.lock();
        if let Some(expired) = watched.over {
            return Poll::Ready(Some(Err(BodyError::Expired(expired))));
        }
        watched.awaits_client = polled.is_pending();
        let Poll::Ready(frame) = polled else {
            watched.sending = Some(cx.waker().clone());
            return Poll::Pending;
        };
        if matches!(frame, None | Some(Err(_))) || self.body.is_end_stream() {
            watched.deadlines.request_sent(now);
            if let Some(waiting) = watched.waiting.take() {
                waiting.wake();
            }
        } else {
            watched.deadlines.frame(now);
        }
        Poll::Ready(frame)
    }
}

impl Timed {
    #[expect(clippy::disallowed_methods, reason = "the task ends with the body")]
    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut rest = self.rest.lock();
        let Open { body, reader } = match &mut *rest {
            Rest::Open(open) => open,
            Rest::Expired { expired, was_awaited } => {
                let error = BodyError::Expired(*expired);
                return Poll::Ready(Some(Err(if *was_awaited { error } else { BodyError::Unread(Box::new(error)) })));
            }
        };
        let polled = body.poll_inner(cx);
        *reader = polled.is_pending().then(|| cx.waker().clone());
        let has_ended = match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.clock.0.lock().deadlines.frame(Instant::now());
                frame.is_trailers() || body.is_end_stream()
            }
            Poll::Ready(None | Some(Err(_))) => true,
            Poll::Pending => false,
        };
        drop(rest);
        if has_ended {
            self.forget_time();
        } else if self.watchdog.is_none() {
            let watchdog = self.clock.clone().enforce(Arc::downgrade(&self.rest));
            self.watchdog = Some(tokio::spawn(watchdog).abort_handle());
        }
        polled
    }

    pub(super) fn is_end_stream(&self) -> bool {
        match &*self.rest.lock() {
            Rest::Open(open) => open.body.is_end_stream(),
            Rest::Expired { .. } => false,
        }
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match &*self.rest.lock() {
            Rest::Open(open) => open.body.size_hint(),
            Rest::Expired { .. } => SizeHint::default(),
        }
    }

    fn forget_time(&mut self) {
        if let Some(watchdog) = self.watchdog.take() {
            watchdog.abort();
        }
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.forget_time();
    }
}

impl Timer {
    /// Ready when something has expired. Progress since the timer was set moves it.
    fn poll_expired(&mut self, watched: &Mutex<Watched>, cx: &mut Context<'_>) -> Poll<Expired> {
        loop {
            let next = {
                let mut watched = watched.lock();
                watched.waiting = Some(cx.waker().clone());
                watched.deadlines.next()
            };
            let Some((at, what)) = next else { return Poll::Pending };
            if Instant::now() >= at {
                return Poll::Ready(what);
            }
            let sleep = self.0.get_or_insert_with(|| Box::pin(sleep_until(at)));
            // An earlier wake-up does no harm; setting the timer at every frame would.
            if sleep.deadline() > at || sleep.is_elapsed() {
                sleep.as_mut().reset(at);
            }
            ready!(sleep.as_mut().poll(cx));
        }
    }
}

#[cfg(test)]
mod tests;
