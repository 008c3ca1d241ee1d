//! The process: bind, start every task, serve, drain.
//!
//! ```text
//! source --batches--> index task --> SharedIndex <--ask-- destination, policy services
//!                          |                  `--> StatusWriter, while its lease is held
//!                          `--> SliceWriter, while its lease is held
//! issuer files, tokens' reviewer ---------------> identity service
//! Helm values, namespaces ------------------------> injector
//! ```
//!
//! Addresses are bound first, so that a conflict is the first thing to be reported. Services that answer from
//! the index accept connections only once the source has sent everything: a proxy that asks too early must
//! wait, and must not be answered that nothing exists.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, anyhow};
use http::{Request, Response};
use kube::Client;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    time::Instant,
};
use tonic::{body::Body, service::Routes};
use tower::Service;
use weft_index::{EndpointsFrom, Event, Problem, SharedIndex};
use weft_k8s_api::labels;
use weft_proto::linkerd::identity::identity_server::IdentityServer;
use weft_runtime::{
    admin::Admin,
    drain, dumpable, files,
    metrics::Metrics,
    readiness::Readiness,
    server::{Limits, RequestBody, Server, bind},
    signal,
    tasks::Tasks,
    telemetry,
};
use weft_tls::{anchors::TrustAnchors, tokens::TokenVerifier};

use crate::{
    api::{self, events::Events},
    args::{
        AdminArgs, ClusterArgs, DestinationArgs, IdentityArgs, InjectorArgs, LogArgs, PolicyArgs, RunCommand, Source,
        SourceArgs, ValidatorArgs, WebhookArgs,
    },
    clusters::{self, ClusterStoreSize, Clusters, Following},
    destination::Destination,
    identity::{
        Certifier, MAX_MESSAGE_BYTES, Tokens,
        callers::{CallerMetrics, Callers},
        issuer::{self, Place},
        review::Reviewer,
    },
    lease::{self, LeaseConfig},
    metrics::{GrpcMetrics, IndexMetrics, IneffectivePolicies, IssuerTtl, RequestMetrics, WatchMetrics},
    policy::Policies,
    slices::SliceWriter,
    source::{
        file::FileSource,
        kube::{Interest, KubeSource},
    },
    status::{StatusMetrics, StatusWriter},
    stream::Answering,
    webhook::{self, Admission, Injector, Webhook},
};

/// Batches that may wait for the index; the source waits beyond.
const BATCHES: usize = 16;

/// Runs the process until a signal.
pub(crate) fn main(command: &RunCommand, log: &LogArgs) -> anyhow::Result<()> {
    let log = telemetry::init(&log.log_level, log.log_format).context("--log-level")?;
    if let Err(error) = files::raise_limit() {
        tracing::warn!(%error, "the limit on open files cannot be raised");
    }
    // Before a key is read.
    dumpable::forbid().context("keep other processes out of this one")?;
    weft_tls::install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        let app = App::start(command).await?;
        log.lines.register(&app.metrics);
        let Bound { destination, policy, identity, webhook, admin } = app.bound;
        tracing::info!(?destination, ?policy, ?identity, ?webhook, ?admin, "started");
        app.run_until(signal::shutdown()).await
    })
}

/// The running process.
pub(crate) struct App {
    tasks: Tasks,
    drain: drain::Drain,
    grace: Duration,
    /// The process's metrics.
    metrics: Metrics,
    /// Addresses that were bound.
    pub(crate) bound: Bound,
}

/// Bound addresses of the services that run; for port 0, the port that the system chose.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bound {
    pub(crate) destination: Option<SocketAddr>,
    pub(crate) policy: Option<SocketAddr>,
    pub(crate) identity: Option<SocketAddr>,
    pub(crate) webhook: Option<SocketAddr>,
    pub(crate) admin: Option<SocketAddr>,
}

/// What every service needs.
struct Parts {
    tasks: Tasks,
    watch: drain::Watch,
    readiness: Readiness,
    metrics: Metrics,
    grpc: GrpcMetrics,
    /// Counts requests to Kubernetes APIs.
    requests: RequestMetrics,
    bound: Bound,
    /// The client of the Kubernetes API, connected if some service needs it.
    api: Option<Client>,
}

