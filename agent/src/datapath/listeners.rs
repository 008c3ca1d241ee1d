//! The proxies' listeners, in the maps LISTENERS and PROXIES. The programs record sockets when they begin to listen.
//! If the agent arrives later than a proxy, or comes back after everything was unloaded, the proxy listens already:
//! [`takeover`](super::takeover) finds its sockets, and they are recorded here. Without this such a proxy would get no
//! connection until it restarts. Refuses to replace listeners that the programs recorded, and to inspect processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, MapData, MapError, SockHash};
use weft_ebpf_abi::{
    map,
    pod::{EXEMPTS_CGROUP, Owner, Pod},
    socket::{LISTENER_SLOTS, ListenerKey, ProxyKey, Slots},
};

use super::{
    cookies::Namespaces,
    takeover::{Search, TakenListener},
};

/// Do not replace (linux/bpf.h).
const BPF_NOEXIST: u64 = 1;
/// How long an outdated answer about a proxy's listeners is acceptable.
const MOMENT: Duration = Duration::from_secs(1);

/// The proxies' listeners.
pub(crate) struct Listeners {
    map: SockHash<MapData, ListenerKey>,
    proxies: HashMap<MapData, ProxyKey, Slots>,
    /// The storage of cookies in sockets, on kernels that need it.
    namespaces: Option<Namespaces>,
    /// Namespaces in which the proxy's listeners are known to carry the cookie.
    carrying: BTreeSet<u64>,
    /// The cgroup below which pods run.
    cgroup: PathBuf,
    /// The listening proxies at the last look.
    seen: Option<(Instant, BTreeMap<ProxyKey, Slots>)>,
}

