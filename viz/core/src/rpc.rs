//! The engine behind the interface of `weft.viz.v1`, as a [`Relay`](crate::relay::Relay) to a component is: servers and
//! the dashboard's JSON need not know which of the two answers.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse, StatInboundRequest,
    StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapEvent, TapRequest,
    viz_server::Viz,
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
