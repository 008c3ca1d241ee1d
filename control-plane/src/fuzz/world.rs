//! The services with an index of a few objects, called without a network.

use std::{collections::VecDeque, convert::Infallible, path::Path, vec};

use bytes::{BufMut, Bytes, BytesMut};
use clap::Parser;
use futures::{FutureExt, stream};
use http::Request;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use prost::Message;
use tokio::runtime::Runtime;
use tonic::{Code, Status, body::Body};
use weft_index::{Event, Index, MAX_UNDECLARED_PORTS, SharedIndex, Statistics};
use weft_k8s_api::manifest::{self, Object};
use weft_runtime::drain::Drain;

use crate::{
    args::{Args, Command, RunCommand},
    clusters::Clusters,
    destination::Destination,
    grpc,
    metrics::GrpcMetrics,
    policy::Policies,
    stream::Answering,
};

/// Streams that stay open: this number of clients at a time.
const STREAMS: usize = 32;
/// The most questions of a stream of a federated Service before it has something to say.
const QUESTIONS: usize = 3;
/// The most views of one sort: those of the streams, and as many without a client before they are removed, at least 64.
const MAX_VIEWS: usize = 2 * (STREAMS + 1);
/// The objects, one of each kind that is watched.
const OBJECTS: &str = include_str!("objects.yaml");

/// The services of the control plane that answer from an index.
pub(super) struct World {
    runtime: Runtime,
    index: SharedIndex,
    destination: Destination,
    policies: Policies,
    /// The newest streams.
    open: Mutex<VecDeque<Body>>,
    /// Without it, every stream would end.
    _drain: Drain,
}

/// The body of a request.
pub(super) type RequestBody = StreamBody<stream::Iter<vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// The bytes of a request: one that chooses, and the rest.
pub(super) struct Wire<'a> {
    choice: u8,
    rest: &'a [u8],
}

/// The beginning of an answer.
pub(super) struct Answer {
    pub(super) code: Code,
    /// The first frame, if there is something to say.
    pub(super) first: Option<Bytes>,
    body: Option<Body>,
}

impl<'a> Wire<'a> {
    /// `None` without the first byte.
    pub(super) fn new(bytes: &'a [u8]) -> Option<Self> {
        let (choice, rest) = bytes.split_first()?;
        Some(Self { choice: *choice, rest })
    }

    /// Which of two methods is called.
    pub(super) fn flag(&self) -> bool {
        self.choice & 1 != 0
    }

    /// Whether the rest comes with gRPC's header.
    fn is_framed(&self) -> bool {
        self.choice & 2 != 0
    }

    /// The rest as a message, if it is one.
    pub(super) fn message<M: Message + Default>(&self) -> Option<M> {
        if self.is_framed() { None } else { M::decode(self.rest).ok() }
    }

    /// Whether the header announces a message that is longer than any request.
    pub(super) fn is_too_long(&self) -> bool {
        let length = match (self.is_framed(), self.rest) {
            (true, [0, a, b, c, d, ..]) => u32::from_be_bytes([*a, *b, *c, *d]).into(),
            (true, _) => 0,
            (false, rest) => rest.len() as u64,
        };
        length > grpc::MAX_REQUEST_BYTES as u64
    }

    /// The body, in two parts.
    pub(super) fn body(&self) -> RequestBody {
        let mut whole = BytesMut::new();
        if !self.is_framed() {
            whole.put_u8(0);
            whole.put_u32(u32::try_from(self.rest.len()).expect("inputs are short"));
        }
        whole.extend_from_slice(self.rest);
        let mut second = whole.freeze();
        let first = second.split_to(usize::from(self.choice >> 2).min(second.len()));
        StreamBody::new(stream::iter(vec![Ok(Frame::data(first)), Ok(Frame::data(second))]))
    }
}

impl Answer {
    /// The messages of the first frame.
    pub(super) fn messages<M: Message + Default>(&self) -> Vec<M> {
        self.first.as_ref().map(super::messages).unwrap_or_default()
    }
}

impl World {
    /// With the defaults of the command line.
    pub(super) fn new() -> Self {
        weft_tls::install_crypto_provider();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let (RunCommand::Destination { cluster, destination, .. }, RunCommand::Policy { policy, .. }) =
            (command("destination"), command("policy"))
        else {
            panic!("another command was parsed")
        };
        let index = SharedIndex::start(cluster.cluster(Some(&destination), Some(&policy))).expect("a thread");
        let (drain, watch) = Drain::new();
        let answering = Answering { index: index.clone(), drain: watch, metrics: metrics() };
        let world = Self {
            destination: Destination {
                answering: answering.clone(),
                clusters: Clusters::none(),
                settings: destination.endpoint_settings(),
            },
            policies: Policies { answering, allow_l5d_request_headers: true },
            open: Mutex::default(),
            _drain: drain,
            index,
            runtime,
        };
        let events = objects().into_iter().map(|object| Event::Apply(Box::new(object)));
        world.apply(events.chain([Event::Synced]).collect());
        world
    }

