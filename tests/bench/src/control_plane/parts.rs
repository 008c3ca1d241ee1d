//! The parts of a run, in an order in which none disturbs the next.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::{sync::watch, time::sleep};

use super::{
    api::Api,
    args::Args,
    changes::{Changes, churn, paced, propagation, settle},
    clients::{Answers, Clients, is_stalling},
    meter::{Load, Meter, probe},
    objects::Plan,
    process::ControlPlane,
    report::{Changing, Doubled, FirstAnswers, Opening, ProcessOpening, Reconnect, Setup, Stalled, Start},
    world::World,
};

/// Time for allocators to come to rest after a burst.
const REST: Duration = Duration::from_secs(3);
/// How long endpoints change before the clients come back, and at least after.
const AROUND_RECONNECT: Duration = Duration::from_secs(5);
/// Time for the windows of stalled clients to close.
const STALLS_WITHIN: Duration = Duration::from_secs(1);
/// Number of restarts at whose end a rolling restart must be, per expected duration.
const ROLLOUT_PATIENCE: u32 = 10;

/// A run with a control plane and clients.
pub(super) struct Run<'a> {
    args: &'a Args,
    kubeconfig: PathBuf,
    world: World,
    control_plane: ControlPlane,
    clients: Clients,
    /// Cost of the first opening.
    opening: Opening,
}

impl<'a> Run<'a> {
    /// Creates the objects, starts the control plane, and connects the clients.
    ///
    /// # Errors
    /// The API server refuses an object, or the control plane does not answer.
    pub(super) async fn start(
        args: &'a Args,
        plan: &Plan,
        api: Api,
        kubeconfig: &Path,
    ) -> anyhow::Result<(Self, Setup, Start)> {
        let began = Instant::now();
        let world = World::create(api, plan.clone()).await.context("create the objects")?;
        let created_in_seconds = began.elapsed().as_secs_f64();
        let mut clients = Clients::new(plan, world.services(), args)?;
        let [destination_streams, policy_streams] = clients.streams();
        let setup = Setup {
            objects: plan.size,
            created_in_seconds,
            clients: args.clients,
            clients_per_connection: args.clients_per_connection,
            targets: args.targets,
            destination_streams,
            policy_streams,
        };
        let (control_plane, ready_seconds) = ControlPlane::start(kubeconfig, &plan.control_namespace()).await?;
        let (first_answers, opening, load) = open(&control_plane, &mut clients).await?;
        let run =
            Self { args, kubeconfig: kubeconfig.to_owned(), world, control_plane, clients, opening: opening.clone() };
        Ok((run, setup, Start { ready_seconds, first_answers, opening, load }))
    }

    /// Removes and adds endpoints.
    ///
    /// # Errors
    /// The API server refuses every write, or the control plane ended.
    pub(super) async fn changes(&mut self) -> anyhow::Result<Changing> {
        self.clients.take_arrivals();
        let meter = Meter::start(&self.control_plane, &self.clients)?;
        let changes = self.churn(sleep(self.duration())).await?;
        self.changed(&changes, &meter).await
    }

