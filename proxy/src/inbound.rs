//! The inbound side.

use std::sync::Arc;

use crate::app::Shared;
use crate::listen::Listener;
use crate::policy::Policies;

/// Accepts until the drain is ordered.
pub(crate) async fn run(shared: Arc<Shared>, _policies: Policies, _listener: Listener) {
    shared.drain.signaled().await;
}
