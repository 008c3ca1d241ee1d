//! The datapath's state in the kernel: enrolled pods with their rules, and counters.
//!
//! Synchronous, and owned by one thread ([`handle`]). It carries out [`Rules`] in an order in which every crash leaves
//! the pod refused or intercepted, never open. What it has in memory beside the pins and maps may be lost: the next
//! agent starts without it.
//!
//! ```text
//! enrol:    a new owner's listeners -> rules of the new generation -> entry (outbound in force) -> link -> a proxy that listens already
//!           -> entry (inbound too) -> old rules go
//! withdraw: link -> entry -> rules
//! ```

pub(crate) mod addresses;
pub(crate) mod bpf;
pub(crate) mod bpffs;
pub(crate) mod budget;
pub(crate) mod cookies;
pub(crate) mod events;
pub(crate) mod explain;
#[cfg(test)]
pub(crate) mod fake;
mod garbage;
pub(crate) mod handle;
pub(crate) mod keep;
pub(crate) mod listeners;
pub(crate) mod lock;
pub(crate) mod maps;
pub(crate) mod migrate;
pub(crate) mod names;
mod netlink;
pub(crate) mod netns;
pub(crate) mod pins;
pub(crate) mod programs;
pub(crate) mod rules;
pub(crate) mod sample;
pub(crate) mod scans;
pub(crate) mod sock_diag;
pub(crate) mod steering;
pub(crate) mod takeover;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapError, RingBuf, SockHash},
};
use weft_ebpf_abi::{
    address::Address,
    counter, map,
    pod::{self, Pod},
    verdict::{Direction, Verdict},
};

use self::{
    budget::OverBudget,
    cookies::{CookieSource, Cookies, Namespaces},
    events::RingEvents,
    explain::{Answer, Question},
    handle::{Begun, Collected, Facts, Kernel, Otherwise, Pending},
    keep::{Found, KeepError, Keeper},
    listeners::{Listeners, ListenersError, proxy_key},
    maps::{Maps, open_counters, open_map},
    names::Names,
    netns::Netns,
    pins::{Pins, PinsError},
    programs::{Programs, ProgramsError},
    rules::{PodName, Rules},
    sample::{Enrolled, Losses, Sample},
    takeover::{Search, TakenListener, TakeoverError},
};

/// The agent's state in the kernel.
pub(crate) struct Datapath {
    pins: Pins,
    programs: Programs,
    cgroup: PathBuf,
    maps: Maps,
    listeners: Listeners,
    /// Whether a pod was removed since the last search for its flows.
    flows_may_be_stale: bool,
    /// When clients are looked through next, by CLOCK_MONOTONIC.
    clients_due: Duration,
    names: Names,
    /// Namespaces in the maps that have no link, and the time from which each is suspect of being gone: those that the
    /// kernel enrolled, and those whose enrolment was interrupted.
    suspects: BTreeMap<u64, Instant>,
    keeper: Keeper,
    cookies: Cookies,
    /// The last sample, and its time.
    sampled: Option<(Instant, Arc<Sample>)>,
}

/// How the kernel enrols a network namespace by itself: which user has to bind which port on loopback.
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
    /// Begin with all redirection switched off. Otherwise it stays as it is.
    pub(crate) bypassed: bool,
}

