//! Checks the pins once a second and has the datapath recreate missing ones.

use std::{sync::Arc, time::Duration};

use tokio::sync::Mutex;
use weft_runtime::{error::chain, readiness::Gate};

use crate::{
    datapath::{
        DatapathError,
        handle::Handle,
        keep::{Found, KeepError},
        lock::Lock,
    },
    host,
};

/// How long pins may be missing before they are recreated. The pinned objects stay in force.
const PERIOD: Duration = Duration::from_secs(1);

/// Checks the pins, forever. The gate is shut while they cannot be kept.
///
/// # Errors
/// When the programs were unloaded: the next agent starts anew.
pub(crate) async fn watch(datapath: Handle, lock: Arc<Mutex<Lock>>, gate: Gate) -> anyhow::Result<()> {
    gate.open();
    let mut last_problem = None;
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let mut lock = lock.lock().await;
        // A recreated directory is another one, which another agent could lock.
        let kept = match relock(&datapath, &mut lock).await {
            Ok(()) => datapath.call(|kernel| kernel.keep_pins()).await,
            Err(error) => Err(error),
        };
        match kept {
            Ok(found) => {
                if let Found::Restored(count) = found {
                    tracing::error!(count, "pins were removed by another process and have been recreated");
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
                    tracing::error!(error = problem, "cannot keep the pins; the pinned objects stay in force");
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
    // Pins that were removed on purpose are not recreated.
    if datapath.call(|kernel| kernel.is_unloaded()).await? {
        return Err(KeepError::Unloaded.into());
    }
    host::check_bpffs(root).map_err(|_| KeepError::NoBpffs { path: root.display().to_string() })?;
    *lock = Lock::take(root).map_err(KeepError::from)?;
    Ok(())
}
