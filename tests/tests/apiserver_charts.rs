//! The charts, rendered by the real helm, against a real API server: what they refuse, whether the server accepts the
//! output, the accounts' permissions, and that the control plane's own proxy equals the one that the injector adds to
//! other pods.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use serde_json::{Value, json};
use weft_k8s_api::{
    inject::{Decision, inject},
    values::Values,
};
use weft_tests::cluster::Cluster;
use weft_tls::ca::Root;

const CONTROL_PLANE: &str = "charts/weft-control-plane";
const CRDS: &str = "charts/weft-crds";
const MESH: &str = "linkerd";

/// Certificates in files, for `--set-file`.
struct Certificates(tempfile::TempDir);

impl Certificates {
    fn generate() -> Self {
        let root = Root::generate("root.linkerd.cluster.local").unwrap();
        let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
        let directory = tempfile::tempdir().unwrap();
        for (name, pem) in
            [("ca.crt", root.certificate_pem()), ("issuer.crt", &issuer.certificate), ("issuer.key", &issuer.key)]
        {
            fs::write(directory.path().join(name), pem).unwrap();
        }
        Self(directory)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn set(&self, value: &str, file: &str) -> [String; 2] {
        ["--set-file".to_owned(), format!("{value}={}", self.path(file))]
    }

    /// All values that the chart requires.
    fn all(&self) -> Vec<String> {
        [
            self.set("identityTrustAnchorsPEM", "ca.crt"),
            self.set("identity.issuer.tls.crtPEM", "issuer.crt"),
            self.set("identity.issuer.tls.keyPEM", "issuer.key"),
        ]
        .concat()
    }
}

fn helm(arguments: &[&str], more: &[String]) -> Output {
    let mut helm = Command::new("helm");
    helm.args(arguments).args(more).current_dir(Cluster::repository()).output().unwrap()
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn render(more: &[String]) -> String {
    succeeded(&helm(&["template", "weft", CONTROL_PLANE, "--namespace", MESH], more))
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// The objects of rendered YAML.
fn objects(cluster: &Cluster, yaml: &str) -> Vec<Value> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("objects.yaml");
    fs::write(&file, yaml).unwrap();
    let dry = ["create", "--dry-run=client", "--validate=false", "-o", "json", "-f", file.to_str().unwrap()];
    let printed = cluster.kubectl(&dry).unwrap();
    let documents = serde_json::Deserializer::from_str(&printed).into_iter::<Value>();
    let flatten = |document: Value| match document["items"].as_array() {
        Some(items) => items.clone(),
        None => vec![document],
    };
    documents.flat_map(|document| flatten(document.unwrap())).collect()
}

fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} is rendered"))
}