/// The reason why a call of the datapath failed.
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
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
    #[error("the pod's rules changed or the pod left while it was being enrolled")]
    Superseded,
    #[error("the call of the datapath panicked, or the agent is stopping")]
    Stopped,
    #[error("the datapath is busy with other calls")]
    Busy,
    #[error("cannot open the cgroup {path}")]
    Cgroup { path: String, source: std::io::Error },
    #[error("cannot open map {name}")]
    OpenMap { name: &'static str, source: MapError },
    #[error("cannot write map {name} (is it full?)")]
    WriteMap { name: &'static str, source: MapError },
    #[error("cannot read map {name}")]
    ReadMap { name: &'static str, source: MapError },
}

/// The result of an enrolment.
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

/// The cookies that sockets store, where they do.
fn open_namespaces(pins: &Pins, cookies: CookieSource) -> Result<Option<Namespaces>, DatapathError> {
    let open = || open_map(pins, map::NAMESPACES, |data| Namespaces::try_from(Map::SkStorage(data)));
    (cookies == CookieSource::Sockets).then(open).transpose()
}

impl Datapath {
    /// Takes over what is pinned, loads what is missing and attaches it to the cgroup.
    ///
    /// The second value is the loaded object, for reading its log records.
    pub(crate) fn open(options: Options<'_>) -> Result<(Self, Ebpf), DatapathError> {
        let Options { pin_dir, cgroup, debug_log, cookies, self_enrolment, bypassed } = options;
        let directory = File::open(cgroup)
            .map_err(|source| DatapathError::Cgroup { path: cgroup.display().to_string(), source })?;
        let pins = Pins::new(pin_dir);
        pins.prepare()?;
        let programs = Programs::new(pins.clone(), debug_log, cookies);
        let mut ebpf = programs.open()?;
        let mut maps = Maps::open(&pins)?;
        // The watchers of the last agent are gone.
        maps.set_watched(false)?;
        maps.set_self_enrolment(self_enrolment)?;
        if bypassed {
            maps.bypass()?;
        }
        let replaced = programs.attach(&mut ebpf, &directory)?;
        let mut datapath = Self {
            cgroup: cgroup.to_path_buf(),
            maps,
            listeners: Listeners::new(
                open_map(&pins, map::LISTENERS, |data| SockHash::try_from(Map::SockHash(data)))?,
                open_map(&pins, map::PROXIES, |data| HashMap::try_from(Map::HashMap(data)))?,
                open_namespaces(&pins, cookies)?,
                cgroup.to_path_buf(),
            ),
            flows_may_be_stale: true,
            clients_due: Duration::ZERO,
            names: Names::default(),
            suspects: BTreeMap::new(),
            keeper: Keeper::new(&pins)?,
            cookies: programs.cookies(&mut ebpf, open_namespaces(&pins, cookies)?)?,
            sampled: None,
            programs,
            pins,
        };
        datapath.collect_garbage()?;
        datapath.maps.remove_unused_rules()?;
        for (cookie, name) in datapath.pins.pods()? {
            if replaced {
                datapath.programs.update_pod(cookie)?;
            }
            if let Some(name) = name {
                datapath.names.insert(cookie, &name);
            }
        }
        if replaced {
            let digest = datapath.programs.digest();
            datapath.pins.set_programs(&digest)?;
        }
        datapath.programs.keep_spares()?;
        Ok((datapath, ebpf))
    }

    /// Removes other namespaces of a pod's name if they are gone. While one lives, so does its redirect.
    fn remove_predecessors(&mut self, cookie: u64, pod: &PodName) -> Result<(), DatapathError> {
        for predecessor in self.names.cookies(pod).into_iter().filter(|other| *other != cookie) {
            if self.is_gone(predecessor)? == Some(true) {
                self.remove(predecessor)?;
            }
        }
        Ok(())
    }

    /// Checks that a pod's rules leave room for those of other namespaces.
    fn check_budget(&self, cookie: u64, rules: &Rules) -> Result<(), OverBudget> {
        let (ports, names) = (rules.outbound.len() + rules.inbound.len(), self.names.snapshot());
        for (map, wanted, of) in [(budget::PORTS, ports, 0), (budget::SUBNETS, rules.subnets.len(), 1)] {
            let others = self.maps.rule_counts().filter(|(other, _)| *other != cookie);
            let others =
                others.map(|(other, counts)| (names.get(&other).map(|name| name.namespace.as_str()), counts[of]));
            map.admit(&rules.pod.namespace, wanted, others)?;
        }
        Ok(())
    }

    /// Records the listeners that a search found, unless the programs have recorded one already.
    fn adopt(&mut self, cookie: u64, entry: &Pod, listeners: &[TakenListener]) -> Result<(), DatapathError> {
        let adopted = self.listeners.adopt(cookie, entry, listeners)?;
        if adopted > 0 {
            tracing::info!(netns_cookie = cookie, adopted, "the proxy listened before the programs did");
        }
        Ok(())
    }

    /// What happens if the listeners that a new entry needs are not found; `None` if they need not be known first.
    fn needs_listeners(&self, cookie: u64, old: Option<&Pod>, new: &Pod) -> Result<Option<Otherwise>, DatapathError> {
        Ok(match old {
            None => Some(Otherwise::Outbound),
            Some(old) if !old.has(pod::INBOUND) => None,
            Some(old) if old.proxy() != new.proxy() => Some(Otherwise::Nothing),
            Some(old) if self.maps.skips_port(cookie, old, Direction::Inbound, new.admin_port)? => {
                Some(Otherwise::SkippedAdminPort)
            }
            Some(old) => (old.admin_port != new.admin_port).then_some(Otherwise::Nothing),
        })
    }

    /// Sets the inbound bit: the last step of an enrolment, after which nothing refers to older rules.
    fn put_inbound_in_force(&mut self, enrolment: Enrolment, mut entry: Pod) -> Result<Enrolment, DatapathError> {
        let Enrolment { cookie, generation, .. } = enrolment;
        if !entry.has(pod::INBOUND) {
            entry.flags |= pod::INBOUND;
            self.maps.put_entry(cookie, &entry)?;
        }
        self.maps.remove_rules(cookie, Some(generation))?;
        Ok(enrolment)
    }

    fn enrolled(&self) -> Result<Vec<Enrolled>, DatapathError> {
        let (mut pods, names) = (Vec::new(), self.names.snapshot());
        let proxies = self.listeners.living()?;
        for (cookie, entry) in self.maps.entries()? {
            pods.push(Enrolled {
                name: names.get(&cookie).map(|name| PodName::clone(name)),
                cookie,
                generation: entry.generation,
                outbound: entry.has(pod::OUTBOUND),
                inbound: entry.has(pod::INBOUND) && self.steers(cookie)?,
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

    fn take_sample(&self) -> Result<Sample, DatapathError> {
        let mut verdicts = Vec::new();
        for direction in Direction::ALL {
            for verdict in Verdict::ALL.into_iter().filter(|verdict| verdict.is_counted()) {
                verdicts.push((direction, verdict, self.maps.counter(counter::of(direction, verdict))?));
            }
        }
        Ok(Sample {
            pods: self.enrolled()?,
            verdicts,
            events_dropped: self.maps.counter(counter::EVENTS_DROPPED)?,
            flow_misses: self.maps.counter(counter::FLOW_MISSES)?,
            bind_failures: self.maps.counter(counter::BIND_FAILURES)?,
            listeners_lost: self.maps.counter(counter::LISTENERS_LOST)?,
            admissions_refused: self.maps.counter(counter::ADMISSIONS_REFUSED)?,
            bypassed: self.maps.bypassed()?,
        })
    }

    /// A pod's entry, by its name: the one that was enrolled last, if an earlier namespace of that name still exists.
    pub(crate) fn find(&self, pod: &PodName) -> Result<Option<(u64, Pod)>, DatapathError> {
        for cookie in self.names.cookies(pod).into_iter().rev() {
            if self.is_gone(cookie)? != Some(true)
                && let Some(entry) = self.maps.entry(cookie)?
            {
                return Ok(Some((cookie, entry)));
            }
        }
        Ok(None)
    }

    /// The maps, for reading.
    pub(crate) fn maps(&self) -> &Maps {
        &self.maps
    }

    /// Whether a pod's proxy has a listener on a port.
    pub(crate) fn listens(&self, cookie: u64, entry: &Pod, port: u16) -> Result<bool, DatapathError> {
        Ok(self.listeners.living()?.contains_key(&proxy_key(cookie, entry, port)))
    }

    /// Whether connections of a family are given to such a listener.
    pub(crate) fn accepts(&self, cookie: u64, entry: &Pod, port: u16, is_v4: bool) -> Result<bool, DatapathError> {
        Ok(self.listeners.accepts(cookie, entry, port, is_v4)?)
    }

    /// Whether a program decides about connections that arrive in a pod.
    pub(crate) fn steers(&self, cookie: u64) -> Result<bool, DatapathError> {
        Ok(self.is_gone(cookie)? == Some(false))
    }

    /// How many pods are in the kernel.
    pub(crate) fn pod_count(&self) -> Result<usize, DatapathError> {
        Ok(self.maps.entries()?.len())
    }

    /// The digest of the programs in force.
    pub(crate) fn digest(&self) -> String {
        self.programs.digest()
    }

    /// Whether a pod's network namespace is gone, according to its link; `None` if it has no link. A pin that was
    /// removed does not say so.
    fn is_gone(&self, cookie: u64) -> Result<Option<bool>, DatapathError> {
        match self.keeper.is_gone(cookie) {
            Some(answer) => {
                let path = || self.pins.pod_link(cookie).display().to_string();
                Ok(Some(answer.map_err(|source| KeepError::Hold { path: path(), source })?))
            }
            None => Ok(self.programs.is_gone(cookie)?),
        }
    }

    fn remove(&mut self, cookie: u64) -> Result<(), DatapathError> {
        self.programs.detach_pod(cookie)?;
        self.keeper.release_pod(cookie);
        self.maps.remove_entry(cookie)?;
        self.listeners.forget(cookie);
        self.maps.remove_rules(cookie, None)?;
        self.names.remove(cookie);
        self.suspects.remove(&cookie);
        self.flows_may_be_stale = true;
        Ok(())
    }
}

impl Kernel for Datapath {
    fn facts(&self) -> Facts {
        Facts {
            digest: self.digest(),
            cgroup: self.cgroup.clone(),
            pin_dir: self.pins.root().to_path_buf(),
            cookies: self.cookies.clone(),
        }
    }

    fn names(&self) -> &Names {
        &self.names
    }

    fn begin_enrolment(
        &mut self,
        netns: &Netns,
        rules: &Rules,
        listeners: Option<&[TakenListener]>,
    ) -> Result<Begun, DatapathError> {
        let cookie = netns.cookie;
        self.remove_predecessors(cookie, &rules.pod)?;
        let old = self.maps.entry(cookie)?;
        let next = rules.entry(old.map_or(1, |old| old.generation.wrapping_add(1)));
        let unchanged = old.filter(|old| old.rules == next.rules);
        let mut entry = unchanged.unwrap_or(next);
        let self_enrolled = old.is_some_and(|old| old.has(pod::SELF_ENROLLED));
        // Nothing steers the pod's inbound connections yet, and what steers them refuses those without a listener: a
        // proxy that listens already must not lose any.
        let (is_unknown, is_new) = (old.is_none(), old.is_none() || self_enrolled);
        if unchanged.is_none() {
            if let Some(otherwise) = self.needs_listeners(cookie, old.as_ref(), &entry)? {
                match listeners {
                    Some(listeners) => self.adopt(cookie, &entry, listeners)?,
                    None => match self.listeners.search(cookie, &entry, self_enrolled)? {
                        Some(search) if search.may_find(netns) => return Ok(Begun::Search { search, otherwise }),
                        _ => {}
                    },
                }
            }
            self.check_budget(cookie, rules)?;
            // The inbound bit of a pod that already had it stays: its link reads the new entry at once.
            entry.flags |= pod::OUTBOUND | old.map_or(0, |old| old.flags & pod::INBOUND);
            let written = self
                .maps
                .write_rules(cookie, entry.generation, rules)
                .and_then(|()| self.maps.put_entry(cookie, &entry));
            if let Err(error) = written {
                // A later attempt, with other rules, has the same generation and would include what is left of this
                // one.
                self.maps.remove_generation(cookie, entry.generation)?;
                return Err(error);
            }
        }
        self.pins.add_pod(cookie, &rules.pod)?;
        self.names.insert(cookie, &rules.pod);
        let attached = !self.keeper.holds_pod(cookie) || self.is_gone(cookie)? != Some(false);
        if attached {
            self.keeper.hold_pod(cookie, self.programs.attach_pod(cookie, &netns.file)?);
        }
        self.suspects.remove(&cookie);
        let enrolment =
            Enrolment { cookie, generation: entry.generation, changed: unchanged.is_none() || attached, is_new };
        // Every time: a proxy that binds before the programs are attached and listens after them is recorded by
        // neither, nor found by a search before. Nor is one that begins to listen after the visit, while the old entry
        // names another.
        match listeners.filter(|_| !is_unknown) {
            Some(listeners) => self.adopt(cookie, &entry, listeners)?,
            None => {
                if let Some(search) = self.listeners.search(cookie, &entry, self_enrolled)? {
                    return Ok(Begun::Pending(Pending { enrolment, search }));
                }
            }
        }
        self.put_inbound_in_force(enrolment, entry).map(Begun::Done)
    }

    fn complete_enrolment(
        &mut self,
        pending: Pending,
        listeners: &[TakenListener],
    ) -> Result<Enrolment, DatapathError> {
        let Enrolment { cookie, generation, .. } = pending.enrolment;
        let entry = self.maps.entry(cookie)?.filter(|entry| entry.generation == generation);
        let entry = entry.ok_or(DatapathError::Superseded)?;
        self.adopt(cookie, &entry, listeners)?;
        self.put_inbound_in_force(pending.enrolment, entry)
    }

    fn search_again(&mut self, netns_cookie: u64) -> Result<Option<Search>, DatapathError> {
        let entry = self.maps.entry(netns_cookie)?.ok_or(DatapathError::Superseded)?;
        Ok(self.listeners.search(netns_cookie, &entry, false)?)
    }

    fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError> {
        self.names.cookies(pod).into_iter().try_for_each(|cookie| self.remove(cookie))
    }

    fn collect_garbage(&mut self) -> Result<Collected, DatapathError> {
        garbage::collect(self)
    }

    fn remove_absent(&mut self, absent: &BTreeSet<u64>) -> Result<Vec<u64>, DatapathError> {
        garbage::remove_absent(self, absent)
    }

    fn sample(&mut self, max_age: Duration) -> Result<Arc<Sample>, DatapathError> {
        if let Some((at, sample)) = &self.sampled
            && at.elapsed() < max_age
        {
            return Ok(Arc::clone(sample));
        }
        let sample = Arc::new(self.take_sample()?);
        self.sampled = Some((Instant::now(), Arc::clone(&sample)));
        Ok(sample)
    }

    fn explain(&self, question: &Question) -> Result<Answer, DatapathError> {
        explain::explain(self, question)
    }

    fn losses(&self) -> Result<Losses, DatapathError> {
        Ok(Losses {
            listeners: self.maps.counter(counter::LISTENERS_LOST)?,
            admissions: self.maps.counter(counter::ADMISSIONS_REFUSED)?,
        })
    }

    fn bypassed(&self) -> Result<bool, DatapathError> {
        self.maps.bypassed()
    }

    fn keep_pins(&mut self) -> Result<Found, DatapathError> {
        let found = self.keeper.restore()?;
        if let Found::Restored(_) = found {
            for (cookie, name) in self.names.snapshot().iter() {
                self.pins.add_pod(*cookie, name)?;
            }
            self.pins.set_programs(&self.programs.digest())?;
        }
        Ok(found)
    }

    fn is_unloaded(&self) -> Result<bool, DatapathError> {
        Ok(self.keeper.is_detached()?)
    }

    fn start_events(&mut self) -> Result<RingEvents, DatapathError> {
        let mut ring = open_map(&self.pins, map::EVENTS, |data| RingBuf::try_from(Map::RingBuf(data)))?;
        // Left over from an earlier watcher. No events are added while the switch is off.
        while ring.next().is_some() {}
        let events = RingEvents::new(ring, open_counters(&self.pins)?);
        self.maps.set_watched(true)?;
        Ok(events)
    }

    fn stop_events(&mut self) -> Result<(), DatapathError> {
        self.maps.set_watched(false)
    }
}
