//! `kube`: a real Kubernetes on this machine, for the tests and for whoever wants to look at Weft in one.
//!
//! One cluster is one node in a network namespace and a mount namespace of its own. All that it has on the host is
//! under [`STATE`] and [`DATA`], in control groups that bear its name, and one pair of interfaces; [`down`] removes
//! exactly these, whether the cluster still runs or died half way. Several run side by side under different names.

mod cgroup;
mod go;
mod network;
mod node;
mod pki;
pub(crate) mod tools;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::{Subcommand, ValueEnum};
use serde_json::{Value, json};

use crate::{
    command::{self, step},
    dist::{
        self,
        image::{Files, Image, Layer},
    },
    setup,
    workspace::{self, Workspace},
};
use cgroup::Cgroup;
use node::Node;
use tools::Tools;

/// What a reader of a running cluster wants: kubeconfig, logs, audit log, sockets.
const STATE: &str = "/run/weft-kube";
/// What is big: etcd's data, images, volumes. On disk, where overlayfs works.
const DATA: &str = "/var/lib/weft-kube";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask kube up                               a cluster with Weft's images in it
  eval \"$(cargo xtask kube env)\"; kubectl get pods -A
  cargo xtask kube up --name api --control-plane-only
                                                    a second one: an API server without a node, in seconds
  cargo xtask kube status -o json
  cargo xtask kube down --all

Needs root. The first `up` builds Kubernetes (about 20 minutes on two cores), later ones take half a minute.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: KubeCommand,
}

#[derive(Debug, Subcommand)]
enum KubeCommand {
    /// Starts a cluster and waits until it is ready
    Up {
        #[command(flatten)]
        name: Name,
        /// etcd, API server and controllers, without a node that runs pods
        #[arg(long)]
        control_plane_only: bool,
        /// Leave Weft's images out instead of building and loading them
        #[arg(long)]
        no_images: bool,
        /// Load Weft's images as they were last built
        #[arg(long, conflicts_with = "no_images")]
        no_build: bool,
    },
    /// Ends a cluster and removes everything that it had
    Down {
        #[command(flatten)]
        name: Name,
        /// Every cluster on this machine
        #[arg(long, conflicts_with = "name")]
        all: bool,
    },
    /// Prints the settings of a cluster for a shell
    Env {
        #[command(flatten)]
        name: Name,
    },
    /// Says which clusters there are; exit code 1 when one of them is not well
    Status {
        /// How to print
        #[arg(short, long, value_enum, default_value_t = Format::Text)]
        output: Format,
    },
}

#[derive(Debug, clap::Args)]
struct Name {
    /// The cluster's name
    #[arg(long, default_value = "weft", value_parser = parse_name)]
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One line per cluster
    Text,
    /// One array
    Json,
}

/// Does what the command line says.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        KubeCommand::Up { name, control_plane_only, no_images, no_build } => {
            let images = match (*no_images || *control_plane_only, *no_build) {
                (true, _) => Images::None,
                (false, true) => Images::LastBuilt,
                (false, false) => Images::Built,
            };
            let kind = if *control_plane_only { Kind::ControlPlane } else { Kind::Node };
            let cluster = ensure(&name.name, kind, images)?;
            step(&format!("the cluster {0} is ready: eval \"$(cargo xtask kube env --name {0})\"", cluster.name));
            Ok(())
        }
        KubeCommand::Down { all: true, .. } => names().iter().try_for_each(|name| down(name)),
        KubeCommand::Down { name, .. } => down(&name.name),
        KubeCommand::Env { name } => {
            for (variable, value) in find(&name.name)?.environment(&Tools::ensure(Tools::ALL)?) {
                println!("export {variable}=\"{value}\"");
            }
            Ok(())
        }
        KubeCommand::Status { output } => status(*output),
    }
}

/// What a cluster can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Keep objects.
    ControlPlane,
    /// Keep objects and run pods.
    Node,
}

