//! Lifecycle of `weft-agent run`: checks the host, opens the datapath, serves until SIGTERM or SIGINT. Stopping leaves
//! everything pinned and in force, unless Weft is being uninstalled from the cluster.

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use kube::Client;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::{Mutex, mpsc, watch},
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use weft_k8s_api::inject::RedirectionDefaults;
use weft_proto::agent::{pods_server::PodsServer, status_server::StatusServer, trace_server::TraceServer};
use weft_runtime::{admin::Admin, metrics::Metrics, readiness::Readiness, signal, tasks::Tasks, telemetry::Log};

use crate::{
    api::{KubernetesNode, Pods, StatusService, Trace},
    cgroup::{AttachPoint, Search},
    datapath::{Datapath, Options, SelfEnrolment, bpf, bpffs, handle::Handle, lock::Lock, migrate},
    features::{self, Feature, Linux},
    host,
    kubernetes::{self, Identity, Outputs, Owner, Publisher, metrics::EnrolmentSeconds},
    maintenance::{bypass, garbage, losses, pins},
    metrics,
    trace::Broadcaster,
};

/// Interval of keepalive pings to clients of the socket, and the timeout of their answers.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Parameters of `weft-agent run`.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) socket: PathBuf,
    pub(crate) pin_dir: PathBuf,
    pub(crate) cgroup: Option<PathBuf>,
    pub(crate) cgroup_root: Option<PathBuf>,
    pub(crate) metrics_addrs: Vec<SocketAddr>,
    pub(crate) debug_log: bool,
    /// Treats kernel features of later versions as missing.
    pub(crate) as_on_linux: Option<Linux>,
    /// The log, kept until the agent ends.
    pub(crate) log: Log,
    pub(crate) self_enrolment: Option<SelfEnrolment>,
    pub(crate) kubernetes: Option<KubernetesConfig>,
}

/// Parameters of an agent on a Kubernetes node.
#[derive(Clone, Debug)]
pub(crate) struct KubernetesConfig {
    pub(crate) identity: Identity,
    pub(crate) defaults: RedirectionDefaults,
}

/// Access to the API server, and the settings for it.
struct Cluster {
    config: KubernetesConfig,
    client: Client,
    publisher: Publisher,
}

/// A datapath in force, and the features that were found.
struct Prepared {
    features: Vec<Feature>,
    attach: AttachPoint,
    datapath: Datapath,
    ebpf: Ebpf,
    lock: Lock,
}

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(config: Config) -> Result<()> {
    let Some(kubernetes) = config.kubernetes.clone() else {
        let prepared = prepare(&config).await?;
        return serve(&config, prepared, None).await;
    };
    let client = kubernetes::connect().await?;
    let publisher = Publisher::new(client.clone(), kubernetes.identity.clone());
    match prepare(&config).await {
        Ok(prepared) => {
            let cluster = Cluster { config: kubernetes, client, publisher };
            serve(&config, prepared, Some(cluster)).await
        }
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "this node cannot be served");
            publisher.unsupported(&format!("{error:#}")).await;
            Err(error)
        }
    }
}

/// Puts the datapath in force. On a Kubernetes node this mounts a bpffs if there is none, and waits for another agent
/// to end: two meet in a rollout.
async fn prepare(config: &Config) -> Result<Prepared> {
    let on_node = config.kubernetes.is_some();
    host::check()?;
    if on_node {
        host::check_processes()?;
    }
    let features = examine_features(config.as_on_linux)?;
    let attach = find_attach_point(config)?;
    if on_node && attach.is_root {
        tracing::warn!(
            cgroup = %attach.path.display(), reason = attach.reason,
            "attaching to the root of the cgroup2 tree: the programs also run for host processes"
        );
    }
    if let Err(missing) = host::check_bpffs(&config.pin_dir) {
        let bpffs = Path::new(host::BPFFS);
        if !on_node || !config.pin_dir.starts_with(bpffs) {
            return Err(missing.into());
        }
        bpffs::mount_on_node(bpffs).with_context(|| missing.to_string())?;
        tracing::info!(path = host::BPFFS, "mounted a bpffs on the node");
    }
    migrate::check(&config.pin_dir)?;
    let lock = if on_node { Lock::wait(&config.pin_dir).await? } else { Lock::take(&config.pin_dir)? };
    let (datapath, ebpf) = open(config, &attach, &features)?;
    Ok(Prepared { features, attach, datapath, ebpf, lock })
}

