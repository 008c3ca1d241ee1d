//! Starts the proxy's parts in order, keeps them running, and drains them.
//!
//! ```text
//! main thread ("control"): admin, tap, identity, control-plane streams, attestation, signals
//! worker threads:          outbound and inbound accept loops and all connections, one current-thread runtime each
//! ```
//!
//! Workers accept once there are credentials. They share the content of [`Shared`] and nothing else. Only this file
//! starts long-lived tasks.

use std::{net::TcpListener as StdListener, sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{
    runtime::{Builder, Handle},
    sync::{oneshot, watch},
};
use weft_runtime::{
    drain::Drain,
    error::chain,
    files,
    metrics::Metrics,
    readiness::{Gate, Readiness},
    tasks::Tasks,
    telemetry::{self, Lines, Log, LogFormat},
};
use weft_tls::credentials::Credentials;

use crate::{
    access_log::AccessLog,
    admin, attest, build_info,
    config::{Config, ControlAddr, UnusableSetting},
    control::{
        ControlClient, Trust,
        metrics::{ControlMetrics, Service},
    },
    discover::Discover,
    dns::Dns,
    identity::{self, Publisher},
    inbound,
    inbound::admin::AdminPort,
    listen::{self, Listener},
    metrics::ProxyMetrics,
    outbound::Outbound,
    policy::Policies,
    shared::Shared,
    tap_server,
    trace::{self, TraceMetrics},
};

/// Interval of the warning that there is no certificate yet.
const IDENTITY_WARNING: Duration = Duration::from_secs(15);

/// How long the last spans may take after the drain.
const FLUSH: Duration = Duration::from_secs(1);

/// Interval of looking for unused series.
const EVICTION: Duration = Duration::from_secs(60);

struct Sockets {
    /// The outbound listeners of each worker.
    outbound: Vec<Vec<StdListener>>,
    /// The inbound listener of each worker.
    inbound: Vec<StdListener>,
    /// The most connections of each of these listeners. Those of admin and tap have limits of their own, so that probes
    /// are answered however many connections clients hold on the inbound side.
    limit: usize,
    admin: StdListener,
    tap: Option<StdListener>,
}

/// Clients of the control plane and of the collector of spans, which connect at their first request.
struct Clients {
    /// `None` if certificates do not come from a controller.
    identity: Option<ControlClient>,
    policy: ControlClient,
    destination: ControlClient,
    /// `None` if spans are not exported.
    collector: Option<ControlClient>,
}

/// What the process writes; kept until it ends.
struct Logs {
    log: Log,
    access_log: Option<AccessLog>,
    access_lines: Option<Lines>,
}

/// Runs until a signal, `POST /shutdown`, or the unexpected end of a part. `unknown` are misspelt variables: they have
/// the prefix of settings, but no setting has their name.
///
/// # Errors
/// The failure at the start, or the part that ended.
pub(crate) fn run(config: Config, unknown: &[String]) -> anyhow::Result<()> {
    weft_tls::install_crypto_provider();
    let format = if config.log_json { LogFormat::Json } else { LogFormat::Plain };
    let log = telemetry::init_proxy(&config.log, format)
        .map_err(|error| UnusableSetting { variable: "LINKERD2_PROXY_LOG", reason: chain(&error) })?;
    if !unknown.is_empty() {
        let variables = unknown.join(", ");
        tracing::warn!(variables, "neither this proxy nor linkerd2-proxy has these settings: are they misspelt?");
    }
    let open_files = files::raise_limit().unwrap_or_else(|error| {
        tracing::warn!(%error, "the limit on open files cannot be raised");
        files::limit()
    });
    let bootstrap = identity::Bootstrap::read(&config.identity)?;
    let sockets = bind(&config, open_files)?;
    let access_log = config.access_log.map(|format| AccessLog::to(format, std::io::stderr()));
    let (access_log, access_lines) = access_log.unzip();
    let logs = Logs { log, access_log, access_lines };
    let runtime = Builder::new_current_thread().enable_all().build().context("build the control runtime")?;
    runtime.block_on(supervise(config, &logs, sockets, bootstrap))
}

/// Binds everything before anything runs, so that a port in use ends the process at once. The process may open
/// `open_files`, or any number of them.
fn bind(config: &Config, open_files: Option<u64>) -> anyhow::Result<Sockets> {
    let workers = config.cores.get();
    let mut outbound: Vec<Vec<StdListener>> = (0..workers).map(|_| Vec::new()).collect();
    for addr in &config.outbound.listen {
        let bound = listen::bind_with(*addr, workers, config.outbound.backlog)
            .with_context(|| format!("listen for outbound on {addr}"))?;
        for (worker, listener) in outbound.iter_mut().zip(bound) {
            worker.push(listener);
        }
    }
    let addr = config.inbound.listen;
    let inbound = listen::bind_with(addr, workers, config.inbound.backlog)
        .with_context(|| format!("listen for inbound on {addr}"))?;
    let addr = config.admin.listen;
    let admin = listen::bind(addr, 1).with_context(|| format!("listen for admin on {addr}"))?.remove(0);
    let tap = match &config.tap {
        None => None,
        Some(tap) => {
            let addr = tap.listen;
            Some(listen::bind(addr, 1).with_context(|| format!("listen for tap on {addr}"))?.remove(0))
        }
    };
    let limit = listen::connection_limit(open_files, config.cores);
    Ok(Sockets { outbound, inbound, limit, admin, tap })
}

/// Starts all tasks, and drains connections when the process is to end.
async fn supervise(
    config: Config,
    logs: &Logs,
    sockets: Sockets,
    bootstrap: identity::Bootstrap,
) -> anyhow::Result<()> {
    let registry = Metrics::new();
    let (metrics, control_metrics, trace_metrics) = register_metrics(&registry, logs);
    let readiness = Readiness::new();
    let identity_gate = readiness.gate("identity");
    let (credentials_tx, credentials) = watch::channel(None);
    let (drain, watch) = Drain::new();
    let (tracing, spans) = config.trace.as_ref().map(|_| trace::channel(&trace_metrics)).unzip();
    let shared = Arc::new(Shared {
        config,
        metrics,
        credentials,
        drain: watch,
        taps: Arc::default(),
        tracing: tracing.unwrap_or_default(),
        windows: Arc::default(),
        access_log: logs.access_log.clone(),
        control: Handle::current(),
    });
    let config = &shared.config;
    let clients = Clients::new(&shared, &bootstrap, &control_metrics)?;

    let mut tasks = Tasks::new();
    let (shutdown_tx, shutdown_rx) = watch::channel(false);
    let admin_listener = tokio::net::TcpListener::from_std(sockets.admin).context("register the admin listener")?;
    let discover = Discover::new(&shared, clients.destination, clients.policy.clone());
    let policies = Policies::new(&shared, clients.policy);
    let port = AdminPort::new(Arc::clone(&shared), &policies);
    let admin = admin::Admin {
        registry: registry.clone(),
        readiness: readiness.clone(),
        log: logs.log.level.clone(),
        shutdown: shutdown_tx,
        port,
    };
    tasks.spawn("admin", admin::run(Arc::clone(&shared), admin, admin_listener));
    if let (Some(tap), Some(listener)) = (&config.tap, sockets.tap) {
        let listener = tokio::net::TcpListener::from_std(listener).context("register the tap listener")?;
        tasks.spawn("tap", tap_server::run(Arc::clone(&shared), tap.client.clone(), listener));
    }
    if let (Some(trace), Some(collector), Some(spans)) = (&config.trace, clients.collector, spans) {
        let exporter = trace::Exporter::new(collector, trace::resource(trace), spans);
        tasks.spawn("traces", exporter.run(shared.drain.clone()));
    }
    if config.require_redirect {
        tasks.spawn("attest", attest::run(readiness.gate("redirect"), registry.clone(), shared.drain.clone()));
    }
    let anchors = bootstrap.anchors.clone();
    let publisher = Publisher::new(&config.identity, anchors, credentials_tx, identity_gate, &registry);
    tasks.spawn("identity", identity::run(bootstrap, clients.identity, publisher));
    tasks.spawn("metrics-eviction", evict_metrics(Arc::clone(&shared)));
    tasks.spawn("identity-warning", warn_without_identity(shared.credentials.clone()));

    // A controller in this very pod may start only after the proxy is ready.
    if !config.policy.control.is_loopback() {
        tasks.spawn("policy", wait_for_policy(policies.clone(), readiness.gate("policy")));
    }
    for (index, (outbound, inbound)) in sockets.outbound.into_iter().zip(sockets.inbound).enumerate() {
        let worker = WorkerThread {
            shared: Arc::clone(&shared),
            discover: discover.clone(),
            policies: policies.clone(),
            limit: sockets.limit,
        };
        tasks.spawn("worker", worker.start(index, outbound, inbound));
    }

    let ended = tasks.run_until(stop(shutdown_rx)).await;
    if ended.is_ok() {
        finish(drain, &shared).await;
    }
    ended
}

/// Registers all families of the process. Returns those that its parts update.
fn register_metrics(registry: &Metrics, logs: &Logs) -> (ProxyMetrics, ControlMetrics, TraceMetrics) {
    let metrics = registry.register(ProxyMetrics::register);
    let control_metrics = registry.register(ControlMetrics::register);
    let trace_metrics = registry.register(TraceMetrics::register);
    registry.register(build_info::register);
    logs.log.lines.register(registry);
    if let Some(lines) = &logs.access_lines {
        let help = "Lines of the access log that were dropped because standard error was not read fast enough";
        lines.register_as(registry, "weft_access_log_lines_dropped", help);
    }
    (metrics, control_metrics, trace_metrics)
}

impl Clients {
    /// Creates the clients that the settings ask for.
    ///
    /// # Errors
    /// When the system's DNS configuration cannot be read.
    fn new(shared: &Shared, bootstrap: &identity::Bootstrap, metrics: &ControlMetrics) -> anyhow::Result<Self> {
        let config = &shared.config;
        let dns = Dns::with_ttl(shared.metrics.dns_resolutions.clone(), config.dns)
            .context("read the system's DNS configuration")?;
        let client = |service: Service, addr: &ControlAddr, trust| {
            let limits = config.stream_limits(addr);
            let metrics = metrics.service(service, addr);
            ControlClient::measured(addr.clone(), trust, dns.client(service.label()), limits, metrics)
        };
        let trusted = Trust::Credentials(shared.credentials.clone());
        let certifier = Trust::Bootstrap(bootstrap.anchors.clone(), shared.credentials.clone());
        Ok(Self {
            identity: bootstrap.controller().map(|addr| client(Service::Identity, addr, certifier)),
            policy: client(Service::Policy, &config.policy.control, trusted.clone()),
            destination: client(Service::Destination, &config.destination.control, trusted.clone()),
            collector: config.trace.as_ref().map(|trace| client(Service::Collector, &trace.collector, trusted)),
        })
    }
}

/// Lets connections end, and exports the last spans.
async fn finish(drain: Drain, shared: &Shared) {
    tracing::info!("draining");
    if !drain.drain(shared.config.shutdown_grace_period).await {
        tracing::warn!("connections were still open when the grace period was over");
    }
    if tokio::time::timeout(FLUSH, shared.tracing.flush()).await.is_err() {
        tracing::debug!("spans were left behind");
    }
}

async fn stop(mut shutdown: watch::Receiver<bool>) {
    tokio::select! {
        () = weft_runtime::signal::shutdown() => {}
        Ok(_) = shutdown.wait_for(|stop| *stop) => {}
    }
}

async fn warn_without_identity(mut credentials: watch::Receiver<Option<Arc<Credentials>>>) -> anyhow::Result<()> {
    loop {
        let issued = async { credentials.wait_for(Option::is_some).await.is_ok() };
        if tokio::time::timeout(IDENTITY_WARNING, issued).await.is_ok() {
            return std::future::pending().await;
        }
        tracing::warn!("waiting for identity to be initialized: is the identity controller reachable?");
    }
}

/// Removes series that are no longer used.
async fn evict_metrics(shared: Arc<Shared>) -> anyhow::Result<()> {
    let mut every = tokio::time::interval(EVICTION);
    loop {
        every.tick().await;
        shared.metrics.evict(shared.config.metrics_retain_idle);
    }
}

/// Opens the gate when the configured ports have their first answers, or when the controller took too long.
async fn wait_for_policy(policies: Policies, gate: Gate) -> anyhow::Result<()> {
    policies.settled().await;
    gate.open();
    std::future::pending().await
}

/// One data-plane thread.
struct WorkerThread {
    shared: Arc<Shared>,
    discover: Discover,
    policies: Policies,
    /// The most connections of each listener.
    limit: usize,
}

impl WorkerThread {
    /// Runs the worker on its own thread until that ends.
    async fn start(self, index: usize, outbound: Vec<StdListener>, inbound: StdListener) -> anyhow::Result<()> {
        let (ended_tx, ended_rx) = oneshot::channel();
        std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || {
                let runtime = Builder::new_current_thread().enable_all().build().context("build a worker's runtime");
                let ended = runtime.and_then(|runtime| runtime.block_on(self.serve(outbound, inbound)));
                // The receiver is gone only when the process ends.
                let _ = ended_tx.send(ended);
            })
            .context("start a worker thread")?;
        ended_rx.await.context("a worker thread panicked")?
    }

    async fn serve(self, outbound: Vec<StdListener>, inbound: StdListener) -> anyhow::Result<()> {
        let mut credentials = self.shared.credentials.clone();
        let config = &self.shared.config;
        let inbound = Listener::new(inbound, config.inbound.accept).context("register the inbound listener")?;
        let inbound = inbound.limited(self.limit);
        let mut listeners = Vec::new();
        for listener in outbound {
            let listener = Listener::new(listener, config.outbound.accept).context("register an outbound listener")?;
            listeners.push(listener.limited(self.limit));
        }
        tokio::select! {
            issued = credentials.wait_for(Option::is_some) => {
                issued.context("identity ended")?;
            }
            () = self.shared.drain.signaled() => return std::future::pending().await,
        }
        let outbound = Outbound::new(Arc::clone(&self.shared), self.discover.clone());
        let inbound = {
            let (shared, policies, discover) = (Arc::clone(&self.shared), self.policies.clone(), self.discover.clone());
            inbound::run(shared, policies, discover, outbound.clone(), inbound)
        };
        tokio::join!(outbound.run(listeners), inbound);
        // Both stop accepting when the drain begins; connections finish on this runtime until the process ends.
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, timeout_at};

    use super::*;
    use crate::{
        inbound::testing::{Mesh, OWN},
        testing::Lines,
    };

    #[tokio::test(start_paused = true)]
    async fn a_proxy_without_identity_says_so_every_fifteen_seconds_until_it_has_one() {
        let (lines, mesh) = (Lines::default(), Mesh::new());
        let _guard = lines.of_this_thread("trace");
        let (credentials_tx, credentials) = watch::channel(None);
        let began = Instant::now();
        let mut warning = std::pin::pin!(warn_without_identity(credentials));
        for (seconds, expected) in [(14, 0), (16, 1), (29, 1), (31, 2), (46, 3)] {
            let until = timeout_at(began + Duration::from_secs(seconds), &mut warning).await;
            assert!(until.is_err(), "it goes on");
            let text = lines.text();
            assert_eq!(text.matches(" WARN ").count(), expected, "after {seconds} s: {text}");
            assert_eq!(text.matches("waiting for identity to be initialized").count(), expected, "{text}");
        }
        credentials_tx.send_replace(Some(mesh.credentials(OWN)));
        assert!(
            timeout_at(began + Duration::from_secs(600), &mut warning).await.is_err(),
            "its end would end the process"
        );
        assert_eq!(lines.text().matches(" WARN ").count(), 3);
    }
}
