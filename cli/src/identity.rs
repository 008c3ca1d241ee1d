//! `weft identity`: the certificates that proxies present, and whether the mesh accepts them.
//!
//! ```text
//! pod's proxy: name, anchors ─┐
//! TLS handshake, admin port ──┴──> certificates, verified as by a client in the mesh
//! ```

use std::{collections::BTreeMap, fmt::Write as _, process::ExitCode, time::Duration};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use futures::{StreamExt as _, stream};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Container, EnvVar, Pod},
    jiff::Timestamp,
};
use kube::{Api, ResourceExt as _};
use pem::{EncodeConfig, LineEnding, Pem};
use rustls::pki_types::{CertificateDer, ServerName};
use serde::Serialize;
use tokio_rustls::TlsConnector;
use weft_k8s_api::{labels, printable};
use weft_sandbox::{client::Sandbox, state::State};
use weft_tls::{
    anchors::TrustAnchors,
    identity::Identity,
    inspect::{self, Certificate},
};

use crate::{
    cluster::{ANSWER, Cluster, within},
    mesh::pods,
    output::{
        self, Data, Tone,
        colour::{self, paint_if},
        progress,
    },
    pod_network::PodNetwork,
    resource::{self, Resource, Selection},
    target::MeshArgs,
};

/// How many proxies are asked at once: each is a connection of the API server.
const AT_ONCE: usize = 16;
/// Deadline for one proxy's handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The ConfigMap of trust anchors, in the control plane's namespace.
const TRUST_ROOTS: &str = "linkerd-identity-trust-roots";
const ANCHORS: &str = "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS";
const LOCAL_NAME: &str = "LINKERD2_PROXY_IDENTITY_LOCAL_NAME";
const SERVER_ID: &str = "LINKERD2_PROXY_IDENTITY_SERVER_ID";
const SERVER_NAME: &str = "LINKERD2_PROXY_IDENTITY_SERVER_NAME";

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft identity web-0 -n shop
  weft identity -l app=web                      of all namespaces; with -n of one
  weft identity deploy/web -n shop -o wide      with the whole chain, and PEM
  weft identity -l app=web -o json | jq -r '.[] | select(.accepted != true) | .pod'

Ends with 1 when a proxy presents no certificate, or one that the mesh does not accept.")]
pub(crate) struct IdentityArgs {
    /// Pods: NAME, NAMESPACE/NAME, or KIND/NAME of a workload
    #[arg(required_unless_present = "selector", value_name = "PODS")]
    pods: Vec<Resource>,
    /// Pods with these labels, in kubectl's syntax
    #[arg(short = 'l', long, conflicts_with = "pods")]
    selector: Option<String>,
    /// Namespace of the pods [default: the context's; all with --selector]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "text")]
    output: Format,
    #[command(flatten)]
    mesh: MeshArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The proxy's certificate
    Text,
    /// Every certificate that the proxy sends, also as PEM
    Wide,
    /// For programs
    Json,
    /// For programs, and people who read all of it
    Yaml,
}

/// A proxy, and how to ask it for its certificates.
#[derive(Clone, Debug)]
struct Proxy {
    namespace: String,
    pod: String,
    port: u16,
    /// The identity that its certificate should have.
    identity: Identity,
    /// The name to ask for in TLS.
    server_name: String,
    /// The anchors that the proxy trusts, PEM.
    anchors: String,
}

/// One pod's answer.
#[derive(Clone, Debug, Serialize)]
struct Shown {
    namespace: String,
    pod: String,
    /// Whether a client in the mesh that knows this pod would accept the chain.
    accepted: bool,
    /// Why there is no certificate, or why it is not accepted; null if it is.
    error: Option<String>,
    /// Leaf first.
    certificates: Vec<ShownCertificate>,
}

#[derive(Clone, Debug, Serialize)]
struct ShownCertificate {
    subject: String,
    issuer: String,
    serial: String,
    names: Vec<String>,
    not_before: String,
    not_after: String,
    key: String,
    signature: String,
    ca: bool,
    pem: String,
}

