//! The daemon: reconciles the host with the manifests and publishes the state.
//!
//! One loop reacts to four kinds of updates (manifests, pods, the agent, the stop request), derives the new state from
//! them, and publishes it. [`mod@desired`], [`publish`] and [`names`] are pure; [`pod`] runs one pod.
//!
//! Order at start: checks, lock, left-overs of a crash, janitor, keys, node, agent, name server, pods. Shutdown is in
//! reverse order; if the daemon dies without it, the janitor cleans up.

mod agent;
mod control_plane;
mod desired;
mod dns;
mod names;
mod pki;
mod pod;
mod probe;
mod publish;
mod spec;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, io,
    net::SocketAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use notify::Watcher;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use weft_k8s_api::{
    inject::InjectConfig,
    manifest::{self, Object, ObjectRef},
};

use self::{
    agent::Agent,
    desired::{Allocator, Desired, DesiredPod, desired, ignored},
    names::Names,
    pki::Pki,
    pod::{Handle, PodContext, PodEvent},
    publish::{Publisher, RunningPod, endpoint_slices, json, json_of, running_pod, virtual_services},
};
pub use self::{agent::AgentError, pki::PkiError, spec::SpecError};
use crate::{
    config::{Config, ControlPlane, DNS_ADDRESS, Interception},
    host::{HostError, cgroup, cleanup, janitor, mount_bpffs, network, preflight, services},
    state::{ServiceState, State},
};

/// Pods are numbered from here: the first addresses of the CIDR stay free, as in most clusters.
const FIRST_POD: u32 = 10;
/// Editors write a file in several steps; changes within this time are one.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Pause before a failed publication is retried.
const RETRY: Duration = Duration::from_secs(1);

