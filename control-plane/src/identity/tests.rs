//! Certification, check by check.

use std::time::Duration;

use prometheus_client::registry::Registry;
use tonic::Code;
use weft_proto::linkerd::identity::identity_server::Identity as _;
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, Root},
    keys::IdentityKey,
    tokens::{ServiceAccount, TokenSigner, TokenVerifier},
};

use super::{issuer::CurrentIssuer, *};

const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
const AUDIENCE: &str = weft_k8s_api::labels::IDENTITY_AUDIENCE;

struct World {
    certifier: Certifier,
    signer: TokenSigner,
}

impl World {
    fn new() -> Self {
        weft_tls::install_crypto_provider();
        let root = Root::generate("root").unwrap();
        let anchors = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
        let pem = root.issue_issuer("issuer").unwrap();
        let issuer = Issuer::from_pem(&pem.certificate, &pem.key, &anchors).unwrap();
        let signer = TokenSigner::generate().unwrap();
        let certifier = Certifier {
            issuer: CurrentIssuer::new(issuer),
            tokens: Tokens::LocalKey(TokenVerifier::from_pem(signer.public_pem()).unwrap()),
            callers: Callers::new(callers::CallerMetrics::default()),
            control_namespace: "linkerd".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            lifetime: Duration::from_secs(3600),
            clock_skew: Duration::from_secs(10),
            metrics: GrpcMetrics::new(&mut Registry::default()),
            place: Place::Files("ca.pem".into()),
            events: Events::none(),
        };
        Self { certifier, signer }
    }

    fn token(&self, namespace: &str, name: &str, audience: &str) -> Vec<u8> {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        self.signer.sign(&account, audience, Duration::from_secs(60)).unwrap().into_bytes()
    }

    async fn certify(&self, identity: &str, token: Vec<u8>, csr: Vec<u8>) -> Result<CertifyResponse, tonic::Status> {
        let request = CertifyRequest { identity: identity.to_owned(), token, certificate_signing_request: csr };
        self.certifier.certify(Request::new(request)).await.map(Response::into_inner)
    }
}

fn csr(name: &str) -> Vec<u8> {
    IdentityKey::generate().unwrap().csr_der(&name.parse().unwrap()).unwrap()
}

#[tokio::test]
async fn a_service_account_gets_its_own_certificate() {
    let world = World::new();
    let token = world.token("shop", "web", AUDIENCE);
    let issued = world.certify(WEB, token, csr(WEB)).await.unwrap();
    assert!(!issued.leaf_certificate.is_empty() && !issued.intermediate_certificates.is_empty());
    let left = SystemTime::try_from(issued.valid_until.unwrap()).unwrap().duration_since(SystemTime::now()).unwrap();
    assert!(left > Duration::from_secs(3500) && left < Duration::from_secs(3700), "{left:?}");
}

