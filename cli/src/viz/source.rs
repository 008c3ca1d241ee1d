//! Who answers: the engine in this process, which asks the proxies itself.

use std::{pin::Pin, time::Duration};

use anyhow::{Result, anyhow};
use futures::Stream;
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, StatInboundRequest, StatInboundResponse,
    StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapEvent, TapRequest,
};
use weft_viz_core::{Config, Engine, RequestError};

use super::direct::Direct;
use crate::pod_network::PodNetwork;

/// How many proxies are asked at once: in a cluster each is a connection of the API server.
const AT_ONCE: usize = 16;

/// Live requests.
pub(crate) type Events = Pin<Box<dyn Stream<Item = Result<TapEvent>> + Send>>;

/// Who answers.
pub(crate) enum Source {
    /// The engine in this process.
    Direct(Engine<Direct>),
}

/// How a command wants proxies to be asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The time between the two scrapes of the first answer.
    pub(crate) first: Duration,
    /// The time between scrapes, for a command that repeats its request.
    pub(crate) every: Duration,
}

impl Source {
    /// The engine for the pods of a mesh.
    pub(crate) fn direct(network: PodNetwork, pace: Pace) -> Self {
        let config = Config { first: pace.first, interval: pace.every, at_once: AT_ONCE, ..Config::default() };
        Self::Direct(Engine::new(Direct::new(network), config))
    }

    /// Keeps what is asked for current while the command runs.
    pub(crate) fn keep_current(&self) {
        match self {
            Self::Direct(engine) => {
                let engine = engine.clone();
                tokio::spawn(async move { engine.run().await });
            }
        }
    }

    pub(crate) async fn stat(&self, request: StatRequest) -> Result<StatResponse> {
        match self {
            Self::Direct(engine) => engine.stat(request).await.map_err(explain),
        }
    }

    pub(crate) async fn stat_inbound(&self, request: StatInboundRequest) -> Result<StatInboundResponse> {
        match self {
            Self::Direct(engine) => engine.stat_inbound(request).await.map_err(explain),
        }
    }

    pub(crate) async fn stat_outbound(&self, request: StatOutboundRequest) -> Result<StatOutboundResponse> {
        match self {
            Self::Direct(engine) => engine.stat_outbound(request).await.map_err(explain),
        }
    }

    pub(crate) async fn routes(&self, request: RoutesRequest) -> Result<RoutesResponse> {
        match self {
            Self::Direct(engine) => engine.routes(request).await.map_err(explain),
        }
    }

    pub(crate) async fn edges(&self, request: EdgesRequest) -> Result<EdgesResponse> {
        match self {
            Self::Direct(engine) => engine.edges(request).await.map_err(explain),
        }
    }

    pub(crate) async fn tap(&self, request: TapRequest) -> Result<Events> {
        use futures::StreamExt as _;
        match self {
            Self::Direct(engine) => Ok(engine.tap(request).await.map_err(explain)?.map(Ok).boxed()),
        }
    }
}

fn explain(error: RequestError) -> anyhow::Error {
    anyhow!("{error}")
}
