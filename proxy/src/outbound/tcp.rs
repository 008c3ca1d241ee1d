//! Opaque connections: route, endpoint, bytes both ways.

use std::{io, sync::Arc};

use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    Connection,
    backends::Resolved,
    balance::{InFlight, Search, SelectError},
    endpoint::{ConnectError, Endpoint},
    target::{RoutingPlan, find_opaque},
};
use crate::{
    discover::route::{Distribution, OpaqueRoute, RefuseOpaque},
    io::{Abort, Io, Stream, copy_connections},
    metrics::BalancerKind,
};

/// Why a connection was not forwarded to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    /// No route accepts it.
    #[error("no route accepts the connection")]
    NoRoute,
    /// Policy refuses it.
    #[error("policy refuses the connection: {}", .0.label())]
    Refused(RefuseOpaque),
    /// The route has no backend.
    #[error("the connection's route has no backend")]
    NoBackend,
    /// No endpoint was available, or may be used.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The endpoint cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Bytes could not be moved.
    #[error("copy between the application and the endpoint")]
    Copy(#[source] io::Error),
}

impl ForwardError {
    /// The value of the metric label `error`.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::NoRoute => "no route",
            Self::Refused(RefuseOpaque::Forbidden) => "forbidden",
            Self::Refused(RefuseOpaque::Invalid) => "invalid policy",
            Self::NoBackend => "invalid backend",
            Self::Select(SelectError::FailFast) => "failfast",
            Self::Select(SelectError::QueueFull) => "loadshed",
            Self::Select(SelectError::PlaintextRefused(_)) => "identity required",
            Self::Connect(error) => error.label(),
            Self::Copy(_) => "i/o",
        }
    }

    /// The value of the label `error` of the families of routes, one of Linkerd's.
    fn route_label(&self) -> &'static str {
        match self {
            Self::Refused(reason) => reason.label(),
            Self::NoBackend => "invalid_backend",
            Self::NoRoute | Self::Select(_) | Self::Connect(_) | Self::Copy(_) => "unexpected",
        }
    }
}

/// Forwards a connection until both sides have ended.
pub(super) async fn forward<S>(
    connection: &Connection,
    mut stream: Io<S>,
    plan: &RoutingPlan,
    server_name: Option<&str>,
) -> Result<(), ForwardError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin,
{
    let routes = plan.policy.opaque_routes().ok_or(ForwardError::NoRoute)?;
    let route = find_opaque(&routes, server_name).ok_or(ForwardError::NoRoute)?;
    let index = routes.iter().position(|known| std::ptr::eq(known, route)).unwrap_or(0);
    let metrics = plan.connections(&connection.worker.shared, || connection.target.labels(), index, server_name);
    let metrics = metrics.inspect(|metrics| metrics.opened());
    let result = forward_on(connection, plan, &mut stream, route).await;
    metrics.inspect(|metrics| metrics.closed(result.as_ref().err().map_or("", ForwardError::route_label)));
    result
}

async fn forward_on<S>(
    connection: &Connection,
    plan: &RoutingPlan,
    stream: &mut Io<S>,
    route: &OpaqueRoute,
) -> Result<(), ForwardError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin,
{
    if let Some(reason) = route.refuse {
        return Err(ForwardError::Refused(reason));
    }
    let (kind, queue) = (plan.policy.opaque_kind(), connection.worker.shared.config.outbound.tcp_queue);
    let search = Search::begin(queue.failfast_timeout);
    plan.settled(&route.backends, kind, search.deadline()).await;
    // Boxed, because it is larger than all that follows.
    let (mut server, endpoint, in_flight) = Box::pin(connect(plan, &route.backends, kind, search)).await?;
    tracing::debug!(orig_dst.addr = %connection.target.destination, dst.addr = %endpoint.info.addr, "forwarding");
    let copied = copy_connections(stream, &mut server).await;
    drop(in_flight);
    copied.map_err(ForwardError::Copy)
}

/// Connects to an endpoint of one of the backends. If one cannot be reached, another is tried while the search goes on.
async fn connect(
    plan: &RoutingPlan,
    backends: &Distribution,
    kind: BalancerKind,
    mut search: Search,
) -> Result<(Io<Stream>, Arc<Endpoint>, Option<InFlight>), ForwardError> {
    let mut picked = plan.pick(backends, kind, None);
    loop {
        let (_, backend) = picked.as_ref().ok_or(ForwardError::NoBackend)?;
        let balancer = match backend {
            Resolved::Forward(endpoint) => return Ok((endpoint.connect(None).await?, Arc::clone(endpoint), None)),
            Resolved::Balance(balancer) => balancer,
            Resolved::Missing => return Err(ForwardError::NoBackend),
        };
        let mut in_flight = balancer.select(search.deadline(), None).await?;
        let Some(balanced) = in_flight.balanced().cloned() else { return Err(SelectError::FailFast.into()) };
        let connected = balanced.endpoint.connect(None).await;
        balanced.connected(&connected);
        match connected {
            Ok(stream) => {
                // There is no response that says so.
                balanced.recovered();
                // Latency is the time to connect, and load is the number of connections.
                in_flight.measured();
                return Ok((stream, Arc::clone(&balanced.endpoint), Some(in_flight)));
            }
            Err(error) if error.is_local() => return Err(error.into()),
            Err(error) if !search.goes_on(|| plan.has_available(backends, kind, None)) => return Err(error.into()),
            // What is left of this backend may take as long to fail.
            Err(_) if !balancer.is_reachable() && plan.has_available(backends, kind, Some(backend)) => {
                picked = plan.pick(backends, kind, Some(backend));
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of what the function returns.
    fn size<'a, R>(_: fn(&'a Connection, Io<Stream>, &'a RoutingPlan, Option<&'a str>) -> R) -> usize {
        size_of::<R>()
    }

    #[test]
    fn a_connection_takes_little_room() {
        let bytes = size(forward::<Stream>);
        assert!(bytes <= 1024, "{bytes} bytes of each that is open");
    }
}
