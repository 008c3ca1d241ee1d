//! Keeps the datapath free of pods whose network namespaces are gone.
//!
//! A pod's link says that its namespace is gone. A namespace that the kernel enrolled, or whose enrolment was
//! interrupted, has none: the processes of the node are searched for it. Pods determine how long that takes, so it
//! happens beside everything else, and rarely.

use std::{collections::BTreeSet, future::Future, io, time::Duration};

use futures::{StreamExt as _, stream::FuturesUnordered};
use tokio::{sync::mpsc, time::Instant};
use weft_runtime::error::chain;

use crate::datapath::{
    DatapathError,
    handle::{Collected, Handle},
    netns,
};

/// Interval of the collection. Only a pod whose sandbox was replaced waits for it: a dead namespace costs a map entry.
const PERIOD: Duration = Duration::from_secs(5);
/// Pause between searches: most suspects live as long as their pods, and are suspect all the time.
const PAUSE: Duration = Duration::from_secs(60);

/// Removes them forever, and sends the cookies of those it found.
///
/// # Errors
/// When the pins can no longer be read.
pub(crate) async fn collect(datapath: Handle, gone: mpsc::UnboundedSender<Vec<u64>>) -> anyhow::Result<()> {
    let cookies = datapath.facts().cookies.clone();
    let search = |suspects| netns::without_processes(suspects, cookies.clone());
    collect_with(datapath.clone(), gone, search).await
}

async fn collect_with<S: Future<Output = io::Result<BTreeSet<u64>>>>(
    datapath: Handle,
    gone: mpsc::UnboundedSender<Vec<u64>>,
    search: impl Fn(BTreeSet<u64>) -> S,
) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    // At most one.
    let mut searches = FuturesUnordered::new();
    let mut next_search = Instant::now();
    loop {
        let removed = tokio::select! {
            _ = ticks.tick() => match datapath.call(|kernel| kernel.collect_garbage()).await {
                Ok(Collected { removed, suspects }) => {
                    if !suspects.is_empty() && searches.is_empty() && next_search <= Instant::now() {
                        searches.push(search(suspects));
                    }
                    Ok(removed)
                }
                Err(error) => Err(error),
            },
            Some(absent) = searches.next() => {
                next_search = Instant::now() + PAUSE;
                match absent {
                    Ok(absent) if absent.is_empty() => continue,
                    Ok(absent) => datapath.call(move |kernel| kernel.remove_absent(&absent)).await,
                    Err(error) => Err(DatapathError::Namespaces(error)),
                }
            }
        };
        match removed {
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
    use std::sync::{Arc, Mutex};

    use tokio::sync::oneshot;

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

    #[tokio::test(start_paused = true)]
    async fn a_search_that_takes_long_delays_neither_calls_nor_collections() {
        let kernel = FakeKernel::default();
        kernel.state().suspects = [7, 8].into();
        kernel.state().gone = vec![1];
        let datapath = kernel.spawn();
        let (gone_tx, mut gone) = mpsc::unbounded_channel();
        let started = Arc::new(Mutex::new(Vec::new()));
        let search = {
            let started = Arc::clone(&started);
            move |suspects| {
                let (answer, answered) = oneshot::channel();
                started.lock().unwrap().push((suspects, answer));
                async move { answered.await.map_err(io::Error::other) }
            }
        };
        let collecting = tokio::spawn(collect_with(datapath.clone(), gone_tx, search));
        assert_eq!(gone.recv().await, Some(vec![1]));
        for cookie in 2..20 {
            assert!(!datapath.call(|kernel| kernel.bypassed()).await.unwrap());
            kernel.state().gone = vec![cookie];
            assert_eq!(gone.recv().await, Some(vec![cookie]));
        }
        let (suspects, answer) = started.lock().unwrap().pop().unwrap();
        assert_eq!(suspects, [7, 8].into());
        assert!(started.lock().unwrap().is_empty(), "one at a time");
        let ended = Instant::now();
        answer.send([8].into()).unwrap();
        assert_eq!(gone.recv().await, Some(vec![8]));
        while started.lock().unwrap().is_empty() {
            tokio::time::sleep(PERIOD).await;
        }
        assert!(ended.elapsed() >= PAUSE, "{:?}", ended.elapsed());
        let (suspects, answer) = started.lock().unwrap().pop().unwrap();
        assert_eq!(suspects, [7].into());
        drop(answer);
        // A search that failed is repeated.
        while started.lock().unwrap().is_empty() {
            tokio::time::sleep(PERIOD).await;
        }
        collecting.abort();
    }
}
