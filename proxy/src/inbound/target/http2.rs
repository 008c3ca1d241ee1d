//! HTTP/2 to the application: the connections that serve one client's connection.
//!
//! Owns that clients share none of them: an application that ends a connection, because of unread messages or of a
//! flood, ends no other client's requests, as if each client had connected to it directly.

use std::{
    io,
    sync::{Arc, Weak},
};

use ::http::{Request, Response};
use bytes::Bytes;

use super::{ApplicationPort, ConnectError, STALE_ATTEMPTS, SendError};
use crate::{
    http::{
        body::{Body, H2Body},
        informational::Informational,
        shared_connections::{GetError, SharedConnections, StreamPermit},
    },
    in_flight::ClientShare,
    outbound::h2,
};

type Sender = ::h2::client::SendRequest<Bytes>;

/// The connections to one port for the requests of one client's connection: one, and more while those are full.
pub(in crate::inbound) struct ClientHttp2 {
    port: Arc<ApplicationPort>,
    /// Those of the client in flight.
    requests: ClientShare,
    connections: SharedConnections<ConnectError>,
}

impl ClientHttp2 {
    pub(super) fn new(port: Arc<ApplicationPort>, requests: ClientShare) -> Self {
        let connections = SharedConnections::new(port.shared.config.http2.windows);
        Self { port, requests, connections }
    }

    /// Sends a request over one of the connections.
    ///
    /// # Errors
    /// See [`SendError`].
    pub(in crate::inbound) async fn send(
        self: &Arc<Self>,
        mut request: Box<Request<Body>>,
        informational: &Informational,
    ) -> Result<Response<H2Body>, SendError> {
        for _ in 0..STALE_ATTEMPTS {
            let (sender, permit) = self.sender().await?;
            match h2::send_over(sender, permit, request, informational).await {
                Ok(response) => return Ok(response),
                Err(h2::SendError::Failed { error, .. }) => return Err(SendError::Http2(error)),
                Err(h2::SendError::Unsent(unsent, _)) => request = unsent,
            }
        }
        Err(SendError::Refused)
    }

    async fn sender(self: &Arc<Self>) -> Result<(Sender, StreamPermit), SendError> {
        let attempt = |_| {
            let client = Arc::clone(self);
            async move { client.connect().await }
        };
        self.connections.get(attempt).await.map_err(|error| match error {
            GetError::Connect(error) => error.into(),
            GetError::Http2(error) => SendError::Http2(error),
        })
    }

    #[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
    async fn connect(self: &Arc<Self>) -> Result<Sender, ConnectError> {
        let stream = self.port.connect(Some(&self.requests)).await?;
        let addr = self.port.addr;
        let initial_streams = self.connections.initial_streams(h2::SERVER_STREAMS);
        let shaken = h2::handshake(stream, self.port.shared.config.http2.windows, initial_streams).await;
        let (sender, connection, uncork) =
            shaken.map_err(|error| ConnectError::Io { addr, source: io::Error::other(error) })?;
        let owner: Weak<Self> = Arc::downgrade(self);
        tokio::spawn(async move {
            if let Err(error) = uncork.drive(connection).await {
                tracing::debug!(%error, dst.addr = %addr, "HTTP/2 connection to the application ended");
            }
            if let Some(owner) = owner.upgrade() {
                owner.connections.drop_unusable();
            }
        });
        Ok(sender)
    }

    /// Drops connections that are not needed any more.
    pub(super) fn purge(&self) {
        self.connections.purge();
    }
}
