//! Connections to ports of pods: in a cluster through the API server, in a sandbox in the pod's network namespace.
//! Either way they arrive on the pod's loopback address, past its proxy.
//!
//! ```text
//! PodNetwork ──connect──> a port ──┬──grpc──> Channel      (discovery, policy)
//!                                  ├──get───> Answer       (admin servers)
//!                                  └──TLS───> certificates (weft identity)
//! ```

use std::{io, sync::Arc, time::Duration};

use http::{Request, header::HOST};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint};
use weft_sandbox::state::State;

use crate::cluster::{Cluster, root_cause};

/// Deadline for an admin server's answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Upper bound of an answer, in bytes: a proxy with thousands of destinations has a few megabytes of metrics.
const ANSWER_BYTES: usize = 64 << 20;
/// Deadline for a gRPC connection.
const CONNECT: Duration = Duration::from_secs(15);

/// A connection to a port of a pod.
pub(crate) type Connection = Box<dyn Stream>;

/// Both halves of a connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A mesh whose pods can be reached: a cluster's or a sandbox's.
#[derive(Clone)]
pub(crate) enum PodNetwork {
    Cluster(Cluster),
    Sandbox(Arc<State>),
}

/// An HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl PodNetwork {
    /// Connects to a port on a pod's loopback address.
    pub(crate) async fn connect(&self, namespace: &str, pod: &str, port: u16) -> io::Result<Connection> {
        match self {
            Self::Cluster(cluster) => Ok(Box::new(cluster.forward(namespace, pod, port).await?)),
            Self::Sandbox(state) => {
                let wanted = |known: &&weft_sandbox::state::PodState| known.namespace == namespace && known.name == pod;
                let known = state.pods.iter().find(wanted).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::NotFound, format!("the sandbox has no pod {namespace}/{pod}"))
                })?;
                Ok(Box::new(in_namespace(known.netns.clone(), port).await?))
            }
        }
    }

    /// Connects to a gRPC server in a pod. The channel connects again when its connection breaks.
    pub(crate) async fn grpc(&self, namespace: &str, pod: &str, port: u16) -> Result<Channel, String> {
        let (network, namespace, pod) = (self.clone(), namespace.to_owned(), pod.to_owned());
        // The address is not used: the connector has the pod.
        let endpoint = Endpoint::from_static("http://pod").connect_timeout(CONNECT);
        let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
            let (network, namespace, pod) = (network.clone(), namespace.clone(), pod.clone());
            async move { network.connect(&namespace, &pod, port).await.map(TokioIo::new) }
        }));
        channel.await.map_err(|error| root_cause(&error))
    }

    /// Sends a GET to an HTTP server in a pod.
    pub(crate) async fn get(&self, namespace: &str, pod: &str, port: u16, path: &str) -> Result<Answer, String> {
        let exchange = async {
            let stream = self.connect(namespace, pod, port).await.map_err(|error| error.to_string())?;
            fetch(stream, port, path).await
        };
        match tokio::time::timeout(ANSWER, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("no answer from port {port} within {}s", ANSWER.as_secs())),
        }
    }
}

async fn fetch(stream: impl Stream + 'static, port: u16, path: &str) -> Result<Answer, String> {
    let failed = |error: hyper::Error| root_cause(&error);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    let request = Request::get(path).header(HOST, format!("localhost:{port}")).body(Empty::<Bytes>::new());
    let request = request.map_err(|error| error.to_string())?;
    let exchange = async move {
        let response = sender.send_request(request).await.map_err(failed)?;
        let status = response.status().as_u16();
        let body =
            Limited::new(response.into_body(), ANSWER_BYTES).collect().await.map_err(|error| error.to_string())?;
        Ok(Answer { status, body: String::from_utf8_lossy(&body.to_bytes()).into_owned() })
    };
    // The connection ends when the exchange drops its sender.
    let (answer, _) = futures::join!(exchange, connection);
    answer
}

#[cfg(target_os = "linux")]
async fn in_namespace(netns: std::path::PathBuf, port: u16) -> io::Result<tokio::net::TcpStream> {
    use std::net::{Ipv4Addr, SocketAddr};

    const DIAL: Duration = Duration::from_secs(5);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    // A socket belongs to the namespace in which it was created; after that any thread may use it.
    let dial =
        move || weft_sandbox::host::netns::within(&netns, move || std::net::TcpStream::connect_timeout(&address, DIAL));
    let stream = tokio::task::spawn_blocking(dial).await?.map_err(io::Error::other)??;
    stream.set_nonblocking(true)?;
    tokio::net::TcpStream::from_std(stream)
}

#[cfg(not(target_os = "linux"))]
async fn in_namespace(_netns: std::path::PathBuf, _port: u16) -> io::Result<tokio::net::TcpStream> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "sandboxes are on Linux only"))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// A server that reads a request, writes these bytes and closes the connection.
    async fn answer(bytes: &'static str) -> Result<Answer, String> {
        let (near, mut far) = tokio::io::duplex(4096);
        tokio::spawn(async move {
            let mut request = [0; 4096];
            let read = far.read(&mut request).await.unwrap();
            let request = String::from_utf8_lossy(&request[..read]).to_lowercase();
            assert!(request.starts_with("get /metrics http/1.1\r\n") && request.contains("host: localhost:4191\r\n"));
            far.write_all(bytes.as_bytes()).await.unwrap();
        });
        fetch(near, 4191, "/metrics").await
    }

    #[tokio::test]
    async fn answers_are_read_whole_also_in_chunks() {
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nup 1\r\n1\r\n\n\r\n0\r\n\r\n";
        assert_eq!(answer(chunked).await, Ok(Answer { status: 200, body: "up 1\n".to_owned() }));
        let plain = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\nnot ready";
        assert_eq!(answer(plain).await, Ok(Answer { status: 503, body: "not ready".to_owned() }));
    }

    #[tokio::test]
    async fn what_is_not_http_and_what_ends_early_are_errors() {
        assert!(answer("SSH-2.0-OpenSSH\r\n\r\n").await.is_err());
        assert!(answer("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nup").await.is_err());
    }
}
