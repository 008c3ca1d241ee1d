//! `weft-agent`, the node agent: puts the kernel programs in force, enrols meshed pods, reports the kernel's verdicts.
//!
//! ```text
//! sandbox ──Enrol──> api ───────────┐
//! API server ──watch──> kubernetes ─┴─> datapath (one thread) ──bpf(2)──> kernel
//! weft trace <── api <── trace <──────────ring buffer────────────────────────┘
//! ```
//!
//! [`datapath`] is synchronous and has one owner; [`app`] starts the asynchronous edges. The datapath does not depend
//! on this process: the kernel programs continue without it, and another agent takes over the pins.

mod api;
mod app;
mod cgroup;
mod connect;
mod datapath;
mod features;
mod host;
mod kubernetes;
mod maintenance;
mod metrics;
mod status;
mod trace;

use std::{
    io::Write,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use weft_k8s_api::{inject::RedirectionDefaults, names, values::Values};
use weft_runtime::{
    files,
    telemetry::{self, LogFormat},
};

use crate::{
    datapath::{SelfEnrolment, rules::PodName},
    features::Linux,
    kubernetes::{Identity, OwnPod},
    status::Output,
};

const SOCKET: &str = "/run/weft/agent.sock";
/// Contains [`weft_ebpf_abi::LAYOUT`], so that two layouts can be in force side by side while a node migrates.
const PIN_DIR: &str = "/sys/fs/bpf/weft/v3";

#[derive(Debug, Parser)]
#[command(
    name = "weft-agent",
    version,
    about = "Weft's node agent",
    after_help = "Examples:
  weft-agent run                                     serve this node until SIGTERM; redirection outlives the agent
  weft-agent run --cgroup /sys/fs/cgroup/kubepods --metrics-addr 127.0.0.1:9650
  weft-agent run --node-name $NODE_NAME              enrol the pods of a Kubernetes node
  weft-agent status -o json                          ask the running agent
  weft-agent bypass on                               stop redirecting on this node, also without an agent, until `off`
  weft-agent features                                what this kernel has, and what each thing is needed for
  weft-agent unload                                  stop redirecting and remove everything, also without an agent"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put the kernel programs in force, or take over those that are, and serve the API
    Run(Box<RunArgs>),
    /// Detach and remove everything that is pinned; needs no running agent
    Unload {
        /// The pin directory
        #[arg(long, default_value = PIN_DIR)]
        pin_dir: PathBuf,
    },
    /// Switch all redirection on this node off or on; needs no running agent
    ///
    /// While it is off, connections go around the proxies: in plain text, without policy. The agent says so in its log,
    /// its metrics, its status and as an Event.
    Bypass {
        /// Whether to bypass
        #[arg(value_enum)]
        state: Bypass,
        /// The pin directory
        #[arg(long, default_value = PIN_DIR)]
        pin_dir: PathBuf,
    },
    /// Ask a running agent for its pods and counters
    Status {
        /// The agent's socket
        #[arg(long, default_value = SOCKET)]
        socket: PathBuf,
        /// Output format
        #[arg(short, long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Join standard input and output to a running agent's API, for `weft` on another machine
    ///
    /// `weft` runs this in the agents' pods through the API server. What is copied is gRPC.
    Connect {
        /// The agent's socket
        #[arg(long, default_value = SOCKET)]
        socket: PathBuf,
    },
    /// Probe the kernel and host features that the agent needs; exits with an error if one is missing. Needs the
    /// agent's capabilities
    Features {
        /// Output format
        #[arg(short, long, value_enum, default_value = "table")]
        output: Output,
        /// Count what came with a later Linux as missing, to see what an older node would lack
        #[arg(long, value_name = "VERSION")]
        as_on_linux: Option<Linux>,
    },
    /// Send the listeners of processes over standard input, a unix socket (internal)
    #[command(name = datapath::takeover::SUBCOMMAND, hide = true)]
    TakeListeners {
        /// The processes to look into
        #[arg(long, value_delimiter = ',')]
        pids: Vec<i32>,
        /// The inodes of the sockets
        #[arg(long, value_delimiter = ',')]
        inodes: Vec<u64>,
    },
    /// Print a completion script
    Completions {
        /// The shell to complete for
        shell: clap_complete::Shell,
    },
}

/// What becomes of the node's redirection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Bypass {
    /// Redirect nothing
    On,
    /// Redirect as pods' rules say
    Off,
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Unix socket for the API; created with its directory, replaced if left over
    #[arg(long, default_value = SOCKET)]
    socket: PathBuf,
    /// Where maps and links are pinned: a directory on a bpffs, created if missing
    #[arg(long, default_value = PIN_DIR)]
    pin_dir: PathBuf,
    /// cgroup2 directory to attach to [default: Kubernetes' pods if there are any, else the cgroup2 root]
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// Where the node's cgroup file systems are mounted, here or below [default: wherever a cgroup2 is mounted]
    #[arg(long, value_name = "DIR", conflicts_with = "cgroup")]
    cgroup_root: Option<PathBuf>,
    /// Serve /metrics, /ready and /live on this address; may be repeated [default: none of them]
    #[arg(long, value_name = "ADDR", visible_alias = "admin-addr", value_parser = socket_address)]
    metrics_addr: Vec<SocketAddr>,
    #[command(flatten)]
    kubernetes: KubernetesArgs,
    /// Have the kernel enrol by itself any network namespace in which this user listens on 127.0.0.1:4140, outbound
    /// only until the agent completes it [default on a Kubernetes node: the chart's proxy.uid; else off]
    #[arg(long, value_name = "UID")]
    self_enrol_uid: Option<u32>,
    /// Never have the kernel enrol by itself: it knows a proxy by its user alone, and the pods of control planes that
    /// --controller-namespace does not name may have the same
    #[arg(long, conflicts_with = "self_enrol_uid")]
    no_self_enrol: bool,
    /// Have the kernel programs log each step; costs time on each connection
    #[arg(long)]
    debug_log: bool,
    /// Use nothing that came with a later Linux, to try what the agent does on an older node, for example 5.10
    #[arg(long, value_name = "VERSION")]
    as_on_linux: Option<Linux>,
    /// What to log, e.g. `info` or `weft_agent=debug`
    #[arg(long, visible_alias = "log-level", env = "WEFT_LOG", default_value = "info")]
    log: String,
    /// How to log: `plain` or `json`
    #[arg(long, env = "WEFT_LOG_FORMAT", default_value = "plain")]
    log_format: LogFormat,
}

