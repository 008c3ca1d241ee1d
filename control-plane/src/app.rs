//! The process: bind, start every task, serve, drain.
//!
//! ```text
//! source --batches--> index task --> SharedIndex --> destination, policy services
//! issuer files ---------------------------------> identity service
//! ```
//!
//! Addresses are bound before anything else, so that a conflict is the first thing to be reported. Services that answer from
//! the index accept connections only once the source has sent everything: a proxy that asks too early must wait, not hear
//! that nothing exists.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, anyhow};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tonic::transport::server::{Router, Server, TcpIncoming};
use weft_proto::linkerd::{
    destination::destination_server::DestinationServer, identity::identity_server::IdentityServer,
    inbound::inbound_server_policies_server::InboundServerPoliciesServer,
    outbound::outbound_policies_server::OutboundPoliciesServer,
};
use weft_runtime::{admin::Admin, drain, metrics::Metrics, readiness::Readiness, signal, tasks::Tasks, telemetry};
use weft_tls::{anchors::TrustAnchors, tokens::TokenVerifier};

use crate::{
    args::{
        AdminArgs, ClusterArgs, DestinationArgs, IdentityArgs, LogArgs, PolicyArgs, RunCommand, SourceArgs, SourceKind,
    },
    destination::Destination,
    identity::{
        Certifier, Tokens,
        issuer::{self, CurrentIssuer},
    },
    index::SharedIndex,
    metrics::{GrpcMetrics, IssuerTtl},
    policy::{InboundPolicies, OutboundPolicies},
    source::{Event, file::FileSource},
};

/// Batches that may wait for the index; the source waits beyond.
const BATCHES: usize = 16;

/// Runs the process until a signal.
pub(crate) fn main(command: &RunCommand, log: &LogArgs) -> anyhow::Result<()> {
    telemetry::init(&log.log_level, log.log_format).context("--log-level")?;
    weft_tls::install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        let app = App::start(command).await?;
        let Bound { destination, policy, identity, admin } = app.bound;
        tracing::info!(?destination, ?policy, ?identity, ?admin, "started");
        app.run_until(signal::shutdown()).await
    })
}

/// The running process.
pub(crate) struct App {
    tasks: Tasks,
    drain: drain::Drain,
    grace: Duration,
    /// Addresses that were bound.
    pub(crate) bound: Bound,
}

/// Addresses of the services that run, with the ports that the system chose where 0 was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bound {
    pub(crate) destination: Option<SocketAddr>,
    pub(crate) policy: Option<SocketAddr>,
    pub(crate) identity: Option<SocketAddr>,
    pub(crate) admin: Option<SocketAddr>,
}

/// What every service gets.
struct Parts {
    tasks: Tasks,
    watch: drain::Watch,
    readiness: Readiness,
    metrics: Metrics,
    grpc: GrpcMetrics,
    bound: Bound,
}

impl App {
    /// Binds and starts what the command asks for.
    ///
    /// # Errors
    /// When an address is taken or a file is missing or malformed; the message names the flag.
    pub(crate) async fn start(command: &RunCommand) -> anyhow::Result<Self> {
        let (drain, watch) = drain::Drain::new();
        let (readiness, metrics) = (Readiness::new(), Metrics::new());
        let grpc = metrics.register(GrpcMetrics::new);
        let mut parts = Parts { tasks: Tasks::new(), watch, readiness, metrics, grpc, bound: Bound::default() };
        let admin = match command {
            RunCommand::All { cluster, source, destination, policy, identity, admin } => {
                let served = parts.index(cluster, source, Some(destination), Some(policy))?;
                parts.destination(destination, &served).await?;
                parts.policy(policy, &served).await?;
                parts.identity(cluster, identity).await?;
                admin
            }
            RunCommand::Destination { cluster, source, destination, admin } => {
                let served = parts.index(cluster, source, Some(destination), None)?;
                parts.destination(destination, &served).await?;
                admin
            }
            RunCommand::Policy { cluster, source, policy, admin } => {
                let served = parts.index(cluster, source, None, Some(policy))?;
                parts.policy(policy, &served).await?;
                admin
            }
            RunCommand::Identity { cluster, identity, admin } => {
                parts.identity(cluster, identity).await?;
                admin
            }
        };
        parts.admin(admin).await?;
        Ok(Self { tasks: parts.tasks, drain, grace: admin.shutdown_grace_period, bound: parts.bound })
    }

    /// Runs until `shutdown`, then ends every stream and waits for calls in progress.
    ///
    /// # Errors
    /// When a task ended before.
    pub(crate) async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        self.tasks.run_until(shutdown).await?;
        if !self.drain.drain(self.grace).await {
            tracing::warn!("calls were still in progress at the end of the grace period");
        }
        Ok(())
    }
}

/// The index, and whether it knows everything.
struct Served {
    index: SharedIndex,
    synced: watch::Receiver<bool>,
}