/// Which images of ours a cluster is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Images {
    /// None.
    None,
    /// Those of the programs as they were last built.
    LastBuilt,
    /// Those of the sources as they are now.
    Built,
}

/// A cluster on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cluster {
    name: String,
    /// Which 10.88.X.0/24 joins it to the host.
    subnet: u8,
    kind: Kind,
    /// Whether its start came to its end.
    complete: bool,
}

impl Cluster {
    /// The administrator's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.state().join("kubeconfig")
    }

    /// One JSON object for every request to the API server.
    pub(crate) fn audit_log(&self) -> PathBuf {
        self.state().join("log/audit.log")
    }

    /// Variables for whoever uses the cluster. PATH holds `$PATH`'s value, so the tools stand in front.
    pub(crate) fn environment(&self, tools: &Tools) -> Vec<(&'static str, String)> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut directories = tools.path_directories();
        directories
            .extend(std::env::split_paths(&path).filter(|directory| !tools.path_directories().contains(directory)));
        let path = std::env::join_paths(directories).unwrap_or(path);
        vec![
            ("KUBECONFIG", self.kubeconfig().display().to_string()),
            ("WEFT_KUBE_AUDIT_LOG", self.audit_log().display().to_string()),
            ("PATH", path.to_string_lossy().into_owned()),
        ]
    }

    fn kubectl(&self, tools: &Tools, arguments: &[&str]) -> Result<String> {
        let mut kubectl = Command::new(tools.program("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.kubeconfig()).arg("--request-timeout=10s").args(arguments);
        command::output(&mut kubectl)
    }

    /// What control groups and network namespace are called.
    fn scope(&self) -> String {
        scope(&self.name)
    }

    fn state(&self) -> PathBuf {
        Path::new(STATE).join(&self.name)
    }

    fn data(&self) -> PathBuf {
        Path::new(DATA).join(&self.name)
    }

    fn config(&self) -> PathBuf {
        self.data().join("config")
    }

    fn containerd(&self) -> PathBuf {
        self.state().join("run/containerd/containerd.sock")
    }

    fn netns(&self) -> PathBuf {
        Path::new("/run/netns").join(self.scope())
    }

    /// The host's interface; the kernel allows 15 characters.
    fn link(&self) -> String {
        format!("weft-kube{}", self.subnet)
    }

    fn host_address(&self) -> String {
        format!("10.88.{}.1", self.subnet)
    }

    fn node_address(&self) -> String {
        format!("10.88.{}.2", self.subnet)
    }

    fn node_name(&self) -> String {
        format!("{}-node", self.name)
    }

    fn log(&self, component: &str) -> PathBuf {
        self.state().join(format!("log/{component}.log"))
    }

    /// The end of a component's log, for the message about its failure.
    fn tail(&self, component: &str) -> String {
        const LINES: usize = 12;
        let log = self.log(component);
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LINES)..].join("\n  ");
        format!("{} ends with:\n  {last}", log.display())
    }

    fn save(&self) -> Result<()> {
        fs::create_dir_all(self.state()).with_context(|| format!("create {}", self.state().display()))?;
        let value = json!({ "subnet": self.subnet, "node": self.kind == Kind::Node, "complete": self.complete });
        fs::write(self.state().join("cluster.json"), value.to_string()).context("write cluster.json")
    }

    fn load(name: &str) -> Option<Self> {
        let text = fs::read_to_string(Path::new(STATE).join(name).join("cluster.json")).ok()?;
        let value: Value = serde_json::from_str(&text).ok()?;
        let kind = if value["node"] == true { Kind::Node } else { Kind::ControlPlane };
        let subnet = value["subnet"].as_u64()?.try_into().ok()?;
        Some(Self { name: name.to_owned(), subnet, kind, complete: value["complete"] != false })
    }

    fn is_well(&self, tools: &Tools) -> bool {
        let has_node = self.kind == Kind::Node;
        self.complete
            && self.kubectl(tools, &["get", "--raw", "/readyz"]).is_ok()
            && (!has_node || self.is_node_ready(tools))
    }

    fn is_node_ready(&self, tools: &Tools) -> bool {
        let status = "jsonpath={.status.conditions[?(@.type=='Ready')].status}";
        self.kubectl(tools, &["get", "node", &self.node_name(), "-o", status]).is_ok_and(|status| status == "True")
    }
}

