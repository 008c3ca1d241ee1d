//! Certificates: the first one, and renewals.
//!
//! ```text
//! token file + CSR -> Certify -> leaf, intermediates ─┬─> Credentials (name, chain, expiry checked) -> watch
//! SPIFFE Workload API -> SVID: key, certificates ─────┘
//! ```
//!
//! Owns the schedule. The token is read again each time, because the kubelet rotates it; the key never changes. A
//! certificate that does not verify is not used: the old one stays until it expires, and without one the proxy does
//! not serve. The trust anchors are a setting, and stay until the proxy ends; a Workload API adds those of its bundle.

mod spire;

use std::{
    error::Error,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use rand::RngExt as _;
use tokio::{sync::watch, time::Instant};
use weft_proto::linkerd::identity::{CertifyRequest, identity_client::IdentityClient};
use weft_runtime::{
    error::chain,
    metrics::{Family, Metrics},
    readiness::Gate,
};
use weft_tls::{
    anchors::TrustAnchors,
    credentials::{Credentials, CredentialsError},
    identity::Identity,
    keys::IdentityKey,
};

use crate::{
    config::{ControlAddr, ControllerIdentity, IdentityConfig, IdentitySource, UnusableSetting},
    control::ControlClient,
    pauses::Pauses,
};

/// The fraction of a certificate's remaining lifetime after which it is renewed: Linkerd's.
const REFRESH_AT: f64 = 0.7;

/// The longest wait without looking at the wall clock again.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// Renewals come up to a tenth earlier, so that proxies that started together do not renew together.
const REFRESH_SPREAD: f64 = 0.1;

/// Deadline for the controller's answer once it is connected.
const CERTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// What is read at the start, before anything runs.
pub(crate) struct Bootstrap {
    /// The mesh's trust anchors.
    pub(crate) anchors: TrustAnchors,
    source: Source,
}

enum Source {
    Controller(Box<Requester>),
    /// The key arrives with the certificate.
    Spire(PathBuf),
}

/// What the identity controller is asked with.
struct Requester {
    config: ControllerIdentity,
    /// The private key, used until the process ends.
    key: IdentityKey,
    /// The signing request, DER.
    csr: Vec<u8>,
}

/// What happens with a new certificate.
pub(crate) struct Publisher {
    name: Identity,
    anchors: TrustAnchors,
    credentials: watch::Sender<Option<Arc<Credentials>>>,
    gate: Gate,
    metrics: CertMetrics,
}

/// Certification by the identity controller.
struct Certifier {
    requester: Box<Requester>,
    client: ControlClient,
    publisher: Publisher,
}

/// The proxy's own certificate has expired: every peer would refuse it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the proxy's certificate for {name} expired at {}", humantime::format_rfc3339_seconds(*.expiry))]
pub(crate) struct CertificateExpired {
    name: Identity,
    expiry: SystemTime,
}

/// Why a new certificate was not obtained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CertifyError {
    /// The token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The controller did not answer in time.
    #[error("the identity controller did not answer within 5 s")]
    TimedOut,
    /// The controller refused or cannot be reached.
    #[error("the identity controller did not certify: {code:?}: {reason}")]
    Certify {
        /// The gRPC code.
        code: tonic::Code,
        /// The controller's message, or why it cannot be reached.
        reason: String,
    },
    /// The certificate is not fit for use.
    #[error("the identity controller's certificate is unusable: are the trust anchors those of this mesh?")]
    Credentials(#[from] CredentialsError),
}

/// Why the service-account token cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    /// The file cannot be read.
    #[error("the token file {path} cannot be read")]
    Read {
        /// Path of the file.
        path: String,
        /// Error of the system.
        #[source]
        source: std::io::Error,
    },
    /// The file is empty.
    #[error("the token file {0} is empty")]
    Empty(String),
}

