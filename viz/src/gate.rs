//! Who may ask: TokenReview says who a caller is, SubjectAccessReview what it may.
//!
//! Both answers are kept for a short time, so that a dashboard that asks every second costs the API server two requests
//! a minute. A right that was taken away, or a token that was revoked, counts for at most [`KEEP`] more; an expired
//! token not at all.

use std::{
    collections::BTreeMap,
    hash::Hash,
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{HeaderMap, header};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use lru::LruCache;
use parking_lot::Mutex;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use tonic::Status;

use crate::metrics::VizMetrics;

/// Group of the virtual resources.
const GROUP: &str = "viz.weft.io";
/// How long an answer counts that admits somebody.
pub(crate) const KEEP: Duration = Duration::from_secs(60);
/// How long a refusal counts: somebody waits for a right that was just granted.
const KEEP_REFUSAL: Duration = Duration::from_secs(5);
/// How many answers of each kind are kept; the one that was not used for longest goes.
const KEPT: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// The largest token. The API server's own limit of all headers is 1 MiB; tokens of OpenID providers have some KiB.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// Deadline of a review.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a review may wait for others.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most reviews at a time: anybody who reaches the port may send tokens, and each costs the API server a request.
const MAX_REVIEWS: usize = 16;

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Access {
    /// `get` of `stats`.
    Stats,
    /// `create` of `taps`.
    Taps,
}

impl Access {
    fn verb(self) -> &'static str {
        match self {
            Self::Stats => "get",
            Self::Taps => "create",
        }
    }

    fn resource(self) -> &'static str {
        match self {
            Self::Stats => "stats",
            Self::Taps => "taps",
        }
    }
}

/// An authenticated Kubernetes user.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Caller {
    /// The user's name.
    pub(crate) user: String,
    uid: Option<String>,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
}

/// Decides who may ask.
#[derive(Debug)]
pub(crate) struct Gate {
    tokens: Api<TokenReview>,
    accesses: Api<SubjectAccessReview>,
    audience: String,
    turns: Semaphore,
    known: Kept<[u8; 32], Result<Arc<Caller>, String>>,
    allowed: Kept<(Arc<Caller>, Access, String), Result<(), String>>,
    metrics: VizMetrics,
}

/// Answers, each with the moment until which it counts.
type Kept<K, V> = Mutex<LruCache<K, (Instant, V)>>;

impl Gate {
    pub(crate) fn new(client: Client, audience: String, metrics: VizMetrics) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            accesses: Api::all(client),
            audience,
            turns: Semaphore::new(MAX_REVIEWS),
            known: Mutex::new(LruCache::new(KEPT)),
            allowed: Mutex::new(LruCache::new(KEPT)),
            metrics,
        }
    }

    /// Who sends a request.
    ///
    /// # Errors
    /// UNAUTHENTICATED without a token or with one that Kubernetes does not accept, UNAVAILABLE when it cannot be
    /// asked.
    pub(crate) async fn caller(&self, headers: &HeaderMap) -> Result<Arc<Caller>, Status> {
        let token = bearer(headers)?;
        let key: [u8; 32] = Sha256::digest(token).into();
        if let Some(known) = kept(&self.known, &key) {
            return known.map_err(Status::unauthenticated);
        }
        let reviewed = self.review(token).await?;
        let life = reviewed.as_ref().map_or(KEEP_REFUSAL, |_| remaining(token).map_or(KEEP, |rest| rest.min(KEEP)));
        self.known.lock().put(key, (Instant::now() + life, reviewed.clone()));
        reviewed.map_err(Status::unauthenticated)
    }

    /// Whether a caller may do this in each of the namespaces; the empty one means all.
    ///
    /// # Errors
    /// PERMISSION_DENIED names verb, resource and namespace; UNAVAILABLE when Kubernetes cannot be asked.
    pub(crate) async fn allow(
        &self,
        caller: &Arc<Caller>,
        access: Access,
        namespaces: &[String],
    ) -> Result<(), Status> {
        for namespace in namespaces {
            let key = (Arc::clone(caller), access, namespace.clone());
            let answer = match kept(&self.allowed, &key) {
                Some(answer) => answer,
                None => {
                    let answer = self.ask(caller, access, namespace).await?;
                    let life = if answer.is_ok() { KEEP } else { KEEP_REFUSAL };
                    self.allowed.lock().put(key, (Instant::now() + life, answer.clone()));
                    answer
                }
            };
            answer.map_err(Status::permission_denied)?;
        }
        Ok(())
    }

    /// Reviews a token: as one for the Kubernetes API, as kubeconfigs have it, then as one for this API alone.
    async fn review(&self, token: &str) -> Result<Result<Arc<Caller>, String>, Status> {
        let mut refusal = String::new();
        for audience in [None, Some(self.audience.as_str())] {
            let audiences = audience.map(|audience| vec![audience.to_owned()]);
            let spec = TokenReviewSpec { token: token.to_owned(), audiences };
            let review = TokenReview { spec, ..TokenReview::default() };
            let status = self.post("token", &self.tokens, &review).await?.status.unwrap_or_default();
            // An API server that does not know audiences returns none, and has then checked its own.
            let fits = audience.is_none_or(|wanted| status.audiences.iter().flatten().any(|checked| checked == wanted));
            match status.user {
                Some(user) if status.authenticated == Some(true) && fits => return Ok(Ok(Arc::new(caller(user)))),
                _ => refusal = status.error.filter(|error| !error.is_empty()).unwrap_or(refusal),
            }
        }
        let reason = if refusal.is_empty() { "Kubernetes does not accept the token".to_owned() } else { refusal };
        Ok(Err(format!(
            "{reason}; expected a token for the Kubernetes API, or one with the audience {}",
            self.audience
        )))
    }

    async fn ask(&self, caller: &Caller, access: Access, namespace: &str) -> Result<Result<(), String>, Status> {
        let attributes = ResourceAttributes {
            group: Some(GROUP.to_owned()),
            resource: Some(access.resource().to_owned()),
            verb: Some(access.verb().to_owned()),
            namespace: Some(namespace.to_owned()).filter(|namespace| !namespace.is_empty()),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: Some(caller.user.clone()),
            uid: caller.uid.clone(),
            groups: Some(caller.groups.clone()),
            extra: Some(caller.extra.clone()),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = self.post("access", &self.accesses, &review).await?.status.unwrap_or_default();
        if status.allowed && status.denied != Some(true) {
            return Ok(Ok(()));
        }
        let place = if namespace.is_empty() { "all namespaces".to_owned() } else { format!("namespace {namespace}") };
        let reason =
            status.reason.filter(|reason| !reason.is_empty()).map(|reason| format!(": {reason}")).unwrap_or_default();
        Ok(Err(format!("{} may not {} {}.{GROUP} in {place}{reason}", caller.user, access.verb(), access.resource())))
    }

    /// Sends a review in its turn.
    async fn post<R>(&self, kind: &'static str, api: &Api<R>, review: &R) -> Result<R, Status>
    where
        R: Clone + serde::Serialize + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let turn = timeout(QUEUE_TIMEOUT, self.turns.acquire()).await;
        let _turn = turn.map_err(|_| Status::resource_exhausted("too many callers wait for the Kubernetes API"))?;
        let answer = timeout(REVIEW_TIMEOUT, api.create(&PostParams::default(), review)).await;
        let answer = match answer {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        };
        self.metrics.reviewed(kind, if answer.is_ok() { "answered" } else { "failed" });
        answer.map_err(|error| {
            tracing::warn!(kind, error, "the Kubernetes API cannot be asked about a caller");
            Status::unavailable(format!("the Kubernetes API cannot be asked about the caller: {error}"))
        })
    }
}