impl App {
    /// Binds the addresses and starts the tasks of a command.
    ///
    /// # Errors
    /// When an address is taken or a file is missing or malformed; the message names the flag.
    pub(crate) async fn start(command: &RunCommand) -> anyhow::Result<Self> {
        let (drain, watch) = drain::Drain::new();
        let (readiness, metrics) = (Readiness::new(), Metrics::new());
        let (grpc, requests) = (metrics.register(GrpcMetrics::new), metrics.register(RequestMetrics::new));
        let (tasks, bound) = (Tasks::new(), Bound::default());
        let mut parts = Parts { tasks, watch, readiness, metrics, grpc, requests, bound, api: None };
        let admin = match command {
            RunCommand::All { cluster, source, destination, policy, identity, admin } => {
                let served = parts.index(cluster, source, Some(destination), Some(policy)).await?;
                parts.destination(cluster, destination, &served).await?;
                parts.policy(policy, &served).await?;
                parts.identity(cluster, identity).await?;
                admin
            }
            RunCommand::Destination { cluster, source, destination, admin } => {
                let served = parts.index(cluster, source, Some(destination), None).await?;
                parts.destination(cluster, destination, &served).await?;
                admin
            }
            RunCommand::Policy { cluster, source, policy, validator, admin } => {
                let served = parts.index(cluster, source, None, Some(policy)).await?;
                parts.policy(policy, &served).await?;
                parts.policy_validator(cluster, validator).await?;
                admin
            }
            RunCommand::Identity { cluster, identity, admin } => {
                parts.identity(cluster, identity).await?;
                admin
            }
            RunCommand::ProxyInjector { webhook, injector, admin } => {
                parts.proxy_injector(webhook, injector).await?;
                admin
            }
            RunCommand::SpValidator { webhook, admin } => {
                parts.webhook(&webhook::SP_VALIDATOR, webhook, Admission::Profiles).await?;
                admin
            }
        };
        parts.admin(admin).await?;
        let Parts { tasks, metrics, bound, .. } = parts;
        Ok(Self { tasks, drain, grace: admin.shutdown_grace_period, metrics, bound })
    }

    /// Runs until `shutdown`, then ends every stream and waits for calls in progress.
    ///
    /// # Errors
    /// When a task ended earlier.
    pub(crate) async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        self.tasks.run_until(shutdown).await?;
        if !self.drain.drain(self.grace).await {
            tracing::warn!("calls were still in progress at the end of the grace period");
        }
        Ok(())
    }
}

/// The index, and whether it is complete.
struct Served {
    index: SharedIndex,
    synced: watch::Receiver<bool>,
    /// The API that the index is read from.
    api: Option<Client>,
    /// Clusters whose Services have endpoints here.
    clusters: Clusters,
}

impl Parts {
    /// The client of the Kubernetes API, prepared at first use.
    async fn api(&mut self, cluster: &ClusterArgs) -> anyhow::Result<Client> {
        self.api_by(cluster.kubeconfig.as_deref()).await
    }

    async fn api_by(&mut self, kubeconfig: Option<&std::path::Path>) -> anyhow::Result<Client> {
        if let Some(client) = &self.api {
            return Ok(client.clone());
        }
        let client = api::connect(kubeconfig, self.requests.clone()).await?;
        self.api = Some(client.clone());
        Ok(client)
    }

