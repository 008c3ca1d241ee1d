//! `weft check` of clusters that are broken in one way each: the first failure or warning that a healthy installation
//! does not have names what was broken.
//!
//! The installation is real, but nothing runs: the API server has no nodes. What is not ready without nodes fails in
//! every row and is left out.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    process::Stdio,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use weft_tests::{certificates::Certificates, cluster::Cluster};
use weft_tls::ca::Root;

/// A namespace of its own: nothing finishes the deletion of other tests' namespaces.
const MESH: &str = "weft-broken";
const CLUSTER_WIDE: &str = "";
/// A user who may read everything, and the names of the role and the binding.
const READER: &str = "weft-test-reader";
/// `weft check` of an installation.
const INSTALLED: &[&str] = &[];

/// A way to break a cluster.
enum Break {
    /// The object does not exist.
    Delete(&'static str, &'static str),
    /// The object is another one.
    Edit(&'static str, &'static str, Box<dyn Fn(&mut Value)>),
    /// There is one object more.
    Create(Value),
    /// The cluster is as it should be; the command line is not that of a healthy installation.
    Nothing,
}

struct Row {
    name: &'static str,
    arguments: &'static [&'static str],
    broken: Break,
    check: &'static str,
    words: &'static [&'static str],
}

/// The cluster with an installation. Removes it at the end.
struct Installed {
    cluster: Cluster,
    directory: tempfile::TempDir,
}

impl Installed {
    fn new(root: &Root) -> Self {
        let this = Self { cluster: Cluster::from_env().unwrap(), directory: tempfile::tempdir().unwrap() };
        let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
        let certificates = Certificates::write(root.certificate_pem(), &issuer.certificate, &issuer.key).unwrap();
        let values = certificates.all();
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let definitions = this.helm(&["template", "weft-crds", "charts/weft-crds", "--set", "installGatewayAPI=true"]);
        let file = this.directory.path().join("definitions.yaml");
        fs::write(&file, definitions).unwrap();
        // Other tests may have installed their own definitions, and do without them.
        this.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", file.to_str().unwrap()]);
        this.kubectl(&["create", "clusterrole", READER, "--verb=get,list", "--resource=*.*"]);
        let (role, user) = (format!("--clusterrole={READER}"), format!("--user={READER}"));
        this.kubectl(&["create", "clusterrolebinding", READER, &role, &user]);
        this.kubectl(&["create", "namespace", MESH]);
        this.kubectl(&["label", "namespace", MESH, "pod-security.kubernetes.io/enforce=privileged"]);
        this.helm(&[&["install", "broken", "charts/weft-control-plane", "--namespace", MESH][..], &values].concat());
        this
    }

    fn remove(&self) {
        self.helm(&["uninstall", "broken", "--namespace", MESH, "--wait"]);
        self.kubectl(&["delete", "clusterrole,clusterrolebinding", READER]);
        self.kubectl(&["delete", "namespace", MESH, "--wait=false"]);
    }

    fn helm(&self, arguments: &[&str]) -> String {
        let output = self.cluster.command("helm").args(arguments).current_dir(Cluster::repository()).output().unwrap();
        assert!(output.status.success(), "helm {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn kubectl(&self, arguments: &[&str]) -> String {
        self.cluster.kubectl(arguments).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Applies a verb of kubectl to an object.
    fn write(&self, verb: &str, object: &Value) {
        let file = self.directory.path().join("object.json");
        fs::write(&file, object.to_string()).unwrap();
        self.kubectl(&[verb, "-f", file.to_str().unwrap()]);
    }

    /// An object as it can be created again.
    fn read(&self, namespace: &str, object: &str) -> Value {
        let scope: &[&str] = if namespace.is_empty() { &[] } else { &["-n", namespace] };
        let mut found = self.cluster.get(&[scope, &[object]].concat()).unwrap();
        let metadata = found["metadata"].as_object_mut().unwrap();
        for field in ["resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"] {
            metadata.remove(field);
        }
        found
    }

    /// The checks that failed or warn, in their order, each with its message.
    fn failures(&self, arguments: &[&str]) -> Vec<(String, String)> {
        let mut check = self.cluster.command("weft");
        let output = check
            .env("LINKERD_NAMESPACE", MESH)
            .args(["check", "-o", "json", "--wait", "0s"])
            .args(arguments)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
            panic!("{arguments:?}: {error}: {text}{}", String::from_utf8_lossy(&output.stderr))
        });
        assert_eq!(output.status.success(), report["success"] == true, "the exit code is not that of {report:#}");
        let categories = report["categories"].as_array().unwrap().iter();
        let checks = categories.flat_map(|category| category["checks"].as_array().unwrap());
        let failed = checks.filter(|check| check["result"] != "success");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        failed.map(|check| (text(&check["description"]), text(&check["error"]))).collect()
    }

