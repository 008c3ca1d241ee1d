//! The pin directory: everything that outlives an agent, and its paths. A bpffs holds maps, links, directories and
//! symlinks, and the symlinks' targets serve as labels, so that `ls -l` shows everything:
//!
//! ```text
//! DIR/layout   -> 3                           version of this arrangement and of the maps' layouts
//! DIR/programs -> 0123456789abcdef            digest of the attached programs
//! DIR/maps/PODS ..                            see weft_ebpf_abi::map
//! DIR/links/connect4 ..                       attachments to the cgroup
//! DIR/pods/COOKIE/inbound                     attachment to the pod's network namespace
//! DIR/pods/COOKIE/pod -> NAMESPACE/NAME       name of the pod
//! ```
//!
//! Refuses to know the contents of maps and programs. No name contains a dot: bpffs reserves them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use weft_ebpf_abi::LAYOUT;

use crate::datapath::rules::PodName;

/// The pin directory of one agent.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    root: PathBuf,
}

/// Why an operation on the pin directory failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PinsError {
    #[error("cannot create {path}")]
    Create { path: String, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: String, source: io::Error },
    #[error("cannot remove {path}")]
    Remove { path: String, source: io::Error },
    #[error("{path} was not made by weft-agent: pass its pin directory with --pin-dir")]
    Foreign { path: String },
    #[error("{path} has layout {found}, this agent knows up to {LAYOUT}: run the newer agent, or unload with it first")]
    NewerLayout { path: String, found: String },
}

impl Pins {
    /// Refers to a directory; touches nothing.
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Creates missing parts and writes the layout.
    ///
    /// # Errors
    /// `NewerLayout` when a newer agent made the directory; nothing is touched then.
    pub(crate) fn prepare(&self) -> Result<(), PinsError> {
        self.check_layout()?;
        create(&self.root)?;
        self.label("layout", &LAYOUT.to_string())?;
        ["maps", "links", "pods"].into_iter().try_for_each(|name| create(&self.root.join(name)))
    }

    /// Whether this agent supports the layout, if there is one.
    ///
    /// # Errors
    /// `NewerLayout` if not.
    pub(crate) fn check_layout(&self) -> Result<(), PinsError> {
        match self.read_label("layout")? {
            Some(found) if found.parse::<u32>().map_or(true, |layout| layout > LAYOUT) => {
                Err(PinsError::NewerLayout { path: self.root.display().to_string(), found })
            }
            _ => Ok(()),
        }
    }

