//! The kernel state of one agent: programs and their run times, maps with their entries and memory, links, pins. Read
//! through the pins only, so that another agent's state on the same host does not count.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use aya::{
    maps::{HashMap, Map, MapData, MapError, MapInfo, SockHash, lpm_trie::LpmTrie},
    programs::{
        ProgramInfo,
        links::{FdLink, PinnedLink},
        loaded_links, loaded_programs,
    },
};
use serde::Serialize;
use weft_ebpf_abi::{
    map,
    pod::{Pod, PortBlock, PortBlockKey, Subnet},
    socket::{Client, Flow, FlowKey, ListenerKey, ProxyKey, Waiting},
};

/// The common name of all pods' stubs.
pub const STEERING: &str = "sk_lookup";

/// The pins of one agent.
#[derive(Clone, Debug)]
pub struct Pinned(PathBuf);

/// Run statistics of a program while the kernel collected them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Runs {
    /// Number of runs.
    pub count: u64,
    /// Total run time, nanoseconds.
    pub time_ns: u64,
}

/// A pinned map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MapUse {
    /// The kernel's memory for it, bytes.
    pub bytes: u64,
    /// Its entries; none for maps with a fixed number.
    pub entries: Option<u64>,
}

/// Everything that an agent's pods could leave behind in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Entries by map.
    pub entries: BTreeMap<String, u64>,
    /// Programs that use the pinned maps.
    pub programs: u64,
    /// Attachments of such programs.
    pub links: u64,
    /// Files and directories below the pin directory.
    pub pins: u64,
}

impl Pinned {
    /// The pins in this directory.
    pub fn new(pin_dir: &Path) -> Self {
        Self(pin_dir.to_owned())
    }

    /// Run statistics by program, under the names of their pins; the kernel collects them only while
    /// [`aya::sys::enable_stats`] is in force.
    ///
    /// # Errors
    /// The pins cannot be read.
    pub fn runs(&self) -> anyhow::Result<BTreeMap<String, Runs>> {
        let names = self.program_names()?;
        let mut runs = BTreeMap::<String, Runs>::new();
        for program in loaded_programs() {
            let Some(program) = unless_gone(program.map_err(io::Error::other))? else { continue };
            let Some(name) = names.get(&program.id()) else { continue };
            let sum = runs.entry(name.clone()).or_default();
            sum.count += program.run_count();
            sum.time_ns += u64::try_from(program.run_time().as_nanos()).unwrap_or(u64::MAX);
        }
        Ok(runs)
    }

    /// The pinned maps.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn maps(&self) -> anyhow::Result<BTreeMap<String, MapUse>> {
        let mut maps = BTreeMap::new();
        for name in map::ALL {
            let path = self.0.join("maps").join(name);
            let bytes = memory(&path).with_context(|| format!("read the size of map {name}"))?;
            let entries = entries(&path, name).with_context(|| format!("count the entries of map {name}"))?;
            maps.insert(name.to_owned(), MapUse { bytes, entries });
        }
        Ok(maps)
    }

    /// Memory of the programs that use the pinned maps, bytes.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn program_bytes(&self) -> anyhow::Result<u64> {
        let mut bytes = 0;
        for program in self.programs()? {
            bytes += u64::from(program.memory_locked().unwrap_or_default());
        }
        Ok(bytes)
    }

    /// State that pods could leave behind.
    ///
    /// # Errors
    /// The pins cannot be read.
    pub fn holdings(&self) -> anyhow::Result<Holdings> {
        let programs: BTreeSet<u32> = self.programs()?.iter().map(ProgramInfo::id).collect();
        let mut links = 0;
        for link in loaded_links() {
            let Some(link) = unless_gone(link.map_err(io::Error::other))? else { continue };
            links += u64::from(programs.contains(&link.program_id()));
        }
        let entries = self.maps()?.into_iter().filter_map(|(name, map)| Some((name, map.entries?))).collect();
        Ok(Holdings { entries, programs: programs.len() as u64, links, pins: count_files(&self.0)? })
    }

    /// The loaded programs that use one of the pinned maps, pinned or not.
    fn programs(&self) -> anyhow::Result<Vec<ProgramInfo>> {
        let pinned = map::ALL.into_iter().map(|name| {
            let info = MapInfo::from_pin(self.0.join("maps").join(name));
            Ok(info.with_context(|| format!("open map {name}"))?.id())
        });
        let pinned: BTreeSet<u32> = pinned.collect::<anyhow::Result<_>>()?;
        let mut programs = Vec::new();
        for program in loaded_programs() {
            let Some(program) = unless_gone(program.map_err(io::Error::other))? else { continue };
            let maps = program.map_ids().ok().flatten().unwrap_or_default();
            if maps.iter().any(|map| pinned.contains(map)) {
                programs.push(program);
            }
        }
        Ok(programs)
    }

    /// Programs by their id in the kernel.
    fn program_names(&self) -> anyhow::Result<BTreeMap<u32, String>> {
        let mut names = BTreeMap::new();
        for entry in fs::read_dir(self.0.join("links")).context("read the pinned links")? {
            let entry = entry?;
            names.insert(program_of(&entry.path())?, entry.file_name().to_string_lossy().into_owned());
        }
        for entry in fs::read_dir(self.0.join("pods")).context("read the pinned pods")? {
            let link = entry?.path().join("inbound");
            if link.exists() {
                names.insert(program_of(&link)?, STEERING.to_owned());
            }
        }
        Ok(names)
    }
}

