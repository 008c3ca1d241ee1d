//! `weft` with manifests, against a real API server: whether what it prints is what the cluster's own settings ask for,
//! and whether the server accepts it.
//!
//! Every test has namespaces of its own, so they run beside each other.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    io::Write as _,
    process::{Command, Output, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use weft_k8s_api::{
    inject::{Decision, inject},
    values::Values,
};
use weft_tests::{
    cluster::Cluster,
    output::{errors, succeeded},
};
use weft_tls::ca::Root;

const WEB: &str = "\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
spec:
  selector:
    matchLabels: {app: web}
  template:
    metadata:
      labels: {app: web}
    spec:
      initContainers:
      - name: migrate
        image: web:1
      containers:
      - name: web
        image: web:1
        ports:
        - containerPort: 8080
      volumes:
      - name: scripts
        configMap: {name: scripts, defaultMode: 0755}
";

/// A cluster with the settings of a mesh in a namespace, and a namespace for applications.
struct World {
    cluster: Cluster,
    mesh: String,
    shop: String,
    anchors: String,
}

impl World {
    /// `settings` are values of the chart.
    fn new(name: &str, settings: &str) -> Self {
        let cluster = Cluster::from_env().unwrap();
        let (mesh, shop) = (format!("cli-{name}-mesh"), format!("cli-{name}-shop"));
        let anchors = Root::generate("root.linkerd.cluster.local").unwrap().certificate_pem().to_owned();
        let world = Self { cluster, mesh, shop, anchors };
        for namespace in [&world.mesh, &world.shop] {
            world.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}).to_string());
        }
        // Certificates come from elsewhere, so that the chart needs none.
        let external = "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls";
        let helm = Command::new("helm")
            .args(["template", "weft", "charts/weft-control-plane", "--namespace", &world.mesh])
            .args(["--show-only", "templates/config.yaml", "--set", external, "--set", settings])
            .current_dir(Cluster::repository())
            .output()
            .unwrap();
        world.apply(&succeeded(&helm));
        let roots = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"ca-bundle.crt": world.anchors},
            "metadata": {"name": "linkerd-identity-trust-roots", "namespace": world.mesh},
        });
        world.apply(&roots.to_string());
        world
    }

    fn apply(&self, manifest: &str) {
        self.cluster.apply(manifest).unwrap();
    }

    /// `weft`, with the mesh's namespace.
    fn weft(&self, arguments: &[&str], input: &str) -> Output {
        let mut weft = self.cluster.command("weft");
        weft.args(arguments).env("LINKERD_NAMESPACE", &self.mesh);
        let mut running = weft.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = running.stdin.take().unwrap();
        // One that fails early does not read it.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        running.wait_with_output().unwrap()
    }

    /// The API server's words about a manifest that is not stored.
    fn accepted(&self, manifest: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("manifest.yaml");
        fs::write(&file, manifest).unwrap();
        let arguments = ["apply", "--dry-run=server", "-n", &self.shop, "-f", file.to_str().unwrap()];
        self.cluster.kubectl(&arguments).unwrap_or_else(|error| panic!("{error:#}\n{manifest}"))
    }

    fn done(self) {
        self.cluster.kubectl(&["delete", "namespace", &self.mesh, &self.shop, "--wait=false"]).unwrap();
    }
}