/// Why listeners could not be read or recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenersError {
    #[error("cannot read map {name}")]
    Read { name: &'static str, source: MapError },
    #[error("cannot write map {name} (is it full?)")]
    Write { name: &'static str, source: MapError },
}

impl Listeners {
    /// Wraps the maps; `cgroup` is the one below which pods run.
    pub(crate) fn new(
        map: SockHash<MapData, ListenerKey>,
        proxies: HashMap<MapData, ProxyKey, Slots>,
        namespaces: Option<Namespaces>,
        cgroup: PathBuf,
    ) -> Self {
        Self { map, proxies, namespaces, carrying: BTreeSet::new(), cgroup, seen: None }
    }

    /// The proxies that have a listener now, and their slots: the kernel removes closed sockets from its map by
    /// itself.
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

    /// Whether a connection of a family to a proxy's port would be given to a listener.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn accepts(&self, netns_cookie: u64, pod: &Pod, port: u16, is_v4: bool) -> Result<bool, ListenersError> {
        for key in self.map.keys() {
            let key = key.map_err(|source| ListenersError::Read { name: map::LISTENERS, source })?;
            // A listener of IPv6 accepts IPv4 too, unless it says otherwise, which is not recorded.
            let of_family = is_v4 || key.family == 6;
            if (key.netns_cookie, key.owner, key.port) == (netns_cookie, pod.proxy(), port) && of_family {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the notes of proxies whose listeners are gone, which the kernel does not remove by itself.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn collect_garbage(&mut self) -> Result<(), ListenersError> {
        if !self.carrying.is_empty() {
            let living: BTreeSet<u64> = self.living()?.into_keys().map(|proxy| proxy.netns_cookie).collect();
            // A proxy that restarts has listeners that are younger than the programs.
            self.carrying.retain(|cookie| living.contains(cookie));
        }
        // Notes are read first: a listener that is noted listens already, or no longer.
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
        // A successor may have begun to listen in between.
        let living = if dead.is_empty() { BTreeMap::new() } else { self.living()? };
        dead.iter().filter_map(|note| living.get_key_value(note)).try_for_each(|(note, slots)| self.note(*note, *slots))
    }

    fn note(&mut self, proxy: ProxyKey, slots: Slots) -> Result<(), ListenersError> {
        self.proxies.insert(proxy, slots, 0).map_err(|source| ListenersError::Write { name: map::PROXIES, source })
    }

    /// Forgets what was seen of a removed pod's proxy: without an entry the programs may not record its successor.
    pub(crate) fn forget(&mut self, netns_cookie: u64) {
        if let Some((_, seen)) = &mut self.seen {
            seen.retain(|proxy, _| proxy.netns_cookie != netns_cookie);
        }
    }

    /// What has to be searched for before a pod's inbound connections can be redirected; `None` if its proxy's
    /// listeners are known.
    ///
    /// Of a pod that the kernel enrolled and no agent has yet (`self_enrolled`), the programs' note is believed without
    /// a look at the listeners. A note outlives its listener until the next collection, and the pod had an entry all
    /// that time: the programs record the listener that follows, as that of any proxy that starts again. Without an
    /// entry they may not.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn search(
        &mut self,
        netns_cookie: u64,
        pod: &Pod,
        self_enrolled: bool,
    ) -> Result<Option<Search>, ListenersError> {
        let Known { inbound, outbound, admin } = self.known(netns_cookie, pod, self_enrolled)?;
        let carry = self.carries(netns_cookie);
        if inbound && outbound && admin && carry {
            return Ok(None);
        }
        let wanted = [(pod.inbound_port, inbound), (pod.outbound_port, outbound)];
        let ports = wanted.into_iter().filter(|(_, known)| !(*known && carry)).map(|(port, _)| port).collect();
        let own = [(pod.control_port, inbound), (pod.admin_port, admin)];
        Ok(Some(Search {
            proxy_uid: pod.proxy_uid,
            proxy_cgroup: pod.has(EXEMPTS_CGROUP).then_some(pod.proxy_cgroup),
            cgroup: self.cgroup.clone(),
            ports,
            own_ports: own.into_iter().filter(|(_, known)| !known).map(|(port, _)| port).collect(),
        }))
    }

    /// Records the listeners that a search found, unless the programs have recorded one already. Returns their number.
    ///
    /// # Errors
    /// See [`ListenersError`].
    pub(crate) fn adopt(
        &mut self,
        netns_cookie: u64,
        pod: &Pod,
        found: &[TakenListener],
    ) -> Result<usize, ListenersError> {
        if found.is_empty() {
            return Ok(0);
        }
        let Known { inbound, outbound, admin } = self.known(netns_cookie, pod, false)?;
        if !self.carries(netns_cookie) {
            self.have_carry(netns_cookie, pod, found)?;
        }
        let mut adopted = 0;
        if !inbound {
            adopted += self.record_all(netns_cookie, pod, pod.inbound_port, found)?;
            adopted += self.record_all(netns_cookie, pod, pod.control_port, found)?;
        }
        if !outbound {
            adopted += self.record_all(netns_cookie, pod, pod.outbound_port, found)?;
        }
        if !admin {
            adopted += self.record_all(netns_cookie, pod, pod.admin_port, found)?;
        }
        Ok(adopted)
    }

    fn known(&mut self, netns_cookie: u64, pod: &Pod, self_enrolled: bool) -> Result<Known, ListenersError> {
        // Whether the programs have recorded a listener on a port: the note says that there is or was one.
        let mut is_known = |port| {
            let key = proxy_key(netns_cookie, pod, port);
            Ok::<_, ListenersError>(self.is_noted(&key)? && (self_enrolled || self.was_seen_listening(&key)?))
        };
        Ok(Known {
            inbound: is_known(pod.inbound_port)?,
            // Otherwise the kernel finds the outbound listener by itself.
            outbound: !pod.has(EXEMPTS_CGROUP) || is_known(pod.outbound_port)?,
            // The proxy has this listener whether or not it has others, and its pod's probes depend on it.
            admin: pod.admin_port == 0 || is_known(pod.admin_port)?,
        })
    }

    /// Records listeners of a pod's proxy on one port, with their note. Returns their number.
    fn record_all(
        &mut self,
        netns_cookie: u64,
        pod: &Pod,
        port: u16,
        found: &[TakenListener],
    ) -> Result<usize, ListenersError> {
        let (mut slots, mut recorded) = (0, 0);
        for TakenListener { family, socket, .. } in found.iter().filter(|one| one.port == port) {
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

    /// Whether the proxy's listeners carry the cookie of their namespace, or need not.
    fn carries(&self, netns_cookie: u64) -> bool {
        self.namespaces.is_none() || self.carrying.contains(&netns_cookie)
    }

    /// Stores the cookie in a proxy's listeners: they may be older than the programs, and accepted connections inherit
    /// it.
    fn have_carry(&mut self, netns_cookie: u64, pod: &Pod, found: &[TakenListener]) -> Result<(), ListenersError> {
        let ports = [pod.inbound_port, pod.outbound_port];
        for TakenListener { socket, .. } in found.iter().filter(|one| ports.contains(&one.port)) {
            if let Some(namespaces) = &mut self.namespaces {
                let written = namespaces.insert(socket, netns_cookie, 0);
                written.map_err(|source| ListenersError::Write { name: map::NAMESPACES, source })?;
            }
        }
        // A proxy that listens on one port only may begin to listen on the other with an equally old socket.
        if ports.iter().all(|port| found.iter().any(|one| one.port == *port)) {
            self.carrying.insert(netns_cookie);
        }
        Ok(())
    }

    /// Whether a proxy has a listener, or had one a moment ago: if it listens again since, the programs have recorded
    /// that.
    fn was_seen_listening(&mut self, proxy: &ProxyKey) -> Result<bool, ListenersError> {
        let stale = self.seen.as_ref().is_none_or(|(at, seen)| at.elapsed() > MOMENT || !seen.contains_key(proxy));
        if stale {
            // Walking the map takes a system call for each listener, so it is not done for each of a hundred pods that
            // start at once.
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

    /// Puts a listener into a free slot, and returns the slot. `None` if all are taken: then other members of its
    /// group serve for it.
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
}

/// The ports for which the programs know the proxy's listeners, or need not know them.
struct Known {
    inbound: bool,
    outbound: bool,
    admin: bool,
}

/// The key of a note about a listener of a pod's proxy.
pub(crate) fn proxy_key(netns_cookie: u64, pod: &Pod, port: u16) -> ProxyKey {
    ProxyKey { netns_cookie, owner: pod.proxy(), port: port.into(), pad: 0 }
}

fn is(error: &MapError, kind: io::ErrorKind) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.kind() == kind)
}
