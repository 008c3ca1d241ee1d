//! Destinations by name for the inbound side, which is a gateway: requests and connections of other clusters' proxies
//! take the way of the application's own, with its balancing, retries and mTLS.

use std::{net::SocketAddr, sync::Arc};

use http::{Request, Response, Version};
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Connection, ConnectionError, Outbound, http::ExchangeError, target::TargetError, tcp};
use crate::{
    destination::Name,
    http::{
        body::Body,
        informational::Informational,
        respond::{Failure, RequestKind},
        serve::{Closing, Reset},
        upgrade::Tunnel,
    },
    io::{Abort, Io},
};

/// A destination by name.
pub(crate) struct Named(Connection);

/// Why there is no response.
pub(crate) enum RelayError {
    /// A response is generated instead.
    Failure(Failure),
    /// The endpoint reset the request's stream, and so is the client's.
    Reset(Reset),
}

/// Why a connection was not forwarded to its end.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct RelayFailed(#[from] ConnectionError);

impl Outbound {
    /// The destination with this name; `None` if too many are in use.
    /// `peer` is the address of the client.
    pub(crate) fn named(&self, name: &Name, peer: SocketAddr) -> Option<Named> {
        let Self(worker) = self;
        let target = worker.named(name)?;
        // A request that has come through a gateway goes where the gateway was asked to send it.
        // The gateway's connection is the inbound side's.
        let (closing, tunnel) = (Closing::default(), Mutex::default());
        Some(Named(Connection { worker: Arc::clone(worker), target, peer, requests_choose: false, closing, tunnel }))
    }
}

impl Named {
    /// Sends a request to an endpoint; `informational` passes on what comes before the response. Returns the tunnel
    /// that it opens, too.
    pub(crate) async fn send(
        &self,
        request: Request<Body>,
        kind: RequestKind,
        informational: &Informational,
    ) -> Result<(Response<Body>, Option<Tunnel>), RelayError> {
        let Self(connection) = self;
        if let Err(error) = connection.target.ready().await {
            return Err(RelayError::Failure(match error {
                TargetError::Refused(_) => Failure::GatewayDomain,
                TargetError::Timeout(_) => Failure::DiscoveryTimeout,
            }));
        }
        let version = request.version();
        match connection.route(Box::new(request), kind, informational).await {
            Ok(response) => {
                let tunnel = connection.tunnel.lock().take();
                Ok((response.map(|body| Body::Boxed(body.boxed_unsync())), tunnel))
            }
            Err(ExchangeError::Reset(error)) if version == Version::HTTP_2 => Err(RelayError::Reset(Reset(error))),
            Err(ExchangeError::Reset(error)) => Err(RelayError::Failure(Failure::BadGateway(error.to_string()))),
            Err(ExchangeError::Failure(failure)) => Err(RelayError::Failure(failure)),
        }
    }

    /// Forwards a connection to an endpoint until both sides have ended.
    pub(crate) async fn forward<S>(&self, stream: Io<S>) -> Result<(), RelayFailed>
    where
        S: AsyncRead + AsyncWrite + Abort + Unpin,
    {
        let Self(connection) = self;
        let plan = connection.target.ready().await.map_err(ConnectionError::from)?;
        tcp::forward(connection, stream, &plan, None).await.map_err(ConnectionError::from)?;
        Ok(())
    }
}

impl RelayFailed {
    /// The value of the metric label `error`.
    pub(crate) fn label(&self) -> &'static str {
        match &self.0 {
            ConnectionError::Target(TargetError::Refused(_)) => "gateway domain invalid",
            other => other.label(),
        }
    }
}