/// As a webhook would inject the pods of the Deployment, in that namespace and with these settings.
#[test]
fn a_whole_proxy_is_the_one_that_the_clusters_injector_would_add() {
    let world = World::new("manual", "clusterDomain=mesh.example,proxy.resources.cpu.request=70m");
    let annotation = "config.linkerd.io/skip-outbound-ports=25";
    world.cluster.kubectl(&["annotate", "namespace", &world.shop, annotation]).unwrap();
    let manifest = WEB.replace("  name: web\n", &format!("  name: web\n  namespace: {}\n", world.shop));
    let flags = ["--manual", "--proxy-log-level", "debug", "-"];
    let printed = succeeded(&world.weft(&[&["inject", "-o", "json"], &flags[..]].concat(), &manifest));
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let template = &printed["spec"]["template"];

    let map = world.cluster.get(&["-n", &world.mesh, "configmap", "linkerd-config"]).unwrap();
    let values = Values::parse(map["data"]["values"].as_str().unwrap()).unwrap();
    let config = values.inject_config(&world.mesh, &world.anchors).unwrap();
    let namespace = serde_json::from_value(world.cluster.get(&["namespace", &world.shop]).unwrap()).unwrap();
    let pod = json!({
        "metadata": {
            "namespace": world.shop,
            "labels": {"app": "web", "pod-template-hash": "abc"},
            "annotations": {"linkerd.io/inject": "enabled", "config.linkerd.io/proxy-log-level": "debug"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}],
        },
        "spec": {"containers": template["spec"]["containers"]},
    });
    let decision = inject(&serde_json::from_value(pod).unwrap(), Some(&namespace), &config).unwrap();
    let Decision::Injected(pod) = decision else { panic!("{decision:?}") };
    let mut expected = serde_json::to_value(&pod).unwrap();
    expected["metadata"]["annotations"].as_object_mut().unwrap().remove("linkerd.io/inject");
    expected["metadata"]["labels"].as_object_mut().unwrap().remove("pod-template-hash");
    for key in ["annotations", "labels"] {
        assert_eq!(template["metadata"][key], expected["metadata"][key], "{key}");
    }
    assert_eq!(template["metadata"]["annotations"]["config.linkerd.io/skip-outbound-ports"], "25");
    let (proxy, theirs) = (&template["spec"]["initContainers"][0], &expected["spec"]["initContainers"][0]);
    assert_eq!(proxy, theirs);
    assert_eq!(proxy["resources"]["requests"]["cpu"], "70m");
    let volumes = template["spec"]["volumes"].as_array().unwrap();
    assert_eq!(json!(volumes[1..]), expected["spec"]["volumes"]);

    let yaml = succeeded(&world.weft(&[&["inject"], &flags[..]].concat(), &manifest));
    assert!(world.accepted(&yaml).contains("deployment.apps/web created"));
    let plain = succeeded(&world.weft(&["uninject", "-o", "json", "-"], &yaml));
    let plain: Value = serde_json::from_str(&plain).unwrap();
    let annotations = &plain["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["config.linkerd.io/proxy-log-level"], "debug");
    assert_eq!(plain["spec"]["template"]["spec"]["initContainers"].as_array().unwrap().len(), 1);
    world.done();
}

/// `kubectl get -o yaml | weft inject - | kubectl apply -f -`
#[test]
fn what_a_cluster_prints_can_be_injected_and_applied() {
    let world = World::new("list", "clusterDomain=mesh.example");
    let shop = world.shop.as_str();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]},
    });
    let manifest =
        format!("{WEB}---\n{service}\n").replace("  name: web\n", &format!("  name: web\n  namespace: {shop}\n"));
    let manifest = manifest.replace("\"name\":\"web\"", &format!("\"name\":\"web\",\"namespace\":\"{shop}\""));
    world.apply(&manifest);
    // The list names the version it was read at: when the Deployment's controller writes its status meanwhile, the
    // server refuses the answer, and the command is given again.
    let given = world.cluster.until(Duration::from_secs(60), |cluster| {
        let list = cluster.kubectl(&["-n", shop, "get", "deploy,service", "-o", "yaml"])?;
        let injected = world.weft(&["inject", "--opaque-ports", "3306", "-"], &list);
        let report = errors(&injected);
        assert!(report.contains("deployment \"web\" injected"), "{report}");
        assert!(report.contains("service \"web\" annotated"), "{report}");
        cluster.apply(&succeeded(&injected))
    });
    given.unwrap();
    let stored = world.cluster.get(&["-n", shop, "deploy", "web"]).unwrap();
    let annotations = &stored["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["linkerd.io/inject"], "enabled");
    assert_eq!(annotations["config.linkerd.io/opaque-ports"], "3306");
    assert_eq!(stored["spec"]["template"]["spec"]["volumes"][0]["configMap"]["defaultMode"], 0o755);
    let stored = world.cluster.get(&["-n", shop, "service", "web"]).unwrap();
    assert_eq!(stored["metadata"]["annotations"]["config.linkerd.io/opaque-ports"], "3306");
    world.done();
}

#[test]
fn a_mesh_that_is_not_there_is_named() {
    let world = World::new("absent", "clusterDomain=mesh.example");
    let failed = world.weft(&["inject", "--manual", "-L", "cli-nowhere", "-"], WEB);
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.stdout.is_empty());
    let said = errors(&failed);
    assert!(said.contains("ConfigMap cli-nowhere/linkerd-config") && said.contains("-L"), "{said}");
    world.cluster.kubectl(&["-n", &world.mesh, "delete", "configmap", "linkerd-identity-trust-roots"]).unwrap();
    let said = errors(&world.weft(&["inject", "--manual", "-"], WEB));
    assert!(said.contains("linkerd-identity-trust-roots"), "{said}");
    world.done();
}

