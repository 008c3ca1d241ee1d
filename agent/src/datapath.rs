//! The datapath's state in the kernel: which pods are enrolled with which rules, and what was counted.
//!
//! Synchronous and without decisions: it carries out [`Rules`] in an order in which every crash leaves the pod refused
//! or intercepted, never open. It keeps nothing in memory that the pins do not know, except pods' names for traces.
//!
//! ```text
//! enrol:    rules of the new generation -> entry (outbound in force) -> link -> a proxy that listens already
//!           -> entry (inbound too) -> old rules go
//! withdraw: link -> entry -> rules
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{
        Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf, SockHash,
        lpm_trie::{Key, LpmTrie},
    },
};
use weft_ebpf_abi::{
    address::Address,
    counter, map,
    pod::{self, AdmissionKey, Pod, PortBlock, PortBlockKey, Subnet},
    socket::{Flow, FlowKey},
    switch,
    verdict::{Direction, Verdict},
};

use crate::{
    cookies::{CookieSource, Cookies, Namespaces},
    keep::{Found, KeepError, Keeper},
    listeners::{Listeners, ListenersError, proxy_key},
    netns::{self, Netns},
    pins::{Pins, PinsError},
    programs::{Programs, ProgramsError},
    rules::{PodName, Rules},
};

mod leftovers;

/// What the agent holds in the kernel.
pub(crate) struct Datapath {
    pins: Pins,
    programs: Programs,
    cgroup: PathBuf,
    entries: HashMap<MapData, u64, Pod>,
    ports: HashMap<MapData, PortBlockKey, PortBlock>,
    subnets: LpmTrie<MapData, Subnet, u8>,
    stats: PerCpuArray<MapData, u64>,
    switches: Array<MapData, u32>,
    listeners: Listeners,
    flows: HashMap<MapData, FlowKey, Flow>,
    admissions: HashMap<MapData, AdmissionKey, u64>,
    /// Whether a pod left since the flows were looked through.
    flows_may_be_stale: bool,
    names: BTreeMap<u64, PodName>,
    /// Namespaces that the kernel enrolled and no agent since, with the time at which they were first seen.
    self_enrolled: BTreeMap<u64, Instant>,
    keeper: Keeper,
    cookies: Cookies,
}

/// How the kernel enrols a network namespace by itself: who binds which port on loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SelfEnrolment {
    /// The proxy's user as the host sees it.
    pub(crate) proxy_uid: u32,
    pub(crate) outbound_port: u16,
    pub(crate) inbound_port: u16,
}

/// How to open a datapath.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options<'a> {
    pub(crate) pin_dir: &'a Path,
    pub(crate) cgroup: &'a Path,
    pub(crate) debug_log: bool,
    pub(crate) cookies: CookieSource,
    /// None: namespaces are enrolled by the agent alone.
    pub(crate) self_enrolment: Option<SelfEnrolment>,
}

/// How long a namespace that the kernel enrolled is left alone before it is looked at whether it still exists.
const SELF_ENROLLED_GRACE: Duration = Duration::from_secs(60);