/// For clap. Accepts an IPv6 address without brackets before its port, because the chart composes one from the node's
/// address.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let bare = || {
        let (ip, port) = text.rsplit_once(':')?;
        Some(SocketAddr::new(ip.parse::<Ipv6Addr>().ok()?.into(), port.parse().ok()?))
    };
    let parsed = text.parse().ok().or_else(bare);
    parsed.ok_or_else(|| "expected ADDRESS:PORT, such as 127.0.0.1:9650 or [::1]:9650".to_owned())
}

/// An agent on a Kubernetes node.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "On a Kubernetes node")]
struct KubernetesArgs {
    /// Name of this Kubernetes node; enrol its meshed pods, as the API server lists them
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// The agent's own pod
    #[arg(long, env = "POD_NAME", value_name = "NAME", requires_all = ["pod_namespace", "pod_uid"])]
    pod_name: Option<String>,
    /// The agent's own pod's namespace
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    pod_namespace: Option<String>,
    /// The agent's own pod's uid: its cgroup tells where pods run
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pod_uid: Option<String>,
    /// Enrol only pods of the control planes in these namespaces, separated by commas [default: of any]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_namespace)]
    controller_namespace: Vec<String>,
    /// The chart's values, for the ports and subnets that pods skip unless their annotations say otherwise
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
}

impl KubernetesArgs {
    fn config(self) -> Result<Option<app::KubernetesConfig>> {
        let Some(node) = self.node_name else { return Ok(None) };
        let pod = match (self.pod_namespace, self.pod_name, self.pod_uid) {
            (Some(namespace), Some(name), Some(uid)) => Some(OwnPod { name: PodName { namespace, name }, uid }),
            _ => None,
        };
        let defaults = self.values.as_deref().map_or_else(|| Ok(RedirectionDefaults::default()), read_defaults)?;
        Ok(Some(app::KubernetesConfig {
            identity: Identity { node, pod },
            defaults: RedirectionDefaults { control_plane_namespaces: self.controller_namespace, ..defaults },
        }))
    }
}

fn parse_namespace(name: &str) -> Result<String, &'static str> {
    names::is_label(name).then(|| name.to_owned()).ok_or("expected the name of a namespace, such as linkerd")
}

/// The settings in the chart's values that concern redirection.
fn read_defaults(path: &Path) -> Result<RedirectionDefaults> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read --values {}", path.display()))?;
    let defaults = Values::parse(&text).and_then(|values| values.redirection());
    defaults.with_context(|| format!("--values {} cannot be used", path.display()))
}

/// The proxy user that the kernel enrols by itself. On a Kubernetes node, pods with another proxy user wait for the
/// agent.
fn self_enrolment(uid: Option<u32>, is_off: bool, kubernetes: Option<&app::KubernetesConfig>) -> Option<SelfEnrolment> {
    if is_off {
        return None;
    }
    let defaults = kubernetes.map(|kubernetes| kubernetes.defaults.clone());
    let proxy_uid = uid.or_else(|| u32::try_from(defaults.as_ref()?.proxy_uid).ok())?;
    let ports = defaults.unwrap_or_default().ports;
    Some(SelfEnrolment { proxy_uid, outbound_port: ports.outbound, inbound_port: ports.inbound })
}

