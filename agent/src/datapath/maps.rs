//! Typed access to the pinned maps that describe pods: entries, skipped ports and subnets, flows, counters,
//! admissions, switches. Refuses to decide what is written, and in which order.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use aya::maps::{
    Array, HashMap, Map, MapData, MapError, PerCpuArray,
    lpm_trie::{Key, LpmTrie},
};
use weft_ebpf_abi::{
    address::Address,
    map,
    pod::{self, AdmissionKey, Pod, PortBlock, PortBlockKey, Subnet},
    socket::{Client, ClientKey, Flow, FlowKey, MAX_WAITING, Waiting},
    switch,
    verdict::Direction,
};

use crate::datapath::{DatapathError, SelfEnrolment, pins::Pins, rules::Rules};

/// Handles of the pinned maps, which the programs share.
pub(crate) struct Maps {
    entries: HashMap<MapData, u64, Pod>,
    ports: HashMap<MapData, PortBlockKey, PortBlock>,
    subnets: LpmTrie<MapData, Subnet, u8>,
    stats: PerCpuArray<MapData, u64>,
    switches: Array<MapData, u32>,
    clients: HashMap<MapData, ClientKey, Client>,
    waiting: HashMap<MapData, FlowKey, Waiting>,
    overflow: Array<MapData, u32>,
    flows: HashMap<MapData, FlowKey, Flow>,
    admissions: HashMap<MapData, AdmissionKey, u64>,
    /// The keys of rules in the kernel by cookie and generation. Looking for them there takes a system call for each
    /// rule of the node.
    written: BTreeMap<(u64, u32), Keys>,
}

/// Where the rules of one generation of a pod are.
#[derive(Default)]
struct Keys {
    ports: Vec<PortBlockKey>,
    subnets: Vec<Key<Subnet>>,
}

pub(crate) fn open_map<T>(
    pins: &Pins,
    name: &'static str,
    wrap: impl FnOnce(MapData) -> Result<T, MapError>,
) -> Result<T, DatapathError> {
    MapData::from_pin(pins.map(name)).and_then(wrap).map_err(|source| DatapathError::OpenMap { name, source })
}

/// Opens the counters on their own, for readers that need nothing else.
pub(crate) fn open_counters(pins: &Pins) -> Result<Counters, DatapathError> {
    open_map(pins, map::STATS, |data| PerCpuArray::try_from(Map::PerCpuArray(data))).map(Counters)
}

/// The programs' counters.
pub(crate) struct Counters(PerCpuArray<MapData, u64>);

impl Counters {
    /// A counter of [`weft_ebpf_abi::counter`], summed over all CPUs.
    pub(crate) fn read(&self, index: u32) -> Result<u64, DatapathError> {
        let values = self.0.get(&index, 0).map_err(reading(map::STATS))?;
        Ok(values.iter().sum())
    }
}

/// Whether a switch of this or an older layout is on, by the pins alone. Without switches it is off.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn is_on(pins: &Pins, index: u32) -> Result<bool, DatapathError> {
    let Some(switches) = open_switches(pins)? else { return Ok(false) };
    switches.get(&index, 0).map(|on| on != 0).map_err(reading(map::SWITCHES))
}

/// Sets a switch of this or an older layout, by the pins alone: needs no agent. Returns how it was; `None` if there are
/// no switches.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn set_switch(pins: &Pins, index: u32, on: bool) -> Result<Option<bool>, DatapathError> {
    let Some(mut switches) = open_switches(pins)? else { return Ok(None) };
    let before = switches.get(&index, 0).map_err(reading(map::SWITCHES))?;
    switches.set(index, u32::from(on), 0).map_err(writing(map::SWITCHES))?;
    Ok(Some(before != 0))
}

fn open_switches(pins: &Pins) -> Result<Option<Array<MapData, u32>>, DatapathError> {
    let exist = pins.map(map::SWITCHES).exists();
    exist.then(|| open_map(pins, map::SWITCHES, |data| Array::try_from(Map::Array(data)))).transpose()
}

