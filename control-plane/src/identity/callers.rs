//! Limits on callers before their tokens cost a request to the Kubernetes API.
//!
//! Anybody in the cluster may ask for any identity with any token, and the address that this service sees is that of
//! its own pod's proxy. So what counts is the identity that a request asks for. Requests take turns:
//!
//! | Identity | Turns of the reviewer |
//! |---|---|
//! | a token for it was accepted before | [`OWN_PERMITS`] for each, of those that the others leave |
//! | unknown | [`UNKNOWN_PERMITS`] together: to choose new names costs nothing |
//! | too many tokens for it were refused | [`REFUSED_PERMITS`] together, before or after others were accepted |
//!
//! Accepted tokens are not counted: a rollout of a thousand pods of one ServiceAccount is as good as one pod, and takes
//! less than a second. But one proxy may send its token as often as it likes, so an identity's requests wait for each
//! other. An identity with too many refused tokens is not locked out, because their sender need not be its owner.

use std::{collections::HashMap, num::NonZeroUsize, sync::Arc, time::Duration};

use lru::LruCache;
use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tonic::Status;

use super::review::{MAX_REVIEWS, QUEUE_TIMEOUT};
use crate::allowance::{Allowance, Rate};

/// Refused tokens for one identity before its requests share permits. A proxy whose token is refused asks again after a
/// second or more.
const REFUSED: Rate = Rate { burst: 20.0, per_second: 0.2 };
/// How many identities with refused tokens are remembered. Those that are closest to being forgiven go first, so that
/// a flood of new names replaces itself.
const REMEMBERED_REFUSED: usize = 4096;
/// How many identities with accepted tokens are remembered; 5 MiB. The oldest go first, and are unknown again.
const REMEMBERED_ACCEPTED: NonZeroUsize = NonZeroUsize::new(16_384).expect("not zero");
/// Requests at a time of the identities with too many refused tokens.
const REFUSED_PERMITS: usize = 4;
/// Requests at a time of unknown identities. With a review of 2 ms they are 10,000 a second.
const UNKNOWN_PERMITS: usize = 20;
/// Requests at a time of one identity with accepted tokens. With a review of 5 ms they are 1,400 a second.
const OWN_PERMITS: usize = 7;
/// How long a request of an identity with too many refused tokens waits for a permit.
const WAIT: Duration = Duration::from_secs(1);

const _: () = assert!(
    REFUSED_PERMITS + UNKNOWN_PERMITS + OWN_PERMITS < MAX_REVIEWS,
    "other identities with certificates need turns"
);

/// Counts refused tokens, and admits requests.
pub(crate) struct Callers {
    seen: Mutex<Seen>,
    refused: Arc<Semaphore>,
    unknown: Arc<Semaphore>,
    metrics: CallerMetrics,
}

/// What the tokens of earlier requests say about identities.
struct Seen {
    refused: HashMap<String, Allowance>,
    /// The permits of each identity with accepted tokens, in the order of its last one.
    accepted: LruCache<String, Arc<Semaphore>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Accepted,
    Unknown,
    Refused,
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
             the same identity had been refused, or too many requests for unknown identities or for the same identity \
             waited",
            metrics.limited.clone(),
        );
        metrics
    }
}

impl Callers {
    /// With no token so far.
    pub(crate) fn new(metrics: CallerMetrics) -> Self {
        let [refused, unknown] = [REFUSED_PERMITS, UNKNOWN_PERMITS].map(|permits| Arc::new(Semaphore::new(permits)));
        let seen = Seen { refused: HashMap::new(), accepted: LruCache::new(REMEMBERED_ACCEPTED) };
        Self { seen: Mutex::new(seen), refused, unknown, metrics }
    }

    /// Admits a request for `identity`; the permit is held while its token is reviewed.
    ///
    /// # Errors
    /// `ResourceExhausted` if none becomes free.
    pub(super) async fn admit(&self, identity: &str) -> Result<OwnedSemaphorePermit, Status> {
        let (standing, permits) = {
            let seen = self.seen.lock();
            match seen.standing(identity, Instant::now()) {
                Standing::Refused => (Standing::Refused, self.refused.clone()),
                standing => (standing, seen.accepted.peek(identity).unwrap_or(&self.unknown).clone()),
            }
        };
        let wait = if standing == Standing::Refused { WAIT } else { QUEUE_TIMEOUT };
        if let Ok(Ok(permit)) = tokio::time::timeout(wait, permits.acquire_owned()).await {
            return Ok(permit);
        }
        self.metrics.limited.inc();
        let reason = match standing {
            Standing::Refused => {
                format!("too many tokens for {identity} were refused; its requests wait for each other")
            }
            Standing::Unknown => format!("{identity} waits with too many other identities without a certificate"),
            Standing::Accepted => format!("too many requests for {identity} wait for each other"),
        };
        Err(Status::resource_exhausted(format!("{reason}, try again")))
    }

    /// Notes that the token of a request for `identity` was refused.
    pub(super) fn refused(&self, identity: &str) {
        self.seen.lock().refused(identity, Instant::now());
    }

    /// Notes that the token of a request for `identity` was accepted.
    pub(super) fn accepted(&self, identity: &str) {
        let permits = || Arc::new(Semaphore::new(OWN_PERMITS));
        self.seen.lock().accepted.get_or_insert_ref(identity, permits);
    }
}

impl Seen {
    fn standing(&self, identity: &str, now: Instant) -> Standing {
        if self.refused.get(identity).is_some_and(|allowance| !allowance.has_some(now)) {
            return Standing::Refused;
        }
        if self.accepted.contains(identity) { Standing::Accepted } else { Standing::Unknown }
    }

