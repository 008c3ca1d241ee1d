//! The webhooks, called by a real API server over TLS that they set up themselves.
//!
//! The webhook runs on this host, so the configurations name it by URL. Everything else is as in the chart: empty
//! Secrets, configurations without a `caBundle`, and failurePolicy Fail so that a failed handshake is a failed
//! request.

use std::{
    net::{IpAddr, UdpSocket},
    path::Path,
    time::{Duration, Instant},
};

use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{Namespace, Pod, Secret, SecurityContext, Service, ServiceAccount},
        events::v1::Event,
    },
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use weft_test_kit::wait::eventually;

use crate::{
    process::{PATIENCE, Process},
    turn::{Turn, Uses},
    world::{define, resource},
};

/// One webhook's objects in the API server, as in the chart.
struct Installation {
    client: Client,
    kubeconfig: String,
    host: IpAddr,
    namespace: String,
    configuration: (&'static str, &'static str),
    secret: &'static str,
    _turn: Turn,
}

impl Installation {
    /// A component of this installation, with its webhook reachable by the API server.
    fn process(&self, component: &str, arguments: &[&str]) -> Process {
        let common = ["--kubeconfig", &self.kubeconfig, "--controller-namespace", &self.namespace];
        Process::start(&[&[component], &common[..], &["--webhook-addr", "0.0.0.0:0"], arguments].concat())
    }

    async fn new(kind: &'static str, component: &'static str) -> Self {
        weft_tls::install_crypto_provider();
        let kubeconfig = std::env::var("KUBECONFIG")
            .expect("KUBECONFIG: `cargo xtask test cluster` brings up an API server, `cargo xtask kube env` prints the setting of one");
        let host = address_of_this_host().await;
        let client = Client::try_default().await.unwrap();
        let (secret, configuration, uses) = match component {
            "proxy-injector" => {
                ("linkerd-proxy-injector-k8s-tls", "linkerd-proxy-injector-webhook-config", Uses::Injector)
            }
            "sp-validator" => ("linkerd-sp-validator-k8s-tls", "linkerd-sp-validator-webhook-config", Uses::Nothing),
            // The policy controller checks policy resources.
            _ => ("linkerd-policy-validator-k8s-tls", "linkerd-policy-validator-webhook-config", Uses::Statuses),
        };
        let turn = Turn::wait(uses);
        let namespace = format!("webhook-{component}-{}", std::process::id());
        let installation =
            Self { client, kubeconfig, host, namespace, configuration: (kind, configuration), secret, _turn: turn };
        // Left over from an earlier run that was killed.
        let _ = installation.configurations().delete(configuration, &DeleteParams::default()).await;
        installation.create_namespace(&installation.namespace, json!({})).await;
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret}, "type": "Opaque"});
        installation.secrets().create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
        installation
    }

    /// Creates a namespace that only the webhooks of this test select.
    async fn create_namespace(&self, name: &str, annotations: Value) {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name,
            "annotations": annotations, "labels": {"weft.io/test": self.namespace,
                "pod-security.kubernetes.io/enforce": "restricted"}}});
        let api: Api<Namespace> = Api::all(self.client.clone());
        api.create(&PostParams::default(), &serde_json::from_value(namespace).unwrap()).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), name);
        eventually("the namespace has its service account", PATIENCE, async || {
            match accounts.get_opt("default").await {
                Ok(Some(_)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }

    async fn configure(&self, port: u16, rules: Value) {
        let (kind, name) = self.configuration;
        let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": {"name": name}, "webhooks": [{"name": format!("{}.linkerd.io", self.namespace),
                "clientConfig": {"url": format!("https://{}:{port}/", self.host)}, "rules": [rules],
                "namespaceSelector": {"matchLabels": {"weft.io/test": self.namespace}},
                "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail", "timeoutSeconds": 10}]});
        let configuration = serde_json::from_value(configuration).unwrap();
        self.configurations().create(&PostParams::default(), &configuration).await.unwrap();
    }

    fn configurations(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &resource("admissionregistration.k8s.io", "v1", self.configuration.0))
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn certificate(&self) -> ByteString {
        self.secrets().get(self.secret).await.unwrap().data.unwrap()["tls.crt"].clone()
    }

    async fn bundle(&self) -> String {
        let configuration = self.configurations().get(self.configuration.1).await.unwrap();
        configuration.data["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap_or_default().to_owned()
    }

    async fn uninstall(&self) {
        let _ = self.configurations().delete(self.configuration.1, &DeleteParams::default()).await;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let ours = ListParams::default().labels(&format!("weft.io/test={}", self.namespace));
        for namespace in namespaces.list(&ours).await.unwrap() {
            let _ = namespaces.delete(&namespace.name_any(), &DeleteParams::background()).await;
        }
    }
}