fn main() -> ExitCode {
    match execute(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "weft-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<()> {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("start tokio");
    match command {
        Command::Run(args) => {
            let filter = if args.debug_log && args.log == "info" {
                "info,weft_ebpf=debug,weft_agent=debug".to_owned()
            } else {
                args.log
            };
            let log = telemetry::init(&filter, args.log_format)?;
            // It holds one or two descriptors for each pod, and 220 for programs that are loaded in advance.
            if let Err(error) = files::raise_limit() {
                tracing::warn!(%error, "the limit on open files cannot be raised");
            }
            let kubernetes = args.kubernetes.config()?;
            runtime()?.block_on(app::run(app::Config {
                socket: args.socket,
                pin_dir: args.pin_dir,
                cgroup: args.cgroup,
                cgroup_root: args.cgroup_root,
                metrics_addrs: args.metrics_addr,
                debug_log: args.debug_log,
                as_on_linux: args.as_on_linux,
                log,
                self_enrolment: self_enrolment(args.self_enrol_uid, args.no_self_enrol, kubernetes.as_ref()),
                kubernetes,
            }))
        }
        Command::Unload { pin_dir } => {
            let message = if datapath::migrate::unload(&pin_dir)? { "unloaded" } else { "nothing to unload:" };
            writeln!(std::io::stderr(), "{message} {}", pin_dir.display()).context("write to standard error")
        }
        Command::Bypass { state, pin_dir } => {
            let on = state == Bypass::On;
            let before = datapath::migrate::set_bypassed(&pin_dir, on)?;
            let message = match (before, on) {
                (false, true) => "nothing on this node is redirected any more: `weft-agent bypass off` ends that",
                (true, false) => "redirection is in force again",
                (true, true) => "nothing on this node was redirected before, nor is it now",
                (false, false) => "redirection was in force before, and is now",
            };
            writeln!(std::io::stderr(), "{message}").context("write to standard error")
        }
        Command::Status { socket, output } => {
            let text = runtime()?.block_on(status::run(&socket, output))?;
            std::io::stdout().write_all(text.as_bytes()).context("write to standard output")
        }
        Command::Connect { socket } => connect::run(&socket),
        Command::Features { output, as_on_linux } => {
            let (text, enough) = status::features(output, as_on_linux);
            std::io::stdout().write_all(text.as_bytes()).context("write to standard output")?;
            anyhow::ensure!(enough, "this kernel lacks required features: see `no` in the table");
            Ok(())
        }
        Command::TakeListeners { pids, inodes } => {
            datapath::takeover::send_listeners(&pids, &inodes).context("cannot take listeners")
        }
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "weft-agent", &mut std::io::stdout());
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two meshes may share a node: the kernel cannot tell to which of them a proxy belongs.
    #[test]
    fn the_kernel_enrols_the_charts_proxy_user_alone() {
        let defaults = Values::parse("proxy: {uid: 2202}").and_then(|values| values.redirection()).unwrap();
        let identity = Identity { node: "a".into(), pod: None };
        let kubernetes = app::KubernetesConfig { identity, defaults };
        assert_eq!(self_enrolment(None, false, Some(&kubernetes)).unwrap().proxy_uid, 2202);
        assert_eq!(self_enrolment(Some(2303), false, Some(&kubernetes)).unwrap().proxy_uid, 2303);
        assert_eq!(self_enrolment(None, false, None), None);
        assert_eq!(self_enrolment(None, true, Some(&kubernetes)), None);
        let run = |more: &[&str]| Cli::try_parse_from([&["weft-agent", "run"], more].concat());
        assert!(run(&["--no-self-enrol"]).is_ok() && run(&["--no-self-enrol", "--self-enrol-uid", "2202"]).is_err());
    }

    #[test]
    fn control_planes_are_named_one_by_one() {
        let parsed = |names: &str| {
            let arguments = ["weft-agent", "run", "--node-name", "a", &format!("--controller-namespace={names}")];
            let Command::Run(run) = Cli::try_parse_from(arguments)?.command else { panic!("not `run`") };
            Ok::<_, clap::Error>(run.kubernetes.config().unwrap().unwrap().defaults.control_plane_namespaces)
        };
        assert_eq!(parsed("linkerd,linkerd-edge").unwrap(), ["linkerd", "linkerd-edge"]);
        for malformed in ["", "linkerd,", "linkerd edge", "Linkerd"] {
            let refused = parsed(malformed).unwrap_err().to_string();
            assert!(refused.contains("the name of a namespace, such as linkerd"), "{malformed}: {refused}");
        }
    }

    #[test]
    fn the_nodes_address_may_be_of_either_family() {
        for (text, expected) in [
            ("10.0.0.7:9650", Some("10.0.0.7:9650")),
            ("[fd00::7]:9650", Some("[fd00::7]:9650")),
            ("fd00::7:9650", Some("[fd00::7]:9650")),
            (":9650", None),
            ("10.0.0.7", None),
            ("localhost:9650", None),
        ] {
            let expected = expected.map(|address| address.parse().unwrap());
            assert_eq!(socket_address(text).ok(), expected, "{text}");
        }
    }
}