/// A cluster of that name, at least of that kind, with those images: the one that runs, or a new one.
///
/// # Errors
/// When something that it takes is missing and cannot be installed, or a component does not start.
pub(crate) fn ensure(name: &str, kind: Kind, images: Images) -> Result<Cluster> {
    if !command::is_root() {
        bail!("a cluster needs namespaces and mounts of its own: run this as root");
    }
    setup::install_packages(setup::Scope::Kube)?;
    let tools = Tools::ensure(Tools::ALL)?;
    let archives = match images {
        Images::None => Vec::new(),
        Images::LastBuilt => {
            let workspace = Workspace::load()?;
            dist::pack(&workspace, &workspace.binaries(dist::Profile::Dev.directory()))?
        }
        Images::Built => dist::images(&Workspace::load()?, dist::Profile::Dev)?,
    };
    let _lock = lock(name)?;
    let cluster = match Cluster::load(name) {
        Some(found) if found.is_well(&tools) && (found.kind == kind || found.kind == Kind::Node) => found,
        _ => {
            remove(name)?;
            start(name, kind, &tools)?
        }
    };
    for archive in archives {
        step(&format!("load {}", archive.display()));
        node::import(&cluster, &archive)?;
    }
    Ok(cluster)
}

/// Ends a cluster and removes all of it. Succeeds when there is none.
///
/// # Errors
/// When something does not go away.
pub(crate) fn down(name: &str) -> Result<()> {
    let _lock = lock(name)?;
    remove(name)?;
    step(&format!("the cluster {name} is gone"));
    // The last one takes the directories with it.
    for directory in [STATE, DATA] {
        let _ = fs::remove_dir(directory);
    }
    Ok(())
}

fn start(name: &str, kind: Kind, tools: &Tools) -> Result<Cluster> {
    let started = Instant::now();
    let since = |what: &str| step(&format!("{name}: {what} ({} s)", started.elapsed().as_secs()));
    let mut cluster = {
        // Two new clusters must not choose the same network.
        let _lock = lock(".network")?;
        let cluster = Cluster { name: name.to_owned(), subnet: network::free_subnet()?, kind, complete: false };
        cluster.save()?;
        network::create(&cluster)?;
        cluster
    };
    let cgroup = Cgroup::named(&cluster.scope())?;
    cgroup.create()?;
    since("start etcd and the API server");
    let mut node = Node::prepare(&cluster, tools, &cgroup)?;
    node.start_control_plane()?;
    since("the API server is ready");
    if kind == Kind::Node {
        node.start_kubelet()?;
        since("the node is ready");
        start_dns(&cluster, tools)?;
        since("DNS answers");
    }
    cluster.complete = true;
    cluster.save()?;
    Ok(cluster)
}

/// Gives the node the images that a cluster itself needs and starts CoreDNS.
fn start_dns(cluster: &Cluster, tools: &Tools) -> Result<()> {
    let coredns = format!("localhost/coredns:{}", Tools::coredns_version());
    for (name, program) in [(node::PAUSE_IMAGE, "pause"), (&coredns, "coredns")] {
        let mut files = Files::default();
        files.add_program(program, &tools.program(program))?;
        let (layer, entrypoint) = (Layer::pack(&files)?, format!("/{program}"));
        let archive = cluster.data().join(format!("{program}.tar"));
        Image { name, layers: &[&layer], entrypoint: &entrypoint, user: "0:0", labels: &[] }.write(&archive)?;
        node::import(cluster, &archive)?;
        fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))?;
    }
    let manifest = cluster.config().join("coredns.yaml");
    let text = include_str!("kube/coredns.yaml").replace("VERSION", Tools::coredns_version());
    fs::write(&manifest, text).context("write coredns.yaml")?;
    cluster.kubectl(tools, &["apply", "-f", &manifest.display().to_string()])?;
    let rollout =
        ["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s", "--request-timeout=0"];
    cluster.kubectl(tools, &rollout).with_context(|| cluster.tail("kubelet"))?;
    Ok(())
}

