//! What Linkerd's published Grafana dashboards and ours ask of Prometheus.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// What Linkerd's dashboards (linkerd2, `grafana/dashboards`) select: the metric, how it is narrowed, and the labels by
/// which it is summed. Left out are `tcp_close_total{errno!=""}`, which is of connections that broke, and what
/// `authority.json` selects by the `authority` of inbound series: they have it only where
/// `LINKERD2_PROXY_INBOUND_METRICS_AUTHORITY_LABELS` allows it, as in Linkerd.
pub(crate) const LINKERD: &[(&str, &str, &[&str])] = &[
    // top-line, namespace, deployment and the other workloads, pod: inbound
    ("request_total", r#"direction="inbound", tls="true""#, &["namespace", "deployment", "pod"]),
    ("response_total", r#"direction="inbound", classification="success""#, &["namespace", "deployment", "pod"]),
    ("response_latency_ms_bucket", r#"direction="inbound""#, &["le", "namespace", "deployment", "pod"]),
    // outbound, by destination
    ("request_total", r#"direction="outbound", tls="true""#, &["deployment", "pod", "dst_namespace", "dst_deployment"]),
    (
        "response_total",
        r#"direction="outbound", classification="success""#,
        &["deployment", "dst_namespace", "dst_deployment"],
    ),
    ("response_latency_ms_bucket", r#"direction="outbound""#, &["le", "deployment", "dst_namespace", "dst_deployment"]),
    // service
    ("request_total", r#"direction="outbound""#, &["namespace", "dst_service", "dst_namespace"]),
    ("response_total", r#"direction="outbound""#, &["dst_service", "classification"]),
    ("response_latency_ms_bucket", r#"direction="outbound""#, &["le", "dst_service"]),
    // route
    ("route_response_total", r#"direction="inbound""#, &["rt_route", "dst", "classification", "deployment"]),
    ("route_response_latency_ms_bucket", r#"direction="inbound""#, &["le", "rt_route", "dst"]),
    ("route_response_total", r#"direction="outbound""#, &["rt_route", "dst", "deployment"]),
    ("route_request_total", r#"direction="outbound""#, &["rt_route", "dst"]),
    // TCP of workloads and pods
    ("tcp_open_connections", r#"direction="inbound", peer="src""#, &["namespace", "deployment", "pod"]),
    ("tcp_open_connections", r#"direction="outbound", peer="dst""#, &["namespace", "deployment", "pod"]),
    ("tcp_open_total", r#"direction="outbound", peer="dst""#, &["deployment", "dst_deployment", "tls"]),
    ("tcp_read_bytes_total", r#"direction="inbound", peer="src""#, &["deployment", "pod"]),
    ("tcp_write_bytes_total", r#"direction="outbound", peer="dst""#, &["deployment", "dst_namespace"]),
    // health
    ("process_start_time_seconds", "", &["pod", "namespace"]),
    ("process_cpu_seconds_total", "", &["pod"]),
    ("process_resident_memory_bytes", "", &["pod"]),
];

/// The labels by which Prometheus knows what is missing.
pub(crate) fn missing(series: &[BTreeMap<String, String>], labels: &[&str]) -> Vec<String> {
    let has = |label: &str| series.iter().any(|one| one.get(label).is_some_and(|value| !value.is_empty()));
    labels.iter().filter(|label| !has(label)).map(|label| (*label).to_owned()).collect()
}

/// The expressions of our Grafana dashboards, with Grafana's variables as they may be.
pub(crate) fn of_our_dashboards() -> Result<Vec<String>> {
    let repository = std::env::var_os("CARGO_MANIFEST_DIR").context("cargo says where the tests are")?;
    let directory = PathBuf::from(repository).join("../docs/grafana");
    let mut expressions = Vec::new();
    for file in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
        let text = fs::read_to_string(file?.path()).context("read a dashboard")?;
        let dashboard: Value = serde_json::from_str(&text).context("a dashboard is JSON")?;
        let panels = dashboard["panels"].as_array().into_iter().flatten();
        let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
        expressions.extend(
            targets
                .filter_map(|target| target["expr"].as_str())
                .map(|expression| expression.replace("$__rate_interval", "1m").replace("$node", ".*")),
        );
    }
    if expressions.is_empty() {
        bail!("no dashboard in {}", directory.display());
    }
    Ok(expressions)
}
