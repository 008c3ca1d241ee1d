//! A lease of `coordination.k8s.io`: of all replicas, only the holder writes.
//!
//! ```text
//! watch of the lease --observe--> Election --decide--> Action --API--> observe
//! ```
//!
//! The holder renews, and others take over if they see no renewal for the lease's duration. They measure that
//! with their own clock from what they observe, never by the time that the holder wrote: clocks of machines
//! differ. A holder that shuts down releases the lease, and the next one takes it at once. Times are
//! client-go's (`leaderelection`), as Linkerd sets them.

mod election;

use std::{pin::pin, time::Duration};

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        coordination::v1::{Lease, LeaseSpec},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference},
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

use crate::api::{explain, explain_watch, next_pause};
use election::{Action, Election};

/// How long a lease is valid without renewal.
const DURATION: Duration = Duration::from_secs(30);
/// Interval of renewals, and of the checks of other replicas whether the lease has expired.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a holder that cannot renew continues: less than [`DURATION`], so that two never write at once.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a release may take: the process is about to exit.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP status of a write based on an outdated version.
const CONFLICT: u16 = 409;

/// The lease, and the replica that wants it.
#[derive(Clone, Debug)]
pub(crate) struct LeaseConfig {
    /// Namespace of the lease.
    pub(crate) namespace: String,
    /// Name of the lease.
    pub(crate) name: String,
    /// This replica's name, unique among those that want the lease.
    pub(crate) identity: String,
    /// The Deployment that owns the lease, if it exists: the lease is removed with it.
    pub(crate) owner: Option<&'static str>,
}

impl LeaseConfig {
    /// The lease, for logs.
    fn lease(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Holds the lease whenever possible and publishes that in `held`; when the drain begins, releases it and
/// returns.
///
/// # Errors
/// Never: a request that the API server refuses is retried.
pub(crate) async fn hold(
    client: Client,
    config: LeaseConfig,
    held: watch::Sender<bool>,
    drain: drain::Watch,
) -> anyhow::Result<()> {
    let owner = owner(&client, &config).await;
    let api = Api::namespaced(client, &config.namespace);
    let election = Election::new(config.identity.clone());
    let mut holder = Holder { election, api, config, owner, held, complaint: None };
    holder.run_until(drain.signaled()).await;
    holder.release().await;
    Ok(())
}

/// A reference to the owner of the lease. Without it, the lease works all the same.
async fn owner(client: &Client, config: &LeaseConfig) -> Option<OwnerReference> {
    let deployments = Api::<Deployment>::namespaced(client.clone(), &config.namespace);
    let name = config.owner?;
    let without = |error: &str| {
        tracing::warn!(
            deployment = name,
            error,
            "cannot read the Deployment that owns the lease, creating the lease without an owner"
        );
        None
    };
    match tokio::time::timeout(REQUEST_TIMEOUT, deployments.get_metadata_opt(name)).await {
        Ok(Ok(found)) => Some(OwnerReference {
            api_version: "apps/v1".to_owned(),
            kind: "Deployment".to_owned(),
            name: name.to_owned(),
            uid: found?.metadata.uid?,
            controller: Some(true),
            ..OwnerReference::default()
        }),
        Ok(Err(error)) => without(&explain(&error)),
        Err(_) => without("no answer in time"),
    }
}

struct Holder {
    election: Election,
    api: Api<Lease>,
    config: LeaseConfig,
    owner: Option<OwnerReference>,
    held: watch::Sender<bool>,
    /// The last problem, which is reported once.
    complaint: Option<String>,
}

impl Holder {
    /// Observes and acts until `end`. A write that has started is finished first: without its answer the
    /// state of the lease is unknown, and it could not be released.
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
                        retry_watch_at = Instant::now() + next_pause(&mut backoff);
                        self.complain(&format!("lease cannot be watched: {}", explain_watch(&error)));
                    }
                    None => return,
                },
            }
            self.act().await;
        }
    }

    /// Performs the election's action, if there is one; after a conflict once more, with the newest version.
    async fn act(&mut self) {
        if self.election.is_outdated() {
            self.read().await;
        }
        self.write().await;
        if self.election.is_outdated() {
            self.read().await;
            self.write().await;
        }
        self.publish();
    }

    /// Reads the version that the watch has not shown: its connection may be dead.
    async fn read(&mut self) {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.api.get_opt(&self.config.name)).await {
            Ok(Ok(lease)) => self.election.read(lease, Instant::now()),
            Ok(Err(error)) => self.complain(&format!("lease cannot be read: {}", explain(&error))),
            Err(_) => self.complain("lease cannot be read: no answer from the Kubernetes API in time"),
        }
    }

    async fn write(&mut self) {
        let action = self.election.decide(Instant::now());
        let Some(lease) = self.wanted(&action) else { return };
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
                // Not later than the request: others count from when the API server received it.
                self.election.wrote(lease, began);
                let LeaseConfig { identity, .. } = &self.config;
                match action {
                    Action::Renew if *self.held.borrow() => {
                        tracing::debug!(lease = self.config.lease(), "renewed lease");
                    }
                    Action::Renew => tracing::info!(lease = self.config.lease(), "regained lease"),
                    _ => tracing::info!(lease = self.config.lease(), identity, "acquired lease"),
                }
            }
            // Another replica wrote first, or this one without learning of it.
            Ok(Err(kube::Error::Api(status))) if status.code == CONFLICT => self.election.outdated(),
            Ok(Err(error)) => self.complain(&format!("lease cannot be written: {}", explain(&error))),
            Err(_) => self.complain("lease cannot be written: no answer from the Kubernetes API in time"),
        }
    }

    /// The lease after the action; `None` if there is nothing to write.
    fn wanted(&self, action: &Action) -> Option<Lease> {
        let now = MicroTime(Timestamp::now());
        let mut lease = match action {
            Action::Wait => return None,
            Action::Create => Lease {
                metadata: ObjectMeta {
                    name: Some(self.config.name.clone()),
                    namespace: Some(self.config.namespace.clone()),
                    owner_references: self.owner.clone().map(|owner| vec![owner]),
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

    /// Publishes whether the lease is held, if that changed.
    fn publish(&mut self) {
        let holds = self.election.holds(Instant::now());
        let changed = self.held.send_if_modified(|held| std::mem::replace(held, holds) != holds);
        if changed && !holds {
            tracing::warn!(lease = self.config.lease(), holder = self.election.holder(), "lost lease");
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
        let params = PostParams::default();
        let releasing = self.api.replace(&self.config.name, &params, &lease);
        let written = tokio::time::timeout(RELEASE_TIMEOUT, releasing).await;
        let lease = self.config.lease();
        match written.context("no answer in time").and_then(|written| Ok(written?)) {
            Ok(_) => tracing::info!(lease, "released lease"),
            Err(error) => {
                tracing::warn!(
                    lease,
                    error = format!("{error:#}"),
                    "lease cannot be released: another replica takes over when it expires"
                );
            }
        }
    }

    fn complain(&mut self, problem: &str) {
        if self.complaint.as_deref() == Some(problem) {
            tracing::debug!(lease = self.config.lease(), problem, "lease still fails");
        } else {
            tracing::warn!(lease = self.config.lease(), problem, "lease fails, retrying");
            self.complaint = Some(problem.to_owned());
        }
    }
}

/// The next observation; after an error not before the given time.
async fn next(
    leases: &mut (impl futures::Stream<Item = watcher::Result<Option<Lease>>> + Unpin),
    not_before: Instant,
) -> Option<watcher::Result<Option<Lease>>> {
    tokio::time::sleep_until(not_before).await;
    leases.next().await
}
