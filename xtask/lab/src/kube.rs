//! `kube`: a real Kubernetes on this machine, for the tests and for developers.
//!
//! One cluster is one machine or several, each with its own network namespace and mount namespace. Everything that it
//! has on the host is under [`STATE`] and [`DATA`], in control groups and network namespaces with its name, and in one
//! pair of interfaces; [`down`] removes exactly these, whether the cluster is running or died half way. Several
//! clusters with different names can run at once.

mod cgroup;
mod cluster;
mod network;
mod node;
mod pki;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::{Subcommand, ValueEnum};
use serde_json::{Value, json};
use weft_xtask::{
    build::Profile,
    command::{self, step},
    setup,
    workspace::Workspace,
};

use crate::{
    dist::{
        self,
        image::{Files, Image, Layer},
    },
    processor::Processor,
    tools::Tools,
};
use cgroup::Cgroup;
use cluster::{Cluster, DATA, STATE, find, lock, names, parse_name, scope};
use node::Node;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask kube up                               a cluster with Weft's images in it
  eval \"$(cargo xtask kube env)\"; kubectl get pods -A
  cargo xtask kube up --name ha --nodes 3           another one beside it, with three nodes
  cargo xtask kube up --name api --control-plane-only
                                                    an API server without a node, in seconds
  cargo xtask kube status -o json
  cargo xtask kube down --all

Needs root. The first `up` builds Kubernetes (about 20 minutes on two cores), later ones take half a minute.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: KubeCommand,
}

#[derive(Debug, Subcommand)]
enum KubeCommand {
    /// Start a cluster and wait until it is ready
    Up {
        #[command(flatten)]
        name: Name,
        /// How many nodes run pods, at least; the first has the control plane, too
        #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=9))]
        nodes: u8,
        /// etcd, API server and controllers, without a node that runs pods
        #[arg(long, conflicts_with = "nodes")]
        control_plane_only: bool,
        /// Leave Weft's images out instead of building and loading them
        #[arg(long)]
        no_images: bool,
        /// Load Weft's images as they were last built
        #[arg(long, conflicts_with = "no_images")]
        no_build: bool,
        /// Load this archive of an image, too
        #[arg(long, value_name = "ARCHIVE", conflicts_with = "control_plane_only")]
        load: Vec<PathBuf>,
    },
    /// End a cluster and remove everything that it created
    Down {
        #[command(flatten)]
        name: Name,
        /// Every cluster on this machine
        #[arg(long, conflicts_with = "name")]
        all: bool,
    },
    /// Print the settings of a cluster for a shell
    Env {
        #[command(flatten)]
        name: Name,
        /// How to print
        #[arg(short, long, value_enum, default_value_t = Format::Text)]
        output: Format,
    },
    /// Builds the programs of a cluster that are missing, and prints their directories for PATH
    Tools {
        /// Which of them [default: all]
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(Tools::NAMES))]
        names: Vec<String>,
    },
    /// List the clusters; exit code 1 if one of them is not healthy
    Status {
        /// Output format
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
    /// Lines
    Text,
    /// One JSON value
    Json,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        KubeCommand::Up { name, nodes, control_plane_only, no_images, no_build, load } => {
            let images = match (*no_images || *control_plane_only, *no_build) {
                (true, _) => Images::None,
                (false, true) => Images::LastBuilt,
                (false, false) => Images::Built,
            };
            let cluster = ensure(&name.name, if *control_plane_only { 0 } else { *nodes }, images, load)?;
            step(&format!("the cluster {0} is ready: eval \"$(cargo xtask kube env --name {0})\"", cluster.name));
            Ok(())
        }
        KubeCommand::Down { all: true, .. } => names().iter().try_for_each(|name| down(name)),
        KubeCommand::Down { name, .. } => down(&name.name),
        KubeCommand::Env { name, output } => {
            // Those of the images that `up` loads.
            let programs = Workspace::load()?.binaries(Profile::Dev.directory());
            let environment = find(&name.name)?.environment(&Tools::ensure(Tools::ALL)?, programs);
            match output {
                Format::Json => println!("{}", json_object(environment)),
                Format::Text => environment.iter().for_each(|(name, value)| println!("export {name}=\"{value}\"")),
            }
            Ok(())
        }
        KubeCommand::Tools { names } => {
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let tools = Tools::ensure(if names.is_empty() { Tools::ALL } else { &names })?;
            let directories = if names.is_empty() { tools.path_directories() } else { tools.directories(&names) };
            directories.iter().for_each(|directory| println!("{}", directory.display()));
            Ok(())
        }
        KubeCommand::Status { output } => status(*output),
    }
}

/// Which images of ours a cluster is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Images {
    /// None.
    None,
    /// Images of the programs as they were last built.
    LastBuilt,
    /// Images of the current sources.
    Built,
}

