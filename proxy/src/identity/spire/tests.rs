//! A Workload API in this process, on a unix socket, with certificates of a real authority.

use std::{path::PathBuf, sync::Arc, time::SystemTime};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use tempfile::TempDir;
use tokio::{net::UnixListener, sync::watch};
use tokio_stream::{
    StreamExt as _,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::Response;
use weft_proto::spiffe::{
    X509svid,
    spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer},
};
use weft_runtime::{metrics::Metrics, readiness::Readiness};
use weft_tls::{anchors::TrustAnchors, credentials::peer_identity};

use super::*;
use crate::{
    config::{Config, IdentitySource},
    shared::Shared,
    testing::{INJECTORS_FILTER, Lines, eventually},
    transport_header::ALPN,
};

const OWN: &str = "spiffe://mesh.test/ns/demo/web";
const SERVER_NAME: &str = "web.demo.mesh.test";
const DEADLINE: Duration = Duration::from_secs(120);
const HOUR: Duration = Duration::from_secs(3600);

/// Delivers what is published; without the metadata it refuses as the specification says.
struct Agent(watch::Sender<X509svidResponse>);

#[tonic::async_trait]
impl SpiffeWorkloadApi for Agent {
    type FetchX509SVIDStream = Pin<Box<dyn futures::Stream<Item = Result<X509svidResponse, Status>> + Send>>;

    async fn fetch_x509svid(
        &self,
        request: Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        if request.metadata().get("workload.spiffe.io").is_none_or(|value| value != "true") {
            return Err(Status::invalid_argument("security header missing from request"));
        }
        if self.0.borrow().crl.first().is_some_and(|crl| crl == b"refuse") {
            return Err(Status::invalid_argument("refused for good"));
        }
        Ok(Response::new(Box::pin(WatchStream::new(self.0.subscribe()).map(Ok))))
    }
}

/// A trust domain.
struct Domain {
    root: CertifiedIssuer<'static, KeyPair>,
}

