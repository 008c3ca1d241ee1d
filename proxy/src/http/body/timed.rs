//! Enforces the deadlines of an attempt: while its response's head is awaited, and until the response's body has ended.
//!
//! [`Deadlines`] says what expires when; this module has the timer. Frames of the request's body count as progress from
//! whatever task sends them, so the deadlines are shared with it. A body has a task with its timer, because nothing
//! polls the body while its client does not read.

use std::{
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    task::AbortHandle,
    time::{Instant, Sleep, sleep_until},
};

use super::{Body, error::BodyError};
use crate::request::deadlines::{Deadlines, Expired};

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
    /// The body, and who waits for its next frame.
    Open(Body, Option<Waker>),
    /// Nothing: its time is over.
    Expired(Expired),
}

#[derive(Debug, Default)]
struct Timer(Option<Pin<Box<Sleep>>>);

impl Clock {
    /// Shares deadlines.
    pub(crate) fn new(deadlines: Deadlines) -> Self {
        Self(Arc::new(Mutex::new(Watched { deadlines, waiting: None, over: None, sending: None })))
    }

    /// The request's body, whose progress is reported. An empty body has been sent already.
    pub(crate) fn watch_request(&self, body: Body) -> Body {
        if body.is_end_stream() {
            self.0.lock().deadlines.request_sent(Instant::now());
            return body;
        }
        Body::Reporting(Box::new(Reporting { body, clock: self.clone() }))
    }

    /// Awaits the response's head.
    ///
    /// # Errors
    /// What expired before.
    pub(crate) async fn until_head<F: Future>(&self, response: F) -> Result<F::Output, Expired> {
        let mut timer = Timer::default();
        let mut response = std::pin::pin!(response);
        std::future::poll_fn(|cx| match response.as_mut().poll(cx) {
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
        let rest = Arc::new(Mutex::new(Rest::Open(body, None)));
        Body::Timed(Box::new(Timed { rest, clock: self, watchdog: None }))
    }

    /// Drops what is left of a response's body when something has expired, whether or not the client reads, and ends
    /// the request's: the stream is reset, and its place on the connection is free.
    async fn enforce(self, rest: Weak<Mutex<Rest>>) {
        let mut timer = Timer::default();
        let expired = std::future::poll_fn(|cx| timer.poll_expired(&self.0, cx)).await;
        let Some(rest) = rest.upgrade() else { return };
        let before = std::mem::replace(&mut *rest.lock(), Rest::Expired(expired));
        if let Rest::Open(_, Some(reader)) = before {
            reader.wake();
        }
        let mut watched = self.0.lock();
        watched.over = Some(expired);
        if let Some(sending) = watched.sending.take() {
            sending.wake();
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
        let (body, reader) = match &mut *rest {
            Rest::Open(body, reader) => (body, reader),
            Rest::Expired(expired) => return Poll::Ready(Some(Err(BodyError::Expired(*expired)))),
        };
        let polled = body.poll_inner(cx);
        let has_ended = match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.clock.0.lock().deadlines.frame(Instant::now());
                frame.is_trailers() || body.is_end_stream()
            }
            Poll::Ready(None | Some(Err(_))) => true,
            Poll::Pending => {
                *reader = Some(cx.waker().clone());
                false
            }
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
            Rest::Open(body, _) => body.is_end_stream(),
            Rest::Expired(_) => false,
        }
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match &*self.rest.lock() {
            Rest::Open(body, _) => body.size_hint(),
            Rest::Expired(_) => SizeHint::default(),
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
            std::task::ready!(sleep.as_mut().poll(cx));
        }
    }
}

#[cfg(test)]
mod tests;