    /// Breaks the cluster, checks it and repairs it. The error is what was found instead.
    fn check(&self, row: &Row) -> Result<(), String> {
        let before = if matches!(row.broken, Break::Nothing) { INSTALLED } else { row.arguments };
        let healthy: BTreeSet<String> = self.failures(before).into_iter().map(|(check, _)| check).collect();
        let found = match &row.broken {
            Break::Nothing => self.failures(row.arguments),
            Break::Delete(namespace, object) => {
                let whole = self.read(namespace, object);
                self.write("delete", &whole);
                let found = self.failures(row.arguments);
                self.write("create", &whole);
                found
            }
            Break::Edit(namespace, object, edit) => {
                let whole = self.read(namespace, object);
                let mut broken = whole.clone();
                edit(&mut broken);
                self.write("replace", &broken);
                let found = self.failures(row.arguments);
                self.write("replace", &whole);
                found
            }
            Break::Create(object) => {
                self.write("create", object);
                let found = self.failures(row.arguments);
                self.write("delete", object);
                found
            }
        };
        let Some((check, error)) = found.iter().find(|(check, _)| !healthy.contains(check)) else {
            return Err(format!("{}: nothing was found; without it: {healthy:?}", row.name));
        };
        if check != row.check || !row.words.iter().all(|word| error.contains(word)) {
            return Err(format!(
                "{}: expected {:?} with {:?}, found {check:?}: {error}",
                row.name, row.check, row.words
            ));
        }
        Ok(())
    }
}

/// Without nodes no pod becomes ready, and the command waits.
fn prints_what_passed_while_it_waits(installed: &Installed) {
    let mut weft = installed.cluster.command("weft");
    let mut check = weft.args(["check", "--wait", "300s", "-L", MESH]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(check.stdout.take().unwrap()).lines().map_while(Result::ok);
    let passed = lines.find(|line| line == "√ 'linkerd-config' config map can be read");
    check.kill().unwrap();
    check.wait().unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(passed.is_some(), "it did not wait: {rest:#?}");
    assert!(rest.iter().all(|line| !line.starts_with("Status check results")), "it printed at its end: {rest:#?}");
}

fn edit(namespace: &'static str, object: &'static str, edit: impl Fn(&mut Value) + 'static) -> Break {
    Break::Edit(namespace, object, Box::new(edit))
}

/// Replaces text in the chart's values.
fn in_values(from: &'static str, to: &'static str) -> Break {
    edit(MESH, "configmap/linkerd-config", move |config| {
        let values = config["data"]["values"].as_str().unwrap();
        let line =
            values.lines().find(|line| line.trim_start().starts_with(from)).unwrap_or_else(|| panic!("{values}"));
        let indent = &line[..line.len() - line.trim_start().len()];
        config["data"]["values"] = values.replace(line, &format!("{indent}{to}")).into();
    })
}

fn anchors(pem: String) -> Break {
    edit(MESH, "configmap/linkerd-identity-trust-roots", move |roots| roots["data"]["ca-bundle.crt"] = json!(pem))
}

/// The issuer's Secret with a field of this text.
fn issuer(field: &'static str, text: String) -> Break {
    edit(MESH, "secret/linkerd-identity-issuer", move |secret| {
        secret["data"].as_object_mut().unwrap().remove(field);
        secret["stringData"] = json!({ field: text });
    })
}

/// A root that was valid in 2020.
fn expired() -> String {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
}

fn namespace(annotation: &str, value: &str) -> Value {
    let metadata = json!({"name": "weft-test-check", "annotations": {annotation: value}});
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
}

fn node(status: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "weft-test-check"},
        "spec": {"podCIDR": "203.0.113.0/24", "podCIDRs": ["203.0.113.0/24"]}, "status": status})
}

