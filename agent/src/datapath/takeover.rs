//! Finds the sockets of a proxy that listened before the programs were attached, and takes them from its process.
//!
//! ```text
//! sock_diag in the pod's namespace: listeners on the proxy's ports, made by the proxy's user
//!     ─> processes in the namespace that run as that user or, in a strict pod, in the proxy's cgroup
//!     ─> child process: pidfd_getfd (Linux 5.6) of each descriptor, is it one of those sockets? ─SCM_RIGHTS─> here
//! ```
//!
//! /proc/PID/fd would show which descriptor it is, but reading it takes CAP_DAC_READ_SEARCH, a right to every file of
//! the node; CAP_SYS_PTRACE is enough to try. A descriptor of a pod may refer to a file on a file system whose server
//! does not answer: closing it can hang, and no signal ends that. So a child process does it, at most one for each
//! pod, which is abandoned after [`DEADLINE`]. Only sockets are queried.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::MetadataExt as _, net::UnixStream as StdStream},
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        recvmsg, sendmsg, sockopt::socket_domain,
    },
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use tokio::{
    io::{AsyncReadExt as _, Interest},
    net::UnixStream,
    process::{Child, Command},
};

use crate::{
    cgroup,
    datapath::{
        netns::Netns,
        scans::{CpuMeter, ScanSlots},
        sock_diag::Listening,
    },
};

/// The subcommand under which the agent starts itself as the child process.
pub(crate) const SUBCOMMAND: &str = "take-listeners";
/// Deadline of a search.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long a killed child process may take to be gone before it counts as hanging.
const END: Duration = Duration::from_millis(500);
/// The most processes of the proxy's user that are inspected. A proxy is one process.
const MAX_PROCESSES: usize = 1024;
/// The longest error message of a child, in bytes.
const MAX_COMPLAINT_BYTES: u64 = 1024;

/// Parameters of a search.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    /// The proxy's user as seen from the host.
    pub(crate) proxy_uid: u32,
    /// The cgroup of the proxy's processes, in a strict pod.
    pub(crate) proxy_cgroup: Option<u64>,
    /// Directory below which pods' cgroups are searched.
    pub(crate) cgroup: PathBuf,
    /// Ports on which any listener of the proxy's user is the proxy's.
    pub(crate) ports: Vec<u16>,
    /// Ports on which the proxy may also listen, on all addresses. One on which it does not is intercepted like any
    /// other.
    pub(crate) own_ports: Vec<u16>,
}

impl Search {
    /// Whether there may be something to find in a namespace, by what listened when it was visited.
    pub(crate) fn may_find(&self, netns: &Netns) -> bool {
        netns.listening.as_ref().is_none_or(|listening| listening.iter().any(|one| self.wants(one)))
    }

    /// Whether a listener may be the proxy's: created by its user, on its ports, with a descriptor in some process.
    fn wants(&self, one: &Listening) -> bool {
        let has_port = self.ports.contains(&one.port) || one.on_all_addresses && self.own_ports.contains(&one.port);
        one.uid == self.proxy_uid && has_port && one.inode != 0
    }
}

/// A listener of a proxy.
#[derive(Debug)]
pub(crate) struct TakenListener {
    pub(crate) port: u16,
    /// 4 or 6.
    pub(crate) family: u8,
    pub(crate) socket: OwnedFd,
}

/// Why a proxy's listeners could not be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeoverError {
    #[error("cannot ask the pod's namespace for its listeners")]
    Ask(#[source] io::Error),
    #[error("cannot look for processes in /proc (needs hostPID)")]
    Processes(#[source] io::Error),
    #[error("cannot start the process that takes listeners")]
    Start(#[source] io::Error),
    #[error(
        "cannot take the proxy's listener (needs Linux 5.6, CAP_SYS_PTRACE, and seccomp that allows pidfd_getfd): {reason}"
    )]
    Take { reason: String },
    #[error(
        "the proxy listens on port {port}, but no process of the pod that runs as user {uid} has that socket: restart the \
         pod"
    )]
    Missing { uid: u32, port: u16 },
    #[error(
        "a process of the pod has a descriptor on which the agent hangs, perhaps a file of a network file system that does \
         not answer: restart the pod"
    )]
    Hangs,
    #[error("an earlier search of the pod's processes has not ended")]
    Busy,
    #[error("cannot search the pod's processes")]
    Scan(#[source] io::Error),
}

