//! Inbound policy.

use std::sync::Arc;

use crate::app::Shared;
use crate::control::ControlClient;

/// All ports' policies. Clones share them.
#[derive(Clone)]
pub(crate) struct Policies;

impl Policies {
    /// Starts watching the configured ports.
    pub(crate) fn new(_shared: &Arc<Shared>, _client: ControlClient) -> Self {
        Self
    }
}
