//! Connections to the control plane's APIs: to an address, or to a destination pod of a cluster or sandbox.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use weft_k8s_api::labels;
use weft_sandbox::config::CONTROL_NAMESPACE;

use crate::{
    agent::reason,
    cluster::{Cluster, root_cause},
    mesh::{list, pods},
    pod_network::PodNetwork,
    target::MeshArgs,
};

/// Deadline for an answer.
pub(super) const ANSWER: Duration = Duration::from_secs(10);
/// Deadline for a connection to `--api-addr`.
const CONNECT: Duration = Duration::from_secs(10);
/// The pod of a sandbox's control plane.
const SANDBOX_POD: &str = "linkerd-destination-0";

/// Which control plane to ask.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct ApiArgs {
    /// Address of the API, in place of a port-forward
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["sandbox", "destination_pod"])]
    api_addr: Option<String>,
    /// Pod of linkerd-destination to ask, if there are several [default: one that is ready]
    #[arg(long, value_name = "POD")]
    destination_pod: Option<String>,
    #[command(flatten)]
    mesh: MeshArgs,
}

/// An API that proxies use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProxyApi {
    Destination,
    Policy,
}

impl ProxyApi {
    /// Its port in the destination pods.
    fn port(self) -> u16 {
        match self {
            Self::Destination => 8086,
            Self::Policy => 8090,
        }
    }
}

impl ApiArgs {
    /// Connects to an API. Without a mesh only the API can be asked: `--api-addr` names nothing else.
    pub(super) async fn connect(&self, api: ProxyApi) -> Result<(Channel, Option<PodNetwork>)> {
        if let Some(address) = &self.api_addr {
            return Ok((dial(address).await?, None));
        }
        let network = self.mesh.network().await?;
        let (namespace, pod) = match &network {
            PodNetwork::Cluster(cluster) => {
                (cluster.namespace.as_str(), destination_pod(cluster, self.destination_pod.as_deref()).await?)
            }
            PodNetwork::Sandbox(_) => {
                (CONTROL_NAMESPACE, self.destination_pod.clone().unwrap_or_else(|| SANDBOX_POD.to_owned()))
            }
        };
        let channel = network.grpc(namespace, &pod, api.port()).await;
        let channel = channel.map_err(|error| anyhow!("port {} of pod {namespace}/{pod}: {error}", api.port()))?;
        Ok((channel, Some(network)))
    }
}

async fn dial(address: &str) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .with_context(|| format!("--api-addr {address}: expected HOST:PORT"))?
        .connect_timeout(CONNECT);
    endpoint.connect().await.map_err(|error| anyhow!("--api-addr {address}: {}", root_cause(&error)))
}

/// A pod of linkerd-destination: the named one, or one that is ready.
async fn destination_pod(cluster: &Cluster, named: Option<&str>) -> Result<String> {
    if let Some(named) = named {
        return Ok(named.to_owned());
    }
    let namespace = &cluster.namespace;
    let selector = format!("{}=destination", labels::CONTROL_PLANE_COMPONENT);
    let all = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let all = list(all, &ListParams::default().labels(&selector)).await;
    let all = all.map_err(|error| anyhow!("pods -l {selector} in namespace {namespace}: {error}"))?;
    choose(&all).with_context(|| {
        format!(
            "no pod of linkerd-destination is ready in namespace {namespace}: see `weft check`, or name the control \
             plane's namespace with -L"
        )
    })
}

fn choose(all: &[Pod]) -> Option<String> {
    let ready = |pod: &&Pod| pods::is_ready(pod) && !pods::is_leaving(pod);
    all.iter().find(ready).map(kube::ResourceExt::name_any)
}

/// What the API said, as an error; `asked` is what was asked for.
pub(super) fn refused(asked: &str, status: &Status) -> anyhow::Error {
    match status.code() {
        // Not an answer of the API.
        Code::Unavailable | Code::Unknown if status.message().is_empty() => anyhow!("{asked}: {}", reason(status)),
        code => anyhow!("{asked}: {code:?}: {}", reason(status)),
    }
}

/// Waits for an answer; an error names what was asked for.
pub(super) async fn answer<T>(asked: &str, call: impl Future<Output = Result<T, Status>>) -> Result<T> {
    match tokio::time::timeout(ANSWER, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(refused(asked, &status)),
        Err(_) => bail!("{asked}: the control plane did not answer within {}s", ANSWER.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, ready: bool, leaving: bool) -> Pod {
        let deleted = leaving.then_some("2026-01-01T00:00:00Z");
        let status = if ready { "True" } else { "False" };
        serde_json::from_value(json!({"metadata": {"name": name, "deletionTimestamp": deleted},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}}))
        .unwrap()
    }

    #[test]
    fn a_pod_that_is_ready_and_stays_is_asked() {
        let all = [pod("leaving", true, true), pod("starting", false, false), pod("ready", true, false)];
        assert_eq!(choose(&all).as_deref(), Some("ready"));
        assert_eq!(choose(&all[..2]), None);
    }

    #[test]
    fn an_error_names_what_was_asked_for_and_the_code() {
        let error = refused("web.shop:80", &Status::invalid_argument("Invalid authority"));
        assert_eq!(error.to_string(), "web.shop:80: InvalidArgument: Invalid authority");
    }

    #[tokio::test]
    async fn an_address_where_nothing_listens_is_named() {
        let error = dial("127.0.0.1:1").await.unwrap_err().to_string();
        assert!(error.contains("--api-addr 127.0.0.1:1") && error.contains("refused"), "{error}");
        assert!(dial("no address").await.unwrap_err().to_string().contains("HOST:PORT"));
    }
}
