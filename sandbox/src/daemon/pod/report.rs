//! A pod's state and the channel that reports its changes to the daemon.

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::PodEvent;
use crate::state::{ContainerState, PodState};

/// The pod's state, and the channel to the daemon.
pub(super) struct PodReporter {
    pub(super) number: u32,
    pub(super) started: Instant,
    pub(super) state: watch::Sender<PodState>,
    pub(super) events: mpsc::UnboundedSender<(u32, PodEvent)>,
}

impl PodReporter {
    pub(super) fn update(&self, change: impl FnOnce(&mut PodState, f64)) {
        let elapsed_ms = self.started.elapsed().as_secs_f64() * 1000.0;
        self.state.send_modify(|state| change(state, elapsed_ms));
        // The receiver is gone only during shutdown.
        let _ = self.events.send((self.number, PodEvent::Changed));
    }

    pub(super) fn container(&self, name: &str, change: impl FnOnce(&mut ContainerState)) {
        self.update(|state, _| {
            if let Some(container) = state.containers.iter_mut().find(|container| container.name == name) {
                change(container);
            }
        });
    }

    pub(super) fn snapshot(&self) -> PodState {
        self.state.borrow().clone()
    }
}
