//! State that an agent pinned, read from the kernel without the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use aya::{
    maps::{HashMap, Map, MapData, MapInfo},
    programs::links::{FdLink, PinnedLink},
};
use weft_ebpf_abi::{
    map,
    pod::{Pod, PortBlock, PortBlockKey},
    socket::{Client, ClientKey},
};

/// A pinned map or link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pinned {
    /// The id of the map or link.
    pub(crate) id: u32,
    /// The id of a link's program.
    pub(crate) program: Option<u32>,
}

impl Pinned {
    fn read(pin: &Path) -> Self {
        if pin.parent().is_some_and(|directory| directory.ends_with("maps")) {
            return Self { id: MapInfo::from_pin(pin).unwrap().id(), program: None };
        }
        let link = FdLink::from(PinnedLink::from_pin(pin).unwrap()).info().unwrap();
        Self { id: link.id(), program: Some(link.program_id()) }
    }
}

/// Every pin below a directory, by its relative path.
pub(crate) fn pinned(directory: &Path) -> BTreeMap<PathBuf, Pinned> {
    let mut found = BTreeMap::new();
    let mut open = vec![directory.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                let path = entry.path();
                found.insert(path.strip_prefix(directory).unwrap().to_path_buf(), Pinned::read(&path));
            }
        }
    }
    found
}

/// The ids of all attached programs, by their links. Programs that are loaded later have greater ids.
pub(crate) fn programs(directory: &Path) -> BTreeMap<PathBuf, u32> {
    let links = pinned(directory).into_iter();
    links.filter_map(|(path, pinned)| Some((path, pinned.program?))).collect()
}

/// The ids of the maps that programs use, pinned or not.
pub(crate) fn maps_of(programs: &BTreeSet<u32>) -> BTreeSet<u32> {
    // Other programs may vanish between being listed and being opened.
    let loaded = aya::programs::loaded_programs().filter_map(Result::ok);
    let ours = loaded.filter(|program| programs.contains(&program.id()));
    ours.flat_map(|program| program.map_ids().unwrap().unwrap()).collect()
}

/// The ids of all maps and of all programs in the kernel.
pub(crate) fn everything() -> (BTreeSet<u32>, BTreeSet<u32>) {
    let maps = aya::maps::loaded_maps().filter_map(|map| Some(map.ok()?.id())).collect();
    let programs = aya::programs::loaded_programs().filter_map(|program| Some(program.ok()?.id())).collect();
    (maps, programs)
}

/// The map of pods.
pub(crate) fn pods(directory: &Path) -> HashMap<MapData, u64, Pod> {
    HashMap::try_from(Map::HashMap(data(directory, map::PODS))).unwrap()
}

/// The map of clients.
pub(crate) fn clients(directory: &Path) -> HashMap<MapData, ClientKey, Client> {
    HashMap::try_from(Map::HashMap(data(directory, map::CLIENTS))).unwrap()
}

/// A pinned map.
pub(crate) fn data(directory: &Path, name: &str) -> MapData {
    MapData::from_pin(directory.join("maps").join(name)).unwrap()
}

/// The map of skipped ports.
pub(crate) fn ports(directory: &Path) -> HashMap<MapData, PortBlockKey, PortBlock> {
    HashMap::try_from(Map::HashMap(data(directory, map::PORTS))).unwrap()
}