/// Why a sandbox does not run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// An operation on the host failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Keys could not be created.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The agent could not be started.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The manifests cannot be read at all.
    #[error("cannot read manifests in {}: {source}; expected a directory of .yaml, .yml or .json files", path.display())]
    Manifests {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The manifests cannot be watched.
    #[error("cannot watch {}: {source}", path.display())]
    Watch {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the watcher.
        source: notify::Error,
    },
    /// The name server's socket could not be bound.
    #[error("cannot bind the name server to {address} in the node's namespace: {source}")]
    NameServer {
        /// The socket's address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// The sandbox's own files could not be written.
    #[error("cannot write below {}: {source}", path.display())]
    Files {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// The description from which a container's process was started, in its pod's directory.
pub(crate) fn container_spec_file(pod_dir: &Path, container: &str) -> PathBuf {
    pod_dir.join(format!(".spec-{container}.json"))
}

/// Runs a sandbox until `shutdown` completes, then removes everything. `report` is called with every new state.
///
/// # Errors
/// When it cannot start; nothing is left behind in that case. Faults of single manifests or pods are not errors; the
/// state contains them.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()>,
    report: impl FnMut(&State),
) -> Result<(), DaemonError> {
    preflight::check(&config)?;
    // Checked before anything is created: a missing directory is the commonest mistake.
    load(&config.manifests)?;
    let layout = config.layout();
    let lock = cleanup::lock(&config.name)?;
    cleanup::remove_everything(&layout)?;
    let run_dir = layout.run_dir();
    // Only root may read keys and tokens.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&run_dir)
        .map_err(|source| DaemonError::Files { path: run_dir, source })?;
    let janitor = janitor::spawn(&config.bin_dir.join("weft"), &config.name)?;
    let result = serve(config, shutdown, report).await;
    let removed = tokio::task::spawn_blocking(move || cleanup::remove_everything(&layout)).await;
    janitor.dismiss();
    drop(lock);
    result?;
    if let Ok(removed) = removed {
        removed?;
    }
    Ok(())
}

async fn serve(
    config: Config,
    shutdown: impl Future<Output = ()>,
    report: impl FnMut(&State),
) -> Result<(), DaemonError> {
    let config = Arc::new(config);
    let layout = config.layout();
    let pki = Pki::create(&layout.pki_dir())?;
    let published = layout.published_dir();
    let publisher =
        Publisher::create(published.clone()).map_err(|source| DaemonError::Files { path: published, source })?;
    let cgroup2 = cgroup::mount_point()?;
    for dir in [layout.kubepods(), layout.cgroup().join("node")] {
        cgroup::create(&cgroup2.join(dir))?;
    }
    let node_netns = network::create_node(&layout).await?;
    let mut keep_agent = None;
    let mut agent = None;
    if config.interception == Interception::Ebpf {
        mount_bpffs(&layout.bpffs())?;
        let (started, supervise) = agent::start(config.clone(), &cgroup2).await?;
        agent = Some(started);
        keep_agent = Some(tokio::spawn(supervise));
    }
    let (names_tx, names) = watch::channel(Arc::new(Names::default()));
    let name_server = dns::serve(&node_netns, SocketAddr::new(DNS_ADDRESS, 53), names).await?;

    let inject = control_plane::inject_config(&config, &pki.anchors_pem);
    let (events_tx, events) = mpsc::unbounded_channel();
    let shared =
        Arc::new(PodContext { config: config.clone(), layout, cgroup2, node_netns, pki, agent: agent.clone() });
    let daemon = Daemon {
        inject,
        shared,
        allocator: Allocator::default(),
        publisher,
        names: names_tx,
        next_pod: FIRST_POD,
        pods: BTreeMap::new(),
        last: HashMap::new(),
        desired: Desired::default(),
        errors: Vec::new(),
        ignored: Vec::new(),
        virtual_services: Vec::new(),
        events_tx,
        report,
    };
    let result = daemon.run(events, agent, shutdown).await;
    drop(name_server);
    if let Some(keep_agent) = keep_agent {
        keep_agent.abort();
    }
    result
}

struct Daemon<R> {
    inject: InjectConfig,
    shared: Arc<PodContext>,
    allocator: Allocator,
    publisher: Publisher,
    names: watch::Sender<Arc<Names>>,
    next_pod: u32,
    /// Pods by number.
    pods: BTreeMap<u32, Handle>,
    /// What was last used of every object in the manifests.
    last: HashMap<ObjectRef, Used>,
    desired: Desired,
    errors: Vec<String>,
    /// Objects of kinds that are not used, one line each.
    ignored: Vec<String>,
    virtual_services: Vec<services::VirtualService>,
    events_tx: mpsc::UnboundedSender<(u32, PodEvent)>,
    report: R,
}

impl<R: FnMut(&State)> Daemon<R> {
    async fn run(
        mut self,
        mut events: mpsc::UnboundedReceiver<(u32, PodEvent)>,
        agent: Option<Agent>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), DaemonError> {
        let (mut edits, watcher) = watch_manifests(&self.shared.config.manifests)?;
        let mut agent_state = agent.map(|agent| agent.state);
        tokio::pin!(shutdown);
        self.read_manifests()?;
        self.reconcile();
        let mut is_published = self.publish().await;
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                Some(()) = edits.recv() => {
                    sleep(DEBOUNCE).await;
                    while edits.try_recv().is_ok() {}
                    if let Err(error) = self.read_manifests() {
                        self.errors = vec![error.to_string()];
                    }
                }
                Some((number, event)) = events.recv() => {
                    self.take(number, event);
                    while let Ok((number, event)) = events.try_recv() {
                        self.take(number, event);
                    }
                }
                () = agent_changed(&mut agent_state) => {}
                () = sleep(RETRY), if !is_published => {}
            }
            self.reconcile();
            is_published = self.publish().await;
        }
        drop(watcher);
        self.end(events).await;
        Ok(())
    }

    /// Stops the applications first, then the control plane.
    async fn end(&mut self, mut events: mpsc::UnboundedReceiver<(u32, PodEvent)>) {
        for control_plane in [false, true] {
            let of_this_kind = |handle: &Handle| {
                (handle.state.borrow().namespace == crate::config::CONTROL_NAMESPACE) == control_plane
            };
            self.pods.values().filter(|handle| of_this_kind(handle)).for_each(Handle::stop);
            while self.pods.values().any(of_this_kind) {
                let Some((number, event)) = events.recv().await else { return };
                self.take(number, event);
            }
        }
    }

    fn take(&mut self, number: u32, event: PodEvent) {
        match event {
            // Its handle has the new state.
            PodEvent::Changed => {}
            PodEvent::Gone => {
                self.pods.remove(&number);
            }
        }
    }

    fn read_manifests(&mut self) -> Result<(), DaemonError> {
        let manifests = load(&self.shared.config.manifests)?;
        self.errors = manifests.errors.iter().map(ToString::to_string).collect();
        let ignored = ignored(&manifests);
        // Every change of a manifest has all of them read again.
        for object in ignored.iter().filter(|line| !self.ignored.contains(line)) {
            tracing::warn!(object, "the sandbox does not use this object");
        }
        self.ignored = ignored;
        let objects = usable(manifests, &mut self.last);
        let mut all = desired(objects, &self.inject, &mut self.allocator);
        if self.shared.config.control_plane == ControlPlane::Weft {
            let own = control_plane::control_plane(&self.shared.config, &self.inject, &mut self.allocator);
            all.pods.extend(own.pods);
            all.services.extend(own.services);
            all.objects.extend(own.objects);
            all.errors.extend(own.errors);
        }
        self.errors.append(&mut all.errors);
        for error in &self.errors {
            tracing::error!("{error}");
        }
        self.desired = all;
        Ok(())
    }

    /// Starts missing pods and stops surplus ones. If the template has changed, the pod is replaced, after everything
    /// of the old one is gone, because both would have the same directory.
    fn reconcile(&mut self) {
        let mut wanted: HashMap<(String, String), &DesiredPod> =
            self.desired.pods.iter().map(|pod| (key_of(pod), pod)).collect();
        for handle in self.pods.values() {
            match wanted.remove(&key_of(&handle.desired)) {
                Some(pod) if pod.template_hash == handle.desired.template_hash => {}
                _ => handle.stop(),
            }
        }
        let missing: Vec<DesiredPod> =
            self.desired.pods.iter().filter(|pod| wanted.contains_key(&key_of(pod))).cloned().collect();
        for pod in missing {
            let number = self.next_pod;
            self.next_pod += 1;
            let handle = pod::spawn(pod, number, self.shared.clone(), self.events_tx.clone());
            self.pods.insert(number, handle);
        }
    }

    /// Publishes the state to the control plane, the name server, the node and the client. Returns false if it should
    /// be retried.
    async fn publish(&mut self) -> bool {
        let running: Vec<RunningPod> = self
            .pods
            .values()
            .filter_map(|handle| {
                let state = handle.state.borrow();
                state.times.network_ms?;
                Some(RunningPod { pod: handle.desired.pod.clone(), ips: state.ips.clone(), ready: state.ready })
            })
            .collect();
        let services = &self.desired.services;
        let slices: Vec<EndpointSlice> =
            services.iter().flat_map(|service| endpoint_slices(service, &running)).collect();

        let mut objects: Vec<_> = self.desired.objects.iter().filter_map(json_of).collect();
        objects.extend(services.iter().map(json));
        objects.extend(slices.iter().map(json));
        objects.extend(running.iter().map(|pod| json(&running_pod(pod))));
        let mut complete = true;
        if let Err(error) = self.publisher.publish(&objects) {
            tracing::error!(%error, "cannot publish to the control plane");
            complete = false;
        }
        self.names.send_replace(Arc::new(Names::of(services, &slices)));
        let translated = virtual_services(services, &slices);
        if translated != self.virtual_services {
            match services::apply(&self.shared.node_netns, &translated).await {
                Ok(()) => self.virtual_services = translated,
                Err(error) => {
                    tracing::error!(%error, "cluster IPs are not translated");
                    complete = false;
                }
            }
        }
        let state = self.state(&slices);
        if let Err(error) = state.write(&self.shared.layout.state_file()) {
            tracing::error!(%error, "the state is not written");
            complete = false;
        }
        (self.report)(&state);
        complete
    }

    fn state(&self, slices: &[EndpointSlice]) -> State {
        let shared = &self.shared;
        let pods: Vec<_> = self.pods.values().map(|handle| handle.state.borrow().clone()).collect();
        let is_complete = self.desired.pods.iter().all(|wanted| {
            let key = key_of(wanted);
            self.pods.values().any(|handle| {
                handle.state.borrow().ready
                    && key_of(&handle.desired) == key
                    && handle.desired.template_hash == wanted.template_hash
            })
        });
        State {
            config: (*shared.config).clone(),
            daemon_pid: std::process::id(),
            agent_pid: shared.agent.as_ref().and_then(|agent| agent.state.borrow().pid),
            agent_socket: shared.agent.as_ref().map(|_| shared.layout.agent_socket()),
            node_netns: shared.node_netns.clone(),
            kubepods: shared.cgroup2.join(shared.layout.kubepods()),
            ready: is_complete && pods.len() == self.desired.pods.len(),
            pods,
            services: self.desired.services.iter().map(|service| service_state(service, slices)).collect(),
            manifest_errors: self.errors.clone(),
            ignored_manifests: self.ignored.clone(),
        }
    }
}

