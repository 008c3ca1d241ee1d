//! The process: bind, start every task, serve, drain.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, anyhow};
use kube::{Client, Config, config::KubeConfigOptions};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tower::Service as _;
use weft_k8s_api::kubeconfig;
use weft_proto::viz::viz_server::VizServer;
use weft_runtime::{
    admin::Admin,
    drain, files,
    metrics::Metrics,
    readiness::Readiness,
    server::{Limits, Server, bind},
    signal,
    tasks::Tasks,
    telemetry,
};
use weft_viz_core::Engine;

use crate::{args::Args, fleet::Mesh, gate::Gate, limits::InUse, metrics::VizMetrics, pods::Pods, service::Service};

/// The largest request, in bytes: names and a label selector.
const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// Deadline for connecting to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which a connection to the API server is given up: watches get a bookmark each minute
/// (`k8s.io/apiserver:pkg/storage/cacher`, `defaultBookmarkFrequency`).
const SILENCE: Duration = Duration::from_secs(90);

/// Limits of the API: some dozens of people with command lines and dashboards, most of them behind one address, that of
/// port-forwards.
const LIMITS: Limits = Limits {
    connections: 512,
    source_connections: 256,
    streams: 64,
    source_streams: 512,
    local_streams: 512,
    waiting: 1024,
    begin: Duration::from_secs(10),
    receive: Duration::from_secs(10),
    // Taps are open until their callers go; the service bounds its other answers.
    exchange: None,
    idle: Duration::from_secs(300),
    ping: Duration::from_secs(30),
    held_bytes: 4 * 1024 * 1024,
};

/// Runs the process until a signal.
pub(crate) fn main(args: &Args) -> anyhow::Result<()> {
    let log = telemetry::init(&args.log_level, args.log_format).context("--log-level")?;
    if let Err(error) = files::raise_limit() {
        tracing::warn!(%error, "the limit on open files cannot be raised");
    }
    // An error means that there is a provider already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        let (drain, watch) = drain::Drain::new();
        let (readiness, metrics, mut tasks) = (Readiness::new(), Metrics::new(), Tasks::new());
        log.lines.register(&metrics);
        let (api, admin) = (bind(args.addr, "--addr")?, bind(args.admin_addr, "--admin-addr")?);
        let bound = (api.local_addr()?, admin.local_addr()?);

        let client = connect(args.kubeconfig.as_deref()).await?;
        let own = metrics.register(VizMetrics::new);
        let pods = Pods::default();
        tasks.spawn("pods", pods.clone().follow(client.clone(), readiness.gate("pods"), own.clone()));
        let config = weft_viz_core::Config { interval: args.scrape_interval, ..weft_viz_core::Config::default() };
        let engine = Engine::new(Mesh::new(pods, own.clone()), config);
        let collecting = engine.clone();
        tasks.spawn("collection", async move {
            collecting.run().await;
            Err(anyhow!("it ended"))
        });
        let gate = Arc::new(Gate::new(client, args.token_audience.clone(), own.clone()));
        let service = Service { engine, gate, used: InUse::default(), metrics: own, drain: watch.clone() };
        tasks.spawn("api", watch.track(serve(api, service, watch.clone())));
        let serving = Admin::new(metrics, readiness);
        tasks.spawn("admin", async move {
            // Probes and scrapes are answered until the process exits.
            serving.serve(admin, std::future::pending()).await;
            Ok(())
        });
        tracing::info!(api = %bound.0, admin = %bound.1, "started");

        tasks.run_until(signal::shutdown()).await?;
        if !drain.drain(args.shutdown_grace_period).await {
            tracing::warn!("calls were still in progress at the end of the grace period");
        }
        Ok(())
    })
}

/// Serves until the drain.
async fn serve(listener: TcpListener, service: Service, watch: drain::Watch) -> anyhow::Result<()> {
    let routes = Routes::new(VizServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES));
    let answer = move |request, _peer| {
        let answered = routes.clone().call(request);
        async move { answered.await.unwrap_or_else(|never| match never {}) }
    };
    Server::new("api", LIMITS, watch).serve(listener, answer).await;
    Ok(())
}

async fn connect(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let options = KubeConfigOptions::default();
    let mut config = match kubeconfig {
        Some(paths) => {
            let read = kubeconfig::read(paths.as_os_str()).context("--kubeconfig")?;
            let config = Config::from_custom_kubeconfig(read, &options).await;
            config.with_context(|| format!("--kubeconfig {}", paths.display()))?
        }
        None => match Config::incluster() {
            Ok(config) => config,
            Err(in_cluster) => Config::from_kubeconfig(&options).await.with_context(|| {
                format!(
                    "no way to the Kubernetes API: this is no pod with a service account ({in_cluster}), and there is no \
                     kubeconfig; name one with --kubeconfig"
                )
            })?,
        },
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(SILENCE);
    // A connection that was idle is used again.
    config.reset_reader_on_write = true;
    Client::try_from(config).context("prepare the client of the Kubernetes API")
}