    /// Restarts pods that are nobody's clients.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub(super) async fn rollout(&mut self) -> anyhow::Result<Changing> {
        self.clients.take_arrivals();
        let meter = Meter::start(&self.control_plane, &self.clients)?;
        let (pods, rate) = (self.args.rollout_pods, self.args.restarts_per_second());
        let restarts = (0..self.args.pods).rev().take(pods as usize).map(|pod| self.world.restart(pod));
        let patience = Duration::from_secs(u64::from(pods.div_ceil(rate).saturating_mul(ROLLOUT_PATIENCE)).max(60));
        let changes = paced(rate, restarts, sleep(patience)).await?;
        self.changed(&changes, &meter).await
    }

    /// Closes and opens every connection at once, while endpoints change.
    ///
    /// # Errors
    /// As [`Self::changes`], or some streams have no answer in time.
    pub(super) async fn reconnect(&mut self) -> anyhow::Result<Reconnect> {
        self.clients.take_arrivals();
        let meter = Meter::start(&self.control_plane, &self.clients)?;
        let (stop, stopped) = watch::channel(false);
        let until = async |mut stopped: watch::Receiver<bool>| {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let admins = self.control_plane.processes().map(|process| (process.name, process.admin));
        let services = self.clients.subscribed(self.world.services());
        let changing = churn(&self.world, &services, self.args.changes_per_second, until(stopped.clone()));
        let rest = self.duration().saturating_sub(AROUND_RECONNECT).max(AROUND_RECONNECT);
        let (clients, control_plane) = (&mut self.clients, &self.control_plane);
        let reconnecting = async {
            sleep(AROUND_RECONNECT).await;
            let began = Instant::now();
            let answers = tokio::select! {
                answers = clients.open(control_plane.addresses()) => answers,
                error = control_plane.ended() => Err(error),
            };
            let ended = Instant::now();
            if answers.is_ok() {
                sleep(rest).await;
            }
            stop.send_replace(true);
            answers.map(|answers| (answers, (began, ended)))
        };
        let (changes, live, answers) = tokio::join!(changing, probe(admins, stopped.clone()), reconnecting);
        let (changes, (answers, opening)) = (changes?, answers?);
        settle(&self.clients).await;
        let load = meter.read(&self.control_plane, &self.clients, Some(changes.seconds))?;
        let arrivals = self.clients.take_arrivals();
        let meanwhile = propagation(&changes.within(opening), &arrivals, None, |_| true);
        let around = propagation(&changes, &arrivals, None, |_| true);
        Ok(Reconnect { first_answers: answers.into(), meanwhile, around, live: live.into(), load })
    }

    /// Has one client in ten stop reading, while endpoints change. These clients stay that way until the next opening.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub(super) async fn stalled(&mut self) -> anyhow::Result<Stalled> {
        self.clients.stall();
        self.disturbed().await
    }

    /// Connects all clients again, of which one in ten then reads a trickle, while endpoints change.
    ///
    /// # Errors
    /// As [`Self::reconnect`].
    pub(super) async fn slow(&mut self) -> anyhow::Result<Stalled> {
        self.clients.open(self.control_plane.addresses()).await?;
        sleep(REST).await;
        self.clients.slow_down();
        self.disturbed().await
    }

    /// What changes do while some clients do not read as others do.
    async fn disturbed(&mut self) -> anyhow::Result<Stalled> {
        sleep(STALLS_WITHIN).await;
        self.clients.take_arrivals();
        let before = self.clients.counts();
        let meter = Meter::start(&self.control_plane, &self.clients)?;
        let changes = self.churn(sleep(self.duration())).await?;
        settle(&self.clients).await;
        let load = meter.read(&self.control_plane, &self.clients, Some(changes.seconds))?;
        let messages_to_them = self.clients.counts().since(&before).stalled_messages;
        let arrivals = self.clients.take_arrivals();
        let reads = |client| !is_stalling(client);
        let expected = changes.expected(&self.clients, reads);
        let others = propagation(&changes, &arrivals, Some(expected), reads);
        Ok(Stalled { clients: self.clients.stalling(), messages_to_them, others, load })
    }

    /// Doubles Servers and Services, and opens the same streams to a new control plane.
    ///
    /// # Errors
    /// The API server refuses an object, or the control plane does not answer.
    pub(super) async fn doubled(self) -> anyhow::Result<Doubled> {
        let Self { kubeconfig, world, control_plane, mut clients, opening: once, .. } = self;
        clients.close().await;
        control_plane.stop().await?;
        world.double().await.context("double Servers and Services")?;
        let (control_plane, ready_seconds) = ControlPlane::start(&kubeconfig, &world.plan.control_namespace()).await?;
        let (_, twice, load) = open(&control_plane, &mut clients).await?;
        clients.close().await;
        control_plane.stop().await?;
        Ok(Doubled { ready_seconds, once, twice, load })
    }

    /// Ends the control plane and the clients.
    ///
    /// # Errors
    /// A process cannot be killed.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.clients.close().await;
        self.control_plane.stop().await
    }

    async fn churn(&self, until: impl Future<Output = ()>) -> anyhow::Result<Changes> {
        let services = self.clients.subscribed(self.world.services());
        churn(&self.world, &services, self.args.changes_per_second, until).await
    }

    async fn changed(&self, changes: &Changes, meter: &Meter) -> anyhow::Result<Changing> {
        settle(&self.clients).await;
        let load = meter.read(&self.control_plane, &self.clients, Some(changes.seconds))?;
        let expected = changes.expected(&self.clients, |_| true);
        let propagation = propagation(changes, &self.clients.take_arrivals(), Some(expected), |_| true);
        Ok(Changing { propagation, load })
    }

    fn duration(&self) -> Duration {
        Duration::from_secs(self.args.seconds.into())
    }
}

/// Opens all streams at once, and measures what it costs.
async fn open(control_plane: &ControlPlane, clients: &mut Clients) -> anyhow::Result<(FirstAnswers, Opening, Load)> {
    let meter = Meter::start(control_plane, clients)?;
    let answers = tokio::select! {
        answers = clients.open(control_plane.addresses()) => answers?,
        error = control_plane.ended() => return Err(error),
    };
    let mut load = meter.read(control_plane, clients, None)?;
    for (load, process) in load.processes.iter_mut().zip(control_plane.processes()) {
        load.api_requests = process.requests();
    }
    sleep(REST).await;
    let rested = meter.read(control_plane, clients, None)?;
    let mut processes = Vec::new();
    for ((load, rested), streams) in load.processes.iter().zip(&rested.processes).zip(clients.streams()) {
        let each = |total: f64| total / streams.max(1) as f64;
        processes.push(ProcessOpening {
            process: load.process,
            streams,
            cpu_us_per_stream: each(load.cpu_seconds * 1e6),
            resident_bytes_per_stream: each(rested.growth_bytes()),
        });
    }
    Ok((answers.into(), Opening { processes }, load))
}

impl From<Answers> for FirstAnswers {
    fn from(answers: Answers) -> Self {
        let milliseconds = answers.milliseconds.into_iter().map(|(method, quantiles)| (method.label(), quantiles));
        Self { all_seconds: answers.seconds, milliseconds: milliseconds.collect(), retries: answers.retries }
    }
}