fn service_state(service: &Service, slices: &[EndpointSlice]) -> ServiceState {
    let spec = service.spec.clone().unwrap_or_default();
    let of_one_family = publish::slices_of(service, slices).next();
    let endpoints = of_one_family.map_or(0, |slice| publish::ready_endpoints(slice).count());
    ServiceState {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        name: service.metadata.name.clone().unwrap_or_default(),
        cluster_ip: spec.cluster_ip.and_then(|ip| ip.parse().ok()),
        ports: spec
            .ports
            .iter()
            .flatten()
            .map(|port| format!("{}/{}", port.port, port.protocol.as_deref().unwrap_or("TCP")))
            .collect(),
        endpoints,
    }
}

fn key_of(pod: &DesiredPod) -> (String, String) {
    let metadata = &pod.pod.metadata;
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

/// What was used of an object at the last reading.
struct Used {
    object: Object,
    file: Arc<Path>,
    /// Whether it was read as it is, and is not the strictest reading of a document that was never good.
    is_good: bool,
}

/// The objects that can be used. A document that became invalid keeps its last good version, as in an API server; where
/// there is none, its strictest reading counts, as long as the document says the same. If an invalid document does not
/// even say which object it is, all that is missing in its file stays.
fn usable(manifests: manifest::Manifests, last: &mut HashMap<ObjectRef, Used>) -> Vec<Object> {
    let mut objects = Vec::new();
    let mut now = HashMap::new();
    for located in manifests.objects {
        objects.push(located.object.clone());
        now.insert(located.object.reference(), Used { object: located.object, file: located.file, is_good: true });
    }
    let mut damaged = HashSet::new();
    for error in manifests.errors {
        let Some(reference) = error.object else {
            damaged.insert(error.file);
            continue;
        };
        if now.contains_key(&reference) {
            continue;
        }
        let good = last.get(&reference).filter(|used| used.is_good).map(|used| used.object.clone());
        let is_good = good.is_some();
        let Some(object) = good.or_else(|| error.restrictive.map(|restrictive| *restrictive)) else { continue };
        objects.push(object.clone());
        now.insert(reference, Used { object, file: error.file, is_good });
    }
    let kept = last.drain().filter(|(reference, used)| !now.contains_key(reference) && damaged.contains(&used.file));
    let mut kept: Vec<_> = kept.collect();
    kept.sort_by(|(one, _), (other, _)| one.cmp(other));
    objects.extend(kept.iter().map(|(_, used)| used.object.clone()));
    now.extend(kept);
    *last = now;
    objects
}

fn load(dir: &Path) -> Result<manifest::Manifests, DaemonError> {
    manifest::load_dir(dir).map_err(|source| DaemonError::Manifests { path: dir.to_owned(), source })
}

/// Signals changes below the directory; at most one message is queued.
fn watch_manifests(dir: &Path) -> Result<(mpsc::Receiver<()>, impl Sized + use<>), DaemonError> {
    let (tx, rx) = mpsc::channel(1);
    let failed = |source| DaemonError::Watch { path: dir.to_owned(), source };
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading a manifest is an event of its own; only changes count.
        if event.is_ok_and(|event| !event.kind.is_access()) {
            let _ = tx.try_send(());
        }
    })
    .map_err(failed)?;
    watcher.watch(dir, notify::RecursiveMode::Recursive).map_err(failed)?;
    Ok((rx, watcher))
}

