//! From Linkerd to Weft, by the commands of docs/migration.md as they are written, on a real API server without nodes.
//!
//! Linkerd is two charts with its names, labels and records: definitions, and some objects of a control plane. What
//! runs, and the restarts, are left to `cluster_tutorial`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, os::unix::fs::symlink, path::Path, process::Output};

use serde_json::{Value, json};
use weft_k8s_api::manifest::split;
use weft_tests::{
    cluster::Cluster,
    output::{errors, succeeded},
};
use weft_tls::ca::Root;

/// A namespace of its own, in place of the document's `linkerd`: nothing finishes the deletion of other tests'.
const MESH: &str = "linkerd-moves";
/// That of the agent alone.
const AGENT: &str = "linkerd-moves-cni";
/// The label of Linkerd's charts on their objects.
const CHART: &str = "helm.sh/chart";

struct Migration {
    cluster: Cluster,
    /// The reader's: the document's commands write files.
    directory: tempfile::TempDir,
}

impl Migration {
    fn helm(&self, arguments: &[&str]) -> String {
        succeeded(&self.cluster.command("helm").args(arguments).current_dir(self.directory.path()).output().unwrap())
    }

    fn weft(&self, arguments: &[&str]) -> Output {
        self.cluster.command("weft").args(arguments).output().unwrap()
    }

    /// The checks that did not pass, as `result: description: error`, and whether all is well.
    fn check_pre(&self) -> (bool, Vec<String>) {
        let output = self.weft(&["check", "--pre", "-L", MESH, "-o", "json", "--wait", "0s"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", errors(&output)));
        let categories = report["categories"].as_array().unwrap().iter();
        let checks = categories.flat_map(|category| category["checks"].as_array().unwrap());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let others = checks.filter(|check| check["result"] != "success");
        let lines =
            others.map(|it| format!("{}: {}: {}", text(&it["result"]), text(&it["description"]), text(&it["error"])));
        (output.status.success(), lines.collect())
    }

    /// Installs a chart with these manifests as Linkerd's of this name.
    fn install(&self, name: &str, manifests: &[Value], values: &Value) {
        let chart = self.directory.path().join(name);
        fs::create_dir_all(chart.join("templates")).unwrap();
        fs::write(
            chart.join("Chart.yaml"),
            json!({"apiVersion": "v2", "name": name, "version": "2026.8.3"}).to_string(),
        )
        .unwrap();
        let texts: Vec<_> = manifests.iter().map(Value::to_string).collect();
        assert!(!texts.iter().any(|text| text.contains("{{")), "a template in a manifest");
        fs::write(chart.join("templates/all.yaml"), texts.join("\n---\n")).unwrap();
        let file = self.directory.path().join("given.yaml");
        fs::write(&file, values.to_string()).unwrap();
        self.helm(&["install", name, name, "--namespace", MESH, "-f", file.to_str().unwrap()]);
    }

    fn definitions(&self) -> Vec<Value> {
        let all = self.cluster.get(&["customresourcedefinitions"]).unwrap()["items"].take();
        let Value::Array(all) = all else { panic!("{all}") };
        let name = |it: &Value| it["metadata"]["name"].as_str().unwrap().to_owned();
        all.into_iter().filter(|it| name(it).ends_with("linkerd.io")).collect()
    }
}

/// The definitions of Weft's chart with the metadata of Linkerd's.
fn definitions(migration: &Migration) -> Vec<Value> {
    let rendered = migration.helm(&["template", "weft-crds", "charts/weft-crds"]);
    let documents = split(&rendered).into_iter().map(|document| serde_yaml_ng::from_str(document.text).unwrap());
    let all = documents.filter(Value::is_object).map(|mut definition: Value| {
        definition["metadata"] = json!({"name": definition["metadata"]["name"], "labels": labels("linkerd-crds")});
        definition
    });
    all.collect()
}

fn labels(chart: &str) -> Value {
    json!({CHART: format!("{chart}-2026.8.3"), "linkerd.io/control-plane-ns": MESH})
}

/// Some of Linkerd's objects: those that the document's commands read, and of each kind one, most of which Weft has,
/// too.
fn control_plane(anchor: &str, issuer: &str, key: &str) -> Vec<Value> {
    let object = |version: &str, kind: &str, name: &str, content: Value| {
        let namespaced = !kind.starts_with("Cluster") && !kind.ends_with("Configuration");
        let namespace = namespaced.then_some(MESH);
        let mut object = json!({"apiVersion": version, "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "labels": labels("linkerd-control-plane")}});
        object.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
        object
    };
    let (rbac, webhooks) = ("rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1");
    let role = format!("linkerd-{MESH}-destination");
    let pod = json!({"metadata": {"labels": {"app": "linkerd"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "linkerd"}]}});
    let mut always = pod.clone();
    always["spec"]["restartPolicy"] = json!("Always");
    vec![
        object("v1", "ConfigMap", "linkerd-config", json!({"data": {"values": "clusterDomain: cluster.local\n"}})),
        object("v1", "ConfigMap", "linkerd-identity-trust-roots", json!({"data": {"ca-bundle.crt": anchor}})),
        object("v1", "Secret", "linkerd-identity-issuer", json!({"stringData": {"crt.pem": issuer, "key.pem": key}})),
        object("v1", "ServiceAccount", "linkerd-destination", json!({})),
        object("v1", "Service", "linkerd-dst", json!({"spec": {"ports": [{"port": 8086}]}})),
        object(
            "apps/v1",
            "Deployment",
            "linkerd-destination",
            json!({"spec": {"selector": {"matchLabels": {"app": "linkerd"}}, "template": always}}),
        ),
        object(
            "batch/v1",
            "CronJob",
            "linkerd-heartbeat",
            json!({"spec": {"schedule": "0 0 * * *", "jobTemplate": {"spec": {"template": pod}}}}),
        ),
        object(rbac, "ClusterRole", &role, json!({"rules": []})),
        object(
            rbac,
            "ClusterRoleBinding",
            &role,
            json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}}),
        ),
        object(webhooks, "MutatingWebhookConfiguration", "linkerd-proxy-injector-webhook-config", json!({})),
        object(webhooks, "ValidatingWebhookConfiguration", "linkerd-policy-validator-webhook-config", json!({})),
    ]
}

