//! Documentation of every variable that has an effect: for `--help` and docs/configuration.md. Tests compare it with
//! what [`super::Config::parse`] reads, and with the table of Linkerd's variables.

use std::fmt::Write as _;

use super::{
    env::{OWN_PREFIX, PREFIX},
    ignored,
};

/// A variable that has an effect.
pub(super) struct Variable {
    /// Without [`PREFIX`], if it is Linkerd's.
    pub(super) name: &'static str,
    default: &'static str,
    meaning: &'static str,
}

/// Linkerd's variables about one thing.
pub(super) struct Group {
    title: &'static str,
    pub(super) variables: &'static [Variable],
}

impl Variable {
    const fn new(name: &'static str, default: &'static str, meaning: &'static str) -> Self {
        Self { name, default, meaning }
    }
}

/// Linkerd's.
pub(super) const GROUPS: &[Group] = &[
    Group {
        title: "Identity",
        variables: &[
            Variable::new(
                "IDENTITY_LOCAL_NAME",
                "required, or `IDENTITY_SERVER_ID`",
                "this workload's identity, a DNS name",
            ),
            Variable::new(
                "IDENTITY_SERVER_ID",
                "`IDENTITY_LOCAL_NAME`",
                "this workload's identity, a DNS name or a URI; takes precedence over `IDENTITY_LOCAL_NAME`",
            ),
            Variable::new(
                "IDENTITY_SERVER_NAME",
                "the identity, if it is a DNS name",
                "the TLS server name with which clients ask for this proxy",
            ),
            Variable::new(
                "IDENTITY_TRUST_ANCHORS",
                "required",
                "the mesh's trust anchors, PEM; read once: other anchors need a restart. A Workload API adds those of its bundle",
            ),
            Variable::new(
                "IDENTITY_DIR",
                "required",
                "directory of `key.p8` and `csr.der`, which are created when missing",
            ),
            Variable::new("IDENTITY_TOKEN_FILE", "required", "file of the ServiceAccount token, read at every attempt"),
            Variable::new("IDENTITY_SVC_ADDR", "required", "the identity controller, `HOST:PORT`"),
            Variable::new("IDENTITY_SVC_NAME", "required, except on loopback", "its identity"),
            Variable::new("IDENTITY_MIN_REFRESH", "`10s`", "shortest time between renewals"),
            Variable::new(
                "IDENTITY_MAX_REFRESH",
                "`24h`",
                "longest time between renewals, which come up to a tenth earlier",
            ),
            Variable::new(
                "IDENTITY_SPIRE_WORKLOAD_API_ADDRESS",
                "none",
                "unix socket of a SPIFFE Workload API, in place of controller, directory and token",
            ),
            Variable::new("IDENTITY_SPIRE_SOCKET", "none", "its older name"),
            Variable::new("IDENTITY_DISABLED", "unset", "refused when set: identity is mandatory"),
        ],
    },
    Group {
        title: "Control plane",
        variables: &[
            Variable::new("DESTINATION_SVC_ADDR", "required", "the destination controller, `HOST:PORT`"),
            Variable::new("DESTINATION_SVC_NAME", "required, except on loopback", "its identity"),
            Variable::new("DESTINATION_CONTEXT", "empty", "sent with every look-up"),
            Variable::new("DESTINATION_PROFILE_NETWORKS", "none", "networks whose addresses have profiles"),
            Variable::new(
                "DESTINATION_PROFILE_SUFFIXES",
                "`svc.cluster.local.`",
                "names in inbound requests that have ServiceProfiles, `.` for all; 64 names at a time, per worker",
            ),
            Variable::new(
                "DESTINATION_PROFILE_INITIAL_TIMEOUT",
                "`500ms`",
                "how long inbound requests wait for the ServiceProfile of their name",
            ),
            Variable::new("POLICY_SVC_ADDR", "required", "the policy controller, `HOST:PORT`"),
            Variable::new("POLICY_SVC_NAME", "required, except on loopback", "its identity"),
            Variable::new("POLICY_WORKLOAD", "required", "this workload's name for the policy controller"),
            Variable::new(
                "POLICY_CLUSTER_NETWORKS",
                "none",
                "the cluster's networks, for the `cluster-*` default policies",
            ),
            Variable::new(
                "CONTROL_STREAM_INITIAL_TIMEOUT",
                "none",
                "time for a stream's first message; as the next two not on loopback",
            ),
            Variable::new("CONTROL_STREAM_IDLE_TIMEOUT", "none", "silence after which a stream is opened anew"),
            Variable::new(
                "CONTROL_STREAM_LIFETIME",
                "none",
                "age at which a stream is opened anew, less up to a fifth",
            ),
            Variable::new(
                "DNS_MIN_TTL",
                "the records'",
                "shortest time for which addresses of the control plane are used",
            ),
            Variable::new(
                "DNS_MAX_TTL",
                "the records'",
                "longest time for which addresses of the control plane are used",
            ),
        ],
    },
    Group {
        title: "Listeners",
        variables: &[
            Variable::new("OUTBOUND_LISTEN_ADDRS", "`OUTBOUND_LISTEN_ADDR`", "one address, or one for each family"),
            Variable::new("OUTBOUND_LISTEN_ADDR", "`127.0.0.1:4140`", "the application's connections to others"),
            Variable::new("INBOUND_LISTEN_ADDR", "`0.0.0.0:4143`", "others' connections to the application"),
            Variable::new("ADMIN_LISTEN_ADDR", "`127.0.0.1:4191`", "`/metrics`, `/live`, `/ready`"),
            Variable::new("CONTROL_LISTEN_ADDR", "`0.0.0.0:4190`", "the tap server, if `TAP_SVC_NAME` is set"),
            Variable::new(
                "TAP_SVC_NAME",
                "none",
                "the identity that may watch requests over the tap server, beside the pod itself; enables it",
            ),
            Variable::new(
                "OUTBOUND_TCP_LISTEN_BACKLOG",
                "4096",
                "connections that may wait to be accepted, per worker",
            ),
            Variable::new("INBOUND_TCP_LISTEN_BACKLOG", "4096", "connections that may wait to be accepted, per worker"),
            Variable::new(
                "OUTBOUND_ACCEPT_KEEPALIVE",
                "the kernel's",
                "idle time before TCP probes of the application's connections",
            ),
            Variable::new(
                "OUTBOUND_ACCEPT_USER_TIMEOUT",
                "the kernel's",
                "time that sent bytes may stay unacknowledged there",
            ),
            Variable::new(
                "OUTBOUND_CONNECT_KEEPALIVE",
                "the kernel's",
                "idle time before TCP probes of connections to others",
            ),
            Variable::new(
                "OUTBOUND_CONNECT_USER_TIMEOUT",
                "the kernel's",
                "time that sent bytes may stay unacknowledged there",
            ),
            Variable::new(
                "INBOUND_ACCEPT_KEEPALIVE",
                "the kernel's",
                "idle time before TCP probes of others' connections",
            ),
            Variable::new(
                "INBOUND_ACCEPT_USER_TIMEOUT",
                "the kernel's",
                "time that sent bytes may stay unacknowledged there",
            ),
            Variable::new(
                "INBOUND_CONNECT_KEEPALIVE",
                "the kernel's",
                "idle time before TCP probes of connections to the application",
            ),
            Variable::new(
                "INBOUND_CONNECT_USER_TIMEOUT",
                "the kernel's",
                "time that sent bytes may stay unacknowledged there",
            ),
        ],
    },
    Group {
        title: "Inbound",
        variables: &[
            Variable::new("INBOUND_IPS", "any", "the pod's own addresses"),
            Variable::new("INBOUND_PORTS", "none", "ports whose policy is watched from the start"),
            Variable::new(
                "INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION",
                "none",
                "ports that are opaque under the default policy",
            ),
            Variable::new(
                "INBOUND_PORTS_REQUIRE_TLS",
                "none",
                "ports on which plaintext is refused, whatever their policy",
            ),
            Variable::new(
                "INBOUND_GATEWAY_SUFFIXES",
                "none",
                "names that other clusters' proxies reach through this one, which is their gateway",
            ),
            Variable::new(
                "INBOUND_DEFAULT_POLICY",
                "`all-unauthenticated`",
                "ports without a Server: `deny`, `audit` or `{all,cluster}-{un,}authenticated`",
            ),
            Variable::new("INBOUND_DETECT_TIMEOUT", "`10s`", "time for protocol detection when policy has none"),
            Variable::new("INBOUND_CONNECT_TIMEOUT", "`300ms`", "time for a connection to the application"),
            Variable::new(
                "INBOUND_DISCOVERY_IDLE_TIMEOUT",
                "`90s`",
                "how long the policy of an unused port stays cached",
            ),
            Variable::new(
                "INBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT",
                "`3s`",
                "how long idle connections to the application are kept",
            ),
            Variable::new("MAX_IDLE_CONNS_PER_ENDPOINT", "10000", "idle HTTP/1 connections per port"),
            Variable::new("INBOUND_MAX_IN_FLIGHT", "100000", "requests per worker; more are shed"),
            Variable::new("INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "off", "time between pings; needs the timeout"),
            Variable::new("INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "off", "time for the answer to a ping"),
            Variable::new("INBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS", "10000", "streams of one connection"),
            Variable::new(
                "INBOUND_SERVER_HTTP2_MAX_CONNECTION_AGE",
                "none",
                "age at which a connection takes no more requests",
            ),
            Variable::new("INBOUND_SERVER_HTTP2_MAX_FRAME_SIZE", "16384", "bytes of a frame that clients may send"),
            Variable::new(
                "INBOUND_SERVER_HTTP2_MAX_HEADER_LIST_SIZE",
                "73728",
                "bytes of a head, as the protocol counts them",
            ),
            Variable::new(
                "INBOUND_SERVER_HTTP2_MAX_PENDING_ACCEPT_RESET_STREAMS",
                "200",
                "streams that a client has reset before they are looked at; more end the connection",
            ),
            Variable::new(
                "INBOUND_SERVER_HTTP2_MAX_SEND_BUF_SIZE",
                "409600",
                "bytes of a response that a stream buffers",
            ),
            Variable::new(
                "INBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
                "`HTTP2_INITIAL_STREAM_WINDOW_SIZE`",
                "bytes in flight of one stream",
            ),
            Variable::new(
                "INBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
                "`HTTP2_INITIAL_CONNECTION_WINDOW_SIZE`, or 1048576",
                "bytes in flight of one connection; if not set, doubled with its uploads up to 33554432, within 134217728 of all",
            ),
            Variable::new(
                "INBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
                "`false`",
                "both windows follow the measured bandwidth instead",
            ),
            Variable::new(
                "INBOUND_METRICS_AUTHORITY_LABELS",
                "off",
                "`unsafe` adds the label `authority` to metrics of requests; at most 128 values, from clients",
            ),
        ],
    },
    Group {
        title: "Outbound",
        variables: &[
            Variable::new("OUTBOUND_DETECT_TIMEOUT", "`10s`", "time for protocol detection when policy has none"),
            Variable::new("OUTBOUND_CONNECT_TIMEOUT", "`1s`", "time for a connection to an endpoint"),
            Variable::new("OUTBOUND_CONNECT_EXP_BACKOFF_MIN", "`100ms`", "shortest pause after a failed connection"),
            Variable::new("OUTBOUND_CONNECT_EXP_BACKOFF_MAX", "`60s`", "longest pause after failed connections"),
            Variable::new("OUTBOUND_CONNECT_EXP_BACKOFF_JITTER", "0.1", "part by which a pause is longer, at random"),
            Variable::new("OUTBOUND_HTTP_FAILFAST_TIMEOUT", "`3s`", "how long a request waits for an endpoint"),
            Variable::new(
                "OUTBOUND_HTTP_QUEUE_CAPACITY",
                "10000",
                "requests that wait for endpoints of one backend, per worker; more are shed",
            ),
            Variable::new(
                "OUTBOUND_TCP_FAILFAST_TIMEOUT",
                "`3s`",
                "how long a connection that is not HTTP waits for an endpoint",
            ),
            Variable::new(
                "OUTBOUND_TCP_QUEUE_CAPACITY",
                "10000",
                "such connections that wait for endpoints of one backend, per worker; more are shed",
            ),
            Variable::new("OUTBOUND_DISCOVERY_IDLE_TIMEOUT", "`5s`", "how long an unused destination stays cached"),
            Variable::new(
                "OUTBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT",
                "`3s`",
                "how long idle connections to an endpoint are kept",
            ),
            Variable::new(
                "OUTBOUND_MAX_IDLE_CONNS_PER_ENDPOINT",
                "`MAX_IDLE_CONNS_PER_ENDPOINT`",
                "idle HTTP/1 connections per endpoint, and attempts to connect whose requests gave up",
            ),
            Variable::new("OUTBOUND_MAX_IN_FLIGHT", "100000", "requests per worker; more are shed"),
            Variable::new("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "off", "time between pings; needs the timeout"),
            Variable::new("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "off", "time for the answer to a ping"),
            Variable::new("OUTBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS", "200", "streams of one connection"),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_MAX_CONNECTION_AGE",
                "none",
                "age at which a connection takes no more requests",
            ),
            Variable::new("OUTBOUND_SERVER_HTTP2_MAX_FRAME_SIZE", "16384", "bytes of a frame that clients may send"),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_MAX_HEADER_LIST_SIZE",
                "73728",
                "bytes of a head, as the protocol counts them",
            ),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_MAX_PENDING_ACCEPT_RESET_STREAMS",
                "200",
                "streams that a client has reset before they are looked at; more end the connection",
            ),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_MAX_SEND_BUF_SIZE",
                "409600",
                "bytes of a response that a stream buffers",
            ),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
                "`HTTP2_INITIAL_STREAM_WINDOW_SIZE`",
                "bytes in flight of one stream",
            ),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
                "`HTTP2_INITIAL_CONNECTION_WINDOW_SIZE`, or 1048576",
                "bytes in flight of one connection; if not set, doubled with its uploads up to 33554432, within 134217728 of all",
            ),
            Variable::new(
                "OUTBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
                "`false`",
                "both windows follow the measured bandwidth instead",
            ),
            Variable::new(
                "INGRESS_MODE",
                "`false`",
                "requests go where `l5d-dst-override` says, else to the address of their connection",
            ),
            Variable::new(
                "OUTBOUND_DISABLE_INFORMATIONAL_HEADERS",
                "`INGRESS_MODE`",
                "hides the reason of a failure from the application: `l5d-proxy-error`, `grpc-message`",
            ),
            Variable::new(
                "OUTBOUND_METRICS_HOSTNAME_LABELS",
                "`false`",
                "tells requests of a route apart by host in the label `hostname`, up to 64 hosts of each rule",
            ),
            Variable::new("HTTP2_INITIAL_STREAM_WINDOW_SIZE", "65535", "bytes in flight of one stream"),
            Variable::new(
                "HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
                "16777216",
                "bytes in flight of one connection; divided by a stream's, the streams that share one to an endpoint",
            ),
        ],
    },
    Group {
        title: "Process",
        variables: &[
            Variable::new("CORES_MIN", "`CORES`, or 1", "worker threads at least"),
            Variable::new("CORES", "1", "its older name"),
            Variable::new("CORES_MAX", "`CORES_MIN`", "worker threads at most, as far as the machine has processors"),
            Variable::new(
                "CORES_MAX_RATIO",
                "none",
                "the same as a part of the machine's processors, above 0 and at most 1",
            ),
            Variable::new("SHUTDOWN_GRACE_PERIOD", "`2m`", "time for work in flight after SIGTERM"),
            Variable::new("SHUTDOWN_ENDPOINT_ENABLED", "`false`", "whether `POST /shutdown` works"),
            Variable::new("METRICS_RETAIN_IDLE", "`10m`", "how long unused series stay"),
            Variable::new(
                "LOG",
                "`warn,linkerd=info,weft=info,hickory=error`",
                "filter directives; those of `linkerd` apply to Weft's own code",
            ),
            Variable::new("LOG_FORMAT", "`plain`", "or `json`; lines are in Linkerd's form"),
            Variable::new(
                "ACCESS_LOG",
                "none",
                "`apache` or `json`: a line for each inbound request, to standard error",
            ),
        ],
    },
    Group {
        title: "Traces",
        variables: &[
            Variable::new(
                "TRACE_COLLECTOR_SVC_ADDR",
                "none",
                "an OpenTelemetry collector, `HOST:PORT`, which gets the spans of sampled requests by OTLP over gRPC",
            ),
            Variable::new("TRACE_COLLECTOR_SVC_NAME", "required, except on loopback", "its identity"),
            Variable::new("TRACE_SERVICE_NAME", "`linkerd-proxy`", "`service.name` of the spans"),
            Variable::new(
                "TRACE_ATTRIBUTES_PATH",
                "none",
                "file of the pod's labels, which the spans have as attributes; read once",
            ),
            Variable::new(
                "TRACE_EXTRA_ATTRIBUTES",
                "none",
                "further attributes, `NAME=VALUE`, one a line; they take precedence",
            ),
        ],
    },
];

