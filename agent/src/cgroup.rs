//! The attach point of the programs: the cgroup below which the node's pods run. Also knows the kubelet's names of
//! pods' cgroups there. Reads, never changes.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::host::HostError;

const MOUNTS: &str = "/proc/self/mountinfo";
const OWN: &str = "/proc/self/cgroup";

// include/uapi/linux/magic.h
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Depth of the search: a node in a container in a container in a service. No deeper one is known.
const MAX_DEPTH: usize = 12;

/// The inode number of a hierarchy's own root (cgroup_root's kernfs root, always 1).
const ROOT_INODE: u64 = 1;

/// The cgroup to attach to, and why this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttachPoint {
    pub(crate) path: PathBuf,
    /// The reason, as a clause.
    pub(crate) reason: String,
    /// Whether it is the whole tree, for lack of a better one.
    pub(crate) is_root: bool,
}

/// The options `--cgroup`, `--cgroup-root` and `--pod-uid`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Search<'a> {
    /// Use exactly this cgroup.
    pub(crate) cgroup: Option<&'a Path>,
    /// Mount point of the node's cgroup file systems, or a directory above.
    pub(crate) root: Option<&'a Path>,
    /// Uid of the agent's own pod, which runs below the wanted cgroup.
    pub(crate) pod_uid: Option<&'a str>,
}

impl AttachPoint {
    /// The attach point given by the user.
    pub(crate) fn given(path: PathBuf) -> Self {
        Self { path, reason: "given by --cgroup".to_owned(), is_root: false }
    }

    /// Finds the attach point.
    ///
    /// # Errors
    /// When there is no cgroup2, or when the tree cannot be the node's.
    pub(crate) fn find(search: Search<'_>) -> Result<Self, HostError> {
        if let Some(path) = search.cgroup {
            return if path.is_dir() && is_cgroup2(path) {
                Ok(Self::given(path.to_path_buf()))
            } else {
                Err(HostError::NotCgroup2 { path: path.display().to_string() })
            };
        }
        let mounts = fs::read_to_string(MOUNTS).map_err(|source| HostError::Read { path: MOUNTS, source })?;
        let root = mount_point(&mounts, search.root, is_whole).ok_or_else(|| match search.root {
            None => HostError::NoCgroup2,
            Some(root) => HostError::NoCgroup2Below { path: root.display().to_string() },
        })?;
        let Some(uid) = search.pod_uid else { return Ok(Self::of_any_cluster(root)) };
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
            None if is_whole(&root) => {
                Ok(Self { path: root, reason: "the cgroup2 tree has no cgroups of pods".to_owned(), is_root: true })
            }
            None => Err(HostError::ForeignCgroup2 { path: root.display().to_string(), uid: uid.to_owned() }),
        }
    }

    /// The cgroup of the pods of the only cluster with a node here. If there are two, either would be a guess.
    fn of_any_cluster(root: PathBuf) -> Self {
        let found = find_kubepods(&root, MAX_DEPTH);
        let (path, reason) = match found.as_slice() {
            [path] => {
                return Self { path: path.clone(), reason: "Kubernetes' pods run below it".to_owned(), is_root: false };
            }
            [] if is_whole(&root) => (root, "there are no Kubernetes pods".to_owned()),
            [] => (root, "there are no Kubernetes pods in this part of the node's cgroup2 tree".to_owned()),
            several => {
                let paths: Vec<String> = several.iter().map(|path| path.display().to_string()).collect();
                (root, format!("several nodes' pods run here: choose one of {} with --cgroup", paths.join(", ")))
            }
        };
        Self { path, reason, is_root: true }
    }

    /// Possible cgroups of a pod, by quality of service and cgroup driver.
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

/// The uid of the pod whose cgroup has this name, with either of the kubelet's drivers; `None` if it is no pod's.
pub(crate) fn pod_uid(cgroup: &str) -> Option<String> {
    match cgroup.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod").map(|(_, uid)| uid.replace('_', "-")),
        None => cgroup.strip_prefix("pod").map(str::to_owned),
    }
}

/// "cgroup2", or "hybrid" if controllers of version 1 are mounted as well.
pub(crate) fn layout() -> &'static str {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    if file_systems(&mounts).any(|(_, kind)| kind == "cgroup") { "hybrid" } else { "cgroup2" }
}

