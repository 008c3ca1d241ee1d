//! Listeners of proxies that were there before the programs, which only see sockets begin to listen: a proxy on a node
//! whose agent comes later, or comes back after everything was unloaded. They are taken from the proxy's process and put
//! where the programs put those that they see. Without this such a proxy gets no connection until it starts again.
//!
//! ```text
//! /proc/thread-self/net/tcp{,6} in the pod's namespace: who listens on the inbound port as the proxy's user
//!     ─> /proc/PID/ns/net is the pod's
//!     ─> pidfd_getfd (Linux 5.6): the process's descriptor that is this socket ─> map LISTENERS
//! ```
//!
//! /proc/PID/fd would say which descriptor, but reading it takes CAP_DAC_READ_SEARCH, a right to every file of the node;
//! CAP_SYS_PTRACE is enough to try.
//!
//! A proxy that starts later is none of this file's business. Refuses to replace what the programs recorded.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, MapData, MapError, SockHash};
use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use weft_ebpf_abi::{
    map,
    pod::{EXEMPTS_CGROUP, Owner, Pod},
    socket::{LISTENER_SLOTS, ListenerKey, ProxyKey},
};

use crate::{cgroup, cookies::Namespaces, netns::Netns};

/// Do not replace (linux/bpf.h).
const BPF_NOEXIST: u64 = 1;
/// Descriptors of a process that are tried: a proxy listens before it does anything else, so its listeners have low numbers.
const DESCRIPTORS: std::ops::Range<i32> = 3..1024;
/// `TCP_LISTEN` in /proc/net/tcp.
const LISTENING: &str = "0A";

/// How long it matters not whether a proxy still listens.
const MOMENT: Duration = Duration::from_secs(1);

/// The proxies' listeners, as the programs know them.
pub(crate) struct Listeners {
    map: SockHash<MapData, ListenerKey>,
    proxies: HashMap<MapData, ProxyKey, u8>,
    /// Where sockets carry the cookie of their namespace.
    namespaces: Option<Namespaces>,
    /// The namespaces whose proxy's listeners are known to.
    carrying: BTreeSet<u64>,
    /// The cgroup below which pods run.
    cgroup: PathBuf,
    proc: PathBuf,
    /// Who listened when somebody looked last.
    seen: Option<(Instant, BTreeSet<ProxyKey>)>,
}

/// Why a listener could not be taken over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenersError {
    #[error("cannot read map {name}")]
    Read { name: &'static str, source: MapError },
    #[error("cannot write map {name} (is it full?)")]
    Write { name: &'static str, source: MapError },
    #[error("cannot look for processes in {path} (needs hostPID)")]
    Processes { path: String, source: io::Error },
    #[error("cannot read the pod's table of TCP sockets")]
    Tables(#[source] io::Error),
    #[error(
        "cannot take the listener of process {pid} (needs Linux 5.6, CAP_SYS_PTRACE, and seccomp that allows pidfd_getfd)"
    )]
    Take { pid: i32, source: io::Error },
    #[error(
        "the proxy listens on port {port}, but no process of the pod has that socket of user {uid}: restart the pod"
    )]
    Missing { uid: u32, port: u16 },
}

/// A socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Listening {
    family: u8,
    inode: u64,
}

impl Listeners {
    /// Looks for processes in /proc.
    pub(crate) fn new(
        map: SockHash<MapData, ListenerKey>,
        proxies: HashMap<MapData, ProxyKey, u8>,
        namespaces: Option<Namespaces>,
        cgroup: PathBuf,
    ) -> Self {
        Self { map, proxies, namespaces, carrying: BTreeSet::new(), cgroup, proc: PathBuf::from("/proc"), seen: None }
    }