#[test]
fn a_value_that_cannot_be_right_is_refused_by_name() {
    let certificates = Certificates::generate();
    let (anchors, crt, key) = ("identityTrustAnchorsPEM", "identity.issuer.tls.crtPEM", "identity.issuer.tls.keyPEM");
    let without = |value: &str| -> Vec<String> {
        let pairs = certificates.all().chunks(2).map(<[_]>::to_vec).collect::<Vec<_>>();
        pairs.into_iter().filter(|pair| !pair[1].starts_with(value)).flatten().collect()
    };
    let with = |value: &str, setting: &[String]| [without(value), setting.to_vec()].concat();
    let set = |setting: &str| [certificates.all(), strings(&["--set", setting])].concat();
    for (row, arguments, words) in [
        ("no trust anchor", without(anchors), &[anchors, "--set-file"][..]),
        ("no issuer", without(crt), &[crt, "--set-file"]),
        ("no issuer's key", without(key), &[key, "--set-file"]),
        (
            "a path instead of a file",
            with(anchors, &strings(&["--set", "identityTrustAnchorsPEM=ca.crt"])),
            &[anchors, "--set-file"],
        ),
        ("a key as trust anchor", with(anchors, &certificates.set(anchors, "issuer.key")), &[anchors, "private key"]),
        ("a key as issuer", with(crt, &certificates.set(crt, "issuer.key")), &[crt, "not a PEM certificate"]),
        ("a certificate as key", with(key, &certificates.set(key, "issuer.crt")), &[key, "not a PEM private key"]),
        ("misspelt", set("controllerReplica=3"), &["controllerReplica"]),
        ("no level", set("controllerLogLevel=loud"), &["controllerLogLevel", "loud"]),
        ("no policy", set("proxy.defaultInboundPolicy=open"), &["/proxy/defaultInboundPolicy", "all-unauthenticated"]),
        ("no network", set("clusterNetworks=everything"), &["clusterNetworks", "everything"]),
        ("no port", set("proxyInit.ignoreInboundPorts=http"), &["ignoreInboundPorts"]),
        ("Linkerd's, and not supported", set("proxy.tracing.enabled=true"), &["proxy.tracing", "not supported yet"]),
        ("no duration", set("proxy.inboundConnectTimeout=1m30s"), &["inboundConnectTimeout", "1m30s"]),
        ("no fraction", set("proxy.runtime.workers.maximumCPURatio=2"), &["maximumCPURatio"]),
        ("Linkerd's, switched off", set("identity.serviceAccountTokenProjection=false"), &["not supported yet"]),
        ("IPv6 without slices", set("enableEndpointSlices=false,disableIPv6=false"), &["enableEndpointSlices", "IPv6"]),
        ("no transport mode", set("proxy.outboundTransportMode=tunnel"), &["/proxy/outboundTransportMode"]),
        (
            "Linkerd's image",
            set("controllerImage=cr.l5d.io/linkerd/controller"),
            &["controllerImage", "Linkerd's image"],
        ),
        ("nobody signed it", set("proxyInjector.externalSecret=true"), &["proxyInjector.externalSecret", "caBundle"]),
    ] {
        let output = helm(&["template", "weft", CONTROL_PLANE, "--namespace", MESH], &arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{row}: it was taken");
        assert!(words.iter().all(|word| said.contains(word)), "{row}: {said}");
    }
}

/// Values files of Linkerd's users; the images in them are Linkerd's.
#[test]
fn linkerds_own_values_are_understood() {
    let certificates = Certificates::generate();
    let images = strings(&["--set", "controllerImage=weft/control-plane,proxy.image.name=weft/proxy"]);
    let with = |file: &str, more: &[&str]| {
        let arguments = [strings(&["-f", file]), certificates.all(), images.clone(), strings(more)].concat();
        render(&arguments)
    };
    assert!(with("k8s-api/linkerd/values.yaml", &[]).contains("--identity-issuance-lifetime=24h0m0s"));
    let available = with("k8s-api/linkerd/values-ha.yaml", &[]);
    for expected in ["maxUnavailable: 1\n", "matchLabelKeys: [pod-template-hash]", "memory: 250Mi\n", "cpu: 100m\n"] {
        assert!(available.contains(expected), "{expected}");
    }
    let meaningless = with("k8s-api/linkerd/values.yaml", &["--set", "cniEnabled=true,proxyInit.runAsRoot=true"]);
    assert!(!meaningless.contains("linkerd-init"));
    let digest = format!("sha256:{}", "0".repeat(64));
    let pinned =
        format!("controllerImageVersion={digest},proxy.image.name=weft/proxy@{digest},agent.image.version={digest}");
    let pinned = with("k8s-api/linkerd/values.yaml", &["--set", &pinned, "--set", "controllerLogLevel=fatal"]);
    for expected in ["weft/control-plane@sha256:", "weft/proxy@sha256:", "weft-agent@sha256:", "--log-level=error"] {
        assert!(pinned.contains(expected), "{expected}");
    }
}

#[test]
fn rendering_twice_is_rendering_once() {
    let certificates = Certificates::generate();
    let values = certificates.all();
    // Generated certificates would differ each time, so every upgrade would restart everything.
    assert_eq!(render(&values), render(&values));
}

#[test]
fn what_discovery_may_read_depends_on_what_it_is_to_do() {
    let certificates = Certificates::generate();
    let with = |setting: &str| render(&[certificates.all(), strings(&["--set", setting])].concat());
    let (linked, plain) = (with("enableRemoteDiscovery=true"), render(&certificates.all()));
    for part in ["name: remote-discovery", "--enable-remote-discovery=true"] {
        assert!(linked.contains(part) && !plain.contains(part), "{part}");
    }
    let by_endpoints = with("enableEndpointSlices=false");
    for part in ["resources: [endpoints]", "--enable-endpoint-slices=false"] {
        assert!(by_endpoints.contains(part) && !plain.contains(part), "{part}");
    }
}

#[test]
fn the_issuers_key_is_in_its_secret_only() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = Certificates::generate();
    let key = fs::read_to_string(Path::new(&certificates.path("issuer.key"))).unwrap();
    let line = key.lines().nth(1).unwrap();
    let rendered = objects(&cluster, &render(&certificates.all()));
    let holders: Vec<_> = rendered.iter().filter(|object| object.to_string().contains(line)).collect();
    assert!(holders.is_empty(), "{holders:?}");
    let secret = object(&rendered, "Secret", "linkerd-identity-issuer");
    assert!(secret["data"]["key.pem"].is_string());
    // An upgrade must not empty what the control plane fills.
    for name in ["linkerd-proxy-injector-k8s-tls", "linkerd-sp-validator-k8s-tls", "linkerd-policy-validator-k8s-tls"] {
        assert!(object(&rendered, "Secret", name)["data"].is_null(), "{name}");
    }
}

