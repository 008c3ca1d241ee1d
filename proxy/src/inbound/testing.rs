//! Fixtures for tests of this package: settings, a mesh's certificate authority, and one worker without a listener.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::{runtime::Handle, sync::watch};
use weft_runtime::drain::{Drain, Watch};
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, IssuerPem, Root},
    credentials::Credentials,
    identity::Identity,
    keys::IdentityKey,
};

use crate::{
    config::{Config, SocketConfig},
    control::{ControlClient, Trust},
    discover::Discover,
    dns::Dns,
    listen::{self, Accepted, Listener},
    metrics::ProxyMetrics,
    outbound::Outbound,
    policy::Policies,
    shared::Shared,
    testing::eventually,
    trace,
};

/// This proxy's identity in tests.
pub(crate) const OWN: &str = "web.demo.serviceaccount.identity.linkerd.cluster.local";

/// The settings of a sidecar whose control plane is on loopback.
pub(crate) fn config() -> Config {
    let mut config = Config::parse(&|name| {
        let value = match name.strip_prefix("LINKERD2_PROXY_")? {
            "DESTINATION_SVC_ADDR" | "POLICY_SVC_ADDR" | "IDENTITY_SVC_ADDR" => "127.0.0.1:9",
            "POLICY_WORKLOAD" => "demo:web-0",
            "IDENTITY_DIR" => "/nonexistent",
            "IDENTITY_TOKEN_FILE" => "/nonexistent/token",
            "IDENTITY_TRUST_ANCHORS" => "none",
            "IDENTITY_LOCAL_NAME" => OWN,
            _ => return None,
        };
        Some(value.to_owned())
    })
    .expect("the settings are complete");
    // No policy controller answers; tests of waiting for it set their own timeout.
    config.inbound.policy_timeout = Duration::ZERO;
    config
}

/// A certificate authority for one test.
pub(crate) struct Mesh {
    issuer: Issuer,
    pem: IssuerPem,
    /// The root's certificate.
    root_pem: String,
    /// What the mesh's workloads trust.
    anchors: TrustAnchors,
}

impl Mesh {
    pub(crate) fn new() -> Self {
        Self::with_others("")
    }

    /// Another mesh, whose workloads trust those of `other`, which do not trust them.
    pub(crate) fn trusting(other: &Self) -> Self {
        Self::with_others(&other.root_pem)
    }

    fn with_others(roots: &str) -> Self {
        weft_tls::install_crypto_provider();
        let root = Root::generate("root").unwrap();
        let root_pem = root.certificate_pem().to_owned();
        let anchors = TrustAnchors::from_pem(&format!("{root_pem}{roots}")).unwrap();
        let pem = root.issue_issuer("issuer").unwrap();
        Self { issuer: Issuer::from_pem(&pem.certificate, &pem.key, &anchors).unwrap(), pem, root_pem, anchors }
    }

    /// What the mesh's workloads trust.
    pub(crate) fn anchors(&self) -> &TrustAnchors {
        &self.anchors
    }

    /// Credentials of a workload whose identity is a SPIFFE ID, which the mesh's own authority does not certify.
    pub(crate) fn svid(&self, id: &str) -> Arc<Credentials> {
        let issuer_key = KeyPair::from_pem(&self.pem.key).unwrap();
        let issuer = rcgen::Issuer::from_ca_cert_pem(&self.pem.certificate, issuer_key).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &issuer).unwrap();
        let issuer = CertificateDer::from_pem_slice(self.pem.certificate.as_bytes()).unwrap();
        let chain = [leaf.der().as_ref(), issuer.as_ref()].concat();
        let name = id.parse().unwrap();
        Arc::new(Credentials::from_svid(name, key.serialize_der(), &chain, self.anchors.clone()).unwrap())
    }

    /// A workload's credentials.
    pub(crate) fn credentials(&self, name: &str) -> Arc<Credentials> {
        self.certify(name, Duration::from_secs(3600), Duration::from_secs(10))
    }

    /// A workload's credentials that have just expired.
    pub(crate) async fn expired(&self, name: &str) -> Arc<Credentials> {
        let credentials = self.certify(name, Duration::from_secs(1), Duration::ZERO);
        eventually("the certificate expires", || credentials.has_expired(SystemTime::now())).await;
        credentials
    }

    fn certify(&self, name: &str, lifetime: Duration, skew: Duration) -> Arc<Credentials> {
        let name: Identity = name.parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let csr = key.csr_der(&name).unwrap();
        let issued = self.issuer.sign(&csr, &name, lifetime, skew).unwrap();
        let credentials =
            Credentials::new(name, &key, issued.leaf_der, issued.intermediates, self.anchors.clone()).unwrap();
        Arc::new(credentials)
    }
}

