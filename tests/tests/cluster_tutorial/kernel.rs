//! What the kernel holds for agents that run in pods on this host: asked of the kernel itself, whatever is pinned.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use aya::{
    maps::{MapInfo, loaded_maps},
    programs::{ProgramInfo, loaded_programs},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use weft_tests::cluster::Cluster;

/// Where an agent pins everything, and its maps, below a root.
const PINS: &str = "sys/fs/bpf/weft";
const MAPS: &str = "sys/fs/bpf/weft/v3/maps";

/// The numbers of the maps of the agents whose pods have these uids: those that are pinned, and those of programs that
/// use one of them. None where the agents run elsewhere.
pub(super) fn maps_of(uids: &[&str]) -> BTreeSet<u32> {
    let mut maps = BTreeSet::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let cgroup = fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        if uids.iter().any(|uid| cgroup.contains(uid)) {
            // The pod has a process without the bpffs, too: the one that holds its namespaces.
            let pins = fs::read_dir(process.path().join("root").join(MAPS)).into_iter().flatten().flatten();
            maps.extend(pins.filter_map(|pin| Some(MapInfo::from_pin(pin.path()).ok()?.id())));
        }
    }
    let of_programs: Vec<_> = programs_with(&maps).flat_map(|program| map_ids(&program)).collect();
    maps.extend(of_programs);
    maps
}

/// The directories in /proc of the kubelets of the local cluster in the environment; none where its nodes are not on
/// this host.
pub(super) fn kubelets() -> Vec<PathBuf> {
    // The cluster's control groups are called after the directory of its kubeconfig.
    let kubeconfig = env::var_os("KUBECONFIG").map(PathBuf::from);
    let name = kubeconfig.as_deref().and_then(|path| path.parent()?.file_name()?.to_str());
    let Some(group) = name.map(|name| format!("/weft-kube-{name}/")) else { return Vec::new() };
    let is_kubelet = |process: &PathBuf| {
        let read = |file: &str| fs::read_to_string(process.join(file)).unwrap_or_default();
        read("comm").trim_end() == "kubelet" && read("cgroup").contains(&group)
    };
    fs::read_dir("/proc").unwrap().flatten().map(|process| process.path()).filter(is_kubelet).collect()
}

/// Runs the program that is added to it in the network namespace of a kubelet's node.
pub(super) fn in_network_of(cluster: &Cluster, kubelet: &Path) -> Command {
    let mut command = cluster.command("nsenter");
    command.arg(format!("--net={}", kubelet.join("ns/net").display()));
    command
}

/// Removes what agents pinned on a kubelet's node.
pub(super) fn remove_pins(kubelet: &Path) {
    fs::remove_dir_all(kubelet.join("root").join(PINS)).unwrap();
}

/// Kills all processes of a pod, also the one that holds its namespaces.
pub(super) fn kill_processes_of(uid: &str) {
    let killed = kill_in_cgroup(uid);
    assert!(killed > 2, "{killed} processes of pod {uid}");
}

/// Kills the processes of a container, by what a pod's status says of it.
pub(super) fn kill_container(status: &Value) {
    let id = status["containerID"].as_str().and_then(|id| Some(id.split_once("://")?.1)).unwrap();
    let killed = kill_in_cgroup(id);
    assert!(killed > 0, "no process of container {id}");
}

/// Kills the processes of control groups whose path has this part. Returns how many there were.
fn kill_in_cgroup(part: &str) -> usize {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let cgroup = fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        if cgroup.contains(part) {
            found.push(Pid::from_raw(pid));
        }
    }
    // All are known before the first one dies: with it, the container runtime ends others.
    for pid in &found {
        let _ = kill(*pid, Signal::SIGKILL);
    }
    found.len()
}

/// How long the threads of these pods' proxies and applications ran and waited for a processor, and for what this host
/// waits. Nothing about pods elsewhere.
pub(super) fn waits_of(uids: &[&str]) -> Vec<String> {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let mut lines = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten().map(|process| process.path()) {
        let (name, cgroup) = (read(process.join("comm")), read(process.join("cgroup")));
        if !name.starts_with("weft-") || !uids.iter().any(|uid| cgroup.contains(uid)) {
            continue;
        }
        let (mut ran, mut waited) = (0, 0);
        for thread in fs::read_dir(process.join("task")).into_iter().flatten().flatten() {
            let schedstat = read(thread.path().join("schedstat"));
            let mut nanoseconds = schedstat.split_whitespace().map_while(|number| number.parse::<u64>().ok());
            ran += nanoseconds.next().unwrap_or(0);
            waited += nanoseconds.next().unwrap_or(0);
        }
        let (ran, waited) = (ran / 1_000_000, waited / 1_000_000);
        lines.push(format!("{} {}: ran {ran} ms, waited {waited} ms", process.display(), name.trim_end()));
    }
    let pressures = ["cpu", "memory", "io"].map(|of| (of, read(Path::new("/proc/pressure").join(of))));
    lines.extend(
        pressures.iter().flat_map(|(of, text)| text.lines().map(move |line| format!("pressure, {of}: {line}"))),
    );
    lines
}

/// The loaded programs that use one of these maps.
fn programs_with(maps: &BTreeSet<u32>) -> impl Iterator<Item = ProgramInfo> {
    loaded_programs().flatten().filter(|program| map_ids(program).iter().any(|map| maps.contains(map)))
}

fn map_ids(program: &ProgramInfo) -> Vec<u32> {
    program.map_ids().ok().flatten().unwrap_or_default()
}

/// These of the loaded maps, and the programs that use one of them, by name. What goes away meanwhile is left out.
pub(super) fn users_of(maps: &BTreeSet<u32>) -> Vec<String> {
    let programs =
        programs_with(maps).map(|program| program.name_as_str().unwrap_or("a program without a name").to_owned());
    let maps = loaded_maps().flatten().filter(|map| maps.contains(&map.id()));
    programs.chain(maps.map(|map| format!("map {}", map.id()))).collect()
}