#[test]
fn a_client_authority_reaches_every_webhook() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = Certificates::generate();
    let set = strings(&["--set-file", &format!("webhookClientCA={}", certificates.path("ca.crt"))]);
    for (more, expected) in [(&set[..], 3), (&[], 0)] {
        let rendered = objects(&cluster, &render(&[certificates.all(), more.to_vec()].concat()));
        let deployments = rendered.iter().filter(|object| object["kind"] == "Deployment");
        let told = deployments.flat_map(|object| {
            let pod = &object["spec"]["template"]["spec"];
            let volumes = pod["volumes"].to_string();
            let containers = pod["containers"].as_array().unwrap().clone();
            containers.into_iter().filter(move |container| {
                let told = container["args"].to_string().contains("--webhook-client-ca=");
                let mounted = container["volumeMounts"].to_string().contains("/var/run/linkerd/webhook");
                assert!(told == mounted && (!told || volumes.contains("linkerd-webhook-client-ca")), "{container}");
                told
            })
        });
        assert_eq!(told.count(), expected);
    }
}

#[test]
fn the_control_planes_own_proxy_is_the_injectors() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = Certificates::generate();
    let tuning = "proxy.resources.cpu.request=100m,proxy.ports.admin=4999,proxy.cores=2,proxy.runtime.workers.maximum=3,\
                  proxy.runtime.workers.maximumCPURatio=0.5,proxy.requireTLSOnInboundPorts=1,\
                  proxy.enableShutdownEndpoint=true,proxy.shutdownGracePeriod=30s,proxy.waitBeforeExitSeconds=5,\
                  proxy.control.streams.lifetime=2h,proxy.inboundConnectTimeout=1s,\
                  proxy.disableOutboundProtocolDetectTimeout=true,proxy.inbound.server.http2.maxConcurrentStreams=9,\
                  proxy.experimentalEnv[0].name=A,proxy.experimentalEnv[0].value=a";
    let settings = strings(&["--set", tuning]);
    let rendered = objects(&cluster, &render(&[certificates.all(), settings].concat()));
    let text = |object: &Value, key: &str| object["data"][key].as_str().unwrap().to_owned();
    let values = Values::parse(&text(object(&rendered, "ConfigMap", "linkerd-config"), "values")).unwrap();
    let anchors = text(object(&rendered, "ConfigMap", "linkerd-identity-trust-roots"), "ca-bundle.crt");
    let config = values.inject_config(MESH, &anchors).unwrap();

    let template = &object(&rendered, "Deployment", "linkerd-proxy-injector")["spec"]["template"];
    let bare = json!({
        "metadata": {
            "namespace": MESH,
            "annotations": {"linkerd.io/inject": "enabled", "config.linkerd.io/opaque-ports": "8443"}
        },
        "spec": {"containers": template["spec"]["containers"]}
    });
    let decision = inject(&serde_json::from_value(bare).unwrap(), None, &config).unwrap();
    let Decision::Injected(pod) = decision else { panic!("{decision:?}") };
    let injected = serde_json::to_value(&pod).unwrap();
    let comparable = |pod: &Value| {
        let mut proxy = pod["spec"]["initContainers"][0].clone();
        // From the ConfigMap there, inlined in the environment here.
        let environment = proxy["env"].as_array().unwrap().iter();
        let others = environment.filter(|variable| variable["name"] != "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS");
        proxy["env"] = others.cloned().collect();
        proxy
    };
    let (ours, theirs) = (comparable(template), comparable(&injected));
    for (name, value) in theirs.as_object().unwrap() {
        assert_eq!(&ours[name], value, "{name}");
    }
    assert_eq!(ours.as_object().unwrap().len(), theirs.as_object().unwrap().len());
    for volume in injected["spec"]["volumes"].as_array().unwrap() {
        let volumes = template["spec"]["volumes"].as_array().unwrap();
        assert!(volumes.contains(volume), "{volume} is not among {volumes:?}");
    }
}

