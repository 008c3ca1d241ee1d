//! Keeps the datapath free of pods whose network namespaces are gone.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::{datapath::DatapathError, error::chain, shared::Shared};

/// Nothing waits for it but a pod whose sandbox was replaced: a dead namespace costs a map entry.
const PERIOD: Duration = Duration::from_secs(5);

/// Looks for them forever, and tells the cookies of those it found.
///
/// # Errors
/// When the pins cannot be read any more.
pub(crate) async fn collect(datapath: Shared, gone: mpsc::UnboundedSender<Vec<u64>>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let datapath = datapath.clone();
        let collected = tokio::task::spawn_blocking(move || datapath.lock().collect_garbage()).await?;
        match collected {
            Ok(cookies) if cookies.is_empty() => {}
            Ok(cookies) => {
                tracing::info!(pods = cookies.len(), "forgot pods whose network namespaces are gone");
                // Outside Kubernetes nobody wants to know.
                let _ = gone.send(cookies);
            }
            Err(error @ DatapathError::Pins(_)) => return Err(error.into()),
            Err(error) => tracing::warn!(error = chain(&error), "cannot look for pods that are gone"),
        }
    }
}
