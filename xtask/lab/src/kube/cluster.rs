//! One cluster on this host: its machines, their paths, addresses and names; and the list of clusters.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use weft_xtask::{command, workspace};

use crate::tools::Tools;

/// Files for users of a running cluster: kubeconfig, logs, audit log, sockets.
pub(super) const STATE: &str = "/run/weft-kube";
/// Large files: etcd's data, images, volumes. On disk, where overlayfs works.
pub(super) const DATA: &str = "/var/lib/weft-kube";

/// A cluster on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cluster {
    pub(super) name: String,
    /// The X of 10.88.X.0/24, which connects it to the host.
    pub(super) subnet: u8,
    /// How many of its machines run pods. With none, the first machine keeps objects and nothing else.
    pub(super) nodes: u8,
    /// Whether its start was completed.
    pub(super) complete: bool,
}

/// A machine of a cluster: a network namespace, a mount namespace and control groups. The first has the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    cluster: String,
    subnet: u8,
    /// From 1.
    pub(super) number: u8,
}

impl Cluster {
    /// The administrator's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.state().join("kubeconfig")
    }

    /// One JSON object for every request to the API server.
    pub(crate) fn audit_log(&self) -> PathBuf {
        self.first().log("audit")
    }

    /// Environment variables for users of the cluster. In PATH, the tools and our programs come before `$PATH`.
    pub(crate) fn environment(&self, tools: &Tools, programs: PathBuf) -> Vec<(&'static str, String)> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut directories = tools.path_directories();
        directories.push(programs);
        let others: Vec<_> = std::env::split_paths(&path).filter(|other| !directories.contains(other)).collect();
        directories.extend(others);
        let path = std::env::join_paths(directories).unwrap_or(path);
        vec![
            ("KUBECONFIG", self.kubeconfig().display().to_string()),
            ("WEFT_KUBE_AUDIT_LOG", self.audit_log().display().to_string()),
            ("PATH", path.to_string_lossy().into_owned()),
        ]
    }

    pub(super) fn kubectl(&self, tools: &Tools, arguments: &[&str]) -> Result<String> {
        let mut kubectl = Command::new(tools.program("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.kubeconfig()).arg("--request-timeout=10s").args(arguments);
        command::output(&mut kubectl)
    }

    /// Name of the control groups, and what names of network namespaces begin with.
    pub(super) fn scope(&self) -> String {
        scope(&self.name)
    }

    pub(super) fn state(&self) -> PathBuf {
        Path::new(STATE).join(&self.name)
    }

    pub(super) fn machines(&self) -> impl Iterator<Item = Machine> {
        (1..=self.nodes.max(1)).map(|number| self.machine(number))
    }

    pub(super) fn first(&self) -> Machine {
        self.machine(1)
    }

    fn machine(&self, number: u8) -> Machine {
        Machine { cluster: self.name.clone(), subnet: self.subnet, number }
    }

    /// The host's interface; the kernel allows 15 characters.
    pub(super) fn link(&self) -> String {
        format!("weft-kube{}", self.subnet)
    }

    pub(super) fn host_address(&self) -> String {
        format!("10.88.{}.1", self.subnet)
    }

    pub(super) fn host_address_v6(&self) -> String {
        format!("fd00:88:{}::1", self.subnet)
    }

    pub(super) fn save(&self) -> Result<()> {
        fs::create_dir_all(self.state()).with_context(|| format!("create {}", self.state().display()))?;
        let value = json!({ "subnet": self.subnet, "nodes": self.nodes, "complete": self.complete });
        fs::write(self.state().join("cluster.json"), value.to_string()).context("write cluster.json")
    }

    pub(super) fn load(name: &str) -> Option<Self> {
        let text = fs::read_to_string(Path::new(STATE).join(name).join("cluster.json")).ok()?;
        let value: Value = serde_json::from_str(&text).ok()?;
        let number = |key: &str| value[key].as_u64()?.try_into().ok();
        let (subnet, nodes) = (number("subnet")?, number("nodes")?);
        Some(Self { name: name.to_owned(), subnet, nodes, complete: value["complete"] != false })
    }

    pub(super) fn is_well(&self, tools: &Tools) -> bool {
        self.complete
            && self.kubectl(tools, &["get", "--raw", "/readyz"]).is_ok()
            && self.machines().take(self.nodes.into()).all(|machine| self.is_node_ready(tools, &machine))
    }

    pub(super) fn is_node_ready(&self, tools: &Tools, machine: &Machine) -> bool {
        let status = "jsonpath={.status.conditions[?(@.type=='Ready')].status}";
        self.kubectl(tools, &["get", "node", &machine.name(), "-o", status]).is_ok_and(|status| status == "True")
    }
}

impl Machine {
    /// The name of its node.
    pub(super) fn name(&self) -> String {
        format!("{}-node{}", self.cluster, self.number)
    }

    /// The part that its paths and control groups have beside those of other machines of the cluster.
    pub(super) fn directory(&self) -> String {
        format!("node{}", self.number)
    }

    pub(super) fn state(&self) -> PathBuf {
        Path::new(STATE).join(&self.cluster).join(self.directory())
    }

    pub(super) fn data(&self) -> PathBuf {
        Path::new(DATA).join(&self.cluster).join(self.directory())
    }

    pub(super) fn config(&self) -> PathBuf {
        self.data().join("config")
    }

    pub(super) fn containerd(&self) -> PathBuf {
        self.state().join("run/containerd/containerd.sock")
    }

    /// The name of its network namespace, which is of no other cluster: names of clusters have no dot.
    pub(super) fn namespace(&self) -> String {
        format!("{}.{}", scope(&self.cluster), self.number)
    }

    pub(super) fn netns(&self) -> PathBuf {
        Path::new("/run/netns").join(self.namespace())
    }

    /// The group of its components and pods, in every hierarchy.
    pub(super) fn group(&self) -> String {
        format!("{}/{}", scope(&self.cluster), self.directory())
    }

    pub(super) fn address(&self) -> String {
        format!("10.88.{}.{}", self.subnet, self.number + 1)
    }

    pub(super) fn address_v6(&self) -> String {
        format!("fd00:88:{}::{}", self.subnet, self.number + 1)
    }

    /// The networks of its pods, IPv4 first.
    pub(super) fn pods(&self) -> [String; 2] {
        let third = self.number - 1;
        [format!("10.244.{third}.0/24"), format!("fd00:10:244:{third}::/64")]
    }

    pub(super) fn log(&self, component: &str) -> PathBuf {
        self.state().join(format!("log/{component}.log"))
    }

    /// The end of a component's log, for the message about its failure.
    pub(super) fn tail(&self, component: &str) -> String {
        const LINES: usize = 12;
        let log = self.log(component);
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LINES)..].join("\n  ");
        format!("{} ends with:\n  {last}", log.display())
    }
}

