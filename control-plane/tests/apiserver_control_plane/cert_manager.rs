//! Certificates of other tools: the controllers of cert-manager and trust-manager write what the chart expects of them,
//! and the control plane uses it and follows what they renew.
//!
//! The objects are those of the documents and of the rendered chart, in a namespace of the test. A kubelet's part, to
//! put Secrets and ConfigMaps into volumes, is done by [`Volume`]; the API server finds the webhook by its Service.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject as _};
use weft_k8s_api::labels::GENERATED_CERTIFICATE;
use weft_test_kit::{process, wait::eventually};
use weft_tls::{anchors::TrustAnchors, inspect};

use crate::{
    process::{PATIENCE, Process},
    turn::Uses,
    webhook::{address_of_this_host, called, dry_run, pod},
    world::{World, resource},
};

/// The certificates that the documents show, and the chart's values for them.
const CERTIFICATES: &str = "../examples/cert-manager/certificates.yaml";
const VALUES: &str = "../examples/cert-manager/values.yaml";
const CONFIGURATION: &str = "linkerd-proxy-injector-webhook-config";
const WEBHOOK_SECRET: &str = "linkerd-proxy-injector-k8s-tls";
const ISSUER: &str = "linkerd-identity-issuer";

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_cert_manager_are_used_and_their_renewals_followed() {
    let world = World::using(Uses::Injector).await;
    let fixture = Fixture::install(world).await;
    fixture.proxies_are_certified_by_its_issuer().await;
    fixture.pods_are_injected_with_its_certificate().await;
    fixture.remove().await;
}

/// Both tools at work, and the rendered chart.
struct Fixture {
    world: World,
    /// Namespace of what both tools read for the whole cluster.
    roots: String,
    /// The objects of the chart.
    chart: Vec<Value>,
    tools: process::Process,
}