fn writing(name: &'static str) -> impl Fn(MapError) -> DatapathError {
    move |source| DatapathError::WriteMap { name, source }
}

fn reading(name: &'static str) -> impl Fn(MapError) -> DatapathError {
    move |source| DatapathError::ReadMap { name, source }
}

/// Removing an absent entry is not an error.
fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn found<T>(result: Result<T, MapError>, name: &'static str) -> Result<Option<T>, DatapathError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(reading(name)(error)),
    }
}

impl Maps {
    /// Opens the pinned maps and reads which rules are in them.
    pub(crate) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let mut maps = Self {
            entries: open_map(pins, map::PODS, |data| HashMap::try_from(Map::HashMap(data)))?,
            ports: open_map(pins, map::PORTS, |data| HashMap::try_from(Map::HashMap(data)))?,
            subnets: open_map(pins, map::SUBNETS, |data| LpmTrie::try_from(Map::LpmTrie(data)))?,
            stats: open_map(pins, map::STATS, |data| PerCpuArray::try_from(Map::PerCpuArray(data)))?,
            switches: open_map(pins, map::SWITCHES, |data| Array::try_from(Map::Array(data)))?,
            clients: open_map(pins, map::CLIENTS, |data| HashMap::try_from(Map::HashMap(data)))?,
            waiting: open_map(pins, map::WAITING, |data| HashMap::try_from(Map::HashMap(data)))?,
            overflow: open_map(pins, map::OVERFLOW, |data| Array::try_from(Map::Array(data)))?,
            flows: open_map(pins, map::FLOWS, |data| HashMap::try_from(Map::LruHashMap(data)))?,
            admissions: open_map(pins, map::ADMISSIONS, |data| HashMap::try_from(Map::HashMap(data)))?,
            written: BTreeMap::new(),
        };
        for key in maps.ports.keys() {
            let key = key.map_err(reading(map::PORTS))?;
            maps.written.entry((key.netns_cookie, key.generation)).or_default().ports.push(key);
        }
        for key in maps.subnets.keys() {
            let key = key.map_err(reading(map::SUBNETS))?;
            let data = key.data();
            let of = (u64::from_ne_bytes(data.netns_cookie), u32::from_ne_bytes(data.generation));
            maps.written.entry(of).or_default().subnets.push(key);
        }
        Ok(maps)
    }

    /// A pod's entry.
    pub(crate) fn entry(&self, cookie: u64) -> Result<Option<Pod>, DatapathError> {
        found(self.entries.get(&cookie, 0), map::PODS)
    }

    /// All pods' entries.
    pub(crate) fn entries(&self) -> Result<Vec<(u64, Pod)>, DatapathError> {
        self.entries.iter().map(|item| item.map_err(reading(map::PODS))).collect()
    }

    /// Writes a pod's entry.
    pub(crate) fn put_entry(&mut self, cookie: u64, entry: &Pod) -> Result<(), DatapathError> {
        self.entries.insert(cookie, entry, 0).map_err(writing(map::PODS))
    }

    /// Removes a pod's entry.
    pub(crate) fn remove_entry(&mut self, cookie: u64) -> Result<(), DatapathError> {
        absent_is_fine(self.entries.remove(&cookie)).map_err(writing(map::PODS))
    }

    /// Whether a pod's rules skip a port, as the programs look it up.
    pub(crate) fn skips_port(
        &self,
        cookie: u64,
        entry: &Pod,
        direction: Direction,
        port: u16,
    ) -> Result<bool, DatapathError> {
        entry.skips_port(cookie, direction, port, |key, bit| {
            Ok(found(self.ports.get(key, 0), map::PORTS)?.is_some_and(|block| block.contains(bit)))
        })
    }

    /// Whether a pod's rules skip a client, as the programs look it up.
    pub(crate) fn skips_subnet(&self, cookie: u64, entry: &Pod, client: &Address) -> Result<bool, DatapathError> {
        entry.skips_subnet(cookie, client, |subnet| {
            Ok(found(self.subnets.get(&Key::new(Subnet::HEAD_BITS + 128, subnet), 0), map::SUBNETS)?.is_some())
        })
    }

    /// A counter of [`weft_ebpf_abi::counter`], summed over all CPUs.
    pub(crate) fn counter(&self, index: u32) -> Result<u64, DatapathError> {
        let values = self.stats.get(&index, 0).map_err(reading(map::STATS))?;
        Ok(values.iter().sum())
    }

    /// Whether all redirection is switched off.
    pub(crate) fn bypassed(&self) -> Result<bool, DatapathError> {
        self.switches.get(&switch::BYPASS, 0).map(|on| on != 0).map_err(reading(map::SWITCHES))
    }

    /// Switches all redirection off.
    pub(crate) fn bypass(&mut self) -> Result<(), DatapathError> {
        self.set(switch::BYPASS, 1)
    }

    /// Has the kernel produce events, or stop it.
    pub(crate) fn set_watched(&mut self, watched: bool) -> Result<(), DatapathError> {
        self.set(switch::TRACE, u32::from(watched))
    }

    /// Turns enrolment by the kernel on or off.
    pub(crate) fn set_self_enrolment(&mut self, to: Option<SelfEnrolment>) -> Result<(), DatapathError> {
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

    /// Writes a generation of a pod's rules.
    pub(crate) fn write_rules(&mut self, cookie: u64, generation: u32, rules: &Rules) -> Result<(), DatapathError> {
        // Recorded before it is written, so that a failed write is removed, too.
        let keys = self.written.entry((cookie, generation)).or_default();
        for (direction, blocks) in [(Direction::Outbound, &rules.outbound), (Direction::Inbound, &rules.inbound)] {
            for (block, ports) in blocks {
                let key = PortBlockKey { netns_cookie: cookie, generation, direction: direction as u16, block: *block };
                keys.ports.push(key);
                self.ports.insert(key, ports, 0).map_err(writing(map::PORTS))?;
            }
        }
        for subnet in &rules.subnets {
            let data = Subnet::new(cookie, generation, &Address::from(subnet.addr()));
            let mapped_bits = if subnet.addr().is_ipv4() { 96 } else { 0 };
            let key = Key::new(Subnet::HEAD_BITS + mapped_bits + u32::from(subnet.prefix_len()), data);
            keys.subnets.push(key);
            self.subnets.insert(&key, 1, 0).map_err(writing(map::SUBNETS))?;
        }
        Ok(())
    }

    /// How many blocks of ports, and how many subnets, each generation of each pod's rules has.
    pub(crate) fn rule_counts(&self) -> impl Iterator<Item = (u64, [usize; 2])> {
        self.written.iter().map(|((cookie, _), keys)| (*cookie, [keys.ports.len(), keys.subnets.len()]))
    }

    /// Removes the rules of a pod whose generation is not `but`.
    pub(crate) fn remove_rules(&mut self, cookie: u64, but: Option<u32>) -> Result<(), DatapathError> {
        let generations = self.written.range((cookie, 0)..=(cookie, u32::MAX)).map(|((_, generation), _)| *generation);
        let unwanted: Vec<u32> = generations.filter(|generation| Some(*generation) != but).collect();
        unwanted.into_iter().try_for_each(|generation| self.remove_generation(cookie, generation))
    }

    /// Removes one generation of a pod's rules.
    pub(crate) fn remove_generation(&mut self, cookie: u64, generation: u32) -> Result<(), DatapathError> {
        let Some(keys) = self.written.get(&(cookie, generation)) else { return Ok(()) };
        for key in &keys.ports {
            absent_is_fine(self.ports.remove(key)).map_err(writing(map::PORTS))?;
        }
        for key in &keys.subnets {
            absent_is_fine(self.subnets.remove(key)).map_err(writing(map::SUBNETS))?;
        }
        self.written.remove(&(cookie, generation));
        Ok(())
    }

    /// Removes rules that no entry refers to: those of an agent that was killed while it wrote them.
    pub(crate) fn remove_unused_rules(&mut self) -> Result<(), DatapathError> {
        let used: BTreeMap<u64, u32> =
            self.entries()?.into_iter().map(|(cookie, entry)| (cookie, entry.generation)).collect();
        let cookies: BTreeSet<u64> = self.written.keys().map(|(cookie, _)| *cookie).collect();
        cookies.into_iter().try_for_each(|cookie| self.remove_rules(cookie, used.get(&cookie).copied()))
    }

    /// The network namespaces that the kernel admitted by itself.
    pub(crate) fn admissions(&self) -> Result<Vec<(AdmissionKey, u64)>, DatapathError> {
        self.admissions.iter().map(|item| item.map_err(reading(map::ADMISSIONS))).collect()
    }

    /// Removes admissions of namespaces that are gone, and of those that an agent enrolled since.
    pub(crate) fn remove_admissions(
        &mut self,
        admissions: Vec<(AdmissionKey, u64)>,
        gone: &[u64],
    ) -> Result<(), DatapathError> {
        for (key, cookie) in admissions {
            if gone.contains(&cookie) || self.entry(cookie)?.is_some_and(|entry| !entry.has(pod::SELF_ENROLLED)) {
                absent_is_fine(self.admissions.remove(&key)).map_err(writing(map::ADMISSIONS))?;
            }
        }
        Ok(())
    }

    /// Removes the flows of aborted connections of pods that are gone.
    pub(crate) fn remove_stale_flows(&mut self) -> Result<(), DatapathError> {
        // Flows first: a pod's entry exists before its flows do. Entries that are added or removed concurrently do not
        // matter.
        let flows: Vec<FlowKey> = self.flows.keys().filter_map(Result::ok).collect();
        let waiting: Vec<FlowKey> = self.waiting.keys().filter_map(Result::ok).collect();
        let pods: Result<BTreeSet<u64>, MapError> = self.entries.keys().collect();
        let pods = pods.map_err(reading(map::PODS))?;
        let is_stale = |key: &FlowKey| !pods.contains(&key.netns_cookie);
        for key in flows.into_iter().filter(is_stale) {
            absent_is_fine(self.flows.remove(&key)).map_err(writing(map::FLOWS))?;
        }
        for key in waiting.into_iter().filter(is_stale) {
            absent_is_fine(self.waiting.remove(&key)).map_err(writing(map::WAITING))?;
        }
        Ok(())
    }

    /// Removes connections that have waited for their proxies for longer than this: they were aborted before the proxy
    /// accepted them, or it never asked. `now` is the time of CLOCK_MONOTONIC.
    pub(crate) fn remove_abandoned(&mut self, now: Duration, patience: Duration) -> Result<(), DatapathError> {
        let since = nanoseconds(now.saturating_sub(patience));
        let waiting: Vec<(FlowKey, Waiting)> = self.waiting.iter().filter_map(Result::ok).collect();
        if waiting.len() < MAX_WAITING as usize && self.overflow.get(&0, 0).map_err(reading(map::OVERFLOW))? != 0 {
            // Connections that are in FLOWS at this instant are found there by their proxies' questions.
            self.overflow.set(0, 0, 0).map_err(writing(map::OVERFLOW))?;
        }
        for (key, _) in waiting.into_iter().filter(|(_, waiting)| waiting.since_ns < since) {
            absent_is_fine(self.waiting.remove(&key)).map_err(writing(map::WAITING))?;
        }
        Ok(())
    }

    /// Removes clients whose connect(2) failed longer ago than this before it sent a SYN: nothing else does.
    pub(crate) fn remove_failed_clients(&mut self, now: Duration, patience: Duration) -> Result<(), DatapathError> {
        let since = nanoseconds(now.saturating_sub(patience));
        let clients: Vec<(ClientKey, Client)> = self.clients.iter().filter_map(Result::ok).collect();
        let has_failed = |client: &Client| (1..since).contains(&client.connecting_since_ns);
        for (key, _) in clients.into_iter().filter(|(_, client)| has_failed(client)) {
            absent_is_fine(self.clients.remove(&key)).map_err(writing(map::CLIENTS))?;
        }
        Ok(())
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
