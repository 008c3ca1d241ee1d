//! A request's share of its endpoint's load, and what the balancer learns from how the request ends.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;

use super::{Balanced, breaker::Report};

/// A picked endpoint. It counts as in flight until it is finished or dropped.
pub(crate) struct InFlight {
    /// The endpoint, until nothing more is to be recorded.
    balanced: Option<Arc<Balanced>>,
    /// Whether it counts as load of the endpoint.
    is_load: bool,
    /// Whether the endpoint waits for a report of how the request ended.
    is_judged: bool,
    /// Whether the request probes an ejected endpoint.
    is_probe: bool,
    /// When it was picked; `None` once its latency is recorded.
    started: Option<Instant>,
    /// When the head of its response came.
    head: Option<Instant>,
}

impl InFlight {
    /// Picks an endpoint for a request.
    pub(super) fn start(balanced: Arc<Balanced>, now: Instant) -> Self {
        let (is_judged, is_probe) = (balanced.is_judged, balanced.picked(now));
        balanced.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { balanced: Some(balanced), is_load: true, is_judged, is_probe, started: Some(now), head: None }
    }

    /// Records how the request ended, if that changes anything.
    pub(crate) fn report(mut self, report: Report) {
        if let Some(balanced) = self.balanced.as_ref().filter(|_| self.is_judged) {
            balanced.report(&report);
        }
        self.is_judged = false;
    }

    /// The picked endpoint; `None` once finished.
    pub(crate) fn balanced(&self) -> Option<&Arc<Balanced>> {
        self.balanced.as_ref().filter(|_| self.is_load)
    }

    /// Records the latency while the connection continues: the endpoint stays loaded.
    pub(crate) fn measured(&mut self) {
        if let (Some(balanced), Some(started)) = (&self.balanced, self.started.take()) {
            let now = Instant::now();
            balanced.rtt.lock().add(now.duration_since(started), now);
        }
    }

    /// Notes that the head of the response is there. The load changes when its body begins.
    pub(crate) fn answered(&mut self) {
        self.head = Some(Instant::now());
    }

    /// Records the latency at the start of the answer, and ends the request in flight.
    pub(crate) fn finish(&mut self) {
        self.measured();
        self.unload();
        if !self.is_judged {
            self.balanced = None;
        }
    }

    fn unload(&mut self) {
        if let Some(balanced) = &self.balanced
            && std::mem::take(&mut self.is_load)
        {
            balanced.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(balanced) = &self.balanced else { return };
        if self.is_judged && self.is_probe {
            balanced.abandoned();
        }
        // Without an answer, as from an endpoint that hangs: its load would only fade, and attract more requests. A
        // stream whose head has come is answered, however long its body takes to begin.
        if let Some(started) = self.started {
            let now = Instant::now();
            balanced.rtt.lock().raise(self.head.unwrap_or(now).duration_since(started), now);
        }
        self.unload();
    }
}
