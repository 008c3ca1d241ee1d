//! `weft trace`: the kernel's verdicts, live from the agents. Refuses to store or to aggregate: metrics do that.
//!
//! ```text
//! an agent's socket ──[local]──┐
//!                              ├──> Printer ──> standard output
//! every node's agent ─[nodes]──┘
//! ```
//!
//! If an agent goes away, the trace waits for its successor, because redirection continues without it.

mod format;
mod local;
mod names;
mod nodes;
mod printer;

use std::{future::pending, net::IpAddr, num::NonZeroU64, time::Duration};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use weft_proto::agent::{self, WatchRequest};

use crate::{
    kind::{self, Kind},
    output::{
        WideFormat,
        progress::{self, API_SERVER},
    },
    resource::{Resource, Selection},
    target::{Target, TargetArgs},
};
use names::Names;
use printer::Printer;

/// The verdicts that the kernel programs give. The programs' own list (`ebpf/abi/src/verdict.rs`) is in a package that
/// this one does not depend on; a test compares the two.
const VERDICTS: [&str; 14] = [
    "redirect",
    "pass_proxy",
    "pass_proxy_group",
    "pass_proxy_cgroup",
    "pass_loopback",
    "pass_own_address",
    "pass_skip_port",
    "pass_skip_subnet",
    "pass_pod_bypassed",
    "pass_node_bypassed",
    "deny_no_listener",
    "deny_no_memory",
    "deny_unknown_pod",
    "deny_device",
];

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft trace                                        every decision: in the sandbox `default` if it runs, else in the cluster
  weft trace web-0 -n shop                          one pod
  weft trace deploy/web -n shop --port 80           the pods of a Deployment, as they come and go
  weft trace --verdict deny_no_listener -A          connections refused because no proxy listened
  weft trace deploy/web -n shop --count 1 --timeout 30s -o json
                                                    waits for one event; fails when none comes
  weft trace --command curl --destination 10.96.0.0/12 --accepted
                                                    what curl does to Services, and how long its proxy takes to accept
  weft trace --sandbox other client-0               a sandbox of this host
  weft trace --agent-socket /run/weft/agent.sock -o json | jq -r .original_destination

Ends with 0 at Ctrl-C, after --timeout, or after --count events; with 1 when --timeout comes before --count.")]
pub(crate) struct TraceArgs {
    #[arg(help = format!("A pod, or a workload for its pods: NAME or KIND/NAME: {}", kind::names(Kind::with_pods())))]
    resource: Option<Resource>,
    /// Only pods of this namespace [default: all; for a RESOURCE in a cluster, the context's]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Pods of all namespaces (the default without RESOURCE)
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "resource"])]
    all_namespaces: bool,
    /// Only the pod with this name, as RESOURCE
    #[arg(long, hide = true, conflicts_with = "resource")]
    pod: Option<String>,
    /// Only connections that pods make, or that they accept
    #[arg(long, value_enum)]
    direction: Option<Direction>,
    /// Only connections to this port, before or after the decision
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Only this verdict
    #[arg(long, value_parser = VERDICTS)]
    verdict: Option<String>,
    /// Only connections that threads of this name make
    #[arg(long, value_name = "NAME")]
    command: Option<String>,
    /// Only connections to this address or network, as the client dialled it: 10.96.0.10, 10.0.0.0/8, fd00::/8
    #[arg(long, value_name = "CIDR", value_parser = network)]
    destination: Option<IpNet>,
    /// Also show when the proxy, or the application, accepts a connection, and how long after the decision
    #[arg(long)]
    accepted: bool,
    /// Exit after N events
    #[arg(long, value_name = "N")]
    count: Option<NonZeroU64>,
    /// End after this time, such as 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = crate::output::duration)]
    timeout: Option<Duration>,
    /// Output format: wide adds node, network namespace and names of addresses, json is one object a line, yaml one a
    /// document
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    target: TargetArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Direction {
    Outbound,
    Inbound,
}

pub(crate) async fn execute(args: TraceArgs) -> Result<()> {
    let mut printer = Printer::new(args.output, args.count);
    let watch = async {
        match args.target.target().await? {
            Target::Cluster(cluster) => {
                let selected = Selection::in_cluster(args.resource(), args.namespace.as_deref(), &cluster);
                let selection = progress::during(API_SERVER, selected).await?;
                nodes::trace(&cluster, &args.request(&selection), &selection, &mut printer).await
            }
            Target::Sandbox(state) => {
                let socket = local::socket_of(&state)?;
                let selection = Selection::in_sandbox(args.resource(), args.namespace.as_deref(), &state)?;
                *printer.names() = Names::of_sandbox(&state);
                local::trace(&socket, &args.request(&selection), &mut printer).await
            }
            Target::Socket(socket) => {
                let selection = Selection::on_socket(args.resource(), args.namespace.as_deref())?;
                local::trace(&socket, &args.request(&selection), &mut printer).await
            }
        }
    };
    let limit = async {
        match args.timeout {
            Some(timeout) => tokio::time::sleep(timeout).await,
            None => pending().await,
        }
    };
    tokio::select! {
        result = watch => return result,
        _ = tokio::signal::ctrl_c() => return Ok(()),
        () = limit => {}
    }
    match (args.count, args.timeout) {
        (Some(count), Some(timeout)) => bail!(
            "{} of {count} events came within {timeout:?}: is there traffic, and does a filter hide it?",
            printer.shown()
        ),
        _ => Ok(()),
    }
}

fn network(text: &str) -> Result<IpNet, String> {
    let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.map_err(|_| format!("{text:?} is neither an IP address nor a CIDR such as 10.0.0.0/8"))
}

impl TraceArgs {
    fn resource(&self) -> Option<Resource> {
        self.resource.clone().or_else(|| self.pod.clone().map(Resource::pod))
    }

    /// The filter, as far as an agent supports it.
    fn request(&self, selection: &Selection) -> WatchRequest {
        let direction = match self.direction {
            None => agent::Direction::Unspecified,
            Some(Direction::Outbound) => agent::Direction::Outbound,
            Some(Direction::Inbound) => agent::Direction::Inbound,
        };
        WatchRequest {
            namespace: selection.namespace.clone().unwrap_or_default(),
            pod: selection.pod.clone().unwrap_or_default(),
            direction: direction.into(),
            port: self.port.map(u32::from).unwrap_or_default(),
            verdict: self.verdict.clone().unwrap_or_default(),
            command: self.command.clone().unwrap_or_default(),
            destination: self.destination.map(|network| network.to_string()).unwrap_or_default(),
            accepted: self.accepted,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TraceArgs,
    }

    #[test]
    fn verdicts_are_those_that_the_programs_give() {
        let source = include_str!("../../ebpf/abi/src/verdict.rs");
        // Directions, and verdicts of `weft explain` alone.
        let others = ["outbound", "inbound", "pass_not_meshed", "pass_not_tcp"];
        let labels = source.lines().filter_map(|line| line.trim().strip_suffix("\",")?.split_once(" => \""));
        let labels: Vec<&str> = labels.map(|(_, label)| label).filter(|label| !others.contains(label)).collect();
        assert_eq!(labels, VERDICTS);
    }

    #[test]
    fn a_word_that_is_no_verdict_is_refused_with_the_verdicts() {
        let parse = |verdict: &str| Cli::try_parse_from(["trace", "--verdict", verdict]).map(|cli| cli.args.verdict);
        assert_eq!(parse("deny_device").unwrap().as_deref(), Some("deny_device"));
        let error = parse("redirected").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(VERDICTS.iter().all(|verdict| text.contains(verdict)), "{text}");
    }
}