/// The result of the first step: the listeners, and the processes that may have them.
#[derive(Debug)]
pub(crate) struct Wanted {
    listeners: Vec<Listening>,
    pids: Vec<i32>,
}

/// Network namespaces whose processes are being searched: at most one search each.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveSearches(Arc<Mutex<BTreeSet<u64>>>);

/// The right to search the processes of one network namespace, until it is dropped.
#[derive(Debug)]
pub(crate) struct SearchGuard {
    searches: ActiveSearches,
    cookie: u64,
}

impl ActiveSearches {
    /// Begins the search of a network namespace, which ends when the guard is dropped.
    ///
    /// # Errors
    /// `Busy` while an earlier search is running.
    pub(crate) fn begin(&self, cookie: u64) -> Result<SearchGuard, TakeoverError> {
        let is_free = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(cookie);
        if is_free { Ok(SearchGuard { searches: self.clone(), cookie }) } else { Err(TakeoverError::Busy) }
    }
}

impl Drop for SearchGuard {
    fn drop(&mut self) {
        self.searches.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.cookie);
    }
}

/// Looks for a proxy's listeners, when its namespace has a slot. Finding none is not an error: most pods are enrolled
/// before their proxy starts.
///
/// # Errors
/// See [`TakeoverError`].
pub(crate) async fn look(
    scans: &ScanSlots<u64>,
    netns: Arc<Netns>,
    search: Search,
) -> Result<Option<Wanted>, TakeoverError> {
    let cookie = netns.cookie;
    let scanned = scans.run(&cookie, move |meter| look_now(&netns, &search, meter)).await;
    scanned.map_err(TakeoverError::Scan)?
}

/// Takes the listeners from the processes.
///
/// # Errors
/// See [`TakeoverError`]. A process that exits during the search is not an error.
pub(crate) async fn take(
    wanted: Wanted,
    search: &Search,
    guard: SearchGuard,
) -> Result<Vec<TakenListener>, TakeoverError> {
    let (taken, complaint) =
        if wanted.pids.is_empty() { Default::default() } else { take_in_child(&wanted, guard).await? };
    for port in search.ports.iter().chain(&search.own_ports).copied() {
        let has = |found: u16| found == port;
        if !wanted.listeners.iter().any(|listener| has(listener.port)) || taken.iter().any(|one| has(one.port)) {
            continue;
        }
        if !complaint.is_empty() {
            return Err(TakeoverError::Take { reason: complaint });
        }
        // In a strict pod it belongs to another process. Otherwise the pod would refuse connections permanently
        // without a reason.
        if search.proxy_cgroup.is_none() && search.ports.contains(&port) {
            return Err(TakeoverError::Missing { uid: search.proxy_uid, port });
        }
    }
    Ok(taken)
}

/// Starts the child process and receives its sockets and its error message.
async fn take_in_child(wanted: &Wanted, guard: SearchGuard) -> Result<(Vec<TakenListener>, String), TakeoverError> {
    let (ours, theirs) = StdStream::pair().map_err(TakeoverError::Start)?;
    let mut child = start(wanted, theirs).map_err(TakeoverError::Start)?;
    let taken = tokio::time::timeout(DEADLINE, receive(ours, &mut child, &wanted.listeners)).await;
    let _ = child.start_kill();
    // For a caller that repeats its request after the answer, the search has ended.
    if tokio::time::timeout(END, child.wait()).await.is_err() {
        // A child that hangs cannot be killed; until it ends, its pod is not searched again.
        tokio::spawn(async move {
            let _ = child.wait().await;
            drop(guard);
        });
    }
    taken.map_err(|_| TakeoverError::Hangs)?.map_err(TakeoverError::Start)
}

