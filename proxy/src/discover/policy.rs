//! Follows `OutboundPolicies.Watch`: the routing of a destination's connections and requests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::watch;
use tonic::Code;
use weft_proto::linkerd::outbound::{TrafficSpec, outbound_policies_client::OutboundPoliciesClient, traffic_spec};

use super::route::Policy;
use crate::control::{Backoff, ControlClient};

/// Deadline of detection before a connection fails anyway.
const INVALID_DETECT_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Requests an address's policy and follows its changes.
pub(super) async fn watch(
    client: ControlClient,
    addr: SocketAddr,
    source_workload: String,
    state: watch::Sender<PolicyState>,
) {
    let request = TrafficSpec { source_workload, target: Some(traffic_spec::Target::Addr(addr.into())) };
    let mut asking = OutboundPoliciesClient::new(client.clone());
    let mut backoff = Backoff::new();
    loop {
        let status = match client.open(asking.watch(request.clone())).await {
            Err(status) => status,
            Ok(mut stream) => loop {
                match stream.next().await {
                    Ok(Some(message)) => {
                        backoff.reset();
                        state.send_replace(match Policy::read(message) {
                            Ok(policy) => PolicyState::Known(Arc::new(policy)),
                            Err(error) => {
                                let error = anyhow::Error::from(error);
                                tracing::warn!(error = format!("{error:#}"), orig_dst.addr = %addr, "policy is unusable, requests fail");
                                PolicyState::Known(Arc::new(Policy::invalid(INVALID_DETECT_TIMEOUT)))
                            }
                        });
                    }
                    Ok(None) => break tonic::Status::unavailable("the stream ended"),
                    Err(status) => break status,
                }
            },
        };
        let ended = match status.code() {
            Code::NotFound | Code::Unimplemented => PolicyState::Absent,
            Code::InvalidArgument | Code::FailedPrecondition => PolicyState::Refused,
            code => {
                tracing::debug!(orig_dst.addr = %addr, ?code, error = status.message(), "policy stream ended, asking again");
                backoff.pause().await;
                continue;
            }
        };
        tracing::debug!(orig_dst.addr = %addr, code = ?status.code(), error = status.message(), "no policy for the destination");
        state.send_replace(ended);
        return state.closed().await;
    }
}