/// Tokens arrive there.
#[test]
fn the_identity_service_refuses_plaintext() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = objects(&cluster, &render(&Certificates::generate().all()));
    let tls_ports = |name: &str| {
        let spec = &object(&rendered, "Deployment", name)["spec"]["template"]["spec"];
        let containers =
            ["containers", "initContainers"].into_iter().filter_map(|list| spec[list].as_array()).flatten();
        let variables = containers.filter_map(|container| container["env"].as_array()).flatten();
        let mut found = variables.filter(|variable| variable["name"] == "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS");
        found.next().map(|variable| variable["value"].clone())
    };
    assert_eq!(tls_ports("linkerd-identity"), Some(json!("8080")));
    assert_eq!(tls_ports("linkerd-destination"), None);
}

/// `linkerd check` compares names (`linkerd2:pkg/healthcheck/healthcheck.go`).
#[test]
fn a_stock_check_finds_what_it_looks_for() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = objects(&cluster, &render(&Certificates::generate().all()));
    for (kind, name) in [
        ("ClusterRole", "linkerd-linkerd-destination"),
        ("ClusterRole", "linkerd-linkerd-identity"),
        ("ClusterRole", "linkerd-linkerd-proxy-injector"),
        ("ClusterRole", "linkerd-policy"),
        ("ClusterRoleBinding", "linkerd-linkerd-destination"),
        ("ClusterRoleBinding", "linkerd-linkerd-identity"),
        ("ClusterRoleBinding", "linkerd-linkerd-proxy-injector"),
        ("ClusterRoleBinding", "linkerd-destination-policy"),
        ("ServiceAccount", "linkerd-destination"),
        ("ServiceAccount", "linkerd-identity"),
        ("ServiceAccount", "linkerd-proxy-injector"),
        ("ServiceAccount", "linkerd-heartbeat"),
        ("MutatingWebhookConfiguration", "linkerd-proxy-injector-webhook-config"),
        ("ValidatingWebhookConfiguration", "linkerd-sp-validator-webhook-config"),
        ("ValidatingWebhookConfiguration", "linkerd-policy-validator-webhook-config"),
    ] {
        let found = object(&rendered, kind, name);
        assert_eq!(found["metadata"]["labels"]["linkerd.io/control-plane-ns"], MESH, "{kind} {name}");
    }
    let config = &object(&rendered, "ConfigMap", "linkerd-config")["data"];
    assert!(config["linkerd-crds-chart-version"].as_str().unwrap().starts_with("weft-crds-"), "{config}");
    assert!(config["values"].as_str().unwrap().contains("\ndisableHeartBeat: true"), "{config}");
    assert!(rendered.iter().all(|object| object["kind"] != "CronJob"));
}

