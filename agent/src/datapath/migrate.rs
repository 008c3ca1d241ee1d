//! Migration from an older layout to this one, and never to a newer one.
//!
//! Each layout has its own pin directory, `v1`, `v2` ... side by side. An agent that finds the programs of an older
//! layout in force attaches its own beside them and takes the pods over one by one. While both are attached, the older
//! programs run first: they redirect connections, and the newer programs see an address on loopback, which they leave
//! alone. The older ones are removed in two steps, when each of their pods is either in force here or gone:
//!
//! ```text
//! both in force ──every pod taken over──> older connect programs detached: new connections are this layout's
//!                ──GRACE──> the rest unloaded: no proxy waits for their answer any more
//! ```
//!
//! Pods come over as they are enrolled: on a Kubernetes node by the agent's own watch, otherwise when a client of the
//! API enrols them. A pod that is not enrolled again, such as one that is leaving, keeps the older programs in force,
//! and the log names it. A crash at any point leaves both in force, and the next agent continues.
//!
//! The kernel enrols new pods in this layout alone: in the older one they would get neither addresses nor skipped
//! ports. Those that only the kernel enrolled there are unknown here: so on a Kubernetes node the older programs stay
//! until the agent has attempted to enrol every pod that the API server lists, and while one is not enrolled because
//! that failed. The log names those, too.
//!
//! Refuses to read or write an older layout's maps, except its switches, whose places stay the same.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use weft_ebpf_abi::{LAYOUT, switch};
use weft_runtime::error::chain;

use crate::datapath::{
    DatapathError,
    bpf::{AttachType, Link},
    handle::Handle,
    lock::{Lock, LockError},
    maps,
    pins::{Pins, PinsError},
    programs::{self, ProgramsError, REDIRECTING},
    rules::PodName,
};

/// Interval of checks of an older layout's pods.
const PERIOD: Duration = Duration::from_secs(1);
/// Time from the last connection that the older programs redirect to its proxy's last question about it: a handshake
/// on loopback, with two retransmissions (1 s and 2 s) when the proxy's accept queue is full.
const GRACE: Duration = Duration::from_secs(5);

/// Why a migration cannot continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MigrateError {
    #[error(transparent)]
    Pins(#[from] PinsError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    #[error("cannot read {path}")]
    Read { path: String, source: io::Error },
    #[error("no datapath in {path}: does an agent run on this node?")]
    NoDatapath { path: String },
    #[error("cannot detach {path}")]
    Detach { path: String, source: io::Error },
}

/// A pod of an older layout.
#[derive(Clone, Copy, Debug)]
struct OldPod {
    cookie: u64,
    /// Whether its network namespace is gone.
    is_gone: bool,
}

/// The pin directories of other layouts beside this one, in ascending order. Empty if the directory is not named after
/// this layout.
fn siblings(pin_dir: &Path) -> Result<Vec<(u32, PathBuf)>, MigrateError> {
    let (Some(parent), Some(name)) = (pin_dir.parent(), pin_dir.file_name().and_then(|name| name.to_str())) else {
        return Ok(Vec::new());
    };
    if layout_of(name) != Some(LAYOUT) {
        return Ok(Vec::new());
    }
    let failed = |source| MigrateError::Read { path: parent.display().to_string(), source };
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut siblings = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if let Some(layout) = entry.file_name().to_str().and_then(layout_of).filter(|layout| *layout != LAYOUT)
            && fs::symlink_metadata(entry.path().join("layout")).is_ok()
        {
            siblings.push((layout, entry.path()));
        }
    }
    siblings.sort();
    Ok(siblings)
}

/// Parses `v2` as layout 2.
fn layout_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix('v')?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

fn older(pin_dir: &Path) -> Result<Vec<PathBuf>, MigrateError> {
    Ok(siblings(pin_dir)?.into_iter().filter(|(layout, _)| *layout < LAYOUT).map(|(_, path)| path).collect())
}

/// Checks that no newer agent is in force in a pin directory or beside it. Touches nothing.
///
/// # Errors
/// `NewerLayout` if one is: its programs would run before this agent's, and answer for them.
pub(crate) fn check(pin_dir: &Path) -> Result<(), MigrateError> {
    Pins::new(pin_dir).check_layout()?;
    match siblings(pin_dir)?.pop() {
        Some((layout, path)) if layout > LAYOUT => {
            Err(PinsError::NewerLayout { path: path.display().to_string(), found: layout.to_string() }.into())
        }
        _ => Ok(()),
    }
}