fn look_now(netns: &Netns, search: &Search, meter: &mut CpuMeter) -> Result<Option<Wanted>, TakeoverError> {
    let listeners = netns.listening(|one| search.wants(one)).map_err(TakeoverError::Ask)?;
    // Usually there are none yet, and the node may have thousands of processes.
    if listeners.is_empty() {
        return Ok(None);
    }
    let pids = meter.leave_out(|| processes(netns, search)).map_err(TakeoverError::Processes)?;
    Ok(Some(Wanted { listeners, pids }))
}

/// The processes that may be the proxy: in the namespace, and with the proxy's user or in its cgroup.
fn processes(netns: &Netns, search: &Search) -> io::Result<Vec<i32>> {
    let members: Option<BTreeSet<i32>> =
        search.proxy_cgroup.map(|cgroup| cgroup::members(&search.cgroup, cgroup).into_iter().collect());
    let inode = netns.file.metadata()?.ino();
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) else { continue };
        let process = Path::new("/proc").join(pid.to_string());
        let is_inside = fs::metadata(process.join("ns/net")).is_ok_and(|namespace| namespace.ino() == inode);
        let may_be_proxy = |process: &Path| match &members {
            Some(members) => members.contains(&pid),
            None => status_field(process, "Uid:").is_some_and(|uid| uid == u64::from(search.proxy_uid)),
        };
        if is_inside && may_be_proxy(&process) {
            pids.push(pid);
        }
        if pids.len() == MAX_PROCESSES {
            break;
        }
    }
    Ok(pids)
}

/// The first number of a line of /proc/PID/status (proc(5)); `None` for a process that exited.
fn status_field(process: &Path, name: &str) -> Option<u64> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn start(wanted: &Wanted, channel: StdStream) -> io::Result<Child> {
    let numbers = |numbers: &mut dyn Iterator<Item = String>| numbers.collect::<Vec<_>>().join(",");
    Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .args(["--inodes", &numbers(&mut wanted.listeners.iter().map(|listener| listener.inode.to_string()))])
        .args(["--pids", &numbers(&mut wanted.pids.iter().map(i32::to_string))])
        .env_clear()
        .stdin(OwnedFd::from(channel))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
}

/// Receives sockets until the child has finished, and its error message.
async fn receive(
    channel: StdStream,
    child: &mut Child,
    wanted: &[Listening],
) -> io::Result<(Vec<TakenListener>, String)> {
    channel.set_nonblocking(true)?;
    let channel = UnixStream::from_std(channel)?;
    let mut taken = Vec::new();
    while let Some((inode, socket)) = channel.async_io(Interest::READABLE, || receive_one(channel.as_fd())).await? {
        if let Some(listener) = wanted.iter().find(|listener| listener.inode == inode) {
            taken.push(TakenListener { port: listener.port, family: listener.family, socket });
        }
    }
    let mut complaint = String::new();
    if let Some(stderr) = child.stderr.take() {
        stderr.take(MAX_COMPLAINT_BYTES).read_to_string(&mut complaint).await?;
    }
    Ok((taken, complaint.trim().to_owned()))
}

fn receive_one(channel: impl AsFd) -> io::Result<Option<(u64, OwnedFd)>> {
    let mut inode = [0; size_of::<u64>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut parts = RecvAncillaryBuffer::new(&mut space);
    recvmsg(channel, &mut [IoSliceMut::new(&mut inode)], &mut parts, RecvFlags::CMSG_CLOEXEC)?;
    let received = parts.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    });
    Ok(received.map(|socket| (u64::from_le_bytes(inode), socket)))
}

/// The child process: sends the sockets with the given inodes that the given processes have.
///
/// # Errors
/// When the last process that could not be inspected has none of the sockets.
pub(crate) fn send_listeners(pids: &[i32], inodes: &[u64]) -> io::Result<()> {
    let channel = io::stdin();
    let (mut wanted, mut failed): (BTreeSet<u64>, _) = (inodes.iter().copied().collect(), Ok(()));
    for pid in pids {
        match send_of_process(*pid, &mut wanted, channel.as_fd()) {
            Ok(()) => {}
            Err(Errno::SRCH) => {}
            // Another process of the pod may be the proxy.
            Err(error) => failed = Err(io::Error::other(format!("process {pid}: {error}"))),
        }
        if wanted.is_empty() {
            return Ok(());
        }
    }
    failed
}