    /// The proxies that have a listener now: sockets leave the kernel's map by themselves when they are closed.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn living(&self) -> Result<BTreeSet<ProxyKey>, ListenersError> {
        let keys = self.map.keys().map(|key| {
            let ListenerKey { netns_cookie, owner, port, .. } = key?;
            Ok(ProxyKey { netns_cookie, owner, port: port.into(), pad: 0 })
        });
        keys.collect::<Result<_, MapError>>().map_err(|source| ListenersError::Read { name: map::LISTENERS, source })
    }

    /// Takes the notes of proxies whose listeners are gone out of the kernel's map: those do not go by themselves.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn collect_garbage(&mut self) -> Result<(), ListenersError> {
        if !self.carrying.is_empty() {
            let living: BTreeSet<u64> = self.living()?.into_iter().map(|proxy| proxy.netns_cookie).collect();
            // A proxy that starts anew has listeners that are younger than the programs.
            self.carrying.retain(|cookie| living.contains(cookie));
        }
        // Notes first: what is noted listens already, or not any more.
        let notes: Result<Vec<ProxyKey>, MapError> = self.proxies.keys().collect();
        let notes = notes.map_err(|source| ListenersError::Read { name: map::PROXIES, source })?;
        let living = self.living()?;
        let dead: Vec<ProxyKey> = notes.into_iter().filter(|note| !living.contains(note)).collect();
        for note in &dead {
            match self.proxies.remove(note) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(source) if is(&source, io::ErrorKind::NotFound) => {}
                Err(source) => return Err(ListenersError::Write { name: map::PROXIES, source }),
            }
        }
        // A successor may have begun to listen meanwhile.
        let living = if dead.is_empty() { BTreeSet::new() } else { self.living()? };
        dead.iter().filter(|note| living.contains(note)).try_for_each(|note| self.note(*note))
    }

    fn note(&mut self, proxy: ProxyKey) -> Result<(), ListenersError> {
        self.proxies.insert(proxy, 1, 0).map_err(|source| ListenersError::Write { name: map::PROXIES, source })
    }

    /// Lets the programs know the listeners of a pod's proxy, unless they know one already. Returns how many were taken.
    ///
    /// # Errors
    /// See [`ListenersError`]. That a process ends meanwhile is none.
    pub(crate) fn adopt(&mut self, netns: &Netns, pod: &Pod) -> Result<usize, ListenersError> {
        self.have_carry(netns, pod)?;
        let (owner, port) = (pod.proxy(), pod.inbound_port);
        let key = proxy_key(netns.cookie, pod);
        // Without a note there is no listener, with one there was.
        let known = self.is_noted(&key)? && self.was_seen_listening(&key)?;
        let mut adopted = 0;
        if !known {
            for (family, socket) in self.find(netns, pod, port)? {
                adopted += usize::from(self.record(netns.cookie, owner, port, family, &socket)?);
            }
        }
        if known || adopted > 0 {
            self.note(key)?;
        }
        Ok(adopted)
    }

    /// Has a proxy's listeners carry the cookie of their namespace, if sockets do: theirs may be older than the programs,
    /// and what they accept has it from them.
    fn have_carry(&mut self, netns: &Netns, pod: &Pod) -> Result<(), ListenersError> {
        if self.namespaces.is_none() || self.carrying.contains(&netns.cookie) {
            return Ok(());
        }
        let [outbound, inbound] = [self.find(netns, pod, pod.outbound_port)?, self.find(netns, pod, pod.inbound_port)?];
        // A proxy that listens on one port only may come to listen on the other with a socket that is as old.
        let complete = !outbound.is_empty() && !inbound.is_empty();
        for (_, socket) in outbound.into_iter().chain(inbound) {
            if let Some(namespaces) = &mut self.namespaces {
                let written = namespaces.insert(&socket, netns.cookie, 0);
                written.map_err(|source| ListenersError::Write { name: map::NAMESPACES, source })?;
            }
        }
        if complete {
            self.carrying.insert(netns.cookie);
        }
        Ok(())
    }

    /// Whether a proxy has a listener, or had one a moment ago: if it listens again since, the programs have seen that.
    fn was_seen_listening(&mut self, proxy: &ProxyKey) -> Result<bool, ListenersError> {
        let stale = self.seen.as_ref().is_none_or(|(at, seen)| at.elapsed() > MOMENT || !seen.contains(proxy));
        if stale {
            // Walking the map takes a system call for each listener: not for each of a hundred pods that start at once.
            self.seen = Some((Instant::now(), self.living()?));
        }
        Ok(self.seen.as_ref().is_some_and(|(_, seen)| seen.contains(proxy)))
    }

    fn is_noted(&self, proxy: &ProxyKey) -> Result<bool, ListenersError> {
        match self.proxies.get(proxy, 0) {
            Ok(_) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(source) => Err(ListenersError::Read { name: map::PROXIES, source }),
        }
    }

    /// Puts a listener into a free slot. False if there is none: then other members of its group stand for it.
    fn record(
        &mut self,
        netns_cookie: u64,
        owner: Owner,
        port: u16,
        family: u8,
        socket: &OwnedFd,
    ) -> Result<bool, ListenersError> {
        for slot in 0..LISTENER_SLOTS {
            let key = ListenerKey { netns_cookie, owner, port, family, slot, pad: 0 };
            match self.map.insert(key, socket.as_raw_fd(), BPF_NOEXIST) {
                Ok(()) => return Ok(true),
                Err(error) if is(&error, io::ErrorKind::AlreadyExists) => {}
                Err(source) => return Err(ListenersError::Write { name: map::LISTENERS, source }),
            }
        }
        Ok(false)
    }

    /// Descriptors of the listeners, each once.
    fn find(&self, netns: &Netns, pod: &Pod, port: u16) -> Result<Vec<(u8, OwnedFd)>, ListenersError> {
        let uid = pod.proxy_uid;
        // Only these may be the proxy, if the pod is strict about it.
        let members = pod.has(EXEMPTS_CGROUP).then(|| cgroup::members(&self.cgroup, pod.proxy_cgroup));
        let processes = |source| ListenersError::Processes { path: self.proc.display().to_string(), source };
        let inode = netns.file.metadata().map_err(processes)?.ino();
        let (mut found, mut failed) = (Vec::new(), None);
        // Mostly nobody listens yet, and there may be thousands of processes.
        let mut wanted = listening(&netns.tcp_tables().map_err(ListenersError::Tables)?, uid, port);
        if wanted.is_empty() {
            return Ok(found);
        }
        for entry in fs::read_dir(&self.proc).map_err(processes)? {
            let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) else {
                continue;
            };
            let process = self.proc.join(pid.to_string());
            if !fs::metadata(process.join("ns/net")).is_ok_and(|namespace| namespace.ino() == inode) {
                continue;
            }
            if wanted.is_empty() {
                break;
            }
            if members.as_ref().is_some_and(|members| !members.contains(&pid)) {
                continue;
            }
            // Another process of the pod may be the proxy.
            if let Err(source) = take(pid, &mut wanted, &mut found) {
                failed = Some(ListenersError::Take { pid, source });
            }
        }
        match failed {
            _ if !found.is_empty() => Ok(found),
            Some(error) => Err(error),
            // Without it the pod would be refused for good, and nobody would know why. In a strict pod it is somebody else's.
            None if members.is_none() && !wanted.is_empty() => Err(ListenersError::Missing { uid, port }),
            None => Ok(found),
        }
    }
}

