//! The admin server on 4191.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use weft_runtime::metrics::Metrics;
use weft_runtime::readiness::Readiness;
use weft_runtime::telemetry::LogLevel;

use crate::app::Shared;

/// What the admin server shows and changes.
pub(crate) struct Admin {
    /// All metrics.
    pub(crate) registry: Metrics,
    /// What `/ready` answers from.
    pub(crate) readiness: Readiness,
    /// What `/proxy-log-level` changes.
    pub(crate) log: LogLevel,
    /// Set to true by `POST /shutdown`.
    pub(crate) shutdown: watch::Sender<bool>,
}

/// Serves until the process ends.
pub(crate) async fn run(_shared: Arc<Shared>, admin: Admin, listener: TcpListener) -> anyhow::Result<()> {
    weft_runtime::admin::Admin::new(admin.registry, admin.readiness).serve(listener, std::future::pending()).await;
    Ok(())
}
