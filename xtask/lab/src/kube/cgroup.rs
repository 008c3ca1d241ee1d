//! The control groups of one cluster: one directory in every hierarchy, and nothing outside it.
//!
//! Every process of a cluster is below them, in a group of its machine: the components in `components` and the pods
//! where the kubelet puts them, so that the group determines which processes to end, without a list of process ids that
//! could have been reused.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How long killed processes may take to exit.
const END: Duration = Duration::from_secs(20);

/// What a cluster's groups weigh beside a process outside (version 1: `cpu.shares`, 1024 for a process; version 2:
/// `cpu.weight`, 100). With the same weight for all, the dozens of processes of a cluster, which stand for machines of
/// their own, have together what one process of a test beside them has.
const WEIGHTS: [(&str, u32); 2] = [("cpu.shares", 4 * 1024), ("cpu.weight", 4 * 100)];

/// The group of a machine's components, in the machine's group.
const COMPONENTS: &str = "components";

/// The groups of a cluster, or of one of its machines.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// Mount points of the hierarchies, version 1 and 2.
    hierarchies: Vec<Hierarchy>,
    name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    v2: bool,
}

impl Cgroup {
    /// The groups with this name; [`Self::create`] makes them.
    ///
    /// # Errors
    /// When no cgroup2 hierarchy is mounted.
    pub(crate) fn named(name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
        let hierarchies = parse(&mounts);
        if !hierarchies.iter().any(|hierarchy| hierarchy.v2) {
            bail!(
                "no cgroup2 hierarchy is mounted: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"
            );
        }
        Ok(Self { hierarchies, name: name.to_owned() })
    }

    /// Creates the groups, ready to take processes.
    ///
    /// # Errors
    /// When a hierarchy is read-only.
    pub(crate) fn create(&self) -> Result<()> {
        for hierarchy in &self.hierarchies {
            let mut group = hierarchy.mount.clone();
            for (depth, name) in self.name.split('/').chain([COMPONENTS]).enumerate() {
                group.push(name);
                match fs::create_dir(&group) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(error).with_context(|| format!("create {}", group.display()));
                    }
                    _ => prepare(&group),
                }
                if depth == 0 {
                    weigh(&group);
                }
            }
        }
        Ok(())
    }

    /// The group of the components, in every hierarchy.
    pub(crate) fn components(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|hierarchy| hierarchy.mount.join(&self.name).join(COMPONENTS)).collect()
    }

    /// Every process in the groups.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mut found: Vec<u32> = self.roots().flat_map(|root| processes(&root)).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Kills every process and removes the groups. Succeeds if there are none.
    ///
    /// # Errors
    /// When processes or groups are not gone in time.
    pub(crate) fn remove(&self) -> Result<()> {
        let deadline = Instant::now() + END;
        loop {
            for root in self.roots() {
                // Only version 2 has this file (Linux 5.14); every process is in that hierarchy too.
                let kill = root.join("cgroup.kill");
                if kill.exists() {
                    fs::write(&kill, "1").with_context(|| format!("write {}", kill.display()))?;
                }
            }
            let left: Vec<_> = self.roots().filter(|root| remove_tree(root).is_err()).collect();
            let Some(first) = left.first() else { return Ok(()) };
            if Instant::now() > deadline {
                bail!("{} does not go away; processes in it: {:?}", first.display(), self.processes());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn roots(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchies.iter().map(|hierarchy| hierarchy.mount.join(&self.name)).filter(|root| root.exists())
    }
}

/// In mountinfo the mount point is the fifth field, the type follows the separator ` - ` (proc_pid_mountinfo(5)).
fn parse(mounts: &str) -> Vec<Hierarchy> {
    let hierarchy = |line: &str| {
        let (head, tail) = line.split_once(" - ")?;
        let v2 = match tail.split(' ').next()? {
            "cgroup" => false,
            "cgroup2" => true,
            _ => return None,
        };
        Some(Hierarchy { mount: PathBuf::from(head.split(' ').nth(4)?), v2 })
    };
    mounts.lines().filter_map(hierarchy).collect()
}

/// Settings that a new group needs before it can contain processes or children. Files that this hierarchy does not
/// have are skipped, and if the kernel refuses, the first process or the kubelet reports a better reason.
fn prepare(group: &Path) {
    let Some(parent) = group.parent() else { return };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if !group.join("cgroup.controllers").exists()
            && let Ok(inherited) = fs::read_to_string(parent.join(file))
        {
            let _ = fs::write(group.join(file), inherited.trim());
        }
    }
    // Version 2: children get a controller only if their parent passes it on. The group of the components is a leaf.
    if !group.ends_with(COMPONENTS)
        && let Ok(controllers) = fs::read_to_string(parent.join("cgroup.controllers"))
    {
        for controller in controllers.split_whitespace() {
            for directory in [parent, group] {
                let _ = fs::write(directory.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
    }
}

/// Sets the weight of a cluster in the hierarchy that has the controller of processors, if it is this one.
fn weigh(cluster: &Path) {
    for (file, weight) in WEIGHTS {
        let file = cluster.join(file);
        if file.exists() {
            let _ = fs::write(file, weight.to_string());
        }
    }
}

fn processes(group: &Path) -> Vec<u32> {
    let own = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let own = own.lines().filter_map(|line| line.parse().ok());
    own.chain(children(group).iter().flat_map(|child| processes(child))).collect()
}

fn remove_tree(group: &Path) -> io::Result<()> {
    for child in children(group) {
        remove_tree(&child)?;
    }
    match fs::remove_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn children(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_by_type_wherever_they_are_mounted() {
        let mounts = "\
            30 20 0:26 / /sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw\n\
            31 30 0:27 / /sys/fs/cgroup/cpu rw shared:10 - cgroup cgroup rw,cpu\n\
            40 30 0:36 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = parse(mounts);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], Hierarchy { mount: "/sys/fs/cgroup/cpu".into(), v2: false });
        assert_eq!(found[1], Hierarchy { mount: "/sys/fs/cgroup/unified".into(), v2: true });
    }
}