/// This process's cgroup.
///
/// # Errors
/// When no mounted cgroup2 contains it.
pub(crate) fn own() -> io::Result<PathBuf> {
    let (mounts, own) = (fs::read_to_string(MOUNTS)?, fs::read_to_string(OWN)?);
    // The path is relative to this process's cgroup namespace, like a mount in it.
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).ok_or(io::ErrorKind::NotFound)?;
    let mounted = file_systems(&mounts).filter(|(_, kind)| *kind == "cgroup2").map(|(root, _)| root.join(path));
    let pid = std::process::id().to_string();
    let has_this = |cgroup: &PathBuf| {
        fs::read_to_string(cgroup.join("cgroup.procs")).is_ok_and(|processes| processes.lines().any(|line| line == pid))
    };
    mounted.into_iter().find(has_this).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The processes in the cgroup with this id (its inode number), searched below a directory. Empty if it does not
/// exist.
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

/// Whether a cgroup2 file system is mounted.
pub(crate) fn is_mounted() -> bool {
    fs::read_to_string(MOUNTS).is_ok_and(|mounts| file_systems(&mounts).any(|(_, kind)| kind == "cgroup2"))
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

/// A cgroup2 mount point, at or below `root` if that is given: the first that has the whole tree, else the first. A
/// container with its own cgroup namespace has a part at the usual place and may have the node's tree elsewhere.
fn mount_point(mounts: &str, root: Option<&Path>, is_whole: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let found = file_systems(mounts).filter(|(_, kind)| *kind == "cgroup2").map(|(path, _)| path);
    let mut found = found.filter(|path| root.is_none_or(|root| path.starts_with(root)));
    let first = found.next()?;
    if is_whole(&first) { Some(first) } else { Some(found.find(|path| is_whole(path)).unwrap_or(first)) }
}

/// Whether a mount shows a hierarchy from its own root on.
fn is_whole(mount_point: &Path) -> bool {
    fs::metadata(mount_point).is_ok_and(|metadata| metadata.ino() == ROOT_INODE)
}

/// The directories in a directory, by name.
fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().filter_map(io::Result::ok);
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut paths: Vec<PathBuf> = directories.map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}

/// The cgroups of all pods of a node, at most `depth` levels down. Cgroups inside a pod are not searched.
fn find_kubepods(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let (mut level, mut found) = (vec![directory.to_path_buf()], Vec::new());
    for _ in 0..depth {
        let (pods, others): (Vec<_>, Vec<_>) =
            level.iter().flat_map(|path| children(path)).partition(|path| is_kubepods(path));
        found.extend(pods);
        level = others;
    }
    found
}

/// The cgroup of a pod, at most `depth` levels down.
fn find_pod(directory: &Path, uid: &str, depth: usize) -> Option<PathBuf> {
    let (cgroupfs, systemd) = (format!("pod{uid}"), format!("pod{}.slice", uid.replace('-', "_")));
    let mut level = vec![directory.to_path_buf()];
    for _ in 0..depth {
        level = level.iter().flat_map(|path| children(path)).collect();
        let is_pod = |path: &&PathBuf| {
            let name = name(path);
            name == cgroupfs || name.ends_with(&systemd)
        };
        if let Some(pod) = level.iter().find(is_pod) {
            return Some(pod.clone());
        }
    }
    None
}

/// The nearest ancestor that is the kubelet's cgroup of all pods.
fn kubepods(pod: &Path) -> Option<PathBuf> {
    pod.ancestors().skip(1).find(|path| is_kubepods(path)).map(Path::to_path_buf)
}

