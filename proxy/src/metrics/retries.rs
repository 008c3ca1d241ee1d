//! `outbound_http_route_retry_*`: how often requests are sent again, and why not.

use prometheus_client::{metrics::counter::Counter, registry::Registry};

use super::{Counters, Labels};

/// The families.
#[derive(Clone, Debug, Default)]
pub(crate) struct RetryFamilies {
    requests: Counters,
    successes: Counters,
    limit_exceeded: Counters,
    overflow: Counters,
}

/// The counters of one rule.
#[derive(Debug)]
pub(crate) struct RetryCounters {
    /// Requests that were sent again.
    pub(crate) requests: Counter,
    /// Responses to them that the route wants.
    pub(crate) successes: Counter,
    /// Responses that were delivered because the limit was reached.
    pub(crate) limit_exceeded: Counter,
    /// Responses that were delivered because the budget was empty.
    pub(crate) overflow: Counter,
}

impl RetryFamilies {
    /// Registers the families.
    pub(super) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("outbound_http_route_retry");
        registry.register("requests", "Requests that were sent again", self.requests.clone());
        registry.register(
            "successes",
            "Retried requests with a response that is not retryable",
            self.successes.clone(),
        );
        registry.register(
            "limit_exceeded",
            "Retryable responses that were delivered because the route's limit was reached",
            self.limit_exceeded.clone(),
        );
        registry.register(
            "overflow",
            "Retryable responses that were delivered because the retry budget was empty",
            self.overflow.clone(),
        );
    }

    /// The counters with these labels.
    pub(crate) fn counters(&self, labels: &Labels) -> RetryCounters {
        RetryCounters {
            requests: self.requests.get_or_create_owned(labels),
            successes: self.successes.get_or_create_owned(labels),
            limit_exceeded: self.limit_exceeded.get_or_create_owned(labels),
            overflow: self.overflow.get_or_create_owned(labels),
        }
    }
}
