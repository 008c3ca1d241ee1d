//! Answers to the requests of `weft.viz.v1` from what proxies count and see.
//!
//! Owns when proxies are asked: on demand, in rounds, with a deadline for each. Refuses to know who asks.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse, StatInboundRequest,
    StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapEvent, TapRequest,
};

use crate::fleet::Fleet;

/// Events of one tap, of all its proxies. Dropping it closes the taps.
pub type TapEvents = Pin<Box<dyn Stream<Item = TapEvent> + Send>>;

/// When and how proxies are asked.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The time between two scrapes of a proxy.
    pub interval: Duration,
    /// The time between the first two, which the first answer is made of.
    pub first: Duration,
    /// How many proxies are asked at a time.
    pub at_once: usize,
    /// The deadline of one proxy's answer.
    pub deadline: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            first: Duration::from_secs(1),
            at_once: 64,
            deadline: Duration::from_secs(5),
        }
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request is malformed; gRPC's INVALID_ARGUMENT.
    #[error("{field}: {message}")]
    Invalid {
        /// The field's name in `weft.viz.v1`.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The pods are not known, with the reason; gRPC's UNAVAILABLE.
    #[error("{0}")]
    Unavailable(String),
}

/// The engine. Clones share the window.
#[derive(Debug)]
pub struct Engine<F>(Arc<Inner<F>>);

#[derive(Debug)]
struct Inner<F> {
    fleet: F,
    config: Config,
}

impl<F> Clone for Engine<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: Fleet> Engine<F> {
    /// An engine that has not asked any proxy yet.
    pub fn new(fleet: F, config: Config) -> Self {
        Self(Arc::new(Inner { fleet, config }))
    }

    /// What it reads from.
    pub fn fleet(&self) -> &F {
        &self.0.fleet
    }

    /// Keeps the window of what was asked for current. A long task, which never ends; without it proxies are scraped by requests
    /// alone.
    pub async fn run(&self) {
        loop {
            tokio::time::sleep(self.0.config.interval).await;
        }
    }

    /// Golden metrics of workloads, Services or authorities.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat(&self, _request: StatRequest) -> Result<StatResponse, RequestError> {
        Err(not_yet())
    }

    /// Inbound traffic by Server and route.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat_inbound(&self, _request: StatInboundRequest) -> Result<StatInboundResponse, RequestError> {
        Err(not_yet())
    }

    /// Outbound traffic by Service, route and backend.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat_outbound(&self, _request: StatOutboundRequest) -> Result<StatOutboundResponse, RequestError> {
        Err(not_yet())
    }

    /// Traffic by the route of a ServiceProfile.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn routes(&self, _request: RoutesRequest) -> Result<RoutesResponse, RequestError> {
        Err(not_yet())
    }

    /// Who talks to whom, and as whom.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn edges(&self, _request: EdgesRequest) -> Result<EdgesResponse, RequestError> {
        Err(not_yet())
    }

    /// Golden metrics of one resource over time.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn series(&self, _request: SeriesRequest) -> Result<SeriesResponse, RequestError> {
        Err(not_yet())
    }

    /// Requests as they happen. A pod whose proxy cannot be tapped is an event; pods that come later are tapped too.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn tap(&self, _request: TapRequest) -> Result<TapEvents, RequestError> {
        Err(not_yet())
    }
}

fn not_yet() -> RequestError {
    RequestError::Unavailable("nothing is collected yet".to_owned())
}
