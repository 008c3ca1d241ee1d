//! Discovery.

use std::sync::Arc;

use crate::app::Shared;
use crate::control::ControlClient;

/// Discovery. Clones share it.
#[derive(Clone)]
pub(crate) struct Discover;

impl Discover {
    /// Makes it.
    pub(crate) fn new(_shared: &Arc<Shared>, _destination: ControlClient, _policy: ControlClient) -> Self {
        Self
    }
}
