//! Tunnels: WebSocket or CONNECT connections after both sides have agreed.

use http::{Method, Response, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use weft_runtime::drain;

use crate::io::copy_bidirectional;

/// Whether a response to an upgrading request turns its connection into a tunnel.
pub(crate) fn is_tunnel(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (*method == Method::CONNECT && status.is_success())
}

/// Removes headers from a successful CONNECT response that would describe a body (RFC 9110 section 9.3.6).
pub(crate) fn strip_connect_response<B>(response: &mut Response<B>) {
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.headers_mut().remove(header::TRANSFER_ENCODING);
}

/// Copies between both upgraded connections in its own task; a drain waits for it.
pub(crate) fn spawn_tunnel(drain: &drain::Watch, client: OnUpgrade, server: OnUpgrade) {
    drain.spawn(async move {
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
    });
}
