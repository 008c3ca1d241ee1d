//! One client's HTTP connection, served under its port's policy.

use std::{net::SocketAddr, sync::Arc};

use ::http::HeaderValue;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{HttpConnection, counters::Counters};
use crate::{
    http::serve::{Closing, HttpVersion, ServerSettings, serve as serve_http},
    inbound::{Inbound, error::ConnectionError, gateway::Route, profiles::LastNamed},
    io::Io,
    policy::{PortPolicy, authz::Client},
};

/// Serves a connection until the client ends it, or until the proxy drains and its requests are answered.
pub(in crate::inbound) async fn serve<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let served = connection(inbound, client, target, policy, None);
    run(inbound, stream, version, served).await
}

/// Serves a gateway's connection: requests that the policy of the proxy's own port admits go where `route` says.
pub(in crate::inbound) async fn serve_gateway<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    client: Client,
    own: SocketAddr,
    policy: PortPolicy,
    route: Route,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let served = connection(inbound, client, own, policy, Some(route));
    run(inbound, stream, version, served).await
}

fn connection(
    inbound: &Arc<Inbound>,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
    gateway: Option<Route>,
) -> HttpConnection {
    HttpConnection {
        client_id: client.identity().and_then(|id| HeaderValue::from_str(id.as_str()).ok()),
        target: inbound.targets.get(target),
        counters: Counters::default(),
        last_named: LastNamed::default(),
        closing: Closing::default(),
        inbound: Arc::clone(inbound),
        client,
        policy,
        gateway,
    }
}

async fn run<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    connection: HttpConnection,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let server = Arc::clone(&connection.policy.borrow().meta);
    let stream = stream.with_metrics(inbound.source(&connection.client, connection.target.addr, &server));
    let connection = Arc::new(connection);
    let settings = ServerSettings {
        http1_timeout: inbound.shared.config.http1_client_timeout,
        http2: inbound.shared.config.http2.inbound_server,
    };
    let served = Arc::clone(&connection);
    let answer = move |request| Arc::clone(&served).handle(request);
    let served = serve_http(stream, version, settings, &inbound.shared.drain, &connection.closing, answer).await;
    served.map_err(ConnectionError::Http)
}