    async fn index(
        &mut self,
        cluster: &ClusterArgs,
        source_args: &SourceArgs,
        destination: Option<&DestinationArgs>,
        policy: Option<&PolicyArgs>,
    ) -> anyhow::Result<Served> {
        destination.map_or(Ok(()), DestinationArgs::check)?;
        let index = SharedIndex::start(cluster.cluster(destination, policy)).context("start the index")?;
        if policy.is_some() {
            let ineffective = IneffectivePolicies(index.clone());
            self.metrics.register(|registry| registry.register_collector(Box::new(ineffective)));
        }
        let (batch_tx, batch_rx) = mpsc::channel(BATCHES);
        let (synced_tx, synced) = watch::channel(false);
        let mut api = None;
        let (gate, known, slices) = match source_args.source()? {
            Source::File(dir) => {
                self.tasks.spawn("source", FileSource::new(dir)?.run(batch_tx));
                (self.readiness.gate("manifests"), "manifests are known", None)
            }
            Source::Kube => {
                let client = self.api(cluster).await?;
                api = Some(client.clone());
                let gate = self.readiness.gate("caches");
                let interest = Interest::Parts {
                    discovery: destination.map(DestinationArgs::endpoints_from),
                    policy: policy.is_some(),
                    reference_grants: policy.is_some_and(|args| args.require_reference_grants),
                };
                // Both parts watch Servers; only one of them informs their owners.
                let owners = if policy.is_some() { Events::new(client.clone(), "policy") } else { Events::none() };
                let discovers = destination.is_some();
                let watches = self.metrics.register(|registry| WatchMetrics::new(registry, discovers));
                let source = KubeSource::new(client.clone(), interest, gate.clone(), owners, watches);
                self.tasks.spawn("source", source.run(batch_tx));
                if let Some(policy) = policy {
                    self.statuses(client.clone(), cluster, source_args, policy, &index)?;
                }
                // Endpoints of ExternalWorkloads are EndpointSlices; without these there is nothing to write.
                let writes = |args: &&DestinationArgs| args.endpoints_from() == EndpointsFrom::Slices;
                let writer = destination.filter(writes).map(|_| self.slices(client, cluster, source_args));
                let slices = writer.transpose()?;
                (gate, "caches synced", slices)
            }
        };
        let links = destination.is_some_and(|destination| destination.enable_remote_discovery) && api.is_some();
        let clusters = if links { Clusters::new() } else { Clusters::none() };
        let linked = clusters.clone();
        let linked = Arc::new(move || linked.indexes());
        let metrics = self.metrics.register(|registry| IndexMetrics::new(registry, &index, linked));
        self.tasks.spawn("index metrics", metrics.clone().run(index.clone()));
        let applied = index.clone();
        self.tasks.spawn("index", async move {
            apply(applied, &metrics, slices, batch_rx, |changes| {
                tracing::info!(changes, "{known}");
                gate.open();
                synced_tx.send_replace(true);
            })
            .await;
            Err(anyhow!("the source or the index ended"))
        });
        Ok(Served { index, synced, api, clusters })
    }

    /// Takes part in the election of the writer of EndpointSlices, and writes while it holds the lease.
    fn slices(&mut self, client: Client, cluster: &ClusterArgs, args: &SourceArgs) -> anyhow::Result<SliceWriter> {
        let config = lease_config(cluster, args, labels::ENDPOINT_WRITE_LEASE, None)?;
        let held = self.hold("lease", client.clone(), config);
        // Until the lease is held, another replica writes.
        let writer = SliceWriter::waiting();
        self.metrics.register(|registry| writer.register(registry));
        self.tasks.spawn("slices", writer.clone().run(client, held));
        Ok(writer)
    }

    /// Takes part in the election of the writer of statuses, and writes while it holds the lease.
    fn statuses(
        &mut self,
        client: Client,
        cluster: &ClusterArgs,
        args: &SourceArgs,
        policy: &PolicyArgs,
        index: &SharedIndex,
    ) -> anyhow::Result<()> {
        let config = lease_config(cluster, args, labels::STATUS_WRITE_LEASE, Some(labels::DESTINATION_DEPLOYMENT))?;
        let held = self.hold("status lease", client.clone(), config);
        let statuses = index.statuses();
        let metrics = self.metrics.register(|registry| StatusMetrics::new(registry, statuses.clone()));
        let timeout = Duration::from_millis(policy.patch_timeout_ms);
        self.tasks.spawn("statuses", StatusWriter::new(client, statuses, timeout, metrics).run(held));
        Ok(())
    }

    /// Takes part in an election; the result says whether this replica holds the lease.
    fn hold(&mut self, task: &'static str, client: Client, config: LeaseConfig) -> watch::Receiver<bool> {
        let (held_tx, held_rx) = watch::channel(false);
        let holding = lease::hold(client, config, held_tx, self.watch.clone());
        self.tasks.spawn(task, self.watch.track(holding));
        held_rx
    }