fn send_of_process(pid: i32, wanted: &mut BTreeSet<u64>, channel: BorrowedFd<'_>) -> Result<(), Errno> {
    let process = pidfd_open(Pid::from_raw(pid).ok_or(Errno::INVAL)?, PidfdFlags::empty())?;
    let slots = status_field(&Path::new("/proc").join(pid.to_string()), "FDSize:").unwrap_or_default();
    for descriptor in 0..i32::try_from(slots).unwrap_or(i32::MAX) {
        let file = match pidfd_getfd(&process, descriptor, PidfdGetfdFlags::empty()) {
            Ok(file) => file,
            Err(Errno::BADF) => continue,
            Err(error) => return Err(error),
        };
        // Fails if it is not a socket, before a file system is involved.
        if socket_domain(&file).is_err() {
            continue;
        }
        let inode = rustix::fs::fstat(&file)?.st_ino;
        if wanted.remove(&inode) {
            send(channel, inode, file.as_fd())?;
        }
        if wanted.is_empty() {
            break;
        }
    }
    Ok(())
}

fn send(channel: impl AsFd, inode: u64, socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut parts = SendAncillaryBuffer::new(&mut space);
    let sockets = [socket];
    parts.push(SendAncillaryMessage::ScmRights(&sockets));
    sendmsg(channel, &[IoSlice::new(&inode.to_le_bytes())], &mut parts, SendFlags::NOSIGNAL).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxys_listeners_are_its_users_on_its_ports() {
        let proxys = Listening { family: 4, port: 4143, on_all_addresses: false, uid: 2102, inode: 4711 };
        let own = Listening { port: 4191, on_all_addresses: true, ..proxys };
        let search = Search {
            proxy_uid: 2102,
            proxy_cgroup: None,
            cgroup: "/".into(),
            ports: vec![4143],
            own_ports: vec![4191],
        };
        for (row, listening, is_proxys) in [
            ("its own", proxys, true),
            ("its own of IPv6", Listening { family: 6, ..proxys }, true),
            ("another port", Listening { port: 4144, ..proxys }, false),
            ("another user's", Listening { uid: 0, ..proxys }, false),
            ("without a descriptor, such as one that is being closed", Listening { inode: 0, ..proxys }, false),
            ("an endpoint of its own", own, true),
            ("one that other pods cannot reach", Listening { on_all_addresses: false, ..own }, false),
        ] {
            assert_eq!(search.wants(&listening), is_proxys, "{row}");
            // What a visit found decides whether a search is worth it.
            let netns = |listening| {
                let file = fs::File::open("/proc/self/ns/net").unwrap();
                Netns { file, cookie: 7, addresses: Vec::new(), listening }
            };
            assert_eq!(search.may_find(&netns(Some(vec![listening]))), is_proxys, "{row}");
            assert!(!search.may_find(&netns(Some(Vec::new()))) && search.may_find(&netns(None)));
        }
    }

    #[test]
    fn a_namespace_is_searched_once_at_a_time() {
        let searches = ActiveSearches::default();
        let first = searches.begin(7).unwrap();
        assert!(matches!(searches.begin(7), Err(TakeoverError::Busy)));
        searches.begin(8).unwrap();
        drop(first);
        searches.begin(7).unwrap();
    }

    #[test]
    fn reads_the_first_number_of_a_status_field() {
        let own = Path::new("/proc/self");
        assert_eq!(status_field(own, "Pid:"), Some(std::process::id().into()));
        assert_eq!(status_field(own, "Uid:"), Some(rustix::process::getuid().as_raw().into()));
        assert_eq!(status_field(own, "Nothing:"), None);
    }
}
