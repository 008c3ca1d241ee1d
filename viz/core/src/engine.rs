//! Answers to the requests of `weft.viz.v1` from what proxies count and see.
//!
//! Owns when proxies are asked: on demand, in rounds, with a deadline for each. Refuses to know who asks.

use std::{sync::Arc, time::Duration};

use weft_proto::viz::{
    EdgesRequest, EdgesResponse, Resource, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse,
    StatInboundRequest, StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse,
    TapRequest,
};

use crate::{
    answer::{self, Side},
    collect::{Collector, Config, View},
    error::RequestError,
    fleet::Fleet,
    tap::{self, TapEvents},
    target::{Kind, Pods, Target},
};

/// The engine. Clones share the window.
#[derive(Debug)]
pub struct Engine<F>(Arc<Collector<F>>);

impl<F> Clone for Engine<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: Fleet> Engine<F> {
    /// An engine that has not asked any proxy yet.
    pub fn new(fleet: F, config: Config) -> Self {
        Self(Arc::new(Collector::new(fleet, config)))
    }

    /// What it reads from.
    pub fn fleet(&self) -> &F {
        &self.0.fleet
    }

    /// Keeps the window of what was asked for current. A long task, which never ends; without it proxies are scraped by
    /// requests alone.
    pub async fn run(&self) {
        self.0.run().await;
    }

    /// Golden metrics of workloads, Services or authorities.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat(&self, request: StatRequest) -> Result<StatResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read("resource", request.resource, &request.selector)?;
        let interner = self.0.interner();
        let (view, to, from) = match (request.to, request.from) {
            (Some(_), Some(_)) => return Err(invalid("from", "excludes to")),
            (Some(to), None) => {
                if !target.kind.has_pods() {
                    return Err(invalid("resource", "has no pods, which clients of `to` are: name a workload"));
                }
                (self.0.look(&target.namespace).await?, Some(Target::read("to", Some(to), "")?), None)
            }
            (None, Some(from)) => {
                let from = Target::read_with_pods("from", Some(from), "")?;
                (self.0.look(&from.namespace).await?, None, Some(from))
            }
            (None, None) if target.kind == Kind::Service => {
                (self.0.look_everywhere(&target.namespace).await?, None, None)
            }
            (None, None) => (self.0.look(&target.namespace).await?, None, None),
        };
        let side = match (&to, &from) {
            (Some(to), _) => Side::To(to),
            (_, Some(from)) => Side::From(from),
            _ if target.kind == Kind::Service => Side::Clients,
            _ => Side::Server,
        };
        let others = to.as_ref().map(|to| &to.namespace).or(from.as_ref().map(|_| &target.namespace));
        let known = self.known(&view, others).await?;
        Ok(answer::stat(&view, &target, side, &known, window, interner))
    }

    /// Inbound traffic by Server and route.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat_inbound(&self, request: StatInboundRequest) -> Result<StatInboundResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read_with_pods("resource", request.resource, &request.selector)?;
        let view = self.0.look(&target.namespace).await?;
        Ok(answer::inbound(&view, &target, window, self.0.interner()))
    }

    /// Outbound traffic by Service, route and backend.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn stat_outbound(&self, request: StatOutboundRequest) -> Result<StatOutboundResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read_with_pods("resource", request.resource, &request.selector)?;
        let to = parent(request.to)?;
        let view = self.0.look(&target.namespace).await?;
        Ok(answer::outbound(&view, &target, to.as_ref(), window, self.0.interner()))
    }

    /// Traffic by the route of a ServiceProfile.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn routes(&self, request: RoutesRequest) -> Result<RoutesResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read("resource", request.resource, &request.selector)?;
        let to = parent(request.to)?;
        let view = self.0.look(&target.namespace).await?;
        Ok(answer::routes(&view, &target, to.as_ref(), window, self.0.interner()))
    }

    /// Edges: which workloads call which, with the identities of both.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn edges(&self, request: EdgesRequest) -> Result<EdgesResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read_with_pods("resource", request.resource, "")?;
        let view = self.0.look(&target.namespace).await?;
        let known = self.known(&view, None).await?;
        Ok(answer::edges(&view, &target, &known, window, self.0.interner()))
    }

    /// Golden metrics of one resource over time.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn series(&self, request: SeriesRequest) -> Result<SeriesResponse, RequestError> {
        let window = answer::window(request.window_seconds)?;
        let target = Target::read("resource", request.resource, "")?;
        if target.kind == Kind::Authority {
            return Err(invalid("resource", "authorities have no series"));
        }
        let interval = self.0.config.interval;
        let step = match request.step_seconds {
            0 => interval.max(window / answer::MOST_POINTS),
            seconds => Duration::from_secs(seconds.into()),
        };
        let view = match target.kind {
            Kind::Service => self.0.look_everywhere(&target.namespace).await?,
            _ => self.0.look(&target.namespace).await?,
        };
        let known = self.known(&view, None).await?;
        Ok(answer::series(&view, &target, &known, (window, step.min(window)), self.0.interner()))
    }

    /// Requests as they happen. A pod whose proxy cannot be tapped is an event; pods that come later are tapped too.
    ///
    /// # Errors
    /// The request is malformed, or the pods are not known.
    pub async fn tap(&self, request: TapRequest) -> Result<TapEvents, RequestError> {
        tap::open(Arc::clone(&self.0), request).await
    }

    /// The pods that labels of destinations may name: those of the view and those of another namespace.
    async fn known(&self, view: &View, namespace: Option<&String>) -> Result<Pods, RequestError> {
        let mut pods = view.pods.clone();
        if let Some(namespace) = namespace {
            pods.extend(self.0.pods(namespace).await?);
        }
        Ok(Pods::new(pods, view.proxies.iter().map(|proxy| Arc::clone(&proxy.state().pod))))
    }
}

/// The destination of a route: a Service or an authority.
fn parent(to: Option<Resource>) -> Result<Option<Target>, RequestError> {
    let Some(to) = to else { return Ok(None) };
    let to = Target::read("to", Some(to), "")?;
    if to.kind.has_pods() {
        return Err(invalid("to", "routes lead to Services and authorities"));
    }
    Ok(Some(to))
}

fn invalid(field: &'static str, message: &str) -> RequestError {
    RequestError::Invalid { field, message: message.to_owned() }
}
