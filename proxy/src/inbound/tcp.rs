//! Connections that are forwarded as bytes: checked once, and monitored for policy changes while they live.

use std::{net::SocketAddr, sync::Arc};

use tokio::io::{AsyncRead, AsyncWrite};

use super::{Inbound, Serving, error::ConnectionError};
use crate::{
    io::{Abort, Io, copy_connections},
    metrics::Counters,
    policy::{PortPolicy, authz::Client, server::ServerPolicy},
    route::Meta,
};

/// Forwards a connection to the application until it ends or policy no longer allows it.
///
/// # Errors
/// When policy denies it; it is closed without a byte.
pub(super) fn forward<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    client: Client,
    target: SocketAddr,
    mut policy: PortPolicy,
) -> Result<Serving, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    let mut stream = admit(inbound, stream, &client, target, &mut policy)?;
    let inbound = Arc::clone(inbound);
    Ok(Box::pin(async move {
        let mut application = inbound.targets.get(target).connect(None).await?;
        tokio::select! {
            copied = copy_connections(&mut stream, &mut application) => copied.map_err(ConnectionError::Copy),
            revoked = revoked(&inbound, &mut policy, &client, target) => Err(revoked),
        }
    }))
}

/// Counts a connection, and denies it if policy does.
pub(super) fn admit<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    client: &Client,
    target: SocketAddr,
    policy: &mut PortPolicy,
) -> Result<Io<S>, ConnectionError> {
    let metrics = &inbound.shared.metrics;
    let known = policy.borrow_and_update().clone();
    let stream = stream.with_metrics(inbound.source(client, target, &known.meta));
    let Some(authz) = known.authorize_bytes(client) else {
        inbound.failures.denials.write(|suppressed| {
            tracing::info!(client.addr = %client.addr, client.id = client.identity().map(weft_tls::identity::Identity::as_str),
                orig_dst.addr = %target, server = &*known.meta.name, suppressed, "connection denied");
        });
        count(inbound, &metrics.inbound_tcp_deny, &known, None, client, target);
        return Err(ConnectionError::Denied);
    };
    count(inbound, &metrics.inbound_tcp_allow, &known, Some(authz), client, target);
    if authz.is_audit() {
        inbound.failures.audits.write(|suppressed| {
            tracing::info!(client.addr = %client.addr,
                client.id = client.identity().map(weft_tls::identity::Identity::as_str), orig_dst.addr = %target,
                server = &*known.meta.name, authz = &*authz.name, suppressed, "Connection allowed");
        });
    }
    Ok(stream)
}

/// Waits for a policy that denies the client, or that no longer forwards bytes.
pub(super) async fn revoked(
    inbound: &Inbound,
    policy: &mut PortPolicy,
    client: &Client,
    target: SocketAddr,
) -> ConnectionError {
    loop {
        if policy.changed().await.is_err() {
            // The policy can no longer change.
            return std::future::pending().await;
        }
        let changed = policy.borrow_and_update().clone();
        if changed.authorize_bytes(client).is_none() {
            let metrics = &inbound.shared.metrics;
            count(inbound, &metrics.inbound_tcp_terminate, &changed, None, client, target);
            return ConnectionError::Revoked;
        }
    }
}

fn count(
    inbound: &Inbound,
    family: &Counters,
    policy: &ServerPolicy,
    authz: Option<&Arc<Meta>>,
    client: &Client,
    target: SocketAddr,
) {
    let mut labels = inbound.labels.labels(target);
    inbound.append_server(&policy.meta, target, &mut labels);
    if let Some(authz) = authz {
        authz.append_labels("authz", &mut labels);
    }
    client.tls.append_labels(&inbound.shared.metrics.client_ids, &mut labels);
    inbound.shared.metrics.count(family, &labels);
}
