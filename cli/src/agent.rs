//! Connections to node agents: on a unix socket of this host, or in a pod behind the API server.

use std::{path::Path, time::Duration};

use anyhow::{Result, anyhow};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use weft_proto::agent::{StatusRequest, StatusResponse, status_client::StatusClient};

use crate::cluster::Cluster;

/// Label selector of the agents' pods.
pub(crate) const SELECTOR: &str = "linkerd.io/control-plane-component=agent";
/// Name of the agents' DaemonSet.
pub(crate) const DAEMON_SET: &str = "weft-agent";
/// Port of the agents' Trace and Status on the node's loopback, if their pod names no other port `api`.
const API_PORT: u16 = 9651;
/// Deadline for an agent's status.
const ANSWER: Duration = Duration::from_secs(10);

/// Connects to the agent on a unix socket.
pub(crate) async fn on_socket(socket: &Path) -> Result<Channel> {
    let path = socket.to_owned();
    // The address is not used: the connector has the path.
    Endpoint::from_static("http://agent")
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|error| {
            // The errors in between add nothing.
            let cause = anyhow::Error::from(error);
            anyhow!(
                "no agent answers on {}: {}; is it running, and are you root?",
                socket.display(),
                cause.root_cause()
            )
        })
}

/// Connects to the agent in a pod.
pub(crate) async fn in_pod(cluster: &Cluster, namespace: &str, pod: &str, port: u16) -> Result<Channel, String> {
    cluster.grpc(namespace, pod, port).await
}

/// The port on which the agent in this pod serves its API.
pub(crate) fn api_port(pod: &Pod) -> u16 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.find(|port| port.name.as_deref() == Some("api"));
    named.and_then(|port| u16::try_from(port.container_port).ok()).unwrap_or(API_PORT)
}

/// Asks an agent for its status.
pub(crate) async fn status(channel: Channel) -> Result<StatusResponse, String> {
    match tokio::time::timeout(ANSWER, StatusClient::new(channel).get(StatusRequest {})).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err(format!("no answer within {}s", ANSWER.as_secs())),
    }
}

/// Asks the agent in a pod for its status.
pub(crate) async fn status_of(cluster: &Cluster, pod: &Pod) -> Result<StatusResponse, String> {
    let namespace = pod.namespace().unwrap_or_default();
    let channel = in_pod(cluster, &namespace, &pod.name_any(), api_port(pod)).await?;
    status(channel).await
}