impl Parts {
    fn index(
        &mut self,
        cluster: &ClusterArgs,
        source: &SourceArgs,
        destination: Option<&DestinationArgs>,
        policy: Option<&PolicyArgs>,
    ) -> anyhow::Result<Served> {
        let index = SharedIndex::new(cluster.cluster(destination, policy));
        let (batch_tx, batch_rx) = mpsc::channel(BATCHES);
        let (synced_tx, synced) = watch::channel(false);
        match source.source {
            SourceKind::File => self.tasks.spawn("source", FileSource::new(source.dir.clone())?.run(batch_tx)),
        }
        let gate = self.readiness.gate("manifests");
        let applied = index.clone();
        self.tasks.spawn("index", async move {
            apply(applied, batch_rx, || {
                gate.open();
                synced_tx.send_replace(true);
            })
            .await;
            Err(anyhow!("the source ended"))
        });
        Ok(Served { index, synced })
    }

    async fn destination(&mut self, args: &DestinationArgs, served: &Served) -> anyhow::Result<()> {
        let listener = bind(args.destination_addr, "--destination-addr").await?;
        self.bound.destination = Some(listener.local_addr()?);
        let service =
            Destination { index: served.index.clone(), drain: self.watch.clone(), metrics: self.grpc.clone() };
        let router = Server::builder().add_service(DestinationServer::new(service));
        self.serve("destination", listener, router, Some(served.synced.clone()));
        Ok(())
    }

    async fn policy(&mut self, args: &PolicyArgs, served: &Served) -> anyhow::Result<()> {
        let listener = bind(args.policy_addr, "--policy-addr").await?;
        self.bound.policy = Some(listener.local_addr()?);
        let (index, drain, metrics) = (&served.index, &self.watch, &self.grpc);
        let inbound = InboundPolicies { index: index.clone(), drain: drain.clone(), metrics: metrics.clone() };
        let outbound = OutboundPolicies { index: index.clone(), drain: drain.clone(), metrics: metrics.clone() };
        let router = Server::builder()
            .add_service(InboundServerPoliciesServer::new(inbound))
            .add_service(OutboundPoliciesServer::new(outbound));
        self.serve("policy", listener, router, Some(served.synced.clone()));
        Ok(())
    }

    async fn identity(&mut self, cluster: &ClusterArgs, args: &IdentityArgs) -> anyhow::Result<()> {
        let read = |flag: &str, path: &std::path::Path| {
            std::fs::read_to_string(path).with_context(|| format!("{flag} {}: cannot be read", path.display()))
        };
        let anchors = TrustAnchors::from_pem(&read("--identity-trust-anchors", &args.identity_trust_anchors)?)
            .with_context(|| format!("--identity-trust-anchors {}", args.identity_trust_anchors.display()))?;
        let tokens = TokenVerifier::from_pem(&read("--token-key", &args.token_key)?)
            .with_context(|| format!("--token-key {}", args.token_key.display()))?;
        let dir = &args.identity_issuer_dir;
        let issuer = CurrentIssuer::new(issuer::load(dir, &anchors).context("--identity-issuer-dir")?);
        self.metrics.register(|registry| registry.register_collector(Box::new(IssuerTtl(issuer.expiry()))));
        self.tasks.spawn("issuer", issuer::reload(dir.clone(), anchors, issuer.clone()));

        let listener = bind(args.identity_addr, "--identity-addr").await?;
        self.bound.identity = Some(listener.local_addr()?);
        let service = Certifier {
            issuer,
            tokens: Tokens::LocalKey(tokens),
            control_namespace: cluster.controller_namespace.clone(),
            trust_domain: cluster.trust_domain.clone(),
            lifetime: args.identity_issuance_lifetime,
            clock_skew: args.identity_clock_skew_allowance,
            metrics: self.grpc.clone(),
        };
        self.serve("identity", listener, Server::builder().add_service(IdentityServer::new(service)), None);
        Ok(())
    }

    async fn admin(&mut self, args: &AdminArgs) -> anyhow::Result<()> {
        let listener = bind(args.admin_addr, "--admin-addr").await?;
        self.bound.admin = Some(listener.local_addr()?);
        let admin = Admin::new(self.metrics.clone(), self.readiness.clone());
        self.tasks.spawn("admin", async move {
            // Probes and scrapes are answered to the very end.
            admin.serve(listener, std::future::pending()).await;
            Ok(())
        });
        Ok(())
    }

    /// Serves once the index knows everything, until the drain.
    fn serve(
        &mut self,
        name: &'static str,
        listener: TcpListener,
        router: Router,
        synced: Option<watch::Receiver<bool>>,
    ) {
        let watch = self.watch.clone();
        let serving = async move {
            if let Some(mut synced) = synced {
                tokio::select! {
                    known = synced.wait_for(|synced| *synced) => { known.context("the index ended")?; }
                    () = watch.signaled() => return Ok(()),
                }
            }
            let addr = listener.local_addr()?;
            tracing::info!(service = name, %addr, "serving");
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            router.serve_with_incoming_shutdown(incoming, async move { watch.signaled().await }).await?;
            Ok(())
        };
        self.tasks.spawn(name, self.watch.track(serving));
    }
}

async fn apply(index: SharedIndex, mut batches: mpsc::Receiver<Vec<Event>>, synced: impl Fn()) {
    while let Some(batch) = batches.recv().await {
        let changes = batch.len();
        if index.apply(batch) {
            tracing::info!(changes, "manifests are known");
            synced();
        } else {
            tracing::debug!(changes, "manifests changed");
        }
    }
}

async fn bind(addr: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(addr)
        .await
        .with_context(|| format!("{flag} {addr}: cannot be bound, stop whoever has it or choose another"))
}

#[cfg(test)]
mod tests;