/// Those that other programs read, too, and that have no prefix.
pub(super) const SHARED: &[Variable] = &[
    Variable::new(
        "OTEL_RESOURCE_ATTRIBUTES",
        "none",
        "attributes of spans, `NAME=VALUE`, separated by commas or lines; they take precedence over all others",
    ),
    Variable::new("HOSTNAME", "set by the container runtime", "`host.name` of spans"),
];

/// Those that Linkerd does not have.
pub(super) const OWN: &[Variable] = &[
    Variable::new(
        "WEFT_PROXY_REQUIRE_MTLS",
        "`false`",
        "refuse endpoints without an identity; set by the annotation `weft.io/require-mtls`",
    ),
    Variable::new("WEFT_PROXY_REQUIRE_REDIRECT", "`false`", "ready only while the kernel redirects both directions"),
    Variable::new(
        "WEFT_PROXY_INBOUND_POLICY_TIMEOUT",
        "`10s`",
        "how long connections to a port, and `/ready`, wait for its policy; 0 waits for none",
    ),
    Variable::new(
        "WEFT_PROXY_INBOUND_POLICY_UNANSWERED",
        "`default`",
        "policy of ports without an answer in that time: `default` or `deny`",
    ),
    Variable::new(
        "WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT",
        "none",
        "requests per worker of one client's address; more are shed",
    ),
    Variable::new("WEFT_PROXY_HTTP1_IDLE_TIMEOUT", "`10m`", "time for a request's head, idle time before it included"),
];

