//! Fail-fast of one balancer: whether requests that find no endpoint fail at once, and since when. Owns its metrics and
//! log lines, whose level and words are linkerd2-proxy's (`linkerd/proxy/balance/queue/src/worker.rs`).

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::metrics::BalancerMetrics;

/// The state of one balancer. It begins when a request has waited for the timeout, and ends when an endpoint is reached
/// after its rest, or when a request finds one that had none.
pub(super) struct FailFast {
    service: String,
    timeout: Duration,
    is_active: AtomicBool,
    since: Mutex<Option<Instant>>,
}

impl FailFast {
    pub(super) fn new(service: String, timeout: Duration) -> Self {
        Self { service, timeout, is_active: AtomicBool::new(false), since: Mutex::new(None) }
    }

    /// Whether requests that find no endpoint fail at once.
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// A request has waited for too long.
    pub(super) fn enter(&self, metrics: &BalancerMetrics) {
        if self.is_active.swap(true, Ordering::Relaxed) {
            return;
        }
        *self.since.lock() = Some(Instant::now());
        metrics.gate_was_shut();
        let (service, timeout) = (&*self.service, self.timeout.as_secs_f64());
        tracing::info!(service, timeout, "Unavailable; entering failfast");
    }

    /// An endpoint is there again.
    pub(super) fn exit(&self, metrics: &BalancerMetrics) {
        if !self.is_active() || !self.is_active.swap(false, Ordering::Relaxed) {
            return;
        }
        metrics.gate_opened();
        let elapsed = self.since.lock().take().map(|since| since.elapsed().as_secs_f64());
        tracing::info!(service = &*self.service, elapsed, "Available; exited failfast");
    }
}