/// Removes what a cluster has, in the order in which nothing is left in use.
fn remove(name: &str) -> Result<()> {
    Cgroup::named(&scope(name))?.remove()?;
    // The mount namespace went with its last process, and with it everything that was mounted.
    if let Some(cluster) = Cluster::load(name) {
        network::remove(&cluster)?;
    }
    for directory in [Path::new(DATA).join(name), Path::new(STATE).join(name)] {
        if directory.exists() {
            fs::remove_dir_all(&directory).with_context(|| format!("remove {}", directory.display()))?;
        }
    }
    Ok(())
}

fn find(name: &str) -> Result<Cluster> {
    Cluster::load(name).with_context(|| {
        let others = names();
        let others =
            if others.is_empty() { "there is none".to_owned() } else { format!("there is {}", others.join(", ")) };
        format!("no cluster is called {name} ({others}): cargo xtask kube up --name {name}")
    })
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(STATE).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<_> = directories.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn status(format: Format) -> Result<()> {
    let tools = Tools::ensure(Tools::ALL)?;
    let mut unwell = Vec::new();
    let mut all = Vec::new();
    for name in names() {
        let Some(cluster) = Cluster::load(&name) else {
            unwell.push(name);
            continue;
        };
        let ready = cluster.is_well(&tools);
        if !ready {
            unwell.push(name.clone());
        }
        all.push(json!({
            "name": name,
            "ready": ready,
            "node": cluster.kind == Kind::Node,
            "server": format!("https://{}:6443", cluster.node_address()),
            "kubeconfig": cluster.kubeconfig(),
            "auditLog": cluster.audit_log(),
            "logs": cluster.state().join("log"),
            "processes": Cgroup::named(&cluster.scope())?.processes().len(),
            "path": tools.path_directories(),
        }));
    }
    match format {
        Format::Json => println!("{:#}", Value::Array(all)),
        Format::Text if all.is_empty() => println!("no cluster; cargo xtask kube up starts one"),
        Format::Text => {
            for cluster in &all {
                let word = |key: &str, yes, no| if cluster[key] == true { yes } else { no };
                println!(
                    "{:<12} {:<10} {:<14} {:>3} processes  {}",
                    cluster["name"].as_str().unwrap_or_default(),
                    word("ready", "ready", "not ready"),
                    word("node", "node", "control plane"),
                    cluster["processes"],
                    cluster["kubeconfig"].as_str().unwrap_or_default()
                );
            }
        }
    }
    if !unwell.is_empty() {
        bail!(
            "not well: {}; `cargo xtask kube up --name NAME` replaces a cluster, `down` removes it",
            unwell.join(", ")
        );
    }
    Ok(())
}

fn scope(name: &str) -> String {
    format!("weft-kube-{name}")
}

/// One run at a time works on a cluster. Held until it is dropped.
fn lock(name: &str) -> Result<File> {
    let directory = workspace::cache_directory()?.join("kube/locks");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let file = File::create(directory.join(name)).with_context(|| format!("create the lock of {name}"))?;
    file.lock().with_context(|| format!("lock {name}"))?;
    Ok(file)
}

/// A name that fits into names of namespaces, nodes and control groups.
fn parse_name(name: &str) -> Result<String, String> {
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
        let cluster = Cluster { name: "a".repeat(24), subnet: 250, kind: Kind::Node, complete: true };
        assert!(cluster.link().len() <= 15, "{}", cluster.link());
    }
}