impl Fixture {
    async fn install(world: World) -> Self {
        let roots = format!("{}-roots", world.namespace);
        for (name, labels) in [(&roots, json!({})), (&app(&world), json!({"weft.io/test": world.namespace}))] {
            let object = json!({"metadata": {"name": name, "labels": labels,
                "annotations": {"linkerd.io/inject": "enabled"}}});
            let namespaces: Api<Namespace> = Api::all(world.client.clone());
            namespaces.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        }
        let program = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|directory| directory.join("cert-manager"))
            .find(|program| program.exists())
            .expect("cert-manager is not in PATH: `cargo xtask kube env` prints a PATH with it");
        let definitions = program.with_file_name("definitions.yaml");
        kubectl(&["apply", "--server-side", "--force-conflicts", "-f", path(&definitions)]);
        kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "-f", path(&definitions)]);
        let tools = process::Process::start(Command::new(&program).arg(&roots), PATIENCE);

        let own = |text: String| text.replace("linkerd/linkerd-", &format!("{}/linkerd-", world.namespace));
        let values = world.directory().join("values.yaml");
        fs::write(&values, own(fs::read_to_string(VALUES).unwrap())).unwrap();
        let certificates = world.directory().join("certificates.yaml");
        let text = fs::read_to_string(CERTIFICATES)
            .unwrap()
            .replace("namespace: cert-manager", &format!("namespace: {roots}"));
        let text = text.replace(": linkerd\n", &format!(": {}\n", world.namespace));
        fs::write(&certificates, text.replace(".linkerd.svc", &format!(".{}.svc", world.namespace))).unwrap();
        // The API server's handlers learn of new definitions later than the objects say so.
        let apply = ["apply", "--server-side", "-f", path(&certificates)];
        eventually("certificates are created", PATIENCE, async || try_kubectl(&apply)).await;

        let selector =
            format!("proxyInjector.namespaceSelector={{\"matchLabels\":{{\"weft.io/test\":\"{}\"}}}}", world.namespace);
        let mut helm = Command::new("helm");
        helm.args(["template", "weft", "../charts/weft-control-plane", "--namespace", &world.namespace, "-f"])
            .arg(&values);
        helm.args(["--set", "webhookFailurePolicy=Fail", "--set-json", &selector]);
        let rendered = output(&mut helm).unwrap();
        let chart = serde_yaml_ng::Deserializer::from_str(&rendered)
            .map(|document| Value::deserialize(document).unwrap())
            .filter(|object| !object.is_null())
            .collect();
        world.deployment("linkerd-identity").await;
        Self { world, roots, chart, tools }
    }

    /// The mesh's certificates: those of proxies are signed by cert-manager's issuer, also by the next one.
    async fn proxies_are_certified_by_its_issuer(&self) {
        let world = &self.world;
        for (kind, name) in [("Secret", ISSUER), ("ConfigMap", "linkerd-identity-trust-roots")] {
            assert!(self.find(kind, name).is_none(), "the chart does not render {kind} {name}");
        }
        let first = self.secret(ISSUER, None).await;
        let mut identity = Container::of(self, "linkerd-identity", "identity").await;
        let process = Process::start(&identity.arguments(&[("--identity-addr=", "127.0.0.1:0")]));
        process.ready().await;
        world.service_account("web").await;
        let (name, token) = (world.identity_of("web"), world.token("web", "identity.l5d.io").await);
        let anchors = |identity: &Container| {
            TrustAnchors::from_pem(&identity.read("linkerd-identity-trust-roots", "ca-bundle.crt")).unwrap()
        };
        let issuer_of_a_new_leaf = async |anchors: &TrustAnchors| {
            let answer = world.certify(&process, &name, &token).await.map_err(|status| status.to_string())?;
            let chain = std::iter::once(answer.leaf_certificate).chain(answer.intermediate_certificates);
            let chain: Vec<_> = chain.map(CertificateDer::from).collect();
            inspect::check_workload(&chain, anchors, &name.parse().unwrap()).map_err(|error| error.to_string())?;
            Ok::<_, String>(chain[1].clone())
        };
        assert_eq!(issuer_of_a_new_leaf(&anchors(&identity)).await.unwrap(), leaf(&first));

        self.renew("linkerd-identity-issuer").await;
        let second = self.secret(ISSUER, Some(&first)).await;
        identity.deliver(self).await;
        // cert-manager may issue a root twice when it is new; what the next issuer descends from came with it.
        let anchors = anchors(&identity);
        eventually("the next issuer signs", PATIENCE, async || match issuer_of_a_new_leaf(&anchors).await? {
            issuer if issuer == leaf(&second) => Ok(()),
            issuer => Err(format!("{issuer:?} signed, not {:?}", leaf(&second))),
        })
        .await;
        world.has_event("Deployment", "linkerd-identity", "IssuerUpdated", "Updated identity issuer").await;
    }

    /// The webhook's certificate: API servers trust what cert-manager puts into the configuration, and the control
    /// plane serves what it puts into the Secret.
    async fn pods_are_injected_with_its_certificate(&self) {
        let world = &self.world;
        assert!(self.find("Secret", WEBHOOK_SECRET).is_none(), "the chart does not render {WEBHOOK_SECRET}");
        let first = self.secret(WEBHOOK_SECRET, None).await;
        let values = self.find("ConfigMap", "linkerd-config").unwrap();
        world.apply(values.clone()).await;
        let injector = Container::of(self, "linkerd-proxy-injector", "proxy-injector").await;
        let process = Process::start(&injector.arguments(&[("--webhook-addr=", "0.0.0.0:0")]));
        self.announce("linkerd-proxy-injector", process.bound("webhook").await.port()).await;

        let configurations = configurations(&world.client);
        // Left over from an earlier run that was killed.
        let _ = configurations.delete(CONFIGURATION, &DeleteParams::default()).await;
        let configuration = self.find("MutatingWebhookConfiguration", CONFIGURATION).unwrap();
        assert_eq!(configuration["webhooks"][0]["clientConfig"].get("caBundle"), None, "the chart renders none");
        let object = serde_json::from_value(configuration.clone()).unwrap();
        configurations.create(&PostParams::default(), &object).await.unwrap();
        process.ready().await;
        let bundle = async || {
            let found = configurations.get(CONFIGURATION).await.unwrap();
            found.data["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap_or_default().to_owned()
        };
        let authority = serde_json::to_value(&first.data.as_ref().unwrap()["ca.crt"]).unwrap();
        assert_eq!(bundle().await, authority.as_str().unwrap(), "cert-manager's authority");

        let pods: Api<Pod> = Api::namespaced(world.client.clone(), &app(world));
        called("a proxy is added", async || {
            let created = pods.create(&dry_run(), &pod("web", json!({}))).await?;
            Ok(created.spec.and_then(|spec| spec.init_containers).is_some())
        })
        .await;
        let served = || process.lines("serving certificate").len();
        let before = served();
        self.renew("linkerd-proxy-injector").await;
        let second = self.secret(WEBHOOK_SECRET, Some(&first)).await;
        eventually("the next certificate is served", PATIENCE, async || match served() {
            now if now > before => Ok(()),
            now => Err(now.to_string()),
        })
        .await;
        pods.create(&dry_run(), &pod("web", json!({}))).await.unwrap();
        let kept = self.secret(WEBHOOK_SECRET, None).await;
        assert_eq!(kept.data, second.data, "the control plane does not replace it");
        assert!(!kept.metadata.annotations.unwrap_or_default().contains_key(GENERATED_CERTIFICATE));
        assert_eq!(bundle().await, authority.as_str().unwrap());
        // As whole messages: what is wrong before the CA injector comes says that one could be generated.
        for message in ["certificate generated", "caBundle set"] {
            assert_eq!(process.lines(&format!("\"message\":\"{message}\"")), [""; 0]);
        }
    }

    fn find(&self, kind: &str, name: &str) -> Option<&Value> {
        self.chart.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
    }

    /// Waits for a Secret with a certificate, which differs from an earlier one.
    async fn secret(&self, name: &str, than: Option<&Secret>) -> Secret {
        let secrets: Api<Secret> = Api::namespaced(self.world.client.clone(), &self.world.namespace);
        let certificate = |secret: &Secret| secret.data.as_ref().and_then(|data| data.get("tls.crt")).cloned();
        eventually(name, PATIENCE, async || {
            let found = secrets.get_opt(name).await.map_err(|error| error.to_string())?;
            let found = found
                .filter(|secret| certificate(secret).is_some() && Some(certificate(secret)) != than.map(certificate));
            found.ok_or_else(|| format!("there is no new one; {}", self.tools.output()))
        })
        .await
    }

    /// What `cmctl renew` does.
    async fn renew(&self, name: &str) {
        let resource = resource("cert-manager.io", "v1", "Certificate");
        let api: Api<DynamicObject> = Api::namespaced_with(self.world.client.clone(), &self.world.namespace, &resource);
        let issuing = json!({"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "by a test",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let conditions = async || {
            let found = api.get(name).await.unwrap();
            found.data["status"]["conditions"].as_array().cloned().unwrap_or_default()
        };
        let ready = eventually("the certificate is ready", PATIENCE, async || {
            let conditions = conditions().await;
            let ready = conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True");
            if ready { Ok(conditions) } else { Err(format!("{conditions:?}")) }
        })
        .await;
        let conditions = [ready, vec![issuing]].concat();
        let status = json!({"status": {"conditions": conditions}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    }

    /// A Service of the chart, with this host and a port as its endpoint.
    async fn announce(&self, name: &str, port: u16) {
        let mut service = self.find("Service", name).unwrap().clone();
        let port_name = service["spec"]["ports"][0]["name"].clone();
        service["spec"].as_object_mut().unwrap().remove("selector");
        self.world.apply(service).await;
        self.world
            .apply(json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
                "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
                "endpoints": [{"addresses": [address_of_this_host().await], "conditions": {"ready": true}}]}))
            .await;
    }

    async fn remove(self) {
        configurations(&self.world.client).delete(CONFIGURATION, &DeleteParams::default()).await.unwrap();
        kubectl(&["delete", "-f", path(&self.world.directory().join("certificates.yaml"))]);
        let namespaces: Api<Namespace> = Api::all(self.world.client.clone());
        for name in [&self.roots, &app(&self.world)] {
            namespaces.delete(name, &DeleteParams::background()).await.unwrap();
        }
        self.world.done().await;
    }
}

/// A container of the chart, and its volumes as a kubelet would make them.
struct Container {
    arguments: Vec<String>,
    /// With their places in the container.
    volumes: Vec<(String, Volume)>,
}

impl Container {
    async fn of(fixture: &Fixture, deployment: &str, name: &str) -> Self {
        let spec = &fixture.find("Deployment", deployment).unwrap()["spec"]["template"]["spec"];
        let containers = spec["containers"].as_array().unwrap();
        let container = containers.iter().find(|container| container["name"] == name).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let volume = |mount: &Value| {
            let volumes = spec["volumes"].as_array().unwrap();
            let source = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            let object = match (&source["secret"]["secretName"], &source["configMap"]["name"]) {
                (Value::String(name), _) => Object::Secret(name.clone()),
                (_, Value::String(name)) => Object::ConfigMap(name.clone()),
                _ => panic!("{source}"),
            };
            let directory = fixture.world.directory().join(deployment).join(text(&mount["name"]));
            fs::create_dir_all(&directory).unwrap();
            (text(&mount["mountPath"]), Volume { object, directory, version: 0 })
        };
        let mut made = Self {
            arguments: container["args"].as_array().unwrap().iter().map(text).collect(),
            volumes: container["volumeMounts"].as_array().unwrap().iter().map(volume).collect(),
        };
        made.deliver(fixture).await;
        made
    }

    /// Its arguments for a process of this host, without those that all tests choose.
    fn arguments(&self, changes: &[(&str, &str)]) -> Vec<String> {
        let chosen = ["--admin-addr=", "--log-level=", "--log-format="];
        let kept = self.arguments.iter().filter(|one| !chosen.iter().any(|flag| one.starts_with(flag)));
        let changed = |one: &String| {
            let change = changes.iter().find(|(flag, _)| one.starts_with(flag));
            let one = change.map_or_else(|| one.clone(), |(flag, value)| format!("{flag}{value}"));
            self.volumes.iter().fold(one, |one, (place, volume)| one.replace(place, path(&volume.directory)))
        };
        kept.map(changed).collect()
    }

    /// Brings all volumes up to date.
    async fn deliver(&mut self, fixture: &Fixture) {
        for (_, volume) in &mut self.volumes {
            volume.deliver(&fixture.world).await;
        }
    }

    fn read(&self, object: &str, key: &str) -> String {
        let (_, volume) = self.volumes.iter().find(|(_, volume)| volume.object.name() == object).unwrap();
        fs::read_to_string(volume.directory.join(key)).unwrap()
    }
}

/// What is in a volume.
enum Object {
    Secret(String),
    ConfigMap(String),
}

impl Object {
    fn name(&self) -> &str {
        match self {
            Self::Secret(name) | Self::ConfigMap(name) => name,
        }
    }

    async fn files(&self, world: &World) -> Result<BTreeMap<String, Vec<u8>>, kube::Error> {
        let (client, namespace) = (world.client.clone(), &world.namespace);
        Ok(match self {
            Self::Secret(name) => {
                let data = Api::<Secret>::namespaced(client, namespace).get(name).await?.data.unwrap_or_default();
                data.into_iter().map(|(key, value)| (key, value.0)).collect()
            }
            Self::ConfigMap(name) => {
                let data = Api::<ConfigMap>::namespaced(client, namespace).get(name).await?.data.unwrap_or_default();
                data.into_iter().map(|(key, value)| (key, value.into_bytes())).collect()
            }
        })
    }
}

/// A directory whose files change at once, by the exchange of a link, as a kubelet does it
/// (`kubernetes:pkg/volume/util/atomic_writer.go`).
struct Volume {
    object: Object,
    directory: PathBuf,
    version: u32,
}

impl Volume {
    async fn deliver(&mut self, world: &World) {
        let files = eventually(self.object.name(), PATIENCE, async || self.object.files(world).await).await;
        self.version += 1;
        let version = format!("..{}", self.version);
        fs::create_dir(self.directory.join(&version)).unwrap();
        for (name, content) in &files {
            fs::write(self.directory.join(&version).join(name), content).unwrap();
        }
        let (next, current) = (self.directory.join("..data_tmp"), self.directory.join("..data"));
        symlink(&version, &next).unwrap();
        fs::rename(&next, &current).unwrap();
        for name in files.keys().filter(|name| !self.directory.join(name).is_symlink()) {
            symlink(Path::new("..data").join(name), self.directory.join(name)).unwrap();
        }
    }
}

/// The namespace of an application.
fn app(world: &World) -> String {
    format!("{}-app", world.namespace)
}

/// The first certificate of a Secret.
fn leaf(secret: &Secret) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(&secret.data.as_ref().unwrap()["tls.crt"].0).unwrap()
}

fn configurations(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &resource("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration"))
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn kubectl(arguments: &[&str]) {
    try_kubectl(arguments).unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"));
}

fn try_kubectl(arguments: &[&str]) -> Result<String, String> {
    output(Command::new("kubectl").args(arguments))
}

fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}
