//! The cgroup to which the agent attaches itself by default, on the real kernel: in its own cgroup namespace it sees
//! only the tree of a simulated node, as in a container. Needs root and cgroup2, and fails without them.

#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use weft_sandbox::host::cgroup;
use weft_test_kit::wait::blocking::eventually;

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");
const PATIENCE: Duration = Duration::from_secs(60);

/// A cgroup that is the root for its processes, and a directory for other files. Both are removed on drop.
struct Node {
    cgroup: PathBuf,
    run: PathBuf,
    agent: Option<Child>,
}

impl Node {
    /// Creates these cgroups in its tree.
    fn new(name: &str, cgroups: &[&str]) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test needs root: it makes cgroups and loads programs");
        let name = format!("wfcg{}-{name}", std::process::id());
        let cgroup = cgroup::mount_point().unwrap().join(&name);
        let node = Self { cgroup, run: PathBuf::from("/run").join(&name), agent: None };
        fs::create_dir(&node.cgroup).unwrap();
        for path in cgroups {
            fs::create_dir_all(node.cgroup.join(path)).unwrap();
        }
        for directory in ["cgroup", "bpffs"] {
            fs::create_dir_all(node.run.join(directory)).unwrap();
        }
        node
    }

    /// Starts an agent in it and returns the cgroup to which it attached its programs.
    fn attached(&mut self) -> Value {
        let run = self.run.display();
        // It has its own mount namespace, so its mounts end with it.
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec unshare --cgroup --mount sh -c 'mount -t cgroup2 none {run}/cgroup && \
             mount -t bpf none {run}/bpffs && exec {AGENT} run --socket {run}/agent.sock --pin-dir {run}/bpffs/v1 \
             --cgroup-root {run}/cgroup'",
            self.cgroup.display()
        );
        let log = fs::File::create(self.run.join("log")).unwrap();
        let agent = Command::new("sh").args(["-c", &script]).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        self.agent = Some(agent.unwrap());
        let status = || -> Result<Value, String> {
            let mut status = Command::new(AGENT);
            status.args(["status", "-o", "json", "--socket"]).arg(self.run.join("agent.sock")).stderr(Stdio::null());
            let answer = serde_json::from_slice(&status.output().unwrap().stdout);
            answer.map_err(|_| fs::read_to_string(self.run.join("log")).unwrap_or_default())
        };
        eventually("an agent", PATIENCE, status)
    }

    /// A path as the agent sees it.
    fn seen(&self, path: &str) -> PathBuf {
        self.run.join("cgroup").join(path)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        let _ = cgroup::remove(&self.cgroup);
        let _ = fs::remove_dir_all(&self.run);
    }
}

#[test]
fn attaches_to_the_pods_of_each_cgroup_driver() {
    for (name, pod, expected) in [
        ("cgroupfs", "kubepods/burstable/pod0a1b", "kubepods"),
        ("systemd", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b.slice", "kubepods.slice"),
        (
            "kind",
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod0a1b.slice",
            "kubelet.slice/kubelet-kubepods.slice",
        ),
        ("nested", "docker/c0ffee/kubelet/kubepods/pod0a1b", "docker/c0ffee/kubelet/kubepods"),
    ] {
        let mut node = Node::new(name, &[pod, "system.slice/containerd.service"]);
        let status = node.attached();
        assert_eq!(status["cgroup"], node.seen(expected).to_str().unwrap(), "{name}");
        assert_eq!(status["cgroup_is_root"], false, "{name}");
    }
}

#[test]
fn attaches_to_the_root_of_what_it_sees_when_there_are_no_pods() {
    let mut node = Node::new("bare", &["system.slice/containerd.service"]);
    let status = node.attached();
    assert_eq!(PathBuf::from(status["cgroup"].as_str().unwrap()), node.run.join("cgroup"));
    assert_eq!(status["cgroup_is_root"], true);
    assert!(status["cgroup_reason"].as_str().unwrap().contains("part of the node's"), "{status}");
}

/// The status of a running agent contains the detected features, and they suffice: the programs are loaded.
#[test]
fn status_tells_what_the_kernel_has() {
    let mut node = Node::new("features", &["kubepods"]);
    let status = node.attached();
    let features = status["features"].as_array().unwrap();
    let required: Vec<&Value> = features.iter().filter(|feature| feature["need"] == "required").collect();
    assert!(required.len() > 20, "{status}");
    for feature in required {
        assert_eq!(feature["found"], "yes", "{feature}");
    }
    // The same without an agent.
    let output = Command::new(AGENT).args(["features", "-o", "json"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |features: &Value, name: &str| {
        features.as_array().unwrap().iter().find(|feature| feature["name"] == name).cloned().unwrap()
    };
    for name in ["SO_NETNS_COOKIE", "bpf_get_netns_cookie in getsockopt", "links to network namespaces"] {
        assert_eq!(of(&reported, name), of(&status["features"], name));
    }
}

/// Without privileges no feature can be probed; this is reported, and no feature is reported as missing.
#[test]
fn features_without_rights_are_unknown() {
    let mut command = Command::new("setpriv");
    let drop_all = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];
    let output = command.args(drop_all).arg(AGENT).args(["features", "-o", "json"]).output().unwrap();
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let features = reported.as_array().unwrap();
    let ring = features.iter().find(|feature| feature["name"] == "map ringbuf").unwrap();
    assert_eq!(ring["found"], "unknown", "{ring}");
    assert!(ring["detail"].as_str().unwrap().contains("not permitted"), "{ring}");
}
