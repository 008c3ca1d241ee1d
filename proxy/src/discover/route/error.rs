//! Why a policy cannot be used.

use crate::{discover::endpoint::EndpointError, route::proto::ReadRouteError};

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PolicyError {
    /// A required part is missing.
    #[error("the policy has no {0}")]
    Missing(&'static str),
    /// A route or a duration cannot be parsed.
    #[error("read a route")]
    Route(#[from] ReadRouteError),
    /// A forward backend cannot be parsed.
    #[error("read a backend's endpoint")]
    Endpoint(#[from] EndpointError),
    /// A number has no meaning where it stands.
    #[error("the policy's {0} is out of range")]
    Range(&'static str),
}