/// A cluster of that name, with at least this number of nodes, with those images and the archives in `others`: the one
/// that runs, or a new one.
///
/// # Errors
/// When something that it takes is missing and cannot be installed, or a component does not start.
fn ensure(name: &str, nodes: u8, images: Images, others: &[PathBuf]) -> Result<Cluster> {
    if !command::is_root() {
        bail!("a cluster needs namespaces and mounts of its own: run this as root");
    }
    setup::install_packages(setup::Scope::Kube)?;
    let tools = Tools::ensure(Tools::ALL)?;
    let archives = match images {
        Images::None => Vec::new(),
        Images::LastBuilt => {
            let workspace = Workspace::load()?;
            dist::pack(&workspace, Profile::Dev)?
        }
        Images::Built => dist::images(&Workspace::load()?, Profile::Dev)?,
    };
    let _lock = lock(name)?;
    let cluster = match Cluster::load(name) {
        Some(found) if found.is_well(&tools) && found.nodes >= nodes => found,
        _ => {
            remove(name)?;
            start(name, nodes, &tools).with_context(|| {
                format!("start {name} (`cargo xtask kube down --name {name}` removes what there is of it)")
            })?
        }
    };
    for archive in archives.iter().chain(others) {
        step(&format!("load {}", archive.display()));
        node::import(&cluster, archive)?;
    }
    Ok(cluster)
}

/// Ends a cluster and removes all of it. Succeeds when there is none.
///
/// # Errors
/// When something does not go away.
fn down(name: &str) -> Result<()> {
    let _lock = lock(name)?;
    remove(name)?;
    step(&format!("the cluster {name} is gone"));
    // The last cluster removes the directories.
    for directory in [STATE, DATA] {
        let _ = fs::remove_dir(directory);
    }
    Ok(())
}

fn start(name: &str, nodes: u8, tools: &Tools) -> Result<Cluster> {
    let started = Instant::now();
    let since = |what: &str| step(&format!("{name}: {what} ({} s)", started.elapsed().as_secs()));
    let mut cluster = {
        // Two new clusters must not choose the same network.
        let _lock = lock(".network")?;
        let cluster = Cluster { name: name.to_owned(), subnet: network::free_subnet()?, nodes, complete: false };
        cluster.save()?;
        network::create(&cluster)?;
        cluster
    };
    since("start etcd and the API server");
    let mut first = Node::prepare(&cluster, cluster.first(), tools)?;
    let pki = first.start_control_plane()?;
    since("the API server is ready");
    if nodes > 0 {
        first.start_scheduler()?;
        let mut all = vec![first];
        for machine in cluster.machines().skip(1) {
            all.push(Node::prepare(&cluster, machine, tools)?);
        }
        all.iter_mut().try_for_each(|node| node.start_kubelet(&pki))?;
        all.iter_mut().try_for_each(Node::wait_until_ready)?;
        since(if nodes == 1 { "the node is ready" } else { "the nodes are ready" });
        start_dns(&cluster, tools)?;
        since("DNS answers");
    }
    cluster.complete = true;
    cluster.save()?;
    Ok(cluster)
}

/// Gives the nodes the images that a cluster itself needs and starts CoreDNS.
fn start_dns(cluster: &Cluster, tools: &Tools) -> Result<()> {
    let coredns = format!("localhost/coredns:{}", Tools::coredns_version());
    for (name, program) in [(node::PAUSE_IMAGE, "pause"), (&coredns, "coredns")] {
        let mut files = Files::default();
        files.add_program(program, &tools.program(program))?;
        let (layer, entrypoint) = (Layer::pack(&files)?, format!("/{program}"));
        let archive = cluster.first().data().join(format!("{program}.tar"));
        let architecture = Processor::native()?.debian();
        let image = Image { name, architecture, layers: &[&layer], entrypoint: &entrypoint, user: "0:0", labels: &[] };
        image.write(&archive)?;
        node::import(cluster, &archive)?;
        fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))?;
    }
    let manifest = cluster.first().config().join("coredns.yaml");
    let text = include_str!("kube/coredns.yaml").replace("VERSION", Tools::coredns_version());
    fs::write(&manifest, text).context("write coredns.yaml")?;
    cluster.kubectl(tools, &["apply", "-f", &manifest.display().to_string()])?;
    let rollout =
        ["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s", "--request-timeout=0"];
    cluster.kubectl(tools, &rollout).with_context(|| cluster.first().tail("kubelet"))?;
    Ok(())
}

/// Removes a cluster in an order in which nothing is left in use.
fn remove(name: &str) -> Result<()> {
    Cgroup::named(&scope(name))?.remove()?;
    // The mount namespace ended with its last process, and with it all mounts.
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

fn json_object(variables: Vec<(&'static str, String)>) -> Value {
    variables.into_iter().map(|(name, value)| (name.to_owned(), Value::String(value))).collect()
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
            "nodes": cluster.nodes,
            "server": format!("https://{}:6443", cluster.first().address()),
            "kubeconfig": cluster.kubeconfig(),
            "auditLog": cluster.audit_log(),
            "logs": cluster.machines().map(|machine| machine.state().join("log")).collect::<Vec<_>>(),
            "processes": Cgroup::named(&cluster.scope())?.processes().len(),
            "path": tools.path_directories(),
        }));
    }
    match format {
        Format::Json => println!("{:#}", Value::Array(all)),
        Format::Text if all.is_empty() => println!("no cluster; cargo xtask kube up starts one"),
        Format::Text => {
            for cluster in &all {
                let nodes = match cluster["nodes"].as_u64() {
                    Some(0) | None => "control plane".to_owned(),
                    Some(1) => "1 node".to_owned(),
                    Some(nodes) => format!("{nodes} nodes"),
                };
                println!(
                    "{:<12} {:<10} {:<14} {:>3} processes  {}",
                    cluster["name"].as_str().unwrap_or_default(),
                    if cluster["ready"] == true { "ready" } else { "not ready" },
                    nodes,
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
