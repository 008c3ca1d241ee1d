//! Locates a pod's network namespace by its uid, from the traces of the kubelet and the container runtime on the node:
//! the pod's cgroup, the processes in it, and their namespaces. Does not query the runtime, so it works with any.
//! Reads, never changes.
//!
//! ```text
//! KUBEPODS/burstable/podUID/CONTAINER/cgroup.procs ─> oldest process that is not in the host's namespace
//!     ─> /proc/PID/ns/net, /proc/PID/uid_map
//! ```
//!
//! The oldest process is the runtime's own, which holds the pod's namespaces. An application may create further
//! network namespaces, but its processes are younger.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use weft_k8s_api::{
    inject::{Exemption, Redirection},
    labels,
};

use super::pod::MeshedPod;
use crate::{
    cgroup::AttachPoint,
    datapath::{
        addresses::is_link_local,
        cookies::Cookies,
        netns::{Netns, NetnsError},
        rules::Proxy,
        scans::CpuMeter,
    },
};

/// Levels of cgroups that are searched in a pod's: a container's own, the one inside it in which crun starts the
/// process of a systemd scope, and one in which a container's init may put itself.
const CONTAINER_DEPTH: usize = 3;

/// A pod's namespaces.
#[derive(Debug)]
pub(super) struct Sandbox {
    pub(super) netns: Netns,
    pub(super) proxy: Proxy,
    /// Time since the pod's first process started, with a resolution of 10 ms.
    pub(super) age: Duration,
}

/// What is still missing. All of it may appear with time.
#[derive(Debug, thiserror::Error)]
pub(super) enum LocateError {
    #[error("its sandbox has not started: no process in its cgroup")]
    NoProcess,
    #[error("its processes are in the node's network namespace still")]
    HostNetns,
    #[error("its network namespace has no address yet")]
    NoAddress,
    #[error("its user namespace has no mapping for the proxy's id {id} yet")]
    IdMapping { id: i64 },
    #[error("its proxy's container has not started")]
    NoProxyContainer,
    #[error(
        "{name}: its proxy cannot be recognised by its cgroup, because the node's cgroup2 tree has no cgroups of pods; use `user`",
        name = labels::PROXY_EXEMPTION
    )]
    NoPodCgroups,
    #[error("process {pid} ended while it was looked at")]
    Ended { pid: u32 },
    #[error("cannot read {path} (needs hostPID and CAP_SYS_PTRACE)")]
    Read { path: String, source: io::Error },
    #[error(transparent)]
    Netns(#[from] NetnsError),
}

/// The place of pods on the node.
#[derive(Clone, Debug)]
pub(super) struct Locator {
    attach: AttachPoint,
    cookies: Cookies,
    proc: PathBuf,
    host_netns: u64,
    host_users: u64,
}

/// A process and its age.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    start_ticks: u64,
    pid: u32,
}

impl Locator {
    /// Searches below the cgroup that the programs are attached to.
    ///
    /// # Errors
    /// When the agent's own namespaces cannot be read.
    pub(super) fn new(attach: AttachPoint, cookies: Cookies) -> Result<Self, LocateError> {
        let proc = PathBuf::from("/proc");
        let own = |name: &str| inode(&proc.join("self/ns").join(name));
        Ok(Self { host_netns: own("net")?, host_users: own("user")?, attach, cookies, proc })
    }

    /// Locates a pod, and its proxy according to its rules.
    pub(super) fn find(
        &self,
        pod: &MeshedPod,
        rules: &Redirection,
        meter: &mut CpuMeter,
    ) -> Result<Sandbox, LocateError> {
        let uid = pod.uid.as_str();
        let mut processes = Vec::new();
        for pid in self.pids(uid, meter)? {
            // A process that has exited is not the one that holds the namespaces.
            if let Some(start_ticks) = self.start_ticks(pid) {
                processes.push(Process { start_ticks, pid });
            }
        }
        processes.sort_unstable();
        if processes.is_empty() {
            return Err(LocateError::NoProcess);
        }
        for Process { start_ticks, pid } in processes {
            let path = self.proc.join(pid.to_string()).join("ns/net");
            let Some(file) = self.of_process(pid, &path, File::open(&path))? else { continue };
            let inode = file.metadata().map_err(|source| reading(&path, source))?.ino();
            // Helpers of the runtime, and a container that has not entered its namespaces yet.
            if inode == self.host_netns {
                continue;
            }
            let proxy = self.proxy(pid, pod, rules)?;
            // The pid may have been reused before the file was opened.
            if !self.has_process(uid, pid)? || self.start_ticks(pid) != Some(start_ticks) {
                return Err(LocateError::Ended { pid });
            }
            let netns = Netns::enter(file, &path, &self.cookies, proxy.uid)?;
            if netns.addresses.iter().all(is_link_local) {
                return Err(LocateError::NoAddress);
            }
            return Ok(Sandbox { netns, proxy, age: age(start_ticks) });
        }
        Err(LocateError::HostNetns)
    }