/// Where the API server reaches this host: the address from which this host reaches the API server.
pub(crate) async fn address_of_this_host() -> IpAddr {
    let config = Config::infer().await.unwrap();
    let server = config.cluster_url.authority().unwrap().to_string();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect(server).unwrap();
    socket.local_addr().unwrap().ip()
}

/// Runs a test and cleans up, whatever its result.
async fn installed(installation: Installation, test: impl AsyncFnOnce(&Installation)) {
    let installation = &installation;
    let outcome = futures::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(test(installation))).await;
    installation.uninstall().await;
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Waits until the API server calls the webhook: it learns of the configuration by a watch.
pub(crate) async fn called(what: &str, is_called: impl AsyncFn() -> Result<bool, kube::Error>) {
    eventually(what, PATIENCE, async || match is_called().await {
        Ok(true) => Ok(()),
        Ok(false) => Err("it is not called".to_owned()),
        Err(error) => Err(error.to_string()),
    })
    .await;
}

/// Whether a webhook denied a request.
fn denied<T>(answer: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match answer {
        Ok(_) => Ok(false),
        Err(kube::Error::Api(status)) if status.message.contains("denied the request") => Ok(true),
        Err(error) => Err(error),
    }
}

pub(crate) fn dry_run() -> PostParams {
    PostParams { dry_run: true, ..PostParams::default() }
}

fn restricted_spec() -> Value {
    json!({"securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "app", "image": "app:1", "ports": [{"containerPort": 3306}],
            "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]})
}

pub(crate) fn pod(name: &str, annotations: Value) -> Pod {
    serde_json::from_value(json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations}, "spec": restricted_spec()}))
    .unwrap()
}

