//! Follows `OutboundPolicies.Watch`: the routing of a destination's connections and requests.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;
use tonic::Code;
use weft_proto::linkerd::outbound::{
    OutboundPolicy, TrafficSpec, outbound_policies_client::OutboundPoliciesClient, traffic_spec,
};
use weft_runtime::error::chain;

use super::route::Policy;
use crate::{control::ControlClient, destination::Destination, pauses::Pauses};

/// Deadline of detection before a connection fails anyway.
const INVALID_DETECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The first and the longest pause between requests for an address that is in use and that the controller does not
/// know: its Service, its pod or an EgressNetwork may come later. Most such addresses are outside the cluster and stay
/// unknown.
const UNKNOWN_ADDRESS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// State of a destination's policy.
#[derive(Clone, Debug)]
pub(crate) enum PolicyState {
    /// The controller has not answered.
    Pending,
    /// The controller has no policy; the profile decides.
    Absent,
    /// The controller refuses the request: connections fail.
    Refused,
    /// The last policy from the controller.
    Known(Arc<Policy>),
}

/// Requests a destination's policy and follows its changes.
pub(super) async fn watch(
    client: ControlClient,
    destination: Destination,
    source_workload: String,
    state: watch::Sender<PolicyState>,
) {
    let target = match &destination {
        Destination::Addr(addr) => traffic_spec::Target::Addr((*addr).into()),
        Destination::Name(name) => traffic_spec::Target::Authority(name.to_string()),
    };
    let request = TrafficSpec { source_workload, target: Some(target) };
    let mut asking = OutboundPoliciesClient::new(client.clone());
    let mut pauses = Pauses::new();
    let mut unknown = match destination {
        // Requests for a name fail until there is a Service.
        Destination::Name(_) => Pauses::new(),
        Destination::Addr(_) => Pauses::between(UNKNOWN_ADDRESS.0, UNKNOWN_ADDRESS.1),
    };
    loop {
        let on_message = |message| {
            unknown.reset();
            state.send_replace(PolicyState::Known(Arc::new(in_force(message, &destination))));
        };
        let status = client.read(asking.watch(request.clone()), &mut pauses, on_message).await;
        let ended = match status.code() {
            Code::NotFound => {
                state.send_if_modified(|state| {
                    let is_change = !matches!(state, PolicyState::Absent);
                    *state = PolicyState::Absent;
                    is_change
                });
                tracing::debug!(orig_dst.addr = %destination, error = status.message(), "no policy for the destination, asking again");
                client.pause(&mut unknown).await;
                continue;
            }
            Code::Unimplemented => PolicyState::Absent,
            Code::InvalidArgument | Code::FailedPrecondition => PolicyState::Refused,
            code => {
                tracing::debug!(orig_dst.addr = %destination, ?code, error = status.message(), "policy stream ended, asking again");
                client.pause(&mut pauses).await;
                continue;
            }
        };
        tracing::debug!(orig_dst.addr = %destination, code = ?status.code(), error = status.message(), "no policy for the destination");
        state.send_replace(ended);
        return state.closed().await;
    }
}

/// The policy of a destination for which this message has arrived: with one that cannot be parsed, requests and
/// connections fail.
pub(crate) fn in_force(message: OutboundPolicy, destination: &Destination) -> Policy {
    Policy::read(message).unwrap_or_else(|error| {
        tracing::warn!(error = chain(&error), orig_dst.addr = %destination, "policy is unusable, requests fail");
        Policy::invalid(INVALID_DETECT_TIMEOUT)
    })
}