/// Probes the kernel's features, and refuses a kernel that lacks a required one.
fn examine_features(as_on: Option<Linux>) -> Result<Vec<Feature>> {
    let features = features::examine(as_on);
    features::check(&features)?;
    Ok(features)
}

fn open(config: &Config, attach: &AttachPoint, features: &[Feature]) -> Result<(Datapath, Ebpf)> {
    Ok(Datapath::open(Options {
        pin_dir: &config.pin_dir,
        cgroup: &attach.path,
        debug_log: config.debug_log,
        cookies: features::cookie_source(features),
        self_enrolment: config.self_enrolment,
        bypassed: migrate::begins_bypassed(&config.pin_dir)?,
    })?)
}

fn find_attach_point(config: &Config) -> Result<AttachPoint> {
    let own_pod = config.kubernetes.as_ref().and_then(|kubernetes| kubernetes.identity.pod.as_ref());
    Ok(AttachPoint::find(Search {
        cgroup: config.cgroup.as_deref(),
        root: config.cgroup_root.as_deref(),
        pod_uid: own_pod.map(|pod| pod.uid.as_str()),
    })?)
}

async fn serve(config: &Config, prepared: Prepared, cluster: Option<Cluster>) -> Result<()> {
    let Prepared { features, attach, datapath, ebpf, lock } = prepared;
    tracing::info!(
        programs = datapath.digest(), cgroup = %attach.path.display(), reason = attach.reason,
        pin_dir = %config.pin_dir.display(), pods = datapath.pod_count()?, "datapath in force"
    );
    let datapath = Handle::spawn(datapath).context("cannot start the datapath's thread")?;
    // Shared, because it must outlive the tasks.
    let lock = Arc::new(Mutex::new(lock));
    let events = Broadcaster::new();
    let readiness = Readiness::new();
    let registry = Metrics::new();
    registry.register(|registry| metrics::register(registry, datapath.clone()));
    config.log.lines.register(&registry);
    let mut tasks = Tasks::new();

    let (gone_tx, gone) = mpsc::unbounded_channel();
    let (pods_tx, pods) = watch::channel(None);
    let (owner_tx, owner) = watch::channel(Owner::Unknown);
    tasks.spawn("trace", events.clone().run(datapath.clone()));
    tasks.spawn("garbage", garbage::collect(datapath.clone(), gone_tx));
    let publisher = cluster.as_ref().map(|cluster| cluster.publisher.clone());
    tasks.spawn("bypass", bypass::watch(datapath.clone(), publisher.clone()));
    tasks.spawn("losses", losses::watch(datapath.clone(), publisher));
    tasks.spawn("pins", pins::watch(datapath.clone(), lock.clone(), readiness.gate("pins")));
    let caught_up = cluster.as_ref().map(|_| readiness.gate("pods"));
    let (gate, trackings) = (caught_up.clone(), pods.clone());
    let failed = move || match &gate {
        Some(gate) => gate.is_open().then(|| kubernetes::failed(&trackings)),
        None => Some(Vec::new()),
    };
    tasks.spawn("migration", migrate::run(datapath.clone(), config.pin_dir.clone(), failed));
    if config.debug_log {
        tasks.spawn("kernel-log", kernel_log(ebpf));
    }
    let mut status = StatusService {
        datapath: datapath.clone(),
        attach: attach.clone(),
        features,
        recent: config.log.recent.clone(),
        kubernetes: None,
    };
    if let (Some(Cluster { config: kubernetes, client, publisher }), Some(caught_up)) = (&cluster, caught_up) {
        let node = kubernetes.identity.node.clone();
        status.kubernetes = Some(KubernetesNode { name: node.clone(), pods: pods.clone() });
        let seconds = EnrolmentSeconds::new();
        registry.register(|registry| kubernetes::metrics::register(registry, &seconds, pods));
        let (reports, reported) = mpsc::unbounded_channel();
        tasks.spawn("events", publisher.clone().run(reported));
        if let Some(pod) = kubernetes.identity.pod.clone() {
            tasks.spawn("daemonset", kubernetes::follow(client.clone(), pod, owner_tx));
        }
        let outputs = Outputs { datapath: datapath.clone(), trackings: pods_tx, caught_up, seconds, reports };
        let enrolment = kubernetes::Config { node, defaults: kubernetes.defaults.clone(), attach, gone };
        tasks.spawn("pods", kubernetes::enrol_pods(client.clone(), enrolment, outputs));
    }
    let admin = Admin::new(registry, readiness);
    for listener in listen_admin(&config.metrics_addrs).await? {
        let admin = admin.clone();
        tasks.spawn("admin", async move {
            admin.serve(listener, std::future::pending()).await;
            Ok(())
        });
    }
    let socket = listen(&config.socket)?;
    // If the API server lists the pods, no other client may enrol them.
    let enrolment = cluster.is_none().then(|| PodsServer::new(Pods::new(datapath.clone())));
    let server = Server::builder()
        // A client behind `weft-agent connect` may disappear silently, and a watch costs every pod of the node.
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(TraceServer::new(Trace { events, status: status.clone() }))
        .add_service(StatusServer::new(status))
        .add_optional_service(enrolment);
    tasks.spawn("socket", async move {
        server.serve_with_incoming(UnixListenerStream::new(socket)).await.context("gRPC server failed")
    });
    let result = tasks.run_until(signal::shutdown()).await;
    // The datapath stays in force. A socket that is left over would only mislead.
    let _ = std::fs::remove_file(&config.socket);
    drop(tasks);
    // Under the lock: the next agent may start as soon as that is free.
    datapath.stop().await;
    if let (Ok(()), Some(cluster)) = (&result, cluster) {
        let owner = owner.borrow().clone();
        leave(config, &cluster, &owner).await?;
    }
    drop(lock);
    result
}