/// What a pod's proxy is noted by.
pub(crate) fn proxy_key(netns_cookie: u64, pod: &Pod) -> ProxyKey {
    ProxyKey { netns_cookie, owner: pod.proxy(), port: pod.inbound_port.into(), pad: 0 }
}

fn is(error: &MapError, kind: io::ErrorKind) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.kind() == kind)
}

/// Moves what the process has of `wanted` to `found`.
fn take(pid: i32, wanted: &mut Vec<Listening>, found: &mut Vec<(u8, OwnedFd)>) -> io::Result<()> {
    let ended = |error: Errno| if error == Errno::SRCH { Ok(()) } else { Err(error.into()) };
    let process = match pidfd_open(Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(error) => return ended(error),
    };
    for descriptor in DESCRIPTORS {
        let file = match pidfd_getfd(&process, descriptor, PidfdGetfdFlags::empty()) {
            Ok(file) => file,
            Err(Errno::BADF) => continue,
            Err(error) => return ended(error),
        };
        let Ok(inode) = rustix::fs::fstat(&file).map(|stat| stat.st_ino) else { continue };
        if let Some(at) = wanted.iter().position(|listening| listening.inode == inode) {
            found.push((wanted.swap_remove(at).family, file));
        }
        if wanted.is_empty() {
            break;
        }
    }
    Ok(())
}

/// The listeners in the tables of IPv4 and IPv6.
fn listening(tables: &[String; 2], uid: u32, port: u16) -> Vec<Listening> {
    let both = tables.iter().zip([4, 6]);
    both.flat_map(|(table, family)| {
        table.lines().filter_map(move |line| parse(line, uid, port)).map(move |inode| Listening { family, inode })
    })
    .collect()
}

/// The inode of a line of /proc/net/tcp (proc(5)), if that is a listener of this user on this port.
fn parse(line: &str, uid: u32, port: u16) -> Option<u64> {
    let mut fields = line.split_whitespace();
    let (_, local_port) = fields.nth(1)?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    let owner: u32 = fields.nth(3)?.parse().ok()?;
    let inode: u64 = fields.nth(1)?.parse().ok()?;
    let matches = state == LISTENING && owner == uid && u16::from_str_radix(local_port, 16).ok()? == port;
    // A socket that nobody has a descriptor of has no inode.
    (matches && inode != 0).then_some(inode)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn reads_listeners_as_the_kernel_prints_them() {
        let line = |port: &str, state: &str, uid: &str, inode: &str| {
            format!(
                " 0: 00000000:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  {uid}  0 {inode} 1 0 100 0 0 10 0"
            )
        };
        for (row, line, expected) in [
            ("the proxy's", line("102F", "0A", "2102", "4711"), Some(4711)),
            ("another port", line("1030", "0A", "2102", "4711"), None),
            ("a connection", line("102F", "01", "2102", "4711"), None),
            ("another user's", line("102F", "0A", "0", "4711"), None),
            ("nobody's", line("102F", "0A", "2102", "0"), None),
            ("the heading", "  sl  local_address rem_address   st tx_queue".to_owned(), None),
        ] {
            assert_eq!(parse(&line, 2102, 4143), expected, "{row}");
        }
    }

    #[test]
    fn finds_its_own_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let uid = rustix::process::getuid().as_raw();
        let tables = ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap());
        let found = listening(&tables, uid, port);
        let [Listening { family: 4, inode }] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(rustix::fs::fstat(&listener).unwrap().st_ino, *inode);
        assert!(listening(&tables, uid + 1, port).is_empty());
    }
}