/// Unloads a pin directory and those of older layouts beside it. Returns whether there was anything.
///
/// # Errors
/// See [`MigrateError`]; the remaining directories are then still there.
pub(crate) fn unload(pin_dir: &Path) -> Result<bool, MigrateError> {
    let mut found = programs::unload(&Pins::new(pin_dir))?;
    for path in older(pin_dir)? {
        found |= programs::unload(&Pins::new(&path))?;
        tracing::info!(pin_dir = %path.display(), "unloaded an older layout");
    }
    Ok(found)
}

/// Unloads in two steps, as a migration ends: a pod that iptables redirect, too, loses no connection.
///
/// # Errors
/// As [`unload`].
pub(crate) async fn leave(pin_dir: &Path) -> Result<bool, MigrateError> {
    let mut has_pods = programs::stop(&Pins::new(pin_dir))?;
    for path in older(pin_dir)? {
        has_pods |= programs::stop(&Pins::new(&path))?;
    }
    if has_pods {
        tokio::time::sleep(GRACE).await;
    }
    unload(pin_dir)
}

/// Switches all redirection of the node off or on, by the pins alone: needs no agent. An older layout that is in force
/// redirects, too, also where this one is not there yet. Returns whether it was off in all of them.
///
/// # Errors
/// `NoDatapath` when there is none; `NewerLayout` beside one, which would go on to redirect; else see [`MigrateError`].
pub(crate) fn set_bypassed(pin_dir: &Path, bypassed: bool) -> Result<bool, MigrateError> {
    check(pin_dir)?;
    let mut before = None;
    for path in older(pin_dir)?.into_iter().chain([pin_dir.to_path_buf()]) {
        // Layouts from 2 on have switches. Without them, because an agent was killed at its first start, the layout
        // redirects nothing.
        if let Some(was) = maps::set_switch(&Pins::new(&path), switch::BYPASS, bypassed)? {
            before = Some(before.unwrap_or(true) && was);
        }
    }
    before.ok_or_else(|| MigrateError::NoDatapath { path: pin_dir.display().to_string() })
}

