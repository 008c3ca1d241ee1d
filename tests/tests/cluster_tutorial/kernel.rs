//! What the kernel holds for agents that run in pods on this host: asked of the kernel itself, whatever is pinned.

use std::{collections::BTreeSet, fs};

use aya::{
    maps::{MapInfo, loaded_maps},
    programs::loaded_programs,
};

/// Where an agent pins its map of pods, seen from its container.
const PODS: &str = "sys/fs/bpf/weft/v3/maps/PODS";

/// The numbers of the maps of pods of the agents whose pods have these uids. None where they run elsewhere.
pub(super) fn maps_of(uids: &[&str]) -> BTreeSet<u32> {
    let mut maps = BTreeSet::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let cgroup = fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        if uids.iter().any(|uid| cgroup.contains(uid)) {
            // The pod has a process without the bpffs, too: the one that holds its namespaces.
            maps.extend(MapInfo::from_pin(process.path().join("root").join(PODS)).map(|map| map.id()));
        }
    }
    maps
}

/// These of the loaded maps, and the programs that use one of them, by name. What goes away meanwhile is left out.
pub(super) fn users_of(maps: &BTreeSet<u32>) -> Vec<String> {
    let programs = loaded_programs().flatten().filter(|program| {
        let used = program.map_ids().ok().flatten().unwrap_or_default();
        used.iter().any(|map| maps.contains(map))
    });
    let programs = programs.map(|program| program.name_as_str().unwrap_or("a program without a name").to_owned());
    let maps = loaded_maps().flatten().filter(|map| maps.contains(&map.id()));
    programs.chain(maps.map(|map| format!("map {}", map.id()))).collect()
}
