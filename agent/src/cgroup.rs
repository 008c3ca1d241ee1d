//! Where the programs are attached: the cgroup below which the node's pods run. Also knows how the kubelet names pods'
//! cgroups there. Reads, never changes.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::host::HostError;

const MOUNTS: &str = "/proc/self/mountinfo";

// include/uapi/linux/magic.h
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Where Kubernetes keeps its pods under the cgroup2 root, by kubelet's cgroup driver: cgroupfs, systemd, and kind.
const KUBEPODS: [&str; 3] = ["kubepods", "kubepods.slice", "kubelet.slice/kubelet-kubepods.slice"];

/// A node in a container in a container in a service: deeper has not been seen.
const MAX_DEPTH: usize = 12;

/// The inode number of a hierarchy's own root (cgroup_root's kernfs root, always 1).
const ROOT_INODE: u64 = 1;

/// The cgroup to attach to, and why this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttachPoint {
    pub(crate) path: PathBuf,
    /// A clause for people.
    pub(crate) reason: String,
    /// The whole tree, for want of something better.
    pub(crate) is_root: bool,
}

/// What `--cgroup`, `--cgroup-root` and `--pod-uid` say.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Search<'a> {
    /// Exactly this one.
    pub(crate) cgroup: Option<&'a Path>,
    /// The node's cgroup file systems are mounted here or below.
    pub(crate) root: Option<&'a Path>,
    /// The agent's own pod, which runs below the cgroup in question.
    pub(crate) pod_uid: Option<&'a str>,
}

impl AttachPoint {
    /// What somebody decided.
    pub(crate) fn given(path: PathBuf) -> Self {
        Self { path, reason: "given by --cgroup".to_owned(), is_root: false }
    }

    /// Decides.
    ///
    /// # Errors
    /// When there is no cgroup2, or the tree that is there cannot be the node's.
    pub(crate) fn find(search: Search<'_>) -> Result<Self, HostError> {
        if let Some(path) = search.cgroup {
            return if path.is_dir() && is_cgroup2(path) {
                Ok(Self::given(path.to_path_buf()))
            } else {
                Err(HostError::NotCgroup2 { path: path.display().to_string() })
            };
        }
        let mounts = fs::read_to_string(MOUNTS).map_err(|source| HostError::Read { path: MOUNTS, source })?;
        let root = mount_point(&mounts, search.root).ok_or_else(|| match search.root {
            None => HostError::NoCgroup2,
            Some(root) => HostError::NoCgroup2Below { path: root.display().to_string() },
        })?;
        let Some(uid) = search.pod_uid else {
            return Ok(match KUBEPODS.iter().map(|name| root.join(name)).find(|path| path.is_dir()) {
                Some(path) => Self { path, reason: "Kubernetes' pods run below it".to_owned(), is_root: false },
                None => Self { path: root, reason: "there are no Kubernetes pods".to_owned(), is_root: true },
            });
        };
        match find_pod(&root, uid, MAX_DEPTH).map(|pod| kubepods(&pod)) {
            Some(Some(path)) => {
                Ok(Self { path, reason: "the agent's own pod runs below it".to_owned(), is_root: false })
            }
            Some(None) => Ok(Self {
                path: root,
                reason: "no cgroup above the agent's own pod is named kubepods".to_owned(),
                is_root: true,
            }),
            // Version 1 has the pods; all their processes are in some service's cgroup of this tree.
            None if fs::metadata(&root).is_ok_and(|metadata| metadata.ino() == ROOT_INODE) => {
                Ok(Self { path: root, reason: "the cgroup2 tree has no cgroups of pods".to_owned(), is_root: true })
            }
            None => Err(HostError::ForeignCgroup2 { path: root.display().to_string(), uid: uid.to_owned() }),
        }
    }

    /// Where the kubelet may have put a pod, by quality of service and cgroup driver.
    pub(crate) fn pod_cgroups(&self, uid: &str) -> Vec<PathBuf> {
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(slice) = name.strip_suffix(".slice") {
            let uid = uid.replace('-', "_");
            let mut paths: Vec<PathBuf> = ["burstable", "besteffort"]
                .iter()
                .map(|class| self.path.join(format!("{slice}-{class}.slice/{slice}-{class}-pod{uid}.slice")))
                .collect();
            paths.push(self.path.join(format!("{slice}-pod{uid}.slice")));
            paths
        } else {
            ["burstable/", "besteffort/", ""].iter().map(|class| self.path.join(format!("{class}pod{uid}"))).collect()
        }
    }

    /// The directories in which pods' cgroups appear.
    pub(crate) fn pod_parents(&self) -> Vec<PathBuf> {
        let mut parents: Vec<PathBuf> =
            self.pod_cgroups("").iter().filter_map(|path| path.parent().map(Path::to_path_buf)).collect();
        parents.push(self.path.clone());
        parents.sort_unstable();
        parents.dedup();
        parents
    }
}

/// "cgroup2", or "hybrid" when controllers of version 1 are mounted, too.
pub(crate) fn layout() -> &'static str {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    if file_systems(&mounts).any(|(_, kind)| kind == "cgroup") { "hybrid" } else { "cgroup2" }
}

