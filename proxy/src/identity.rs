//! Certificates: the first one, and renewals.
//!
//! ```text
//! token file + CSR -> Certify -> leaf, intermediates -> Credentials (name, chain, expiry checked) -> watch
//! ```
//!
//! Owns the schedule. The token is read again each time, because the kubelet rotates it; the key never changes. A
//! certificate that does not verify is not used: the old one stays until it expires, and without one the proxy does
//! not serve.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use tokio::{sync::watch, time::Instant};
use weft_proto::linkerd::identity::{CertifyRequest, identity_client::IdentityClient};
use weft_runtime::{metrics::Metrics, readiness::Gate};
use weft_tls::{
    anchors::TrustAnchors,
    credentials::{Credentials, CredentialsError},
    keys::IdentityKey,
};

use crate::{
    config::{IdentityConfig, UnusableSetting},
    control::{Backoff, ControlClient},
    shared::Shared,
};

/// The fraction of a certificate's remaining lifetime after which it is renewed: Linkerd's.
const REFRESH_AT: f64 = 0.7;

/// The longest wait without looking at the wall clock again.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Deadline for the controller's answer once it is connected.
const CERTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Content of the settings' files, read at start.
pub(crate) struct Bootstrap {
    /// The mesh's trust anchors.
    pub(crate) anchors: TrustAnchors,
    /// The private key, used until the process ends.
    pub(crate) key: IdentityKey,
    /// The signing request, DER.
    pub(crate) csr: Vec<u8>,
}

/// Dependencies of certification.
pub(crate) struct Certifier {
    /// Key, signing request, anchors.
    pub(crate) bootstrap: Bootstrap,
    /// The identity controller.
    pub(crate) client: ControlClient,
    /// The published credentials.
    pub(crate) credentials: watch::Sender<Option<Arc<Credentials>>>,
    /// Opened with the first credentials.
    pub(crate) gate: Gate,
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
    refreshes: Counter,
}

/// Certifies and renews until the process ends.
///
/// # Errors
/// [`UnusableSetting`] when there is no token at the start. Later failures are logged and retried.
pub(crate) async fn run(shared: Arc<Shared>, certifier: Certifier, registry: Metrics) -> anyhow::Result<()> {
    let metrics = registry.register(CertMetrics::register);
    let config = &shared.config.identity;
    read_token(&config.token_file).map_err(|error| UnusableSetting {
        variable: "LINKERD2_PROXY_IDENTITY_TOKEN_FILE",
        reason: with_sources(&error),
    })?;
    certifier.certify_forever(config, &metrics).await
}

impl Certifier {
    async fn certify_forever(self, config: &IdentityConfig, metrics: &CertMetrics) -> anyhow::Result<()> {
        let mut backoff = Backoff::new();
        loop {
            match self.certify(config).await {
                Ok(credentials) => {
                    let expiry = credentials.expiry();
                    metrics.expiration.set(unix_seconds(expiry));
                    metrics.refresh.set(unix_seconds(SystemTime::now()));
                    metrics.refreshes.inc();
                    let first = self.credentials.send_replace(Some(Arc::new(credentials))).is_none();
                    if first {
                        tracing::info!(server.id = %config.local_name, "certified identity");
                        self.gate.open();
                    }
                    backoff.reset();
                    let pause = refresh_after(expiry, SystemTime::now(), config.min_refresh, config.max_refresh);
                    wait(pause).await;
                }
                Err(error) => {
                    tracing::warn!(error = with_sources(&error), "failed to obtain identity, trying again");
                    backoff.pause().await;
                }
            }
        }
    }

    async fn certify(&self, config: &IdentityConfig) -> Result<Credentials, CertifyError> {
        let request = CertifyRequest {
            identity: config.local_name.to_string(),
            token: read_token(&config.token_file)?,
            certificate_signing_request: self.bootstrap.csr.clone(),
        };
        let mut client = IdentityClient::new(self.client.clone());
        let answer = tokio::time::timeout(CERTIFY_TIMEOUT, client.certify(request)).await;
        let issued = answer.map_err(|_| CertifyError::TimedOut)??.into_inner();
        let name = config.local_name.clone();
        let Bootstrap { anchors, key, .. } = &self.bootstrap;
        Ok(Credentials::new(name, key, issued.leaf_certificate, issued.intermediate_certificates, anchors.clone())?)
    }
}

/// How long to wait before the next renewal: until 70 % of what remains has passed, between `min` and `max`.
fn refresh_after(expiry: SystemTime, now: SystemTime, min: Duration, max: Duration) -> Duration {
    let remaining = expiry.duration_since(now).unwrap_or_default();
    // Not `clamp`, which panics if the settings are reversed.
    remaining.mul_f64(REFRESH_AT).min(max).max(min)
}

/// Waits for a time that has come when either clock says so. Timers stand still while a machine sleeps, and certificates
/// expire by the wall clock, which may be set.
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

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

impl From<tonic::Status> for CertifyError {
    fn from(status: tonic::Status) -> Self {
        // A status that this side created has the failure as its source, whose text is more specific.
        let reason = match std::error::Error::source(&status) {
            Some(source) => with_sources(source),
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
            "How often the proxy's certificate was refreshed",
            metrics.refreshes.clone(),
        );
        metrics
    }
}

#[cfg(test)]
mod tests;