fn deployment(name: &str, annotations: Value) -> Deployment {
    serde_json::from_value(json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": restricted_spec()}}}))
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_get_their_proxy_and_bad_annotations_are_refused() {
    installed(Installation::new("MutatingWebhookConfiguration", "proxy-injector").await, async |installation| {
        let files = tempfile::tempdir().unwrap();
        let (values, anchors) = (files.path().join("values"), files.path().join("ca-bundle.crt"));
        std::fs::write(&values, "proxy: {image: {name: weft-proxy, version: '1'}, uid: nobody}").unwrap();
        std::fs::write(&anchors, weft_tls::ca::Root::generate("root").unwrap().certificate_pem()).unwrap();
        let process = installation.process(
            "proxy-injector",
            &["--values", values.to_str().unwrap(), "--identity-trust-anchors", anchors.to_str().unwrap()],
        );
        // There are neither settings nor a webhook configuration yet: both are reported.
        eventually("not ready, and why", PATIENCE, async || {
            let (status, body) = process.get("/ready").await;
            let said = status == 503
                && body.contains("proxy.uid: ")
                && body.contains("linkerd-proxy-injector-webhook-config does not exist");
            if said { Ok(()) } else { Err(format!("{status}: {body}")) }
        })
        .await;
        std::fs::write(&values, "proxy: {image: {name: weft-proxy, version: '1'}}").unwrap();
        let port = process.bound("webhook").await.port();
        let rules = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": ["pods", "services"], "scope": "Namespaced"});
        installation.configure(port, rules).await;
        process.ready().await;

        let app = format!("{}-app", installation.namespace);
        installation.create_namespace(&app, json!({"linkerd.io/inject": "enabled"})).await;
        let pods: Api<Pod> = Api::namespaced(installation.client.clone(), &app);
        called("a proxy is added", async || {
            let created = pods.create(&dry_run(), &pod("first", json!({}))).await?;
            Ok(created.spec.and_then(|spec| spec.init_containers).is_some())
        })
        .await;
        let created = pods.create(&PostParams::default(), &pod("web", json!({}))).await.unwrap();
        let spec = created.spec.as_ref().unwrap();
        let sidecar = &spec.init_containers.as_ref().unwrap()[0];
        assert_eq!((sidecar.name.as_str(), sidecar.image.as_deref()), ("linkerd-proxy", Some("weft-proxy:1")));
        assert_eq!(spec.init_containers.as_ref().unwrap().len(), 1, "no init container");
        assert_eq!(sidecar.restart_policy.as_deref(), Some("Always"));
        let environment = sidecar.env.as_ref().unwrap();
        let required = environment.iter().find(|variable| variable.name == "WEFT_PROXY_REQUIRE_REDIRECT");
        assert_eq!(required.unwrap().value.as_deref(), Some("true"));
        assert_eq!(created.annotations()["config.linkerd.io/opaque-ports"], "3306");
        assert_eq!(created.labels()["linkerd.io/control-plane-ns"], installation.namespace);

        let plain =
            pods.create(&PostParams::default(), &pod("plain", json!({"linkerd.io/inject": "disabled"}))).await.unwrap();
        assert_eq!(plain.spec.as_ref().unwrap().init_containers, None);

        // A Deployment may have a longer name than a label.
        let mut owned = pod("owned", json!({"linkerd.io/inject": ""}));
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{}-abc", "n".repeat(64)), "uid": "u"});
        owned.metadata.owner_references = Some(vec![serde_json::from_value(owner).unwrap()]);
        owned.metadata.labels = Some([("pod-template-hash".to_owned(), "abc".to_owned())].into());
        let created = pods.create(&dry_run(), &owned).await.unwrap();
        assert_eq!(created.labels()["linkerd.io/proxy-deployment"], "n".repeat(63));

        // Unreadable, but not policy: the pod starts with the default. It has no token of its own either.
        let ignored = json!({"config.linkerd.io/proxy-cpu-limit": "many", "config.linkerd.io/access-log": "json"});
        let mut tokenless = pod("ignored", ignored);
        tokenless.spec.as_mut().unwrap().automount_service_account_token = Some(false);
        let created = pods.create(&PostParams::default(), &tokenless).await.unwrap();
        let sidecar = &created.spec.as_ref().unwrap().init_containers.as_ref().unwrap()[0];
        assert_eq!(sidecar.resources.clone().unwrap_or_default().limits, None);

        let mut as_proxy = pod("as-proxy", json!({}));
        as_proxy.spec.as_mut().unwrap().containers[0].security_context =
            Some(SecurityContext { run_as_user: Some(2102), ..SecurityContext::default() });
        let refused = pods.create(&PostParams::default(), &as_proxy).await.unwrap_err().to_string();
        assert!(refused.contains("weft.io/proxy-exemption: cgroup"), "{refused}");

        let bad = json!({"config.linkerd.io/skip-inbound-ports": "many"});
        let refused = pods.create(&PostParams::default(), &pod("bad", bad.clone())).await.unwrap_err().to_string();
        for part in ["denied the request", "config.linkerd.io/skip-inbound-ports", "\"many\"", "expected ports"] {
            assert!(refused.contains(part), "{refused}");
        }

        let services: Api<Service> = Api::namespaced(installation.client.clone(), &app);
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "db"},
            "spec": {"ports": [{"port": 3306}]}});
        let service = services.create(&PostParams::default(), &serde_json::from_value(service).unwrap()).await.unwrap();
        assert_eq!(service.annotations()["config.linkerd.io/opaque-ports"], "3306");

        owners_are_told(installation, &app, bad).await;
        new_values_are_used(&process, &values, &pods).await;
        an_overwritten_bundle_is_repaired(installation, &pods).await;
    })
    .await;
}

