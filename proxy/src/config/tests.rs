//! Tests of defaults, and of the errors for malformed variables.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
};

use super::*;

fn minimal() -> HashMap<String, String> {
    [
        ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", "127.0.0.1:8086"),
        ("LINKERD2_PROXY_POLICY_SVC_ADDR", "localhost.:8090"),
        ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", "127.0.0.1:8080"),
        ("LINKERD2_PROXY_POLICY_WORKLOAD", "ns:pod"),
        ("LINKERD2_PROXY_IDENTITY_DIR", "/run/identity"),
        ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", "/run/token"),
        ("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", "anchors"),
        ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "web.ns.serviceaccount.identity.linkerd.cluster.local"),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

pub(super) fn parse(changes: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let mut env = minimal();
    for (name, value) in changes {
        env.insert((*name).to_owned(), (*value).to_owned());
    }
    Config::parse(&|name| env.get(name).cloned())
}

#[test]
fn defaults_are_linkerds() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.outbound.listen, vec!["127.0.0.1:4140".parse().unwrap()]);
    assert_eq!(config.inbound.listen, "0.0.0.0:4143".parse().unwrap());
    assert_eq!(config.admin.listen, "127.0.0.1:4191".parse().unwrap());
    assert_eq!(config.outbound.detect_timeout, Duration::from_secs(10));
    assert_eq!(config.inbound.connect_timeout, Duration::from_millis(300));
    assert_eq!(config.shutdown_grace_period, Duration::from_secs(120));
    assert_eq!(config.inbound.default_policy, DefaultPolicy::AllUnauthenticated);
    assert_eq!(config.inbound.ports, vec![4191]);
    assert_eq!(config.http2.windows.connection, 16 << 20);
    assert!(!config.require_redirect);
    assert_eq!(config.inbound.policy_timeout, Duration::from_secs(10));
    assert_eq!(config.inbound.unanswered, Unanswered::Default);
    assert!(!config.outbound.allow_loopback);
    assert!(config.policy.control.is_loopback());
    assert_eq!((config.cores.get(), config.metrics_retain_idle), (1, Duration::from_secs(600)));
    for queue in [&config.outbound.http_queue, &config.outbound.tcp_queue] {
        assert_eq!((queue.capacity, queue.failfast_timeout), (10_000, Duration::from_secs(3)));
    }
    let OutboundConfig { backoff_min, backoff_max, backoff_jitter, .. } = config.outbound;
    let backoff = (Duration::from_millis(100), Duration::from_secs(60), 0.1);
    assert_eq!((backoff_min, backoff_max, backoff_jitter), backoff);
    assert_eq!([config.inbound.max_idle_connections, config.outbound.max_idle_connections], [10_000; 2]);
    assert_eq!([config.inbound.max_in_flight, config.outbound.max_in_flight], [100_000; 2]);
}

#[test]
fn workers_follow_from_the_settings_and_the_processors() {
    for (settings, available, expected) in [
        (&[][..], 8, 1),
        (&[("CORES", "3")], 8, 3),
        (&[("CORES_MIN", "2"), ("CORES", "3")], 8, 2),
        (&[("CORES_MAX", "4")], 8, 4),
        (&[("CORES_MAX", "2"), ("CORES_MIN", "3")], 8, 3),
        (&[("CORES_MAX", "4"), ("CORES_MAX_RATIO", "1.0")], 8, 4),
        (&[("CORES_MAX_RATIO", "0.5")], 8, 4),
        (&[("CORES_MAX_RATIO", "0.5"), ("CORES_MIN", "6")], 8, 6),
        (&[("CORES_MAX_RATIO", "0.3")], 8, 2),
        (&[("CORES_MAX_RATIO", "0.1")], 2, 1),
        (&[("CORES_MAX", "16")], 8, 8),
        (&[("CORES", "16")], 2, 2),
    ] {
        let source = |name: &str| {
            let (_, value) = settings.iter().find(|(setting, _)| name == format!("{}{setting}", env::PREFIX))?;
            Some((*value).to_owned())
        };
        let available = NonZeroUsize::new(available).unwrap();
        let workers = env::Env::new(&source).cores(available).unwrap().get();
        assert_eq!(workers, expected, "{settings:?} on {available}");
    }
    for (variable, value) in [("CORES_MAX_RATIO", "0"), ("CORES_MAX_RATIO", "1.1"), ("CORES_MAX", "0")] {
        let variable = format!("{}{variable}", env::PREFIX);
        assert!(parse(&[(&variable, value)]).unwrap_err().to_string().starts_with(&variable), "{variable}");
    }
}

