//! A request's share of its endpoint's load, and what the balancer learns from how the request ends.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;

use super::{Balanced, breaker::Report};

/// A picked endpoint. It counts as in flight until it is finished or dropped.
pub(crate) struct InFlight {
    balanced: Option<Arc<Balanced>>,
    /// The endpoint, if it waits for a report of how the request ended.
    judged: Option<Arc<Balanced>>,
    /// When it was picked; `None` once its latency is recorded.
    started: Option<Instant>,
    /// When the head of its response came.
    head: Option<Instant>,
}

impl InFlight {
    pub(super) fn start(balanced: Arc<Balanced>, now: Instant) -> Self {
        balanced.in_flight.fetch_add(1, Ordering::Relaxed);
        let judged = balanced.is_judged.then(|| Arc::clone(&balanced));
        Self { balanced: Some(balanced), judged, started: Some(now), head: None }
    }

    /// Records how the request ended, if that changes anything.
    pub(crate) fn report(mut self, report: Report) {
        if let Some(judged) = self.judged.take() {
            judged.report(&report);
        }
    }

    /// The picked endpoint; `None` once finished.
    pub(crate) fn balanced(&self) -> Option<&Arc<Balanced>> {
        self.balanced.as_ref()
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
        if let Some(balanced) = self.balanced.take() {
            balanced.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(judged) = self.judged.take() {
            judged.abandoned();
        }
        if let Some(balanced) = self.balanced.take() {
            // Without an answer, as from an endpoint that hangs: its load would only fade, and attract more requests. A
            // stream whose head has come is answered, however long its body takes to begin.
            if let Some(started) = self.started {
                let now = Instant::now();
                balanced.rtt.lock().raise(self.head.unwrap_or(now).duration_since(started), now);
            }
            balanced.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
