//! Asks a node agent what it counts and what the kernel decides, through the agent's own API.

use std::path::Path;

use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{
    Direction, Event, StatusRequest, StatusResponse, WatchRequest, status_client::StatusClient,
    trace_client::TraceClient,
};

/// The label of the verdict that sends a connection to the proxy.
pub const REDIRECT: &str = "redirect";

/// A connection to one agent process.
#[derive(Clone, Debug)]
pub struct Agent {
    channel: Channel,
}

impl Agent {
    /// Connects to the agent's socket.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(socket: &Path) -> Result<Self, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        Ok(Self { channel: endpoint.connect().await? })
    }

    /// How things stand.
    ///
    /// # Errors
    /// As the agent answers, or `UNAVAILABLE` when it died.
    pub async fn status(&self) -> Result<StatusResponse, Status> {
        Ok(StatusClient::new(self.channel.clone()).get(StatusRequest {}).await?.into_inner())
    }

    /// Verdicts from now on; the stream ends with the agent.
    ///
    /// # Errors
    /// As the agent answers, or `UNAVAILABLE` when it died.
    pub async fn watch(&self, request: WatchRequest) -> Result<Streaming<Event>, Status> {
        Ok(TraceClient::new(self.channel.clone()).watch(request).await?.into_inner())
    }
}

/// How often the kernel gave this verdict in this direction.
pub fn verdicts(status: &StatusResponse, direction: Direction, verdict: &str) -> u64 {
    status
        .verdicts
        .iter()
        .filter(|count| count.direction() == direction && count.verdict == verdict)
        .map(|count| count.count)
        .sum()
}