    /// Calls the service that the path names, up to the first frame of the answer.
    pub(super) fn call(&self, request: Request<RequestBody>) -> Answer {
        self.runtime.block_on(async {
            let response = if request.uri().path().starts_with("/io.linkerd.proxy.destination.") {
                self.destination.clone().call(request).await
            } else {
                self.policies.clone().call(request).await
            };
            if let Some(status) = Status::from_header_map(response.headers()) {
                return Answer { code: status.code(), first: None, body: None };
            }
            let mut body = response.into_body();
            let mut frame = body.frame().now_or_never();
            for _ in 0..QUESTIONS {
                if frame.is_some() {
                    break;
                }
                // Questions are answered in their order: the stream's was before this one.
                self.index.ask(|_| ()).await.expect("the index answers");
                frame = body.frame().now_or_never();
            }
            let first = frame.flatten().map(|frame| frame.expect("answers do not fail"));
            Answer { code: Code::Ok, first: first.and_then(|frame| frame.into_data().ok()), body: Some(body) }
        })
    }

    /// Keeps a stream open, and ends the oldest one.
    pub(super) fn keep(&self, answer: Answer) {
        let mut open = self.open.lock();
        open.extend(answer.body);
        if open.len() > STREAMS {
            open.pop_front();
        }
    }

    /// What is kept does not depend on what clients ask for, but only on their number.
    pub(super) fn check_bounds(&self) {
        let undeclared = |index: &mut Index| {
            let statistics = index.statistics();
            let ports: std::collections::BTreeSet<_> =
                statistics.endpoints.keys().map(|labels| (labels.service.clone(), labels.port)).collect();
            let is_undeclared = |service: &weft_index::Key, port: u16| {
                index.service(service).is_some_and(|service| service.port(port).is_none())
            };
            let mut counts = std::collections::BTreeMap::<_, usize>::new();
            for (service, port) in ports.into_iter().filter(|(service, port)| is_undeclared(service, *port)) {
                assert_ne!(port, 0);
                *counts.entry(service).or_default() += 1;
            }
            (statistics, counts)
        };
        let (statistics, counts) = self.ask(undeclared);
        for (sort, views) in statistics.views {
            assert!(views.views <= MAX_VIEWS, "{sort}: {views:?}");
        }
        assert!(counts.values().all(|ports| *ports <= MAX_UNDECLARED_PORTS), "{counts:?}");
    }

    /// Numbers of objects and views.
    pub(super) fn statistics(&self) -> Statistics {
        self.ask(Index::statistics)
    }

    pub(super) fn index(&self) -> &SharedIndex {
        &self.index
    }

    /// Applies a batch.
    pub(super) fn apply(&self, events: Vec<Event>) {
        self.runtime.block_on(self.index.apply(events)).expect("the index is there");
    }

    fn ask<R: Send + 'static>(&self, question: impl FnOnce(&mut Index) -> R + Send + 'static) -> R {
        self.runtime.block_on(self.index.ask(question)).expect("the index answers")
    }
}

/// The objects that the index holds.
pub(super) fn objects() -> Vec<Object> {
    let read = manifest::parse(Path::new("objects.yaml"), OBJECTS);
    assert!(read.errors.is_empty() && read.ignored.is_empty(), "{:?} {:?}", read.errors, read.ignored);
    read.objects.into_iter().map(|located| located.object).collect()
}

/// Counters that nothing reads.
pub(super) fn metrics() -> GrpcMetrics {
    GrpcMetrics::new(&mut Registry::default())
}

fn command(name: &str) -> RunCommand {
    match Args::parse_from(["weft-control-plane", name]).command {
        Command::Run(command) => *command,
        Command::Completions { .. } => panic!("another command was parsed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When the clients of a whole mesh come back at once, hundreds of thousands of requests wait for their answers.
    const MAX_WAITING_BYTES: usize = 1536;

    #[test]
    fn a_request_that_waits_for_its_answer_takes_little_memory() {
        let world = World::new();
        let request = |path: &str| {
            let wire = Wire::new(&[0]).expect("a first byte");
            Request::post(path).body(wire.body()).expect("a valid path")
        };
        let get = world.destination.clone().call(request("/io.linkerd.proxy.destination.Destination/Get"));
        let watch = world.policies.clone().call(request("/io.linkerd.proxy.outbound.OutboundPolicies/Watch"));
        let sizes = [size_of_val(&get), size_of_val(&watch)];
        assert!(sizes.iter().all(|size| *size <= MAX_WAITING_BYTES), "{sizes:?}");
    }
}
