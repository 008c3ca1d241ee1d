//! What every part of the proxy is given. Owns nothing that changes: news come through the receivers.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::watch;
use weft_runtime::drain;
use weft_tls::credentials::Credentials;

use crate::config::Config;
use crate::metrics::ProxyMetrics;

/// What every part of the proxy may use. Immutable but for the snapshots behind its receivers.
pub(crate) struct Shared {
    /// The settings.
    pub(crate) config: Config,
    /// The proxy's metric families.
    pub(crate) metrics: ProxyMetrics,
    /// This proxy's certificate; `None` until the first was issued.
    pub(crate) credentials: watch::Receiver<Option<Arc<Credentials>>>,
    /// Told when the proxy ends; tracks what has to finish before.
    pub(crate) drain: drain::Watch,
    /// The control thread's runtime, where control-plane streams run.
    pub(crate) control: Handle,
}
