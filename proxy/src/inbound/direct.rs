//! Connections to the proxy's own port: other proxies send a transport header with the port that they want, or with a
//! Service's name if this one is a gateway.

use std::{net::SocketAddr, sync::Arc};

use tokio::net::TcpStream;

use super::{
    Inbound, Serving,
    error::ConnectionError,
    gateway::{self, Route},
    http, tcp,
};
use crate::{
    detect,
    http::serve::HttpVersion,
    metrics::label,
    policy::authz::{Client, ClientTls},
    transport_header::{SessionProtocol, TransportHeader},
};

/// Finds out how to serve a connection whose original destination is `own`, this proxy.
pub(super) async fn negotiate(
    inbound: &Arc<Inbound>,
    stream: TcpStream,
    peer: SocketAddr,
    own: SocketAddr,
) -> Result<Serving, ConnectionError> {
    let config = &inbound.shared.config;
    let timeout = config.inbound.detect_timeout;
    let (name, stream) = detect::tls(stream, timeout).await?;
    let name = name.ok_or(ConnectionError::NotMeshed("the client does not speak TLS"))?;
    if *name != *config.identity.server_name {
        return Err(ConnectionError::NotMeshed("the client asks for another server"));
    }
    let handshake = inbound.tls.accept_direct(stream, timeout).await?;
    let identity = handshake.identity.ok_or(ConnectionError::NotMeshed("the client has no certificate"))?;
    if !handshake.has_header {
        return Err(ConnectionError::NotMeshed("the client negotiated no transport header"));
    }

    let mut stream = handshake.stream;
    let header = tokio::time::timeout(timeout, TransportHeader::read(&mut stream)).await;
    let header = header.map_err(|_| ConnectionError::HeaderTimedOut)??;
    let target = SocketAddr::new(own.ip(), header.port.get());
    let is_named = header.name.is_some();
    if is_named && inbound.gateway.is_none() {
        return Err(ConnectionError::Gateway);
    }
    if !is_named && target.port() == own.port() {
        return Err(ConnectionError::Loop(target));
    }
    count(inbound, &header, target, identity.as_str());
    let client = Client { addr: peer, tls: ClientTls::Established(Some(identity)) };
    let version = header.protocol.map(|protocol| match protocol {
        SessionProtocol::Http1 => HttpVersion::Http1,
        SessionProtocol::Http2 => HttpVersion::Http2,
    });
    if is_named {
        // A gateway's own policy decides, as in Linkerd: the Service's is that of its pods.
        let policy = inbound.policies.port(own.port(), peer.ip()).await;
        return match version {
            None => gateway::forward(inbound, stream, client, own, &header, policy),
            Some(version) => {
                let route = Route::new(inbound, &header, &client);
                Ok(http::serve_gateway(inbound, stream, version, client, own, policy, route))
            }
        };
    }
    let policy = inbound.policies.port(target.port(), peer.ip()).await;
    match version {
        None => tcp::forward(inbound, stream, client, target, policy),
        Some(version) => Ok(http::serve(inbound, stream, version, client, target, policy)),
    }
}

/// Counts a header.
fn count(inbound: &Inbound, header: &TransportHeader, target: SocketAddr, client_id: &str) {
    let protocol = header.protocol.map(SessionProtocol::label).unwrap_or_default();
    let metrics = &inbound.shared.metrics;
    let labels = vec![
        label("session_protocol", protocol),
        label("target_port", inbound.labels.port(target)),
        label("target_name", inbound.target_name(header)),
        label("client_id", metrics.client_ids.value(client_id).to_owned()),
    ];
    metrics.count(&metrics.inbound_transport_header, &labels);
}