    /// The pod's own cgroup, once the kubelet has created it.
    pub(super) fn pod_cgroup(&self, uid: &str) -> Option<PathBuf> {
        self.attach.pod_cgroups(uid).into_iter().find(|path| path.is_dir())
    }

    /// The pod's processes, with the node's pids.
    fn pids(&self, uid: &str, meter: &mut CpuMeter) -> Result<Vec<u32>, LocateError> {
        if self.attach.is_root {
            // Takes time for each process of the node.
            return meter.leave_out(|| self.pids_by_membership(uid));
        }
        self.pids_by_cgroup(uid)
    }

    fn has_process(&self, uid: &str, pid: u32) -> Result<bool, LocateError> {
        if self.attach.is_root { Ok(self.is_member(uid, pid)) } else { Ok(self.pids_by_cgroup(uid)?.contains(&pid)) }
    }

    fn pids_by_cgroup(&self, uid: &str) -> Result<Vec<u32>, LocateError> {
        let Some(pod) = self.pod_cgroup(uid) else { return Ok(Vec::new()) };
        Ok(populated(children(&pod)?)?.into_iter().flat_map(|(_, pids)| pids).collect())
    }

    /// Without a cgroup2 tree of pods: the processes with the pod's uid in any hierarchy.
    fn pids_by_membership(&self, uid: &str) -> Result<Vec<u32>, LocateError> {
        let entries = fs::read_dir(&self.proc).map_err(|source| reading(&self.proc, source))?;
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Ok(pids.filter(|pid| self.is_member(uid, *pid)).collect())
    }

    fn is_member(&self, uid: &str, pid: u32) -> bool {
        let membership = fs::read_to_string(self.proc.join(pid.to_string()).join("cgroup")).unwrap_or_default();
        membership.contains(uid) || membership.contains(&uid.replace('-', "_"))
    }

    /// Field 22 of /proc/PID/stat (proc(5)): clock ticks after boot.
    fn start_ticks(&self, pid: u32) -> Option<u64> {
        let stat = fs::read_to_string(self.proc.join(pid.to_string()).join("stat")).ok()?;
        start_ticks(&stat)
    }

    /// The proxy of a process's pod.
    fn proxy(&self, pid: u32, pod: &MeshedPod, rules: &Redirection) -> Result<Proxy, LocateError> {
        let uid = self.host_id(pid, rules.proxy_uid, "uid_map", pod.user_namespace)?;
        let gid = match rules.proxy_gid {
            Some(gid) => self.host_id(pid, gid, "gid_map", pod.user_namespace)?,
            None => 0,
        };
        let cgroup = match rules.exemption {
            Exemption::User => 0,
            Exemption::Cgroup if self.attach.is_root => return Err(LocateError::NoPodCgroups),
            Exemption::Cgroup => self.container_cgroup(pod)?,
        };
        Ok(Proxy { uid, gid, cgroup })
    }

    /// The id of the cgroup of the pod's proxy: of the directory that the runtime named after the container, or of the
    /// one inside it in which the process was started. The programs compare the process's own cgroup, and not its
    /// ancestors.
    fn container_cgroup(&self, pod: &MeshedPod) -> Result<u64, LocateError> {
        let (Some(container), Some(cgroup)) = (&pod.proxy_container, self.pod_cgroup(&pod.uid)) else {
            return Err(LocateError::NoProxyContainer);
        };
        let Some(entries) = ended_is_none(&cgroup, fs::read_dir(&cgroup))? else {
            return Err(LocateError::NoProxyContainer);
        };
        // `ID`, or as a systemd scope `cri-containerd-ID.scope`. CRI-O's monitor has `crio-conmon-ID.scope`.
        let is_containers = |name: &str| name.contains(container.as_str()) && !name.starts_with("crio-conmon-");
        let mut names = entries.filter_map(Result::ok);
        let found = names.find(|entry| entry.file_name().to_str().is_some_and(is_containers));
        let scope = found.ok_or(LocateError::NoProxyContainer)?.path();
        let (started_in, _) = populated(vec![scope])?.into_iter().next().ok_or(LocateError::NoProxyContainer)?;
        ended_is_none(&started_in, fs::metadata(&started_in))?
            .map(|metadata| metadata.ino())
            .ok_or(LocateError::NoProxyContainer)
    }

