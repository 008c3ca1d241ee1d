//! Keeps the datapath free of pods whose network namespaces are gone.

use std::time::Duration;

use tokio::sync::mpsc;
use weft_runtime::error::chain;

use crate::datapath::{DatapathError, handle::Handle};

/// Interval of the collection. Only a pod whose sandbox was replaced waits for it: a dead namespace costs a map entry.
const PERIOD: Duration = Duration::from_secs(5);

/// Removes them forever, and sends the cookies of those it found.
///
/// # Errors
/// When the pins can no longer be read.
pub(crate) async fn collect(datapath: Handle, gone: mpsc::UnboundedSender<Vec<u64>>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        match datapath.call(|kernel| kernel.collect_garbage()).await {
            Ok(cookies) if cookies.is_empty() => {}
            Ok(cookies) => {
                tracing::info!(pods = cookies.len(), "removed pods whose network namespaces are gone");
                // Outside Kubernetes there is no receiver.
                let _ = gone.send(cookies);
            }
            Err(error @ DatapathError::Pins(_)) => return Err(error.into()),
            Err(error) => tracing::warn!(error = chain(&error), "cannot look for pods that are gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::fake::FakeKernel;

    #[tokio::test(start_paused = true)]
    async fn reports_the_pods_that_were_removed() {
        let kernel = FakeKernel::default();
        kernel.state().gone = vec![7, 9];
        let (gone_tx, mut gone) = mpsc::unbounded_channel();
        let collecting = tokio::spawn(collect(kernel.spawn(), gone_tx));
        assert_eq!(gone.recv().await, Some(vec![7, 9]));
        kernel.state().gone = vec![11];
        assert_eq!(gone.recv().await, Some(vec![11]));
        collecting.abort();
    }
}
