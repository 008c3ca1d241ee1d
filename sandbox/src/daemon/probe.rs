//! Probes of containers, from the node, as a kubelet does them.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use http_body_util::Empty;
use hyper::{Request, body::Bytes};
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    api::core::v1::{Container, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::{net::TcpStream, time::timeout};

use crate::host::netns;

/// Deadline of a probe: Kubernetes' default.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Runs a probe once. A container without one counts as ready. Only httpGet and tcpSocket are supported.
pub(super) async fn succeeds(node_netns: &Path, ip: IpAddr, container: &Container, probe: Option<&Probe>) -> bool {
    let Some(probe) = probe else { return true };
    if let Some(get) = &probe.http_get {
        let Some(port) = port_of(container, &get.port) else { return false };
        let path = get.path.as_deref().unwrap_or("/");
        return timeout(TIMEOUT, answers_well(node_netns, SocketAddr::new(ip, port), path)).await == Ok(Some(true));
    }
    if let Some(tcp) = &probe.tcp_socket {
        let Some(port) = port_of(container, &tcp.port) else { return false };
        return connect(node_netns, SocketAddr::new(ip, port)).await.is_some();
    }
    true
}

/// Whether an HTTP GET is answered with 200 to 399, Kubernetes' definition of success.
async fn answers_well(node_netns: &Path, address: SocketAddr, path: &str) -> Option<bool> {
    let stream = connect(node_netns, address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
    let connection = tokio::spawn(connection);
    let request =
        Request::get(path).header("host", address.to_string()).header("user-agent", "kube-probe/weft-sandbox");
    let response = sender.send_request(request.body(Empty::<Bytes>::new()).ok()?).await.ok();
    connection.abort();
    response.map(|response| (200..400).contains(&response.status().as_u16()))
}

/// Connects from the node's network namespace.
async fn connect(node_netns: &Path, address: SocketAddr) -> Option<TcpStream> {
    let node_netns = node_netns.to_owned();
    // A socket belongs to the namespace in which it was created; after that any thread may use it.
    let dial = move || netns::within(&node_netns, move || std::net::TcpStream::connect_timeout(&address, TIMEOUT));
    let stream = tokio::task::spawn_blocking(dial).await.ok()?.ok()?.ok()?;
    stream.set_nonblocking(true).ok()?;
    TcpStream::from_std(stream).ok()
}

fn port_of(container: &Container, port: &IntOrString) -> Option<u16> {
    match port {
        IntOrString::Int(number) => u16::try_from(*number).ok(),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let found = ports.find(|port| port.name.as_ref() == Some(name))?;
            u16::try_from(found.container_port).ok()
        }
    }
}