impl Domain {
    fn new() -> Self {
        weft_tls::install_crypto_provider();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        Self { root: CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    fn anchors(&self) -> String {
        self.root.pem()
    }

    /// An SVID, signed by an intermediate, that is valid until then.
    fn svid(&self, id: &str, not_after: SystemTime) -> X509svid {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let intermediate = CertifiedIssuer::signed_by(params, key, &self.root).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        params.not_before = (not_after - 2 * HOUR).into();
        params.not_after = not_after.into();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let leaf = params.signed_by(&key, &intermediate).unwrap();
        X509svid {
            spiffe_id: id.to_owned(),
            x509_svid: [&**leaf.der(), &**intermediate.der()].concat(),
            x509_svid_key: key.serialize_der(),
            bundle: self.root.der().to_vec(),
            hint: String::new(),
        }
    }
}

struct World {
    dir: TempDir,
    domain: Domain,
    agent: watch::Sender<X509svidResponse>,
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    readiness: Readiness,
    config: Config,
    publisher: Publisher,
}

impl World {
    fn new() -> Self {
        let (dir, domain) = (tempfile::tempdir().unwrap(), Domain::new());
        let address = format!("unix://{}", dir.path().join("agent.sock").display());
        let anchors = domain.anchors();
        let config = Config::parse(&|name| {
            let value = match name.strip_prefix("LINKERD2_PROXY_")? {
                "DESTINATION_SVC_ADDR" | "POLICY_SVC_ADDR" => "127.0.0.1:9",
                "POLICY_WORKLOAD" => "demo:web-0",
                "IDENTITY_TRUST_ANCHORS" => &anchors,
                "IDENTITY_SERVER_ID" => OWN,
                "IDENTITY_SERVER_NAME" => SERVER_NAME,
                "IDENTITY_SPIRE_WORKLOAD_API_ADDRESS" => &address,
                _ => return None,
            };
            Some(value.to_owned())
        })
        .unwrap();
        let (credentials_tx, credentials) = watch::channel(None);
        let readiness = Readiness::new();
        let anchors = TrustAnchors::from_pem(&anchors).unwrap();
        let gate = readiness.gate("identity");
        let publisher = Publisher::new(&config.identity, anchors, credentials_tx, gate, &Metrics::new());
        let agent = watch::Sender::new(X509svidResponse::default());
        Self { dir, domain, agent, credentials, readiness, config, publisher }
    }

    fn socket(&self) -> PathBuf {
        let IdentitySource::Spire(socket) = &self.config.identity.source else { panic!("the source is SPIRE") };
        assert_eq!(*socket, self.dir.path().join("agent.sock"));
        socket.clone()
    }

    fn serve(&self) {
        let listener = UnixListener::bind(self.socket()).unwrap();
        let server =
            tonic::transport::Server::builder().add_service(SpiffeWorkloadApiServer::new(Agent(self.agent.clone())));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    }

    fn deliver(&self, svids: Vec<X509svid>) {
        self.agent.send_replace(X509svidResponse { svids, ..Default::default() });
    }

    fn failures(&self) -> u64 {
        self.publisher.metrics.refreshes.get_or_create(&[("result", "error")]).get()
    }

    /// Runs the client beside `test`.
    async fn following<T>(&self, test: impl Future<Output = T>) -> T {
        let socket = self.socket();
        tokio::select! {
            ended = follow(&socket, &self.publisher) => panic!("{ended:?}"),
            result = tokio::time::timeout(DEADLINE, test) => result.expect("the test ends in time"),
        }
    }
}

#[tokio::test]
async fn the_proxy_waits_for_the_agent_and_follows_its_svids() {
    let world = World::new();
    world
        .following(async {
            eventually("a failure is counted", || world.failures() > 0).await;
            assert_eq!(world.readiness.reasons(), ["identity"]);
            let expiry = SystemTime::now() + HOUR;
            world.deliver(vec![world.domain.svid("spiffe://mesh.test/other", expiry), world.domain.svid(OWN, expiry)]);
            world.serve();
            let mut credentials = world.credentials.clone();
            let first = credentials.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            assert_eq!(first.name().as_str(), OWN);
            assert!(world.readiness.reasons().is_empty());

            world.deliver(vec![world.domain.svid(OWN, expiry + HOUR)]);
            credentials.wait_for(|now| now.as_ref().is_some_and(|now| now.expiry() > first.expiry())).await.unwrap();
        })
        .await;
}

/// Faults of the hop: an agent that accepts and is silent, says something else, or goes.
#[tokio::test(start_paused = true)]
async fn faults_to_the_spire_agent_are_reported_and_end() {
    type Trouble = fn(tokio::net::UnixStream) -> Option<tokio::net::UnixStream>;
    let garbage: Trouble = |stream| {
        let _ = stream.try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        Some(stream)
    };
    for (what, trouble) in [("silence", Some as Trouble), ("an end", |_| None), ("garbage", garbage)] {
        let world = World::new();
        let listener = UnixListener::bind(world.socket()).unwrap();
        let troubled = tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                stream.writable().await.unwrap();
                held.extend(trouble(stream));
            }
        });
        world
            .following(async {
                for failures in 1..=3 {
                    eventually("a failure is counted", || world.failures() >= failures).await;
                }
                assert!(world.credentials.borrow().is_none(), "{what}");
                troubled.abort();
                std::fs::remove_file(world.socket()).unwrap();
                world.deliver(vec![world.domain.svid(OWN, SystemTime::now() + HOUR)]);
                world.serve();
                world.credentials.clone().wait_for(Option::is_some).await.unwrap();
            })
            .await;
    }
}

#[tokio::test]
async fn expired_and_foreign_svids_are_refused_and_the_old_one_stays() {
    let world = World::new();
    let expiry = SystemTime::now() + HOUR;
    world.deliver(vec![world.domain.svid(OWN, expiry)]);
    world.serve();
    world
        .following(async {
            let mut credentials = world.credentials.clone();
            let first = credentials.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            let broken = X509svid { x509_svid: b"no DER".to_vec(), ..world.domain.svid(OWN, expiry) };
            let other_key = X509svid {
                x509_svid_key: world.domain.svid(OWN, expiry).x509_svid_key,
                ..world.domain.svid(OWN, expiry)
            };
            for (number, svid) in [
                world.domain.svid(OWN, SystemTime::now() - HOUR),
                X509svid { bundle: world.domain.root.der().to_vec(), ..Domain::new().svid(OWN, expiry) },
                X509svid { bundle: b"no DER".to_vec(), ..world.domain.svid(OWN, expiry) },
                world.domain.svid("spiffe://mesh.test/other", expiry),
                X509svid { spiffe_id: OWN.to_owned(), ..world.domain.svid("spiffe://mesh.test/other", expiry) },
                broken,
                other_key,
            ]
            .into_iter()
            .enumerate()
            {
                world.deliver(vec![svid]);
                eventually("the failure is counted", || world.failures() > number as u64).await;
                let now = world.credentials.borrow().clone().unwrap();
                assert!(Arc::ptr_eq(&first, &now), "{number}");
            }
        })
        .await;
}

/// Whether a client and a server meet.
async fn meet(client: &Credentials, server: &Credentials) -> bool {
    let connector = tokio_rustls::TlsConnector::from(client.client_config(server.name(), &[ALPN]));
    let acceptor = tokio_rustls::TlsAcceptor::from(server.server_config(&[ALPN]));
    let name = rustls::pki_types::ServerName::try_from(SERVER_NAME).unwrap();
    let (near, far) = tokio::io::duplex(64 << 10);
    let (client, server) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
    client.is_ok() && server.is_ok()
}

