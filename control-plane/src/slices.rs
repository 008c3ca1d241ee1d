//! EndpointSlices of ExternalWorkloads: machines outside the cluster become endpoints of the Services that select them,
//! as Kubernetes' own controller does it for pods (`linkerd2:controller/api/destination/external-workload/`).
//!
//! ```text
//! batches --observe--> Slices --plan (while the lease is held)--> Action --API--> observe
//! ```
//!
//! Synchronous code decides which slices are wanted, from the complete state; a failed write is retried until it works
//! or the Service has failed too often.

mod endpoints;
mod metrics;
mod plan;

use std::{collections::HashMap, sync::Arc, time::Duration};

use weft_index::{Event, Key};

use crate::api::explain;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams, Preconditions},
};
use metrics::QueueMetrics;
use parking_lot::Mutex;
use plan::{Action, Slices};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// How often writing a Service's slices may fail before it is retried only after the Service changes.
const MAX_ATTEMPTS: u32 = 15;
/// Wait after the first failure; it doubles with each further one.
const RETRY_MIN: Duration = Duration::from_millis(100);
/// The longest wait after a failure.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Keeps slices as they should be. Clones share the state.
#[derive(Clone, Default)]
pub(crate) struct SliceWriter(Arc<Shared>);

#[derive(Default)]
struct Shared {
    slices: Mutex<Slices>,
    changed: Notify,
    metrics: QueueMetrics,
}

/// Consecutive failures of one Service.
struct Failed {
    attempts: u32,
    retry_at: Instant,
}

impl SliceWriter {
    /// A writer that does not hold the lease.
    pub(crate) fn waiting() -> Self {
        let writer = Self::default();
        writer.stop();
        writer
    }

    /// Takes in a batch of the source.
    pub(crate) fn observe(&self, batch: &[Event]) {
        let mut slices = self.0.slices.lock();
        for event in batch {
            match event {
                Event::Apply(object) => slices.apply(object),
                Event::Delete(reference) => slices.delete(reference),
                Event::Synced => slices.synced(),
            }
        }
        self.0.metrics.added(slices.take_added());
        if slices.has_work() {
            self.0.changed.notify_one();
        }
    }

    /// Queues every Service: another replica may have written slices since, or died before it could.
    fn start(&self) {
        let mut slices = self.0.slices.lock();
        slices.all_anew();
        self.0.metrics.added(slices.take_added());
    }

    /// Empties the queue: another replica writes.
    fn stop(&self) {
        self.0.slices.lock().pause();
        self.0.metrics.stopped();
    }

    /// Writes while `held` says that this replica may. Runs until the lease is given up.
    ///
    /// # Errors
    /// Never: a request that the API server refuses is retried.
    pub(crate) async fn run(self, client: Client, mut held: watch::Receiver<bool>) -> anyhow::Result<()> {
        loop {
            if held.wait_for(|held| *held).await.is_err() {
                return Ok(());
            }
            self.start();
            tokio::select! {
                () = self.write(&client) => {}
                _ = held.wait_for(|held| !held) => {}
            }
            self.stop();
        }
    }

    async fn write(&self, client: &Client) {
        let mut failed: HashMap<Key, Failed> = HashMap::new();
        loop {
            let due: Vec<_> = {
                let now = Instant::now();
                let retries = failed.iter().filter(|(_, failed)| failed.retry_at <= now);
                let retries: Vec<_> = retries.map(|(key, failed)| (key.clone(), failed.retry_at)).collect();
                self.0.metrics.added(u64::try_from(retries.len()).unwrap_or(u64::MAX));
                let changed = self.0.slices.lock().take_work();
                changed.into_iter().chain(retries).collect()
            };
            self.0.metrics.took(due.len());
            for (service, due) in due {
                self.0.metrics.began(due);
                let worked = self.write_service(client, &service).await;
                self.0.metrics.ended();
                if worked {
                    failed.remove(&service);
                    continue;
                }
                let attempts = failed.get(&service).map_or(0, |failed| failed.attempts) + 1;
                if attempts >= MAX_ATTEMPTS {
                    failed.remove(&service);
                    self.0.metrics.dropped();
                    tracing::error!(%service, attempts, "endpoint slices cannot be written, giving up until the service or its workloads change");
                } else {
                    self.0.metrics.retried();
                    let wait = RETRY_MAX.min(RETRY_MIN * 2u32.pow(attempts - 1));
                    failed.insert(service, Failed { attempts, retry_at: Instant::now() + wait });
                }
            }
            let next_retry = failed.values().map(|failed| failed.retry_at).min();
            let retry = async {
                match next_retry {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.0.changed.notified() => {}
                () = retry => {}
            }
        }
    }

    /// Writes one Service's slices as they should be; returns whether that worked.
    async fn write_service(&self, client: &Client, service: &Key) -> bool {
        let actions = self.0.slices.lock().plan(service);
        let api = Api::<EndpointSlice>::namespaced(client.clone(), &service.namespace);
        let mut worked = true;
        for action in actions {
            let (name, replaced) = (action.name().to_owned(), action.version().map(str::to_owned));
            let done = tokio::time::timeout(REQUEST_TIMEOUT, perform(&api, action)).await;
            match done {
                Ok(Ok(Some(slice))) => {
                    tracing::debug!(%service, slice = slice.metadata.name, "wrote endpoint slice");
                    self.0.slices.lock().wrote(replaced.as_deref(), slice);
                }
                Ok(Ok(None)) => {
                    tracing::debug!(%service, slice = name, "deleted endpoint slice");
                    let key = Key::new(service.namespace.clone(), name);
                    self.0.slices.lock().deleted(&key, replaced.as_deref());
                }
                Ok(Err(error)) => {
                    tracing::warn!(%service, slice = name, error = explain(&error), "endpoint slice cannot be written, retrying");
                    worked = false;
                }
                Err(_) => {
                    tracing::warn!(%service, slice = name, "endpoint slice cannot be written: no answer in time, retrying");
                    worked = false;
                }
            }
        }
        worked
    }
}

/// Performs the action, and returns the slice as it is now, unless it was deleted.
async fn perform(api: &Api<EndpointSlice>, action: Action) -> kube::Result<Option<EndpointSlice>> {
    match action {
        Action::Create(slice) => api.create(&PostParams::default(), &slice).await.map(Some),
        Action::Update(slice) => {
            let name = slice.metadata.name.clone().unwrap_or_default();
            api.replace(&name, &PostParams::default(), &slice).await.map(Some)
        }
        Action::Delete { name, version } => {
            let preconditions = Preconditions { resource_version: version, uid: None };
            let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            match api.delete(&name, &params).await {
                Ok(_) => Ok(None),
                // It is deleted already.
                Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
                Err(error) => Err(error),
            }
        }
    }
}
