//! Variables of linkerd2-proxy that have no effect here, so that the log can name those that are set.

use super::env::Env;

/// Names without their prefix, as `linkerd/app/src/env.rs` of linkerd2-proxy has them.
///
/// Two that every injector sets are not here: `CONTROL_LISTEN_ADDR` has no effect without `TAP_SVC_NAME` in linkerd2-proxy
/// either, and `DESTINATION_PROFILE_SUFFIXES` has one only for names outside of the cluster ([`EXTERNAL_PROFILES`]).
const WITHOUT_EFFECT: [&str; 37] = [
    "ACCESS_LOG",
    "DESTINATION_PROFILE_INITIAL_TIMEOUT",
    "DNS_MAX_TTL",
    "DNS_MIN_TTL",
    "INBOUND_CONNECT_EXP_BACKOFF_JITTER",
    "INBOUND_CONNECT_EXP_BACKOFF_MAX",
    "INBOUND_CONNECT_EXP_BACKOFF_MIN",
    "INBOUND_GATEWAY_SUFFIXES",
    "INBOUND_HTTP_FAILFAST_TIMEOUT",
    "INBOUND_HTTP_QUEUE_CAPACITY",
    "INBOUND_METRICS_AUTHORITY_LABELS",
    "INBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
    "INBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
    "INBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
    "INBOUND_SERVER_HTTP2_MAX_CONNECTION_AGE",
    "INBOUND_SERVER_HTTP2_MAX_FRAME_SIZE",
    "INBOUND_SERVER_HTTP2_MAX_HEADER_LIST_SIZE",
    "INBOUND_TCP_LISTEN_BACKLOG",
    "INGRESS_MODE",
    "OUTBOUND_CONNECT_EXP_BACKOFF_JITTER",
    "OUTBOUND_HTTP_QUEUE_CAPACITY",
    "OUTBOUND_METRICS_HOSTNAME_LABELS",
    "OUTBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
    "OUTBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
    "OUTBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
    "OUTBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS",
    "OUTBOUND_SERVER_HTTP2_MAX_CONNECTION_AGE",
    "OUTBOUND_SERVER_HTTP2_MAX_FRAME_SIZE",
    "OUTBOUND_SERVER_HTTP2_MAX_HEADER_LIST_SIZE",
    "OUTBOUND_TCP_FAILFAST_TIMEOUT",
    "OUTBOUND_TCP_LISTEN_BACKLOG",
    "OUTBOUND_TCP_QUEUE_CAPACITY",
    "TAP_SVC_NAME",
    "TRACE_ATTRIBUTES_PATH",
    "TRACE_COLLECTOR_SVC_ADDR",
    "TRACE_EXTRA_ATTRIBUTES",
    "TRACE_SERVICE_NAME",
];

/// Asks for profiles of all names, also those outside of the cluster, which this proxy does not ask for.
const EXTERNAL_PROFILES: (&str, &str) = ("DESTINATION_PROFILE_SUFFIXES", ".");

/// The full names of those that are set to something other than `false`, which is what this proxy does anyway.
pub(super) fn set_without_effect(env: &Env<'_>) -> Vec<String> {
    let is_set = |name: &&str| env.string(name).is_some_and(|value| !value.trim().eq_ignore_ascii_case("false"));
    let (suffixes, everything) = EXTERNAL_PROFILES;
    let external = env.string(suffixes).is_some_and(|value| value.split(',').any(|suffix| suffix.trim() == everything));
    let names = WITHOUT_EFFECT.into_iter().filter(is_set).chain(external.then_some(suffixes));
    names.map(|name| format!("LINKERD2_PROXY_{name}")).collect()
}