pub(super) fn find(name: &str) -> Result<Cluster> {
    Cluster::load(name).with_context(|| {
        let others = names();
        let others =
            if others.is_empty() { "there is none".to_owned() } else { format!("there is {}", others.join(", ")) };
        format!("no cluster is called {name} ({others}): cargo xtask kube up --name {name}")
    })
}

pub(super) fn names() -> Vec<String> {
    let entries = fs::read_dir(STATE).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<_> = directories.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

pub(super) fn scope(name: &str) -> String {
    format!("weft-kube-{name}")
}

/// Locks a cluster for one run at a time, until the lock is dropped.
pub(super) fn lock(name: &str) -> Result<File> {
    workspace::lock(&workspace::cache_directory()?.join("kube/locks").join(name))
}

/// A name that fits into names of namespaces, nodes and control groups.
pub(super) fn parse_name(name: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase());
    if starts && name.len() <= 24 && name.chars().all(fits) && !name.ends_with('-') {
        return Ok(name.to_owned());
    }
    Err("use 1 to 24 lower-case letters, digits and hyphens, a letter first and no hyphen last".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_into_every_name_made_of_it() {
        for good in ["weft", "a", "test-2"] {
            assert_eq!(parse_name(good), Ok(good.to_owned()));
        }
        for bad in ["", "-a", "a-", "A", "a/b", "..", "a.b", "1", &"a".repeat(25)] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_interface_has_a_name_that_the_kernel_takes() {
        let cluster = Cluster { name: "a".repeat(24), subnet: 250, nodes: 1, complete: true };
        assert!(cluster.link().len() <= 15, "{}", cluster.link());
    }
}
