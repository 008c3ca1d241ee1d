//! `inbound_{http,grpc}_*`: requests that policy allows, by server and route.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    metrics::counter::Counter,
    registry::{Registry, Unit},
};
use weft_runtime::metrics::Family;

use super::{
    Counters, Labels, ProxyMetrics,
    histogram::{CoarseSeconds, FineSeconds, FrameBytes, Histogram},
    retain::InUse,
    stream::{StatusLabels, Statuses, StreamEnd},
};

/// The families of HTTP, or of gRPC.
#[derive(Clone, Debug, Default)]
pub(super) struct InboundFamilies {
    requests: Counters,
    statuses: Counters,
    request_duration: Family<Labels, Histogram<FineSeconds>>,
    response_duration: Family<Labels, Histogram<CoarseSeconds>>,
    request_frames: Family<Labels, Histogram<FrameBytes>>,
    response_frames: Family<Labels, Histogram<FrameBytes>>,
}

/// What is counted of requests on one route.
#[derive(Debug)]
pub(crate) struct InboundRouteMetrics {
    /// Requests.
    pub(crate) requests: Counter,
    /// Sizes of requests' frames.
    pub(crate) request_frames: Histogram<FrameBytes>,
    /// Sizes of responses' frames.
    pub(crate) response_frames: Histogram<FrameBytes>,
    statuses: Statuses,
    request_duration: Histogram<FineSeconds>,
    response_duration: Histogram<CoarseSeconds>,
    _in_use: Arc<InUse>,
}

impl InboundFamilies {
    /// Registers the families under `inbound_<protocol>`.
    pub(super) fn register(&self, registry: &mut Registry, prefix: &'static str) {
        let registry = registry.sub_registry_with_prefix(prefix);
        registry.register("requests", "Requests that policy allows", self.requests.clone());
        registry.register("statuses", "Completed responses", self.statuses.clone());
        registry.register_with_unit(
            "request_duration",
            "The time between a request's arrival and the end of its response",
            Unit::Seconds,
            self.request_duration.clone(),
        );
        registry.register_with_unit(
            "response_duration",
            "The time between the end of a request and the end of its response",
            Unit::Seconds,
            self.response_duration.clone(),
        );
        registry.register_with_unit(
            "request_frame_size",
            "Sizes of requests' data frames",
            Unit::Bytes,
            self.request_frames.clone(),
        );
        registry.register_with_unit(
            "response_frame_size",
            "Sizes of responses' data frames",
            Unit::Bytes,
            self.response_frames.clone(),
        );
    }
}

impl ProxyMetrics {
    /// The metrics of a server's route; `labels` are `parent_*` and `route_*`.
    pub(crate) fn inbound_route(&self, is_grpc: bool, labels: &Labels) -> InboundRouteMetrics {
        let (families, kind) = match is_grpc {
            true => (&self.inbound_grpc, StatusLabels::GrpcNumber),
            false => (&self.inbound_http, StatusLabels::HttpNumber),
        };
        let in_use = Arc::new(self.retained.enter(&families.requests, labels));
        InboundRouteMetrics {
            requests: in_use.series(&families.requests, labels),
            request_frames: in_use.series(&families.request_frames, labels),
            response_frames: in_use.series(&families.response_frames, labels),
            request_duration: in_use.series(&families.request_duration, labels),
            response_duration: in_use.series(&families.response_duration, labels),
            statuses: Statuses::new(&families.statuses, kind, labels, &in_use),
            _in_use: in_use,
        }
    }
}

impl InboundRouteMetrics {
    /// Counts a response's end: how long it took since the request began, and since it ended.
    pub(crate) fn ended(&self, end: StreamEnd, since_begin: Duration, since_end: Duration) {
        self.statuses.count(end);
        self.request_duration.observe(since_begin);
        self.response_duration.observe(since_end);
    }
}
