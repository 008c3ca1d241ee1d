//! A collector on loopback, and exporters whose times suit tests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::{net::TcpListener, sync::watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status};
use weft_proto::otlp::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse, KeyValue, Span as OtlpSpan,
    any_value::Value,
    trace_service_server::{TraceService, TraceServiceServer},
};
use weft_runtime::drain;
use weft_tls::credentials::Credentials;

use super::{Exporter, TraceMetrics, Tracing, channel, export::Pace, resource};
use crate::{
    config::{StreamLimits, TraceConfig},
    control::{ControlClient, Trust},
    dns::Dns,
    metrics::Counters,
    testing::eventually,
};

/// Times with which a test need not wait.
pub(in crate::trace) const QUICK: Pace = Pace {
    interval: Duration::from_millis(20),
    timeout: Duration::from_millis(300),
    pauses: (Duration::from_millis(1), Duration::from_millis(5)),
};

/// How a collector answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Accept,
    /// Accepts all but this number of spans.
    Partly(i64),
    Refuse(Code),
    Never,
}

/// A collector. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Collector {
    answer: Arc<Mutex<Answer>>,
    /// What it was asked to take, accepted or not.
    asked: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

/// A span that a collector has.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// `service.name` of its process.
    pub(crate) service: String,
    pub(crate) span: OtlpSpan,
}

impl Collector {
    pub(crate) fn new(answer: Answer) -> Self {
        Self { answer: Arc::new(Mutex::new(answer)), asked: Arc::default() }
    }

    /// Serves in plaintext on loopback.
    pub(crate) async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        addr
    }

    pub(crate) fn answer(&self, answer: Answer) {
        *self.answer.lock() = answer;
    }

    /// How often it was asked.
    pub(crate) fn asked(&self) -> usize {
        self.asked.lock().len()
    }

    /// Bytes of the largest request.
    pub(crate) fn largest(&self) -> usize {
        self.asked.lock().iter().map(prost::Message::encoded_len).max().unwrap_or_default()
    }

    /// All spans.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        let asked = self.asked.lock();
        let resources = asked.iter().flat_map(|request| &request.resource_spans);
        resources
            .flat_map(|spans| {
                let service = text(&spans.resource.as_ref().unwrap().attributes, "service.name");
                let all = spans.scope_spans.iter().flat_map(|scope| scope.spans.clone());
                all.map(move |span| Seen { service: service.clone(), span })
            })
            .collect()
    }

    /// Waits until it has `count` spans.
    pub(crate) async fn has(&self, count: usize) -> Vec<Seen> {
        eventually("all spans are there", || self.spans().len() >= count).await;
        self.spans()
    }
}

impl Seen {
    /// An attribute's text; empty if there is none.
    pub(crate) fn attribute(&self, name: &str) -> String {
        text(&self.span.attributes, name)
    }
}

fn text(attributes: &[KeyValue], name: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == name);
    match found.and_then(|found| found.value.as_ref()).and_then(|value| value.value.clone()) {
        Some(Value::StringValue(value)) => value,
        _ => String::new(),
    }
}

/// Spans of a proxy with these settings, whose export runs as long as the test.
pub(crate) fn start(
    config: &TraceConfig,
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    drain: drain::Watch,
) -> Tracing {
    start_with(QUICK, config, credentials, drain, Dns::new(Counters::default()).unwrap())
}

/// The same with other times and another resolver.
pub(in crate::trace) fn start_with(
    pace: Pace,
    config: &TraceConfig,
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    drain: drain::Watch,
    dns: Dns,
) -> Tracing {
    let metrics = TraceMetrics::register(&mut prometheus_client::registry::Registry::default());
    let (tracing, spans) = channel(&metrics);
    let trust = Trust::Credentials(credentials);
    let client = ControlClient::new(config.collector.clone(), trust, dns, StreamLimits::default());
    tokio::spawn(Exporter::paced(pace, client, resource(config), spans).run(drain));
    tracing
}

impl Tracing {
    /// Attempts, answers, and spans that were exported, found no room, failed, or were rejected.
    pub(crate) fn counted(&self) -> [u64; 6] {
        let metrics = self.0.as_ref().expect("there is a collector").metrics();
        let TraceMetrics { streams, requests, exported, dropped_full, dropped_failed, dropped_rejected } = metrics;
        [streams, requests, exported, dropped_full, dropped_failed, dropped_rejected].map(Counter::get)
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.asked.lock().push(request.into_inner());
        let answer = *self.answer.lock();
        let rejected_spans = match answer {
            Answer::Accept => return Ok(Response::new(ExportTraceServiceResponse::default())),
            Answer::Never => std::future::pending().await,
            Answer::Refuse(code) => return Err(Status::new(code, "as the test wants")),
            Answer::Partly(rejected) => rejected,
        };
        let partial_success =
            Some(ExportTracePartialSuccess { rejected_spans, error_message: "as the test wants".to_owned() });
        Ok(Response::new(ExportTraceServiceResponse { partial_success }))
    }
}
