//! What the kernel says of what an agent pinned, without asking the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
};

use aya::maps::{HashMap, Map, MapData};
use weft_ebpf_abi::{
    map,
    pod::{Pod, PortBlock, PortBlockKey},
};

use crate::bpf::Object;

/// A pinned map or link, as its file descriptor's information has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pinned(BTreeMap<String, String>);

impl Pinned {
    /// The number of the map or link.
    pub(crate) fn id(&self) -> u32 {
        let id = self.0.get("map_id").or_else(|| self.0.get("link_id"));
        id.unwrap_or_else(|| panic!("no id in {self:?}")).parse().unwrap()
    }

    /// The number of a link's program.
    pub(crate) fn program(&self) -> Option<u32> {
        Some(self.0.get("prog_id")?.parse().unwrap())
    }
}

/// Every pin below a directory, by its path from there.
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
                let object = Object::open(&entry.path()).unwrap().unwrap();
                let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", object.as_fd().as_raw_fd())).unwrap();
                // The rest changes with time.
                let names = ["map_id", "link_id", "prog_id"];
                let fields = info.lines().filter_map(|line| line.split_once(":\t"));
                let fields = fields
                    .filter(|(name, _)| names.contains(name))
                    .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                    .collect();
                found.insert(entry.path().strip_prefix(directory).unwrap().to_path_buf(), Pinned(fields));
            }
        }
    }
    found
}

/// The numbers of all attached programs, by their links. What is loaded later has a greater one.
pub(crate) fn programs(directory: &Path) -> BTreeMap<PathBuf, u32> {
    let links = pinned(directory).into_iter();
    links.filter_map(|(path, pinned)| Some((path, pinned.program()?))).collect()
}

/// The numbers of the maps that programs use, pinned or not.
pub(crate) fn maps_of(programs: &BTreeSet<u32>) -> BTreeSet<u32> {
    let loaded = aya::programs::loaded_programs().map(Result::unwrap);
    let ours = loaded.filter(|program| programs.contains(&program.id()));
    ours.flat_map(|program| program.map_ids().unwrap().unwrap()).collect()
}

/// The numbers of all maps and of all programs there are.
pub(crate) fn everything() -> (BTreeSet<u32>, BTreeSet<u32>) {
    let maps = aya::maps::loaded_maps().filter_map(|map| Some(map.ok()?.id())).collect();
    let programs = aya::programs::loaded_programs().filter_map(|program| Some(program.ok()?.id())).collect();
    (maps, programs)
}

/// The map of pods.
pub(crate) fn pods(directory: &Path) -> HashMap<MapData, u64, Pod> {
    HashMap::try_from(Map::HashMap(data(directory, map::PODS))).unwrap()
}

/// A pinned map.
pub(crate) fn data(directory: &Path, name: &str) -> MapData {
    MapData::from_pin(directory.join("maps").join(name)).unwrap()
}

/// The map of skipped ports.
pub(crate) fn ports(directory: &Path) -> HashMap<MapData, PortBlockKey, PortBlock> {
    HashMap::try_from(Map::HashMap(data(directory, map::PORTS))).unwrap()
}