/// The DaemonSet of the chart weft-agent, as far as the checks read it.
fn agent_alone() -> Value {
    let labels = json!({"app.kubernetes.io/part-of": "weft", "linkerd.io/control-plane-component": "agent",
        "linkerd.io/cni-resource": "true"});
    let template =
        json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "agent", "image": "agent"}]}});
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "weft-test-check", "namespace": "default", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": template}})
}

/// The same beside a configuration that is not of Weft's chart, such as Linkerd's.
fn agent_and_linkerd() -> Value {
    let metadata = json!({"name": "linkerd-config", "namespace": "default"});
    let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    json!({"apiVersion": "v1", "kind": "List", "items": [config, agent_alone()]})
}

/// A Service with this metadata beside its name.
fn service(field: &str, name: &str, value: &str) -> Value {
    let metadata = json!({"name": "weft-test-check", "namespace": "default", field: {name: value}});
    json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 80}]}})
}

/// Two namespaces that claim to be of one extension.
fn extensions() -> Value {
    // No other test has it, nor does one that looks for `viz` find these.
    let labels = json!({"linkerd.io/extension": "weft-test"});
    let namespace =
        |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
    let items = ["weft-test-extension", "weft-test-extension-2"].map(namespace);
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

fn rows(root: &Root) -> Vec<Row> {
    let row = |name, broken, check, words| Row { name, arguments: INSTALLED, broken, check, words };
    let with = |name, arguments, broken, check, words| Row { name, arguments, broken, check, words };
    let other = Root::generate("other").unwrap();
    let foreign = other.issue_issuer("foreign").unwrap();
    let config = "certificate config is valid";
    vec![
        with(
            "no kubeconfig",
            &["--kubeconfig", "/nonexistent"],
            Break::Nothing,
            "can initialize the client",
            &["/nonexistent"],
        ),
        with(
            "no context",
            &["--context", "weft-test-none"],
            Break::Nothing,
            "can initialize the client",
            &["weft-test-none"],
        ),
        with(
            "no namespace",
            &["-L", "weft-test-none"],
            Break::Nothing,
            "control plane namespace exists",
            &["weft-test-none"],
        ),
        with(
            "installed twice",
            &["--pre"],
            Break::Nothing,
            "control plane is not already installed",
            &["ConfigMap weft-broken/linkerd-config"],
        ),
        with(
            "no rights",
            &["--pre", "--as", "weft-test-nobody", "-L", "weft-test-none"],
            Break::Nothing,
            "control plane is not already installed",
            &["cannot be read", "weft-test-nobody"],
        ),
        with(
            "rights to read",
            &["--pre", "--as", READER, "-L", "weft-test-none"],
            Break::Nothing,
            "can create non-namespaced resources",
            &["customresourcedefinitions.apiextensions.k8s.io: this user may not create them"],
        ),
        with(
            "Pod Security",
            &["--pre"],
            edit(CLUSTER_WIDE, "namespace/weft-broken", |it| {
                it["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = json!("baseline");
            }),
            "control plane namespace admits the agent",
            &["Namespace weft-broken", "baseline"],
        ),
        with(
            "another agent",
            &["--pre"],
            Break::Create(agent_alone()),
            "no other agent of Weft is installed",
            &["DaemonSet default/weft-test-check", "cniEnabled=false"],
        ),
        with(
            "an old kernel",
            &["--pre"],
            Break::Create(node(
                &json!({"nodeInfo": {"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "",
                "kernelVersion": "4.19.0", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "",
                "operatingSystem": "linux", "osImage": "", "systemUUID": ""}}),
            )),
            "a node has a kernel that the agent supports",
            &["Node weft-test-check", "4.19"],
        ),
        with(
            "Linkerd's control plane, and Weft's agent alone",
            &["-L", "default"],
            Break::Create(agent_and_linkerd()),
            "agents have a control plane of Weft",
            &["DaemonSet default/weft-test-check", "`linkerd check`", "`weft status -L default`"],
        ),
        with(
            "Weft's agent alone",
            &["-L", "default"],
            Break::Create(agent_alone()),
            "agents have a control plane of Weft",
            &["DaemonSet default/weft-test-check", "`linkerd check`", "`weft status -L default`"],
        ),
        row(
            "no definition",
            Break::Delete(CLUSTER_WIDE, "customresourcedefinition/servers.policy.linkerd.io"),
            "control plane CustomResourceDefinitions exist",
            &["CustomResourceDefinition servers.policy.linkerd.io", "does not exist"],
        ),
        with(
            "no definition, and nothing else is asked for",
            &["--crds"],
            Break::Delete(CLUSTER_WIDE, "customresourcedefinition/meshtlsauthentications.policy.linkerd.io"),
            "control plane CustomResourceDefinitions exist",
            &[
                "CustomResourceDefinition meshtlsauthentications.policy.linkerd.io",
                "remedy: helm upgrade --install weft-crds",
            ],
        ),
        row(
            "an old Gateway API",
            edit(CLUSTER_WIDE, "customresourcedefinition/httproutes.gateway.networking.k8s.io", |it| {
                it["metadata"]["annotations"]["gateway.networking.k8s.io/bundle-version"] = json!("v1.0.0");
            }),
            "Gateway API CRDs are of a known version",
            &["httproutes.gateway.networking.k8s.io", "1.0.0"],
        ),
        with(
            "another version",
            &["--expected-version", "99.0.0"],
            Break::Nothing,
            "cli is up-to-date",
            &["99.0.0", env!("CARGO_PKG_VERSION")],
        ),
        row(
            "no configuration",
            Break::Delete(MESH, "configmap/linkerd-config"),
            "'linkerd-config' config map exists",
            &["ConfigMap weft-broken/linkerd-config"],
        ),
        row(
            "a broken configuration",
            in_values("clusterNetworks:", "clusterNetworks: half"),
            "'linkerd-config' config map can be read",
            &["data.values, clusterNetworks", "half"],
        ),
        row(
            "Services elsewhere",
            in_values("clusterNetworks:", "clusterNetworks: \"203.0.113.0/24\""),
            "cluster networks contains all services",
            &["Service default/kubernetes, spec.clusterIP"],
        ),
        row(
            "a node elsewhere",
            Break::Create(node(&json!({}))),
            "cluster networks contains all node podCIDRs",
            &["Node weft-test-check, spec.podCIDRs", "203.0.113.0/24"],
        ),
        row(
            "no role",
            Break::Delete(CLUSTER_WIDE, "clusterrole/linkerd-weft-broken-destination"),
            "control plane ClusterRoles exist",
            &["ClusterRole linkerd-weft-broken-destination"],
        ),
        row(
            "no binding",
            Break::Delete(CLUSTER_WIDE, "clusterrolebinding/linkerd-weft-broken-identity"),
            "control plane ClusterRoleBindings exist",
            &["ClusterRoleBinding linkerd-weft-broken-identity"],
        ),
        row(
            "no account",
            Break::Delete(MESH, "serviceaccount/linkerd-identity"),
            "control plane ServiceAccounts exist",
            &["ServiceAccount linkerd-identity in weft-broken"],
        ),
        row(
            "no injector",
            Break::Delete(CLUSTER_WIDE, "mutatingwebhookconfiguration/linkerd-proxy-injector-webhook-config"),
            "control plane MutatingWebhookConfigurations exist",
            &["linkerd-proxy-injector-webhook-config"],
        ),
        row(
            "no validator",
            Break::Delete(CLUSTER_WIDE, "validatingwebhookconfiguration/linkerd-policy-validator-webhook-config"),
            "control plane ValidatingWebhookConfigurations exist",
            &["linkerd-policy-validator-webhook-config"],
        ),
        row(
            "no agent",
            Break::Delete(MESH, "daemonset/weft-agent"),
            "agent DaemonSet exists",
            &["DaemonSet weft-broken/weft-agent"],
        ),
        row(
            "no anchors",
            Break::Delete(MESH, "configmap/linkerd-identity-trust-roots"),
            config,
            &["ConfigMap weft-broken/linkerd-identity-trust-roots", "does not exist"],
        ),
        row(
            "anchors that are not PEM",
            anchors("no PEM".into()),
            config,
            &["linkerd-identity-trust-roots, data[\"ca-bundle.crt\"]"],
        ),
        row(
            "anchors of others",
            anchors(other.certificate_pem().to_owned()),
            "issuer cert is issued by the trust anchor",
            &["Secret weft-broken/linkerd-identity-issuer", "CN=other"],
        ),
        row(
            "an old anchor",
            anchors(format!("{}{}", root.certificate_pem(), expired())),
            "trust anchors are within their validity period",
            &["linkerd-identity-trust-roots", "has expired"],
        ),
        row(
            "no issuer",
            Break::Delete(MESH, "secret/linkerd-identity-issuer"),
            config,
            &["Secret weft-broken/linkerd-identity-issuer"],
        ),
        row(
            "another issuer's key",
            issuer("key.pem", foreign.key.clone()),
            config,
            &["Secret weft-broken/linkerd-identity-issuer, data[\"key.pem\"]"],
        ),
        row(
            "an issuer that is not PEM",
            issuer("crt.pem", "no PEM".into()),
            config,
            &["Secret weft-broken/linkerd-identity-issuer, data[\"crt.pem\"]"],
        ),
        with(
            "no application",
            &["--proxy", "-n", "weft-test-none"],
            Break::Nothing,
            "data plane namespace exists",
            &["weft-test-none"],
        ),
        with(
            "an unreadable annotation",
            &["--proxy"],
            Break::Create(namespace("config.linkerd.io/skip-outbound-ports", "many")),
            "annotations of namespaces, workloads and pods can be read",
            &["Namespace weft-test-check", "skip-outbound-ports", "many"],
        ),
        with(
            "a label of a Service that has to be an annotation",
            &["--proxy"],
            Break::Create(service("labels", "config.linkerd.io/opaque-ports", "80")),
            "data plane service labels are configured correctly",
            &["Service default/weft-test-check", "config.linkerd.io/opaque-ports"],
        ),
        with(
            "an annotation of a Service that has to be a label",
            &["--proxy"],
            Break::Create(service("annotations", "mirror.linkerd.io/exported", "true")),
            "data plane service annotations are configured correctly",
            &["Service default/weft-test-check", "mirror.linkerd.io/exported"],
        ),
        row(
            "two namespaces of one extension",
            Break::Create(extensions()),
            "namespace configuration for extensions",
            &["weft-test-extension", "weft-test-extension-2"],
        ),
    ]
}

/// One test, because its objects are cluster-wide.
#[test]
fn what_passes_is_printed_at_once_and_what_is_broken_by_its_name() {
    let root = Root::generate("root.linkerd.cluster.local").unwrap();
    let installed = Installed::new(&root);
    prints_what_passed_while_it_waits(&installed);
    let wrong: Vec<String> = rows(&root).iter().filter_map(|row| installed.check(row).err()).collect();
    installed.remove();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
