//! A lease of `coordination.k8s.io`: of all replicas, the holder alone writes.
//!
//! ```text
//! watch of the lease --observe--> Election --decide--> Action --API--> observe
//! ```
//!
//! The holder renews, and others take over once they saw no renewal for the lease's duration. They measure that by their own
//! clock from what they observe, never by the time that the holder wrote: clocks of machines differ. A holder that ends
//! releases the lease, and the next one takes it at once. Times are client-go's (`leaderelection`), as Linkerd sets them.

mod election;

use std::{pin::pin, time::Duration};

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::PostParams,
    runtime::{
        utils::Backoff,
        watcher::{self, DefaultBackoff, watch_object},
    },
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior},
};
use weft_runtime::drain;

use crate::api::{explain, explain_watch};
use election::{Action, Election};

/// How long a lease holds without renewal.
const DURATION: Duration = Duration::from_secs(30);
/// How often it is renewed, and how often others look whether it ran out.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a holder that cannot renew goes on: less than [`DURATION`], so that two never write at once.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a release may take: the process is about to end.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP status of a write that came too late.
const CONFLICT: u16 = 409;

/// Which lease, and for whom.
#[derive(Clone, Debug)]
pub(crate) struct LeaseConfig {
    /// Namespace of the lease.
    pub(crate) namespace: String,
    /// Name of the lease.
    pub(crate) name: String,
    /// This replica's name, unique among those that want the lease.
    pub(crate) identity: String,
}

/// Holds the lease whenever it can and says so in `held`; releases it when the drain begins, and ends.
///
/// # Errors
/// None: whatever the API refuses is retried.
pub(crate) async fn hold(
    client: Client,
    config: LeaseConfig,
    held: watch::Sender<bool>,
    drain: drain::Watch,
) -> anyhow::Result<()> {
    let api = Api::namespaced(client, &config.namespace);
    let mut holder = Holder { election: Election::new(config.identity.clone()), api, config, held, complaint: None };
    holder.run_until(drain.signaled()).await;
    holder.release().await;
    Ok(())
}

struct Holder {
    election: Election,
    api: Api<Lease>,
    config: LeaseConfig,
    held: watch::Sender<bool>,
    /// The last problem, reported once.
    complaint: Option<String>,
}

impl Holder {
    /// Observes and acts until `end`. A write that has begun is finished first: without its answer it is not known what
    /// the lease says, so that it could not be released.
    async fn run_until(&mut self, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        let api = self.api.clone();
        let name = self.config.name.clone();
        let mut leases = pin!(watch_object(api, &name));
        let mut backoff = DefaultBackoff::default();
        let mut retry_watch_at = Instant::now();
        let mut tick = tokio::time::interval(PERIOD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = &mut end => return,
                _ = tick.tick() => {}
                lease = next(&mut leases, retry_watch_at) => match lease {
                    Some(Ok(lease)) => {
                        backoff.reset();
                        self.election.observe(lease, Instant::now());
                    }
                    Some(Err(error)) => {
                        retry_watch_at = Instant::now() + backoff.next().unwrap_or(PERIOD);
                        self.complain(&format!("lease cannot be watched: {}", explain_watch(&error)));
                    }
                    None => return,
                },
            }
            self.act().await;
        }
    }

    /// Does what the election says, until it says to wait.
    async fn act(&mut self) {
        let action = self.election.decide(Instant::now());
        let Some(lease) = self.wanted(&action) else { return self.publish() };
        let began = Instant::now();
        let params = PostParams::default();
        let written = async {
            if action == Action::Create {
                self.api.create(&params, &lease).await
            } else {
                self.api.replace(&self.config.name, &params, &lease).await
            }
        };
        match tokio::time::timeout(REQUEST_TIMEOUT, written).await {
            Ok(Ok(lease)) => {
                self.complaint = None;
                // From before the request: others count from when the API took it.
                self.election.wrote(lease, began);
                let (namespace, name) = (&self.config.namespace, &self.config.name);
                match action {
                    Action::Renew => tracing::debug!("renewed lease {namespace}/{name}"),
                    _ => tracing::info!(identity = self.config.identity, "acquired lease {namespace}/{name}"),
                }
            }
            // Another replica wrote first; the watch brings what it wrote.
            Ok(Err(kube::Error::Api(status))) if status.code == CONFLICT => self.election.outdated(),
            Ok(Err(error)) => self.complain(&format!("lease cannot be written: {}", explain(&error))),
            Err(_) => self.complain("lease cannot be written: no answer from the Kubernetes API in time"),
        }
        self.publish();
    }

    /// The lease as the action leaves it; `None` where nothing is to be written.
    fn wanted(&self, action: &Action) -> Option<Lease> {
        let now = MicroTime(Timestamp::now());
        let mut lease = match action {
            Action::Wait => return None,
            Action::Create => Lease {
                metadata: ObjectMeta {
                    name: Some(self.config.name.clone()),
                    namespace: Some(self.config.namespace.clone()),
                    ..ObjectMeta::default()
                },
                ..Lease::default()
            },
            Action::Take | Action::Renew => self.election.lease()?.clone(),
        };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if *action != Action::Renew {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |transitions| transitions + 1));
        }
        spec.holder_identity = Some(self.config.identity.clone());
        spec.lease_duration_seconds = Some(i32::try_from(DURATION.as_secs()).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
        Some(lease)
    }

    /// Tells whether the lease is held, where that changed.
    fn publish(&mut self) {
        let holds = self.election.holds(Instant::now());
        let changed = self.held.send_if_modified(|held| std::mem::replace(held, holds) != holds);
        if changed && !holds {
            let (namespace, name) = (&self.config.namespace, &self.config.name);
            tracing::warn!(holder = self.election.holder(), "lost lease {namespace}/{name}");
        }
    }

    async fn release(&mut self) {
        self.held.send_replace(false);
        if self.election.holder() != Some(&self.config.identity) {
            return;
        }
        let Some(mut lease) = self.election.lease().cloned() else { return };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        let (namespace, name) = (&self.config.namespace, &self.config.name);
        let written =
            tokio::time::timeout(RELEASE_TIMEOUT, self.api.replace(name, &PostParams::default(), &lease)).await;
        match written.context("no answer in time").and_then(|written| Ok(written?)) {
            Ok(_) => tracing::info!("released lease {namespace}/{name}"),
            Err(error) => tracing::warn!(error = format!("{error:#}"), "lease cannot be released, it will run out"),
        }
    }

    fn complain(&mut self, problem: &str) {
        let (namespace, name) = (&self.config.namespace, &self.config.name);
        if self.complaint.as_deref() == Some(problem) {
            tracing::debug!(lease = format!("{namespace}/{name}"), problem, "lease is still in trouble");
        } else {
            tracing::warn!(lease = format!("{namespace}/{name}"), problem, "lease is in trouble, retrying");
            self.complaint = Some(problem.to_owned());
        }
    }
}

/// The next observation; after an error not before the given moment.
async fn next(
    leases: &mut (impl futures::Stream<Item = watcher::Result<Option<Lease>>> + Unpin),
    not_before: Instant,
) -> Option<watcher::Result<Option<Lease>>> {
    tokio::time::sleep_until(not_before).await;
    leases.next().await
}