    /// A user or group of a pod as seen from the host; `map` is the name of the file in /proc/PID.
    fn host_id(&self, pid: u32, id: i64, map: &str, user_namespace: bool) -> Result<u32, LocateError> {
        let unmapped = LocateError::IdMapping { id };
        let Ok(in_pod) = u32::try_from(id) else { return Err(unmapped) };
        let process = self.proc.join(pid.to_string());
        let ended = || LocateError::Ended { pid };
        let users = process.join("ns/user");
        // A process that is entering its namespaces enters the network's before the user's.
        if user_namespace {
            let users = self.of_process(pid, &users, fs::metadata(&users))?.ok_or_else(ended)?;
            if users.ino() == self.host_users {
                return Err(unmapped);
            }
        }
        // Also for a pod without `hostUsers: false`: some runtimes map the users of every pod. The host's map changes
        // nothing.
        let path = process.join(map);
        let map = self.of_process(pid, &path, fs::read_to_string(&path))?.ok_or_else(ended)?;
        map_id(&map, in_pod).ok_or(unmapped)
    }

    /// `None` if the process has ended in between. While it disappears, the kernel denies access to its namespaces, and
    /// calls a read of its `uid_map` invalid.
    fn of_process<T>(&self, pid: u32, path: &Path, result: io::Result<T>) -> Result<Option<T>, LocateError> {
        ended_is_none(path, result).or_else(|error| if self.start_ticks(pid).is_none() { Ok(None) } else { Err(error) })
    }
}

fn reading(path: &Path, source: io::Error) -> LocateError {
    LocateError::Read { path: path.display().to_string(), source }
}

/// `None` if the process or cgroup has ended in between.
fn ended_is_none<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>, LocateError> {
    match result {
        Ok(value) => Ok(Some(value)),
        // ESRCH: the process is a zombie; ENODEV: the cgroup was removed under an open file.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENODEV)) =>
        {
            Ok(None)
        }
        Err(source) => Err(reading(path, source)),
    }
}

/// The containers' cgroups, and those inside, that have processes: outer ones first.
fn populated(mut level: Vec<PathBuf>) -> Result<Vec<(PathBuf, Vec<u32>)>, LocateError> {
    let mut found = Vec::new();
    for _ in 0..CONTAINER_DEPTH {
        let mut below = Vec::new();
        for cgroup in level {
            let path = cgroup.join("cgroup.procs");
            let Some(text) = ended_is_none(&path, fs::read_to_string(&path))? else { continue };
            below.extend(children(&cgroup)?);
            // A process outside the agent's PID namespace reads as 0.
            let pids: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).collect();
            if !pids.is_empty() {
                found.push((cgroup, pids));
            }
        }
        level = below;
    }
    Ok(found)
}

/// The cgroups in a cgroup; empty if it is gone.
fn children(cgroup: &Path) -> Result<Vec<PathBuf>, LocateError> {
    let entries = ended_is_none(cgroup, fs::read_dir(cgroup))?.into_iter().flatten().filter_map(io::Result::ok);
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(directories.map(|entry| entry.path()).collect())
}

fn inode(path: &Path) -> Result<u64, LocateError> {
    fs::metadata(path).map(|metadata| metadata.ino()).map_err(|source| reading(path, source))
}

fn start_ticks(stat: &str) -> Option<u64> {
    // The command's name, in parentheses, may contain anything; nineteen fields lie between it and the start.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A user in a namespace as seen from the host (user_namespaces(7)): lines of inside, outside, length.
fn map_id(map: &str, id: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (Some(Ok(inside)), Some(Ok(outside)), Some(Ok(length))) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return None;
        };
        let offset = id.checked_sub(inside).filter(|offset| *offset < length)?;
        outside.checked_add(offset)
    })
}