const OPEN_API: &str = "\
openapi: 3.0.0
servers: [{url: 'https://shop.example/v1'}]
paths:
  /books/{id}:
    get: {x-linkerd-retryable: true, responses: {200: {}, 5XX: {}}}
";

const PROTO: &str = "\
syntax = \"proto3\";
package shop.v1;
message Empty {}
service Books { rpc List(Empty) returns (Empty); }
";

/// The chart's definition and its rules accept every kind of profile, which has the cluster's domain.
#[test]
fn profiles_are_accepted() {
    let world = World::new("profile", "clusterDomain=mesh.example");
    let definitions = Command::new("helm")
        .args(["template", "weft", "charts/weft-crds", "--show-only", "templates/serviceprofiles.linkerd.io.yaml"])
        .current_dir(Cluster::repository())
        .output()
        .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("crd.yaml");
    fs::write(&file, succeeded(&definitions)).unwrap();
    let apply = ["apply", "--server-side", "--force-conflicts", "-f", file.to_str().unwrap()];
    world.cluster.kubectl(&apply).unwrap();
    let wait = ["wait", "--for=condition=established", "crd/serviceprofiles.linkerd.io", "--timeout=60s"];
    world.cluster.kubectl(&wait).unwrap();

    for (arguments, input, route) in [
        (&["--template"][..], "", "/authors/{id}"),
        (&["--open-api", "-"], OPEN_API, "GET /v1/books/{id}"),
        (&["--proto", "-"], PROTO, "List"),
    ] {
        let printed = succeeded(&world.weft(&[&["profile", "web", "-n", &world.shop], arguments].concat(), input));
        let name = format!("web.{}.svc.mesh.example", world.shop);
        world.cluster.serves("serviceprofiles.linkerd.io").unwrap();
        assert!(world.accepted(&printed).contains(&name), "{printed}");
        world.apply(&printed);
        let stored = world.cluster.get(&["-n", &world.shop, "serviceprofile.linkerd.io", &name]).unwrap();
        assert_eq!(stored["spec"]["routes"][0]["name"], route);
    }
    let failed = world.weft(&["profile", "web", "--template", "-L", "cli-nowhere"], "");
    assert_eq!((failed.status.code(), failed.stdout.len()), (Some(1), 0));
    let said = errors(&failed);
    assert!(said.contains("ConfigMap cli-nowhere/linkerd-config") && said.contains("--ignore-cluster"), "{said}");
    world.done();
}

/// In a real shell, with the script that `weft completion` prints.
#[test]
fn a_shell_completes_the_names_that_the_cluster_has() {
    let world = World::new("completion", "clusterDomain=mesh.example");
    let shop = world.shop.as_str();
    world.apply(&WEB.replace("  name: web\n", &format!("  name: web\n  namespace: {shop}\n")));
    world.cluster.kubectl(&["-n", shop, "create", "service", "clusterip", "books", "--tcp=80"]).unwrap();
    let run = ["-n", shop, "run", "db-0", "--image=db:1", "--restart=Never"];
    // The namespace's account takes a moment.
    world.cluster.until(Duration::from_secs(60), |cluster| cluster.kubectl(&run)).unwrap();
    let complete = |line: &[&str]| {
        let words: Vec<_> = line.iter().map(|word| format!("'{word}'")).collect();
        let script = format!(
            "source <(weft completion bash)\nCOMP_WORDS=({})\nCOMP_CWORD={}\n_clap_complete_weft weft '{}'\n\
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            line.len() - 1,
            line[line.len() - 1],
        );
        let output = world.cluster.command("bash").args(["-c", &script]).output().unwrap();
        succeeded(&output).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let namespaces = complete(&["weft", "status", "-n", "cli-completion-"]);
    assert_eq!(namespaces, [world.mesh.as_str(), shop]);
    assert_eq!(complete(&["weft", "trace", "-n", shop, "db"]), ["db-0"]);
    assert_eq!(complete(&["weft", "trace", "-n", shop, "deploy/"]), ["deploy/web"]);
    assert_eq!(complete(&["weft", "explain", "--namespace", shop, "db"]), ["db-0"]);
    assert_eq!(complete(&["weft", "profile", "--template", "-n", shop, "b"]), ["books"]);
    assert_eq!(complete(&["weft", "uninj"]), ["uninject"]);
    world.done();
}
