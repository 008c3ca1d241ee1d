//! Tap: watching requests while they pass. `linkerd viz tap` and `top` use it.
//!
//! ```text
//! Observe ─> Taps::open ─> Match                          (tap_server: who may tap)
//! request ─> Taps::begin ─> Tapped: responded, data, end ─> events, up to 400 that wait ─> stream of the client
//! ```
//!
//! Owns the open taps and what they see. The request path only reports: while nobody taps, that is one relaxed load for
//! a request, and a tap whose client does not read loses events instead of delaying a request. Refuses to know where
//! requests go.

mod event;
pub(crate) mod matching;
mod subject;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use h2::Reason;
use http::{HeaderMap, Request, Response};
use parking_lot::RwLock;
use tokio::{sync::mpsc, time::Instant};
use weft_proto::linkerd::tap::{TapEvent, eos, tap_event::http::StreamId};

use crate::http::body::End;
pub(crate) use matching::Match;
pub(crate) use subject::{Subject, without_prefix};

/// The most taps at a time. Linkerd's tools open one for each command; a dashboard, one for each view.
const MAX_TAPS: usize = 16;
/// Events of one tap that wait for its client: Linkerd's number. With the bounds of [`event`] all taps hold 200 MiB at
/// the very most; an event is rarely above 1 KiB.
const BUFFERED_EVENTS: usize = 400;

/// The open taps.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    is_tapped: AtomicBool,
    open: RwLock<Arc<[Arc<Tap>]>>,
    next: AtomicU32,
}

/// One client's tap.
struct Tap {
    /// Distinguishes the streams of this tap from those of others.
    base: u32,
    matches: Match,
    /// The number of requests after which it is done.
    limit: u64,
    with_headers: bool,
    taken: AtomicU64,
    dropped: AtomicU64,
    events: mpsc::Sender<TapEvent>,
}

/// A request that taps see, if any does. Dropping it before its end reports that it was cancelled.
#[derive(Debug, Default)]
pub(crate) struct Tapped(Option<Box<Observation>>);

#[derive(Debug)]
struct Observation {
    taps: Vec<(Arc<Tap>, StreamId)>,
    event: TapEvent,
    began: Instant,
    responded: Option<Instant>,
    response_bytes: u64,
    grpc_status: Option<u32>,
}

impl Taps {
    /// Opens a tap; `None` if there are too many. Its events end when it is closed or has seen `limit` requests, and
    /// those it saw have ended.
    pub(crate) fn open(
        &self,
        matches: Match,
        limit: u32,
        with_headers: bool,
    ) -> Option<(u32, mpsc::Receiver<TapEvent>)> {
        let mut open = self.open.write();
        if open.len() >= MAX_TAPS {
            return None;
        }
        let base = self.next.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = mpsc::channel(BUFFERED_EVENTS);
        let tap = Tap {
            base,
            matches,
            limit: limit.into(),
            with_headers,
            taken: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            events,
        };
        *open = open.iter().cloned().chain([Arc::new(tap)]).collect();
        self.is_tapped.store(true, Ordering::Relaxed);
        Some((base, receiver))
    }

    /// Closes a tap: it sees no more requests.
    pub(crate) fn close(&self, base: u32) {
        let mut open = self.open.write();
        *open = open.iter().filter(|tap| tap.base != base).cloned().collect();
        self.is_tapped.store(!open.is_empty(), Ordering::Relaxed);
    }

    /// Reports a request that is about to be sent. `subject` is only made if somebody taps.
    pub(crate) fn begin<B>(&self, request: &Request<B>, subject: impl FnOnce() -> Subject) -> Tapped {
        if !self.is_tapped.load(Ordering::Relaxed) {
            return Tapped::default();
        }
        self.observe(request, &subject())
    }

    #[cold]
    fn observe<B>(&self, request: &Request<B>, subject: &Subject) -> Tapped {
        let open = Arc::clone(&self.open.read());
        let mut event = None;
        let mut taps = Vec::new();
        for tap in open.iter().filter(|tap| tap.matches.matches(request, subject)) {
            let stream = tap.taken.fetch_add(1, Ordering::Relaxed);
            if stream + 1 >= tap.limit {
                self.close(tap.base);
            }
            if stream >= tap.limit {
                continue;
            }
            let id = StreamId { base: tap.base, stream };
            let event = event.get_or_insert_with(|| event::base(subject));
            // Without its beginning the rest of a request means nothing.
            if tap.send(event::of(event, event::request(id, request, tap.with_headers))) {
                taps.push((Arc::clone(tap), id));
            }
        }
        let Some(event) = event.filter(|_| !taps.is_empty()) else { return Tapped::default() };
        let observation =
            Observation { taps, event, began: Instant::now(), responded: None, response_bytes: 0, grpc_status: None };
        Tapped(Some(Box::new(observation)))
    }
}

impl Tap {
    /// Whether the event was taken.
    fn send(&self, event: TapEvent) -> bool {
        let is_sent = self.events.try_send(event);
        if let Err(mpsc::error::TrySendError::Full(_)) = is_sent {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        is_sent.is_ok()
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("base", &self.base).field("matches", &self.matches).finish_non_exhaustive()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let (requests, dropped) =
            (self.taken.load(Ordering::Relaxed).min(self.limit), self.dropped.load(Ordering::Relaxed));
        tracing::debug!(requests, dropped, "a tap has ended");
    }
}

impl Tapped {
    /// The response has begun.
    pub(crate) fn responded<B>(&mut self, response: &Response<B>) {
        let Some(observation) = &mut self.0 else { return };
        let now = Instant::now();
        observation.responded = Some(now);
        observation.grpc_status = event::grpc_status(response.headers());
        for (tap, id) in &observation.taps {
            let event = event::response(*id, now - observation.began, response, tap.with_headers);
            tap.send(event::of(&observation.event, event));
        }
    }

    /// A part of the response's body passes.
    pub(crate) fn data(&mut self, bytes: usize) {
        if let Some(observation) = &mut self.0 {
            observation.response_bytes = observation.response_bytes.saturating_add(bytes as u64);
        }
    }

    /// The response has ended.
    pub(crate) fn ended(mut self, end: End<'_>) {
        let Some(observation) = self.0.take() else { return };
        let reset = |reason: Reason| Some(eos::End::ResetErrorCode(reason.into()));
        match end {
            End::Whole(trailers) => {
                let status = trailers.and_then(event::grpc_status).or(observation.grpc_status);
                observation.end(status.map(eos::End::GrpcStatusCode), trailers);
            }
            End::Failed(_) => observation.end(reset(Reason::INTERNAL_ERROR), None),
            End::Dropped => observation.end(reset(Reason::CANCEL), None),
        }
    }

    /// There is no response.
    pub(crate) fn reset(mut self, reason: Reason) {
        if let Some(observation) = self.0.take() {
            observation.end(Some(eos::End::ResetErrorCode(reason.into())), None);
        }
    }
}

impl Observation {
    fn end(&self, end: Option<eos::End>, trailers: Option<&HeaderMap>) {
        let now = Instant::now();
        for (tap, id) in &self.taps {
            let since_response = self.responded.map(|responded| now - responded);
            let trailers = trailers.filter(|_| tap.with_headers);
            let event = event::end(*id, now - self.began, since_response, self.response_bytes, end, trailers);
            tap.send(event::of(&self.event, event));
        }
    }
}

impl Drop for Tapped {
    fn drop(&mut self) {
        if let Some(observation) = self.0.take() {
            observation.end(Some(eos::End::ResetErrorCode(Reason::CANCEL.into())), None);
        }
    }
}

#[cfg(test)]
mod tests;
