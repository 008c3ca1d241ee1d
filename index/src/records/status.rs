//! What the statuses of objects say, of the kinds whose statuses Weft writes.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use weft_k8s_api::{
    manifest::Object,
    policy::{
        EgressNetworkStatus, HttpLocalRateLimitPolicyStatus,
        route::{CONTROLLER, RouteStatus, RouteView},
    },
};

/// The status of an object of a kind whose status Weft writes.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// Of a route of any kind.
    Route(RouteStatus),
    /// Of an HTTPLocalRateLimitPolicy.
    RateLimit(HttpLocalRateLimitPolicyStatus),
    /// Of an EgressNetwork.
    EgressNetwork(EgressNetworkStatus),
}

impl Status {
    /// What the status of an object says, if Weft may have something to say there.
    pub(crate) fn of(object: &Object) -> Option<Self> {
        match object {
            Object::HttpRoute(route) => said_of_route(route.view()),
            Object::GatewayHttpRoute(route) => said_of_route(route.view()),
            Object::GrpcRoute(route) => said_of_route(route.view()),
            Object::TlsRoute(route) => said_of_route(route.view()),
            Object::TcpRoute(route) => said_of_route(route.view()),
            Object::HttpLocalRateLimitPolicy(policy) => policy.status.clone().map(Status::RateLimit),
            Object::EgressNetwork(network) => network.status.clone().map(Status::EgressNetwork),
            _ => None,
        }
    }

    /// Gives conditions that have no time yet this one, in whole seconds as the API's times are.
    pub(crate) fn stamp(&mut self, now: Timestamp) {
        let now = Timestamp::from_second(now.as_second()).unwrap_or_default();
        let unset = |condition: &&mut Condition| condition.last_transition_time == UNSET;
        self.conditions_mut().filter(unset).for_each(|condition| condition.last_transition_time = Time(now));
    }

    /// Every condition.
    pub(crate) fn conditions_mut(&mut self) -> Box<dyn Iterator<Item = &mut Condition> + '_> {
        match self {
            Self::Route(status) => {
                Box::new(status.parents.iter_mut().filter_map(|parent| parent.conditions.as_mut()).flatten())
            }
            Self::RateLimit(status) => Box::new(status.conditions.iter_mut()),
            Self::EgressNetwork(status) => Box::new(status.conditions.iter_mut()),
        }
    }
}

/// The time of a condition that has none yet.
pub(crate) const UNSET: Time = Time(Timestamp::UNIX_EPOCH);

/// What the status of a route says; `None` for a route of another controller, of which Weft has said nothing.
fn said_of_route(view: RouteView<'_>) -> Option<Status> {
    let status = view.status.filter(|status| !status.parents.is_empty())?;
    let ours = status.parents.iter().any(|parent| parent.controller_name == CONTROLLER);
    (ours || view.parents().next().is_some()).then(|| Status::Route(status.clone()))
}
