//! A proxy that copies bytes and decides nothing: it gets a connection's original destination from the kernel and
//! connects to it. The same program runs behind iptables and behind eBPF, so two measurements differ only in the
//! interception.
//!
//! ```text
//! outbound 127.0.0.1:4140, [::1]:4140   inbound 0.0.0.0:4143   admin :4191 (/ready, /live, /connections)
//! ```
//!
//! It implements the part of the `LINKERD2_PROXY_*` contract that sets the listeners, and refuses connections whose
//! original destination is unknown or is its own listener, which would be an endless loop.

#![expect(clippy::print_stderr, reason = "its log tells why a connection led nowhere")]

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Number of recent connections in `/connections`.
const REMEMBERED: usize = 1024;

/// The listener that accepted a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the pod's application.
    Outbound,
    /// To the pod's application.
    Inbound,
}

/// The proxy's observations of one connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The listener that accepted it.
    pub direction: Direction,
    /// The peer of the accepted socket.
    pub peer: String,
    /// The local address of the accepted socket.
    pub local: String,
    /// The kernel's answer to `SO_ORIGINAL_DST`, or its error.
    pub original: Result<String, String>,
}

/// The proxy's state, shared by its listeners.
#[derive(Clone, Debug, Default)]
pub struct Passthrough {
    seen: Arc<Mutex<VecDeque<Connection>>>,
}

impl Passthrough {
    /// Accepts and copies until the caller drops the future.
    pub async fn serve(self, listener: TcpListener, direction: Direction) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let proxy = self.clone();
            tokio::spawn(async move { proxy.forward(stream, direction).await });
        }
    }

    /// Answers `/ready`, `/live`, `/metrics` (empty) and `/connections` until the caller drops the future.
    pub async fn serve_admin(self, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let proxy = self.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let response = proxy.admin(request.uri().path());
                    async move { Ok::<_, std::convert::Infallible>(response) }
                });
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }

    /// The latest connections, oldest first.
    pub fn connections(&self) -> Vec<Connection> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    async fn forward(&self, mut accepted: TcpStream, direction: Direction) {
        match self.connect(&accepted, direction).await {
            // One side disconnected: closing both is all that is left to do.
            Ok(mut onward) => drop(tokio::io::copy_bidirectional(&mut accepted, &mut onward).await),
            // The application sees no more than a connection that is closed.
            Err(error) => eprintln!("{direction:?} connection from {:?} to nowhere: {error}", accepted.peer_addr()),
        }
    }

    async fn connect(&self, accepted: &TcpStream, direction: Direction) -> io::Result<TcpStream> {
        let (peer, local) = (accepted.peer_addr()?, accepted.local_addr()?);
        let original = original_destination(accepted);
        self.remember(Connection {
            direction,
            peer: peer.to_string(),
            local: local.to_string(),
            original: original.as_ref().map(ToString::to_string).map_err(ToString::to_string),
        });
        let original = original?;
        if is_own_listener(original, local, direction) {
            return Err(io::Error::other("the original destination is this proxy"));
        }
        let onward = TcpStream::connect(original).await?;
        accepted.set_nodelay(true)?;
        onward.set_nodelay(true)?;
        Ok(onward)
    }

    fn remember(&self, connection: Connection) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() == REMEMBERED {
            seen.pop_front();
        }
        seen.push_back(connection);
    }

    fn admin(&self, path: &str) -> Response<Full<Bytes>> {
        let (status, body) = match path {
            "/ready" => (StatusCode::OK, "ready\n".to_owned()),
            "/live" => (StatusCode::OK, "live\n".to_owned()),
            "/metrics" => (StatusCode::OK, String::new()),
            "/connections" => (StatusCode::OK, serde_json::to_string(&self.connections()).unwrap_or_default()),
            _ => (StatusCode::NOT_FOUND, "not found\n".to_owned()),
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response
    }
}

/// A connection to the listener that accepted it would be accepted again, endlessly.
fn is_own_listener(original: SocketAddr, local: SocketAddr, direction: Direction) -> bool {
    match direction {
        // The listener's own address is the local address: REDIRECT and the eBPF rewrite both end there.
        Direction::Outbound => original == local,
        // Steering keeps the local address, so only the port can be compared.
        Direction::Inbound => original.port() == INBOUND_PORT,
    }
}

/// The inbound port every mesh of the Linkerd family uses.
pub const INBOUND_PORT: u16 = 4143;
/// The outbound port every mesh of the Linkerd family uses.
pub const OUTBOUND_PORT: u16 = 4140;

/// Connects to an address, and succeeds if the connection arrives at the listener.
///
/// # Errors
/// When it arrives elsewhere or cannot be made.
pub async fn validate(listener: TcpListener, target: SocketAddr) -> io::Result<()> {
    let accepted = async {
        let (mut stream, peer) = listener.accept().await?;
        stream.write_all(peer.to_string().as_bytes()).await
    };
    let dialled = async {
        let mut stream = TcpStream::connect(target).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let expected = stream.local_addr()?.to_string();
        if answer == expected { Ok(()) } else { Err(io::Error::other("another program answers there")) }
    };
    tokio::try_join!(accepted, dialled).map(drop)
}

/// Gets the connection's destination before redirection from the kernel: with the IPv6 level on an IPv6 socket, unless
/// its addresses are IPv4-mapped.
///
/// # Errors
/// The kernel's own, for example `ENOENT` or `ENOPROTOOPT` for a connection that was not redirected.
pub fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    let socket = SockRef::from(stream);
    let native_v6 = match stream.local_addr()? {
        SocketAddr::V6(v6) => v6.ip().to_ipv4_mapped().is_none(),
        SocketAddr::V4(_) => false,
    };
    let address = if native_v6 { socket.original_dst_v6()? } else { socket.original_dst_v4()? };
    address.as_socket().ok_or_else(|| io::Error::other("the kernel answered an address of another family"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn never_calls_its_own_listener() {
        let listener = address("127.0.0.1:4140");
        assert!(is_own_listener(listener, listener, Direction::Outbound));
        assert!(!is_own_listener(address("10.96.0.1:80"), listener, Direction::Outbound));
        assert!(is_own_listener(address("10.244.0.5:4143"), address("10.244.0.5:4143"), Direction::Inbound));
        assert!(!is_own_listener(address("10.244.0.5:8080"), address("10.244.0.5:8080"), Direction::Inbound));
    }

    #[tokio::test]
    async fn validation_succeeds_where_its_own_listener_answers() {
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listen().await;
        let address = own.local_addr().unwrap();
        validate(own, address).await.unwrap();
        let other = listen().await;
        let elsewhere = other.local_addr().unwrap();
        let answers = tokio::spawn(async move { other.accept().await.map(drop) });
        validate(listen().await, elsewhere).await.unwrap_err();
        answers.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn answers_the_kernels_error_where_nobody_redirected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        // With connection tracking active on the host, the kernel knows the connection and returns its address.
        match original_destination(&accepted) {
            Err(error) => assert!(matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOPROTOOPT))),
            Ok(original) => assert_eq!(original, accepted.local_addr().unwrap()),
        }
        drop(client);
    }
}
