//! The life of `weft-agent run`: checks the host, opens the datapath, serves until told to stop. Stopping leaves
//! everything pinned and in force.

use std::{
    io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use weft_proto::agent::{pods_server::PodsServer, status_server::StatusServer, trace_server::TraceServer};
use weft_runtime::{admin::Admin, metrics::Metrics, readiness::Readiness, signal, tasks::Tasks};

use crate::{
    api::{Pods, StatusService, Trace},
    bpf,
    datapath::Datapath,
    host, metrics,
    shared::Shared,
    trace::{self, Hub},
};

/// What `weft-agent run` is told.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) socket: PathBuf,
    pub(crate) pin_dir: PathBuf,
    pub(crate) cgroup: Option<PathBuf>,
    pub(crate) metrics_addr: Option<SocketAddr>,
    pub(crate) debug_log: bool,
}

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(config: Config) -> Result<()> {
    host::check()?;
    let cgroup = host::cgroup(config.cgroup.as_deref())?;
    host::check_bpffs(&config.pin_dir)?;
    let socket = listen(&config.socket)?;
    let (datapath, ebpf) = Datapath::open(&config.pin_dir, &cgroup, config.debug_log).inspect_err(|_| {
        // Nobody will answer there.
        let _ = std::fs::remove_file(&config.socket);
    })?;
    tracing::info!(
        programs = datapath.digest(), cgroup = %cgroup.display(), pin_dir = %config.pin_dir.display(),
        pods = datapath.pods()?.len(), "datapath in force"
    );
    let datapath = Shared::new(datapath);
    let hub = Hub::new();
    let readiness = Readiness::new();
    let mut tasks = Tasks::new();

    tasks.spawn("trace", hub.clone().run(datapath.clone()));
    tasks.spawn("garbage", trace::collect_garbage(datapath.clone()));
    if config.debug_log {
        tasks.spawn("kernel-log", kernel_log(ebpf));
    }
    if let Some(address) = config.metrics_addr {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot listen on --metrics-addr {address}"))?;
        let registry = Metrics::new();
        registry.register(|registry| metrics::register(registry, datapath.clone()));
        let admin = Admin::new(registry, readiness.clone());
        tasks.spawn("admin", async move {
            admin.serve(listener, std::future::pending()).await;
            Ok(())
        });
    }
    let server = Server::builder()
        .add_service(PodsServer::new(Pods(datapath.clone())))
        .add_service(TraceServer::new(Trace(hub)))
        .add_service(StatusServer::new(StatusService(datapath)));
    tasks.spawn("api", async move {
        server.serve_with_incoming(UnixListenerStream::new(socket)).await.context("gRPC server failed")
    });
    let result = tasks.run_until(signal::shutdown()).await;
    // The datapath stays; the socket would only mislead.
    let _ = std::fs::remove_file(&config.socket);
    result
}

/// Listens on a unix socket that only root may use, in place of one that a dead agent left.
fn listen(path: &Path) -> Result<UnixListener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        bail!("another agent answers on {}: stop it, or pass another --socket", path.display());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", path.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot protect {}", path.display()))?;
    Ok(listener)
}

/// Passes the programs' log records on, forever.
async fn kernel_log(mut ebpf: Ebpf) -> Result<()> {
    let logger = aya_log::EbpfLogger::init(&mut ebpf).context("cannot read the programs' log")?;
    let mut logger = bpf::readable(logger)?;
    loop {
        let mut guard = logger.readable_mut().await?;
        guard.get_inner_mut().flush();
        guard.clear_ready();
    }
}