/// Whether this layout is not in force yet and an older one is switched off: until `bypass off` ends that, the newer
/// agent's programs may not redirect either.
///
/// # Errors
/// See [`MigrateError`].
pub(crate) fn begins_bypassed(pin_dir: &Path) -> Result<bool, MigrateError> {
    let own = Pins::new(pin_dir);
    if REDIRECTING.iter().any(|name| own.link(name).exists()) {
        return Ok(false);
    }
    for path in older(pin_dir)? {
        if maps::is_on(&Pins::new(&path), switch::BYPASS)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Retires older layouts, then waits forever. Failures are logged and retried. `failed_pods` returns those of a
/// Kubernetes node that could not be enrolled, or `None` before the first attempt of each.
///
/// # Errors
/// Never.
pub(crate) async fn run(
    datapath: Handle,
    pin_dir: PathBuf,
    failed_pods: impl Fn() -> Option<Vec<PodName>>,
) -> anyhow::Result<()> {
    let mut last_problem = None;
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let failed = failed_pods();
        let problem = match retire_all(&datapath, &pin_dir, failed.as_deref()).await {
            Ok(None) => std::future::pending().await,
            Ok(Some(waiting)) => waiting,
            Err(error) => chain(&error),
        };
        if last_problem.as_ref() != Some(&problem) {
            tracing::warn!(reason = problem, "an older layout's programs stay in force");
            last_problem = Some(problem);
        }
    }
}

/// Returns what it waits for, if anything.
async fn retire_all(
    datapath: &Handle,
    pin_dir: &Path,
    failed: Option<&[PodName]>,
) -> Result<Option<String>, MigrateError> {
    let mut waiting = None;
    for path in older(pin_dir)? {
        // Held until the directory is gone, so that no older agent takes it over in between.
        let _lock = match Lock::take(&path) {
            Ok(lock) => lock,
            Err(LockError::Held { .. }) => {
                waiting = Some(format!("{} is another agent's, which is running", path.display()));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let pins = Pins::new(&path);
        maps::set_switch(&pins, switch::SELF_ENROL, false)?;
        let Some(failed) = failed else {
            waiting = Some("the agent has not looked at every pod of the node yet".to_owned());
            continue;
        };
        if !failed.is_empty() {
            let names: Vec<String> = failed.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
            waiting = Some(format!("pods that could not be enrolled: {}", names.join(", ")));
            continue;
        }
        let sample = datapath.call(|kernel| kernel.sample(Duration::ZERO)).await?;
        let in_force = sample.pods.iter().filter(|pod| pod.outbound && pod.inbound);
        let enrolled = in_force.map(|pod| pod.cookie).collect();
        let remaining = remaining(&old_pods(&pins)?, &enrolled);
        if !remaining.is_empty() {
            waiting = Some(format!("pods in {} that nobody enrolled here: {remaining:?}", path.display()));
            continue;
        }
        for name in REDIRECTING {
            detach(&pins.link(name))?;
        }
        tracing::info!(pin_dir = %path.display(), "every pod was taken over: an older layout no longer redirects");
        tokio::time::sleep(GRACE).await;
        programs::unload(&pins)?;
        tracing::info!(pin_dir = %path.display(), layout = LAYOUT, "took over from an older layout");
    }
    Ok(waiting)
}

fn detach(pin: &Path) -> Result<(), MigrateError> {
    let failed = |source| MigrateError::Detach { path: pin.display().to_string(), source };
    Link::open(pin).map_err(failed)?.map_or(Ok(()), |link| link.detach()).map_err(failed)
}

fn old_pods(pins: &Pins) -> Result<Vec<OldPod>, MigrateError> {
    let mut pods = Vec::new();
    for (cookie, _) in pins.pods()? {
        let path = pins.pod_link(cookie);
        let failed = |source| MigrateError::Read { path: path.display().to_string(), source };
        let is_gone = match Link::open(&path).map_err(failed)? {
            Some(link) => link.target(AttachType::SkLookup).map_err(failed)? == 0,
            None => true,
        };
        pods.push(OldPod { cookie, is_gone });
    }
    Ok(pods)
}

/// The cookies of the pods that only the older layout has.
fn remaining(old: &[OldPod], enrolled: &BTreeSet<u64>) -> Vec<u64> {
    let only_there = old.iter().filter(|pod| !pod.is_gone && !enrolled.contains(&pod.cookie));
    only_there.map(|pod| pod.cookie).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_goes_when_its_pods_are_here_or_gone() {
        let pod = |cookie, is_gone| OldPod { cookie, is_gone };
        for (row, old, enrolled, expected) in [
            ("no pods", vec![], vec![], vec![]),
            ("taken over", vec![pod(1, false)], vec![1, 2], vec![]),
            ("gone", vec![pod(1, true)], vec![], vec![]),
            ("not yet", vec![pod(1, false), pod(2, false), pod(3, true)], vec![2], vec![1]),
        ] {
            assert_eq!(remaining(&old, &enrolled.into_iter().collect()), expected, "{row}");
        }
    }

    fn sibling(directory: &Path, name: &str, label: bool) {
        fs::create_dir(directory.join(name)).unwrap();
        if label {
            std::os::unix::fs::symlink("x", directory.join(name).join("layout")).unwrap();
        }
    }

    #[test]
    fn siblings_are_other_layouts_directories() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join(format!("v{LAYOUT}"));
        for (name, label) in [("v0", true), ("v00x", true), ("x0", true), ("v", true), ("v+1", true)] {
            sibling(directory.path(), name, label);
        }
        assert_eq!(siblings(&own).unwrap(), [(0, directory.path().join("v0"))]);
        // Directories that are not named after their layout have no siblings.
        assert_eq!(siblings(&directory.path().join("own")).unwrap(), []);
        check(&own).unwrap();
        assert!(matches!(set_bypassed(&own, true), Err(MigrateError::NoDatapath { .. })));
        let newer = format!("v{}", LAYOUT + 1);
        sibling(directory.path(), &newer, false);
        check(&own).unwrap();
        fs::remove_dir(directory.path().join(&newer)).unwrap();
        sibling(directory.path(), &newer, true);
        for error in [check(&own).unwrap_err(), set_bypassed(&own, true).unwrap_err()] {
            let error = error.to_string();
            assert!(error.contains(&newer) && error.contains("newer agent"), "{error}");
        }
        assert!(!own.exists());
    }
}
