//! Proof that no variable is accepted and does nothing: each one, set to something else, changes the settings. A
//! setting that nothing reads does not compile without a warning.

use super::{tests::parse, *};

/// Values of each kind of variable.
const OTHERS: &[&str] = &[
    "true",
    "false",
    "7",
    "65536",
    "0.5",
    "77ms",
    "77s",
    "json",
    "apache",
    "deny",
    "unsafe",
    "127.0.0.1:77",
    "192.0.2.7",
    "192.0.2.0/24",
    "other.example",
    "name=value",
    "unix:///run/other.sock",
];

const COLLECTOR: &[(&str, &str)] = &[("TRACE_COLLECTOR_SVC_ADDR", "localhost:4317")];

/// What has to be set for the variables with a prefix to matter; the first row applies.
const NEEDED: &[(&str, &[(&str, &str)])] = &[
    ("CONTROL_LISTEN_ADDR", &[("TAP_SVC_NAME", "viz.example")]),
    ("DESTINATION_SVC_NAME", &[("DESTINATION_SVC_ADDR", "dst.example:8086")]),
    ("IDENTITY_SPIRE", &[("IDENTITY_SERVER_ID", "spiffe://mesh/web"), ("IDENTITY_SERVER_NAME", "web.mesh")]),
    ("IDENTITY_SVC_NAME", &[("IDENTITY_SVC_ADDR", "identity.example:8080")]),
    ("POLICY_SVC_NAME", &[("POLICY_SVC_ADDR", "policy.example:8090")]),
    ("INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", &[("INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "9s")]),
    ("INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", &[("INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "9s")]),
    ("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", &[("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "9s")]),
    ("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", &[("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "9s")]),
    ("TRACE_COLLECTOR_SVC_ADDR", &[]),
    ("TRACE_COLLECTOR_SVC_NAME", &[("TRACE_COLLECTOR_SVC_ADDR", "otel.example:4317")]),
    ("TRACE_", COLLECTOR),
    ("OTEL_", COLLECTOR),
    ("HOSTNAME", COLLECTOR),
];

/// Why a variable is idle, if it is.
fn idle(name: &str) -> Option<String> {
    let short = name.strip_prefix(env::PREFIX).unwrap_or(name);
    let needed = NEEDED.iter().find(|(prefix, _)| short.starts_with(prefix)).map_or(&[][..], |(_, needed)| *needed);
    let needed: Vec<_> = needed.iter().map(|(name, value)| (format!("{}{name}", env::PREFIX), *value)).collect();
    let with = |other: &str| {
        let needed = needed.iter().map(|(name, value)| (name.as_str(), *value));
        parse(&needed.chain([(name, other)]).collect::<Vec<_>>()).map(|config| format!("{config:?}"))
    };
    // Blank is unset, except where that is an error: then every value has an effect, and different ones different
    // effects.
    let plain = with("").or_else(|_| with("plain.example"));
    let others: Vec<_> = OTHERS.iter().map(|other| with(other)).collect();
    let acts = others.iter().any(|other| other.is_ok() && *other != plain);
    let is_refused =
        others.iter().all(|other| other.as_ref().is_err_and(|error| error.to_string().contains("unset it")));
    (!acts && !is_refused).then(|| format!("{name}: {:?}", others.iter().find_map(|other| other.as_ref().err())))
}

#[test]
fn every_variable_changes_the_settings_or_is_refused() {
    let linkerds = variables::GROUPS.iter().flat_map(|group| group.variables);
    let linkerds = linkerds.map(|variable| format!("{}{}", env::PREFIX, variable.name));
    let own = variables::OWN.iter().chain(variables::SHARED).map(|variable| variable.name.to_owned());
    let mut names: Vec<_> = linkerds.chain(own).collect();
    // They change nothing on a machine with one processor; `workers_follow_from_the_settings_and_the_processors`.
    names.retain(|name| !name.contains("_CORES"));
    let idle: Vec<_> = names.iter().filter_map(|name| idle(name)).collect();
    assert!(!names.is_empty() && idle.is_empty(), "accepted, and without effect: {idle:#?}");
}