fn age(start_ticks: u64) -> Duration {
    /// USER_HZ, the unit of /proc on every architecture that is supported.
    const TICKS_PER_SECOND: u64 = 100;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default());
    now.saturating_sub(Duration::from_millis(start_ticks * (1000 / TICKS_PER_SECOND)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use rustix::fs::{Mode, OFlags};
    use weft_k8s_api::inject::RedirectionDefaults;

    use super::*;
    use crate::datapath::scans::tests::is_long;

    #[test]
    fn reads_the_start_behind_a_strange_name() {
        let stat = "71 (a) b (c) S 1 71 71 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 2 3";
        assert_eq!(start_ticks(stat), Some(123_456));
        assert_eq!(start_ticks("71 (a"), None);
    }

    #[test]
    fn maps_users_as_the_kernel_does() {
        let rows: [(&str, u32, Option<u32>); 6] = [
            ("         0          0 4294967295\n", 2102, Some(2102)),
            ("0 65536 65536\n", 2102, Some(67_638)),
            ("0 1000 1\n1 100000 65536\n", 2102, Some(102_101)),
            ("0 65536 2000\n", 2102, None),
            ("", 2102, None),
            ("0 4294967290 65536\n", 2102, None),
        ];
        for (map, uid, expected) in rows {
            assert_eq!(map_id(map, uid), expected, "{map:?}");
        }
    }

    #[test]
    fn a_pod_without_cgroup_has_no_process() {
        let directory = tempfile::tempdir().unwrap();
        let attach = AttachPoint::given(directory.path().to_path_buf());
        let locator = Locator::new(attach, Cookies::Kernel).unwrap();
        let (pod, rules) = pod("u", None);
        assert!(matches!(locator.find(&pod, &rules, &mut CpuMeter::start()), Err(LocateError::NoProcess)));
    }

    #[test]
    fn finds_processes_wherever_runtimes_put_them() {
        for container in ["cri-containerd-aa.scope", "crio-aa.scope/container", "crio-aa.scope/container/init.scope"] {
            let directory = tempfile::tempdir().unwrap();
            let kubepods = directory.path().join("kubepods.slice");
            let pod = kubepods.join("kubepods-burstable.slice/kubepods-burstable-pod11_22.slice");
            fs::create_dir_all(pod.join(container)).unwrap();
            // In cgroup2 a cgroup that has cgroups has an empty list.
            for cgroup in Path::new(container).ancestors() {
                fs::write(pod.join(cgroup).join("cgroup.procs"), "").unwrap();
            }
            let locator = Locator::new(AttachPoint::given(kubepods), Cookies::Kernel).unwrap();
            assert_eq!(locator.pids_by_cgroup("11-22").unwrap(), [0; 0], "{container}");
            fs::write(pod.join(container).join("cgroup.procs"), "0\n4711\n").unwrap();
            assert_eq!(locator.pids_by_cgroup("11-22").unwrap(), [4711], "{container}");
            assert_eq!(locator.pids_by_cgroup("11-23").unwrap(), [0; 0], "another pod");
        }
    }

    /// The files of a process are found before it ends, and read after that.
    #[test]
    fn a_process_that_ends_while_its_files_are_looked_up_is_not_an_error() {
        let locator = Locator::new(AttachPoint::given("/sys/fs/cgroup".into()), Cookies::Kernel).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, process) = (child.id(), PathBuf::from("/proc").join(child.id().to_string()));
        let found = |name: &str| rustix::fs::open(process.join(name), OFlags::PATH | OFlags::NOFOLLOW, Mode::empty());
        let (namespace, map) = (found("ns/net").unwrap(), found("uid_map").unwrap());
        let read = || {
            let namespace = rustix::fs::readlinkat(&namespace, "", Vec::new()).map_err(io::Error::from);
            let map = fs::read_to_string(format!("/proc/self/fd/{}", map.as_raw_fd()));
            [("ns/net", namespace.map(drop)), ("uid_map", map.map(drop))]
        };
        for (name, result) in read() {
            assert!(locator.of_process(pid, &process.join(name), result).unwrap().is_some(), "{name}");
        }
        let denied = Err(io::Error::from_raw_os_error(libc::EACCES));
        assert!(locator.of_process::<()>(pid, &process, denied).is_err(), "it is there");
        child.kill().unwrap();
        child.wait().unwrap();
        for ((name, result), errno) in read().into_iter().zip([libc::EACCES, libc::EINVAL]) {
            assert_eq!(result.as_ref().unwrap_err().raw_os_error(), Some(errno), "{name}");
            assert!(locator.of_process(pid, &process.join(name), result).unwrap().is_none(), "{name}");
        }
    }

    #[test]
    fn a_process_in_the_host_network_is_not_the_pod() {
        let directory = tempfile::tempdir().unwrap();
        let container = directory.path().join("burstable/pod11-22/aa");
        fs::create_dir_all(&container).unwrap();
        fs::write(container.join("cgroup.procs"), format!("0\n{}\n", std::process::id())).unwrap();
        let locator = Locator::new(AttachPoint::given(directory.path().to_path_buf()), Cookies::Kernel).unwrap();
        let (pod, rules) = pod("11-22", None);
        assert!(matches!(locator.find(&pod, &rules, &mut CpuMeter::start()), Err(LocateError::HostNetns)));
    }

    #[test]
    fn the_nodes_processes_do_not_count_as_the_pods() {
        let directory = tempfile::tempdir().unwrap();
        for pid in 1..=12_000 {
            let process = directory.path().join(pid.to_string());
            fs::create_dir(&process).unwrap();
            // The pod has the last two.
            let uid = if pid > 11_998 { "11_22" } else { "33_44" };
            fs::write(process.join("cgroup"), format!("4:memory:/kubepods-pod{uid}.slice/aa\n")).unwrap();
        }
        let attach = AttachPoint { is_root: true, ..AttachPoint::given("/sys/fs/cgroup".into()) };
        let locator = Locator::new(attach, Cookies::Kernel).unwrap();
        let locator = Locator { proc: directory.path().to_path_buf(), ..locator };
        let mut meter = CpuMeter::start();
        let mut found = locator.pids("11-22", &mut meter).unwrap();
        found.sort_unstable();
        assert_eq!(found, [11_999, 12_000]);
        assert!(!is_long(&meter), "{meter:?}");
        let has = |uid, pid| locator.has_process(uid, pid).unwrap();
        assert!(has("11-22", 12_000) && !has("11-22", 1) && !has("11-22", 12_001));
    }

    #[test]
    fn a_proxy_is_known_by_its_containers_cgroup() {
        let directory = tempfile::tempdir().unwrap();
        let locator = Locator::new(AttachPoint::given(directory.path().to_path_buf()), Cookies::Kernel).unwrap();
        for (uid, scope, inside) in [
            ("1", "burstable/pod1/c0ffee", ""),
            ("2", "pod2/cri-containerd-c0ffee.scope", ""),
            ("3", "pod3/crio-c0ffee.scope", "container"),
        ] {
            let scope = directory.path().join(scope);
            let path = scope.join(inside);
            let (proxy, _) = pod(uid, Some("c0ffee"));
            let monitor = scope.with_file_name("crio-conmon-c0ffee.scope");
            fs::create_dir_all(&monitor).unwrap();
            fs::write(monitor.join("cgroup.procs"), "4710\n").unwrap();
            let found = locator.container_cgroup(&proxy);
            assert!(matches!(found, Err(LocateError::NoProxyContainer)), "no container: {found:?}");
            fs::create_dir_all(&path).unwrap();
            fs::write(scope.join("cgroup.procs"), "").unwrap();
            fs::write(path.join("cgroup.procs"), "").unwrap();
            let found = locator.container_cgroup(&proxy);
            assert!(matches!(found, Err(LocateError::NoProxyContainer)), "nothing started: {found:?}");
            fs::write(path.join("cgroup.procs"), "4711\n").unwrap();
            assert_eq!(locator.container_cgroup(&proxy).unwrap(), inode(&path).unwrap());
        }
        for (uid, container) in [("1", None), ("1", Some("decaf")), ("4", Some("c0ffee"))] {
            let found = locator.container_cgroup(&pod(uid, container).0);
            assert!(matches!(found, Err(LocateError::NoProxyContainer)), "{uid} {container:?}: {found:?}");
        }
    }

    #[test]
    fn a_process_that_ends_between_two_reads_is_no_failure() {
        let directory = tempfile::tempdir().unwrap();
        let locator = Locator::new(AttachPoint::given(directory.path().to_path_buf()), Cookies::Kernel).unwrap();
        let locator = Locator { proc: directory.path().to_path_buf(), ..locator };
        let (pod, rules) = pod("11-22", None);
        for user_namespace in [false, true] {
            let pod = MeshedPod { user_namespace, ..pod.clone() };
            let found = locator.proxy(4711, &pod, &rules);
            assert!(matches!(found, Err(LocateError::Ended { pid: 4711 })), "{found:?}");
        }
    }

    fn pod(uid: &str, proxy_container: Option<&str>) -> (MeshedPod, Redirection) {
        let change = serde_json::json!({"metadata": {"uid": uid}});
        let read = MeshedPod::read(&super::super::pod::tests::pod("web-0", &change), &RedirectionDefaults::default());
        let pod = MeshedPod { proxy_container: proxy_container.map(str::to_owned), ..read.unwrap() };
        let rules = pod.rules.clone().unwrap();
        (pod, rules)
    }
}