    /// Follows linked clusters, if there is a Kubernetes API to read Secrets from.
    fn clusters(&mut self, cluster: &ClusterArgs, args: &DestinationArgs, served: &Served) {
        let size = ClusterStoreSize(served.clusters.clone());
        self.metrics.register(|registry| registry.register_collector(Box::new(size)));
        let Some(client) = served.api.clone().filter(|_| args.enable_remote_discovery) else { return };
        let following = Following {
            events: Events::new(client.clone(), "destination"),
            client,
            namespace: cluster.controller_namespace.clone(),
            cluster: cluster.cluster(Some(args), None),
            endpoints_from: args.endpoints_from(),
            clusters: served.clusters.clone(),
            requests: self.requests.clone(),
        };
        self.tasks.spawn("clusters", clusters::follow(following));
    }

    async fn destination(
        &mut self,
        cluster: &ClusterArgs,
        args: &DestinationArgs,
        served: &Served,
    ) -> anyhow::Result<()> {
        for (flag, reason) in args.without_effect.given() {
            tracing::warn!(flag, reason, "a flag of Linkerd's that has no effect here");
        }
        let listener = bind(args.destination_addr, "--destination-addr")?;
        self.bound.destination = Some(listener.local_addr()?);
        self.clusters(cluster, args, served);
        let service = Destination {
            answering: self.answering(served),
            clusters: served.clusters.clone(),
            settings: args.endpoint_settings(),
        };
        let service = move |request| service.clone().call(request);
        self.serve("destination", listener, service, Some(served.synced.clone()));
        Ok(())
    }

    async fn policy(&mut self, args: &PolicyArgs, served: &Served) -> anyhow::Result<()> {
        let listener = bind(args.policy_addr, "--policy-addr")?;
        self.bound.policy = Some(listener.local_addr()?);
        let service =
            Policies { answering: self.answering(served), allow_l5d_request_headers: args.allow_l5d_request_headers };
        let service = move |request| service.clone().call(request);
        self.serve("policy", listener, service, Some(served.synced.clone()));
        Ok(())
    }

    fn answering(&self, served: &Served) -> Answering {
        Answering { index: served.index.clone(), drain: self.watch.clone(), metrics: self.grpc.clone() }
    }

