//! The engine, and a component that is asked for it, behind the one interface of `weft.viz.v1`: servers and the dashboard's JSON need not
//! know which of the two answers.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, transport::Channel};
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse, StatInboundRequest,
    StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapEvent, TapRequest,
    viz_client::VizClient, viz_server::Viz,
};

use crate::{engine::Engine, error::RequestError, fleet::Fleet};

/// Events of a tap as gRPC carries them.
pub type TapStream = Pin<Box<dyn Stream<Item = Result<TapEvent, Status>> + Send>>;

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Invalid { .. } => Self::invalid_argument(error.to_string()),
            RequestError::Unavailable(message) => Self::unavailable(message),
        }
    }
}

#[tonic::async_trait]
impl<F: Fleet> Viz for Engine<F> {
    type TapStream = TapStream;

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        Ok(Response::new(Self::stat(self, request.into_inner()).await?))
    }

    async fn stat_inbound(
        &self,
        request: Request<StatInboundRequest>,
    ) -> Result<Response<StatInboundResponse>, Status> {
        Ok(Response::new(Self::stat_inbound(self, request.into_inner()).await?))
    }

    async fn stat_outbound(
        &self,
        request: Request<StatOutboundRequest>,
    ) -> Result<Response<StatOutboundResponse>, Status> {
        Ok(Response::new(Self::stat_outbound(self, request.into_inner()).await?))
    }

    async fn routes(&self, request: Request<RoutesRequest>) -> Result<Response<RoutesResponse>, Status> {
        Ok(Response::new(Self::routes(self, request.into_inner()).await?))
    }

    async fn edges(&self, request: Request<EdgesRequest>) -> Result<Response<EdgesResponse>, Status> {
        Ok(Response::new(Self::edges(self, request.into_inner()).await?))
    }

    async fn series(&self, request: Request<SeriesRequest>) -> Result<Response<SeriesResponse>, Status> {
        Ok(Response::new(Self::series(self, request.into_inner()).await?))
    }

    async fn tap(&self, request: Request<TapRequest>) -> Result<Response<Self::TapStream>, Status> {
        let events = Self::tap(self, request.into_inner()).await?;
        Ok(Response::new(Box::pin(events.map(Ok))))
    }
}

/// A component's answers. `authorization` goes with every request.
#[derive(Clone, Debug)]
pub struct Relay {
    client: VizClient<Channel>,
    authorization: Option<tonic::metadata::AsciiMetadataValue>,
}

impl Relay {
    /// Relays to the component behind the channel, with this `authorization` if there is one.
    pub fn new(channel: Channel, authorization: Option<tonic::metadata::AsciiMetadataValue>) -> Self {
        Self { client: VizClient::new(channel), authorization }
    }

    fn with_authorization<T>(&self, request: Request<T>) -> Request<T> {
        let mut request = Request::new(request.into_inner());
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }
}

#[tonic::async_trait]
impl Viz for Relay {
    type TapStream = TapStream;

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        self.client.clone().stat(self.with_authorization(request)).await
    }

    async fn stat_inbound(
        &self,
        request: Request<StatInboundRequest>,
    ) -> Result<Response<StatInboundResponse>, Status> {
        self.client.clone().stat_inbound(self.with_authorization(request)).await
    }

    async fn stat_outbound(
        &self,
        request: Request<StatOutboundRequest>,
    ) -> Result<Response<StatOutboundResponse>, Status> {
        self.client.clone().stat_outbound(self.with_authorization(request)).await
    }

    async fn routes(&self, request: Request<RoutesRequest>) -> Result<Response<RoutesResponse>, Status> {
        self.client.clone().routes(self.with_authorization(request)).await
    }

    async fn edges(&self, request: Request<EdgesRequest>) -> Result<Response<EdgesResponse>, Status> {
        self.client.clone().edges(self.with_authorization(request)).await
    }

    async fn series(&self, request: Request<SeriesRequest>) -> Result<Response<SeriesResponse>, Status> {
        self.client.clone().series(self.with_authorization(request)).await
    }

    async fn tap(&self, request: Request<TapRequest>) -> Result<Response<Self::TapStream>, Status> {
        let events = self.client.clone().tap(self.with_authorization(request)).await?;
        Ok(events.map(|events| -> TapStream { Box::pin(events) }))
    }
}