/// What Weft's proxy does not do, Linkerd's does.
#[test]
fn values_of_linkerds_proxy_are_passed_to_it() {
    let tracing = "proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=otel.obs:4317,proxy.image.name=";
    let certificates = Certificates::generate();
    for (image, accepted) in [("cr.l5d.io/linkerd/proxy", true), ("localhost/weft-proxy", false)] {
        let settings = [certificates.all(), strings(&["--set", &format!("{tracing}{image}")])].concat();
        let output = helm(&["template", "weft", CONTROL_PLANE, "--namespace", MESH], &settings);
        assert_eq!(output.status.success(), accepted, "{image}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Its pod uses the node's network: any process of the node can reach its listeners.
#[test]
fn the_agents_api_is_on_no_network() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = objects(&cluster, &render(&Certificates::generate().all()));
    let container = &object(&rendered, "DaemonSet", "weft-agent")["spec"]["template"]["spec"]["containers"][0];
    let arguments = container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap());
    let listening: Vec<_> = arguments.filter(|argument| argument.contains("addr")).collect();
    assert_eq!(listening, ["--metrics-addr=$(HOST_IP):9650", "--metrics-addr=127.0.0.1:9650"]);
    let ports = container["ports"].as_array().unwrap();
    assert_eq!(ports.iter().map(|port| &port["name"]).collect::<Vec<_>>(), ["agent-admin"]);
}

/// One installation, because its objects are cluster-wide.
#[test]
fn an_installation_has_what_it_needs_and_leaves_nothing() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = Certificates::generate();
    let manifest = |chart: &[&str], more: &[String]| succeeded(&helm(&[&["template", "weft"], chart].concat(), more));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rendered.yaml");
    let apply = |yaml: &str, how: &[&str]| {
        fs::write(&file, yaml).unwrap();
        cluster.kubectl(&[&["apply", "-f", file.to_str().unwrap()], how].concat())
    };
    // Other tests may have installed their own definitions.
    let force = ["--server-side", "--force-conflicts"];
    apply(&manifest(&[CRDS], &strings(&["--set", "installGatewayAPI=true"])), &force).unwrap();

    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MESH}});
    apply(&namespace.to_string(), &[]).unwrap();
    for (row, values) in [
        ("defaults", vec![]),
        ("production", strings(&["-f", "charts/weft-control-plane/values-ha.yaml"])),
        ("IPv6", strings(&["--set", "disableIPv6=false"])),
        (
            "certificates of other tools",
            strings(&[
                "--set",
                "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls",
                "--set",
                "proxyInjector.externalSecret=true,proxyInjector.injectCaFrom=linkerd/injector",
            ]),
        ),
    ] {
        let rendered = render(&[certificates.all(), values].concat());
        apply(&rendered, &["--dry-run=server"]).unwrap_or_else(|error| panic!("{row}: {error:#}"));
    }

    let install = |more: &[&str]| {
        let arguments = ["install", "weft-charts", CONTROL_PLANE, "--namespace", MESH];
        helm(&[&arguments[..], more].concat(), &certificates.all())
    };
    let label = |value: &str| {
        let label = format!("pod-security.kubernetes.io/enforce{value}");
        cluster.kubectl(&["label", "--overwrite", "namespace", MESH, &label]).unwrap()
    };
    label("=baseline");
    let refused = String::from_utf8_lossy(&install(&[]).stderr).into_owned();
    assert!(refused.contains("pod-security.kubernetes.io/enforce=privileged"), "{refused}");
    label("=privileged");
    cluster.kubectl(&["delete", "crd", "serviceprofiles.linkerd.io", "--wait"]).unwrap();
    let refused = String::from_utf8_lossy(&install(&[]).stderr).into_owned();
    assert!(refused.contains("serviceprofiles.linkerd.io") && refused.contains("helm install weft-crds"), "{refused}");
    apply(&manifest(&[CRDS], &[]), &force).unwrap();
    succeeded(&install(&[]));

    accounts_are_limited(&cluster);
    destination_writes_its_own_slices_only(&cluster);

    succeeded(&helm(&["uninstall", "weft-charts", "--namespace", MESH, "--wait"], &[]));
    let kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings,\
                 daemonsets,deployments,services,secrets,configmaps,roles,rolebindings,serviceaccounts";
    let left = cluster.kubectl(&["get", kinds, "-A", "-l", "linkerd.io/control-plane-ns", "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
    cluster.kubectl(&["delete", "namespace", MESH, "--wait=false"]).unwrap();
}

/// RBAC lets it write every EndpointSlice; the chart's admission policy lets it write those of ExternalWorkloads.
fn destination_writes_its_own_slices_only(cluster: &Cluster) {
    const OWN: &str = "linkerd-external-workloads-controller";
    const OTHER: &str = "endpointslice-controller.k8s.io";
    let slice = |name: &str, manager: &str| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [],
            "metadata": {"name": name, "namespace": "default", "labels": {"endpointslice.kubernetes.io/managed-by": manager}},
        })
    };
    let directory = tempfile::tempdir().unwrap();
    let write = |verb: &str, slice: &Value, user: &[&str]| {
        let file = directory.path().join("slice.json");
        fs::write(&file, slice.to_string()).unwrap();
        cluster.kubectl(&[&[verb, "-f", file.to_str().unwrap()], user].concat()).map_err(|error| format!("{error:#}"))
    };
    let account = format!("--as=system:serviceaccount:{MESH}:linkerd-destination");
    let destination = [account.as_str()];
    // The API server takes a moment to enforce a new policy.
    let refused = cluster.until(Duration::from_secs(30), |_| {
        let foreign = slice("weft-test-foreign", OTHER);
        match write("create", &foreign, &destination) {
            Err(refusal) => Ok(refusal),
            Ok(_) => {
                write("delete", &foreign, &[]).map_err(anyhow::Error::msg)?;
                anyhow::bail!("it created another controller's slice")
            }
        }
    });
    let refused = refused.unwrap();
    assert!(refused.contains("writes EndpointSlices of ExternalWorkloads only"), "{refused}");

    write("create", &slice("weft-test-foreign", OTHER), &[]).unwrap();
    for (verb, manager) in [("replace", OTHER), ("replace", OWN), ("delete", OTHER)] {
        let refused = write(verb, &slice("weft-test-foreign", manager), &destination).unwrap_err();
        assert!(refused.contains("EndpointSlices of ExternalWorkloads only"), "{verb} {manager}: {refused}");
    }
    write("create", &slice("weft-test-own", OWN), &destination).unwrap();
    write("replace", &slice("weft-test-own", OWN), &destination).unwrap();
    write("replace", &slice("weft-test-own", OTHER), &destination).unwrap_err();
    write("delete", &slice("weft-test-own", OWN), &destination).unwrap();
    write("delete", &slice("weft-test-foreign", OTHER), &[]).unwrap();
}

