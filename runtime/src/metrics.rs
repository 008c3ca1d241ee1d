//! The process's metrics registry, in the Prometheus text format.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{encoding::text::encode, metrics::gauge::Gauge, registry::Registry};

/// The content type of [`Metrics::encode`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The registry. Clones share it.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// Makes a registry that knows when the process started.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let started: Gauge = Gauge::default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        started.set(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        registry.register(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds",
            started,
        );
        Self { registry: Arc::new(Mutex::new(registry)) }
    }

    /// Registers families. Counters are given without `_total`: the encoder appends it.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// All metrics as text.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        encode(&mut text, &registry).expect("writing to a string does not fail");
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