#[tokio::test]
async fn everybody_else_is_refused_with_linkerds_codes() {
    let world = World::new();
    let good = || world.token("shop", "web", AUDIENCE);
    let stranger = World::new().token("shop", "web", AUDIENCE);
    let other = "api.shop.serviceaccount.identity.linkerd.cluster.local";
    for (name, identity, token, request, expected) in [
        ("no identity", "", good(), csr(WEB), Code::InvalidArgument),
        ("no token", WEB, Vec::new(), csr(WEB), Code::InvalidArgument),
        ("no request", WEB, good(), Vec::new(), Code::InvalidArgument),
        ("garbage request", WEB, good(), b"csr".to_vec(), Code::InvalidArgument),
        ("token is not text", WEB, vec![0xff], csr(WEB), Code::InvalidArgument),
        ("garbage token", WEB, b"token".to_vec(), csr(WEB), Code::FailedPrecondition),
        ("stranger's token", WEB, stranger, csr(WEB), Code::FailedPrecondition),
        ("token for others", WEB, world.token("shop", "web", "api"), csr(WEB), Code::FailedPrecondition),
        ("another account's token", WEB, world.token("shop", "api", AUDIENCE), csr(WEB), Code::FailedPrecondition),
        ("a name with a dot", WEB, world.token("shop", "web.shop", AUDIENCE), csr(WEB), Code::InvalidArgument),
        ("request for another name", WEB, good(), csr(other), Code::FailedPrecondition),
    ] {
        let code = world.certify(identity, token, request).await.unwrap_err().code();
        assert_eq!(code, expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn refused_tokens_limit_only_the_identity_that_they_are_for() {
    let world = World::new();
    let stranger = || World::new().token("shop", "web", AUDIENCE);
    let bad = stranger();
    for _ in 0..20 {
        assert_eq!(world.certify(WEB, bad.clone(), csr(WEB)).await.unwrap_err().code(), Code::FailedPrecondition);
    }
    // No permit is free: the sender of these tokens sends many at a time.
    let mut permits = Vec::new();
    while let Ok(permit) = world.certifier.callers.admit(WEB).await {
        permits.push(permit);
    }
    let good = || world.token("shop", "web", AUDIENCE);
    assert_eq!(world.certify(WEB, good(), csr(WEB)).await.unwrap_err().code(), Code::ResourceExhausted);
    let api = "api.shop.serviceaccount.identity.linkerd.cluster.local";
    world.certify(api, world.token("shop", "api", AUDIENCE), csr(api)).await.unwrap();
    permits.clear();
    world.certify(WEB, good(), csr(WEB)).await.unwrap();
}

#[tokio::test]
async fn what_costs_nothing_is_checked_before_the_token() {
    let world = World::new();
    let other = "api.shop.serviceaccount.identity.linkerd.cluster.local";
    let long = format!("{}.cluster.local", "a".repeat(60_000));
    for (name, identity, request, expected) in [
        ("garbage request", WEB, b"csr".to_vec(), Code::InvalidArgument),
        ("request for another name", WEB, csr(other), Code::FailedPrecondition),
        ("a name that no certificate can have", long.as_str(), csr(WEB), Code::InvalidArgument),
    ] {
        let status = world.certify(identity, b"token".to_vec(), request).await.unwrap_err();
        assert_eq!(status.code(), expected, "{name}");
        assert!(!status.message().contains("token") && status.message().len() < 1000, "{name}: {status}");
    }
}

#[tokio::test]
async fn the_issuer_is_read_from_either_pair_of_files_and_replaced_when_they_change() {
    weft_tls::install_crypto_provider();
    let dir = tempfile::tempdir().unwrap();
    let root = Root::generate("root").unwrap();
    let files = issuer::Files { issuer: dir.path().join("issuer"), scheme: None, anchors: dir.path().join("ca.pem") };
    std::fs::create_dir(&files.issuer).unwrap();
    std::fs::write(&files.anchors, root.certificate_pem()).unwrap();
    let write = |certificate: &str, key: &str, root: &Root| {
        let pem = root.issue_issuer("issuer").unwrap();
        std::fs::write(files.issuer.join(key), pem.key).unwrap();
        std::fs::write(files.issuer.join(certificate), pem.certificate).unwrap();
    };
    let place = Place::Files(files.anchors.clone());
    let events = Events::none();
    let start = async || issuer::start(files.clone(), &place, &events).await;
    let problem = async || start().await.err().unwrap().to_string();
    assert!(problem().await.contains("crt.pem"));
    write("tls.crt", "tls.key", &root);
    assert!(start().await.is_ok());
    write("tls.crt", "tls.key", &Root::generate("stranger").unwrap());
    assert!(problem().await.contains("tls.crt"));

    write("crt.pem", "key.pem", &root);
    let issuer = start().await.unwrap();
    let current = issuer.current.clone();
    let replaced = async |old: std::sync::Arc<Issuer>| {
        let replaced = async {
            while std::sync::Arc::ptr_eq(&old, &current.get()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), replaced).await.unwrap();
    };
    let first = current.get();
    // The watch has not started yet.
    write("crt.pem", "key.pem", &root);
    let running = tokio::spawn(issuer.reload(place.clone(), Events::none()));
    replaced(first).await;
    let second = current.get();
    write("crt.pem", "key.pem", &root);
    replaced(second).await;
    // The root is replaced; first both are in the bundle.
    let third = current.get();
    let next = Root::generate("next").unwrap();
    std::fs::write(&files.anchors, root.certificate_pem().to_owned() + next.certificate_pem()).unwrap();
    replaced(third).await;
    let fourth = current.get();
    write("crt.pem", "key.pem", &next);
    replaced(fourth).await;
    running.abort();
}

/// A tool that writes into the chart's Secret leaves the old pair there.
#[tokio::test]
async fn of_two_pairs_of_files_the_schemes_is_read() {
    use issuer::Scheme;
    weft_tls::install_crypto_provider();
    let dir = tempfile::tempdir().unwrap();
    let (root, stranger) = (Root::generate("root").unwrap(), Root::generate("stranger").unwrap());
    let anchors = dir.path().join("ca.pem");
    std::fs::write(&anchors, root.certificate_pem()).unwrap();
    let start = async |scheme: Option<Scheme>| {
        let files = issuer::Files { issuer: dir.path().to_owned(), scheme, anchors: anchors.clone() };
        let started = issuer::start(files, &Place::Files(anchors.clone()), &Events::none()).await;
        started.map(|_| ()).map_err(|problem| problem.to_string())
    };
    for (certificate, key, root) in [("crt.pem", "key.pem", &stranger), ("tls.crt", "tls.key", &root)] {
        let pem = root.issue_issuer("issuer").unwrap();
        std::fs::write(dir.path().join(certificate), pem.certificate).unwrap();
        std::fs::write(dir.path().join(key), pem.key).unwrap();
    }
    assert_eq!(start(Some(Scheme::Kubernetes)).await, Ok(()));
    for scheme in [Some(Scheme::Linkerd), None] {
        let problem = start(scheme).await.unwrap_err();
        assert!(problem.contains("crt.pem"), "{scheme:?}: {problem}");
    }
    std::fs::remove_file(dir.path().join("tls.crt")).unwrap();
    let problem = start(Some(Scheme::Kubernetes)).await.unwrap_err();
    assert!(problem.contains("tls.crt"), "{problem}");
}

#[tokio::test]
async fn a_missing_issuer_has_the_remedy_of_its_scheme() {
    use issuer::Scheme;
    weft_tls::install_crypto_provider();
    let dir = tempfile::tempdir().unwrap();
    let root = Root::generate("root").unwrap();
    let anchors = dir.path().join("ca-bundle.crt");
    std::fs::write(&anchors, root.certificate_pem()).unwrap();
    let problem = async |scheme: Option<Scheme>| {
        let place = Place::Cluster { namespace: "linkerd".to_owned(), scheme, deployment: Box::default() };
        let files = issuer::Files { issuer: dir.path().to_owned(), scheme, anchors: anchors.clone() };
        issuer::start(files, &place, &Events::none()).await.err().unwrap().to_string()
    };
    let values = "set identity.issuer.tls.crtPEM and identity.issuer.tls.keyPEM";
    assert!(problem(None).await.ends_with(values));
    // A Secret that was made by hand and has the keys of the other scheme.
    std::fs::write(dir.path().join("crt.pem"), root.issue_issuer("issuer").unwrap().certificate).unwrap();
    let secret = "Secret linkerd/linkerd-identity-issuer";
    assert_eq!(
        problem(Some(Scheme::Kubernetes)).await,
        format!(
            "{secret}: tls.crt or tls.key is missing; have the tool that writes the Secret set tls.crt and tls.key"
        )
    );
    for scheme in [Some(Scheme::Linkerd), None] {
        let expected = format!("{secret}: crt.pem or key.pem is missing; {values}");
        assert_eq!(problem(scheme).await, expected, "{scheme:?}");
    }
}

#[tokio::test]
async fn startup_errors_name_object_key_and_remedy() {
    weft_tls::install_crypto_provider();
    let (root, stranger) = (Root::generate("root").unwrap(), Root::generate("stranger").unwrap());
    let (good, other) = (root.issue_issuer("issuer").unwrap(), stranger.issue_issuer("issuer").unwrap());
    let place = Place::Cluster { namespace: "linkerd".to_owned(), scheme: None, deployment: Box::default() };
    let anchors = root.certificate_pem();
    let set_anchors = "identityTrustAnchorsPEM or, with identity.externalCA, the tool that writes the ConfigMap";
    for (name, certificate, key, anchors, parts) in [
        ("stranger", &other.certificate, &other.key, anchors, ["linkerd-identity-issuer, key crt.pem", set_anchors]),
        ("mismatch", &good.certificate, &other.key, anchors, ["linkerd-identity-issuer, key key.pem", "keyPEM"]),
        ("no key", &good.certificate, &"?".to_owned(), anchors, ["linkerd-identity-issuer, key key.pem", "keyPEM"]),
        ("no certificate", &"?".to_owned(), &good.key, anchors, ["linkerd-identity-issuer, key crt.pem", "crtPEM"]),
        (
            "no anchors",
            &good.certificate,
            &good.key,
            "?",
            ["linkerd-identity-trust-roots, key ca-bundle.crt", set_anchors],
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("crt.pem"), certificate).unwrap();
        std::fs::write(dir.path().join("key.pem"), key).unwrap();
        let files =
            issuer::Files { issuer: dir.path().to_owned(), scheme: None, anchors: dir.path().join("ca-bundle.crt") };
        std::fs::write(&files.anchors, anchors).unwrap();
        let started = issuer::start(files, &place, &Events::none()).await;
        let problem = started.err().unwrap().to_string();
        assert!(parts.iter().all(|part| problem.contains(part)), "{name}: {problem}");
    }
}
