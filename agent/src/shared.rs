//! The datapath as the agent's tasks share it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::datapath::Datapath;

/// The datapath, one call at a time. Never held over an await.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<Datapath>>);

impl Shared {
    /// Takes the datapath over.
    pub(crate) fn new(datapath: Datapath) -> Self {
        Self(Arc::new(Mutex::new(datapath)))
    }

    /// Waits for the running call to end. A call that panicked left the kernel's maps valid: each write is complete.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Datapath> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
