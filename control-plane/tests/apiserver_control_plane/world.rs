//! Namespaces, objects and certificates of one test.

use std::{
    net::SocketAddr,
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::{
    apps::v1::Deployment,
    authentication::v1::{TokenRequest, TokenRequestSpec},
    coordination::v1::{Lease, LeaseSpec},
    core::v1::{Namespace, ServiceAccount},
    events::v1::Event,
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    config::Kubeconfig,
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tonic::{Status, Streaming, transport::Channel};
use weft_proto::linkerd::{
    destination::{GetDestination, Update, destination_client::DestinationClient, update},
    identity::{CertifyRequest, CertifyResponse, identity_client::IdentityClient},
    inbound::{PortSpec, inbound_server_policies_client::InboundServerPoliciesClient},
};
use weft_test_kit::wait::eventually;
use weft_tls::{ca::Root, keys::IdentityKey};

use crate::{
    link::Link,
    process::{Clock, PATIENCE, Process},
    turn::{Turn, Uses},
};

/// Definitions that the control plane watches.
const DEFINITIONS: [&str; 10] = [
    "serviceprofiles.linkerd.io",
    "servers.policy.linkerd.io",
    "serverauthorizations.policy.linkerd.io",
    "authorizationpolicies.policy.linkerd.io",
    "meshtlsauthentications.policy.linkerd.io",
    "networkauthentications.policy.linkerd.io",
    "externalworkloads.workload.linkerd.io",
    "httplocalratelimitpolicies.policy.linkerd.io",
    "egressnetworks.policy.linkerd.io",
    "httproutes.policy.linkerd.io",
];
/// The lease of the writer.
const LEASE: &str = "linkerd-destination-endpoint-write";

/// Numbers the tests of this process.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// One test's part of the cluster: a namespace of both the control plane and the applications.
pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    dir: tempfile::TempDir,
    _turn: Turn,
}

/// Updates of a Service's endpoints.
pub(crate) struct Updates {
    stream: Streaming<Update>,
    pub(crate) last: Option<update::Update>,
    _client: DestinationClient<Channel>,
}

impl World {
    /// Of a test that uses nothing beside its namespace.
    pub(crate) async fn new() -> Self {
        Self::using(Uses::Nothing).await
    }

    /// Waits for the test's turn; installs the definitions, a namespace, and the Service `web` in it.
    pub(crate) async fn using(uses: Uses) -> Self {
        let turn = Turn::wait(uses);
        weft_tls::install_crypto_provider();
        assert!(
            std::env::var_os("KUBECONFIG").is_some(),
            "KUBECONFIG is not set: `cargo xtask test cluster` runs these tests against an API server of their own"
        );
        let client = Client::try_default().await.unwrap();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let namespace = format!("weft-test-{since_epoch}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
        Api::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        let world = Self { client, namespace, dir: tempfile::tempdir().unwrap(), _turn: turn };
        for name in DEFINITIONS {
            define(&world.client, name).await;
        }
        world
            .apply(json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                "spec": {"selector": {"app": "vm"}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}}))
            .await;
        world
    }

    /// Removes the test's objects.
    pub(crate) async fn done(self) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.unwrap();
    }

    /// A replica with a wall clock of its own.
    pub(crate) async fn destination_at(&self, identity: &str, clock: &Clock) -> Process {
        let arguments = ["destination", "--destination-addr", "127.0.0.1:0", "--lease-identity", identity];
        let arguments = [&arguments[..], &["--controller-namespace", &self.namespace]].concat();
        Process::start_at(&arguments, Some(clock))
    }

    pub(crate) async fn destination(&self, identity: &str, link: Option<&Link>) -> Process {
        let mut arguments = vec!["destination", "--destination-addr", "127.0.0.1:0", "--lease-identity", identity];
        arguments.extend(["--controller-namespace", &self.namespace]);
        let Some(link) = link else { return Process::start(&arguments) };
        let kubeconfig = self.through(link).await;
        arguments.extend(["--kubeconfig", &kubeconfig]);
        Process::start(&arguments)
    }

    /// A kubeconfig that leads through a link.
    pub(crate) async fn through(&self, link: &Link) -> String {
        let (host, _) = api_server().await;
        self.kubeconfig(&format!("link-{}", link.address().port()), |config| {
            let cluster = &mut config["clusters"][0]["cluster"];
            cluster["server"] = json!(format!("https://{}", link.address()));
            cluster["tls-server-name"] = json!(host);
        })
    }

    /// A directory that is removed with this.
    pub(crate) fn directory(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) async fn policy(&self) -> Process {
        self.policy_named("policy").await
    }

    /// A replica with this name in the election of the writer of statuses.
    pub(crate) async fn policy_named(&self, identity: &str) -> Process {
        self.policy_with(&["--lease-identity", identity])
    }

    pub(crate) async fn policy_as(&self, kubeconfig: &str) -> Process {
        self.policy_with(&["--kubeconfig", kubeconfig, "--lease-identity", "policy"])
    }

    /// One that lets routes refer to Services of other namespaces only where a ReferenceGrant permits it.
    pub(crate) async fn policy_with_grants(&self) -> Process {
        self.policy_with(&["--require-reference-grants", "--lease-identity", "policy"])
    }

    fn policy_with(&self, more: &[&str]) -> Process {
        let arguments = ["policy", "--policy-addr", "127.0.0.1:0", "--controller-namespace", &self.namespace];
        Process::start(&[&arguments[..], more].concat())
    }

    pub(crate) async fn identity_as(&self, kubeconfig: Option<&str>, certificates: &tempfile::TempDir) -> Process {
        let flags = kubeconfig.map(|path| ["--kubeconfig", path]);
        self.identity_with(flags.as_ref().map_or(&[], |flags| &flags[..]), certificates, None)
    }

    /// An identity service that accepts tokens of the API server's audience too.
    pub(crate) async fn identity_of_any_audience(&self, certificates: &tempfile::TempDir) -> Process {
        self.identity_with(&["--identity-accept-any-audience", "true"], certificates, None)
    }

    /// An identity service with a wall clock of its own.
    pub(crate) fn identity_at(&self, certificates: &tempfile::TempDir, clock: &Clock) -> Process {
        self.identity_with(&[], certificates, Some(clock))
    }

    fn identity_with(&self, flags: &[&str], certificates: &tempfile::TempDir, clock: Option<&Clock>) -> Process {
        let (issuer, anchors) = (certificates.path().join("issuer"), certificates.path().join("ca.pem"));
        let mut arguments = vec!["identity", "--identity-addr", "127.0.0.1:0"];
        arguments.extend(["--controller-namespace", &self.namespace]);
        arguments.extend(["--identity-issuer-dir", issuer.to_str().unwrap()]);
        arguments.extend(["--identity-trust-anchors", anchors.to_str().unwrap()]);
        arguments.extend(flags);
        Process::start_at(&arguments, clock)
    }

    /// A root and an issuer, as files.
    pub(crate) fn certificates(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::generate("root").unwrap();
        let issuer = root.issue_issuer("issuer").unwrap();
        std::fs::create_dir(dir.path().join("issuer")).unwrap();
        std::fs::write(dir.path().join("ca.pem"), root.certificate_pem()).unwrap();
        std::fs::write(dir.path().join("issuer/crt.pem"), issuer.certificate).unwrap();
        std::fs::write(dir.path().join("issuer/key.pem"), issuer.key).unwrap();
        dir
    }

    /// Applies an object in the test's namespace.
    pub(crate) async fn apply(&self, mut object: Value) {
        object["metadata"]["namespace"] = json!(self.namespace);
        let text = |field: &str| object[field].as_str().unwrap().to_owned();
        let (group, version) = text("apiVersion").split_once('/').map_or_else(
            || (String::new(), text("apiVersion")),
            |(group, version)| (group.to_owned(), version.to_owned()),
        );
        let resource = resource(&group, &version, &text("kind"));
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let params = PatchParams::apply("weft-test").force();
        api.patch(&name, &params, &Patch::Apply(&object)).await.unwrap_or_else(|error| panic!("{object}: {error}"));
    }

    /// Deletes an object of the test's namespace.
    pub(crate) async fn delete(&self, kind: &str, name: &str) {
        let (group, version) = match kind {
            "Secret" | "Service" => ("", "v1"),
            "EndpointSlice" => ("discovery.k8s.io", "v1"),
            "ExternalWorkload" => ("workload.linkerd.io", "v1beta1"),
            "Server" | "HTTPRoute" => ("policy.linkerd.io", "v1beta3"),
            "ServerAuthorization" => ("policy.linkerd.io", "v1beta1"),
            "AuthorizationPolicy" | "HTTPLocalRateLimitPolicy" => ("policy.linkerd.io", "v1alpha1"),
            _ => panic!("{kind}"),
        };
        let resource = resource(group, version, kind);
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        api.delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Removes a definition.
    pub(crate) async fn undefine(&self, name: &str) {
        let definitions = definitions(&self.client);
        definitions.delete(name, &DeleteParams::default()).await.unwrap();
        eventually("the definition is gone", PATIENCE, async || match definitions.get_opt(name).await.unwrap() {
            Some(_) => Err("it is there".to_owned()),
            None => Ok(()),
        })
        .await;
    }

    /// An EndpointSlice of `web` with a bare address.
    pub(crate) fn slice(&self, name: &str, ip: &str) -> Value {
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "web"}},
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": [{"addresses": [ip]}]})
    }

    /// An ExternalWorkload that `web` selects.
    pub(crate) fn external_workload(&self, name: &str, ip: &str) -> Value {
        json!({"apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
            "metadata": {"name": name, "labels": {"app": "vm"}},
            "spec": {"meshTLS": {"identity": "spiffe://root/vm", "serverName": "vm.cluster.local"},
                "ports": [{"name": "http", "port": 8080}], "workloadIPs": [{"ip": ip}]}})
    }

    /// Sets whether an ExternalWorkload is ready.
    pub(crate) async fn set_ready(&self, name: &str, ready: bool) {
        let resource = resource("workload.linkerd.io", "v1beta1", "ExternalWorkload");
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let status = json!({"status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" },
            "reason": "Test", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    }

    /// A meshed pod, which no node runs.
    pub(crate) fn meshed_pod(&self, name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"linkerd.io/control-plane-ns": self.namespace}},
            "spec": {"containers": [{"name": "app", "image": "app:1", "ports": [{"containerPort": 8080}]}]}})
    }

    /// An object of `policy.linkerd.io`.
    pub(crate) fn policy_object(&self, kind: &str, version: &str, name: &str, spec: Value) -> Value {
        json!({"apiVersion": format!("policy.linkerd.io/{version}"), "kind": kind, "metadata": {"name": name}, "spec": spec})
    }

    /// Waits until a pod's port has authorizations with exactly these names.
    pub(crate) async fn port_policy(&self, policy: &Process, pod: &str, port: u32, expected: &[&str]) {
        let mut client =
            InboundServerPoliciesClient::connect(format!("http://{}", policy.bound("policy").await)).await.unwrap();
        let workload = json!({"ns": self.namespace, "pod": pod}).to_string();
        eventually("the policy", PATIENCE, async || {
            let spec = PortSpec { workload: workload.clone(), port };
            let answer = client.get_port(spec).await.map_err(|status| status.to_string())?.into_inner();
            let mut names: Vec<_> = answer.authorizations.iter().map(|authz| authz.labels["name"].clone()).collect();
            names.sort();
            if names == expected { Ok(()) } else { Err(format!("{names:?}, expected {expected:?}")) }
        })
        .await;
    }

    /// Subscribes to the endpoints of a Service in the test's namespace.
    pub(crate) async fn watch_service(&self, destination: &Process, name: &str) -> Updates {
        self.watch_path(destination, format!("{name}.{}.svc.cluster.local:80", self.namespace)).await
    }

    /// Subscribes to the endpoints of any name.
    pub(crate) async fn watch_path(&self, destination: &Process, path: String) -> Updates {
        let addr = destination.bound("destination").await;
        let mut client = DestinationClient::connect(format!("http://{addr}")).await.unwrap();
        let request = GetDestination { path, ..GetDestination::default() };
        let stream = client.get(request).await.unwrap().into_inner();
        Updates { stream, last: None, _client: client }
    }

    pub(crate) async fn service_account(&self, name: &str) {
        let account: ServiceAccount = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        let api = Api::namespaced(self.client.clone(), &self.namespace);
        api.create(&PostParams::default(), &account).await.unwrap();
    }

    /// A token of a service account for an audience; an empty audience is the API server's own.
    pub(crate) async fn token(&self, account: &str, audience: &str) -> String {
        let audiences = if audience.is_empty() { vec![] } else { vec![audience.to_owned()] };
        let spec = TokenRequestSpec { audiences: Some(audiences), ..TokenRequestSpec::default() };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        api.create_token_request(account, &PostParams::default(), &request)
            .await
            .unwrap()
            .status
            .unwrap()
            .token
            .unwrap()
    }

    /// The mesh identity of a service account.
    pub(crate) fn identity_of(&self, account: &str) -> String {
        let namespace = &self.namespace;
        format!("{account}.{namespace}.serviceaccount.identity.{namespace}.cluster.local")
    }

    pub(crate) async fn certify(&self, identity: &Process, name: &str, token: &str) -> Result<CertifyResponse, Status> {
        let addr = identity.bound("identity").await;
        let mut client = IdentityClient::connect(format!("http://{addr}")).await.unwrap();
        let request = CertifyRequest {
            identity: name.to_owned(),
            token: token.as_bytes().to_vec(),
            certificate_signing_request: IdentityKey::generate().unwrap().csr_der(&name.parse().unwrap()).unwrap(),
        };
        client.certify(request).await.map(tonic::Response::into_inner)
    }

    /// A kubeconfig of a service account without any permission.
    pub(crate) async fn account_kubeconfig(&self, account: &str) -> String {
        self.service_account(account).await;
        let token = self.token(account, "").await;
        self.kubeconfig(account, |config| {
            config["users"] = json!([{"name": "u", "user": {"token": token}}]);
            config["contexts"][0]["context"]["user"] = json!("u");
        })
    }

    /// The kubeconfig with a change, its certificates inline or by absolute path; returns the file's path.
    pub(crate) fn kubeconfig(&self, name: &str, change: impl FnOnce(&mut Value)) -> String {
        let path = std::env::var("KUBECONFIG").unwrap();
        let mut config = serde_json::to_value(Kubeconfig::read_from(&path).unwrap()).unwrap();
        let current = config["current-context"].clone();
        let contexts = config["contexts"].as_array().unwrap().clone();
        let context = contexts.into_iter().find(|context| context["name"] == current).unwrap();
        let cluster = context["context"]["cluster"].clone();
        let clusters = config["clusters"].as_array().unwrap().clone();
        config["clusters"] = json!([clusters.into_iter().find(|one| one["name"] == cluster).unwrap()]);
        config["contexts"] = json!([context]);
        change(&mut config);
        let file = self.dir.path().join(format!("{name}.json"));
        std::fs::write(&file, config.to_string()).unwrap();
        file.to_str().unwrap().to_owned()
    }

    /// A connection to the API server that can be disturbed.
    pub(crate) async fn link(&self) -> Link {
        Link::to(api_server_address().await).await
    }

    pub(crate) async fn deployment(&self, name: &str) {
        let labels = json!({"app": name});
        let deployment: Deployment = serde_json::from_value(json!({"metadata": {"name": name},
            "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
                "spec": {"containers": [{"name": "x", "image": "x:1"}]}}}}))
        .unwrap();
        let api = Api::namespaced(self.client.clone(), &self.namespace);
        api.create(&PostParams::default(), &deployment).await.unwrap();
    }

    /// Waits for an Event on an object with the object's uid, which `kubectl describe` requires.
    pub(crate) async fn has_event(&self, kind: &str, name: &str, reason: &str, note: &str) {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        eventually("the event", PATIENCE, async || {
            let events = api.list(&ListParams::default()).await.unwrap();
            let regarding = |event: &&Event| {
                let regarding = event.regarding.clone().unwrap_or_default();
                regarding.kind.as_deref() == Some(kind)
                    && regarding.name.as_deref() == Some(name)
                    && regarding.uid.is_some()
            };
            let says = |event: &Event| {
                event.reason.as_deref() == Some(reason) && event.note.as_ref().is_some_and(|text| text.contains(note))
            };
            let found: Vec<_> = events.iter().filter(regarding).map(|event| (&event.reason, &event.note)).collect();
            if events.iter().filter(regarding).any(says) { Ok(()) } else { Err(format!("{found:?}")) }
        })
        .await;
    }

    async fn lease(&self) -> Option<LeaseSpec> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let lease = api.get_opt(LEASE).await.unwrap()?;
        assert_eq!(lease.name_any(), LEASE);
        let spec = lease.spec?;
        assert_eq!(spec.lease_duration_seconds, Some(30));
        Some(spec)
    }

    pub(crate) async fn lease_holder(&self) -> Option<String> {
        self.lease().await?.holder_identity.filter(|holder| !holder.is_empty())
    }

    /// Waits until the lease is renewed once more.
    pub(crate) async fn renewal(&self) {
        let renewed = async || self.lease().await.unwrap().renew_time;
        let before = renewed().await;
        eventually("a renewal", PATIENCE, async || {
            let now = renewed().await;
            if now == before { Err(format!("{now:?}")) } else { Ok(()) }
        })
        .await;
    }

    /// Waits until this replica holds the lease.
    pub(crate) async fn holder(&self, name: &str) {
        eventually("the holder", PATIENCE, async || match self.lease_holder().await {
            Some(holder) if holder == name => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
    }

    /// Waits until another replica holds the lease, and returns its name.
    pub(crate) async fn another_holder(&self, than: &str) -> String {
        let mut found = None;
        eventually("another holder", PATIENCE, async || match self.lease_holder().await {
            Some(holder) if holder != than => {
                found = Some(holder);
                Ok(())
            }
            other => Err(format!("{other:?}")),
        })
        .await;
        found.unwrap()
    }
}

/// A kind of the API server.
pub(crate) fn resource(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

fn definitions(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition"))
}

/// Installs the definition of a kind, as the chart has it.
pub(crate) async fn define(client: &Client, name: &str) {
    // Relative to the package, where cargo runs its tests.
    let file = match name.strip_suffix(".gateway.networking.k8s.io") {
        Some(plural) => format!("../charts/weft-crds/files/gateway-api/gateway.networking.k8s.io_{plural}.yaml"),
        None => format!("../charts/weft-crds/templates/{name}.yaml"),
    };
    let definition: DynamicObject = serde_yaml_ng::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let definitions = definitions(client);
    definitions.patch(name, &PatchParams::apply("weft-test").force(), &Patch::Apply(&definition)).await.unwrap();
    eventually("the kind is served", PATIENCE, async || {
        let found = definitions.get(name).await.unwrap();
        let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let served = conditions.iter().any(|one| one["type"] == "Established" && one["status"] == "True");
        if served { Ok(()) } else { Err(format!("{conditions:?}")) }
    })
    .await;
    // The server's handlers learn of it later than the object says so.
    let text = |field: &serde_json::Value| field.as_str().unwrap().to_owned();
    let spec = &definition.data["spec"];
    let versions = spec["versions"].as_array().unwrap().iter().filter(|version| version["served"] == true);
    for version in versions.map(|version| text(&version["name"])) {
        let kind = GroupVersionKind::gvk(&text(&spec["group"]), &version, &text(&spec["names"]["kind"]));
        let resource = ApiResource::from_gvk_with_plural(&kind, &text(&spec["names"]["plural"]));
        let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let listed = async || objects.list(&ListParams::default().limit(1)).await;
        eventually("its objects can be listed", PATIENCE, listed).await;
    }
}

/// `HOST:PORT` of the API server.
pub(crate) async fn api_server_address() -> String {
    let (host, port) = api_server().await;
    format!("{host}:{port}")
}

/// Host and port of the API server.
async fn api_server() -> (String, u16) {
    let url = Config::infer().await.unwrap().cluster_url;
    (url.host().unwrap().to_owned(), url.port_u16().unwrap_or(443))
}

impl Updates {
    /// Waits for the end of the stream, which must be no error.
    pub(crate) async fn end(&mut self) {
        let waiting = tokio::time::timeout(Duration::from_secs(90), self.stream.message());
        assert_eq!(waiting.await.expect("an end in time").unwrap(), None);
    }

    /// Waits until the stream has brought exactly these, in any order: changes that come together are one update or
    /// several.
    pub(crate) async fn bring(&mut self, expected: &[&str]) {
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            seen.extend(self.next().await.split(' ').map(str::to_owned));
        }
        seen.sort();
        assert_eq!(seen, expected);
    }

    /// The next update: `+` and `-` with addresses. The first answer about a Service without endpoints has none, and is
    /// passed over.
    pub(crate) async fn next(&mut self) -> String {
        self.next_within(PATIENCE).await
    }

    /// The same, for what takes longer.
    pub(crate) async fn next_within(&mut self, patience: Duration) -> String {
        let addr = |addr: weft_proto::linkerd::net::TcpAddress| SocketAddr::try_from(addr).unwrap().to_string();
        let mut parts = Vec::new();
        while parts.is_empty() {
            let waiting = tokio::time::timeout(patience, self.stream.message()).await.expect("an update in time");
            let update = waiting.unwrap().expect("the stream goes on").update.unwrap();
            let is_first = self.last.replace(update.clone()).is_none();
            parts = match update {
                update::Update::Add(set) => {
                    set.addrs.into_iter().map(|one| format!("+{}", addr(one.addr.unwrap()))).collect()
                }
                update::Update::Remove(set) => set.addrs.into_iter().map(|one| format!("-{}", addr(one))).collect(),
                update::Update::NoEndpoints(_) => vec!["none".to_owned()],
            };
            assert!(is_first || !parts.is_empty(), "an update that says nothing");
        }
        parts.sort();
        parts.join(" ")
    }
}