/// The Events are on the Deployment, where people look.
async fn owners_are_told(installation: &Installation, namespace: &str, bad: Value) {
    let deployments: Api<Deployment> = Api::namespaced(installation.client.clone(), namespace);
    let events: Api<Event> = Api::namespaced(installation.client.clone(), namespace);
    for (name, annotations, type_, reason, note) in [
        ("good", json!({}), "Normal", "Injected", "injected"),
        (
            "broken",
            bad,
            "Warning",
            "InjectionFailed",
            "config.linkerd.io/skip-inbound-ports: bad value \"many\", expected",
        ),
    ] {
        let created = deployments.create(&PostParams::default(), &deployment(name, annotations)).await.unwrap();
        eventually("the Deployment has its Event", PATIENCE, async || {
            let found = events.list(&ListParams::default()).await.unwrap().items;
            let reported = found.iter().any(|event| {
                let regarding = event.regarding.as_ref().unwrap();
                regarding.kind.as_deref() == Some("Deployment")
                    && regarding.uid == created.metadata.uid
                    && event.type_.as_deref() == Some(type_)
                    && event.reason.as_deref() == Some(reason)
                    && event.note.as_deref().is_some_and(|text| text.contains(note))
                    && event.reporting_controller.as_deref() == Some("linkerd.io/proxy-injector")
            });
            let notes: Vec<_> = found.iter().map(|event| (&event.reason, &event.regarding, &event.note)).collect();
            if reported { Ok(()) } else { Err(format!("{notes:?}")) }
        })
        .await;
    }
}

async fn new_values_are_used(process: &Process, values: &Path, pods: &Api<Pod>) {
    let image = async || {
        let created = pods.create(&dry_run(), &pod("again", json!({}))).await.unwrap();
        created.spec.unwrap().init_containers.unwrap()[0].image.clone().unwrap()
    };
    std::fs::write(values, "proxy: {image: {name: weft-proxy, version: '2'}}").unwrap();
    eventually("the new version is used", PATIENCE, async || match image().await {
        image if image == "weft-proxy:2" => Ok(()),
        image => Err(image),
    })
    .await;
    // An unreadable file changes nothing.
    std::fs::write(values, "proxy: [").unwrap();
    process.says("the old settings stay in force").await;
    assert_eq!(image().await, "weft-proxy:2");
}

