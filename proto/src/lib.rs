//! Weft's gRPC APIs: our own of the agent and of `weft-viz`, Linkerd's proxy API under one name, the SPIFFE Workload
//! API, and OpenTelemetry's export of spans.
//!
//! Owns the `.proto` files in `proto/`, the code generated from them, and conversions between message types and
//! the standard library's. Refuses to decide anything: a conversion either succeeds or says what is malformed.

/// The node agent's API, served on its unix socket: pods, traces, status.
pub mod agent {
    #![expect(missing_docs, reason = "generated; the documentation is in the .proto file")]
    #![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("weft.agent.v1");
}

/// Golden metrics, edges, routes and taps, as `weft-viz` serves them and the dashboard shows them.
pub mod viz {
    #![expect(missing_docs, reason = "generated; the documentation is in the .proto file")]
    #![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("weft.viz.v1");
}

/// The SPIFFE Workload API, as far as the proxy needs it.
pub mod spiffe {
    #![expect(missing_docs, reason = "generated; the documentation is in the .proto file")]
    #![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("_");
}

/// The OpenTelemetry protocol (OTLP), as far as the proxy needs it.
pub mod otlp {
    #![expect(missing_docs, reason = "generated; the documentation is in the .proto file")]
    #![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

/// Linkerd's proxy API, as published in the crate `linkerd2-proxy-api`.
pub use linkerd2_proxy_api as linkerd;

/// The definitions of the destination and policy APIs in [`linkerd`], as an encoded
/// `google.protobuf.FileDescriptorSet`: the names of fields and choices, which generated code does not have.
pub const LINKERD_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/linkerd.descriptors"));
