//! The renewal loop against an identity service in this process, with real certificates.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
};

use tempfile::TempDir;
use tonic::{Request, Response, Status};
use weft_proto::linkerd::identity::{
    CertifyResponse,
    identity_server::{Identity as IdentityService, IdentityServer},
};
use weft_runtime::{metrics::Format, readiness::Readiness};
use weft_tls::{
    ca::{Issuer, Root},
    identity::Identity,
};

use super::*;
use crate::{
    control::Trust,
    dns::Dns,
    faults::{Fault, FaultyHop},
};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn renewal_comes_at_seventy_percent_within_bounds() {
    let now = SystemTime::now();
    let (min, max) = (10 * SECOND, 24 * 3600 * SECOND);
    let config = controller(min, max);
    for (remaining, expected) in [(1000, 700), (24 * 3600, 60_480), (10, 10), (0, 10), (10_000_000, 24 * 3600)] {
        let after = refresh_after(now + remaining * SECOND, now, &config, 1.0);
        assert_eq!(after.as_secs(), expected, "{remaining} s");
    }
    assert_eq!(refresh_after(now - SECOND, now, &config, 0.9), min, "expired already");
}

fn controller(min_refresh: Duration, max_refresh: Duration) -> ControllerIdentity {
    let control = ControlAddr { host: "127.0.0.1".to_owned(), port: 9, identity: None };
    ControllerIdentity {
        dir: "/nonexistent".into(),
        token_file: "/nonexistent".into(),
        control,
        min_refresh,
        max_refresh,
    }
}

#[test]
fn proxies_that_started_together_do_not_renew_together() {
    let now = SystemTime::now();
    let mut random = rand::rng();
    for (lifetime, max) in [(24 * 3600, 24 * 3600), (30 * 24 * 3600, 24 * 3600)] {
        let config = controller(10 * SECOND, max * SECOND);
        let mut draw = || refresh_after(now + lifetime * SECOND, now, &config, random.random_range(0.9..=1.0));
        let latest = refresh_after(now + lifetime * SECOND, now, &config, 1.0);
        let mut minutes = std::collections::HashMap::new();
        for _ in 0..10_000 {
            let after = draw();
            assert!(latest.mul_f64(1.0 - REFRESH_SPREAD) <= after && after <= latest);
            *minutes.entry(after.as_secs() / 60).or_insert(0) += 1;
        }
        // Of 10,000 proxies, no minute sees more than a few hundred.
        let most = minutes.values().max().unwrap();
        assert!(*most < 300, "{lifetime}: {most} in one minute");
    }
}

#[test]
fn a_renewal_is_due_when_either_clock_says_so() {
    let now = SystemTime::now();
    let (wait, hour) = (60_480 * SECOND, 3600 * SECOND);
    let due = Some(now + wait);
    assert_eq!(left(wait, due, now), wait);
    assert_eq!(left(wait - hour, due, now + hour), wait - hour);
    assert_eq!(left(wait - hour, due, now - 24 * hour), wait - hour, "set back");
    assert_eq!(left(wait - hour, due, now + wait), Duration::ZERO, "set ahead, or the machine slept");
    assert_eq!((left(Duration::ZERO, due, now), left(hour, None, now)), (Duration::ZERO, hour));
}

#[test]
fn a_token_is_trimmed_and_must_not_be_empty() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    assert!(read_token(&path).unwrap_err().to_string().contains("cannot be read"));
    std::fs::write(&path, "\n").unwrap();
    assert!(matches!(read_token(&path), Err(TokenError::Empty(_))));
    std::fs::write(&path, "secret\n").unwrap();
    assert_eq!(read_token(&path).unwrap(), b"secret");
}

/// Certifies clients with the token `good`, for the given lifetime.
struct Authority {
    issuer: Issuer,
    lifetime: Duration,
    asked: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl IdentityService for Authority {
    async fn certify(&self, request: Request<CertifyRequest>) -> Result<Response<CertifyResponse>, Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let request = request.into_inner();
        if request.token != b"good" {
            return Err(Status::failed_precondition("authentication token could not be authenticated"));
        }
        let name: Identity = request.identity.parse().map_err(|_| Status::invalid_argument("identity"))?;
        let issued = self
            .issuer
            .sign(&request.certificate_signing_request, &name, self.lifetime, Duration::ZERO)
            .map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(CertifyResponse {
            leaf_certificate: issued.leaf_der,
            intermediate_certificates: issued.intermediates,
            valid_until: None,
        }))
    }
}

struct Fixture {
    _dir: TempDir,
    certifier: Certifier,
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    readiness: Readiness,
    asked: Arc<AtomicUsize>,
    registry: Metrics,
}

/// An authority that serves, and a certifier that has not requested anything yet. The anchors are the authority's own,
/// or another mesh's.
async fn fixture(lifetime: Duration, own_anchors: bool) -> Fixture {
    fixture_behind(lifetime, own_anchors, |authority| authority).await
}