async fn an_overwritten_bundle_is_repaired(installation: &Installation, pods: &Api<Pod>) {
    let ours = installation.bundle().await;
    let other = weft_tls::ca::Root::generate("somebody else").unwrap();
    let hook = json!({"name": format!("{}.linkerd.io", installation.namespace),
        "clientConfig": {"caBundle": ByteString(other.certificate_pem().as_bytes().to_vec())}});
    let patch = Patch::Strategic(json!({"webhooks": [hook]}));
    installation.configurations().patch(installation.configuration.1, &PatchParams::default(), &patch).await.unwrap();
    eventually("the bundle is repaired", PATIENCE, async || match installation.bundle().await {
        bundle if bundle == ours => Ok(()),
        bundle => Err(bundle),
    })
    .await;
    eventually("pods are injected again", PATIENCE, async || {
        pods.create(&dry_run(), &pod("after", json!({}))).await.map(|_| ()).map_err(|error| error.to_string())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_under_requests_without_a_failure() {
    installed(Installation::new("ValidatingWebhookConfiguration", "sp-validator").await, async |installation| {
        define(&installation.client, "serviceprofiles.linkerd.io").await;
        let start = || installation.process("sp-validator", &["--webhook-certificate-lifetime", "15s"]);
        // Two replicas share the Secret; the API server calls the first.
        let replicas = [start(), start()];
        let rules = json!({"apiGroups": ["linkerd.io"], "apiVersions": ["v1alpha1", "v1alpha2"],
            "operations": ["CREATE", "UPDATE"], "resources": ["serviceprofiles"]});
        installation.configure(replicas[0].bound("webhook").await.port(), rules).await;
        for replica in &replicas {
            replica.ready().await;
        }
        profiles_are_checked(installation).await;

        let profiles = profiles(installation);
        let first = installation.certificate().await;
        let (mut requests, mut certificates) = (0, vec![first]);
        let deadline = Instant::now() + Duration::from_secs(120);
        // Three generations: two change-overs, the second of which drops the first authority.
        // However slow the machine is, enough requests see them.
        let is_over = |requests: i32, certificates: usize| {
            requests > 50 && certificates >= 3 && replicas.iter().all(|one| one.lines("serving certificate").len() >= 3)
        };
        while !is_over(requests, certificates.len()) {
            assert!(Instant::now() < deadline, "no rotation in time");
            if let Err(error) = profiles.create(&dry_run(), &profile(json!({}))).await {
                panic!("request {requests} failed after {} certificates: {error}", certificates.len());
            }
            requests += 1;
            let now = installation.certificate().await;
            if certificates.last() != Some(&now) {
                certificates.push(now);
            }
        }
        let generated: usize = replicas.iter().map(|one| one.lines("certificate generated").len()).sum();
        assert!(generated <= certificates.len() + 1, "{generated} written, {} seen", certificates.len());
    })
    .await;
}

fn profiles(installation: &Installation) -> Api<DynamicObject> {
    let resource = resource("linkerd.io", "v1alpha2", "ServiceProfile");
    Api::namespaced_with(installation.client.clone(), &installation.namespace, &resource)
}

fn profile(spec: Value) -> DynamicObject {
    serde_json::from_value(json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
        "metadata": {"name": "web.shop.svc.cluster.local"}, "spec": spec}))
    .unwrap()
}

async fn profiles_are_checked(installation: &Installation) {
    let api = profiles(installation);
    let route = |condition: Value| json!({"routes": [{"name": "r", "condition": condition}]});
    called("a bad profile is denied", async || denied(api.create(&dry_run(), &profile(route(json!({})))).await)).await;
    for (spec, expected) in [
        (route(json!({"all": [{"mthod": "GET"}]})), "spec.routes[0].condition.all[0].mthod: unknown field `mthod`"),
        (route(json!({})), "spec.routes[0].condition: matches nothing in particular"),
        (
            json!({"retryBudget": {"retryRatio": 0.2, "minRetriesPerSecond": 1, "ttl": "soon"}}),
            "spec.retryBudget.ttl: bad duration \"soon\"",
        ),
    ] {
        let error = api.create(&PostParams::default(), &profile(spec)).await.unwrap_err();
        let kube::Error::Api(status) = &error else { panic!("{error}") };
        assert_eq!(status.code, 400, "{status:?}");
        assert!(
            status.message.contains("denied the request: ServiceProfile \"web.shop.svc.cluster.local\""),
            "{status:?}"
        );
        assert!(status.message.contains(expected), "{status:?}");
    }
    api.create(&PostParams::default(), &profile(route(json!({"method": "GET"})))).await.unwrap();
    let patch = Patch::Merge(json!({"spec": route(json!({"not": {}}))}));
    let error = api.patch("web.shop.svc.cluster.local", &PatchParams::default(), &patch).await.unwrap_err().to_string();
    assert!(error.contains("spec.routes[0].condition.not: matches nothing"), "{error}");
    api.delete("web.shop.svc.cluster.local", &DeleteParams::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_resources_that_nobody_could_act_upon_are_refused() {
    installed(Installation::new("ValidatingWebhookConfiguration", "policy-validator").await, async |installation| {
        for kind in [
            "servers.policy",
            "serverauthorizations.policy",
            "authorizationpolicies.policy",
            "meshtlsauthentications.policy",
            "networkauthentications.policy",
            "httplocalratelimitpolicies.policy",
            "egressnetworks.policy",
            "httproutes.policy",
            // Not checked here, but watched by the same process.
            "externalworkloads.workload",
        ] {
            define(&installation.client, &format!("{kind}.linkerd.io")).await;
        }
        let process = installation.process("policy", &[
            "--source",
            "kube",
            "--lease-identity",
            "policy-0",
            "--policy-addr",
            "127.0.0.1:0",
        ]);
        let rules = json!({"apiGroups": ["policy.linkerd.io"], "apiVersions": ["v1alpha1", "v1beta1", "v1beta2", "v1beta3"],
            "operations": ["CREATE", "UPDATE"], "resources": ["servers", "serverauthorizations", "authorizationpolicies",
                "meshtlsauthentications", "networkauthentications", "httplocalratelimitpolicies", "egressnetworks",
                "httproutes"]});
        installation.configure(process.bound("webhook").await.port(), rules).await;
        process.ready().await;
        let create = async |version: &str, kind: &str, spec: Value| {
            let resource = resource("policy.linkerd.io", version, kind);
            let api: Api<DynamicObject> =
                Api::namespaced_with(installation.client.clone(), &installation.namespace, &resource);
            let object = json!({"apiVersion": format!("policy.linkerd.io/{version}"), "kind": kind,
                "metadata": {"generateName": "x-"}, "spec": spec});
            let object = serde_json::from_value(object).unwrap();
            api.create(&PostParams::default(), &object).await.map_err(|error| error.to_string())
        };
        called("a bad object is denied", async || {
            let spec = json!({"podSelector": {}, "port": 80, "accessPolicy": "everybody"});
            let refused = create("v1beta3", "Server", spec).await;
            Ok(refused.is_err_and(|error| error.contains("denied the request")))
        })
        .await;
        let server = json!({"podSelector": {}, "port": 80});
        create("v1beta1", "Server", server.clone()).await.unwrap();
        create("v1beta3", "Server", server).await.unwrap();
        let networks = |cidr: &str| json!({"networks": [{"cidr": cidr, "except": ["10.1.0.0/16"]}]});
        create("v1alpha1", "NetworkAuthentication", networks("10.0.0.0/8")).await.unwrap();
        let route = |path: &str| json!({"parentRefs": [{"kind": "Server", "name": "s"}],
            "rules": [{"matches": [{"path": {"value": path}}]}]});
        for version in ["v1alpha1", "v1beta1", "v1beta2", "v1beta3"] {
            create(version, "HTTPRoute", route("/a")).await.unwrap();
        }
        create("v1alpha1", "EgressNetwork", json!({"trafficPolicy": "Deny"})).await.unwrap();
        let limits = |total: u32, identity: u32| json!({"targetRef": {"group": "policy.linkerd.io", "kind": "Server", "name": "s"},
            "total": {"requestsPerSecond": total}, "identity": {"requestsPerSecond": identity}});
        create("v1alpha1", "HTTPLocalRateLimitPolicy", limits(2, 1)).await.unwrap();
        for (version, kind, spec, expected) in [
            ("v1beta3", "Server", json!({"podSelector": {}, "port": 80, "accessPolicy": "everybody"}), "spec.accessPolicy"),
            ("v1alpha1", "NetworkAuthentication", networks("11.0.0.0/8"), "spec.networks[0].except[0]"),
            ("v1alpha1", "MeshTLSAuthentication", json!({"identities": ["A B"]}), "spec.identities[0]: bad identity"),
            (
                "v1alpha1",
                "AuthorizationPolicy",
                json!({"targetRef": {"kind": "Namespace", "name": "other"}, "requiredAuthenticationRefs": []}),
                "spec.targetRef.name: namespace \"other\"",
            ),
            (
                "v1beta1",
                "ServerAuthorization",
                json!({"server": {"name": "s"}, "client": {"meshTLS": {"unauthenticatedTLS": false}}}),
                "spec.client.meshTLS: admits no client",
            ),
            ("v1beta3", "HTTPRoute", route("a"), "spec.rules[0].matches[0].path.value: relative path"),
            ("v1alpha1", "EgressNetwork", json!({"trafficPolicy": "Deny", "networks": []}), "spec.networks: empty"),
            ("v1alpha1", "HTTPLocalRateLimitPolicy", limits(1, 2), "spec.identity.requestsPerSecond: 2"),
        ] {
            let error = create(version, kind, spec).await.unwrap_err();
            assert!(error.contains("denied the request") && error.contains(expected), "{kind}: {error}");
        }
    })
    .await;
}
