//! Connections to node agents: on a unix socket of this host, or in a pod behind the API server. There each connection
//! runs `weft-agent connect`, because an agent listens on its socket alone.

use std::{error::Error, io, path::Path, time::Duration};

use anyhow::{Result, anyhow};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{StatusRequest, StatusResponse, status_client::StatusClient};

use crate::cluster::{Cluster, root_cause};

/// Label selector of the agents' pods.
pub(crate) const SELECTOR: &str = "linkerd.io/control-plane-component=agent";
/// Name of the agents' DaemonSet.
pub(crate) const DAEMON_SET: &str = "weft-agent";
/// The container of their pods, and what joins its standard streams to the agent's socket.
const CONTAINER: &str = "agent";
const CONNECT: [&str; 2] = ["/weft-agent", "connect"];
/// How often a silent connection is pinged, and how long the answer may take: load balancers in front of API servers
/// drop silent connections, and a node that dies sends nothing.
const PING: Duration = Duration::from_secs(15);
/// Deadline for an agent's status.
const ANSWER: Duration = Duration::from_secs(10);

/// Connects to the agent on a unix socket.
pub(crate) async fn on_socket(socket: &Path) -> Result<Channel> {
    let path = socket.to_owned();
    // The address is not used: the connector has the path.
    Endpoint::from_static("http://agent")
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { connect(&path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|error| {
            let (at, cause) = (socket.display(), root_cause(&error));
            anyhow!("no agent answers on {at}: {cause}; is it running, and are you root?")
        })
}

#[cfg(unix)]
async fn connect(socket: &Path) -> io::Result<tokio::net::UnixStream> {
    tokio::net::UnixStream::connect(socket).await
}

#[cfg(not(unix))]
async fn connect(_socket: &Path) -> io::Result<tokio::net::TcpStream> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "agents run on Linux only"))
}

/// Connects to the agent in a pod.
pub(crate) async fn in_pod(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Channel, String> {
    let (cluster, namespace, pod) = (cluster.clone(), namespace.to_owned(), pod.to_owned());
    // The address is not used: the connector has the pod.
    let endpoint = Endpoint::from_static("http://agent")
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true);
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
        let (cluster, namespace, pod) = (cluster.clone(), namespace.clone(), pod.clone());
        async move { cluster.exec(&namespace, &pod, CONTAINER, &CONNECT).await.map(TokioIo::new) }
    }));
    channel.await.map_err(|error| root_cause(&error))
}

/// Why a call failed: what the agent said, or what broke the connection to it.
pub(crate) fn reason(status: &Status) -> String {
    match status.source() {
        Some(cause) => root_cause(cause),
        None => status.message().to_owned(),
    }
}

/// Asks an agent for its status.
pub(crate) async fn status(channel: Channel) -> Result<StatusResponse, String> {
    match tokio::time::timeout(ANSWER, StatusClient::new(channel).get(StatusRequest {})).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(reason(&status)),
        Err(_) => Err(format!("no answer within {}s", ANSWER.as_secs())),
    }
}

/// Asks the agent in a pod for its status.
pub(crate) async fn status_of(cluster: &Cluster, pod: &Pod) -> Result<StatusResponse, String> {
    let namespace = pod.namespace().unwrap_or_default();
    let channel = in_pod(cluster, &namespace, &pod.name_any()).await?;
    status(channel).await
}