/// The same. `hop` says by which address the certifier reaches the authority.
async fn fixture_behind(lifetime: Duration, own_anchors: bool, hop: impl FnOnce(SocketAddr) -> SocketAddr) -> Fixture {
    weft_tls::install_crypto_provider();
    let root = Root::generate("root").unwrap();
    let anchors = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
    let pem = root.issue_issuer("issuer").unwrap();
    let issuer = Issuer::from_pem(&pem.certificate, &pem.key, &anchors).unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let authority = Authority { issuer, lifetime, asked: Arc::clone(&asked) };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = hop(listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_service(IdentityServer::new(authority));
    tokio::spawn(server.serve_with_incoming(incoming));

    let dir = tempfile::tempdir().unwrap();
    let mut identity = crate::inbound::testing::config().identity;
    let control = ControlAddr { host: "127.0.0.1".into(), port: addr.port(), identity: None };
    let mut config = controller(Duration::from_millis(10), 24 * 3600 * SECOND);
    (config.dir, config.token_file, config.control) = (dir.path().to_owned(), dir.path().join("token"), control);
    std::fs::write(&config.token_file, "good").unwrap();
    let stranger = Root::generate("stranger").unwrap();
    let pem_of_anchors = if own_anchors { root.certificate_pem() } else { stranger.certificate_pem() }.to_owned();
    let anchors = TrustAnchors::from_pem(&pem_of_anchors).unwrap();
    let (credentials_tx, credentials) = watch::channel(None);
    let readiness = Readiness::new();
    let trust = Trust::Bootstrap(anchors.clone(), credentials.clone());
    let dns = Dns::new(Default::default()).unwrap();
    let client = ControlClient::new(config.control.clone(), trust, dns, Default::default());
    identity.trust_anchors = pem_of_anchors;
    identity.source = IdentitySource::Controller(config);
    let Bootstrap { anchors, source } = Bootstrap::read(&identity).unwrap();
    let gate = readiness.gate("identity");
    let registry = Metrics::new();
    let publisher = Publisher::new(&identity, anchors, credentials_tx, gate, &registry);
    let Source::Controller(requester) = source else { panic!("the source is the controller") };
    let certifier = Certifier { requester, client, publisher };
    Fixture { _dir: dir, certifier, credentials, readiness, asked, registry }
}

#[tokio::test]
async fn the_first_certificate_opens_the_gate_and_short_ones_are_renewed() {
    let Fixture { _dir, certifier, mut credentials, readiness, registry, .. } = fixture(SECOND, true).await;
    assert_eq!(readiness.reasons(), ["identity"]);
    let task = tokio::spawn(async move { certifier.certify_forever().await });
    let first = credentials.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    credentials.changed().await.unwrap();
    let second = credentials.borrow().clone().unwrap();
    assert!(!Arc::ptr_eq(&first, &second));
    assert!(readiness.reasons().is_empty());
    let text = registry.encode(Format::Text);
    let value = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{name} is not in\n{text}")).parse::<f64>().unwrap()
    };
    let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let (now, expires) = (seconds(SystemTime::now()), seconds(second.expiry()));
    assert!(value(r#"control_identity_cert_refreshes_total{result="ok"}"#) >= 2.0, "{text}");
    // Another renewal may have come meanwhile.
    let published = value("control_identity_cert_expiration_timestamp_seconds");
    assert!((expires.floor()..=expires + 60.0).contains(&published), "{published} for {expires}");
    let refreshed = value("control_identity_cert_refresh_timestamp_seconds");
    assert!((now - 60.0..=now).contains(&refreshed), "{refreshed} at {now}");
    task.abort();
}

#[tokio::test]
async fn a_certificate_of_another_mesh_is_refused() {
    let fixture = fixture(3600 * SECOND, false).await;
    let error = fixture.certifier.certify().await.unwrap_err();
    assert!(matches!(error, CertifyError::Credentials(_)), "{error}");
    assert!(fixture.credentials.borrow().is_none());
    assert_eq!(fixture.readiness.reasons(), ["identity"]);
}

#[tokio::test]
async fn the_token_is_read_anew_for_each_attempt() {
    let fixture = fixture(3600 * SECOND, true).await;
    let token = &fixture.certifier.requester.config.token_file;
    std::fs::write(token, "bad").unwrap();
    let error = fixture.certifier.certify().await.unwrap_err();
    assert!(matches!(error, CertifyError::Certify { code: tonic::Code::FailedPrecondition, .. }), "{error}");
    std::fs::write(token, "good").unwrap();
    let credentials = fixture.certifier.certify().await.unwrap();
    assert_eq!(credentials.name(), &fixture.certifier.publisher.name);
    assert_eq!(fixture.asked.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn faults_between_a_proxy_and_its_identity_controller_hang_nothing_and_end() {
    // Side by side, because silence takes as long as its deadline.
    let tried = Fault::at(300, 70).map(|fault| async move {
        let mut faulty = None;
        let fixture = fixture_behind(3600 * SECOND, true, |authority| {
            faulty.insert(FaultyHop::start(authority, move || fault)).addr
        })
        .await;
        let faulty = faulty.unwrap();
        let deadline = CERTIFY_TIMEOUT + 10 * SECOND;
        let first = tokio::time::timeout(deadline, fixture.certifier.certify()).await;
        let first = first.unwrap_or_else(|_| panic!("{fault:?} hangs"));
        assert!(first.is_err() && faulty.cuts() > 0, "{fault:?}");
        assert!(fixture.credentials.borrow().is_none());
        faulty.heal();
        // A connection that was silent is found out by the next attempt.
        let again = async {
            loop {
                if let Ok(credentials) = fixture.certifier.certify().await {
                    return credentials;
                }
            }
        };
        let second = tokio::time::timeout(deadline, again).await;
        let second = second.unwrap_or_else(|_| panic!("no certificate after {fault:?}"));
        assert_eq!(second.name(), &fixture.certifier.publisher.name);
    });
    futures::future::join_all(tried).await;
}