/// Decides whether the datapath stays when a DaemonSet's agent is stopped.
async fn leave(config: &Config, cluster: &Cluster, owner: &Owner) -> Result<()> {
    let reason = match &cluster.config.identity.pod {
        Some(pod) => kubernetes::uninstalled(&cluster.client, pod, owner).await,
        None => None,
    };
    let Some(reason) = reason else {
        tracing::info!(?owner, "the datapath stays in force: Weft was not uninstalled");
        return Ok(());
    };
    migrate::leave(&config.pin_dir).await.context("cannot unload the datapath")?;
    // The parent directory of all layouts, if this was the last one. An empty directory is harmless.
    if let Some(parent) = config.pin_dir.parent() {
        let _ = std::fs::remove_dir(parent);
    }
    tracing::info!(reason, pin_dir = %config.pin_dir.display(), "unloaded: nothing is redirected any more");
    Ok(())
}

/// Listens for probes and scrapes. If the node's address is not on this host, as behind a NAT, the agent listens on all
/// addresses.
async fn listen_admin(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    // The node's address may be the loopback address; then there is one listener.
    for address in addresses.iter().collect::<BTreeSet<_>>() {
        match TcpListener::bind(address).await {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                let any = match address {
                    SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())),
                    SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port())),
                };
                tracing::warn!(%address, listening = %any, "--metrics-addr is not this node's: probes and metrics are on all addresses");
                listeners.clear();
                let listener = TcpListener::bind(any).await;
                return Ok(vec![listener.with_context(|| format!("cannot listen on {any} for --metrics-addr"))?]);
            }
            Err(error) => return Err(error).with_context(|| format!("cannot listen on --metrics-addr {address}")),
        }
    }
    Ok(listeners)
}

/// Listens on a unix socket that only root may use, and replaces the socket of a dead agent.
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

/// Forwards the programs' log records, forever.
async fn kernel_log(mut ebpf: Ebpf) -> Result<()> {
    let logger = aya_log::EbpfLogger::init(&mut ebpf).context("cannot read the programs' log")?;
    let mut logger = bpf::readable(logger)?;
    loop {
        let mut guard = logger.readable_mut().await?;
        guard.get_inner_mut().flush();
        guard.clear_ready();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn listening(addresses: &[&str]) -> Vec<SocketAddr> {
        let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let listeners = listen_admin(&addresses).await.unwrap();
        listeners.iter().map(|listener| listener.local_addr().unwrap()).collect()
    }

    #[tokio::test]
    async fn only_root_may_use_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/agent.sock");
        let _listener = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    }

    #[tokio::test]
    async fn probes_are_answered_on_the_addresses_that_are_named_and_no_others() {
        assert!(listening(&[]).await.is_empty());
        let found = listening(&["127.0.0.1:0", "127.0.0.2:0", "127.0.0.2:0"]).await;
        assert_eq!(
            found.iter().map(|address| address.ip().to_string()).collect::<Vec<_>>(),
            ["127.0.0.1", "127.0.0.2"]
        );
    }

    #[tokio::test]
    async fn an_address_behind_a_nat_does_not_cost_the_node_its_agent() {
        // TEST-NET-1 (RFC 5737).
        let found = listening(&["127.0.0.1:0", "192.0.2.1:0"]).await;
        assert!(matches!(found.as_slice(), [address] if address.ip().is_unspecified()), "{found:?}");
    }
}