impl Runs {
    /// The difference to an earlier reading.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { count: self.count - before.count, time_ns: self.time_ns - before.time_ns }
    }
}

fn program_of(link: &Path) -> anyhow::Result<u32> {
    let pinned = PinnedLink::from_pin(link).with_context(|| format!("open {}", link.display()))?;
    Ok(FdLink::from(pinned).info().with_context(|| format!("ask {}", link.display()))?.program_id())
}

/// Anything that is removed between the listing and the query is left out.
fn unless_gone<T>(found: io::Result<T>) -> anyhow::Result<Option<T>> {
    fn is_gone(error: &(dyn std::error::Error + 'static)) -> bool {
        let own = error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound);
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        own || inner.is_some_and(|inner| is_gone(inner)) || error.source().is_some_and(is_gone)
    }
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The kernel's own figure for a map's memory (exact since Linux 6.4).
fn memory(pin: &Path) -> anyhow::Result<u64> {
    let fd = MapInfo::from_pin(pin)?.fd()?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd()))?;
    let line = info.lines().find_map(|line| line.strip_prefix("memlock:")).context("no memlock in fdinfo")?;
    Ok(line.trim().parse()?)
}

fn entries(pin: &Path, name: &str) -> Result<Option<u64>, MapError> {
    const fn size<T>() -> usize {
        size_of::<T>()
    }
    let data = || MapData::from_pin(pin);
    fn count<K>(keys: impl Iterator<Item = Result<K, MapError>>) -> u64 {
        // A key that is removed during the iteration only skips itself.
        keys.filter(Result::is_ok).count() as u64
    }
    Ok(match name {
        map::PODS => {
            let map: HashMap<MapData, u64, [u8; size::<Pod>()]> = Map::HashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::PORTS => {
            let map: HashMap<MapData, [u8; size::<PortBlockKey>()], [u8; size::<PortBlock>()]> =
                Map::HashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::SUBNETS => {
            let map: LpmTrie<MapData, [u8; size::<Subnet>()], u8> = Map::LpmTrie(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::CLIENTS => {
            let map: HashMap<MapData, u64, [u8; size::<Client>()]> = Map::HashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::WAITING => {
            let map: HashMap<MapData, [u8; size::<FlowKey>()], [u8; size::<Waiting>()]> =
                Map::HashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::FLOWS => {
            let map: HashMap<MapData, [u8; size::<FlowKey>()], [u8; size::<Flow>()]> =
                Map::LruHashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::PROXIES => {
            let map: HashMap<MapData, [u8; size::<ProxyKey>()], u8> = Map::HashMap(data()?).try_into()?;
            Some(count(map.keys()))
        }
        map::LISTENERS => {
            let map: SockHash<MapData, [u8; size::<ListenerKey>()]> = Map::SockHash(data()?).try_into()?;
            Some(count(map.keys()))
        }
        _ => None,
    })
}

fn count_files(directory: &Path) -> io::Result<u64> {
    let mut count = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            // A pod may leave between listing and reading.
            count += match count_files(&entry.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                counted => counted?,
            };
        }
    }
    Ok(count)
}