/// The processes in the cgroup with this id (its inode number), looked for below a directory. None if it is not there.
pub(crate) fn members(below: &Path, id: u64) -> Vec<i32> {
    let Some(path) = find(below, id) else { return Vec::new() };
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn find(directory: &Path, id: u64) -> Option<PathBuf> {
    if fs::metadata(directory).is_ok_and(|metadata| metadata.ino() == id) {
        return Some(directory.to_path_buf());
    }
    let entries = fs::read_dir(directory).ok()?.filter_map(Result::ok);
    let mut directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.find_map(|entry| find(&entry.path(), id))
}

fn is_cgroup2(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|statfs| statfs.f_type == CGROUP2_MAGIC)
}

/// Mount points and types (proc(5): the fields after the lone dash begin with the type).
fn file_systems(mounts: &str) -> impl Iterator<Item = (PathBuf, &str)> {
    mounts.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        Some((PathBuf::from(mount.split(' ').nth(4)?.replace("\\040", " ")), file_system.split(' ').next()?))
    })
}

/// The first cgroup2 mount point, at or below `root` if that is given.
fn mount_point(mounts: &str, root: Option<&Path>) -> Option<PathBuf> {
    let mut found = file_systems(mounts).filter(|(_, kind)| *kind == "cgroup2").map(|(path, _)| path);
    found.find(|path| root.is_none_or(|root| path.starts_with(root)))
}

/// The cgroup of a pod, at most `depth` levels down.
fn find_pod(directory: &Path, uid: &str, depth: usize) -> Option<PathBuf> {
    let (cgroupfs, systemd) = (format!("pod{uid}"), format!("pod{}.slice", uid.replace('-', "_")));
    let mut level = vec![directory.to_path_buf()];
    for _ in 0..depth {
        let mut next = Vec::new();
        for entry in level.iter().filter_map(|path| fs::read_dir(path).ok()).flatten().filter_map(io::Result::ok) {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            if name == cgroupfs || name.ends_with(&systemd) {
                return Some(entry.path());
            }
            next.push(entry.path());
        }
        level = next;
    }
    None
}

/// The nearest ancestor that is the kubelet's cgroup of all pods.
fn kubepods(pod: &Path) -> Option<PathBuf> {
    pod.ancestors().skip(1).map(Path::to_path_buf).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        matches!(name, "kubepods" | "kubepods.slice") || name.ends_with("-kubepods.slice")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a1b-22-33";

    fn tree(directories: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        directories.iter().for_each(|path| fs::create_dir_all(root.path().join(path)).unwrap());
        root
    }

    #[test]
    fn finds_cgroup2_beside_version_1() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n\
                      51 31 0:38 / /host/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(mounts, None).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(mount_point(mounts, Some(Path::new("/host/cgroup"))).unwrap(), Path::new("/host/cgroup/unified"));
        assert_eq!(mount_point("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", None), None);
    }

    #[test]
    fn finds_all_pods_from_one_of_them() {
        let rows = [
            ("kubepods/burstable/pod0a1b-22-33", "kubepods"),
            ("kubepods/pod0a1b-22-33", "kubepods"),
            ("weft-kube-a/kubepods/besteffort/pod0a1b-22-33/c0ffee", "weft-kube-a/kubepods"),
            ("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b_22_33.slice", "kubepods.slice"),
            (
                "system.slice/docker-x.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod0a1b_22_33.slice",
                "system.slice/docker-x.scope/kubelet.slice/kubelet-kubepods.slice",
            ),
        ];
        for (pod, expected) in rows {
            let root = tree(&[pod, "weft-kube-b/kubepods/burstable/pod0a1b-22-34", "a/b/c"]);
            let found = find_pod(root.path(), UID, MAX_DEPTH).unwrap();
            assert_eq!(kubepods(&found).unwrap(), root.path().join(expected), "{pod}");
        }
    }

    #[test]
    fn an_unknown_pod_is_not_found() {
        let root = tree(&["kubepods/burstable/podother"]);
        assert_eq!(find_pod(root.path(), UID, MAX_DEPTH), None);
        assert_eq!(kubepods(Path::new("/sys/fs/cgroup/machine/podx")), None);
    }

    #[test]
    fn pods_are_where_the_kubelet_puts_them() {
        let rows = [
            ("/c/kubepods", "/c/kubepods/besteffort/pod0a1b-22-33"),
            ("/c/kubepods", "/c/kubepods/pod0a1b-22-33"),
            ("/c/kubepods.slice", "/c/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b_22_33.slice"),
            ("/c/kubelet-kubepods.slice", "/c/kubelet-kubepods.slice/kubelet-kubepods-pod0a1b_22_33.slice"),
        ];
        for (attach, expected) in rows {
            let paths = AttachPoint::given(attach.into()).pod_cgroups(UID);
            assert!(paths.contains(&PathBuf::from(expected)), "{paths:?}");
        }
        let parents = AttachPoint::given("/c/kubepods".into()).pod_parents();
        let expected = ["/c/kubepods", "/c/kubepods/besteffort", "/c/kubepods/burstable"].map(PathBuf::from);
        assert_eq!(parents, expected);
    }

    #[test]
    fn a_directory_on_disk_is_no_cgroup() {
        let directory = tempfile::tempdir().unwrap();
        let search = Search { cgroup: Some(directory.path()), ..Search::default() };
        assert!(matches!(AttachPoint::find(search), Err(HostError::NotCgroup2 { .. })));
    }
}
