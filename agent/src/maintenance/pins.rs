//! Looks after the pins once a second and has the datapath create missing ones again.

use std::{sync::Arc, time::Duration};

use tokio::sync::Mutex;
use weft_runtime::readiness::Gate;

use crate::{
    datapath::{
        DatapathError,
        handle::Handle,
        keep::{Found, KeepError},
        lock::Lock,
    },
    error::chain,
    host,
};

/// How long pins may be missing before they are created again. What they name stays in force meanwhile.
const PERIOD: Duration = Duration::from_secs(1);

/// Looks after the pins, forever. The gate is shut while they cannot be kept.
///
/// # Errors
/// When somebody unloaded the programs: the next agent starts anew.
pub(crate) async fn watch(datapath: Handle, lock: Arc<Mutex<Lock>>, gate: Gate) -> anyhow::Result<()> {
    gate.open();
    let mut last_problem = None;
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let mut lock = lock.lock().await;
        // A directory that is made again is another one, which another agent could lock.
        let kept = match relock(&datapath, &mut lock).await {
            Ok(()) => datapath.call(|kernel| kernel.keep_pins()).await,
            Err(error) => Err(error),
        };
        match kept {
            Ok(found) => {
                if let Found::Restored(count) = found {
                    tracing::error!(count, "pins were removed by somebody else and have been made again");
                }
                if last_problem.take().is_some() {
                    tracing::info!("the pins can be kept again");
                    gate.open();
                }
            }
            Err(error @ DatapathError::Keep(KeepError::Unloaded)) => return Err(error.into()),
            Err(error) => {
                let problem = chain(&error);
                if last_problem.as_ref() != Some(&problem) {
                    tracing::error!(error = problem, "cannot keep the pins; what they named stays in force meanwhile");
                    gate.close();
                    gate.explain(problem.clone());
                    last_problem = Some(problem);
                }
            }
        }
    }
}

async fn relock(datapath: &Handle, lock: &mut Lock) -> Result<(), DatapathError> {
    let root = &datapath.facts().pin_dir;
    if lock.is_of(root) {
        return Ok(());
    }
    // Nothing is made again that was removed on purpose.
    if datapath.call(|kernel| kernel.is_unloaded()).await? {
        return Err(KeepError::Unloaded.into());
    }
    host::check_bpffs(root).map_err(|_| KeepError::NoBpffs { path: root.display().to_string() })?;
    *lock = Lock::take(root).map_err(KeepError::from)?;
    Ok(())
}
