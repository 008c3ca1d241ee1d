//! Holds descriptors of all pinned objects, so that they stay in force when their pins vanish, and recreates the pins.
//!
//! A link without a pin or a descriptor is detached: removing the pin directory (`rm -r`, a cleanup of /sys/fs/bpf)
//! would open every pod. So the agent holds a descriptor of each pinned map and link. Once a second it checks the pins
//! and recreates missing ones. If there is no bpffs any more, it can only hold the descriptors, and reports that.
//!
//! ```text
//! pins are there ──────────────> nothing to do
//! some are missing, bpffs there ─> pinned again from the descriptors
//! no bpffs ───────────────────── > held; not ready; pinned again as soon as one is mounted
//! links detached, pins gone ────> somebody unloaded on purpose: the agent ends
//! ```
//!
//! Refuses to attach or load anything.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    datapath::{
        bpf::{AttachType, Link, Object},
        lock::LockError,
        pins::{Pins, PinsError},
    },
    host,
};

/// The descriptors, by the path of the pin.
#[derive(Debug)]
pub(crate) struct Keeper {
    pins: Pins,
    maps: BTreeMap<PathBuf, Object>,
    links: BTreeMap<PathBuf, Link>,
    pods: BTreeMap<u64, Link>,
}

/// State of the pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// None was missing.
    Whole,
    /// Some were missing; this many were recreated.
    Restored(usize),
}

/// Why pins could not be kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeepError {
    #[error("cannot hold what is pinned at {path}")]
    Hold { path: String, source: io::Error },
    #[error("cannot pin {path} again")]
    Pin { path: String, source: io::Error },
    #[error(transparent)]
    Pins(#[from] PinsError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(
        "{path} is gone and not on a bpffs any more: redirection ends with this agent unless a bpffs is mounted there \
         (`mount -t bpf bpffs DIR`)"
    )]
    NoBpffs { path: String },
    #[error("the programs were unloaded behind this agent's back: nothing is redirected")]
    Unloaded,
}

impl Keeper {
    /// Opens everything that is pinned now.
    ///
    /// # Errors
    /// `Hold` when a pin cannot be opened.
    pub(crate) fn new(pins: &Pins) -> Result<Self, KeepError> {
        let mut keeper =
            Self { pins: pins.clone(), maps: BTreeMap::new(), links: BTreeMap::new(), pods: BTreeMap::new() };
        for path in entries(&pins.root().join("maps"))? {
            if let Some(map) = hold(&path, Object::open)? {
                keeper.maps.insert(path, map);
            }
        }
        for path in entries(&pins.root().join("links"))? {
            if let Some(link) = hold(&path, Link::open)? {
                keeper.links.insert(path, link);
            }
        }
        for (cookie, _) in pins.pods()? {
            if let Some(link) = hold(&pins.pod_link(cookie), Link::open)? {
                keeper.hold_pod(cookie, link);
            }
        }
        Ok(keeper)
    }

    /// Holds a pod's link, and drops an earlier one.
    pub(crate) fn hold_pod(&mut self, cookie: u64, link: Link) {
        self.pods.insert(cookie, link);
    }

    /// Whether there is a link of a pod: all that are pinned are held.
    pub(crate) fn holds_pod(&self, cookie: u64) -> bool {
        self.pods.contains_key(&cookie)
    }

    /// Drops a pod's link.
    pub(crate) fn release_pod(&mut self, cookie: u64) {
        self.pods.remove(&cookie);
    }

    /// Whether a pod's network namespace is gone, according to its link; `None` if the link is not held.
    pub(crate) fn is_gone(&self, cookie: u64) -> Option<io::Result<bool>> {
        let link = self.pods.get(&cookie)?;
        Some(link.target(AttachType::SkLookup).map(|target| target == 0))
    }

    /// Recreates the pins of held objects. The caller recreates the labels.
    ///
    /// # Errors
    /// `NoBpffs` when that is impossible, `Unloaded` when there is nothing left to keep.
    pub(crate) fn restore(&self) -> Result<Found, KeepError> {
        let pods = self.pods.iter().map(|(cookie, link)| (self.pins.pod_link(*cookie), link));
        let links: Vec<_> = self.links.iter().map(|(path, link)| (path.clone(), link)).chain(pods).collect();
        let missing_maps: Vec<_> = self.maps.iter().filter(|(path, _)| is_missing(path)).collect();
        let missing_links: Vec<_> = links.iter().filter(|(path, _)| is_missing(path)).collect();
        let root = self.pins.root();
        // Without its label the directory would have no owner, and no agent would unload it.
        if missing_maps.is_empty() && missing_links.is_empty() && !is_missing(&root.join("layout")) {
            return Ok(Found::Whole);
        }
        if self.is_detached()? {
            return Err(KeepError::Unloaded);
        }
        host::check_bpffs(root).map_err(|_| KeepError::NoBpffs { path: root.display().to_string() })?;
        self.pins.prepare()?;
        for (path, map) in &missing_maps {
            pin(path, |path| map.pin(path))?;
        }
        for (path, link) in &missing_links {
            pin(path, |path| link.pin(path))?;
        }
        Ok(Found::Restored(missing_maps.len() + missing_links.len()))
    }

    /// Whether no program is attached to the cgroup any more: `unload` detaches before it removes the pins.
    pub(crate) fn is_detached(&self) -> Result<bool, KeepError> {
        for (path, link) in &self.links {
            let failed = |source| KeepError::Hold { path: path.display().to_string(), source };
            // In all link types but sk_lookup's, the target is at the same place.
            if link.target(AttachType::Connect4).map_err(failed)? != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, KeepError> {
    let failed = |source| KeepError::Hold { path: directory.display().to_string(), source };
    fs::read_dir(directory).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
}

fn hold<T>(path: &Path, open: impl FnOnce(&Path) -> io::Result<Option<T>>) -> Result<Option<T>, KeepError> {
    open(path).map_err(|source| KeepError::Hold { path: path.display().to_string(), source })
}

fn is_missing(path: &Path) -> bool {
    matches!(fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

fn pin(path: &Path, pin: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), KeepError> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)
        .and_then(|()| pin(path))
        .map_err(|source| KeepError::Pin { path: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_does_not_exist_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_missing(directory.path()));
        assert!(is_missing(&directory.path().join("links/connect4")));
        // A path through a file cannot be resolved: that is not a removed pin.
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(!is_missing(&file.join("below")));
    }
}