async fn agent_changed(state: &mut Option<watch::Receiver<agent::AgentState>>) {
    if let Some(state) = state
        && state.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

    use super::*;

    #[test]
    fn what_was_never_good_is_read_anew_and_what_was_good_stays() {
        let mut last = HashMap::new();
        let mut port = |spec: &str| {
            let text = format!(
                "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {{name: s, namespace: shop}}\nspec: {spec}\n"
            );
            match &usable(manifest::parse(Path::new("a.yaml"), &text), &mut last)[..] {
                [Object::Server(server)] => server.spec.port.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(port("{podSelector: {}, port: 8080, accessPolicy: 1}"), IntOrString::Int(8080));
        assert_eq!(port("{podSelector: {}, port: 9090, accessPolicy: 1}"), IntOrString::Int(9090));
        assert_eq!(port("{podSelector: {}, port: 9090, accessPolicy: 1, proxyProtocol: 1}"), IntOrString::Int(9090));
        assert_eq!(port("{podSelector: {}, port: 7070}"), IntOrString::Int(7070));
        assert_eq!(port("{podSelector: {}, port: 9090, accessPolicy: 1}"), IntOrString::Int(7070));
        assert_eq!(
            port("{podSelector: {}, port: 9090, accessPolicy: alow, proxyProtocol: http}"),
            IntOrString::Int(7070)
        );
    }

    #[test]
    fn what_a_file_has_stays_while_a_document_in_it_cannot_be_told() {
        let account = |name: &str| {
            format!("apiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {name}, namespace: shop}}\n---\n")
        };
        let server = |port: &str| {
            format!(
                "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {{name: s, namespace: shop}}\n\
                 spec: {{podSelector: {{}}, port: {port}}}\n---\n"
            )
        };
        let damage = "kind: [\n---\n";
        let mut last = HashMap::new();
        let mut check = |a: &str, b: &str, expected: &str| {
            let (mut read, other) = (manifest::parse(Path::new("a.yaml"), a), manifest::parse(Path::new("b.yaml"), b));
            read.objects.extend(other.objects);
            read.errors.extend(other.errors);
            let names: Vec<_> = usable(read, &mut last).iter().map(|object| object.reference().name).collect();
            assert_eq!(names.join(" "), expected, "{a}");
        };
        check(&(account("x") + &account("y")), &account("z"), "x y z");
        check(&(damage.to_owned() + &account("y")), "", "y x");
        check(damage, "", "x y");
        check(&account("y"), damage, "y");
        // What stands for a Server that was never good stays as well.
        check(&server("[]"), "", "s");
        check(damage, "", "s");
        check(&server("80"), "", "s");
        check(damage, "", "s");
        check("", damage, "");
    }
}