pub(crate) async fn execute(args: IdentityArgs) -> Result<ExitCode> {
    let shown = progress::during("the proxies' certificates", certificates(&args)).await?;
    match args.output {
        Format::Json => Data::Json.print(&shown)?,
        Format::Yaml => Data::Yaml.print(&shown)?,
        Format::Text => output::styled(text(&shown, false, colour::on_stdout()).trim_end())?,
        Format::Wide => output::styled(text(&shown, true, colour::on_stdout()).trim_end())?,
    }
    Ok(if shown.iter().all(|shown| shown.accepted) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn certificates(args: &IdentityArgs) -> Result<Vec<Shown>> {
    let network = args.mesh.network().await?;
    let proxies = match &network {
        PodNetwork::Cluster(cluster) => in_cluster(args, cluster).await?,
        PodNetwork::Sandbox(state) => in_sandbox(args, state)?,
    };
    let ask = |proxy| ask(&network, proxy);
    Ok(stream::iter(proxies).map(ask).buffered(AT_ONCE).collect().await)
}

/// A pod's proxy, or the pod and why it has none to ask.
type Found = Result<Proxy, (String, String, String)>;

async fn in_cluster(args: &IdentityArgs, cluster: &Cluster) -> Result<Vec<Found>> {
    let mut found: Vec<Pod> = Vec::new();
    if let Some(labels) = &args.selector {
        let selection = Selection { namespace: args.namespace.clone(), pod: None, labels: Some(labels.clone()) };
        found = resource::pods(cluster, &selection).await?;
    }
    for pod in &args.pods {
        let selection = Selection::in_cluster(Some(pod.clone()), args.namespace.as_deref(), cluster).await?;
        found.extend(resource::pods(cluster, &selection).await?);
    }
    let anchors = anchors(cluster).await;
    Ok(found.iter().map(|pod| proxy_of(pod, &anchors)).collect())
}

/// The anchors for proxies that read them from the ConfigMap.
async fn anchors(cluster: &Cluster) -> Result<String, String> {
    let maps = Api::<ConfigMap>::namespaced(cluster.client.clone(), &cluster.namespace);
    let found = within(ANSWER, maps.get(TRUST_ROOTS)).await.and_then(|map| {
        let bundle = map.data.and_then(|mut data| data.remove("ca-bundle.crt"));
        bundle.ok_or_else(|| "it has no data[\"ca-bundle.crt\"]".to_owned())
    });
    found.map_err(|error| format!("ConfigMap {}/{TRUST_ROOTS}: {error}", cluster.namespace))
}

fn proxy_of(pod: &Pod, anchors: &Result<String, String>) -> Found {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let none = |why: &str| (namespace.clone(), name.clone(), why.to_owned());
    if pods::phase(pod) != "Running" {
        return Err(none(&format!("the pod is {}", pods::phase(pod))));
    }
    let proxy = pods::proxy_container(pod).ok_or_else(|| none("the pod has no proxy: see `weft check --proxy`"))?;
    let environment = environment(pod, proxy);
    let port = pods::admin_port(pod, &proxy.name).unwrap_or(labels::ADMIN_PORT);
    let anchors = environment.get(ANCHORS).map_or_else(|| anchors.clone(), |own| Ok(own.clone()));
    from_environment(&namespace, &name, port, &environment, anchors).map_err(|why| none(&why))
}

fn in_sandbox(args: &IdentityArgs, state: &State) -> Result<Vec<Found>> {
    if args.selector.is_some() {
        bail!("a sandbox knows its pods by name alone: name them, as `weft sandbox ps` does");
    }
    let sandbox = Sandbox::open(&state.config.name)?;
    let mut found = Vec::new();
    for resource in &args.pods {
        let selection = Selection::in_sandbox(Some(resource.clone()), args.namespace.as_deref(), state)?;
        let pod = selection.known(state)?;
        let none = |why: String| (pod.namespace.clone(), pod.name.clone(), why);
        if !pod.meshed {
            found.push(Err(none("the pod has no proxy: annotate it with linkerd.io/inject".to_owned())));
            continue;
        }
        let environment = sandbox.environment(&format!("{}/{}", pod.namespace, pod.name), labels::PROXY_CONTAINER)?;
        let environment: BTreeMap<_, _> = environment.into_iter().collect();
        let anchors = environment.get(ANCHORS).cloned().ok_or_else(|| format!("its proxy has no {ANCHORS}"));
        found
            .push(from_environment(&pod.namespace, &pod.name, labels::ADMIN_PORT, &environment, anchors).map_err(none));
    }
    Ok(found)
}

/// The environment of a pod's proxy, as far as the pod's definition says it: the injector's variables refer to each
/// other and to fields of the pod.
fn environment(pod: &Pod, proxy: &Container) -> BTreeMap<String, String> {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for variable in proxy.env.iter().flatten() {
        let value = match (&variable.value, field(pod, variable)) {
            (Some(template), _) => expand(template, &known),
            (None, Some(value)) => value,
            (None, None) => continue,
        };
        known.insert(variable.name.clone(), value);
    }
    known
}

fn field(pod: &Pod, variable: &EnvVar) -> Option<String> {
    let path = &variable.value_from.as_ref()?.field_ref.as_ref()?.field_path;
    let spec = pod.spec.as_ref();
    match path.as_str() {
        "metadata.name" => pod.metadata.name.clone(),
        "metadata.namespace" => pod.metadata.namespace.clone(),
        "spec.serviceAccountName" => {
            Some(spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_else(|| "default".to_owned()))
        }
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()),
        _ => None,
    }
}

/// Replaces `$(NAME)` by the variables before it, as Kubernetes does.
fn expand(template: &str, known: &BTreeMap<String, String>) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("$(") {
        let Some((name, following)) = after.split_once(')') else { break };
        text.push_str(before);
        match known.get(name) {
            Some(value) => text.push_str(value),
            None => {
                let _ = write!(text, "$({name})");
            }
        }
        rest = following;
    }
    text + rest
}

