//! `weft diagnostics proxy-metrics` and `controller-metrics`: the metrics of many containers, in Linkerd's form.

use std::{fmt::Write as _, process::ExitCode, time::Duration};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use weft_k8s_api::labels;
use weft_sandbox::{
    config::CONTROL_NAMESPACE,
    state::{ContainerState, PodState, State},
};

use super::obfuscate::obfuscate;
use crate::{
    cluster::Cluster,
    kind::{Kind, names},
    mesh::{list, pods},
    output::{self, progress},
    pod_network::PodNetwork,
    resource::{self, Resource, Selection},
    target::MeshArgs,
};

/// How many containers are asked at once: each is a connection of the API server.
const AT_ONCE: usize = 16;
/// Time for the answers of all proxies.
const PROXIES_WITHIN: Duration = Duration::from_secs(30);
/// The admin port of a sandbox's control plane.
const SANDBOX_ADMIN: u16 = 9990;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics proxy-metrics -n shop po/web-0
  weft diagnostics proxy-metrics -n shop deploy/web | grep request_total
  weft diagnostics proxy-metrics -n shop deploy/web --obfuscate > metrics.txt   to show them to others
  weft diagnostics proxy-metrics -n linkerd deploy/linkerd-destination

Ends with 1 when no proxy answered; a proxy that did not is named in a comment.")]
pub(super) struct ProxyMetricsArgs {
    #[arg(help = format!("KIND/NAME: {}; a name alone is a pod's", names(Kind::with_pods())))]
    resource: Resource,
    /// Namespace of the resource [default: the context's]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Replace addresses, identities and names of Services, workloads, routes and policies by digests
    #[arg(long)]
    obfuscate: bool,
    #[command(flatten)]
    mesh: MeshArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics controller-metrics
  weft diagnostics cp-metrics -L mesh | grep grpc_server_handled_total

Ends with 1 when no container answered; one that did not is named in a comment.")]
pub(super) struct ControllerMetricsArgs {
    /// Time for all answers
    #[arg(short, long, value_name = "TIME", default_value = "30s", value_parser = output::duration)]
    wait: Duration,
    #[command(flatten)]
    mesh: MeshArgs,
}

/// A container with metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source {
    namespace: String,
    pod: String,
    container: String,
    /// The admin port, or why there is none.
    port: Result<u16, String>,
}

/// A container's metrics, or why there are none.
type Scraped = (Source, Result<String, String>);

pub(super) async fn of_proxies(args: ProxyMetricsArgs) -> Result<ExitCode> {
    let mut scraped = progress::during("the proxies' metrics", scrape_proxies(&args)).await?;
    if args.obfuscate {
        for (_, metrics) in &mut scraped {
            *metrics = metrics.as_deref().map(obfuscate).map_err(Clone::clone);
        }
    }
    print(&scraped, false)
}

pub(super) async fn of_control_plane(args: ControllerMetricsArgs) -> Result<ExitCode> {
    print(&progress::during("the control plane's metrics", scrape_control_plane(&args)).await?, true)
}

async fn scrape_proxies(args: &ProxyMetricsArgs) -> Result<Vec<Scraped>> {
    let network = args.mesh.network().await?;
    let (resource, namespace) = (Some(args.resource.clone()), args.namespace.as_deref());
    let sources = match &network {
        PodNetwork::Cluster(cluster) => {
            let selection = Selection::in_cluster(resource, namespace, cluster).await?;
            resource::pods(cluster, &selection).await?.iter().map(proxy_of).collect()
        }
        PodNetwork::Sandbox(state) => {
            let selection = Selection::in_sandbox(resource, namespace, state)?;
            vec![proxy_in_sandbox(selection.known(state)?)]
        }
    };
    Ok(scrape(&network, sources, PROXIES_WITHIN).await)
}

async fn scrape_control_plane(args: &ControllerMetricsArgs) -> Result<Vec<Scraped>> {
    let network = args.mesh.network().await?;
    let sources = match &network {
        PodNetwork::Cluster(cluster) => control_plane(cluster).await?,
        PodNetwork::Sandbox(state) => control_plane_in_sandbox(state),
    };
    Ok(scrape(&network, sources, args.wait).await)
}

fn proxy_of(pod: &Pod) -> Source {
    let port = match pods::phase(pod) {
        "Running" => match (pods::proxy_container(pod), pods::admin_port(pod, labels::PROXY_CONTAINER)) {
            (Some(_), port) => Ok(port.unwrap_or(labels::ADMIN_PORT)),
            (None, _) => Err("has no proxy".to_owned()),
        },
        phase => Err(format!("is {phase}")),
    };
    Source {
        namespace: pod.namespace().unwrap_or_default(),
        pod: pod.name_any(),
        container: labels::PROXY_CONTAINER.to_owned(),
        port,
    }
}

fn proxy_in_sandbox(pod: &PodState) -> Source {
    Source {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        container: labels::PROXY_CONTAINER.to_owned(),
        port: if pod.meshed { Ok(labels::ADMIN_PORT) } else { Err("has no proxy".to_owned()) },
    }
}