/// Those of `names` that have a prefix of settings but are no setting: usually misspelt.
pub(crate) fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_known = |name: &str| match name.strip_prefix(PREFIX) {
        Some(name) => ignored::treated().any(|row| row.name == name),
        None => OWN.iter().any(|own| own.name == name),
    };
    let mut unknown: Vec<String> =
        names.filter(|name| name.starts_with(PREFIX) || name.starts_with(OWN_PREFIX)).collect();
    unknown.retain(|name| !is_known(name));
    unknown.sort_unstable();
    unknown
}

/// The text of `--help` about settings.
pub(crate) fn help() -> String {
    let mut text = format!("Linkerd's settings, each with the prefix {PREFIX}, its default and its meaning:\n");
    let write = |text: &mut String, variable: &Variable| {
        let line = format!("    {} ({})\n        {}\n", variable.name, variable.default, variable.meaning);
        text.push_str(&line.replace('`', ""));
    };
    for group in GROUPS {
        // Writing to a string does not fail.
        let _ = write!(text, "\n  {}\n", group.title);
        group.variables.iter().for_each(|variable| write(&mut text, variable));
    }
    text.push_str("\nSettings that Linkerd does not have:\n\n");
    OWN.iter().for_each(|variable| write(&mut text, variable));
    text.push_str("\nVariables without a prefix:\n\n");
    SHARED.iter().for_each(|variable| write(&mut text, variable));
    text.push_str("\nLinkerd's settings that have no effect:\n\n");
    for row in ignored::treated().filter(|row| row.state != "works") {
        let value = if row.value.is_empty() { String::new() } else { format!("={}", row.value) };
        let _ = writeln!(text, "    {}{value}: {}, {}", row.name, row.state, row.note);
    }
    text
}

/// The tables of docs/configuration.md.
#[cfg(test)]
pub(super) fn tables() -> String {
    let mut text = String::new();
    let row = |text: &mut String, variable: &Variable| {
        let _ = writeln!(text, "| `{}` | {} | {} |", variable.name, variable.default, variable.meaning);
    };
    for group in GROUPS {
        let _ = write!(
            text,
            "{}, with the prefix `{PREFIX}`:\n\n| Variable | Default | Meaning |\n|---|---|---|\n",
            group.title
        );
        group.variables.iter().for_each(|variable| row(&mut text, variable));
        text.push('\n');
    }
    text.push_str("Those that Linkerd does not have:\n\n| Variable | Default | Meaning |\n|---|---|---|\n");
    OWN.iter().for_each(|variable| row(&mut text, variable));
    text.push_str("\nThose without a prefix:\n\n| Variable | Default | Meaning |\n|---|---|---|\n");
    SHARED.iter().for_each(|variable| row(&mut text, variable));
    text
}
