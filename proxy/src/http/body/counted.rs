//! A request's body as metrics see it: the sizes of its frames, and when it ended.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use tokio::time::Instant;

use super::{Body, error::BodyError};
use crate::metrics::{FrameBytes, Histogram};

/// A request's body whose frames are counted.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(super) body: Box<Body>,
    frames: Histogram<FrameBytes>,
    ended: Arc<Ended>,
}

/// How and when a request's body ended. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestEnd(Option<Arc<Ended>>);

#[derive(Debug, Default)]
struct Ended {
    at: OnceLock<Instant>,
    is_broken_off: AtomicBool,
}

impl Counted {
    /// Counts the frames of `body` as they are read. A request without a body costs nothing.
    pub(crate) fn wrap(body: &mut Body, frames: &Histogram<FrameBytes>) -> RequestEnd {
        if body.is_end_stream() {
            return RequestEnd(None);
        }
        let ended = Arc::<Ended>::default();
        let end = RequestEnd(Some(Arc::clone(&ended)));
        *body = Body::Counted(Self { body: Box::new(body.take()), frames: frames.clone(), ended });
        end
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(self.body.poll_inner(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.frames.count(data.len() as u64);
        }
        if matches!(frame, Some(Err(_))) {
            self.ended.is_broken_off.store(true, Ordering::Relaxed);
        }
        if !matches!(frame, Some(Ok(_))) || self.body.is_end_stream() {
            let _ = self.ended.at.set(Instant::now());
        }
        Poll::Ready(frame)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let _ = self.ended.at.set(Instant::now());
    }
}

impl RequestEnd {
    /// Whether the client broke off its request: what then becomes of the response is not the server's fault.
    pub(crate) fn is_broken_off(&self) -> bool {
        self.0.as_ref().is_some_and(|ended| ended.is_broken_off.load(Ordering::Relaxed))
    }

    /// How long ago the request ended, or `begun` if that was later; zero if it has not ended.
    pub(crate) fn elapsed(&self, begun: Instant) -> Duration {
        match &self.0 {
            None => begun.elapsed(),
            Some(ended) => ended.at.get().map_or(Duration::ZERO, |ended| (*ended).max(begun).elapsed()),
        }
    }
}