/// Every container of the control plane and of agents that serves metrics.
async fn control_plane(cluster: &Cluster) -> Result<Vec<Source>> {
    let namespace = &cluster.namespace;
    let all = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let all = list(all, &ListParams::default().labels(labels::CONTROL_PLANE_COMPONENT)).await;
    let all = all.map_err(|error| anyhow!("pods of the control plane in namespace {namespace}: {error}"))?;
    if all.is_empty() {
        bail!("there is no control plane in namespace {namespace}: name its namespace with -L");
    }
    Ok(all.iter().filter(|pod| !pods::is_over(pod)).flat_map(containers).collect())
}

fn containers(pod: &Pod) -> Vec<Source> {
    let runs = pods::phase(pod) == "Running";
    let source = |(container, port): (&str, u16)| Source {
        namespace: pod.namespace().unwrap_or_default(),
        pod: pod.name_any(),
        container: container.to_owned(),
        port: if runs { Ok(port) } else { Err(format!("is {}", pods::phase(pod))) },
    };
    pods::admin_ports(pod).into_iter().map(source).collect()
}

fn control_plane_in_sandbox(state: &State) -> Vec<Source> {
    let own = state.pods.iter().filter(|pod| pod.namespace == CONTROL_NAMESPACE);
    let of_pod = |pod: &PodState| {
        let source = |container: &ContainerState| Source {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: container.name.clone(),
            port: Ok(if container.name == labels::PROXY_CONTAINER { labels::ADMIN_PORT } else { SANDBOX_ADMIN }),
        };
        pod.containers.iter().map(source).collect::<Vec<_>>()
    };
    own.flat_map(of_pod).collect()
}

async fn scrape(network: &PodNetwork, mut sources: Vec<Source>, within: Duration) -> Vec<Scraped> {
    sources.sort();
    let give_up = tokio::time::Instant::now() + within;
    let ask = |source: Source| async move {
        let metrics = match source.port.clone() {
            Ok(port) => match tokio::time::timeout_at(give_up, get(network, &source, port)).await {
                Ok(metrics) => metrics,
                Err(_) => Err(format!("no answer within {}s", within.as_secs())),
            },
            Err(why) => Err(why),
        };
        (source, metrics)
    };
    stream::iter(sources).map(ask).buffered(AT_ONCE).collect().await
}

async fn get(network: &PodNetwork, source: &Source, port: u16) -> Result<String, String> {
    let answer = network.get(&source.namespace, &source.pod, port, "/metrics").await?;
    match answer.status {
        200 => Ok(answer.body),
        status => Err(format!("port {port} answered {status}: {}", answer.body.trim())),
    }
}

fn print(scraped: &[Scraped], with_container: bool) -> Result<ExitCode> {
    output::line(text(scraped, with_container).trim_end())?;
    let answered = scraped.iter().any(|(_, metrics)| metrics.is_ok());
    Ok(if answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Linkerd's form: a comment before the metrics of each container.
fn text(scraped: &[Scraped], with_container: bool) -> String {
    let mut text = String::new();
    for (index, (source, metrics)) in scraped.iter().enumerate() {
        let _ = writeln!(text, "#\n# POD {} ({} of {})", source.pod, index + 1, scraped.len());
        if with_container {
            let _ = writeln!(text, "# CONTAINER {}", source.container);
        }
        let _ = match metrics {
            Ok(metrics) => writeln!(text, "#\n{}", metrics.trim_end()),
            Err(why) => writeln!(text, "#\n# ERROR {why}"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, phase: &str, containers: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"containers": containers}, "status": {"phase": phase}}))
        .unwrap()
    }

    #[test]
    fn a_proxy_is_found_by_its_port_and_a_pod_without_one_is_named() {
        let proxy = json!([{"name": "linkerd-proxy", "ports": [{"name": "linkerd-admin", "containerPort": 5191}]}]);
        assert_eq!(proxy_of(&pod("a", "Running", proxy.clone())).port, Ok(5191));
        assert_eq!(proxy_of(&pod("a", "Running", json!([{"name": "app"}]))).port, Err("has no proxy".to_owned()));
        assert_eq!(proxy_of(&pod("a", "Pending", proxy)).port, Err("is Pending".to_owned()));
    }

    #[test]
    fn the_form_is_linkerds() {
        let sources = containers(&pod(
            "linkerd-destination-1",
            "Running",
            json!([{"name": "destination", "ports": [{"name": "dest-admin", "containerPort": 9996}]},
                {"name": "policy", "ports": [{"name": "policy-admin", "containerPort": 9990}]}, {"name": "other"}]),
        ));
        assert_eq!(sources.len(), 2);
        let answers = [Ok("up 1\n".to_owned()), Err("no answer within 30s".to_owned())];
        let scraped: Vec<_> = sources.into_iter().zip(answers).collect();
        let expected = "#\n# POD linkerd-destination-1 (1 of 2)\n# CONTAINER destination\n#\nup 1\n\
                        #\n# POD linkerd-destination-1 (2 of 2)\n# CONTAINER policy\n#\n# ERROR no answer within 30s\n";
        assert_eq!(text(&scraped, true), expected);
        assert!(text(&scraped, false).starts_with("#\n# POD linkerd-destination-1 (1 of 2)\n#\nup 1\n"));
    }
}