#[tokio::test]
async fn a_trust_domain_gets_another_root_while_the_proxy_runs() {
    let (world, next) = (World::new(), Domain::new());
    let expiry = SystemTime::now() + HOUR;
    let bundle = [world.domain.root.der().as_ref(), next.root.der().as_ref()].concat();
    let peer = |domain: &Domain| {
        let svid = domain.svid("spiffe://mesh.test/ns/demo/peer", expiry);
        let anchors = TrustAnchors::from_pem(&domain.anchors()).unwrap().with_bundle(&bundle).unwrap();
        Credentials::from_svid(svid.spiffe_id.parse().unwrap(), svid.x509_svid_key, &svid.x509_svid, anchors).unwrap()
    };
    let (of_old, of_next) = (peer(&world.domain), peer(&next));
    world.serve();
    world.deliver(vec![world.domain.svid(OWN, expiry)]);
    world
        .following(async {
            let mut credentials = world.credentials.clone();
            let only_old = credentials.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            assert!(meet(&of_old, &only_old).await && meet(&only_old, &of_old).await);
            assert!(!meet(&of_next, &only_old).await && !meet(&only_old, &of_next).await);

            credentials.mark_unchanged();
            // First the root is added, then it signs.
            for svid in [world.domain.svid(OWN, expiry), next.svid(OWN, expiry)] {
                world.deliver(vec![X509svid { bundle: bundle.clone(), ..svid }]);
                credentials.changed().await.unwrap();
                let now = credentials.borrow_and_update().clone().unwrap();
                for peer in [&of_old, &of_next] {
                    assert!(meet(peer, &now).await && meet(&now, peer).await);
                }
            }
        })
        .await;
    assert_eq!(world.failures(), 0);
}

#[tokio::test]
async fn an_svid_that_expires_without_another_is_an_error_in_the_log() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let world = World::new();
    world.deliver(vec![world.domain.svid(OWN, SystemTime::now() + Duration::from_secs(1))]);
    world.serve();
    let expected = format!("the proxy's certificate for {OWN} expired at 20");
    let written = || lines.text().lines().any(|line| line.contains("ERROR") && line.contains(&expected));
    world.following(eventually("the line is written", written)).await;
}

#[tokio::test]
async fn mesh_tls_for_the_server_name_is_terminated_with_the_spiffe_certificate() {
    let world = World::new();
    let expiry = SystemTime::now() + HOUR;
    world.deliver(vec![world.domain.svid(OWN, expiry)]);
    world.serve();
    let mut credentials = world.credentials.clone();
    world.following(async { credentials.wait_for(Option::is_some).await.map(|_| ()).unwrap() }).await;

    let (_drain, drain) = weft_runtime::drain::Drain::new();
    let shared = Shared {
        config: world.config.clone(),
        metrics: Default::default(),
        credentials,
        drain,
        taps: Default::default(),
        tracing: Default::default(),
        windows: Arc::default(),
        access_log: None,
        control: tokio::runtime::Handle::current(),
    };
    let port = crate::inbound::testing::serve_direct(Arc::new(shared)).await;
    let client_id = "spiffe://mesh.test/ns/demo/client";
    let client = world.domain.svid(client_id, expiry);
    let anchors = TrustAnchors::from_pem(&world.domain.anchors()).unwrap();
    let key = client.x509_svid_key;
    let client = Credentials::from_svid(client_id.parse().unwrap(), key, &client.x509_svid, anchors).unwrap();
    for (asked, is_served) in [(SERVER_NAME, true), ("other.demo.mesh.test", false)] {
        let connector = tokio_rustls::TlsConnector::from(client.client_config(&OWN.parse().unwrap(), &[ALPN]));
        let name = rustls::pki_types::ServerName::try_from(asked).unwrap();
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let stream = connector.connect(name, stream).await;
        let server = stream.ok().and_then(|stream| stream.get_ref().1.peer_certificates().and_then(peer_identity));
        assert_eq!(server.as_ref().map(weft_tls::identity::Identity::as_str), is_served.then_some(OWN), "{asked}");
    }
}

#[tokio::test]
async fn a_refusal_for_good_ends_the_proxy() {
    let world = World::new();
    world.agent.send_replace(X509svidResponse { crl: vec![b"refuse".to_vec()], ..Default::default() });
    world.serve();
    let ended = tokio::time::timeout(DEADLINE, follow(&world.socket(), &world.publisher)).await.unwrap();
    assert!(ended.unwrap_err().to_string().contains("for good"));
}