/// The kubelet's names for it: with the cgroupfs driver, with the systemd driver, and with that and a `--cgroup-root`.
fn is_kubepods(path: &Path) -> bool {
    let name = name(path);
    matches!(name, "kubepods" | "kubepods.slice") || name.ends_with("-kubepods.slice")
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
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
        let whole = |_: &Path| true;
        assert_eq!(mount_point(mounts, None, whole).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let host = Some(Path::new("/host/cgroup"));
        assert_eq!(mount_point(mounts, host, whole).unwrap(), Path::new("/host/cgroup/unified"));
        assert_eq!(mount_point("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", None, whole), None);
    }

    #[test]
    fn prefers_the_nodes_tree_to_a_private_part_of_it() {
        let mounts = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n\
                      51 31 0:38 /../../.. /host/cgroup rw - cgroup2 cgroup rw\n";
        let host = Path::new("/host/cgroup");
        assert_eq!(mount_point(mounts, None, |path| path == host).unwrap(), host);
        assert_eq!(mount_point(mounts, None, |_| false).unwrap(), Path::new("/sys/fs/cgroup"), "there is no other one");
    }

    /// Places of pods' cgroups: the driver, and the environment of the node.
    const LAYOUTS: [(&str, &str, &str); 10] = [
        ("cgroupfs", "kubepods/burstable/pod0a1b-22-33", "kubepods"),
        ("cgroupfs, guaranteed", "kubepods/pod0a1b-22-33", "kubepods"),
        ("systemd", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b_22_33.slice", "kubepods.slice"),
        ("systemd, guaranteed", "kubepods.slice/kubepods-pod0a1b_22_33.slice", "kubepods.slice"),
        (
            "systemd below kubelet.slice (kind)",
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod0a1b_22_33.slice",
            "kubelet.slice/kubelet-kubepods.slice",
        ),
        ("cgroupfs below kubelet (kind)", "kubelet/kubepods/besteffort/pod0a1b-22-33", "kubelet/kubepods"),
        (
            "kind, seen from its host",
            "system.slice/docker-c0ffee.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod0a1b_22_33.slice",
            "system.slice/docker-c0ffee.scope/kubelet.slice/kubelet-kubepods.slice",
        ),
        (
            "kind by cgroupfs, seen from its host",
            "docker/c0ffee/kubelet/kubepods/pod0a1b-22-33",
            "docker/c0ffee/kubelet/kubepods",
        ),
        ("k3s in docker, seen from its host", "docker/c0ffee/kubepods/pod0a1b-22-33", "docker/c0ffee/kubepods"),
        (
            "k3s without root",
            "user.slice/user-1000.slice/user@1000.service/k3s-rootless.scope/kubepods/burstable/pod0a1b-22-33",
            "user.slice/user-1000.slice/user@1000.service/k3s-rootless.scope/kubepods",
        ),
    ];

    #[test]
    fn every_known_layout_is_found_with_and_without_the_agents_pod() {
        for (layout, pod, expected) in LAYOUTS {
            let root = tree(&[pod, "system.slice/containerd.service", "init.scope"]);
            let expected = root.path().join(expected);
            let of_pod = find_pod(root.path(), UID, MAX_DEPTH).and_then(|pod| kubepods(&pod));
            assert_eq!(of_pod.as_deref(), Some(&*expected), "{layout}");
            let found = AttachPoint::of_any_cluster(root.path().to_path_buf());
            assert_eq!((found.path.as_path(), found.is_root), (&*expected, false), "{layout}");
            // Below it, the pod is among the searched cgroups, and it alone is a pod's.
            assert!(found.pod_cgroups(UID).contains(&root.path().join(pod)), "{layout}");
            let uids: Vec<String> = pod.split('/').filter_map(pod_uid).collect();
            assert_eq!(uids, [UID], "{layout}");
        }
    }

    #[test]
    fn a_cluster_inside_a_pod_is_that_pods_own() {
        let outer = "kubepods/burstable/podouter";
        let root = tree(&[&format!("{outer}/c0ffee/kubelet/kubepods/burstable/pod0a1b-22-33")]);
        assert_eq!(AttachPoint::of_any_cluster(root.path().to_path_buf()).path, root.path().join("kubepods"));
        // The agent of the inner cluster runs in it.
        let inner = find_pod(root.path(), UID, MAX_DEPTH).and_then(|pod| kubepods(&pod));
        assert_eq!(inner.unwrap(), root.path().join(outer).join("c0ffee/kubelet/kubepods"));
    }

    #[test]
    fn two_nodes_on_a_host_are_not_guessed_between() {
        let root = tree(&["docker/a/kubelet/kubepods/poda", "docker/b/kubelet/kubepods/podb"]);
        let found = AttachPoint::of_any_cluster(root.path().to_path_buf());
        assert!(found.is_root && found.path == root.path(), "{found:?}");
        assert!(found.reason.contains("docker/a/kubelet/kubepods") && found.reason.contains("--cgroup"), "{found:?}");
    }

    #[test]
    fn without_pods_it_is_the_root_and_a_part_of_a_tree_says_so() {
        let root = tree(&["system.slice", "kubepods-like"]);
        let found = AttachPoint::of_any_cluster(root.path().to_path_buf());
        assert!(found.is_root && found.path == root.path(), "{found:?}");
        assert!(found.reason.contains("part of the node's"), "a directory is no hierarchy's root: {found:?}");
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
    fn finds_its_own() {
        let own = own().unwrap();
        assert!(is_cgroup2(&own), "{}", own.display());
    }

    #[test]
    fn a_directory_on_disk_is_no_cgroup() {
        let directory = tempfile::tempdir().unwrap();
        let search = Search { cgroup: Some(directory.path()), ..Search::default() };
        assert!(matches!(AttachPoint::find(search), Err(HostError::NotCgroup2 { .. })));
    }
}