fn accounts_are_limited(cluster: &Cluster) {
    let may = |account: &str, question: &[&str]| {
        let user = format!("--as=system:serviceaccount:{MESH}:{account}");
        let asked = cluster.command("kubectl").args(["auth", "can-i", &user]).args(question).output().unwrap();
        asked.status.success()
    };
    let every = ["services", "pods", "endpointslices.discovery.k8s.io", "servers.policy.linkerd.io"];
    for resource in every {
        assert!(may("linkerd-destination", &["watch", resource, "-A"]), "{resource}");
    }
    for (account, question, expected) in [
        ("linkerd-destination", &["update", "leases/linkerd-destination-endpoint-write", "-n", MESH][..], true),
        ("linkerd-destination", &["update", "leases/policy-controller-write", "-n", MESH], true),
        ("linkerd-destination", &["update", "leases/another", "-n", MESH], false),
        ("linkerd-destination", &["get", "deployments/linkerd-destination", "-n", MESH], true),
        ("linkerd-destination", &["get", "deployments/another", "-n", MESH], false),
        ("linkerd-destination", &["watch", "egressnetworks.policy.linkerd.io", "-A"], true),
        ("linkerd-destination", &["patch", "egressnetworks.policy.linkerd.io", "--subresource=status", "-A"], true),
        ("linkerd-destination", &["patch", "egressnetworks.policy.linkerd.io", "-A"], false),
        ("linkerd-destination", &["patch", "httproutes.policy.linkerd.io", "--subresource=status", "-A"], true),
        ("linkerd-destination", &["update", "httproutes.policy.linkerd.io", "--subresource=status", "-A"], false),
        ("linkerd-destination", &["patch", "servers.policy.linkerd.io", "--subresource=status", "-A"], false),
        ("linkerd-destination", &["create", "leases", "-n", "default"], false),
        ("linkerd-destination", &["patch", "leases/linkerd-destination-endpoint-write", "-n", MESH], false),
        ("linkerd-destination", &["update", "secrets/linkerd-sp-validator-k8s-tls", "-n", MESH], true),
        ("linkerd-destination", &["patch", "secrets/linkerd-sp-validator-k8s-tls", "-n", MESH], false),
        ("linkerd-destination", &["update", "endpointslices.discovery.k8s.io", "-A"], true),
        ("linkerd-destination", &["patch", "endpointslices.discovery.k8s.io", "-A"], false),
        ("linkerd-destination", &["get", "secrets/linkerd-identity-issuer", "-n", MESH], false),
        ("linkerd-destination", &["list", "secrets", "-n", MESH], false),
        ("linkerd-destination", &["patch", "pods", "-A"], false),
        (
            "linkerd-destination",
            &["patch", "validatingwebhookconfigurations/linkerd-sp-validator-webhook-config"],
            true,
        ),
        ("linkerd-destination", &["patch", "validatingwebhookconfigurations/another"], false),
        ("linkerd-heartbeat", &["list", "namespaces"], false),
        ("linkerd-heartbeat", &["get", "configmaps/linkerd-config", "-n", MESH], false),
        ("linkerd-identity", &["create", "tokenreviews.authentication.k8s.io"], true),
        ("linkerd-identity", &["get", "secrets/linkerd-identity-issuer", "-n", MESH], false),
        ("linkerd-identity", &["watch", "pods", "-A"], false),
        ("linkerd-proxy-injector", &["watch", "namespaces"], true),
        ("linkerd-proxy-injector", &["update", "secrets/linkerd-proxy-injector-k8s-tls", "-n", MESH], true),
        ("linkerd-proxy-injector", &["patch", "secrets/linkerd-proxy-injector-k8s-tls", "-n", MESH], false),
        ("linkerd-proxy-injector", &["get", "secrets/linkerd-policy-validator-k8s-tls", "-n", MESH], false),
        ("linkerd-proxy-injector", &["patch", "pods", "-A"], false),
        ("weft-agent", &["watch", "pods", "-A"], true),
        ("weft-agent", &["create", "events.events.k8s.io", "-n", "default"], true),
        ("weft-agent", &["get", "secrets", "-n", MESH], false),
        ("weft-agent", &["patch", "pods", "-A"], false),
        ("weft-agent", &["get", "daemonsets/weft-agent", "-n", MESH], true),
        ("weft-agent", &["get", "daemonsets/another", "-n", MESH], false),
    ] {
        assert_eq!(may(account, question), expected, "{account}: {question:?}");
    }
}