fn from_environment(
    namespace: &str,
    pod: &str,
    port: u16,
    environment: &BTreeMap<String, String>,
    anchors: Result<String, String>,
) -> Result<Proxy, String> {
    let variable = |name: &str| environment.get(name).cloned();
    let name = variable(LOCAL_NAME).or_else(|| variable(SERVER_ID));
    let name = name.ok_or_else(|| format!("its proxy has no {LOCAL_NAME}: identity is disabled"))?;
    let identity: Identity = name.parse().map_err(|error| format!("{LOCAL_NAME}: {error}"))?;
    Ok(Proxy {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        port,
        server_name: variable(SERVER_NAME).unwrap_or_else(|| identity.to_string()),
        identity,
        anchors: anchors?,
    })
}

async fn ask(network: &PodNetwork, proxy: Found) -> Shown {
    let proxy = match proxy {
        Ok(proxy) => proxy,
        Err((namespace, pod, why)) => {
            return Shown { namespace, pod, accepted: false, error: Some(why), certificates: Vec::new() };
        }
    };
    let chain = match tokio::time::timeout(HANDSHAKE, handshake(network, &proxy)).await {
        Ok(chain) => chain,
        Err(_) => Err(format!("port {}: no handshake within {}s", proxy.port, HANDSHAKE.as_secs())),
    };
    let verified = chain.and_then(|chain| {
        let contents = inspect::chain(&chain).map_err(|error| error.to_string())?;
        Ok((verify(&chain, &proxy), contents.iter().zip(&chain).map(shown).collect()))
    });
    let (error, certificates) = match verified {
        Ok((verified, certificates)) => (verified.err(), certificates),
        Err(why) => (Some(why), Vec::new()),
    };
    Shown { namespace: proxy.namespace, pod: proxy.pod, accepted: error.is_none(), error, certificates }
}

async fn handshake(network: &PodNetwork, proxy: &Proxy) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error: std::io::Error| format!("port {}: {error}", proxy.port);
    let name = ServerName::try_from(proxy.server_name.clone());
    let name = name.map_err(|_| format!("{SERVER_NAME}: {:?} is not a DNS name", proxy.server_name))?;
    let stream = network.connect(&proxy.namespace, &proxy.pod, proxy.port).await.map_err(failed)?;
    let connector = TlsConnector::from(inspect::inspection_config());
    let stream = connector
        .connect(name, stream)
        .await
        .map_err(|error| format!("port {}: {error}: the proxy has no certificate yet, see its log", proxy.port))?;
    let (_, session) = stream.get_ref();
    let chain = session.peer_certificates().unwrap_or_default();
    Ok(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
}

