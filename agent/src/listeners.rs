//! Listeners of proxies that were there before the programs, which only see sockets begin to listen: a proxy on a node
//! whose agent comes later, or comes back after everything was unloaded. They are taken from the proxy's process and put
//! where the programs put those that they see. Without this such a proxy gets no connection until it starts again.
//!
//! ```text
//! sock_diag in the pod's namespace: who listens on the inbound port as the proxy's user
//!     ─> /proc/PID/ns/net is the pod's
//!     ─> pidfd_getfd (Linux 5.6): the process's descriptor that is this socket ─> map LISTENERS
//! ```
//!
//! /proc/PID/fd would say which descriptor, but reading it takes CAP_DAC_READ_SEARCH, a right to every file of the node;
//! CAP_SYS_PTRACE is enough to try.
//!
//! A proxy that starts later is none of this file's business. Refuses to replace what the programs recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
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
    socket::{LISTENER_SLOTS, ListenerKey, ProxyKey, Slots},
};

use crate::{cgroup, cookies::Namespaces, netns::Netns, sock_diag::Listening};

/// Do not replace (linux/bpf.h).
const BPF_NOEXIST: u64 = 1;
/// Descriptors of a process that are tried: a proxy listens before it does anything else, so its listeners have low numbers.
const DESCRIPTORS: std::ops::Range<i32> = 3..1024;
/// How long it matters not whether a proxy still listens.
const MOMENT: Duration = Duration::from_secs(1);

/// The proxies' listeners, as the programs know them.
pub(crate) struct Listeners {
    map: SockHash<MapData, ListenerKey>,
    proxies: HashMap<MapData, ProxyKey, Slots>,
    /// Where sockets carry the cookie of their namespace.
    namespaces: Option<Namespaces>,
    /// The namespaces whose proxy's listeners are known to.
    carrying: BTreeSet<u64>,
    /// The cgroup below which pods run.
    cgroup: PathBuf,
    proc: PathBuf,
    /// Who listened when somebody looked last.
    seen: Option<(Instant, BTreeMap<ProxyKey, Slots>)>,
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
    #[error("cannot ask the pod's namespace for its listeners")]
    Ask(#[source] io::Error),
    #[error(
        "cannot take the listener of process {pid} (needs Linux 5.6, CAP_SYS_PTRACE, and seccomp that allows pidfd_getfd)"
    )]
    Take { pid: i32, source: io::Error },
    #[error(
        "the proxy listens on port {port}, but no process of the pod has that socket of user {uid}: restart the pod"
    )]
    Missing { uid: u32, port: u16 },
}

impl Listeners {
    /// Looks for processes in /proc.
    pub(crate) fn new(
        map: SockHash<MapData, ListenerKey>,
        proxies: HashMap<MapData, ProxyKey, Slots>,
        namespaces: Option<Namespaces>,
        cgroup: PathBuf,
    ) -> Self {
        Self { map, proxies, namespaces, carrying: BTreeSet::new(), cgroup, proc: PathBuf::from("/proc"), seen: None }
    }

