//! A real Prometheus that scrapes the mesh's proxies with the relabelling of the chart's PodMonitor, which is Linkerd's, and answers what
//! Linkerd's published Grafana dashboards and ours ask.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;
use weft_sandbox::state::State;
use weft_test_kit::{
    binaries,
    process::Process,
    wait::{patience, until},
};

/// Where it listens, in the node's network namespace, which is this mesh's own.
const ADDRESS: &str = "127.0.0.1:9090";

/// A Prometheus in the node's network namespace. Dropping it ends it.
pub(crate) struct Prometheus {
    _process: Process,
    _directory: TempDir,
    netns: PathBuf,
}

impl Prometheus {
    /// Starts it, and waits until it has scraped every proxy.
    pub(crate) async fn of(state: &State) -> Result<Self> {
        let directory = tempfile::tempdir().context("make a directory for Prometheus")?;
        let config = directory.path().join("prometheus.yml");
        let targets = targets(state);
        let count = targets.len();
        let scrape = json!({
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "linkerd-proxy", "static_configs": targets, "relabel_configs": relabelling()?}],
        });
        // YAML contains JSON.
        fs::write(&config, scrape.to_string()).context("write its configuration")?;
        let netns = state.node_netns.clone();
        let mut command = within(&netns, "prometheus");
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()));
        command.arg(format!("--web.listen-address={ADDRESS}"));
        let process = Process::start(&mut command, Duration::from_secs(60).max(patience()));
        process.says("Server is ready").await;
        let prometheus = Self { _process: process, _directory: directory, netns };
        prometheus.until("every proxy of the mesh", &format!("count(up == 1) >= {count}")).await?;
        Ok(prometheus)
    }

    /// The series of an expression, as their labels.
    pub(crate) fn ask(&self, expression: &str) -> Result<Vec<BTreeMap<String, String>>> {
        let mut promtool = within(&self.netns, "promtool");
        promtool.args(["query", "instant", "-o", "json", &format!("http://{ADDRESS}"), expression]);
        let Output { status, stdout, stderr } = promtool.output().context("run promtool")?;
        if !status.success() {
            bail!("{expression}: {}", String::from_utf8_lossy(&stderr));
        }
        let series: Vec<Value> = serde_json::from_slice(&stdout).context("promtool prints JSON")?;
        series.into_iter().map(|mut one| Ok(serde_json::from_value(one["metric"].take())?)).collect()
    }

    /// Waits until an expression has a series.
    pub(crate) async fn until(&self, what: &str, expression: &str) -> Result<Vec<BTreeMap<String, String>>> {
        let found = async || match self.ask(expression)? {
            series if series.is_empty() => bail!("{what}: no series of {expression}"),
            series => Ok(series),
        };
        until(Duration::from_secs(30).max(patience()), found).await
    }
}

/// A program beside ours, or of the system, in a network namespace.
fn within(netns: &std::path::Path, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    let program = binaries::directory().unwrap().join(program);
    command.arg(format!("--net={}", netns.display())).arg(program);
    command
}

/// What Prometheus' discovery of pods says of each meshed pod, with its labels.
fn targets(state: &State) -> Vec<Value> {
    let meshed = state.pods.iter().filter(|pod| pod.meshed);
    let of_pod = |pod: &weft_sandbox::state::PodState| {
        let address = pod.ips.iter().find(|ip| ip.is_ipv4()).expect("a pod has an IPv4 address");
        let meta = |name: &str| format!("__meta_kubernetes_{name}");
        let mut labels = BTreeMap::from([
            (meta("namespace"), pod.namespace.clone()),
            (meta("pod_name"), pod.name.clone()),
            (meta("pod_container_name"), "linkerd-proxy".to_owned()),
            (meta("pod_container_port_name"), "linkerd-admin".to_owned()),
        ]);
        let known = |name: &str| name.replace(|it: char| !it.is_ascii_alphanumeric(), "_");
        labels.extend(
            pod.labels.iter().map(|(name, value)| (meta(&format!("pod_label_{}", known(name))), value.clone())),
        );
        json!({"targets": [format!("{address}:4191")], "labels": labels})
    };
    meshed.map(of_pod).collect()
}

/// The relabelling of the chart's PodMonitor for proxies, as Prometheus itself spells it.
fn relabelling() -> Result<Value> {
    let mut weft = Command::new(binaries::directory().unwrap().join("weft"));
    let output = weft.args(["install", "--ignore-cluster", "--set", "podMonitor.enabled=true"]).output();
    let output = output.context("render the chart")?;
    if !output.status.success() {
        bail!("weft install: {}", String::from_utf8_lossy(&output.stderr));
    }
    let rendered = String::from_utf8(output.stdout).context("manifests are text")?;
    for document in rendered.split("\n---\n").filter(|text| text.contains("kind: PodMonitor")) {
        let monitor: Value = serde_yaml_ng::from_str(document).context("read a PodMonitor")?;
        if monitor["metadata"]["name"] != "linkerd-proxy" {
            continue;
        }
        let rules = monitor["spec"]["podMetricsEndpoints"][0]["relabelings"].as_array().context("it relabels")?;
        return Ok(rules.iter().map(spelled).collect());
    }
    bail!("the chart has no PodMonitor for proxies")
}

/// The Operator's `sourceLabels` is Prometheus' `source_labels`.
fn spelled(rule: &Value) -> Value {
    let fields = rule.as_object().into_iter().flatten();
    let fields = fields.map(|(name, value)| {
        let name = match name.as_str() {
            "sourceLabels" => "source_labels",
            "targetLabel" => "target_label",
            other => other,
        };
        (name.to_owned(), value.clone())
    });
    Value::Object(fields.collect())
}

/// What Linkerd's dashboards (linkerd2, `grafana/dashboards`) select: the metric, how it is narrowed, and the labels by which it is summed.
/// Left out are `tcp_close_total{errno!=""}`, which is of connections that broke, and what `authority.json` selects by `authority`: that is a label
/// only where `LINKERD2_PROXY_INBOUND_METRICS_AUTHORITY_LABELS` allows it, as in Linkerd.
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
