//! TokenReview: the Kubernetes API returns the service account of a token.
//!
//! Rules and codes are Linkerd's (`linkerd2:controller/identity/validator.go`): an error of the review is
//! `InvalidArgument`, a token that is not authentic `FailedPrecondition`, an unavailable API `Internal`.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use tokio::sync::Semaphore;
use tonic::Status;
use weft_tls::tokens::ServiceAccount;

use crate::api::explain;

/// Deadline for a review; the proxy retries.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline for the check of permissions at start.
const ACCESS_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a review may wait for others.
pub(super) const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most reviews at a time: anybody may send tokens, and each costs a request to the API server. 32 allow thousands
/// a second.
pub(super) const MAX_REVIEWS: usize = 32;
/// Part of the API server's error about a token for other audiences.
const OTHER_AUDIENCES: &str = "token audiences";

/// Reviews tokens with the Kubernetes API.
#[derive(Clone)]
pub(crate) struct Reviewer {
    reviews: Api<TokenReview>,
    any_audience: bool,
    turns: Arc<Semaphore>,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reviewed {
    /// The service account.
    pub(crate) account: ServiceAccount,
    /// The uid of its object, if it has one.
    pub(crate) uid: Option<String>,
}

/// Why a review did not return a service account.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// The token is for other audiences, or the API server did not check them.
    Audiences,
    /// The token is invalid, or its user is not a service account.
    Invalid(String),
    /// The token is not authentic.
    NotAuthenticated,
}