    /// The proxies that have a listener now, and in which slots: sockets leave the kernel's map by themselves when they are
    /// closed.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn living(&self) -> Result<BTreeMap<ProxyKey, Slots>, ListenersError> {
        let mut living = BTreeMap::new();
        for key in self.map.keys() {
            let key = key.map_err(|source| ListenersError::Read { name: map::LISTENERS, source })?;
            let ListenerKey { netns_cookie, owner, port, slot, .. } = key;
            *living.entry(ProxyKey { netns_cookie, owner, port: port.into(), pad: 0 }).or_default() |= 1 << slot;
        }
        Ok(living)
    }

    /// Takes the notes of proxies whose listeners are gone out of the kernel's map: those do not go by themselves.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn collect_garbage(&mut self) -> Result<(), ListenersError> {
        if !self.carrying.is_empty() {
            let living: BTreeSet<u64> = self.living()?.into_keys().map(|proxy| proxy.netns_cookie).collect();
            // A proxy that starts anew has listeners that are younger than the programs.
            self.carrying.retain(|cookie| living.contains(cookie));
        }
        // Notes first: what is noted listens already, or not any more.
        let notes: Result<Vec<ProxyKey>, MapError> = self.proxies.keys().collect();
        let notes = notes.map_err(|source| ListenersError::Read { name: map::PROXIES, source })?;
        let living = self.living()?;
        let dead: Vec<ProxyKey> = notes.into_iter().filter(|note| !living.contains_key(note)).collect();
        for note in &dead {
            match self.proxies.remove(note) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(source) if is(&source, io::ErrorKind::NotFound) => {}
                Err(source) => return Err(ListenersError::Write { name: map::PROXIES, source }),
            }
        }
        // A successor may have begun to listen meanwhile.
        let living = if dead.is_empty() { BTreeMap::new() } else { self.living()? };
        dead.iter().filter_map(|note| living.get_key_value(note)).try_for_each(|(note, slots)| self.note(*note, *slots))
    }

    fn note(&mut self, proxy: ProxyKey, slots: Slots) -> Result<(), ListenersError> {
        self.proxies.insert(proxy, slots, 0).map_err(|source| ListenersError::Write { name: map::PROXIES, source })
    }

    /// Lets the programs know the listeners of a pod's proxy, unless they know one already. Returns how many were taken.
    ///
    /// # Errors
    /// See [`ListenersError`]. That a process ends meanwhile is none.
    pub(crate) fn adopt(&mut self, netns: &Netns, pod: &Pod) -> Result<usize, ListenersError> {
        let inbound_known = self.is_known(netns.cookie, pod, pod.inbound_port)?;
        // Elsewhere the kernel finds the outbound listener by itself.
        let outbound_known = !pod.has(EXEMPTS_CGROUP) || self.is_known(netns.cookie, pod, pod.outbound_port)?;
        let carry = self.namespaces.is_none() || self.carrying.contains(&netns.cookie);
        if inbound_known && outbound_known && carry {
            return Ok(0);
        }
        let listening = netns.listening().map_err(ListenersError::Ask)?;
        let inbound = self.take(netns, pod, pod.inbound_port, &listening)?;
        let outbound =
            if outbound_known && carry { Vec::new() } else { self.take(netns, pod, pod.outbound_port, &listening)? };
        if !carry {
            self.have_carry(netns.cookie, &inbound, &outbound)?;
        }
        let mut adopted = 0;
        if !inbound_known {
            adopted += self.record_all(netns.cookie, pod, pod.inbound_port, &inbound)?;
            let control = self.take_control(netns, pod, &listening)?;
            adopted += self.record_all(netns.cookie, pod, pod.control_port, &control)?;
        }
        if !outbound_known {
            adopted += self.record_all(netns.cookie, pod, pod.outbound_port, &outbound)?;
        }
        Ok(adopted)
    }

    /// Whether the programs know a listener of a pod's proxy: without a note there is none, with one there was.
    fn is_known(&mut self, netns_cookie: u64, pod: &Pod, port: u16) -> Result<bool, ListenersError> {
        let key = proxy_key(netns_cookie, pod, port);
        Ok(self.is_noted(&key)? && self.was_seen_listening(&key)?)
    }

    /// What a proxy serves beside its two ports, if it does so on all addresses.
    fn take_control(
        &self,
        netns: &Netns,
        pod: &Pod,
        listening: &[Listening],
    ) -> Result<Vec<(u8, OwnedFd)>, ListenersError> {
        let mut control = match self.take(netns, pod, pod.control_port, listening) {
            // Then the port is intercepted like any other.
            Err(ListenersError::Missing { .. }) => Vec::new(),
            taken => taken?,
        };
        control.retain(|(_, socket)| {
            rustix::net::getsockname(socket)
                .ok()
                .and_then(|address| SocketAddr::try_from(address).ok())
                .is_some_and(|address| address.ip().is_unspecified())
        });
        Ok(control)
    }

    /// Records listeners of a pod's proxy on one port, and that it has them. Returns how many were recorded.
    fn record_all(
        &mut self,
        netns_cookie: u64,
        pod: &Pod,
        port: u16,
        sockets: &[(u8, OwnedFd)],
    ) -> Result<usize, ListenersError> {
        let (mut slots, mut recorded) = (0, 0);
        for (family, socket) in sockets {
            if let Some(slot) = self.record(netns_cookie, pod.proxy(), port, *family, socket)? {
                slots |= 1 << slot;
                recorded += 1;
            }
        }
        if recorded > 0 {
            self.note(proxy_key(netns_cookie, pod, port), slots)?;
        }
        Ok(recorded)
    }

    /// Has a proxy's listeners carry the cookie of their namespace: they may be older than the programs, and what they
    /// accept has it from them.
    fn have_carry(
        &mut self,
        netns_cookie: u64,
        inbound: &[(u8, OwnedFd)],
        outbound: &[(u8, OwnedFd)],
    ) -> Result<(), ListenersError> {
        for (_, socket) in inbound.iter().chain(outbound) {
            if let Some(namespaces) = &mut self.namespaces {
                let written = namespaces.insert(socket, netns_cookie, 0);
                written.map_err(|source| ListenersError::Write { name: map::NAMESPACES, source })?;
            }
        }
        // A proxy that listens on one port only may come to listen on the other with a socket that is as old.
        if !inbound.is_empty() && !outbound.is_empty() {
            self.carrying.insert(netns_cookie);
        }
        Ok(())
    }

    /// Whether a proxy has a listener, or had one a moment ago: if it listens again since, the programs have seen that.
    fn was_seen_listening(&mut self, proxy: &ProxyKey) -> Result<bool, ListenersError> {
        let stale = self.seen.as_ref().is_none_or(|(at, seen)| at.elapsed() > MOMENT || !seen.contains_key(proxy));
        if stale {
            // Walking the map takes a system call for each listener: not for each of a hundred pods that start at once.
            self.seen = Some((Instant::now(), self.living()?));
        }
        Ok(self.seen.as_ref().is_some_and(|(_, seen)| seen.contains_key(proxy)))
    }

    fn is_noted(&self, proxy: &ProxyKey) -> Result<bool, ListenersError> {
        match self.proxies.get(proxy, 0) {
            Ok(_) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(source) => Err(ListenersError::Read { name: map::PROXIES, source }),
        }
    }

    /// Puts a listener into a free slot, and returns which. None if all are taken: then other members of its group stand
    /// for it.
    fn record(
        &mut self,
        netns_cookie: u64,
        owner: Owner,
        port: u16,
        family: u8,
        socket: &OwnedFd,
    ) -> Result<Option<u8>, ListenersError> {
        for slot in 0..LISTENER_SLOTS {
            let key = ListenerKey { netns_cookie, owner, port, family, slot, pad: 0 };
            match self.map.insert(key, socket.as_raw_fd(), BPF_NOEXIST) {
                Ok(()) => return Ok(Some(slot)),
                Err(error) if is(&error, io::ErrorKind::AlreadyExists) => {}
                Err(source) => return Err(ListenersError::Write { name: map::LISTENERS, source }),
            }
        }
        Ok(None)
    }

    /// Descriptors of the proxy's listeners on a port, each once.
    fn take(
        &self,
        netns: &Netns,
        pod: &Pod,
        port: u16,
        listening: &[Listening],
    ) -> Result<Vec<(u8, OwnedFd)>, ListenersError> {
        let mut wanted = of_proxy(listening, pod.proxy_uid, port);
        // Mostly nobody listens yet, and there may be thousands of processes.
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        // Only these may be the proxy, if the pod is strict about it.
        let members = pod.has(EXEMPTS_CGROUP).then(|| cgroup::members(&self.cgroup, pod.proxy_cgroup));
        let processes = |source| ListenersError::Processes { path: self.proc.display().to_string(), source };
        let inode = netns.file.metadata().map_err(processes)?.ino();
        let (mut found, mut failed) = (Vec::new(), None);
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
            None if members.is_none() && !wanted.is_empty() => {
                Err(ListenersError::Missing { uid: pod.proxy_uid, port })
            }
            None => Ok(found),
        }
    }
}

