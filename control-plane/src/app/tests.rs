//! The real process on ports that the system chooses, with a real directory, called over gRPC.

use std::{fs, path::Path, time::Duration};

use clap::Parser;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};
use tonic::{Code, Streaming, transport::Channel};
use weft_k8s_api::support::{self, State};
use weft_proto::linkerd::{
    destination::{
        DestinationProfile, GetDestination, Update, destination_client::DestinationClient, protocol_hint, update,
    },
    identity::{CertifyRequest, identity_client::IdentityClient},
    inbound::{
        PortSpec, inbound_server_policies_client::InboundServerPoliciesClient, proxy_protocol as inbound_protocol,
    },
    meta::metadata,
    outbound::{
        TrafficSpec, opaque_route, outbound_policies_client::OutboundPoliciesClient, proxy_protocol,
        traffic_spec::Target,
    },
};
use weft_test_kit::wait::eventually;
use weft_tls::{
    ca::Root,
    keys::IdentityKey,
    tokens::{ServiceAccount, TokenSigner},
};

use super::*;
use crate::args::{Args, Command};

/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(30);

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: out, namespace: shop}
spec: {type: ExternalName, externalName: example.org}
";

fn pod(name: &str, ip: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop, labels: {{app: web, linkerd.io/control-plane-ns: linkerd}}}}
spec:
  serviceAccountName: web
  initContainers:
  - name: linkerd-proxy
    restartPolicy: Always
    env:
    - {{name: LINKERD2_PROXY_INBOUND_LISTEN_ADDR, value: '0.0.0.0:4143'}}
    - {{name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR, value: '0.0.0.0:4191'}}
    - {{name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR, value: '0.0.0.0:4190'}}
  containers:
  - name: app
    ports: [{{name: http, containerPort: 8080}}]
    readinessProbe: {{httpGet: {{path: /ready, port: http}}}}
status: {{phase: Running, podIP: {ip}, podIPs: [{{ip: {ip}}}]}}
"
    )
}

fn slice(pods: &[(&str, &str)]) -> String {
    let endpoints: String = pods
        .iter()
        .map(|(pod, ip)| format!("- {{addresses: [{ip}], targetRef: {{kind: Pod, name: {pod}, namespace: shop}}}}\n"))
        .collect();
    format!(
        "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{name: http, port: 8080}}]
endpoints:
{endpoints}"
    )
}

fn server(access: &str) -> String {
    format!(
        "apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: web, namespace: shop}}
spec: {{podSelector: {{matchLabels: {{app: web}}}}, port: http, accessPolicy: {access}}}
"
    )
}

struct World {
    _dir: tempfile::TempDir,
    manifests: std::path::PathBuf,
    issuer: std::path::PathBuf,
    signer: TokenSigner,
    bound: Bound,
    stop: oneshot::Sender<()>,
    running: JoinHandle<anyhow::Result<()>>,
}

/// The command line of `all` on free ports, with its files in `dir`.
fn command(dir: &Path, signer: &TokenSigner) -> Box<RunCommand> {
    let (manifests, issuer) = (dir.join("manifests"), dir.join("issuer"));
    fs::create_dir(&manifests).unwrap();
    fs::create_dir(&issuer).unwrap();
    let root = Root::generate("root").unwrap();
    let pem = root.issue_issuer("issuer").unwrap();
    fs::write(issuer.join("crt.pem"), pem.certificate).unwrap();
    fs::write(issuer.join("key.pem"), pem.key).unwrap();
    fs::write(dir.join("ca.pem"), root.certificate_pem()).unwrap();
    fs::write(dir.join("token.pem"), signer.public_pem()).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let mut line = vec!["weft-control-plane".to_owned(), "all".to_owned()];
    for (flag, value) in [
        ("dir", path(&manifests)),
        ("identity-issuer-dir", path(&issuer)),
        ("identity-trust-anchors", path(&dir.join("ca.pem"))),
        ("token-key", path(&dir.join("token.pem"))),
        ("identity-addr", "127.0.0.1:0".to_owned()),
        ("destination-addr", "127.0.0.1:0".to_owned()),
        ("policy-addr", "127.0.0.1:0".to_owned()),
        ("admin-addr", "127.0.0.1:0".to_owned()),
    ] {
        line.extend([format!("--{flag}"), value]);
    }
    let Command::Run(command) = Args::try_parse_from(line).unwrap().command else { panic!("not a run command") };
    command
}