/// Verifies a chain as a client in the mesh that expects this proxy.
fn verify(chain: &[CertificateDer<'_>], proxy: &Proxy) -> Result<(), String> {
    let anchors = TrustAnchors::from_pem(&proxy.anchors).map_err(|error| format!("{ANCHORS}: {error}"))?;
    inspect::check_workload(chain, &anchors, &proxy.identity).map_err(|error| error.to_string())
}

fn shown((content, der): (&Certificate, &CertificateDer<'_>)) -> ShownCertificate {
    let time = |time| Timestamp::try_from(time).map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let time = |at| time(at).unwrap_or_default();
    let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
    ShownCertificate {
        subject: content.subject.clone(),
        issuer: content.issuer.clone(),
        serial: content.serial.clone(),
        names: content.names.clone(),
        not_before: time(content.not_before),
        not_after: time(content.not_after),
        key: content.key.clone(),
        signature: content.signature.clone(),
        ca: content.is_ca,
        pem: pem::encode_config(&Pem::new("CERTIFICATE", der.as_ref()), lines),
    }
}

/// Linkerd's form, and below it whether the mesh accepts the certificate. Escaped.
fn text(all: &[Shown], wide: bool, colours: bool) -> String {
    let mut text = String::new();
    for (index, shown) in all.iter().enumerate() {
        let _ = writeln!(text, "\nPOD {} ({} of {})\n", printable::line(&shown.pod), index + 1, all.len());
        let count = if wide { shown.certificates.len() } else { 1 };
        for certificate in shown.certificates.iter().take(count) {
            let _ = write!(text, "{}", printable::lines(&block(certificate)));
            if wide {
                let _ = writeln!(text, "{}", certificate.pem);
            }
        }
        let _ = match &shown.error {
            None => writeln!(text, "Accepted:             yes"),
            Some(why) => {
                let (name, why) = match shown.certificates.is_empty() {
                    true => ("Error", why.clone()),
                    false => ("Accepted", format!("no: {why}")),
                };
                writeln!(text, "{:<21} {}", format!("{name}:"), paint_if(colours, Tone::Bad, &why))
            }
        };
    }
    text
}

fn block(certificate: &ShownCertificate) -> String {
    let rows = [
        ("Serial Number", certificate.serial.as_str()),
        ("Signature Algorithm", &certificate.signature),
        ("Not Before", &certificate.not_before),
        ("Not After", &certificate.not_after),
        ("Subject", if certificate.subject.is_empty() { output::NOTHING } else { &certificate.subject }),
        ("Issuer", &certificate.issuer),
        ("Names", &certificate.names.join(", ")),
        ("Public Key", &certificate.key),
    ];
    rows.iter().map(|(name, value)| format!("{:<21} {value}\n", format!("{name}:"))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio_rustls::TlsAcceptor;
    use weft_tls::{
        ca::{Issuer, Root},
        credentials::Credentials,
        keys::IdentityKey,
    };

    use super::*;

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    fn pod(env: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "web-0", "namespace": "shop"},
            "spec": {"serviceAccountName": "web", "containers": [], "initContainers": [{"name": "linkerd-proxy", "env": env,
                "ports": [{"name": "linkerd-admin", "containerPort": 4191}]}]},
            "status": {"phase": "Running"}}))
        .unwrap()
    }

    fn injected(anchors: &str) -> Value {
        let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        json!([field("_pod_ns", "metadata.namespace"), field("_pod_sa", "spec.serviceAccountName"),
            {"name": "_l5d_ns", "value": "linkerd"}, {"name": "_l5d_trustdomain", "value": "cluster.local"},
            {"name": ANCHORS, "value": anchors},
            {"name": LOCAL_NAME, "value": "$(_pod_sa).$(_pod_ns).serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)"}])
    }

    /// The anchors of a ConfigMap that this user may not read.
    fn forbidden() -> Result<String, String> {
        Err("ConfigMap linkerd/linkerd-identity-trust-roots: forbidden".to_owned())
    }

    #[test]
    fn anchors_are_the_proxys_own_or_the_control_planes() {
        let mut env = injected("");
        env.as_array_mut().unwrap().retain(|variable| variable["name"] != ANCHORS);
        assert_eq!(proxy_of(&pod(env.clone()), &Ok("shared".to_owned())).unwrap().anchors, "shared");
        assert!(proxy_of(&pod(env), &forbidden()).unwrap_err().2.contains("forbidden"));
    }

    #[test]
    fn a_proxys_name_is_read_from_its_pod() {
        let proxy = proxy_of(&pod(injected("anchors")), &forbidden()).unwrap();
        assert_eq!((proxy.identity.as_str(), proxy.server_name.as_str(), proxy.port), (WEB, WEB, 4191));
        assert_eq!(proxy.anchors, "anchors");
    }

    #[test]
    fn a_pod_without_a_proxy_or_a_name_says_so() {
        let unmeshed = Pod { spec: Some(k8s_openapi::api::core::v1::PodSpec::default()), ..pod(json!([])) };
        assert!(proxy_of(&unmeshed, &forbidden()).unwrap_err().2.contains("has no proxy"));
        assert!(proxy_of(&pod(json!([])), &forbidden()).unwrap_err().2.contains(LOCAL_NAME));
    }

    #[test]
    fn variables_refer_to_those_before_them() {
        let known = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        for (template, expected) in [("$(A).$(B)", "1.$(B)"), ("$(A", "$(A"), ("", ""), ("a$(A)b$(A)", "a1b1")] {
            assert_eq!(expand(template, &known), expected, "{template}");
        }
    }

    /// A proxy's port in this test, reached directly.
    async fn shown_by(root: &Root, trusted: &Root, name: &str) -> Shown {
        let anchors = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
        let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
        let issuer = Issuer::from_pem(&issuer.certificate, &issuer.key, &anchors).unwrap();
        let identity: Identity = name.parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let csr = key.csr_der(&identity).unwrap();
        let hour = Duration::from_secs(3600);
        let issued = issuer.sign(&csr, &identity, hour, Duration::from_secs(20)).unwrap();
        let credentials = Credentials::new(identity, &key, issued.leaf_der, issued.intermediates, anchors).unwrap();
        let (near, far) = tokio::io::duplex(16 * 1024);
        let acceptor = TlsAcceptor::from(credentials.server_config(&[]));
        let server = tokio::spawn(async move { acceptor.accept(far).await.map(drop) });
        let proxy = proxy_of(&pod(injected(trusted.certificate_pem())), &forbidden()).unwrap();
        let connector = TlsConnector::from(inspect::inspection_config());
        let stream = connector.connect(ServerName::try_from(WEB).unwrap(), near).await.unwrap();
        let chain: Vec<_> =
            stream.get_ref().1.peer_certificates().unwrap().iter().map(|it| it.clone().into_owned()).collect();
        server.await.unwrap().unwrap();
        let verified = verify(&chain, &proxy);
        Shown {
            namespace: "shop".into(),
            pod: "web-0".into(),
            accepted: verified.is_ok(),
            error: verified.err(),
            certificates: inspect::chain(&chain).unwrap().iter().zip(&chain).map(super::shown).collect(),
        }
    }

    #[tokio::test]
    async fn a_good_certificate_is_accepted_and_others_are_shown_with_the_reason() {
        let (root, other) = (Root::generate("root").unwrap(), Root::generate("other").unwrap());
        let good = shown_by(&root, &root, WEB).await;
        assert!(good.accepted, "{good:?}");
        assert_eq!(good.certificates[0].names, [WEB]);
        let printed = text(&[good], false, false);
        for part in ["POD web-0 (1 of 1)", "Issuer:", "Not After:", WEB, "ECDSA P-256", "Accepted:             yes"] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
        let stranger = shown_by(&root, &other, WEB).await;
        assert!(!stranger.accepted && stranger.error.as_ref().unwrap().contains("does not verify"), "{stranger:?}");
        let misnamed = shown_by(&root, &root, "api.shop.serviceaccount.identity.linkerd.cluster.local").await;
        assert!(misnamed.error.as_ref().unwrap().contains("is not for web.shop"), "{misnamed:?}");
        assert!(text(&[stranger], true, false).contains("BEGIN CERTIFICATE"));
    }
}