    /// Path of a map's pin.
    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.root.join("maps").join(name)
    }

    /// Path of the pin of a cgroup program's link.
    pub(crate) fn link(&self, name: &str) -> PathBuf {
        self.root.join("links").join(name)
    }

    /// Path of the pin of a pod's sk_lookup link.
    pub(crate) fn pod_link(&self, cookie: u64) -> PathBuf {
        self.root.join("pods").join(cookie.to_string()).join("inbound")
    }

    /// The digest of the attached programs, if all of them were attached.
    pub(crate) fn programs(&self) -> Result<Option<String>, PinsError> {
        self.read_label("programs")
    }

    /// Records the digest of the attached programs.
    pub(crate) fn set_programs(&self, digest: &str) -> Result<(), PinsError> {
        self.label("programs", digest)
    }

    /// Creates a pod's directory and records its name.
    pub(crate) fn add_pod(&self, cookie: u64, pod: &PodName) -> Result<(), PinsError> {
        create(&self.root.join("pods").join(cookie.to_string()))?;
        self.label(&format!("pods/{cookie}/pod"), &format!("{}/{}", pod.namespace, pod.name))
    }

    /// Removes a pod's directory with its link. A pod without one is not an error.
    pub(crate) fn remove_pod(&self, cookie: u64) -> Result<(), PinsError> {
        remove(&self.root.join("pods").join(cookie.to_string()))
    }

    /// All pods with a directory.
    pub(crate) fn pods(&self) -> Result<Vec<(u64, Option<PodName>)>, PinsError> {
        let directory = self.root.join("pods");
        let failed = |source| PinsError::Read { path: directory.display().to_string(), source };
        let mut pods = Vec::new();
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(pods),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let Some(cookie) = name.to_str().and_then(|name| name.parse::<u64>().ok()) else { continue };
            let pod = self.read_label(&format!("pods/{cookie}/pod"))?.and_then(|label| {
                let (namespace, name) = label.split_once('/')?;
                Some(PodName { namespace: namespace.to_owned(), name: name.to_owned() })
            });
            pods.push((cookie, pod));
        }
        Ok(pods)
    }

    /// Whether there is an agent's directory that may be removed.
    ///
    /// # Errors
    /// `Foreign` when the directory exists but is not an agent's; `NewerLayout` when it is a newer agent's.
    pub(crate) fn exists(&self) -> Result<bool, PinsError> {
        self.check_layout()?;
        if !self.root.exists() {
            return Ok(false);
        }
        if self.read_label("layout")?.is_some() {
            return Ok(true);
        }
        // An agent that was killed before it wrote the label has left no more than this.
        let failed = |source| PinsError::Read { path: self.root.display().to_string(), source };
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            if entry.map_err(failed)?.file_name() != "layout-next" {
                return Err(PinsError::Foreign { path: self.root.display().to_string() });
            }
        }
        Ok(true)
    }

    /// Removes everything; call [`Self::exists`] first.
    pub(crate) fn remove_all(&self) -> Result<(), PinsError> {
        remove(&self.root)
    }

    fn label(&self, name: &str, value: &str) -> Result<(), PinsError> {
        let path = self.root.join(name);
        let failed = |source| PinsError::Create { path: path.display().to_string(), source };
        match std::os::unix::fs::symlink(value, &path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ if fs::read_link(&path).is_ok_and(|current| current == Path::new(value)) => return Ok(()),
            _ => {}
        }
        // Written under another name and renamed, so that a crash leaves the old label or the new one.
        let next = self.root.join(format!("{name}-next"));
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        std::os::unix::fs::symlink(value, &next).map_err(failed)?;
        fs::rename(&next, &path).map_err(failed)
    }

    fn read_label(&self, name: &str) -> Result<Option<String>, PinsError> {
        let path = self.root.join(name);
        match fs::read_link(&path) {
            Ok(value) => Ok(Some(value.to_string_lossy().into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(PinsError::Read { path: path.display().to_string(), source }),
        }
    }
}

fn create(path: &Path) -> Result<(), PinsError> {
    fs::create_dir_all(path).map_err(|source| PinsError::Create { path: path.display().to_string(), source })
}

fn remove(path: &Path) -> Result<(), PinsError> {
    match fs::remove_dir_all(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PinsError::Remove { path: path.display().to_string(), source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pins() -> (tempfile::TempDir, Pins) {
        let directory = tempfile::tempdir().unwrap();
        let pins = Pins::new(&directory.path().join("v1"));
        (directory, pins)
    }

    #[test]
    fn prepares_an_empty_directory_and_its_own() {
        let (_directory, pins) = pins();
        pins.prepare().unwrap();
        pins.prepare().unwrap();
        assert_eq!(pins.programs().unwrap(), None);
    }

    #[test]
    fn refuses_a_newer_layout_and_leaves_it_alone() {
        let (_directory, pins) = pins();
        fs::create_dir_all(pins.root()).unwrap();
        pins.label("layout", &(LAYOUT + 1).to_string()).unwrap();
        assert!(matches!(pins.prepare(), Err(PinsError::NewerLayout { .. })));
        assert!(!pins.root().join("maps").exists());
    }

    #[test]
    fn remembers_programs_and_pods() {
        let (_directory, pins) = pins();
        pins.prepare().unwrap();
        pins.set_programs("aa").unwrap();
        pins.set_programs("bb").unwrap();
        let pod = PodName { namespace: "shop".into(), name: "web-0".into() };
        pins.add_pod(7, &pod).unwrap();
        assert_eq!(pins.programs().unwrap().as_deref(), Some("bb"));
        assert_eq!(pins.pods().unwrap(), [(7, Some(pod))]);
        pins.remove_pod(7).unwrap();
        pins.remove_pod(7).unwrap();
        assert_eq!(pins.pods().unwrap(), []);
    }

    #[test]
    fn removing_leaves_nothing_and_may_be_repeated() {
        let (_directory, pins) = pins();
        pins.prepare().unwrap();
        assert!(pins.exists().unwrap());
        pins.remove_all().unwrap();
        assert!(!pins.exists().unwrap());
    }

    #[test]
    fn a_directory_of_others_is_left_alone() {
        let (directory, pins) = pins();
        fs::create_dir_all(pins.root().join("maps")).unwrap();
        let others = Pins::new(directory.path());
        assert!(matches!(others.exists(), Err(PinsError::Foreign { .. })));
        assert!(matches!(pins.exists(), Err(PinsError::Foreign { .. })));
        fs::remove_dir(pins.root().join("maps")).unwrap();
        assert!(pins.exists().unwrap(), "the beginning of one of ours");
    }
}
