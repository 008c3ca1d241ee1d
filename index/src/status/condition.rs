//! Conditions with Linkerd's types, reasons and messages.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::{
    acceptance::Acceptance,
    records::{Key, Status, UNSET},
};
use weft_k8s_api::policy::route::{CONTROLLER, ParentReference, RouteParentStatus};

/// Whether the object is in force.
pub(super) const ACCEPTED: &str = "Accepted";
/// Whether every backend exists and is of a kind that can be one.
const RESOLVED_REFS: &str = "ResolvedRefs";
/// The longest message, in bytes: an object may have many problems.
const MAX_MESSAGE: usize = 1024;

/// A condition that has not been written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Saying {
    kind: &'static str,
    holds: bool,
    reason: &'static str,
    message: String,
}

impl Saying {
    fn new(kind: &'static str, holds: bool, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, holds, reason, message: message.into() }
    }

    pub(super) fn accepted() -> Self {
        Self::new(ACCEPTED, true, ACCEPTED, "")
    }

    /// What a parent says to a route.
    pub(super) fn acceptance(acceptance: Acceptance) -> Self {
        match acceptance {
            Acceptance::Accepted => Self::accepted(),
            Acceptance::NoMatchingParent(why) => Self::new(ACCEPTED, false, "NoMatchingParent", why),
            Acceptance::Conflicted(_) => Self::new(ACCEPTED, false, "RouteReasonConflicted", ""),
        }
    }

    /// Parts of the object have no meaning here, with the Gateway API's reason.
    pub(super) fn unsupported(problems: &[String]) -> Self {
        let mut message = problems.join("; ");
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        Self::new(ACCEPTED, false, "UnsupportedValue", message)
    }

    pub(super) fn no_matching_target() -> Self {
        Self::new(ACCEPTED, false, "NoMatchingTarget", "")
    }

    pub(super) fn rate_limit_already_exists() -> Self {
        Self::new(ACCEPTED, false, "RateLimitReasonAlreadyExists", "")
    }

    pub(super) fn network_overlap() -> Self {
        Self::new(ACCEPTED, false, "EgressReasonNetworkOverlap", "networks overlap with clusterNetworks")
    }

    pub(super) fn resolved_refs() -> Self {
        Self::new(RESOLVED_REFS, true, RESOLVED_REFS, "")
    }

    pub(super) fn backend_not_found() -> Self {
        Self::new(RESOLVED_REFS, false, "BackendNotFound", "")
    }

    /// As the Gateway API wants it, without a word about whether the Service exists.
    pub(super) fn ref_not_permitted(service: &Key) -> Self {
        let Key { namespace, name } = service;
        let message = format!("no ReferenceGrant of namespace {namespace} permits Service {name} as a backend");
        Self::new(RESOLVED_REFS, false, "RefNotPermitted", message)
    }

    pub(super) fn invalid_kind(message: &str) -> Self {
        Self::new(RESOLVED_REFS, false, "InvalidKind", message)
    }

    /// The condition, with the time since when one of the `known` statuses says the same about the same parent, or
    /// none.
    pub(super) fn since(self, known: [Option<&Status>; 2], parent: Option<&ParentReference>) -> Condition {
        let mut condition = Condition {
            last_transition_time: UNSET,
            message: self.message,
            observed_generation: None,
            reason: self.reason.to_owned(),
            status: if self.holds { "True" } else { "False" }.to_owned(),
            type_: self.kind.to_owned(),
        };
        let mut said = known.into_iter().flatten().flat_map(|status| conditions(status, parent));
        if let Some(said) = said.find(|said| says_the_same(said, &condition)) {
            condition.last_transition_time = said.last_transition_time.clone();
        }
        condition
    }
}

/// The conditions of a status that Weft has written about a parent, or about the object as a whole.
fn conditions<'a>(status: &'a Status, parent: Option<&ParentReference>) -> &'a [Condition] {
    match status {
        Status::Route(status) => {
            let ours = |entry: &&RouteParentStatus| is_ours(entry) && Some(&entry.parent_ref) == parent;
            status.parents.iter().find(ours).map_or(&[], RouteParentStatus::conditions)
        }
        Status::RateLimit(status) => &status.conditions,
        Status::EgressNetwork(status) => &status.conditions,
    }
}

/// Whether an entry was written by Weft, or by Linkerd before it.
pub(super) fn is_ours(entry: &RouteParentStatus) -> bool {
    entry.controller_name == CONTROLLER
}

/// Whether two conditions differ in nothing but the time.
fn says_the_same(one: &Condition, other: &Condition) -> bool {
    let parts = |condition: &Condition| {
        let Condition { type_, status, reason, message, observed_generation, .. } = condition.clone();
        (type_, status, reason, message, observed_generation)
    };
    parts(one) == parts(other)
}

/// Whether two lists of conditions differ in nothing but the times.
pub(super) fn say_the_same(one: &[Condition], other: &[Condition]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| says_the_same(one, other))
}
