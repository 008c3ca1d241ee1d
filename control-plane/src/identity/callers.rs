//! Limits on callers before their tokens cost a request to the Kubernetes API.
//!
//! Anybody in the cluster may ask for any identity with any token, and the address that this service sees is that of
//! its own pod's proxy. So refused tokens are counted by the identity that was asked for. Accepted tokens are not: a
//! rollout of a thousand pods of one ServiceAccount is as good as one pod.
//!
//! An identity with too many refused tokens is not locked out, because their sender need not be its owner: its
//! requests share a few permits with those of other such identities, and all other requests are unaffected.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};
use tonic::Status;

use crate::allowance::{Allowance, Rate};

/// Refused tokens for one identity before its requests share permits. A proxy whose token is refused asks again after a
/// second or more.
const REFUSED: Rate = Rate { burst: 20.0, per_second: 0.2 };
/// How many identities with refused tokens are remembered; above, unknown ones share permits too.
const REMEMBERED: usize = 4096;
/// Requests at a time of the identities with too many refused tokens.
const SHARED_PERMITS: usize = 4;
/// How long a request waits for such a permit.
const WAIT: Duration = Duration::from_secs(1);

/// Counts refused tokens, and admits requests.
pub(crate) struct Callers {
    refused: Mutex<HashMap<String, Allowance>>,
    shared: Semaphore,
    metrics: CallerMetrics,
}

/// Counters of refused requests.
#[derive(Clone, Default)]
pub(crate) struct CallerMetrics {
    limited: Counter,
}

impl CallerMetrics {
    /// Registers the counters.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "weft_identity_limited_requests",
            "Requests for certificates that were refused without a look at their tokens, because too many tokens for \
             the same identity had been refused",
            metrics.limited.clone(),
        );
        metrics
    }
}

impl Callers {
    /// With no refused token so far.
    pub(crate) fn new(metrics: CallerMetrics) -> Self {
        Self { refused: Mutex::default(), shared: Semaphore::new(SHARED_PERMITS), metrics }
    }

    /// Admits a request for `identity`; the permit is held while its token is reviewed.
    ///
    /// # Errors
    /// `ResourceExhausted` if too many tokens for the identity were refused and no shared permit becomes free.
    pub(super) async fn admit(&self, identity: &str) -> Result<Option<SemaphorePermit<'_>>, Status> {
        if self.is_trusted(identity) {
            return Ok(None);
        }
        match tokio::time::timeout(WAIT, self.shared.acquire()).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            _ => {
                self.metrics.limited.inc();
                Err(Status::resource_exhausted(format!(
                    "too many tokens for {identity} were refused; its requests wait for each other, try again"
                )))
            }
        }
    }

    /// Notes that the token of a request for `identity` was refused.
    pub(super) fn refused(&self, identity: &str) {
        let now = Instant::now();
        let mut refused = self.refused.lock();
        if !refused.contains_key(identity) {
            if refused.len() >= REMEMBERED {
                refused.retain(|_, allowance| !allowance.is_full(now));
            }
            if refused.len() >= REMEMBERED {
                return;
            }
        }
        refused.entry(identity.to_owned()).or_insert_with(|| Allowance::new(REFUSED, now)).take(now);
    }

    fn is_trusted(&self, identity: &str) -> bool {
        let now = Instant::now();
        let mut refused = self.refused.lock();
        match refused.get(identity) {
            Some(allowance) => allowance.has_some(now),
            None if refused.len() < REMEMBERED => true,
            None => {
                refused.retain(|_, allowance| !allowance.is_full(now));
                refused.len() < REMEMBERED
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    fn callers() -> Callers {
        Callers::new(CallerMetrics::default())
    }

    async fn is_limited(callers: &Callers, identity: &str) -> bool {
        match callers.admit(identity).await {
            Ok(_) => false,
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted);
                assert!(status.message().contains(identity), "{status}");
                true
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_identity_with_refused_tokens_shares_permits_and_others_do_not() {
        let callers = callers();
        for _ in 0..20 {
            assert!(callers.admit(WEB).await.unwrap().is_none(), "not limited yet");
            callers.refused(WEB);
        }
        let mut permits = Vec::new();
        for _ in 0..SHARED_PERMITS {
            permits.push(callers.admit(WEB).await.unwrap().expect("a shared permit"));
        }
        assert!(is_limited(&callers, WEB).await);
        assert_eq!(callers.metrics.limited.get(), 1);
        assert!(callers.admit("api.shop").await.unwrap().is_none(), "another identity");
        // It is not locked out.
        permits.pop();
        assert!(!is_limited(&callers, WEB).await);
        // In time it is like any other.
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(callers.admit(WEB).await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn accepted_tokens_count_for_nothing() {
        let callers = callers();
        for _ in 0..10_000 {
            assert!(callers.admit(WEB).await.unwrap().is_none());
        }
        assert!(callers.refused.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let callers = callers();
        for number in 0..2 * REMEMBERED {
            callers.refused(&format!("web-{number}.shop"));
        }
        assert_eq!(callers.refused.lock().len(), REMEMBERED);
        let permit = callers.admit("unknown.shop").await.unwrap();
        assert!(permit.is_some(), "an unknown identity shares permits while so many are refused");
        assert!(callers.admit("web-0.shop").await.unwrap().is_none(), "one refused token is not too many");
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(callers.admit("unknown.shop").await.unwrap().is_none());
        assert!(callers.refused.lock().is_empty());
    }
}