/// What a listener of a pod's proxy is noted by.
pub(crate) fn proxy_key(netns_cookie: u64, pod: &Pod, port: u16) -> ProxyKey {
    ProxyKey { netns_cookie, owner: pod.proxy(), port: port.into(), pad: 0 }
}

/// Which listeners may be a proxy's: its user's, on its port, and somebody has a descriptor.
fn of_proxy(listening: &[Listening], uid: u32, port: u16) -> Vec<Listening> {
    listening.iter().filter(|one| one.uid == uid && one.port == port && one.inode != 0).copied().collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxys_listeners_are_its_users_on_its_port() {
        let proxys = Listening { family: 4, port: 4143, uid: 2102, inode: 4711 };
        for (row, listening, is_proxys) in [
            ("its own", proxys, true),
            ("its own of IPv6", Listening { family: 6, ..proxys }, true),
            ("another port", Listening { port: 4144, ..proxys }, false),
            ("another user's", Listening { uid: 0, ..proxys }, false),
            ("nobody's, such as one that is being closed", Listening { inode: 0, ..proxys }, false),
        ] {
            let expected = if is_proxys { vec![listening] } else { Vec::new() };
            assert_eq!(of_proxy(&[listening], 2102, 4143), expected, "{row}");
        }
    }
}