    fn refused(&mut self, identity: &str, now: Instant) {
        if !self.refused.contains_key(identity) && self.refused.len() >= REMEMBERED_REFUSED {
            self.refused.retain(|_, allowance| !allowance.is_full(now));
            if self.refused.len() >= REMEMBERED_REFUSED {
                let left = |allowance: &Allowance| allowance.left(now);
                let most = self.refused.iter().max_by(|(_, a), (_, b)| left(a).total_cmp(&left(b)));
                if let Some(most) = most.map(|(identity, _)| identity.clone()) {
                    self.refused.remove(&most);
                }
            }
        }
        self.refused.entry(identity.to_owned()).or_insert_with(|| Allowance::new(REFUSED, now)).take(now);
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

    fn refuse_too_many(callers: &Callers, identity: &str) {
        for _ in 0..20 {
            callers.refused(identity);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_identity_with_refused_tokens_shares_permits_and_others_do_not() {
        let callers = callers();
        callers.accepted(WEB);
        for _ in 0..20 {
            drop(callers.admit(WEB).await.expect("not limited yet"));
            callers.refused(WEB);
        }
        let mut permits = Vec::new();
        for _ in 0..REFUSED_PERMITS {
            permits.push(callers.admit(WEB).await.expect("a shared permit"));
        }
        assert!(is_limited(&callers, WEB).await);
        assert_eq!(callers.metrics.limited.get(), 1);
        assert!(!is_limited(&callers, "api.shop").await, "another identity");
        // It is not locked out.
        permits.pop();
        permits.push(callers.admit(WEB).await.unwrap());
        // In time it is like any other.
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(!is_limited(&callers, WEB).await);
    }

    #[tokio::test(start_paused = true)]
    async fn accepted_tokens_count_for_nothing() {
        let callers = callers();
        for _ in 0..10_000 {
            callers.accepted(WEB);
            assert!(!is_limited(&callers, WEB).await);
        }
        assert!(callers.seen.lock().refused.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn one_identity_with_a_certificate_leaves_turns_to_others() {
        let callers = callers();
        callers.accepted(WEB);
        callers.accepted("api.shop");
        let mut permits = Vec::new();
        for _ in 0..OWN_PERMITS {
            permits.push(callers.admit(WEB).await.unwrap());
        }
        assert!(is_limited(&callers, WEB).await);
        assert_eq!(callers.metrics.limited.get(), 1);
        assert!(!is_limited(&callers, "api.shop").await, "another identity with a certificate");
        assert!(!is_limited(&callers, "new.shop").await, "an unknown identity");
        permits.pop();
        assert!(!is_limited(&callers, WEB).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_pods_of_one_identity_may_start_together() {
        let callers = callers();
        callers.accepted(WEB);
        let review = async || {
            let permit = callers.admit(WEB).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            permit.map(drop)
        };
        let reviewed = futures::future::join_all((0..1000).map(|_| review())).await;
        assert!(reviewed.iter().all(Result::is_ok));
    }

    #[tokio::test(start_paused = true)]
    async fn identities_do_not_wait_for_those_with_refused_tokens_however_many() {
        let callers = callers();
        callers.accepted(WEB);
        for number in 0..REMEMBERED_REFUSED {
            refuse_too_many(&callers, &format!("web-{number}.shop"));
        }
        let mut permits = Vec::new();
        for number in 0..REFUSED_PERMITS {
            permits.push(callers.admit(&format!("web-{number}.shop")).await.expect("a shared permit"));
        }
        assert!(is_limited(&callers, "web-9.shop").await);
        assert!(!is_limited(&callers, "new.shop").await, "an unknown identity");
        assert!(!is_limited(&callers, WEB).await, "an identity with a certificate");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_for_unknown_identities_take_no_turn_of_those_with_certificates() {
        let callers = callers();
        callers.accepted(WEB);
        let mut permits = Vec::new();
        for number in 0..UNKNOWN_PERMITS {
            permits.push(callers.admit(&format!("new-{number}.shop")).await.expect("a permit"));
        }
        assert!(is_limited(&callers, "new.shop").await);
        assert!(!is_limited(&callers, WEB).await);
        // Its first certificate makes it one of them.
        permits.pop();
        permits.push(callers.admit("new.shop").await.unwrap());
        callers.accepted("new.shop");
        assert!(!is_limited(&callers, "new.shop").await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let callers = callers();
        refuse_too_many(&callers, WEB);
        for number in 0..2 * REMEMBERED_REFUSED {
            callers.refused(&format!("web-{number}.shop"));
        }
        assert_eq!(callers.seen.lock().refused.len(), REMEMBERED_REFUSED);
        let standing = |identity: &str| callers.seen.lock().standing(identity, Instant::now());
        assert_eq!(standing(WEB), Standing::Refused, "names with one refused token do not push it out");
        assert_eq!(standing("web-0.shop"), Standing::Unknown, "one refused token is not too many");
        tokio::time::advance(Duration::from_secs(3600)).await;
        callers.refused("last.shop");
        assert_eq!(callers.seen.lock().refused.len(), 1);
        callers.accepted("again.shop");
        callers.accepted("first.shop");
        for number in 0..REMEMBERED_ACCEPTED.get() - 1 {
            callers.accepted(&format!("api-{number}.shop"));
            callers.accepted("again.shop");
        }
        assert_eq!(callers.seen.lock().accepted.len(), REMEMBERED_ACCEPTED.get());
        assert_eq!(standing("first.shop"), Standing::Unknown, "the oldest");
        assert_eq!(standing("again.shop"), Standing::Accepted);
        assert_eq!(standing("api-0.shop"), Standing::Accepted);
    }
}
