//! Tunnels: WebSocket or CONNECT connections after both sides have agreed.
//!
//! The task that serves a client's connection also runs the tunnel that it becomes. So a tunnel counts as a connection
//! of the listener, and a drain waits for it.

use http::{Method, Response, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::{in_flight::Permit, io::copy_bidirectional};

/// Both sides of a tunnel, which hyper gives away when their connections are upgraded.
#[derive(Debug)]
pub(crate) struct Tunnel {
    client: OnUpgrade,
    server: OnUpgrade,
    /// Those of its request, which is in flight until the tunnel ends.
    permits: Vec<Permit>,
}

/// Whether a response to an upgrading request turns its connection into a tunnel.
pub(crate) fn is_tunnel(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (*method == Method::CONNECT && status.is_success())
}

/// Removes headers from a successful CONNECT response that would describe a body (RFC 9110 section 9.3.6).
pub(crate) fn strip_connect_response<B>(response: &mut Response<B>) {
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.headers_mut().remove(header::TRANSFER_ENCODING);
}

impl Tunnel {
    /// A tunnel that holds the permit of its request.
    pub(crate) fn new(client: OnUpgrade, server: OnUpgrade, permit: Option<Permit>) -> Self {
        Self { client, server, permits: permit.into_iter().collect() }
    }

    /// Holds another permit: that of the request at a gateway.
    pub(crate) fn hold(&mut self, permit: Option<Permit>) {
        self.permits.extend(permit);
    }

    async fn copy(self) {
        let Self { client, server, permits: _permits } = self;
        let (client, server) = match tokio::try_join!(client, server) {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "a side of the tunnel was gone before it was upgraded");
                return;
            }
        };
        if let Err(error) = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(server)).await {
            tracing::debug!(%error, "tunnel ended");
        }
    }
}

/// Copies between both sides of the tunnel that a connection has become, if it has.
pub(crate) async fn run(tunnel: Option<Tunnel>) {
    if let Some(tunnel) = tunnel {
        // Boxed, so that other connections have no room for it.
        Box::pin(tunnel.copy()).await;
    }
}
