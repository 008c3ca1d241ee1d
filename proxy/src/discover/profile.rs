//! Follows `Destination.GetProfile`: whether a destination is opaque, its name, a pod's endpoint, a ServiceProfile's
//! routes.

pub(crate) mod routes;

use std::{collections::HashMap, sync::Arc};

use tokio::sync::watch;
use tonic::Code;
use weft_proto::linkerd::destination::{DestinationProfile, GetDestination, destination_client::DestinationClient};
use weft_runtime::error::chain;

use super::endpoint::{EndpointError, EndpointInfo};
use crate::{control::ControlClient, destination::Destination, pauses::Pauses};

use routes::{ProfileRoutes, RoutesError};

/// State of a destination's profile.
#[derive(Clone, Debug)]
pub(crate) enum ProfileState {
    /// The controller has not answered.
    Pending,
    /// There is no profile: the controller refuses the destination or does not know the name, or the address is not
    /// looked up.
    Absent,
    /// The last profile from the controller.
    Known(Arc<Profile>),
}

/// A destination's profile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Profile {
    /// The service's name, if the address is a service's.
    pub(crate) name: Option<String>,
    /// Whether no protocol may be detected on its port.
    pub(crate) opaque: bool,
    /// The endpoint, if the address is a single workload's.
    pub(crate) endpoint: Option<Arc<EndpointInfo>>,
    /// Services among which traffic is split, by weight.
    pub(crate) overrides: Vec<(String, u32)>,
    /// The ServiceProfile's routes.
    pub(crate) routes: ProfileRoutes,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProfileError {
    /// Its endpoint cannot be parsed.
    #[error("read the profile's endpoint")]
    Endpoint(#[from] EndpointError),
    /// A route cannot be parsed.
    #[error("read the profile's routes")]
    Routes(#[from] RoutesError),
}

impl Profile {
    pub(crate) fn read(message: DestinationProfile) -> Result<Self, ProfileError> {
        let endpoint = match message.endpoint {
            None => None,
            Some(endpoint) => Some(Arc::new(EndpointInfo::read(endpoint, &HashMap::new())?)),
        };
        Ok(Self {
            name: Some(message.fully_qualified_name).filter(|name| !name.is_empty()),
            opaque: message.opaque_protocol,
            endpoint,
            overrides: message.dst_overrides.into_iter().map(|dst| (dst.authority, dst.weight)).collect(),
            routes: ProfileRoutes::read(message.routes, message.retry_budget)?,
        })
    }
}

/// Requests a destination's profile and follows its changes.
pub(super) async fn watch(
    client: ControlClient,
    destination: Destination,
    context_token: String,
    state: watch::Sender<ProfileState>,
) {
    let request = GetDestination { scheme: String::new(), path: destination.to_string(), context_token };
    let mut asking = DestinationClient::new(client.clone());
    let mut pauses = Pauses::new();
    loop {
        let on_message = |message| match Profile::read(message) {
            Ok(profile) => drop(state.send_replace(ProfileState::Known(Arc::new(profile)))),
            // The last profile stays: without one, a meshed endpoint could get plaintext.
            Err(error) => {
                tracing::warn!(error = chain(&error), orig_dst.addr = %destination, "profile is unusable");
            }
        };
        let status = client.read(asking.get_profile(request.clone()), &mut pauses, on_message).await;
        if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition) {
            tracing::debug!(orig_dst.addr = %destination, error = status.message(), "the destination has no profile");
            state.send_replace(ProfileState::Absent);
            return state.closed().await;
        }
        // The controller's answers about a Service or pod that does not exist, but may some day. Without a profile an
        // address would be forwarded in plaintext, and a name is not forwarded at all.
        let is_unknown = matches!(status.code(), Code::NotFound | Code::Unknown);
        if is_unknown && matches!(destination, Destination::Name(_)) {
            state.send_if_modified(|state| {
                let is_first = matches!(state, ProfileState::Pending);
                if is_first {
                    *state = ProfileState::Absent;
                }
                is_first
            });
        }
        tracing::debug!(orig_dst.addr = %destination, code = ?status.code(), error = status.message(), "profile stream ended, asking again");
        client.pause(&mut pauses).await;
    }
}
