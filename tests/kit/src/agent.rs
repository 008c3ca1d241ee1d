//! Queries a node agent's counters and the kernel's verdicts, and enrols pods, through the agent's own API.

use std::path::Path;

use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{
    Direction, EnrolRequest, EnrolResponse, Event, ExplainRequest, ExplainResponse, PodRef, StatusRequest,
    StatusResponse, WatchRequest, WithdrawRequest, pods_client::PodsClient, status_client::StatusClient,
    trace_client::TraceClient,
};

/// The label of the verdict that redirects a connection to the proxy.
pub const REDIRECT: &str = "redirect";

/// A connection to one agent process. Every call fails with the agent's error, or with `UNAVAILABLE` when it died.
#[derive(Clone, Debug)]
pub struct Agent {
    channel: Channel,
}

impl Agent {
    /// Connects to the agent's socket.
    ///
    /// # Errors
    /// No process listens there.
    pub async fn connect(socket: &Path) -> Result<Self, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        Ok(Self { channel: endpoint.connect().await? })
    }

    /// Its pods and counters.
    ///
    /// # Errors
    /// See [`Agent`].
    pub async fn status(&self) -> Result<StatusResponse, Status> {
        Ok(StatusClient::new(self.channel.clone()).get(StatusRequest {}).await?.into_inner())
    }

    /// Verdicts from now on; the stream ends with the agent.
    ///
    /// # Errors
    /// See [`Agent`].
    pub async fn watch(&self, request: WatchRequest) -> Result<Streaming<Event>, Status> {
        Ok(TraceClient::new(self.channel.clone()).watch(request).await?.into_inner())
    }

    /// The kernel's decision about a hypothetical connection, with its reason.
    ///
    /// # Errors
    /// See [`Agent`].
    pub async fn explain(&self, request: ExplainRequest) -> Result<ExplainResponse, Status> {
        Ok(TraceClient::new(self.channel.clone()).explain(request).await?.into_inner())
    }

    /// Enrols a pod; returns when both directions are in force.
    ///
    /// # Errors
    /// See [`Agent`].
    pub async fn enrol(&self, request: EnrolRequest) -> Result<EnrolResponse, Status> {
        Ok(PodsClient::new(self.channel.clone()).enrol(request).await?.into_inner())
    }

    /// Withdraws a pod.
    ///
    /// # Errors
    /// See [`Agent`].
    pub async fn withdraw(&self, pod: PodRef) -> Result<(), Status> {
        PodsClient::new(self.channel.clone()).withdraw(WithdrawRequest { pod: Some(pod) }).await.map(drop)
    }
}

/// The count of this verdict in this direction.
pub fn verdicts(status: &StatusResponse, direction: Direction, verdict: &str) -> u64 {
    status
        .verdicts
        .iter()
        .filter(|count| count.direction() == direction && count.verdict == verdict)
        .map(|count| count.count)
        .sum()
}
