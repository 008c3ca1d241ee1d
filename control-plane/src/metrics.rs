//! Metrics of the gRPC services, under the names of Go's gRPC middleware that Linkerd's dashboards query, of the index
//! and of watches.

mod index;
mod requests;
mod watches;

use std::{
    collections::HashMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::RwLock;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::Counter, family::Family, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tokio::time::Instant;
use tonic::Code;

pub(crate) use index::IndexMetrics;
pub(crate) use requests::RequestMetrics;
pub(crate) use watches::{Delivered, WatchMetrics};
use weft_index::SharedIndex;

/// Buckets of Linkerd's `grpc_server_handling_seconds`: streams live long.
const HANDLING_BUCKETS: [f64; 4] = [0.1, 1.0, 300.0, 3600.0];

/// Counters of all calls.
#[derive(Clone)]
pub(crate) struct GrpcMetrics(Arc<Families>);

struct Families {
    started: Family<Method, Counter>,
    received: Family<Method, Counter>,
    sent: Family<Method, Counter>,
    handled: Family<Handled, Counter>,
    seconds: Family<Method, Histogram, fn() -> Histogram>,
    /// Of each method that was called. A call has one pointer to it, however many counters there are.
    methods: RwLock<HashMap<Method, Arc<OfMethod>>>,
}

/// The counters of a method.
struct OfMethod {
    method: Method,
    started: Counter,
    received: Counter,
    sent: Counter,
    handled: Family<Handled, Counter>,
    seconds: Histogram,
}

/// A gRPC method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Method {
    /// Full name of the service.
    pub(crate) grpc_service: &'static str,
    /// Name of the method.
    pub(crate) grpc_method: &'static str,
    /// `unary` or `server_stream`.
    pub(crate) grpc_type: &'static str,
}

impl Method {
    /// The method that requests of this path call.
    pub(crate) fn of(path: &str, methods: &[Self]) -> Option<Self> {
        let called = path.strip_prefix('/').and_then(|path| path.split_once('/'))?;
        methods.iter().find(|method| called == (method.grpc_service, method.grpc_method)).copied()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Handled {
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_type: &'static str,
    grpc_code: &'static str,
}

impl GrpcMetrics {
    /// Registers the counters.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(HANDLING_BUCKETS);
        let families = Families {
            started: Family::default(),
            received: Family::default(),
            sent: Family::default(),
            handled: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            methods: RwLock::default(),
        };
        registry.register("grpc_server_started", "RPCs started", families.started.clone());
        registry.register("grpc_server_msg_received", "Messages received", families.received.clone());
        registry.register("grpc_server_msg_sent", "Messages sent", families.sent.clone());
        registry.register("grpc_server_handled", "RPCs completed, by status code", families.handled.clone());
        registry.register("grpc_server_handling_seconds", "Duration of RPCs", families.seconds.clone());
        Self(Arc::new(families))
    }

    /// Counts a call from here until the result is ended or dropped, and its request: every method has one message.
    pub(crate) fn start(&self, method: Method) -> Call {
        let metrics = self.of(method);
        metrics.started.inc();
        metrics.received.inc();
        Call { metrics, since: Instant::now(), code: Code::Cancelled }
    }

    fn of(&self, method: Method) -> Arc<OfMethod> {
        let Families { started, received, sent, handled, seconds, methods } = &*self.0;
        if let Some(known) = methods.read().get(&method) {
            return known.clone();
        }
        let of_method = || OfMethod {
            method,
            started: started.get_or_create_owned(&method),
            received: received.get_or_create_owned(&method),
            sent: sent.get_or_create_owned(&method),
            handled: handled.clone(),
            seconds: seconds.get_or_create_owned(&method),
        };
        methods.write().entry(method).or_insert_with(|| Arc::new(of_method())).clone()
    }
}

/// A call in progress. Dropped without [`Call::end`], it counts as cancelled by the client.
pub(crate) struct Call {
    metrics: Arc<OfMethod>,
    since: Instant,
    code: Code,
}

impl Call {
    /// Counts messages to the client.
    pub(crate) fn sent(&self, messages: u64) {
        self.metrics.sent.inc_by(messages);
    }

    /// Ends the call with a status code.
    pub(crate) fn end(&mut self, code: Code) {
        self.code = code;
    }

    /// Ends a unary call with its answer or its status code.
    pub(crate) fn end_with<T>(mut self, result: Result<T, tonic::Status>) -> Result<T, tonic::Status> {
        self.code = result.as_ref().err().map_or(Code::Ok, tonic::Status::code);
        self.sent(result.is_ok().into());
        result
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Method { grpc_service, grpc_method, grpc_type } = self.metrics.method;
        let handled = Handled { grpc_service, grpc_method, grpc_type, grpc_code: label(self.code) };
        self.metrics.handled.get_or_create(&handled).inc();
        self.metrics.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

/// Go's spelling of status codes.
fn label(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

/// `issuer_cert_ttl_seconds`: seconds until the issuer's chain expires, computed at each scrape; 0 once it has.
pub(crate) struct IssuerTtl(pub(crate) Arc<RwLock<SystemTime>>);

impl fmt::Debug for IssuerTtl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IssuerTtl")
    }
}

impl Collector for IssuerTtl {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let left = self.0.read().duration_since(SystemTime::now()).unwrap_or(Duration::ZERO);
        let gauge = ConstGauge::new(left.as_secs_f64());
        let encoder = encoder.encode_descriptor(
            "issuer_cert_ttl_seconds",
            "Seconds until the issuer expires",
            None,
            gauge.metric_type(),
        )?;
        gauge.encode(encoder)
    }
}

/// `weft_policy_ineffective_authorization_policies`: number of policies that grant nothing whichever Servers
/// exist; the log has the reasons.
pub(crate) struct IneffectivePolicies(pub(crate) SharedIndex);

impl fmt::Debug for IneffectivePolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IneffectivePolicies")
    }
}

impl Collector for IneffectivePolicies {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let count = u64::try_from(self.0.ineffective_policies()).unwrap_or(u64::MAX);
        let gauge = ConstGauge::new(count);
        let encoder = encoder.encode_descriptor(
            "weft_policy_ineffective_authorization_policies",
            "AuthorizationPolicies that grant nothing because of their target or of what they require",
            None,
            gauge.metric_type(),
        )?;
        gauge.encode(encoder)
    }
}