impl World {
    async fn start() -> Self {
        weft_tls::install_crypto_provider();
        let dir = tempfile::tempdir().unwrap();
        let signer = TokenSigner::generate().unwrap();
        let command = command(dir.path(), &signer);
        let manifests = dir.path().join("manifests");
        let text = SERVICE.to_owned() + &pod("web-1", "10.244.0.1") + &slice(&[("web-1", "10.244.0.1")]);
        fs::write(manifests.join("web.yaml"), text).unwrap();
        let app = App::start(&command).await.unwrap();
        let bound = app.bound;
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let running = tokio::spawn(app.run_until(shutdown));
        Self { issuer: dir.path().join("issuer"), _dir: dir, manifests, signer, bound, stop, running }
    }

    fn write(&self, file: &str, text: &str) {
        let temporary = self.manifests.join(format!(".{file}.tmp"));
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.manifests.join(file)).unwrap();
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(DEADLINE, self.running).await.unwrap().unwrap().unwrap();
    }

    async fn admin(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.bound.admin.unwrap()).await.unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut answer = String::new();
        timeout(DEADLINE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }
}

async fn channel(addr: Option<std::net::SocketAddr>) -> Channel {
    Channel::from_shared(format!("http://{}", addr.unwrap())).unwrap().connect().await.unwrap()
}

fn destination(path: &str) -> GetDestination {
    GetDestination { path: path.to_owned(), ..GetDestination::default() }
}

async fn next<T>(stream: &mut Streaming<T>) -> Option<T> {
    timeout(DEADLINE, stream.message()).await.unwrap().unwrap()
}

/// Addresses of an update: `+` for added and `-` for removed ones.
fn show(update: Update) -> Vec<String> {
    let address =
        |addr: weft_proto::linkerd::net::TcpAddress| std::net::SocketAddr::try_from(addr).unwrap().to_string();
    match update.update.unwrap() {
        update::Update::Add(set) => set.addrs.into_iter().map(|a| format!("+{}", address(a.addr.unwrap()))).collect(),
        update::Update::Remove(set) => set.addrs.into_iter().map(|a| format!("-{}", address(a))).collect(),
        update::Update::NoEndpoints(none) => vec![format!("{none:?}")],
    }
}

