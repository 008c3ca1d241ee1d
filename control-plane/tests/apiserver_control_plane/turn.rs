//! Which tests may run beside each other. Most wait for leases and certificates to expire, in namespaces of their own;
//! but what the control plane writes, it writes in all namespaces.

use std::sync::{Condvar, Mutex, PoisonError};

/// Tests at a time: each runs several processes.
const AT_ONCE: usize = 4;

static RUNNING: Mutex<Running> =
    Mutex::new(Running { tests: 0, writes_statuses: false, has_injector: false, is_alone: false });
static ENDED: Condvar = Condvar::new();

/// What a test uses beside its own namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Uses {
    /// Nothing that another test changes.
    Nothing,
    /// A policy controller, which writes statuses in all namespaces.
    Statuses,
    /// The injector's webhook configuration, which is the cluster's only one.
    Injector,
    /// All of the cluster: a definition that others need is removed, or what destination controllers write in all
    /// namespaces is counted.
    Cluster,
}

/// Held by a test that runs.
pub(crate) struct Turn(Uses);

struct Running {
    tests: usize,
    writes_statuses: bool,
    has_injector: bool,
    is_alone: bool,
}

impl Running {
    /// A test that has to be alone does not keep others from starting: one of them takes most of the time.
    fn admits(&self, uses: Uses) -> bool {
        match uses {
            Uses::Cluster => self.tests == 0,
            Uses::Statuses if self.writes_statuses => false,
            Uses::Injector if self.has_injector => false,
            Uses::Statuses | Uses::Injector | Uses::Nothing => !self.is_alone && self.tests < AT_ONCE,
        }
    }

    fn set(&mut self, uses: Uses, runs: bool) {
        if runs {
            self.tests += 1;
        } else {
            self.tests -= 1;
        }
        match uses {
            Uses::Nothing => {}
            Uses::Statuses => self.writes_statuses = runs,
            Uses::Injector => self.has_injector = runs,
            Uses::Cluster => self.is_alone = runs,
        }
    }
}

impl Turn {
    /// Waits until the test may run. Blocks: a test has its thread and its runtime to itself.
    pub(crate) fn wait(uses: Uses) -> Self {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = ENDED.wait_while(running, |running| !running.admits(uses));
        waited.unwrap_or_else(PoisonError::into_inner).set(uses, true);
        Self(uses)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).set(self.0, false);
        ENDED.notify_all();
    }
}
