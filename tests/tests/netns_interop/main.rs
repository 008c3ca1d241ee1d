//! Programs of other projects through the mesh: h2spec against both sides of the proxy, gRPC's interoperability cases
//! between grpc-go's client and server, the proxies' spans in an OpenTelemetry collector, and the clients and servers
//! that people have. `cargo xtask test netns` builds the former and puts them beside our own programs, and installs the
//! others.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clients;

use std::time::Duration;

use serde_json::{Value, json};
use weft_test_kit::{
    manifests::Manifests,
    mesh::{Mesh, Options, Shared, unique_name},
    wait::eventually,
};
use weft_tests::prometheus::Prometheus;

/// The example mesh, grpc-go's server, and a collector that the proxies of `shop` send their spans to.
static MESH: Shared = Shared::with(|| {
    let manifests = Manifests::example().unwrap();
    manifests.write("interop.yaml", &servers()).unwrap();
    manifests.write("collector.yaml", COLLECTOR).unwrap();
    let meshed = "    linkerd.io/inject: enabled\n";
    manifests.edit("namespaces.yaml", meshed, &format!("{meshed}    {TRACED}\n")).unwrap();
    (manifests, Options { name: unique_name("t-interop"), ..Options::default() })
});

/// The account of all servers here, and the servers.
fn servers() -> String {
    let account = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: interop, namespace: shop}\n";
    let interop = server("interop", &["grpc-interop-server", "--port=8080"], &[8080]);
    [account.to_owned(), interop, clients::servers()].concat()
}

/// A Deployment of one server in `shop`, whose program is in its pods' PATH or an absolute path, and its Service.
fn server(name: &str, command: &[&str], ports: &[u16]) -> String {
    // JSON is YAML, whatever a program contains.
    let command = json!(command);
    let ports: Vec<_> = ports.iter().map(|port| format!("{{name: p{port}, port: {port}}}")).collect();
    format!(
        "\
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: shop}}
spec:
  replicas: 1
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      serviceAccountName: interop
      containers:
        - name: server
          image: weft.io/examples
          command: {command}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  selector: {{app: {name}}}
  ports: [{}]
",
        ports.join(", ")
    )
}

/// What `proxy.tracing` of the chart sets.
const TRACED: &str = r#"config.linkerd.io/proxy-additional-env: '[
      {"name": "LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR", "value": "collector.observability.svc.cluster.local.:4317"},
      {"name": "LINKERD2_PROXY_TRACE_COLLECTOR_SVC_NAME",
       "value": "collector.observability.serviceaccount.identity.linkerd.cluster.local"}]'"#;

const COLLECTOR: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: observability, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: collector, namespace: observability}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: collector, namespace: observability}
spec:
  replicas: 1
  selector: {matchLabels: {app: collector}}
  template:
    metadata: {labels: {app: collector}}
    spec:
      serviceAccountName: collector
      containers:
        - name: collector
          image: otel/opentelemetry-collector
          command: [otelcol]
          args:
            - |-
              --config=yaml:
              receivers: {otlp: {protocols: {grpc: {endpoint: '0.0.0.0:4317'}}}}
              exporters: {file: {path: /run/traces/spans.json, flush_interval: 100ms}}
              service:
                telemetry: {metrics: {level: none}}
                pipelines: {traces: {receivers: [otlp], exporters: [file]}}
          ports: [{name: otlp, containerPort: 4317}]
          volumeMounts: [{name: traces, mountPath: /run/traces}]
      volumes: [{name: traces, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: collector, namespace: observability}
spec:
  selector: {app: collector}
  ports: [{name: otlp, port: 4317, targetPort: otlp}]
";

/// Cases of github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md that grpc-go's client has and that need
/// no account.
const CASES: [&str; 14] = [
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "timeout_on_sleeping_server",
    "cancel_after_begin",
    "cancel_after_first_response",
    "custom_metadata",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
];

/// What h2spec expects and does not get, with the reason. On a port whose protocol is detected, what does not begin as
/// HTTP/2 is not HTTP/2: the application answers it.
const DEVIATIONS: [&str; 1] = ["2: Sends invalid connection preface"];

async fn interop(mesh: &Mesh, case: &str) -> Result<(), String> {
    let client = mesh.pod_of("shop", "client").await.unwrap();
    let case = format!("--test_case={case}");
    let command = ["grpc-interop-client", "--server_host=interop.shop", "--server_port=8080", &case];
    let output = mesh.exec("shop", &client, &command).await.unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn grpc_interoperability_cases_pass_between_foreign_programs() {
    MESH.test(async |mesh| {
        eventually("the server answers", Duration::from_secs(60), async || interop(mesh, CASES[0]).await).await;
        for case in CASES {
            let passed = interop(mesh, case).await;
            assert_eq!(passed, Ok(()), "{case}");
        }
    });
}

/// Runs h2spec in a pod, and returns the names of the cases that failed.
async fn h2spec(mesh: &Mesh, namespace: &str, app: &str) -> Vec<String> {
    let pod = mesh.pod_of(namespace, app).await.unwrap();
    let command = ["h2spec", "--strict", "--host", "web.shop", "--port", "80", "--timeout", "6"];
    let output = mesh.exec(namespace, &pod, &command).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("146 tests, ") && text.contains(" 0 skipped"), "{text}");
    let (_, failures) = text.split_once("Failures:").unwrap_or_default();
    failures.lines().filter_map(|line| line.trim().strip_prefix("× ")).map(str::to_owned).collect()
}

#[test]
fn the_outbound_side_is_strict_about_http2() {
    MESH.test(async |mesh| assert_eq!(h2spec(mesh, "shop", "client").await, DEVIATIONS));
}

#[test]
fn the_inbound_side_is_strict_about_http2() {
    MESH.test(async |mesh| assert_eq!(h2spec(mesh, "legacy", "legacy").await, DEVIATIONS));
}

/// The spans of a trace that the collector has: each with its parent, kind and the pod of the proxy that sent it.
async fn spans(mesh: &Mesh, trace: &str) -> Vec<(String, String, i64, String)> {
    let pod = mesh.pod_of("observability", "collector").await.unwrap();
    let output = mesh.exec("observability", &pod, &["cat", "/run/traces/spans.json"]).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let all = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let mut found = Vec::new();
    // A last line that is not whole is read the next time.
    for export in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        for resource in all(&export, "resourceSpans") {
            let attributes = all(&resource["resource"], "attributes");
            let host = attributes.iter().find(|attribute| attribute["key"] == "host.name").unwrap();
            let host = host["value"]["stringValue"].as_str().unwrap();
            for span in all(&resource, "scopeSpans").iter().flat_map(|scope| all(scope, "spans")) {
                if span["traceId"] == trace {
                    let id = |key: &str| span[key].as_str().unwrap().to_owned();
                    found.push((id("spanId"), id("parentSpanId"), span["kind"].as_i64().unwrap(), host.to_owned()));
                }
            }
        }
    }
    found
}

