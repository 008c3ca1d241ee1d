//! A real Prometheus that scrapes a sandbox's proxies with the relabelling of the chart's PodMonitor, which is
//! Linkerd's.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;
use weft_test_kit::{
    binaries,
    mesh::Mesh,
    process::Process,
    wait::{patience, until},
};

/// Where it listens, in the node's network namespace, which is this mesh's own.
const ADDRESS: &str = "127.0.0.1:9090";

/// A Prometheus in the node's network namespace. Dropping it ends it.
pub struct Prometheus {
    _process: Process,
    _directory: TempDir,
    netns: PathBuf,
}

impl Prometheus {
    /// Starts it, and waits until it has scraped every proxy.
    ///
    /// # Errors
    /// The chart cannot be rendered, or it does not come up.
    pub async fn of(mesh: &Mesh) -> Result<Self> {
        let state = mesh.state()?;
        let directory = tempfile::tempdir().context("make a directory for Prometheus")?;
        let config = directory.path().join("prometheus.yml");
        let meshed = state.pods.iter().filter(|pod| pod.meshed);
        let targets: Vec<_> = meshed.map(|pod| target(&pod.namespace, &pod.name, &pod.ips, &pod.labels)).collect();
        let count = targets.len();
        let scrape = json!({
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "linkerd-proxy", "static_configs": targets, "relabel_configs": relabelling()?}],
        });
        // YAML contains JSON.
        fs::write(&config, scrape.to_string()).context("write its configuration")?;
        let netns = state.node_netns.clone();
        let mut command = within(&netns, binaries::directory()?.join("prometheus"));
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()));
        command.arg(format!("--web.listen-address={ADDRESS}"));
        command.arg("--enable-feature=exemplar-storage");
        let process = Process::start(&mut command, Duration::from_secs(60).max(patience()));
        process.says("Server is ready").await;
        let prometheus = Self { _process: process, _directory: directory, netns };
        prometheus.until("every proxy of the mesh", &format!("count(up == 1) >= {count}")).await?;
        Ok(prometheus)
    }

    /// The series of an expression, as their labels.
    ///
    /// # Errors
    /// Prometheus refuses the expression.
    pub fn ask(&self, expression: &str) -> Result<Vec<BTreeMap<String, String>>> {
        let mut promtool = within(&self.netns, binaries::directory()?.join("promtool"));
        promtool.args(["query", "instant", "-o", "json", &format!("http://{ADDRESS}"), expression]);
        let Output { status, stdout, stderr } = promtool.output().context("run promtool")?;
        if !status.success() {
            bail!("{expression}: {}", String::from_utf8_lossy(&stderr));
        }
        let series: Vec<Value> = serde_json::from_slice(&stdout).context("promtool prints JSON")?;
        series.into_iter().map(|mut one| Ok(serde_json::from_value(one["metric"].take())?)).collect()
    }

    /// The traces beside the buckets that an expression selects, by the proxy's pod.
    ///
    /// # Errors
    /// Prometheus does not answer.
    pub fn exemplars(&self, expression: &str) -> Result<BTreeSet<(String, String)>> {
        let mut curl = within(&self.netns, "curl");
        curl.args(["--silent", "--show-error", "--get", "--data", "start=0", "--data", "end=9999999999"]);
        curl.args(["--data-urlencode", &format!("query={expression}")]);
        let output = curl.arg(format!("http://{ADDRESS}/api/v1/query_exemplars")).output().context("run curl")?;
        let answer: Value = serde_json::from_slice(&output.stdout).context("Prometheus answers JSON")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = |value: &Value| value.as_array().cloned().with_context(|| format!("a list in {answer}"));
        let mut found = BTreeSet::new();
        for series in all(&answer["data"])? {
            for exemplar in all(&series["exemplars"])? {
                found.insert((text(&series["seriesLabels"]["pod"]), text(&exemplar["labels"]["trace_id"])));
            }
        }
        Ok(found)
    }

    /// Waits until an expression has a series.
    ///
    /// # Errors
    /// It has none within the patience of tests.
    pub async fn until(&self, what: &str, expression: &str) -> Result<Vec<BTreeMap<String, String>>> {
        let found = async || match self.ask(expression)? {
            series if series.is_empty() => bail!("{what}: no series of {expression}"),
            series => Ok(series),
        };
        until(Duration::from_secs(30).max(patience()), found).await
    }
}

/// A program in a network namespace.
fn within(netns: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", netns.display())).arg(program);
    command
}

/// What Prometheus' discovery of pods says of a meshed pod.
fn target(namespace: &str, name: &str, ips: &[IpAddr], labels: &BTreeMap<String, String>) -> Value {
    let address = ips.iter().find(|ip| ip.is_ipv4()).expect("a pod has an IPv4 address");
    let meta = |name: &str| format!("__meta_kubernetes_{name}");
    let known = |name: &str| name.replace(|it: char| !it.is_ascii_alphanumeric(), "_");
    let mut known: BTreeMap<_, _> =
        labels.iter().map(|(label, value)| (meta(&format!("pod_label_{}", known(label))), value.as_str())).collect();
    known.extend([
        (meta("namespace"), namespace),
        (meta("pod_name"), name),
        (meta("pod_container_name"), "linkerd-proxy"),
        (meta("pod_container_port_name"), "linkerd-admin"),
    ]);
    json!({"targets": [format!("{address}:4191")], "labels": known})
}

/// The relabelling of the chart's PodMonitor for proxies, as Prometheus itself spells it.
fn relabelling() -> Result<Value> {
    let mut weft = Command::new(binaries::directory()?.join("weft"));
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
