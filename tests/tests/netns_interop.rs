//! Programs of other projects through the mesh: h2spec against both sides of the proxy, and gRPC's interoperability cases between
//! grpc-go's client and server. `cargo xtask test netns` builds them and puts them beside our own programs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use weft_test_kit::{
    manifests::Manifests,
    mesh::{Mesh, Options, Shared, unique_name},
    wait::eventually,
};

/// The example mesh, and grpc-go's server.
static MESH: Shared = Shared::with(|| {
    let manifests = Manifests::example().unwrap();
    manifests.write("interop.yaml", INTEROP).unwrap();
    (manifests, Options { name: unique_name("t-interop"), ..Options::default() })
});

const INTEROP: &str = "\
apiVersion: v1
kind: ServiceAccount
metadata: {name: interop, namespace: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: interop, namespace: shop}
spec:
  replicas: 1
  selector: {matchLabels: {app: interop}}
  template:
    metadata: {labels: {app: interop}}
    spec:
      serviceAccountName: interop
      containers:
        - name: server
          image: weft.io/examples
          command: [grpc-interop-server]
          args: [--port=8080]
          ports: [{name: grpc, containerPort: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: interop, namespace: shop}
spec:
  selector: {app: interop}
  ports: [{name: grpc, port: 8080, targetPort: grpc}]
";

/// Cases of github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md that grpc-go's client has and that need no account.
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

/// What h2spec expects and does not get, with the reason. On a port whose protocol is detected, what does not begin as HTTP/2 is not
/// HTTP/2: the application answers it.
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
        eventually("the server answers", Duration::from_secs(20), async || interop(mesh, CASES[0]).await).await;
        for case in CASES {
            let passed = interop(mesh, case).await;
            assert_eq!(passed, Ok(()), "{case}");
        }
    });
}

/// Runs h2spec in a pod, and returns the names of the cases that failed.
async fn h2spec(mesh: &Mesh, namespace: &str, app: &str) -> Vec<String> {
    let pod = mesh.pod_of(namespace, app).await.unwrap();
    let command = ["h2spec", "--strict", "--host", "web.shop", "--port", "80", "--timeout", "2"];
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