/// The shared state of a worker, with this proxy's credentials.
pub(crate) fn shared(config: Config, mesh: &Mesh) -> (Arc<Shared>, Drain) {
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = ProxyMetrics::register(&mut registry);
    let (drain, watch): (Drain, Watch) = Drain::new();
    let (_, credentials) = watch::channel(Some(mesh.credentials(OWN)));
    let tracing = config.trace.as_ref().map(|trace| trace::testing::start(trace, credentials.clone(), watch.clone()));
    let shared = Shared {
        config,
        metrics,
        credentials,
        drain: watch,
        taps: Arc::default(),
        tracing: tracing.unwrap_or_default(),
        windows: Arc::default(),
        access_log: None,
        control: Handle::current(),
    };
    (Arc::new(shared), drain)
}

/// Discovery by the control plane of the settings.
pub(crate) fn discover(shared: &Arc<Shared>) -> Discover {
    let dns = Dns::new(shared.metrics.dns_resolutions.clone()).unwrap();
    let trust = Trust::Credentials(shared.credentials.clone());
    let (config, limits) = (&shared.config, shared.config.control_streams);
    let destination = ControlClient::new(config.destination.control.clone(), trust.clone(), dns.clone(), limits);
    let policy = ControlClient::new(config.policy.control.clone(), trust, dns, limits);
    Discover::new(shared, destination, policy)
}

/// Serves the inbound side on loopback as if the original destination of every connection were the proxy's own port;
/// returns the port.
pub(crate) async fn serve_direct(shared: Arc<Shared>) -> u16 {
    let own = SocketAddr::from(([127, 0, 0, 1], shared.config.inbound.listen.port()));
    serve_port(shared, own).await
}

/// Serves the inbound side on loopback as if the original destination of every connection were `target`; returns the
/// port.
pub(crate) async fn serve_port(shared: Arc<Shared>, target: SocketAddr) -> u16 {
    let policies = Policies::unreachable(shared.config.clone());
    serve(super::Inbound::new(shared, policies), None, target).await
}

/// The same with the profiles that `discover` finds; returns how many names are followed, too.
pub(crate) async fn serve_with_profiles(
    shared: Arc<Shared>,
    discover: Discover,
    target: SocketAddr,
) -> (u16, impl Fn() -> usize) {
    let policies = Policies::unreachable(shared.config.clone());
    let inbound = Arc::new(super::Inbound::new(shared, policies).with_profiles(discover));
    let known = Arc::clone(&inbound);
    let names = move || {
        let profiles = known.profiles.as_ref().expect("the settings have suffixes");
        profiles.sweep();
        profiles.known_names().len()
    };
    (serve_on(inbound, None, target).await, names)
}

/// The same for a gateway to `outbound` whose clients are in another cluster; returns its policies, too.
pub(crate) async fn serve_gateway(shared: Arc<Shared>, outbound: Outbound) -> (u16, Policies) {
    let policies = Policies::unreachable(shared.config.clone());
    let own = SocketAddr::from(([127, 0, 0, 1], shared.config.inbound.listen.port()));
    let inbound = super::Inbound::new(shared, policies.clone()).with_gateway(outbound);
    (serve(inbound, Some(SocketAddr::from(([10, 9, 9, 9], 50000))), own).await, policies)
}

/// Serves connections as if all came from `client`, because those from loopback are always admitted.
async fn serve(inbound: super::Inbound, client: Option<SocketAddr>, target: SocketAddr) -> u16 {
    serve_on(Arc::new(inbound), client, target).await
}

pub(super) async fn serve_on(inbound: Arc<super::Inbound>, client: Option<SocketAddr>, target: SocketAddr) -> u16 {
    let bound = listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
    let port = bound.local_addr().unwrap().port();
    let listener = Listener::new(bound, SocketConfig::default()).unwrap();
    tokio::spawn(async move {
        loop {
            let Accepted { stream, peer, permit } = listener.accept().await;
            let inbound = Arc::clone(&inbound);
            let peer = client.unwrap_or(peer);
            tokio::spawn(async move {
                let _permit = permit;
                inbound.serve(stream, peer, target).await
            });
        }
    });
    port
}
