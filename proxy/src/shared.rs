//! State that every part of the proxy uses. Owns nothing that changes: updates arrive through the receivers.

use std::sync::Arc;

use tokio::{runtime::Handle, sync::watch};
use weft_runtime::drain;
use weft_tls::credentials::Credentials;

use crate::{
    access_log::AccessLog, config::Config, http::serve::WindowBudget, metrics::ProxyMetrics, tap::Taps, trace::Tracing,
};

/// Dependencies of every part of the proxy. Immutable, except for the snapshots behind its receivers.
pub(crate) struct Shared {
    /// Settings, read from the environment once.
    pub(crate) config: Config,
    /// The proxy's metric families.
    pub(crate) metrics: ProxyMetrics,
    /// This proxy's certificate; `None` until the first is issued.
    pub(crate) credentials: watch::Receiver<Option<Arc<Credentials>>>,
    /// Notified when the proxy shuts down; tracks work that has to finish first.
    pub(crate) drain: drain::Watch,
    /// Who watches requests.
    pub(crate) taps: Arc<Taps>,
    /// Spans of requests.
    pub(crate) tracing: Tracing,
    /// What the windows of clients' HTTP/2 connections have together.
    pub(crate) windows: Arc<WindowBudget>,
    /// Lines about inbound requests; `None` if there are none.
    pub(crate) access_log: Option<AccessLog>,
    /// The control thread's runtime, which runs the control-plane streams.
    pub(crate) control: Handle,
}
