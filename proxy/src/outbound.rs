//! The outbound side.

use std::sync::Arc;

use crate::app::Shared;
use crate::discover::Discover;
use crate::listen::Listener;

/// Accepts until the drain is ordered.
pub(crate) async fn run(shared: Arc<Shared>, _discover: Discover, _listeners: Vec<Listener>) {
    shared.drain.signaled().await;
}
