//! `weft status`: the components, the holder of the lease, the pods that the kernel redirects, and on top the
//! problems.
//!
//! ```text
//! Mesh (a cluster) ────────────┐
//! State + agent's Status (host)┴──> Report ──> tables, JSON or YAML
//! ```
//!
//! Refuses to check configuration and certificates: `weft check` does, and has exit codes.

mod host;
mod problems;
mod report;
mod rows;
mod view;

use anyhow::{Result, bail};
use clap::Args;

use crate::{
    mesh::{Mesh, other_agent::OtherAgent},
    output::{WideFormat, progress},
    problem::Problem,
    target::{Target, TargetArgs},
};
pub(crate) use problems::without_agent;
use report::Report;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft status                         the whole mesh: of the sandbox `default` if it runs, else of the cluster
  weft status -n shop                 the pods of one namespace
  weft status --context staging -L mesh
  weft status -o json | jq '.pods[] | select(.state != \"enrolled\")'
  weft status --sandbox other
  weft status -o wide                 also why a pod is not enrolled, and the agents' counters

STATE of a pod: enrolled (both directions obey its rules), pending (not yet), refused (an annotation of it cannot be
read), leaving (deleted, and alive on its node), missing (its node's agent does not know it), unknown (no agent to ask),
unserved (of a control plane whose pods the agents do not enrol).")]
pub(crate) struct StatusArgs {
    /// Only pods of this namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Pods of all namespaces, which is the default
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Output format: wide adds the agents' pods and counters, and of each pod what its agent knows
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    target: TargetArgs,
}

/// The pods with a proxy that the kernel does not redirect, with the reason.
pub(crate) fn not_enrolled(mesh: &Mesh) -> Vec<Problem> {
    rows::pod_rows(mesh).iter().filter_map(problems::not_enrolled).collect()
}

pub(crate) async fn execute(args: StatusArgs) -> Result<()> {
    let report = progress::during("the pods of the mesh, and the agents' status", report(&args)).await?;
    match args.output.data() {
        Some(data) => data.print(&report),
        None => Ok(view::print(&report, args.output == WideFormat::Wide)?),
    }
}

async fn report(args: &StatusArgs) -> Result<Report> {
    let namespace = args.namespace.as_deref();
    match args.target.target().await? {
        Target::Cluster(cluster) => {
            let mesh = Mesh::gather(&cluster, namespace).await;
            if let Err(error) = &mesh.control_pods {
                bail!("the cluster at {}: pods in namespace {}: {error}", cluster.server, cluster.namespace);
            }
            // Agents of another namespace matter only where this one has none. Without the right to list them, none is
            // named.
            let elsewhere = match &mesh.daemon_set {
                Ok(None) => OtherAgent::list(&cluster).await.unwrap_or_default(),
                _ => Vec::new(),
            };
            Ok(Report::of_cluster(&mesh, &elsewhere, k8s_openapi::jiff::Timestamp::now()))
        }
        Target::Sandbox(state) => Ok(host::of_sandbox(&state, namespace).await),
        Target::Socket(socket) => host::of_socket(&socket, namespace).await,
    }
}