/// The commands of the steps that an API server can take, for this test's namespace.
fn commands(document: &str) -> String {
    let section = document.split("\n## ").find(|section| section.starts_with("The whole mesh\n")).unwrap();
    let with_helm = section.split("\n### ").next().unwrap();
    let (mut script, mut is_open) = (String::new(), false);
    for line in with_helm.lines().map(|line| line.strip_prefix("   ").unwrap_or(line)) {
        match line {
            "```console" => is_open = true,
            "```" => is_open = false,
            // What waits for pods, and what is for each namespace of applications.
            line if !is_open || line.starts_with("$ weft check") || line.contains("NAMESPACE") => {}
            line => script.extend([line.strip_prefix("$ ").unwrap_or(line), "\n"]),
        }
    }
    let script = script.replace(" linkerd ", &format!(" {MESH} "));
    script.replace("release-namespace=linkerd\n", &format!("release-namespace={MESH}\n"))
}

/// One migration, because its objects are cluster-wide.
#[test]
fn definitions_and_certificates_stay_and_linkerds_control_plane_goes() {
    let migration = Migration { cluster: Cluster::from_env().unwrap(), directory: tempfile::tempdir().unwrap() };
    let cluster = &migration.cluster;
    let directory = migration.directory.path();
    let charts = Cluster::repository().join("charts").canonicalize().unwrap();
    symlink(charts, directory.join("charts")).unwrap();
    // Those of other tests.
    for definition in migration.definitions() {
        let name = definition["metadata"]["name"].as_str().unwrap();
        cluster.kubectl(&["delete", "customresourcedefinition", name, "--wait"]).unwrap();
    }
    for namespace in [MESH, AGENT] {
        cluster.kubectl(&["create", "namespace", namespace]).unwrap();
    }
    let root = Root::generate("root.linkerd.cluster.local").unwrap();
    let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
    migration.install("linkerd-crds", &definitions(&migration), &json!({}));
    let values = json!({
        "controllerLogLevel": "debug", "proxy": {"logLevel": "warn,linkerd=debug"}, "cniEnabled": true,
        "identityTrustAnchorsPEM": root.certificate_pem(),
        "identity": {"issuer": {"tls": {"crtPEM": issuer.certificate, "keyPEM": issuer.key}}},
    });
    let objects = control_plane(root.certificate_pem(), &issuer.certificate, &issuer.key);
    migration.install("linkerd-control-plane", &objects, &values);
    cluster.serves("servers.policy.linkerd.io").unwrap();
    let server = json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
        "metadata": {"name": "kept", "namespace": "default"},
        "spec": {"podSelector": {"matchLabels": {"app": "none"}}, "port": 80}});
    cluster.apply(&server.to_string()).unwrap();
    let policy =
        || cluster.get(&["-n", "default", "servers.policy.linkerd.io", "kept"]).unwrap()["metadata"]["uid"].take();
    let uid = policy();

    // Where the agent alone is there, it has to go first.
    migration.helm(&["install", "only-agent", "charts/weft-agent", "--namespace", AGENT]);
    let (passed, found) = migration.check_pre();
    let is_named = |line: &String| {
        let words = ["error: no other agent of Weft is installed", "linkerd-cni", "cniEnabled=false"];
        words.iter().all(|word| line.contains(word))
    };
    assert!(!passed && found.iter().any(is_named), "{found:#?}");
    let refused = migration.weft(&["install", "-L", "weft-test-none"]);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0));
    assert!(errors(&refused).contains("DaemonSet linkerd-moves-cni/linkerd-cni"), "{}", errors(&refused));
    migration.helm(&["uninstall", "only-agent", "--namespace", AGENT, "--wait"]);
    let (passed, found) = migration.check_pre();
    assert!(passed && found.len() == 1 && found[0].starts_with("warning: no other mesh is installed"), "{found:#?}");

    let document = fs::read_to_string(Cluster::repository().join("docs/migration.md")).unwrap();
    run(&migration, directory, &commands(&document));

    let (passed, found) = migration.check_pre();
    let installed = |line: &String| line.starts_with("error: control plane is not already installed");
    assert!(!passed && found.len() == 1 && found.iter().all(installed), "{found:#?}");
    assert_eq!(migration.helm(&["list", "--namespace", MESH, "-q"]), "weft-control-plane\nweft-crds\n");
    assert_eq!(policy(), uid, "the policy is another one");
    let definitions = migration.definitions();
    assert!(definitions.len() > 5, "{}", definitions.len());
    for definition in definitions {
        let metadata = &definition["metadata"];
        assert_eq!(metadata["annotations"]["meta.helm.sh/release-name"], "weft-crds", "{metadata}");
        assert_eq!(metadata["labels"]["app.kubernetes.io/part-of"], "weft", "{metadata}");
    }
    let kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,\
                 deployments,cronjobs,services,secrets,configmaps,serviceaccounts";
    let selector = format!("{CHART} in (linkerd-control-plane-2026.8.3, linkerd-crds-2026.8.3)");
    assert_eq!(cluster.kubectl(&["get", kinds, "-A", "-l", &selector, "-o", "name"]).unwrap().trim(), "");
    let roots = cluster.get(&["-n", MESH, "configmap", "linkerd-identity-trust-roots"]).unwrap();
    assert_eq!(roots["data"]["ca-bundle.crt"].as_str().unwrap().trim(), root.certificate_pem().trim());
    let config = cluster.get(&["-n", MESH, "configmap", "linkerd-config"]).unwrap();
    assert!(config["data"]["values"].as_str().unwrap().contains("warn,linkerd=debug"), "{config:#}");

    cluster.delete(&server.to_string()).unwrap();
    for release in ["weft-control-plane", "weft-crds"] {
        migration.helm(&["uninstall", release, "--namespace", MESH, "--wait"]);
    }
    cluster.kubectl(&["delete", "namespace", MESH, AGENT, "--wait=false"]).unwrap();
}

fn run(migration: &Migration, directory: &Path, script: &str) {
    let mut bash = migration.cluster.command("bash");
    bash.args(["-euxo", "pipefail", "-c", script]).current_dir(directory).env("LINKERD_NAMESPACE", MESH);
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{script}\n{}", errors(&output));
    for command in ["helm uninstall linkerd-control-plane", "helm install weft-crds", "helm install weft-control-plane"]
    {
        assert!(script.contains(command), "{command} is not in the document any more: {script}");
    }
}
