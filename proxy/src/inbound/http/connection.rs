//! One client's HTTP connection, served under its port's policy.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use ::http::HeaderValue;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{HttpConnection, counters::Counters};
use crate::{
    http::{
        serve::{Closing, HttpVersion, ServerSettings, serve as serve_http},
        upgrade,
    },
    inbound::{Inbound, Serving, error::ConnectionError, gateway::Route, profiles::LastNamed},
    io::{Abort, Io},
    policy::{PortPolicy, authz::Client},
};

/// Serves a connection until the client ends it, or until the proxy drains and its requests are answered.
pub(in crate::inbound) fn serve<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
) -> Serving
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    run(stream, version, connection(inbound, client, target, policy, None))
}

/// Serves a gateway's connection: requests that the policy of the proxy's own port admits go where `route` says.
pub(in crate::inbound) fn serve_gateway<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    client: Client,
    own: SocketAddr,
    policy: PortPolicy,
    route: Route,
) -> Serving
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    run(stream, version, connection(inbound, client, own, policy, Some(route)))
}

fn connection(
    inbound: &Arc<Inbound>,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
    gateway: Option<Route>,
) -> HttpConnection {
    HttpConnection {
        requests: inbound.limit.client(client.addr.ip()),
        client_id: client.identity().and_then(|id| HeaderValue::from_str(id.as_str()).ok()),
        target: inbound.targets.get(target),
        http2: OnceLock::new(),
        counters: Counters::default(),
        last_named: LastNamed::default(),
        closing: Closing::default(),
        tunnel: Mutex::default(),
        inbound: Arc::clone(inbound),
        client,
        policy,
        gateway,
    }
}

fn run<S>(stream: Io<S>, version: HttpVersion, connection: HttpConnection) -> Serving
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    let inbound = Arc::clone(&connection.inbound);
    let server = Arc::clone(&connection.policy.borrow().meta);
    let stream = stream.with_metrics(inbound.source(&connection.client, connection.target.addr, &server));
    let connection = Arc::new(connection);
    let settings = ServerSettings {
        http1_timeout: inbound.shared.config.http1_client_timeout,
        http2: inbound.shared.config.http2.inbound_server,
        windows: Arc::clone(&inbound.shared.windows),
    };
    let served = Arc::clone(&connection);
    let answer = move |request, informational| Arc::clone(&served).handle(request, informational);
    Box::pin(async move {
        let served = serve_http(stream, version, settings, &inbound.shared.drain, &connection.closing, answer).await;
        let tunnel = connection.tunnel.lock().take();
        // A tunnel needs no policy or profile, whose streams end when nothing uses them.
        drop(connection);
        upgrade::run(tunnel).await;
        served.map_err(ConnectionError::Http)
    })
}