impl Reviewer {
    /// Checks that this process may review tokens. With `any_audience`, a token of a ServiceAccount for the API server
    /// itself is as good as one for the mesh.
    ///
    /// # Errors
    /// When it may not, or the API server cannot be reached.
    pub(crate) async fn new(client: Client, any_audience: bool) -> anyhow::Result<Self> {
        let attributes = ResourceAttributes {
            group: Some("authentication.k8s.io".to_owned()),
            version: Some("v1".to_owned()),
            resource: Some("tokenreviews".to_owned()),
            verb: Some("create".to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
        let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
        let api = Api::<SelfSubjectAccessReview>::all(client.clone());
        let params = PostParams::default();
        let answer = tokio::time::timeout(ACCESS_TIMEOUT, api.create(&params, &review))
            .await
            .context("the Kubernetes API did not answer in time")?
            .context("ask the Kubernetes API whether tokens may be reviewed")?;
        let status = answer.status.unwrap_or_default();
        if !status.allowed {
            bail!(
                "this ServiceAccount may not create tokenreviews.authentication.k8s.io ({}), so no proxy could get a \
                 certificate; grant it by ClusterRole linkerd-<namespace>-identity, which helm upgrade weft-control-plane does",
                status
                    .reason
                    .filter(|reason| !reason.is_empty())
                    .unwrap_or_else(|| "no RBAC rule allows it".to_owned())
            );
        }
        Ok(Self { reviews: Api::all(client), any_audience, turns: Arc::new(Semaphore::new(MAX_REVIEWS)) })
    }

    /// Returns the service account of a token.
    ///
    /// # Errors
    /// With Linkerd's status codes.
    pub(super) async fn review(&self, token: &str, audience: &str) -> Result<Reviewed, Status> {
        let turn = tokio::time::timeout(QUEUE_TIMEOUT, self.turns.acquire()).await;
        let _turn = turn.map_err(|_| Status::resource_exhausted("too many tokens wait for a review"))?;
        let mut refused = match self.ask(token, Some(audience)).await? {
            Ok(reviewed) => return Ok(reviewed),
            Err(refused) => refused,
        };
        if refused == Refusal::Audiences && self.any_audience {
            refused = match self.ask(token, None).await? {
                Ok(reviewed) => return Ok(reviewed),
                Err(refused) => refused,
            };
        }
        Err(match refused {
            Refusal::NotAuthenticated => Status::failed_precondition("authentication token could not be authenticated"),
            Refusal::Invalid(reason) => Status::invalid_argument(reason),
            Refusal::Audiences => {
                Status::invalid_argument(format!("the token is not made for the audience {audience}"))
            }
        })
    }

    async fn ask(&self, token: &str, audience: Option<&str>) -> Result<Result<Reviewed, Refusal>, Status> {
        let audiences = audience.map(|audience| vec![audience.to_owned()]);
        let spec = TokenReviewSpec { token: token.to_owned(), audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        let params = PostParams::default();
        let unavailable = |error: &str| Status::internal(format!("tokens cannot be reviewed: {error}"));
        let answer = tokio::time::timeout(REVIEW_TIMEOUT, self.reviews.create(&params, &review))
            .await
            .map_err(|_| unavailable("no answer from the Kubernetes API in time"))?
            .map_err(|error| unavailable(&explain(&error)))?;
        Ok(verdict(&answer.status.unwrap_or_default(), audience))
    }
}

fn verdict(status: &TokenReviewStatus, audience: Option<&str>) -> Result<Reviewed, Refusal> {
    let error = status.error.as_deref().unwrap_or_default();
    if error.contains(OTHER_AUDIENCES) {
        return Err(Refusal::Audiences);
    }
    if !error.is_empty() {
        return Err(Refusal::Invalid(error.to_owned()));
    }
    if status.authenticated != Some(true) {
        return Err(Refusal::NotAuthenticated);
    }
    // An API server that does not support audiences returns none, and has then checked its own (TokenReview's
    // documentation).
    if audience.is_some_and(|audience| !status.audiences.iter().flatten().any(|checked| checked == audience)) {
        return Err(Refusal::Audiences);
    }
    let user = status.user.clone().unwrap_or_default();
    let username = user.username.unwrap_or_default();
    match username.split(':').collect::<Vec<_>>()[..] {
        ["system", "serviceaccount", namespace, name] => Ok(Reviewed {
            account: ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() },
            uid: user.uid,
        }),
        _ => Err(Refusal::Invalid(format!(
            "the token is of {username:?}, expected system:serviceaccount:NAMESPACE:NAME"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn verdicts() {
        let web = || {
            let account = ServiceAccount { namespace: "shop".to_owned(), name: "web".to_owned() };
            Ok(Reviewed { account, uid: Some("u".to_owned()) })
        };
        let checked = |name: &str, audiences: &[&str]| json!({"authenticated": true, "user": {"username": name, "uid": "u"}, "audiences": audiences});
        let user = |name: &str| checked(name, &["mesh"]);
        let invalid = |part: &str| Err(Refusal::Invalid(part.to_owned()));
        for (status, expected) in [
            (user("system:serviceaccount:shop:web"), web()),
            (checked("system:serviceaccount:shop:web", &["api", "mesh"]), web()),
            (checked("system:serviceaccount:shop:web", &["api"]), Err(Refusal::Audiences)),
            (checked("system:serviceaccount:shop:web", &[]), Err(Refusal::Audiences)),
            (json!({"authenticated": false}), Err(Refusal::NotAuthenticated)),
            (json!({}), Err(Refusal::NotAuthenticated)),
            (json!({"error": "invalid bearer token"}), invalid("invalid bearer token")),
            (json!({"error": "[invalid bearer token, token audiences [x] is invalid]"}), Err(Refusal::Audiences)),
            (user("jane"), invalid("the token is of \"jane\", expected system:serviceaccount:NAMESPACE:NAME")),
            (
                user("system:node:shop:web"),
                invalid("the token is of \"system:node:shop:web\", expected system:serviceaccount:NAMESPACE:NAME"),
            ),
        ] {
            let got = verdict(&serde_json::from_value(status.clone()).unwrap(), Some("mesh"));
            assert_eq!(got, expected, "{status}");
        }
        let unchecked = serde_json::from_value(checked("system:serviceaccount:shop:web", &[])).unwrap();
        assert_eq!(verdict(&unchecked, None), web(), "if an operator allows every audience");
    }
}
