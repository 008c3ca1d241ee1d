//! Who answers questions about requests: the component, where the cluster has one, else the engine in this process,
//! which asks the proxies itself. The verbs and `weft dashboard` choose here.

use std::{pin::Pin, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use futures::{Stream, StreamExt as _};
use http::Response;
use tonic::{Code, Request, Status};
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, StatInboundRequest, StatInboundResponse,
    StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapEvent, TapRequest, viz_server::Viz,
};
use weft_viz_core::{
    Config, Engine,
    fleet::{Fleet as _, Pod},
    page::{self, Body},
    relay::Relay,
    rpc::TapStream,
};

use super::direct::Direct;
use crate::{
    component::{self, Tokens},
    output::progress,
    pod_network::PodNetwork,
    target::MeshArgs,
};

/// How many proxies are asked at once: in a cluster each is a connection of the API server.
const AT_ONCE: usize = 16;

/// Live requests.
pub(crate) type Events = Pin<Box<dyn Stream<Item = Result<TapEvent>> + Send>>;

/// Which mesh, and who answers.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SourceArgs {
    #[command(flatten)]
    pub(crate) mesh: MeshArgs,
    /// Read the proxies by port-forward, also where weft-viz is installed
    #[arg(long)]
    direct: bool,
}

/// Who answers.
pub(crate) enum Source {
    /// The engine in this process.
    Direct(Engine<Direct>),
    /// The component, and the pods as this person sees them.
    Component(Relay<Tokens>, Box<Direct>),
}

/// How a command wants proxies to be asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The time between the two scrapes of the first answer.
    pub(crate) first: Duration,
    /// The time between scrapes, for a command that repeats its request.
    pub(crate) every: Duration,
}

impl SourceArgs {
    /// Chooses who answers. The pace is that of the engine in this process; the component has its own.
    ///
    /// # Errors
    /// The component is there, and this person cannot ask it: the error says why, and that `--direct` does without it.
    pub(crate) async fn open(&self, network: PodNetwork, pace: Pace) -> Result<Source> {
        if let PodNetwork::Cluster(_) = &network
            && !self.direct
        {
            let found = component::find(&self.mesh.cluster);
            let found = progress::during("the API server, and weft-viz", found).await;
            if let Some(found) = found.context("weft-viz cannot be asked (--direct reads the proxies itself)")? {
                let relay = Relay::new(found.channel, found.authorization, found.tokens);
                return Ok(Source::Component(relay, Box::new(Direct::new(network))));
            }
        }
        let config = Config { first: pace.first, interval: pace.every, at_once: AT_ONCE, ..Config::default() };
        Ok(Source::Direct(Engine::new(Direct::new(network), config)))
    }
}

impl Source {
    /// For people.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Direct(_) => "read from the proxies by this command",
            Self::Component(..) => "answered by weft-viz",
        }
    }

    /// Keeps what is asked for current; never ends. The component does so itself.
    pub(crate) async fn run(&self) {
        match self {
            Self::Direct(engine) => engine.run().await,
            Self::Component(..) => std::future::pending().await,
        }
    }

    /// As [`Self::run`], while the command runs.
    pub(crate) fn keep_current(&self) {
        if let Self::Direct(engine) = self {
            let engine = engine.clone();
            tokio::spawn(async move { engine.run().await });
        }
    }

    /// The pods, with the rights of this person.
    pub(crate) async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        match self {
            Self::Direct(engine) => engine.fleet().pods(namespace).await,
            Self::Component(_, fleet) => fleet.pods(namespace).await,
        }
    }

    /// Answers a question of the dashboard's page; `None` if it is none of `weft.viz.v1`.
    pub(crate) async fn question(&self, name: &str, content: &[u8]) -> Option<Response<Body>> {
        page::question(self.viz(), name, content).await
    }

    pub(crate) async fn stat(&self, request: StatRequest) -> Result<StatResponse> {
        self.answer(self.viz().stat(Request::new(request)).await)
    }

    pub(crate) async fn stat_inbound(&self, request: StatInboundRequest) -> Result<StatInboundResponse> {
        self.answer(self.viz().stat_inbound(Request::new(request)).await)
    }

    pub(crate) async fn stat_outbound(&self, request: StatOutboundRequest) -> Result<StatOutboundResponse> {
        self.answer(self.viz().stat_outbound(Request::new(request)).await)
    }

    pub(crate) async fn routes(&self, request: RoutesRequest) -> Result<RoutesResponse> {
        self.answer(self.viz().routes(Request::new(request)).await)
    }

    pub(crate) async fn edges(&self, request: EdgesRequest) -> Result<EdgesResponse> {
        self.answer(self.viz().edges(Request::new(request)).await)
    }

    /// Live requests, until their reader goes. They outlive the component's pod.
    pub(crate) async fn tap(&self, request: TapRequest) -> Result<Events> {
        let opened = self.viz().tap(Request::new(request));
        let events = self.answer(progress::during("the pods to tap", opened).await)?;
        let is_component = self.is_component();
        Ok(events.map(move |event| event.map_err(|status| explain(&status, is_component))).boxed())
    }

    fn viz(&self) -> &dyn Viz<TapStream = TapStream> {
        match self {
            Self::Direct(engine) => engine,
            Self::Component(relay, _) => relay,
        }
    }

    fn is_component(&self) -> bool {
        matches!(self, Self::Component(..))
    }

    fn answer<A>(&self, answer: Result<tonic::Response<A>, Status>) -> Result<A> {
        answer.map(tonic::Response::into_inner).map_err(|status| explain(&status, self.is_component()))
    }
}

/// A refusal for people. What the component refuses for its own reasons, the proxies may still answer.
fn explain(status: &Status, is_component: bool) -> anyhow::Error {
    let message = status.message();
    if !is_component || status.code() == Code::InvalidArgument {
        return anyhow!("{message}");
    }
    let hint = "--direct reads the proxies itself, with your right to pods/portforward";
    match status.code() {
        // It names the right that is missing.
        Code::PermissionDenied => anyhow!("weft-viz refused: {message}; {hint}"),
        Code::Unauthenticated => anyhow!("weft-viz cannot authenticate you: {message}; {hint}"),
        _ => anyhow!("weft-viz: {message}; {hint}"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        source: SourceArgs,
    }

    #[test]
    fn the_component_is_left_out_where_a_person_says_so() {
        let parse = |args: &[&str]| Cli::try_parse_from(std::iter::once("weft").chain(args.iter().copied()));
        assert!(!parse(&["--context", "a"]).unwrap().source.direct);
        assert!(parse(&["--context", "a", "--direct"]).unwrap().source.direct);
    }

    #[test]
    fn a_refusal_of_the_component_names_what_is_missing_and_the_other_way() {
        let right = "jane may not get stats.viz.weft.io in namespace shop";
        for status in [Status::permission_denied(right), Status::unauthenticated(right), Status::unavailable(right)] {
            let text = explain(&status, true).to_string();
            assert!(text.contains("weft-viz") && text.contains(right) && text.contains("--direct"), "{text}");
            assert_eq!(explain(&status, false).to_string(), right);
        }
        // What is wrong with a request is wrong for both.
        assert_eq!(explain(&Status::invalid_argument("window_seconds: x"), true).to_string(), "window_seconds: x");
    }
}