/// Why the datapath could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DatapathError {
    #[error(transparent)]
    Pins(#[from] PinsError),
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    #[error(transparent)]
    Listeners(#[from] ListenersError),
    #[error("cannot tell which network namespaces exist")]
    Namespaces(#[source] std::io::Error),
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error("cannot open the cgroup {path}")]
    Cgroup { path: String, source: std::io::Error },
    #[error("cannot open map {name}")]
    OpenMap { name: &'static str, source: MapError },
    #[error("cannot write map {name} (is it full?)")]
    WriteMap { name: &'static str, source: MapError },
    #[error("cannot read map {name}")]
    ReadMap { name: &'static str, source: MapError },
}

/// A pod as the kernel has it.
#[derive(Debug)]
pub(crate) struct Enrolled {
    pub(crate) name: Option<PodName>,
    pub(crate) cookie: u64,
    pub(crate) generation: u32,
    pub(crate) outbound: bool,
    pub(crate) inbound: bool,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) bypassed: bool,
    pub(crate) self_enrolled: bool,
    pub(crate) strict: bool,
    /// Whether the proxy has a listener for inbound connections.
    pub(crate) listening: bool,
}

/// What an enrolment came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enrolment {
    /// The network namespace's.
    pub(crate) cookie: u64,
    /// The rules'.
    pub(crate) generation: u32,
    /// Whether anything was changed.
    pub(crate) changed: bool,
    /// Whether the namespace was unknown.
    pub(crate) is_new: bool,
}

/// Switches all redirection of the node off or on, by the pins alone: needs no agent. Returns how it was.
///
/// # Errors
/// When there is no datapath, or it is of another layout.
pub(crate) fn set_bypassed(pins: &Pins, bypassed: bool) -> Result<bool, DatapathError> {
    pins.check_layout()?;
    let mut switches: Array<MapData, u32> = open_map(pins, map::SWITCHES, |data| Array::try_from(Map::Array(data)))?;
    let before = switches.get(&switch::BYPASS, 0).map_err(reading(map::SWITCHES))?;
    switches.set(switch::BYPASS, u32::from(bypassed), 0).map_err(writing(map::SWITCHES))?;
    Ok(before != 0)
}

fn open_map<T>(
    pins: &Pins,
    name: &'static str,
    wrap: impl FnOnce(MapData) -> Result<T, MapError>,
) -> Result<T, DatapathError> {
    MapData::from_pin(pins.map(name)).and_then(wrap).map_err(|source| DatapathError::OpenMap { name, source })
}

/// What sockets carry, if they do.
fn open_namespaces(pins: &Pins, cookies: CookieSource) -> Result<Option<Namespaces>, DatapathError> {
    let open = || open_map(pins, map::NAMESPACES, |data| Namespaces::try_from(Map::SkStorage(data)));
    (cookies == CookieSource::Sockets).then(open).transpose()
}

fn writing(name: &'static str) -> impl Fn(MapError) -> DatapathError {
    move |source| DatapathError::WriteMap { name, source }
}

fn reading(name: &'static str) -> impl Fn(MapError) -> DatapathError {
    move |source| DatapathError::ReadMap { name, source }
}

/// Removing what is not there is fine.
fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

impl Datapath {
    /// Takes over what is pinned, loads what is missing and attaches it to the cgroup.
    ///
    /// The second value is the loaded object, for reading its log records.
    pub(crate) fn open(options: Options<'_>) -> Result<(Self, Ebpf), DatapathError> {
        let Options { pin_dir, cgroup, debug_log, cookies, self_enrolment } = options;
        let directory = File::open(cgroup)
            .map_err(|source| DatapathError::Cgroup { path: cgroup.display().to_string(), source })?;
        let pins = Pins::new(pin_dir);
        pins.prepare()?;
        let programs = Programs::new(pins.clone(), debug_log, cookies);
        let mut ebpf = programs.open(0)?;
        let mut datapath = Self {
            cgroup: cgroup.to_path_buf(),
            entries: open_map(&pins, map::PODS, |data| HashMap::try_from(Map::HashMap(data)))?,
            ports: open_map(&pins, map::PORTS, |data| HashMap::try_from(Map::HashMap(data)))?,
            subnets: open_map(&pins, map::SUBNETS, |data| LpmTrie::try_from(Map::LpmTrie(data)))?,
            stats: open_map(&pins, map::STATS, |data| PerCpuArray::try_from(Map::PerCpuArray(data)))?,
            switches: open_map(&pins, map::SWITCHES, |data| Array::try_from(Map::Array(data)))?,
            listeners: Listeners::new(
                open_map(&pins, map::LISTENERS, |data| SockHash::try_from(Map::SockHash(data)))?,
                open_map(&pins, map::PROXIES, |data| HashMap::try_from(Map::HashMap(data)))?,
                open_namespaces(&pins, cookies)?,
                cgroup.to_path_buf(),
            ),
            flows: open_map(&pins, map::FLOWS, |data| HashMap::try_from(Map::LruHashMap(data)))?,
            admissions: open_map(&pins, map::ADMISSIONS, |data| HashMap::try_from(Map::HashMap(data)))?,
            flows_may_be_stale: true,
            names: BTreeMap::new(),
            self_enrolled: BTreeMap::new(),
            keeper: Keeper::new(&pins)?,
            cookies: Cookies::Kernel,
            programs,
            pins,
        };
        // Whoever watched the last agent is gone.
        datapath.set_watched(false)?;
        datapath.set_self_enrolment(self_enrolment)?;
        let replaced = datapath.programs.attach(&mut ebpf, &directory)?;
        datapath.keeper = Keeper::new(&datapath.pins)?;
        datapath.cookies = datapath.programs.cookies(&mut ebpf, open_namespaces(&datapath.pins, cookies)?)?;
        datapath.collect_garbage()?;
        datapath.remove_unused_rules()?;
        for (cookie, name) in datapath.pins.pods()? {
            if replaced {
                datapath.programs.update_pod(cookie)?;
            }
            if let Some(name) = name {
                datapath.names.insert(cookie, name);
            }
        }
        if replaced {
            let digest = datapath.programs.digest();
            datapath.pins.set_programs(&digest)?;
        }
        datapath.programs.keep_spares()?;
        Ok((datapath, ebpf))
    }

    /// Puts a pod's rules in force, in both directions. The same rules again change nothing.
    pub(crate) fn enrol(&mut self, netns: &Netns, rules: &Rules) -> Result<Enrolment, DatapathError> {
        let cookie = netns.cookie;
        // A pod of the same name in another namespace is a predecessor. While its namespace lives, so does its redirect.
        let predecessors: Vec<u64> = self
            .names
            .iter()
            .filter(|(other, name)| **other != cookie && **name == rules.pod)
            .map(|(other, _)| *other)
            .collect();
        for predecessor in predecessors {
            if self.is_gone(predecessor)? {
                self.remove(predecessor)?;
            }
        }
        let old = self.entry(cookie)?;
        let next = rules.entry(old.map_or(1, |old| old.generation.wrapping_add(1)));
        let unchanged = old.filter(|old| old.rules == next.rules);
        let mut entry = unchanged.unwrap_or(next);
        if unchanged.is_none() {
            // Whoever is the proxy by these rules has its listeners known before they are in force.
            if old.is_some_and(|old| old.has(pod::INBOUND) && old.proxy() != entry.proxy()) {
                self.listeners.adopt(netns, &entry)?;
            }
            // The inbound bit of a pod that already had it stays: its link reads the new entry at once.
            entry.flags |= pod::OUTBOUND | old.map_or(0, |old| old.flags & pod::INBOUND);
            let written = self
                .write_rules(cookie, entry.generation, rules)
                .and_then(|()| self.entries.insert(cookie, entry, 0).map_err(writing(map::PODS)));
            if let Err(error) = written {
                // A later attempt, with other rules, has the same generation: what stays of this one would be its, too.
                self.remove_rules(cookie, Some(entry.generation))?;
                return Err(error);
            }
        }
        self.pins.add_pod(cookie, &rules.pod)?;
        self.names.insert(cookie, rules.pod.clone());
        let attached = self.programs.attach_pod(cookie, &netns.file)?;
        self.keeper.hold_pod(cookie)?;
        // Every time, as a proxy that binds before the programs and listens after them is seen by neither at first.
        let adopted = self.listeners.adopt(netns, &entry)?;
        if adopted > 0 {
            tracing::info!(netns_cookie = cookie, adopted, "the proxy listened before the programs did");
        }
        if !entry.has(pod::INBOUND) {
            entry.flags |= pod::INBOUND;
            self.entries.insert(cookie, entry, 0).map_err(writing(map::PODS))?;
        }
        if let (None, Some(old)) = (unchanged, old) {
            self.remove_rules(cookie, Some(old.generation))?;
        }
        self.self_enrolled.remove(&cookie);
        let changed = unchanged.is_none() || attached;
        let is_new = old.is_none_or(|old| old.has(pod::SELF_ENROLLED));
        Ok(Enrolment { cookie, generation: entry.generation, changed, is_new })
    }

    /// Forgets a pod; an unknown one is fine.
    pub(crate) fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError> {
        let cookies: Vec<u64> = self.names.iter().filter(|(_, name)| *name == pod).map(|(cookie, _)| *cookie).collect();
        cookies.into_iter().try_for_each(|cookie| self.remove(cookie))
    }

    /// Forgets pods whose network namespace is gone. Returns their cookies.
    pub(crate) fn collect_garbage(&mut self) -> Result<Vec<u64>, DatapathError> {
        let mut cookies: BTreeSet<u64> = self.pins.pods()?.into_iter().map(|(cookie, _)| cookie).collect();
        let mut self_enrolled = BTreeMap::new();
        for item in self.entries.iter() {
            let (cookie, entry) = item.map_err(reading(map::PODS))?;
            if entry.has(pod::SELF_ENROLLED) && !cookies.contains(&cookie) {
                let first_seen = self.self_enrolled.get(&cookie).copied();
                self_enrolled.insert(cookie, first_seen.unwrap_or_else(Instant::now));
            } else {
                // An entry without a directory is left over from a crash in `remove`.
                cookies.insert(cookie);
            }
        }
        let admissions: Result<Vec<(AdmissionKey, u64)>, MapError> = self.admissions.iter().collect();
        let admissions = admissions.map_err(reading(map::ADMISSIONS))?;
        for (_, cookie) in &admissions {
            // A proxy that bound its inbound port alone has no entry, and its namespace may end without one.
            if self.entry(*cookie)?.is_none() {
                let first_seen = self.self_enrolled.get(cookie).copied();
                self_enrolled.insert(*cookie, first_seen.unwrap_or_else(Instant::now));
            }
        }
        self.self_enrolled = self_enrolled;
        let mut removed = Vec::new();
        for cookie in cookies {
            if self.is_gone(cookie)? {
                self.remove(cookie)?;
                removed.push(cookie);
            }
        }
        // No link tells of the end of these.
        let old: Vec<u64> = self
            .self_enrolled
            .iter()
            .filter(|(_, seen)| seen.elapsed() > SELF_ENROLLED_GRACE)
            .map(|(c, _)| *c)
            .collect();
        if !old.is_empty() {
            let living = netns::living(&self.cookies).map_err(DatapathError::Namespaces)?;
            for cookie in old.into_iter().filter(|cookie| !living.contains(cookie)) {
                self.remove(cookie)?;
                removed.push(cookie);
            }
        }
        self.remove_admissions(admissions, &removed)?;
        self.listeners.collect_garbage()?;
        self.remove_stale_flows()?;
        Ok(removed)
    }

    /// The pods in the kernel.
    pub(crate) fn pods(&self) -> Result<Vec<Enrolled>, DatapathError> {
        let mut pods = Vec::new();
        let proxies = self.listeners.living()?;
        for item in self.entries.iter() {
            let (cookie, entry) = item.map_err(reading(map::PODS))?;
            pods.push(Enrolled {
                name: self.names.get(&cookie).cloned(),
                cookie,
                generation: entry.generation,
                outbound: entry.has(pod::OUTBOUND),
                inbound: entry.has(pod::INBOUND) && !self.is_gone(cookie)?,
                ips: entry.addresses.into_iter().filter(|a| *a != Address::UNSPECIFIED).map(IpAddr::from).collect(),
                bypassed: entry.has(pod::BYPASSED),
                self_enrolled: entry.has(pod::SELF_ENROLLED),
                strict: entry.has(pod::EXEMPTS_CGROUP),
                listening: proxies.contains_key(&proxy_key(cookie, &entry, entry.inbound_port)),
            });
        }
        pods.sort_by(|a, b| a.name.cmp(&b.name).then(a.cookie.cmp(&b.cookie)));
        Ok(pods)
    }

    /// How to learn the cookie of a namespace.
    pub(crate) fn cookies(&self) -> Cookies {
        self.cookies.clone()
    }

    /// Who lives in a network namespace.
    pub(crate) fn name(&self, cookie: u64) -> Option<&PodName> {
        self.names.get(&cookie)
    }

    /// A pod's entry, by its name: the newest, where a predecessor's namespace is alive still.
    pub(crate) fn find(&self, pod: &PodName) -> Result<Option<(u64, Pod)>, DatapathError> {
        for (cookie, _) in self.names.iter().rev().filter(|(_, name)| *name == pod) {
            if let Some(entry) = self.entry(*cookie)? {
                return Ok(Some((*cookie, entry)));
            }
        }
        Ok(None)
    }

    /// Whether a pod's rules skip a port, as the programs look it up.
    pub(crate) fn skips_port(
        &self,
        cookie: u64,
        entry: &Pod,
        direction: Direction,
        port: u16,
    ) -> Result<bool, DatapathError> {
        let generation = entry.generation;
        let key = PortBlockKey {
            netns_cookie: cookie,
            generation,
            direction: direction as u16,
            block: port / pod::BLOCK_PORTS,
        };
        match self.ports.get(&key, 0) {
            Ok(block) => Ok(block.contains(port)),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(error) => Err(reading(map::PORTS)(error)),
        }
    }

    /// Whether a pod's rules skip a client, as the programs look it up.
    pub(crate) fn skips_subnet(&self, cookie: u64, entry: &Pod, client: &Address) -> Result<bool, DatapathError> {
        let key = Key::new(Subnet::HEAD_BITS + 128, Subnet::new(cookie, entry.generation, client));
        match self.subnets.get(&key, 0) {
            Ok(_) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(error) => Err(reading(map::SUBNETS)(error)),
        }
    }

    /// Whether a pod's proxy has a listener on a port, to which connections are given.
    pub(crate) fn listens(&self, cookie: u64, entry: &Pod, port: u16) -> Result<bool, DatapathError> {
        Ok(self.listeners.living()?.contains_key(&proxy_key(cookie, entry, port)))
    }

    /// How often a verdict was given since the maps were made.
    pub(crate) fn verdicts(&self, direction: Direction, verdict: Verdict) -> Result<u64, DatapathError> {
        self.counter(counter::of(direction, verdict))
    }

    /// A counter of [`counter`], summed over all CPUs.
    pub(crate) fn counter(&self, index: u32) -> Result<u64, DatapathError> {
        let values = self.stats.get(&index, 0).map_err(reading(map::STATS))?;
        Ok(values.iter().sum())
    }

    /// Has the kernel produce events, or stop it.
    pub(crate) fn set_watched(&mut self, watched: bool) -> Result<(), DatapathError> {
        self.set(switch::TRACE, u32::from(watched))
    }

    /// Whether somebody switched all redirection off.
    pub(crate) fn bypassed(&self) -> Result<bool, DatapathError> {
        self.switches.get(&switch::BYPASS, 0).map(|on| on != 0).map_err(reading(map::SWITCHES))
    }

    fn set_self_enrolment(&mut self, to: Option<SelfEnrolment>) -> Result<(), DatapathError> {
        if let Some(SelfEnrolment { proxy_uid, outbound_port, inbound_port }) = to {
            self.set(switch::PROXY_UID, proxy_uid)?;
            self.set(switch::OUTBOUND_PORT, outbound_port.into())?;
            self.set(switch::INBOUND_PORT, inbound_port.into())?;
        }
        self.set(switch::SELF_ENROL, u32::from(to.is_some()))
    }

    fn set(&mut self, index: u32, value: u32) -> Result<(), DatapathError> {
        self.switches.set(index, value, 0).map_err(writing(map::SWITCHES))
    }

    /// The events' ring buffer. It has one reader at a time.
    pub(crate) fn events(&self) -> Result<RingBuf<MapData>, DatapathError> {
        open_map(&self.pins, map::EVENTS, |data| RingBuf::try_from(Map::RingBuf(data)))
    }

    /// The digest of the programs in force.
    pub(crate) fn digest(&self) -> String {
        self.programs.digest()
    }

    /// The cgroup that they are attached to.
    pub(crate) fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Where everything is pinned.
    pub(crate) fn pin_dir(&self) -> &Path {
        self.pins.root()
    }

    /// Makes pins again that somebody removed.
    pub(crate) fn keep_pins(&mut self) -> Result<Found, DatapathError> {
        let found = self.keeper.restore()?;
        if let Found::Restored(_) = found {
            for (cookie, name) in &self.names {
                self.pins.add_pod(*cookie, name)?;
            }
            self.pins.set_programs(&self.programs.digest())?;
        }
        Ok(found)
    }

    /// Whether somebody detached the programs, as `unload` does.
    pub(crate) fn is_unloaded(&self) -> Result<bool, KeepError> {
        self.keeper.is_detached()
    }

    /// Whether a pod's network namespace is gone. A pin that was removed does not say so.
    fn is_gone(&self, cookie: u64) -> Result<bool, DatapathError> {
        match self.keeper.is_gone(cookie) {
            Some(answer) => {
                let path = || self.pins.pod_link(cookie).display().to_string();
                Ok(answer.map_err(|source| KeepError::Hold { path: path(), source })?)
            }
            None => Ok(self.programs.is_gone(cookie)?),
        }
    }

    fn entry(&self, cookie: u64) -> Result<Option<Pod>, DatapathError> {
        match self.entries.get(&cookie, 0) {
            Ok(entry) => Ok(Some(entry)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(reading(map::PODS)(error)),
        }
    }

    fn remove(&mut self, cookie: u64) -> Result<(), DatapathError> {
        self.keeper.release_pod(cookie);
        self.programs.detach_pod(cookie)?;
        absent_is_fine(self.entries.remove(&cookie)).map_err(writing(map::PODS))?;
        self.remove_rules(cookie, None)?;
        self.names.remove(&cookie);
        self.self_enrolled.remove(&cookie);
        self.flows_may_be_stale = true;
        Ok(())
    }

    fn write_rules(&mut self, cookie: u64, generation: u32, rules: &Rules) -> Result<(), DatapathError> {
        for (direction, blocks) in [(Direction::Outbound, &rules.outbound), (Direction::Inbound, &rules.inbound)] {
            for (block, ports) in blocks {
                let key = PortBlockKey { netns_cookie: cookie, generation, direction: direction as u16, block: *block };
                self.ports.insert(key, ports, 0).map_err(writing(map::PORTS))?;
            }
        }
        for subnet in &rules.subnets {
            let data = Subnet::new(cookie, generation, &Address::from(subnet.addr()));
            let mapped_bits = if subnet.addr().is_ipv4() { 96 } else { 0 };
            let bits = Subnet::HEAD_BITS + mapped_bits + u32::from(subnet.prefix_len());
            self.subnets.insert(&Key::new(bits, data), 1, 0).map_err(writing(map::SUBNETS))?;
        }
        Ok(())
    }

    /// Removes a pod's rules of one generation, or of all.
    fn remove_rules(&mut self, cookie: u64, generation: Option<u32>) -> Result<(), DatapathError> {
        self.remove_rules_if(|of, its| of == cookie && generation.is_none_or(|generation| its == generation))
    }

    /// Removes rules that no entry refers to: what an agent left that was killed while it wrote them.
    fn remove_unused_rules(&mut self) -> Result<(), DatapathError> {
        let mut used = BTreeMap::new();
        for item in self.entries.iter() {
            let (cookie, entry) = item.map_err(reading(map::PODS))?;
            used.insert(cookie, entry.generation);
        }
        self.remove_rules_if(|cookie, generation| used.get(&cookie) != Some(&generation))
    }

    fn remove_rules_if(&mut self, is_unwanted: impl Fn(u64, u32) -> bool) -> Result<(), DatapathError> {
        let mut ports = Vec::new();
        for key in self.ports.keys() {
            let key = key.map_err(reading(map::PORTS))?;
            if is_unwanted(key.netns_cookie, key.generation) {
                ports.push(key);
            }
        }
        for key in ports {
            absent_is_fine(self.ports.remove(&key)).map_err(writing(map::PORTS))?;
        }
        let mut subnets = Vec::new();
        for key in self.subnets.keys() {
            let key = key.map_err(reading(map::SUBNETS))?;
            let data = key.data();
            if is_unwanted(u64::from_ne_bytes(data.netns_cookie), u32::from_ne_bytes(data.generation)) {
                subnets.push(key);
            }
        }
        for key in subnets {
            absent_is_fine(self.subnets.remove(&key)).map_err(writing(map::SUBNETS))?;
        }
        Ok(())
    }
}