#[test]
fn streams_to_a_controller_in_the_pod_have_no_limits() {
    let config = parse(&[("LINKERD2_PROXY_CONTROL_STREAM_INITIAL_TIMEOUT", "3s")]).unwrap();
    assert_eq!(config.control_streams.initial, Some(Duration::from_secs(3)));
    for (host, is_limited) in
        [("127.0.0.1", false), ("::1", false), ("localhost.", false), ("10.0.0.1", true), ("policy.linkerd", true)]
    {
        let service = ControlAddr { host: host.to_owned(), port: 8090, identity: None };
        let expected = if is_limited { config.control_streams } else { StreamLimits::default() };
        assert_eq!(config.stream_limits(&service), expected, "{host}");
    }
}

#[test]
fn reads_what_the_injector_writes() {
    let config = parse(&[
        ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140,[::1]:4140"),
        ("LINKERD2_PROXY_OUTBOUND_CONNECT_KEEPALIVE", "10000ms"),
        ("LINKERD2_PROXY_INBOUND_ACCEPT_USER_TIMEOUT", "30s"),
        ("LINKERD2_PROXY_INBOUND_IPS", "10.1.2.3,fd00::3"),
        ("LINKERD2_PROXY_INBOUND_PORTS", "80,8000-8002"),
        ("LINKERD2_PROXY_DESTINATION_PROFILE_NETWORKS", "10.0.0.0/8,fd00::/8"),
        ("LINKERD2_PROXY_INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "10s"),
        ("LINKERD2_PROXY_INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "3s"),
        ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", "linkerd-dst-headless.linkerd.svc.cluster.local.:8086"),
        (
            "LINKERD2_PROXY_DESTINATION_SVC_NAME",
            "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local",
        ),
        ("LINKERD2_PROXY_CONTROL_STREAM_INITIAL_TIMEOUT", "3s"),
        ("LINKERD2_PROXY_CONTROL_STREAM_LIFETIME", "1h"),
        ("LINKERD2_PROXY_INBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS", "500"),
        ("WEFT_PROXY_REQUIRE_REDIRECT", "true"),
        ("WEFT_PROXY_INBOUND_POLICY_TIMEOUT", "0"),
        ("WEFT_PROXY_INBOUND_POLICY_UNANSWERED", "deny"),
        ("WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT", "7"),
    ])
    .unwrap();
    assert_eq!(config.outbound.listen.len(), 2);
    assert_eq!(config.outbound.connect.keepalive, Some(Duration::from_secs(10)));
    assert_eq!(config.inbound.accept.user_timeout, Some(Duration::from_secs(30)));
    assert_eq!(config.inbound.ports, vec![80, 8000, 8001, 8002, 4191]);
    assert!(config.is_local("fd00::3".parse().unwrap()));
    assert!(!config.is_local("10.1.2.4".parse().unwrap()));
    assert_eq!(config.http2.inbound_server.keepalive.unwrap().timeout, Duration::from_secs(3));
    assert!(!config.destination.control.is_loopback());
    assert!(config.require_redirect);
    let (initial, lifetime) = (Some(Duration::from_secs(3)), Some(Duration::from_secs(3600)));
    assert_eq!(config.control_streams, StreamLimits { initial, idle: None, lifetime, keepalive: None });
    assert_eq!(config.http2.inbound_server.max_streams, 500);
    assert_eq!(config.inbound.policy_timeout, Duration::ZERO);
    assert_eq!(config.inbound.unanswered, Unanswered::Deny);
    assert_eq!(config.inbound.max_in_flight_of_a_client, Some(7));
}

#[test]
fn blank_means_unset() {
    assert_eq!(
        parse(&[("LINKERD2_PROXY_OUTBOUND_CONNECT_TIMEOUT", " ")]).unwrap().outbound.connect_timeout,
        Duration::from_secs(1)
    );
}

#[test]
fn errors_name_the_variable_and_never_the_value() {
    for (variable, value) in [
        ("LINKERD2_PROXY_OUTBOUND_CONNECT_TIMEOUT", "1.5s"),
        ("LINKERD2_PROXY_OUTBOUND_CONNECT_TIMEOUT", "15"),
        ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "secret-host"),
        ("LINKERD2_PROXY_INBOUND_DEFAULT_POLICY", "allow"),
        ("LINKERD2_PROXY_INBOUND_PORTS", "80,9-1"),
        ("LINKERD2_PROXY_INBOUND_IPS", "10.0.0"),
        ("LINKERD2_PROXY_DESTINATION_PROFILE_NETWORKS", "10.0.0.0/99"),
        ("LINKERD2_PROXY_POLICY_SVC_ADDR", "policy"),
        ("LINKERD2_PROXY_CORES", "0"),
        ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:1,127.0.0.2:2"),
        ("LINKERD2_PROXY_LOG_FORMAT", "xml"),
        ("WEFT_PROXY_REQUIRE_REDIRECT", "maybe"),
        ("WEFT_PROXY_INBOUND_POLICY_TIMEOUT", "soon"),
        ("WEFT_PROXY_HTTP1_IDLE_TIMEOUT", "never"),
        ("WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT", "many"),
        ("WEFT_PROXY_INBOUND_POLICY_UNANSWERED", "allow"),
    ] {
        let message = parse(&[(variable, value)]).unwrap_err().to_string();
        assert!(message.starts_with(variable), "{variable}: {message}");
        assert!(!message.contains(value) || value == "15" || value == "0", "{variable}: {message}");
    }
}

#[test]
fn a_missing_name_is_an_error_only_off_loopback() {
    let error = parse(&[("LINKERD2_PROXY_POLICY_SVC_ADDR", "policy.linkerd.svc:8090")]).unwrap_err();
    assert!(error.to_string().starts_with("LINKERD2_PROXY_POLICY_SVC_NAME is not set"), "{error}");
    parse(&[("LINKERD2_PROXY_POLICY_SVC_ADDR", "[::1]:8090")]).unwrap();
}

#[test]
fn identity_cannot_be_disabled() {
    let error = parse(&[("LINKERD2_PROXY_IDENTITY_DISABLED", "1")]).unwrap_err();
    assert!(error.to_string().contains("mandatory"), "{error}");
}

#[test]
fn a_uri_identity_needs_a_name_that_clients_ask_for() {
    let own = minimal()["LINKERD2_PROXY_IDENTITY_LOCAL_NAME"].clone();
    assert_eq!(*parse(&[]).unwrap().identity.server_name, *own);
    for local_name in ["", &*own] {
        let uri = [
            ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", local_name),
            ("LINKERD2_PROXY_IDENTITY_SERVER_ID", "spiffe://mesh/web"),
        ];
        let error = parse(&uri).unwrap_err();
        assert!(error.to_string().starts_with("LINKERD2_PROXY_IDENTITY_SERVER_NAME is not set"), "{error}");
        let named = [uri[0], uri[1], ("LINKERD2_PROXY_IDENTITY_SERVER_NAME", "web.mesh")];
        let identity = parse(&named).unwrap().identity;
        assert_eq!((identity.local_name.as_str(), &*identity.server_name), ("spiffe://mesh/web", "web.mesh"));
    }
    let error = parse(&[("LINKERD2_PROXY_IDENTITY_SERVER_NAME", "spiffe://mesh/web")]).unwrap_err();
    assert!(error.to_string().starts_with("LINKERD2_PROXY_IDENTITY_SERVER_NAME is invalid"), "{error}");
}

#[test]
fn spire_takes_the_place_of_the_identity_controller() {
    let own = [
        ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", ""),
        ("LINKERD2_PROXY_IDENTITY_DIR", ""),
        ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", ""),
        ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", ""),
        ("LINKERD2_PROXY_IDENTITY_SERVER_ID", "spiffe://mesh/web"),
        ("LINKERD2_PROXY_IDENTITY_SERVER_NAME", "web.mesh"),
    ];
    let newer = "LINKERD2_PROXY_IDENTITY_SPIRE_WORKLOAD_API_ADDRESS";
    let older = "LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET";
    let with = |sockets: &[(&str, &str)]| parse(&[&own[..], sockets].concat());
    for (sockets, expected) in [
        (vec![(newer, "unix:///run/spire.sock")], "/run/spire.sock"),
        (vec![(newer, "unix:/run/spire.sock")], "/run/spire.sock"),
        (vec![(older, "/run/old.sock")], "/run/old.sock"),
        (vec![(newer, "/run/new.sock"), (older, "/run/old.sock")], "/run/new.sock"),
    ] {
        let identity = with(&sockets).unwrap().identity;
        assert!(matches!(&identity.source, IdentitySource::Spire(socket) if socket.as_os_str() == expected));
        assert_eq!((identity.local_name.as_str(), &*identity.server_name), ("spiffe://mesh/web", "web.mesh"));
    }
    assert!(with(&[(newer, "tcp://127.0.0.1:8081")]).unwrap_err().to_string().starts_with(newer));
    let dns =
        [own[0], own[1], own[2], own[3], ("LINKERD2_PROXY_IDENTITY_SERVER_ID", "web.mesh"), (newer, "/run/a.sock")];
    let error = parse(&dns).unwrap_err().to_string();
    assert!(error.starts_with("LINKERD2_PROXY_IDENTITY_SERVER_ID is invalid: expected a SPIFFE ID"), "{error}");
    let error = with(&[]).unwrap_err().to_string();
    assert!(error.starts_with("LINKERD2_PROXY_IDENTITY_DIR is not set"), "{error}");
}

#[test]
fn bounds_of_ttls_and_backlogs_are_read() {
    let config = parse(&[
        ("LINKERD2_PROXY_DNS_MIN_TTL", "5s"),
        ("LINKERD2_PROXY_DNS_MAX_TTL", "1m"),
        ("LINKERD2_PROXY_INBOUND_TCP_LISTEN_BACKLOG", "100"),
    ])
    .unwrap();
    assert_eq!(config.dns, DnsConfig { min: Some(Duration::from_secs(5)), max: Some(Duration::from_secs(60)) });
    assert_eq!((config.inbound.backlog, config.outbound.backlog), (Backlog(100), Backlog(4096)));
    for changes in [
        &[("LINKERD2_PROXY_DNS_MIN_TTL", "2m"), ("LINKERD2_PROXY_DNS_MAX_TTL", "1m")][..],
        &[("LINKERD2_PROXY_OUTBOUND_TCP_LISTEN_BACKLOG", "0")],
    ] {
        let error = parse(changes).unwrap_err().to_string();
        assert!(error.starts_with(changes[0].0), "{error}");
    }
}

#[test]
fn the_shortest_backoff_is_above_zero_and_not_above_the_longest() {
    let backoff = |min, max| {
        let min = ("LINKERD2_PROXY_OUTBOUND_CONNECT_EXP_BACKOFF_MIN", min);
        let max = ("LINKERD2_PROXY_OUTBOUND_CONNECT_EXP_BACKOFF_MAX", max);
        parse(&[min, max]).map(|config| (config.outbound.backoff_min, config.outbound.backoff_max))
    };
    assert_eq!(backoff("1s", "1s").unwrap(), (Duration::from_secs(1), Duration::from_secs(1)));
    for (min, max) in [("10s", "1s"), ("0", "1s"), ("0", "0"), ("", "50ms")] {
        let message = backoff(min, max).unwrap_err().to_string();
        assert!(message.starts_with("LINKERD2_PROXY_OUTBOUND_CONNECT_EXP_BACKOFF_MIN is invalid"), "{message}");
    }
}

#[test]
fn tap_and_the_access_log_are_off_unless_they_are_asked_for() {
    let plain = parse(&[("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "0.0.0.0:5190")]).unwrap();
    assert_eq!((plain.tap, plain.access_log), (None, None));
    let tap = |listen: &str| Some(TapConfig { listen: listen.parse().unwrap(), client: "tap.viz".parse().unwrap() });
    let name = ("LINKERD2_PROXY_TAP_SVC_NAME", "tap.viz");
    assert_eq!(parse(&[name]).unwrap().tap, tap("0.0.0.0:4190"));
    let listen = ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "[::]:5190");
    assert_eq!(parse(&[name, listen]).unwrap().tap, tap("[::]:5190"));
    for (value, format) in [("apache", AccessLogFormat::Apache), ("JSON", AccessLogFormat::Json)] {
        assert_eq!(parse(&[("LINKERD2_PROXY_ACCESS_LOG", value)]).unwrap().access_log, Some(format));
    }
    for (name, value) in [("TAP_SVC_NAME", "not a name"), ("ACCESS_LOG", "nginx"), ("CONTROL_LISTEN_ADDR", "4190")] {
        let error = parse(&[(&format!("LINKERD2_PROXY_{name}"), value)]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("LINKERD2_PROXY_{name} is invalid")), "{error}");
    }
}

#[test]
fn spans_are_exported_if_there_is_a_collector() {
    const ADDR: (&str, &str) = ("LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR", "otel.obs:4317");
    const NAME: &str = "LINKERD2_PROXY_TRACE_COLLECTOR_SVC_NAME";
    assert_eq!(parse(&[("LINKERD2_PROXY_TRACE_SERVICE_NAME", "web")]).unwrap().trace, None);
    let trace = parse(&[ADDR, (NAME, "otel.obs.example")]).unwrap().trace.unwrap();
    let collector =
        ControlAddr { host: "otel.obs".to_owned(), port: 4317, identity: Some("otel.obs.example".parse().unwrap()) };
    assert_eq!(trace, TraceConfig { collector, ..TraceConfig::to("", 0) });
    let local = [
        ("LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR", "127.0.0.1:4317"),
        ("LINKERD2_PROXY_TRACE_SERVICE_NAME", "web"),
        ("LINKERD2_PROXY_TRACE_ATTRIBUTES_PATH", "/labels"),
        ("LINKERD2_PROXY_TRACE_EXTRA_ATTRIBUTES", "a=1\nb=2\n"),
        ("OTEL_RESOURCE_ATTRIBUTES", "c=3"),
        ("HOSTNAME", "web-0"),
    ];
    let expected = TraceConfig {
        service_name: "web".to_owned(),
        labels: Some("/labels".into()),
        attributes: "a=1\nb=2\n".to_owned(),
        otel_attributes: "c=3".to_owned(),
        hostname: "web-0".to_owned(),
        ..TraceConfig::to("127.0.0.1", 4317)
    };
    assert_eq!(parse(&local).unwrap().trace, Some(expected));
    // As for any other service of the control plane: without its identity it would be spoken to in plaintext.
    let message = parse(&[ADDR]).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{NAME} is not set")), "{message}");
    let message = parse(&[ADDR, (NAME, "not a name")]).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{NAME} is invalid")), "{message}");
    let message = parse(&[(NAME, "otel.obs.example")]).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{} is not set", ADDR.0)), "{message}");
    let message = parse(&[(ADDR.0, "otel"), (NAME, "otel.obs.example")]).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{} is invalid", ADDR.0)), "{message}");
}

#[test]
fn clients_of_an_ingress_are_told_nothing_about_the_mesh_unless_the_settings_say_so() {
    const INGRESS: (&str, &str) = ("LINKERD2_PROXY_INGRESS_MODE", "true");
    let told = |changes: &[(&str, &str)]| parse(changes).unwrap().outbound.informational_headers;
    let disabled = |value| ("LINKERD2_PROXY_OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", value);
    assert!(told(&[]) && !told(&[disabled("true")]));
    assert!(!told(&[INGRESS]) && told(&[INGRESS, disabled("false")]));
    assert!(parse(&[INGRESS]).unwrap().outbound.ingress_mode);
}

#[test]
fn a_gateway_has_suffixes() {
    const VARIABLE: &str = "LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES";
    assert!(parse(&[]).unwrap().inbound.gateway_suffixes.is_empty());
    assert_eq!(parse(&[]).unwrap().inbound.ports, [4191]);
    let inbound = parse(&[(VARIABLE, "svc.cluster.local., mesh.example.org")]).unwrap().inbound;
    assert_eq!(inbound.ports, [4143, 4191], "its policy is watched from the start");
    assert_eq!(
        inbound.gateway_suffixes,
        ["svc.cluster.local", "mesh.example.org"].map(|suffix| Suffix::parse(suffix).unwrap())
    );
    let message = parse(&[(VARIABLE, "svc..local")]).unwrap_err().to_string();
    assert!(message.starts_with(VARIABLE), "{message}");
}

#[test]
fn what_may_wait_for_an_endpoint_is_set_for_http_and_other_connections_apart() {
    let queues = |changes: &[(&str, &str)]| {
        let outbound = parse(changes).unwrap().outbound;
        [outbound.http_queue, outbound.tcp_queue].map(|queue| (queue.failfast_timeout.as_secs(), queue.capacity))
    };
    assert_eq!(queues(&[]), [(3, 10_000); 2]);
    let http =
        [("LINKERD2_PROXY_OUTBOUND_HTTP_FAILFAST_TIMEOUT", "1s"), ("LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY", "5")];
    assert_eq!(queues(&http), [(1, 5), (3, 10_000)]);
    let tcp =
        [("LINKERD2_PROXY_OUTBOUND_TCP_FAILFAST_TIMEOUT", "7s"), ("LINKERD2_PROXY_OUTBOUND_TCP_QUEUE_CAPACITY", "0")];
    assert_eq!(queues(&tcp), [(3, 10_000), (7, 0)]);
    let jitter = |value| {
        let parsed = parse(&[("LINKERD2_PROXY_OUTBOUND_CONNECT_EXP_BACKOFF_JITTER", value)]);
        parsed.map(|config| config.outbound.backoff_jitter).ok()
    };
    assert_eq!(["", "0", "0.5", "100"].map(jitter), [Some(0.1), Some(0.0), Some(0.5), Some(100.0)]);
    assert_eq!(["-0.1", "101", "NaN", "inf", "much"].map(jitter), [None; 5]);
}

#[test]
fn accepted_http2_connections_are_set_for_each_side_within_the_protocols_bounds() {
    let defaults = parse(&[]).unwrap().http2;
    assert_eq!((defaults.outbound_server.max_streams, defaults.inbound_server.max_streams), (200, 10_000));
    assert_eq!((defaults.inbound_server.stream_window, defaults.inbound_server.connection_window), (65_535, None));
    let shared = parse(&[
        ("LINKERD2_PROXY_HTTP2_INITIAL_STREAM_WINDOW_SIZE", "70000"),
        ("LINKERD2_PROXY_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE", "80000"),
    ]);
    let shared = shared.unwrap().http2;
    assert_eq!([shared.windows.stream, shared.inbound_server.stream_window], [70_000; 2]);
    assert_eq!((shared.windows.connection, shared.inbound_server.connection_window), (80_000, Some(80_000)));
    let values = [
        ("ADAPTIVE_FLOW_CONTROL", "true"),
        ("INITIAL_STREAM_WINDOW_SIZE", "1"),
        ("INITIAL_CONNECTION_WINDOW_SIZE", "2147483647"),
        ("KEEP_ALIVE_INTERVAL", "2s"),
        ("KEEP_ALIVE_TIMEOUT", "1s"),
        ("MAX_CONCURRENT_STREAMS", "3"),
        ("MAX_FRAME_SIZE", "16777215"),
        ("MAX_HEADER_LIST_SIZE", "5"),
        ("MAX_CONNECTION_AGE", "15m"),
        ("MAX_PENDING_ACCEPT_RESET_STREAMS", "6"),
        ("MAX_SEND_BUF_SIZE", "7"),
    ];
    let all = Http2ServerConfig {
        adaptive_window: true,
        stream_window: 1,
        connection_window: Some(2_147_483_647),
        keepalive: Some(Keepalive { interval: Duration::from_secs(2), timeout: Duration::from_secs(1) }),
        max_streams: 3,
        max_frame_size: Some(16_777_215),
        max_header_list_size: Some(5),
        max_connection_age: Some(Duration::from_secs(900)),
        max_pending_resets: 6,
        max_send_buffer: Some(7),
    };
    for side in ["INBOUND", "OUTBOUND"] {
        let changes = values.map(|(name, value)| (format!("LINKERD2_PROXY_{side}_SERVER_HTTP2_{name}"), value));
        let changes: Vec<_> = changes.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let http2 = parse(&changes).unwrap().http2;
        let (set, other) = match side {
            "INBOUND" => (http2.inbound_server, http2.outbound_server == defaults.outbound_server),
            _ => (http2.outbound_server, http2.inbound_server == defaults.inbound_server),
        };
        assert!(set == all && other, "{side} {set:?}");
    }
    for (name, value) in [
        ("HTTP2_INITIAL_STREAM_WINDOW_SIZE", "0"),
        ("HTTP2_INITIAL_CONNECTION_WINDOW_SIZE", "2147483648"),
        ("INBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE", "2147483648"),
        ("OUTBOUND_SERVER_HTTP2_MAX_FRAME_SIZE", "16383"),
        ("INBOUND_SERVER_HTTP2_MAX_FRAME_SIZE", "16777216"),
    ] {
        let error = parse(&[(&format!("LINKERD2_PROXY_{name}"), value)]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("LINKERD2_PROXY_{name} is invalid")), "{error}");
    }
}

#[test]
fn names_with_profiles_are_those_of_the_cluster_unless_the_settings_say_otherwise() {
    const VARIABLE: &str = "LINKERD2_PROXY_DESTINATION_PROFILE_SUFFIXES";
    let suffix = |text| Suffix::parse(text).unwrap();
    let parsed = parse(&[]).unwrap().destination;
    assert_eq!(
        (parsed.suffixes, parsed.initial_timeout),
        (vec![suffix("svc.cluster.local")], Duration::from_millis(500))
    );
    let parsed =
        parse(&[(VARIABLE, "svc.mesh.example.,."), ("LINKERD2_PROXY_DESTINATION_PROFILE_INITIAL_TIMEOUT", "2s")]);
    let parsed = parsed.unwrap().destination;
    assert_eq!(
        (parsed.suffixes, parsed.initial_timeout),
        (vec![suffix("svc.mesh.example"), suffix(".")], Duration::from_secs(2))
    );
    assert!(parse(&[(VARIABLE, "svc..local")]).unwrap_err().to_string().starts_with(VARIABLE));
}

#[test]
fn headers_are_logged_only_where_a_filter_does_not_exclude_them() {
    let logged = |filter| parse(&[("LINKERD2_PROXY_LOG", filter)]).unwrap().log_headers;
    assert!(!parse(&[]).unwrap().log_headers);
    assert!(!logged("warn,linkerd=debug,[{headers}]=off,[{request}]=off"));
    assert!(logged("warn,linkerd=debug"));
}

/// What [`Config::parse`] asks for, without the variables that it only warns about.
fn read(env: &HashMap<String, String>) -> BTreeSet<String> {
    let asked = RefCell::new(BTreeSet::new());
    let source = |name: &str| {
        asked.borrow_mut().insert(name.to_owned());
        env.get(name).cloned()
    };
    Config::parse(&source).unwrap();
    asked.into_inner()
}

#[test]
fn every_variable_that_is_read_is_documented_and_works_as_the_table_says() {
    let mut spire = minimal();
    spire.remove("LINKERD2_PROXY_IDENTITY_LOCAL_NAME");
    for (name, value) in [
        ("IDENTITY_SERVER_ID", "spiffe://mesh/web"),
        ("IDENTITY_SERVER_NAME", "web.mesh"),
        ("IDENTITY_SPIRE_WORKLOAD_API_ADDRESS", "/run/spire.sock"),
    ] {
        spire.insert(format!("{}{name}", env::PREFIX), value.to_owned());
    }
    let read: BTreeSet<String> = read(&minimal()).union(&read(&spire)).cloned().collect();
    let linkerds = variables::GROUPS.iter().flat_map(|group| group.variables);
    let linkerds: BTreeSet<String> = linkerds.map(|variable| format!("{}{}", env::PREFIX, variable.name)).collect();
    let own = variables::OWN.iter().chain(variables::SHARED).map(|variable| variable.name.to_owned());
    let documented: BTreeSet<String> = linkerds.iter().cloned().chain(own).collect();
    assert_eq!(documented, read, "config/variables.rs lists what the proxy reads");
    let works = ignored::treated().filter(|row| row.state == "works");
    let works: BTreeSet<String> = works.map(|row| format!("{}{}", env::PREFIX, row.name)).collect();
    assert_eq!(linkerds, works, "the table in k8s-api lists what the proxy reads");
}

#[test]
fn the_documents_have_the_table_of_variables() {
    const BEGIN: &str = "<!-- variables -->\n";
    const END: &str = "<!-- end of variables -->\n";
    let path = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it") + "/../docs/configuration.md";
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("docs/configuration.md has the markers");
    let (_, after) = rest.split_once(END).expect("docs/configuration.md has the markers");
    let current = format!("{before}{BEGIN}\n{}\n{END}{after}", variables::tables());
    if std::env::var_os("WEFT_WRITE_DOCS").is_some() {
        std::fs::write(path, &current).unwrap();
        return;
    }
    let command = "WEFT_WRITE_DOCS=1 cargo test -p weft-proxy --lib the_documents_have";
    assert!(text == current, "docs/configuration.md is not current; run {command}");
}

#[test]
fn help_lists_every_variable_with_its_default_or_the_reason_why_it_has_no_effect() {
    let help = help();
    for line in [
        "    INBOUND_LISTEN_ADDR (0.0.0.0:4143)\n        others' connections to the application\n",
        "    WEFT_PROXY_REQUIRE_REDIRECT (false)\n",
    ] {
        assert!(help.contains(line), "{line}");
    }
    for row in ignored::treated() {
        assert!(help.contains(&format!("\n    {}", row.name)), "{}", row.name);
        assert!(row.state == "works" || !row.note.is_empty(), "{} has no reason", row.name);
    }
}

#[test]
fn variables_that_nobody_knows_are_named() {
    let names = [
        "LINKERD2_PROXY_LOG",
        "LINKERD2_PROXY_ACCESS_LOG",
        "LINKERD2_PROXY_OUTBUOND_LISTEN_ADDR",
        "WEFT_PROXY_REQUIRE_REDIRECTS",
        "WEFT_PROXY_REQUIRE_REDIRECT",
        "PATH",
    ];
    let unknown = unknown(names.into_iter().map(str::to_owned));
    assert_eq!(unknown, ["LINKERD2_PROXY_OUTBUOND_LISTEN_ADDR", "WEFT_PROXY_REQUIRE_REDIRECTS"]);
}