#[tokio::test]
async fn endpoints_stream_and_follow_files_past_malformed_ones() {
    let world = World::start().await;
    let mut client = DestinationClient::new(channel(world.bound.destination).await);
    let mut stream = client.get(destination("web.shop.svc.cluster.local:80")).await.unwrap().into_inner();
    let first = next(&mut stream).await.unwrap();
    let Some(update::Update::Add(set)) = &first.update else { panic!("{first:?}") };
    let identity = set.addrs[0].tls_identity.as_ref().unwrap().server_name.as_ref().unwrap();
    assert_eq!(identity.name, "web.shop.serviceaccount.identity.linkerd.cluster.local");
    let hint = set.addrs[0].protocol_hint.as_ref().unwrap();
    assert!(matches!(hint.protocol, Some(protocol_hint::Protocol::H2(_))));
    assert_eq!(hint.opaque_transport.as_ref().unwrap().inbound_port, 4143);
    assert_eq!(set.metric_labels["service"], "web");
    assert_eq!(show(first), ["+10.244.0.1:8080"]);

    world.write("bad.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: http}]}\n");
    let pods = pod("web-1", "10.244.0.1") + &pod("web-2", "10.244.0.2");
    world
        .write("web.yaml", &(SERVICE.to_owned() + &pods + &slice(&[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")])));
    assert_eq!(show(next(&mut stream).await.unwrap()), ["+10.244.0.2:8080"]);
    world.write("web.yaml", &(SERVICE.to_owned() + &pods + &slice(&[("web-2", "10.244.0.2")])));
    assert_eq!(show(next(&mut stream).await.unwrap()), ["-10.244.0.1:8080"]);

    world.stop().await;
    assert!(next(&mut stream).await.is_none(), "the server ends the stream with OK");
}

#[tokio::test]
async fn names_that_lead_nowhere_have_linkerds_codes() {
    let world = World::start().await;
    let mut client = DestinationClient::new(channel(world.bound.destination).await);
    for (path, expected) in [
        ("web.shop.svc.cluster.local:0", Code::InvalidArgument),
        ("10.96.0.1:80", Code::InvalidArgument),
        ("example.org:80", Code::InvalidArgument),
        ("out.shop.svc.cluster.local:80", Code::InvalidArgument),
        ("none.shop.svc.cluster.local:80", Code::NotFound),
    ] {
        assert_eq!(client.get(destination(path)).await.unwrap_err().code(), expected, "Get {path}");
    }
    for (path, expected) in [
        ("10.96.0.1:x", Code::InvalidArgument),
        ("example.org:80", Code::InvalidArgument),
        ("out.shop.svc.cluster.local:80", Code::InvalidArgument),
        ("none.shop.svc.cluster.local:80", Code::Unknown),
        ("db-0.web.shop.svc.cluster.local:80", Code::NotFound),
    ] {
        assert_eq!(client.get_profile(destination(path)).await.unwrap_err().code(), expected, "GetProfile {path}");
    }
    world.stop().await;
}

#[tokio::test]
async fn addresses_with_several_owners_are_failed_preconditions() {
    let world = World::start().await;
    let mut client = DestinationClient::new(channel(world.bound.destination).await);
    let on_port =
        |name: &str| pod(name, "10.244.0.1").replace("containerPort: 8080", "containerPort: 8080, hostPort: 80");
    let host = |name: &str, ip: &str| {
        on_port(name).replace("10.244.0.1", ip).replace("status: {", "status: {hostIP: 192.168.0.1, ")
    };
    let another = SERVICE.replace("{name: web,", "{name: another,").replace("{name: out,", "{name: other,");
    world.write("another.yaml", &(another + &host("web-2", "10.244.0.1") + &host("web-3", "10.244.0.3")));
    for path in ["10.96.0.1:80", "10.244.0.1:8080", "192.168.0.1:80"] {
        eventually(path, DEADLINE, async || {
            let answer = client.clone().get_profile(destination(path)).await;
            let code = answer.map_or_else(|status| status.code(), |_| Code::Ok);
            if code == Code::FailedPrecondition { Ok(()) } else { Err(format!("{code:?}")) }
        })
        .await;
    }
    assert!(client.get_profile(destination("10.244.0.3:8080")).await.is_ok());
    world.stop().await;
}

#[tokio::test]
async fn profiles_of_services_pods_and_bare_addresses() {
    let world = World::start().await;
    let mut client = DestinationClient::new(channel(world.bound.destination).await);
    for (path, name, identity, parent) in [
        ("10.96.0.1:80", "web.shop.svc.cluster.local", false, true),
        ("web.shop.svc.cluster.local:80", "web.shop.svc.cluster.local", false, true),
        ("10.96.0.1:81", "", false, false),
        ("10.244.0.1:8080", "", true, false),
        ("10.244.9.9:8080", "", false, false),
    ] {
        let mut stream = client.get_profile(destination(path)).await.unwrap().into_inner();
        let profile = next(&mut stream).await.unwrap();
        let tls = profile.endpoint.as_ref().is_some_and(|endpoint| endpoint.tls_identity.is_some());
        assert_eq!(
            (profile.fully_qualified_name.as_str(), tls, profile.parent_ref.is_some()),
            (name, identity, parent),
            "{path}"
        );
    }
    let mut stream = client.get_profile(destination("10.96.0.1:80")).await.unwrap().into_inner();
    assert_eq!(next(&mut stream).await.unwrap().profile_ref, None);
    world.write(
        "profile.yaml",
        "{apiVersion: linkerd.io/v1alpha2, kind: ServiceProfile, metadata: {name: web.shop.svc.cluster.local, \
         namespace: shop}, spec: {routes: []}}",
    );
    let Some(metadata::Kind::Resource(profile)) = next(&mut stream).await.unwrap().profile_ref.unwrap().kind else {
        panic!("a profile is a resource")
    };
    assert_eq!((profile.group.as_str(), profile.kind.as_str()), ("linkerd.io", ""));
    assert_eq!((profile.namespace.as_str(), profile.name.as_str()), ("shop", "web.shop.svc.cluster.local"));
    world.stop().await;
}

#[tokio::test]
async fn the_profile_of_a_name_or_an_address_ends_when_it_leads_elsewhere() {
    let world = World::start().await;
    let mut client = DestinationClient::new(channel(world.bound.destination).await);
    let named = |ip: &str| {
        let slice = slice(&[("web-1", ip)]).replace("{addresses", "{hostname: db-0, addresses");
        world.write("web.yaml", &(SERVICE.to_owned() + &pod("web-1", ip) + &slice));
    };
    named("10.244.0.1");
    let name = "db-0.web.shop.svc.cluster.local:8080";
    let mut stream =
        eventually(name, DEADLINE, async || client.clone().get_profile(destination(name)).await).await.into_inner();
    let at = |profile: DestinationProfile| {
        let addr = profile.endpoint.unwrap().addr.unwrap();
        std::net::SocketAddr::try_from(addr).unwrap().to_string()
    };
    assert_eq!(at(next(&mut stream).await.unwrap()), "10.244.0.1:8080");
    named("10.244.0.2");
    // It may still say that the pod is gone.
    while next(&mut stream).await.is_some() {}
    let mut stream = client.get_profile(destination(name)).await.unwrap().into_inner();
    assert_eq!(at(next(&mut stream).await.unwrap()), "10.244.0.2:8080");

    let mut stream = client.get_profile(destination("10.96.0.9:80")).await.unwrap().into_inner();
    assert_eq!(next(&mut stream).await.unwrap().fully_qualified_name, "");
    world.write(
        "late.yaml",
        "{apiVersion: v1, kind: Service, metadata: {name: late, namespace: shop}, \
         spec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}}",
    );
    assert_eq!(next(&mut stream).await, None, "the client is to ask again");
    let mut stream = client.get_profile(destination("10.96.0.9:80")).await.unwrap().into_inner();
    assert_eq!(next(&mut stream).await.unwrap().fully_qualified_name, "late.shop.svc.cluster.local");
    world.stop().await;
}

#[tokio::test]
async fn inbound_policies_follow_servers_and_their_routes() {
    let world = World::start().await;
    let mut client = InboundServerPoliciesClient::new(channel(world.bound.policy).await);
    let spec = |workload: &str, port| PortSpec { workload: workload.to_owned(), port };
    for (workload, port, expected) in [
        ("shop:none", 80, Code::NotFound),
        ("shop", 80, Code::InvalidArgument),
        ("shop:web-1", 0, Code::InvalidArgument),
    ] {
        assert_eq!(client.get_port(spec(workload, port)).await.unwrap_err().code(), expected, "{workload} {port}");
        assert_eq!(client.watch_port(spec(workload, port)).await.unwrap_err().code(), expected, "{workload} {port}");
    }
    let one = client.get_port(spec("shop:web-1", 8080)).await.unwrap().into_inner();
    let mut stream = client.watch_port(spec(r#"{"ns":"shop", "pod":"web-1"}"#, 8080)).await.unwrap().into_inner();
    let first = next(&mut stream).await.unwrap();
    assert_eq!(one, first);
    assert_eq!((first.labels["kind"].as_str(), first.labels["name"].as_str()), ("default", "all-unauthenticated"));
    let Some(inbound_protocol::Kind::Detect(detect)) = first.protocol.unwrap().kind else { panic!("not detect") };
    assert_eq!(detect.timeout.unwrap().seconds, 10);
    let authorizations = detect.http_routes.iter().map(|route| route.authorizations.len());
    assert_eq!(authorizations.collect::<Vec<_>>(), [0, 1], "everything, as the server says, and the readiness probe");

    world.write("policy.yaml", &server("deny"));
    let denied = next(&mut stream).await.unwrap();
    assert_eq!((denied.labels["kind"].as_str(), denied.authorizations.len()), ("server", 0));
    world.write("policy.yaml", &server("all-authenticated"));
    assert_eq!(next(&mut stream).await.unwrap().authorizations.len(), 1);
    let routes = |message: weft_proto::linkerd::inbound::Server| match message.protocol.unwrap().kind {
        Some(inbound_protocol::Kind::Detect(detect)) => {
            detect.http_routes.into_iter().map(|route| route.metadata.unwrap().kind.unwrap()).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    world.write(
        "route.yaml",
        "{apiVersion: policy.linkerd.io/v1beta3, kind: HTTPRoute, metadata: {name: api, namespace: shop}, \
         spec: {parentRefs: [{kind: Server, name: web}], rules: [{matches: [{path: {value: /api}}]}]}}",
    );
    let attached = routes(next(&mut stream).await.unwrap());
    assert!(matches!(&attached[..], [metadata::Kind::Resource(route)] if route.name == "api"), "{attached:?}");
    fs::remove_file(world.manifests.join("route.yaml")).unwrap();
    let defaults = ["default", "probe"].map(|name| metadata::Kind::Default(name.to_owned()));
    assert_eq!(routes(next(&mut stream).await.unwrap()), defaults);
    world.write("policy.yaml", &server("everybody"));
    world.write("web.yaml", SERVICE);
    assert!(next(&mut stream).await.is_none(), "an unreadable server changes nothing; the stream ends with the pod");
    world.stop().await;
}

#[tokio::test]
async fn outbound_policies_by_address_and_name() {
    let world = World::start().await;
    let mut client = OutboundPoliciesClient::new(channel(world.bound.policy).await);
    let addr = |text: &str| Some(Target::Addr(text.parse::<std::net::SocketAddr>().unwrap().into()));
    let spec = |target| TrafficSpec { source_workload: "shop:client".to_owned(), target };
    for (name, request, expected) in [
        ("no target", spec(None), Code::InvalidArgument),
        (
            "bad workload",
            TrafficSpec { source_workload: "x".to_owned(), target: addr("10.96.0.1:80") },
            Code::InvalidArgument,
        ),
        ("port 0", spec(addr("10.96.0.1:0")), Code::InvalidArgument),
        ("bad authority", spec(Some(Target::Authority("web:x".to_owned()))), Code::InvalidArgument),
        ("foreign authority", spec(Some(Target::Authority("example.org:80".to_owned()))), Code::NotFound),
        ("pod address", spec(addr("10.244.0.1:80")), Code::NotFound),
    ] {
        assert_eq!(client.get(request.clone()).await.unwrap_err().code(), expected, "{name}");
        assert_eq!(client.watch(request).await.unwrap_err().code(), expected, "{name}");
    }
    for target in [addr("10.96.0.1:80"), Some(Target::Authority("web.shop.svc.cluster.local:80".to_owned()))] {
        let policy = client.get(spec(target)).await.unwrap().into_inner();
        let Some(metadata::Kind::Resource(resource)) = policy.metadata.unwrap().kind else { panic!("not a resource") };
        assert_eq!((resource.kind.as_str(), resource.name.as_str(), resource.port), ("Service", "web", 80));
        assert!(matches!(policy.protocol.unwrap().kind, Some(proxy_protocol::Kind::Detect(_))));
    }
    let undefined = client.get(spec(addr("10.96.0.1:81"))).await.unwrap().into_inner();
    let Some(metadata::Kind::Resource(resource)) = undefined.metadata.unwrap().kind else { panic!("not a resource") };
    assert_eq!((resource.kind.as_str(), resource.name.as_str(), resource.port), ("Service", "web", 81));
    let Some(proxy_protocol::Kind::Opaque(opaque)) = undefined.protocol.unwrap().kind else { panic!("not opaque") };
    assert!(matches!(opaque.routes[0].rules[0].filters[0].kind, Some(opaque_route::filter::Kind::Forbidden(_))));
    let egress = client.get(spec(addr("93.184.216.34:443"))).await.unwrap().into_inner();
    assert_eq!(egress.metadata.unwrap().kind, Some(metadata::Kind::Default("egress-fallback".to_owned())));
    world.stop().await;
}

#[tokio::test]
async fn certificates_readiness_and_metrics() {
    let world = World::start().await;
    let name = "web.shop.serviceaccount.identity.linkerd.cluster.local";
    let account = ServiceAccount { namespace: "shop".to_owned(), name: "web".to_owned() };
    let token = world.signer.sign(&account, "identity.l5d.io", DEADLINE).unwrap();
    let csr = IdentityKey::generate().unwrap().csr_der(&name.parse().unwrap()).unwrap();
    let mut client = IdentityClient::new(channel(world.bound.identity).await);
    let request =
        CertifyRequest { identity: name.to_owned(), token: token.into_bytes(), certificate_signing_request: csr };
    assert!(!client.certify(request.clone()).await.unwrap().into_inner().leaf_certificate.is_empty());
    let refused = client.certify(CertifyRequest { identity: format!("x{name}"), ..request }).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(world.issuer.join("crt.pem").exists());

    // An answer from the index means that the manifests were read.
    DestinationClient::new(channel(world.bound.destination).await)
        .get(destination("web.shop.svc.cluster.local:80"))
        .await
        .unwrap();
    assert!(world.admin("/live").await.starts_with("HTTP/1.1 200"));
    assert!(world.admin("/ready").await.starts_with("HTTP/1.1 200"));
    // The index counts at intervals, for the first time soon after the start.
    let metrics = eventually("the index counts", DEADLINE, async || {
        let metrics = world.admin("/metrics").await;
        if metrics.contains("\nservice_cache_size{cluster=\"local\"} 2\n") { Ok(metrics) } else { Err(metrics) }
    })
    .await;
    for row in support::DESTINATION_METRICS.iter().chain(support::POLICY_METRICS) {
        let family = format!("\n# TYPE {} ", row.name);
        assert_eq!(
            metrics.contains(&family),
            row.state == State::Works,
            "{}: {}\n{metrics}",
            row.name,
            row.state.label()
        );
    }
    for line in [
        r#"grpc_server_handled_total{grpc_service="io.linkerd.proxy.identity.Identity",grpc_method="Certify",grpc_type="unary",grpc_code="OK"} 1"#,
        r#"grpc_code="FailedPrecondition"} 1"#,
        "issuer_cert_ttl_seconds ",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    world.stop().await;
}

#[tokio::test]
async fn what_is_wrong_at_start_is_named_by_its_flag() {
    weft_tls::install_crypto_provider();
    let signer = TokenSigner::generate().unwrap();
    for (file, text, flag) in [
        ("ca.pem", Some("nonsense"), "--identity-trust-anchors"),
        ("token.pem", Some("nonsense"), "--token-key"),
        ("token.pem", None, "--token-key"),
        ("issuer/key.pem", Some("nonsense"), "--identity-issuer-dir"),
        ("issuer/crt.pem", None, "--identity-issuer-dir"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let command = command(dir.path(), &signer);
        match text {
            Some(text) => fs::write(dir.path().join(file), text).unwrap(),
            None => fs::remove_file(dir.path().join(file)).unwrap(),
        }
        let error = crate::one_line(&App::start(&command).await.err().unwrap());
        assert!(error.contains(flag) && !error.contains('\n'), "{file}: {error}");
    }
}