#[derive(Clone, Default)]
struct CertMetrics {
    expiration: Gauge,
    refresh: Gauge,
    refreshes: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Bootstrap {
    /// Reads the files that the settings name.
    ///
    /// # Errors
    /// The setting whose content cannot be used.
    pub(crate) fn read(config: &IdentityConfig) -> Result<Self, UnusableSetting> {
        let unusable = |variable, error: &(dyn Error + 'static)| UnusableSetting { variable, reason: chain(error) };
        let anchors = TrustAnchors::from_pem(&config.trust_anchors)
            .map_err(|error| unusable("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", &error))?;
        let source = match &config.source {
            IdentitySource::Spire(socket) => Source::Spire(socket.clone()),
            IdentitySource::Controller(controller) => {
                let (key, csr) = IdentityKey::load_or_create(&controller.dir, &config.local_name)
                    .map_err(|error| unusable("LINKERD2_PROXY_IDENTITY_DIR", &error))?;
                read_token(&controller.token_file)
                    .map_err(|error| unusable("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", &error))?;
                Source::Controller(Box::new(Requester { config: controller.clone(), key, csr }))
            }
        };
        Ok(Self { anchors, source })
    }

    /// The identity controller, if certificates come from there.
    pub(crate) fn controller(&self) -> Option<&ControlAddr> {
        match &self.source {
            Source::Controller(requester) => Some(&requester.config.control),
            Source::Spire(_) => None,
        }
    }
}

impl CertificateExpired {
    /// Checks credentials by the wall clock, each time anew, because it may be set.
    ///
    /// # Errors
    /// When they have expired.
    pub(crate) fn check(credentials: &Credentials) -> Result<(), Self> {
        if credentials.has_expired(SystemTime::now()) {
            return Err(Self { name: credentials.name().clone(), expiry: credentials.expiry() });
        }
        Ok(())
    }
}

/// Certifies and renews until the process ends. `client` is that of [`Bootstrap::controller`].
///
/// # Errors
/// When the Workload API refuses for good. Other failures are logged and retried.
pub(crate) async fn run(
    bootstrap: Bootstrap,
    client: Option<ControlClient>,
    publisher: Publisher,
) -> anyhow::Result<()> {
    match (bootstrap.source, client) {
        (Source::Controller(requester), Some(client)) => {
            Certifier { requester, client, publisher }.certify_forever().await
        }
        (Source::Controller(_), None) => anyhow::bail!("there is no client of the identity controller"),
        (Source::Spire(socket), _) => spire::follow(&socket, &publisher).await,
    }
}

impl Publisher {
    /// Creates a publisher whose metrics are registered.
    pub(crate) fn new(
        config: &IdentityConfig,
        anchors: TrustAnchors,
        credentials: watch::Sender<Option<Arc<Credentials>>>,
        gate: Gate,
        registry: &Metrics,
    ) -> Self {
        let metrics = registry.register(CertMetrics::register);
        Self { name: config.local_name.clone(), anchors, credentials, gate, metrics }
    }

    /// Puts a certificate into force.
    fn publish(&self, credentials: Credentials) {
        self.metrics.expiration.set(unix_seconds(credentials.expiry()));
        self.metrics.refresh.set(unix_seconds(SystemTime::now()));
        self.metrics.refreshes.get_or_create(&[("result", "ok")]).inc();
        let first = self.credentials.send_replace(Some(Arc::new(credentials))).is_none();
        if first {
            tracing::info!(server.id = %self.name, "certified identity");
            self.gate.open();
        }
    }

    /// Reports that there is no new certificate, and what that means by now.
    fn failed(&self, error: &(dyn Error + 'static)) {
        self.metrics.refreshes.get_or_create(&[("result", "error")]).inc();
        let error = chain(error);
        if self.has_expired() {
            tracing::error!(error, server.id = %self.name, "the certificate has expired, so that peers refuse this proxy, and it cannot be renewed");
        } else {
            tracing::warn!(error, server.id = %self.name, "failed to obtain identity, trying again");
        }
    }

    fn has_expired(&self) -> bool {
        self.credentials.borrow().as_ref().is_some_and(|known| CertificateExpired::check(known).is_err())
    }

    /// Waits until the certificate has expired by the wall clock; forever without one. Then reports it.
    async fn expired(&self) {
        let Some(known) = self.credentials.borrow().clone() else { return std::future::pending().await };
        loop {
            let Err(error) = CertificateExpired::check(&known) else {
                // Not before the second of its end is over.
                let left =
                    known.expiry().duration_since(SystemTime::now()).unwrap_or_default() + Duration::from_secs(1);
                tokio::time::sleep(left.min(LONGEST_WAIT)).await;
                continue;
            };
            tracing::error!(%error, "the certificate has expired, so that peers refuse this proxy, and no other has come");
            return;
        }
    }
}

impl Certifier {
    async fn certify_forever(self) -> anyhow::Result<()> {
        let mut pauses = Pauses::new();
        loop {
            match self.certify().await {
                Ok(credentials) => {
                    let expiry = credentials.expiry();
                    self.publisher.publish(credentials);
                    pauses.reset();
                    let spread = rand::rng().random_range(1.0 - REFRESH_SPREAD..=1.0);
                    let pause = refresh_after(expiry, SystemTime::now(), &self.requester.config, spread);
                    wait(pause).await;
                }
                Err(error) => {
                    self.publisher.failed(&error);
                    self.client.pause(&mut pauses).await;
                }
            }
        }
    }

    async fn certify(&self) -> Result<Credentials, CertifyError> {
        let Publisher { name, anchors, .. } = &self.publisher;
        let Requester { config, key, csr } = &*self.requester;
        let request = CertifyRequest {
            identity: name.to_string(),
            token: read_token(&config.token_file)?,
            certificate_signing_request: csr.clone(),
        };
        let mut client = IdentityClient::new(self.client.clone());
        let answer = tokio::time::timeout(CERTIFY_TIMEOUT, client.certify(request)).await;
        let issued = answer.map_err(|_| CertifyError::TimedOut)??.into_inner();
        let chain = issued.intermediate_certificates;
        Ok(Credentials::new(name.clone(), key, issued.leaf_certificate, chain, anchors.clone())?)
    }
}

/// How long to wait before the next renewal: until 70 % of what remains has passed, at most the settings' longest time,
/// of that the part `spread`, and at least the settings' shortest time.
fn refresh_after(expiry: SystemTime, now: SystemTime, config: &ControllerIdentity, spread: f64) -> Duration {
    let remaining = expiry.duration_since(now).unwrap_or_default();
    // Not `clamp`, which panics if the settings are reversed.
    remaining.mul_f64(REFRESH_AT).min(config.max_refresh).mul_f64(spread).max(config.min_refresh)
}

/// Waits for a time that has come when either clock says so. Timers stand still while a machine sleeps, and
/// certificates expire by the wall clock, which may be set.
async fn wait(pause: Duration) {
    let (began, due) = (Instant::now(), SystemTime::now().checked_add(pause));
    loop {
        let left = left(pause.saturating_sub(began.elapsed()), due, SystemTime::now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LONGEST_WAIT)).await;
    }
}

/// What is left of a wait by a timer and by the wall clock, unless that cannot tell.
fn left(by_timer: Duration, due: Option<SystemTime>, now: SystemTime) -> Duration {
    due.map_or(by_timer, |due| by_timer.min(due.duration_since(now).unwrap_or_default()))
}

fn read_token(path: &Path) -> Result<Vec<u8>, TokenError> {
    let shown = || path.display().to_string();
    let token = std::fs::read(path).map_err(|source| TokenError::Read { path: shown(), source })?;
    let token = token.trim_ascii();
    if token.is_empty() { Err(TokenError::Empty(shown())) } else { Ok(token.to_vec()) }
}

fn unix_seconds(time: SystemTime) -> i64 {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

impl From<tonic::Status> for CertifyError {
    fn from(status: tonic::Status) -> Self {
        // A status that this side created has the failure as its source, whose text is more specific.
        let reason = match status.source() {
            Some(source) => chain(source),
            None => status.message().to_owned(),
        };
        Self::Certify { code: status.code(), reason }
    }
}

impl CertMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "control_identity_cert_expiration_timestamp_seconds",
            "When the proxy's certificate expires, seconds since the epoch",
            metrics.expiration.clone(),
        );
        registry.register(
            "control_identity_cert_refresh_timestamp_seconds",
            "When the proxy's certificate was last refreshed, seconds since the epoch",
            metrics.refresh.clone(),
        );
        registry.register(
            "control_identity_cert_refreshes",
            "How often the proxy's certificate was refreshed, by result",
            metrics.refreshes.clone(),
        );
        metrics
    }
}

#[cfg(test)]
mod tests;