/// The answer that is kept for a key, if it still counts.
fn kept<K: Hash + Eq, V: Clone>(cache: &Kept<K, V>, key: &K) -> Option<V> {
    let mut cache = cache.lock();
    match cache.get(key) {
        Some((until, answer)) if *until > Instant::now() => Some(answer.clone()),
        Some(_) => {
            cache.pop(key);
            None
        }
        None => None,
    }
}

fn bearer(headers: &HeaderMap) -> Result<&str, Status> {
    let expected = || Status::unauthenticated("expected the header authorization: Bearer TOKEN");
    let value = headers.get(header::AUTHORIZATION).ok_or_else(expected)?;
    let (scheme, token) = value.to_str().ok().and_then(|value| value.split_once(' ')).ok_or_else(expected)?;
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
        return Err(expected());
    }
    if token.len() > MAX_TOKEN_BYTES {
        return Err(Status::unauthenticated(format!("the token has more than {MAX_TOKEN_BYTES} bytes")));
    }
    Ok(token)
}

fn caller(user: UserInfo) -> Caller {
    Caller {
        user: user.username.unwrap_or_default(),
        uid: user.uid,
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    }
}

/// How long a token is valid still, if it is a JWT that says so. Kubernetes has verified it: this only shortens what is
/// kept.
fn remaining(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let payload = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let expiry = UNIX_EPOCH.checked_add(Duration::from_secs(serde_json::from_slice::<Claims>(&payload).ok()?.exp))?;
    Some(expiry.duration_since(SystemTime::now()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_token_is_a_bearer_token() {
        for (value, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc", Some("abc")),
            ("Basic abc", None),
            ("Bearer ", None),
            ("abc", None),
        ] {
            assert_eq!(bearer(&headers(value)).ok(), expected, "{value}");
        }
        assert!(bearer(&HeaderMap::new()).is_err());
        let long = format!("Bearer {}", "x".repeat(MAX_TOKEN_BYTES + 1));
        assert!(bearer(&headers(&long)).is_err());
    }

    #[test]
    fn a_token_is_not_kept_beyond_its_expiry() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let token = |claims: &str| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims));
        assert!(
            remaining(&token(&format!("{{\"exp\": {}}}", now + 30)))
                .is_some_and(|rest| rest <= Duration::from_secs(30))
        );
        assert_eq!(remaining(&token(&format!("{{\"exp\": {}}}", now - 1))), Some(Duration::ZERO));
        for other in [token("{}"), token("[]"), "abc".to_owned(), "a.b.c".to_owned(), token("{\"exp\": -1}")] {
            assert_eq!(remaining(&other), None, "{other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_kept_is_forgotten_in_time() {
        let cache: Kept<u8, u8> = Mutex::new(LruCache::new(KEPT));
        cache.lock().put(1, (Instant::now() + KEEP, 2));
        tokio::time::advance(KEEP - Duration::from_millis(1)).await;
        assert_eq!(kept(&cache, &1), Some(2));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(kept(&cache, &1), None);
        assert!(cache.lock().is_empty());
    }
}