/// A collector of another project gets the spans of both proxies over mutual TLS, and they are one trace: below the
/// client's span one of each proxy that was asked, and below that one of each proxy that asks.
#[test]
fn a_collector_gets_one_trace_of_both_proxies() {
    const SERVER: i64 = 2;
    const CLIENT: i64 = 3;
    MESH.test(async |mesh| {
        let client = mesh.pod_of("shop", "client").await.unwrap();
        let traces = [
            (
                "0af7651916cd43dd8448eb211c80319c",
                "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            ),
            ("463ac35c9f6413ad48485a3953bb6124", "b3: 463ac35c9f6413ad48485a3953bb6124-b7ad6b7169203331-1"),
        ];
        for (_, header) in traces {
            let command = ["curl", "-fsS", "--retry", "5", "-H", header, "http://web.shop/"];
            let answer = mesh.exec("shop", &client, &command).await.unwrap();
            assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        }
        for (trace, header) in traces {
            let spans = eventually("the collector has four spans", Duration::from_secs(60), async || {
                let spans = spans(mesh, trace).await;
                if spans.len() < 4 { Err(format!("{spans:?}")) } else { Ok(spans) }
            });
            let spans = spans.await;
            let (mut parent, mut way) = ("b7ad6b7169203331", Vec::new());
            while let Some((id, _, kind, host)) = spans.iter().find(|span| span.1 == parent) {
                (parent, way) = (id, [way, vec![(*kind, host.as_str())]].concat());
            }
            let [_, _, (_, server), _] = way[..] else { panic!("{header}: {spans:?}") };
            assert!(server.starts_with("web-"), "{server}");
            let expected = [(SERVER, client.as_str()), (CLIENT, &client), (SERVER, server), (CLIENT, server)];
            assert_eq!(way, expected, "{header}: {spans:?}");
        }
        // Prometheus knows the traces as exemplars of both sides' latencies.
        let prometheus = Prometheus::of(mesh).await.unwrap();
        for direction in ["inbound", "outbound"] {
            let latencies = format!(r#"response_latency_ms_bucket{{direction="{direction}", namespace="shop"}}"#);
            eventually("an exemplar of the last trace", Duration::from_secs(60), async || {
                let exemplars = prometheus.exemplars(&latencies).unwrap();
                let of = |pod: &str| exemplars.iter().any(|(by, trace)| by.starts_with(pod) && *trace == traces[1].0);
                let is_there = of(if direction == "inbound" { "web-" } else { &client });
                if is_there { Ok(()) } else { Err(format!("{direction}: {exemplars:?}")) }
            })
            .await;
        }
    });
}