    async fn identity(&mut self, cluster: &ClusterArgs, args: &IdentityArgs) -> anyhow::Result<()> {
        let listener = bind(args.identity_addr, "--identity-addr")?;
        self.bound.identity = Some(listener.local_addr()?);
        let (tokens, place, events) = match &args.token_key {
            Some(path) => {
                let key = read("--token-key", path)?;
                let verifier =
                    TokenVerifier::from_pem(&key).with_context(|| format!("--token-key {}", path.display()))?;
                let place = Place::Files(args.identity_trust_anchors.clone());
                (Tokens::LocalKey(verifier), place, Events::none())
            }
            None => {
                let client = self.api(cluster).await?;
                let events = Events::new(client.clone(), "identity");
                let place = Place::cluster(&client, &cluster.controller_namespace, args.identity_scheme).await;
                let reviewer = Reviewer::new(client, args.identity_accept_any_audience).await?;
                (Tokens::Review(Box::new(reviewer)), place, events)
            }
        };
        let files = issuer::Files {
            issuer: args.identity_issuer_dir.clone(),
            scheme: args.identity_scheme,
            anchors: args.identity_trust_anchors.clone(),
        };
        let issuer = issuer::start(files, &place, &events).await?;
        self.metrics.register(|registry| registry.register_collector(Box::new(IssuerTtl(issuer.current.expiry()))));
        let current = issuer.current.clone();
        self.tasks.spawn("issuer", issuer.reload(place.clone(), events.clone()));

        let service = Certifier {
            issuer: current,
            tokens,
            callers: Callers::new(self.metrics.register(CallerMetrics::new)),
            control_namespace: cluster.controller_namespace.clone(),
            trust_domain: cluster.trust_domain.clone(),
            lifetime: args.identity_issuance_lifetime,
            clock_skew: args.identity_clock_skew_allowance,
            metrics: self.grpc.clone(),
            place,
            events,
        };
        let routes = Routes::new(IdentityServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES));
        let service = move |request| {
            let answered = routes.clone().call(request);
            async move { answered.await.unwrap_or_else(|never| match never {}) }
        };
        self.serve("identity", listener, service, None);
        Ok(())
    }

    async fn proxy_injector(&mut self, args: &WebhookArgs, injector: &InjectorArgs) -> anyhow::Result<()> {
        let client = self.api_by(args.kubeconfig.as_deref()).await?;
        let sources = webhook::Sources {
            namespace: args.controller_namespace.clone(),
            values: injector.values.clone(),
            anchors: injector.identity_trust_anchors.clone(),
        };
        let injector = Injector::start(client, sources, &mut self.tasks, &self.readiness, &self.metrics);
        self.webhook(&webhook::PROXY_INJECTOR, args, Admission::Injector(injector)).await
    }

    async fn policy_validator(&mut self, cluster: &ClusterArgs, args: &ValidatorArgs) -> anyhow::Result<()> {
        let Some(addr) = args.webhook_addr else { return Ok(()) };
        let args = WebhookArgs {
            controller_namespace: cluster.controller_namespace.clone(),
            kubeconfig: cluster.kubeconfig.clone(),
            webhook_addr: addr,
            certificate: args.certificate.clone(),
        };
        self.webhook(&webhook::POLICY_VALIDATOR, &args, Admission::Policies).await
    }

    async fn webhook(
        &mut self,
        webhook: &'static Webhook,
        args: &WebhookArgs,
        admission: Admission,
    ) -> anyhow::Result<()> {
        let client = self.api_by(args.kubeconfig.as_deref()).await?;
        let listener = bind(args.webhook_addr, "--webhook-addr")?;
        self.bound.webhook = Some(listener.local_addr()?);
        let clients = match &args.certificate.webhook_client_ca {
            Some(path) => Some(
                TrustAnchors::from_pem(&read("--webhook-client-ca", path)?)
                    .with_context(|| format!("--webhook-client-ca {}", path.display()))?,
            ),
            None => None,
        };
        let parts = webhook::Parts {
            tasks: &mut self.tasks,
            watch: &self.watch,
            readiness: &self.readiness,
            metrics: &self.metrics,
            client,
            namespace: args.controller_namespace.clone(),
            lifetime: args.certificate.webhook_certificate_lifetime,
            clients,
        };
        webhook::start(webhook, listener, admission, parts);
        Ok(())
    }

    async fn admin(&mut self, args: &AdminArgs) -> anyhow::Result<()> {
        let listener = bind(args.admin_addr, "--admin-addr")?;
        self.bound.admin = Some(listener.local_addr()?);
        let admin = Admin::new(self.metrics.clone(), self.readiness.clone());
        self.tasks.spawn("admin", async move {
            // Probes and scrapes are answered until the process exits.
            admin.serve(listener, std::future::pending()).await;
            Ok(())
        });
        Ok(())
    }

    /// Serves once the index is complete, until the drain.
    fn serve<S, F>(
        &mut self,
        name: &'static str,
        listener: TcpListener,
        service: S,
        synced: Option<watch::Receiver<bool>>,
    ) where
        S: Fn(Request<RequestBody>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
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
            Server::new(name, Limits::GRPC, watch).serve(listener, move |request, _| service(request)).await;
            Ok(())
        };
        self.tasks.spawn(name, self.watch.track(serving));
    }
}

/// Applies batches; `synced` receives the number of changes that the initial state consisted of.
async fn apply(
    index: SharedIndex,
    metrics: &IndexMetrics,
    slices: Option<SliceWriter>,
    mut batches: mpsc::Receiver<Vec<Event>>,
    synced: impl Fn(usize),
) {
    let mut changes = 0;
    while let Some(batch) = batches.recv().await {
        changes += batch.len();
        if let Some(slices) = &slices {
            slices.observe(&batch);
        }
        tracing::trace!(changes = batch.len(), "objects changed");
        let since = Instant::now();
        let Ok(applied) = index.apply(batch).await else { return };
        metrics.applied(since);
        for Problem { object, problem } in applied.problems {
            tracing::error!(object, problem, "object cannot be used as it is");
        }
        if applied.synced {
            synced(changes);
        }
    }
}

/// A lease that this replica wants.
fn lease_config(
    cluster: &ClusterArgs,
    args: &SourceArgs,
    name: &str,
    owner: Option<&'static str>,
) -> anyhow::Result<LeaseConfig> {
    let (namespace, name) = (cluster.controller_namespace.clone(), name.to_owned());
    Ok(LeaseConfig { namespace, name, identity: args.lease_identity()?, owner })
}

fn read(flag: &str, path: &std::path::Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{flag} {}: cannot be read", path.display()))
}

#[cfg(test)]
mod tests;
