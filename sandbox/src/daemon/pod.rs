//! The lifecycle of one pod: network, interception, volumes, containers in Kubernetes' order, probes, termination.
//!
//! ```text
//! network ─> enrol (nothing of the pod runs before) ─> init containers and sidecars in order ─> containers ─> ready
//! ```

mod report;
mod supervisor;

use std::{
    fs::{self, OpenOptions},
    net::IpAddr,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Container;
use tokio::{
    process::Child,
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use weft_k8s_api::{
    inject::{Redirection, is_native_sidecar},
    labels, observe,
    ports::PortSet,
};
use weft_proto::agent::PodRef;

use self::{
    report::PodReporter,
    supervisor::{Supervisor, describe},
};
use super::{
    agent::{Agent, AgentError},
    container_spec_file,
    desired::DesiredPod,
    pki::{Pki, TOKEN_LIFETIME},
    probe,
    spec::{Placed, SpecError, container_spec, prepare_volumes},
};
use crate::{
    config::{Config, Interception, Layout, POD_CIDR_V4, POD_CIDR_V6},
    host::{HostError, cgroup, container, iptables, network},
    state::{ContainerState, PodState, write_atomically},
};

/// How often a pod that is not ready is probed. A kubelet does it every second; here people wait for it.
const PROBE_UNREADY: Duration = Duration::from_millis(25);
/// How often a ready pod is probed: twice the sidecar's own period, because all pods share this host.
const PROBE_READY: Duration = Duration::from_secs(4);
/// Pause before a failed start of the pod is retried.
const START_RETRY: Duration = Duration::from_secs(2);
/// The default of terminationGracePeriodSeconds. In Kubernetes it is 30; nothing here needs that long by default.
const GRACE: Duration = Duration::from_secs(10);

/// State that all pods of a sandbox share.
pub(super) struct PodContext {
    pub(super) config: Arc<Config>,
    pub(super) layout: Layout,
    pub(super) cgroup2: PathBuf,
    pub(super) node_netns: PathBuf,
    pub(super) pki: Pki,
    pub(super) agent: Option<Agent>,
}

/// An update about a pod, sent to the daemon with the pod's number.
pub(super) enum PodEvent {
    /// Its state changed.
    Changed,
    /// Nothing is left of the pod.
    Gone,
}

/// A pod that is running or starting.
pub(super) struct Handle {
    pub(super) desired: DesiredPod,
    pub(super) state: watch::Receiver<PodState>,
    stop: CancellationToken,
}

/// Why a pod does not start; it is retried.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("init container {0} failed ({1}); see `weft sandbox logs`")]
    Init(String, ExitStatus),
    #[error("cannot write {}: {source}", path.display())]
    Files { path: PathBuf, source: std::io::Error },
    #[error("cannot wait for container {0}: {1}")]
    Wait(String, std::io::Error),
}

/// Starts a pod. `number` is unique while the sandbox runs and determines the pod's addresses.
pub(super) fn spawn(
    mut desired: DesiredPod,
    number: u32,
    shared: Arc<PodContext>,
    events: mpsc::UnboundedSender<(u32, PodEvent)>,
) -> Handle {
    let uid = format!("{}-{number}", shared.config.name);
    desired.pod.metadata.uid = Some(uid.clone());
    let metadata = &desired.pod.metadata;
    let namespace = metadata.namespace.clone().unwrap_or_default();
    let name = metadata.name.clone().unwrap_or_default();
    let dir = shared.layout.pod_dir(&namespace, &name);
    let containers = containers_of(&desired).map(|container| ContainerState {
        name: container.name.clone(),
        pid: None,
        restarts: 0,
        last_exit: None,
        log: dir.join(format!("{}.log", container.name)),
    });
    let listeners = observe::listeners(&desired.pod);
    let account = desired.pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    let state = PodState {
        owners: observe::owners(&desired.pod),
        labels: metadata.labels.clone().unwrap_or_default(),
        service_account: account.unwrap_or_else(|| "default".to_owned()),
        admin_port: listeners.map(|listeners| listeners.admin),
        tap_port: listeners.and_then(|listeners| listeners.tap),
        namespace,
        name,
        ips: addresses(number),
        netns: PathBuf::from("/run/netns").join(shared.layout.pod_netns(number)),
        cgroup: shared.cgroup2.join(shared.layout.kubepods()).join(format!("pod{uid}")),
        uid,
        meshed: desired.redirection.is_some(),
        ready: false,
        message: "waiting for its network".to_owned(),
        containers: containers.collect(),
        times: crate::state::PodTimes::default(),
    };
    let (state_tx, state) = watch::channel(state);
    let stop = CancellationToken::new();
    let lifecycle = PodLifecycle {
        desired: desired.clone(),
        number,
        dir,
        shared,
        report: Arc::new(PodReporter { number, started: Instant::now(), state: state_tx, events }),
        stop: stop.clone(),
    };
    tokio::spawn(lifecycle.run());
    Handle { desired, state, stop }
}

impl Handle {
    /// Terminates the pod gracefully; [`PodEvent::Gone`] follows.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }
}

/// The pod's addresses, IPv4 first.
fn addresses(number: u32) -> Vec<IpAddr> {
    let v4 = u32::from(POD_CIDR_V4.0) + number;
    let v6 = u128::from(POD_CIDR_V6.0) + u128::from(number);
    vec![IpAddr::V4(v4.into()), IpAddr::V6(v6.into())]
}

/// Sidecars and init containers in their order, then the others.
fn containers_of(desired: &DesiredPod) -> impl Iterator<Item = &Container> {
    let spec = desired.pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

#[derive(Clone)]
struct PodLifecycle {
    desired: DesiredPod,
    number: u32,
    dir: PathBuf,
    shared: Arc<PodContext>,
    report: Arc<PodReporter>,
    stop: CancellationToken,
}

/// Supervisors in termination order: applications, then sidecars.
struct Running {
    supervisors: JoinSet<()>,
    stop_containers: CancellationToken,
    stop_sidecars: CancellationToken,
}

impl PodLifecycle {
    async fn run(self) {
        let mut running = Running {
            supervisors: JoinSet::new(),
            stop_containers: CancellationToken::new(),
            stop_sidecars: CancellationToken::new(),
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = self.live(&mut running) => {}
        }
        self.end(running).await;
    }

    /// Retries the start until it succeeds, then watches the pod for ever.
    async fn live(&self, running: &mut Running) {
        let generation = loop {
            let generation = self.agent_generation();
            match self.start(running).await {
                Ok(()) => break generation,
                Err(error) => {
                    tracing::warn!(pod = %self.report.snapshot().name, %error, "pod does not start");
                    self.report.update(|state, _| state.message = error.to_string());
                }
            }
            running.supervisors.shutdown().await;
            self.kill_processes();
            sleep(START_RETRY).await;
        };
        self.watch(generation).await;
    }

    fn agent_generation(&self) -> u64 {
        self.shared.agent.as_ref().map_or(0, |agent| agent.state.borrow().generation)
    }

    async fn start(&self, running: &mut Running) -> Result<(), StartError> {
        let state = self.report.snapshot();
        network::detach_pod(&self.shared.layout, self.number).await?;
        network::attach_pod(&self.shared.layout, self.number, &state.ips).await?;
        self.report.update(|state, ms| {
            state.times.network_ms = Some(ms);
            state.message = "waiting for its redirection".to_owned();
        });
        cgroup::create(&state.cgroup)?;
        if let Some(redirection) = &self.desired.redirection {
            self.intercept(&state, redirection).await?;
            self.report.update(|state, ms| state.times.enrolled_ms = Some(ms));
        }
        prepare_volumes(&self.dir, &self.desired.pod, &self.shared.pki)?;
        if self.shared.config.proxy.is_some() && self.desired.redirection.is_some() {
            self.create_identity_key(&state)?;
        }

        let spec = self.desired.pod.spec.clone().unwrap_or_default();
        for container in spec.init_containers.iter().flatten() {
            self.report.update(|state, _| state.message = format!("waiting for container {}", container.name));
            if is_native_sidecar(container) {
                self.supervise(running, container, true)?;
                self.wait_until_started(container).await;
            } else {
                self.run_to_completion(container).await?;
            }
        }
        for container in &spec.containers {
            self.supervise(running, container, false)?;
        }
        self.report.update(|state, _| state.message = "waiting for its readiness probes".to_owned());
        Ok(())
    }

    async fn intercept(&self, state: &PodState, redirection: &Redirection) -> Result<(), StartError> {
        match (self.shared.config.interception, &self.shared.agent) {
            (Interception::Ebpf, Some(agent)) => {
                agent.enrol(pod_ref(state), &state.uid, &state.netns, &state.ips, redirection).await?;
            }
            (Interception::Iptables, _) => {
                iptables::install(&state.netns, &init_rules(redirection)).await?;
            }
            _ => {}
        }
        Ok(())
    }

    /// A proxy that replaces Weft's expects its key and signing request where `linkerd2-proxy-identity` would put
    /// them.
    fn create_identity_key(&self, state: &PodState) -> Result<(), StartError> {
        const DIR: &str = "linkerd-identity-end-entity";
        let volume = self.dir.join("volumes").join(DIR);
        let failed = |problem: String| {
            StartError::Spec(SpecError::Prepare { volume: DIR.to_owned(), source: std::io::Error::other(problem) })
        };
        let spec = self.desired.pod.spec.as_ref();
        let account = spec.and_then(|spec| spec.service_account_name.as_deref()).unwrap_or("default");
        let name = weft_tls::identity::Identity::for_service_account(
            account,
            &state.namespace,
            crate::config::CONTROL_NAMESPACE,
            crate::config::CLUSTER_DOMAIN,
        )
        .map_err(|error| failed(error.to_string()))?;
        weft_tls::keys::IdentityKey::load_or_create(&volume, &name).map_err(|error| failed(error.to_string()))?;
        let uid = self.desired.redirection.as_ref().and_then(|redirection| u32::try_from(redirection.proxy_uid).ok());
        for file in [weft_tls::keys::KEY_FILE, weft_tls::keys::CSR_FILE] {
            std::os::unix::fs::chown(volume.join(file), uid, uid).map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    }

    /// Starts a container's process.
    fn launch(&self, container: &Container) -> Result<Child, StartError> {
        let state = self.report.snapshot();
        let proxy = self.shared.config.proxy.as_deref();
        let placed = Placed {
            pod: &self.desired.pod,
            ips: &state.ips,
            dir: &self.dir,
            netns: &state.netns,
            cgroup: &state.cgroup,
            bin_dir: &self.shared.config.bin_dir,
            proxy_dir: proxy.and_then(|proxy| proxy.parent()),
        };
        let spec = container_spec(&placed, container)?;
        cgroup::create(&spec.cgroup)?;
        let log_path = self.dir.join(format!("{}.log", container.name));
        let io = |source| StartError::Files { path: log_path.clone(), source };
        // Later commands in the container start from the same description.
        let description = serde_json::to_vec(&spec).map_err(|error| io(error.into()))?;
        write_atomically(&container_spec_file(&self.dir, &container.name), &description).map_err(io)?;
        let log = OpenOptions::new().create(true).append(true).open(&log_path).map_err(io)?;
        let errors = log.try_clone().map_err(io)?;
        let weft = self.shared.config.bin_dir.join("weft");
        let start_file = self.dir.join(format!(".start-{}.json", container.name));
        let child = container::spawn(&weft, &start_file, &spec, Stdio::null(), log.into(), errors.into())?;
        self.report.container(&container.name, |state| state.pid = child.id());
        Ok(child)
    }

    async fn run_to_completion(&self, container: &Container) -> Result<(), StartError> {
        let mut child = self.launch(container)?;
        let status = child.wait().await.map_err(|error| StartError::Wait(container.name.clone(), error))?;
        self.report.container(&container.name, |state| {
            state.pid = None;
            state.last_exit = Some(describe(status));
        });
        if status.success() { Ok(()) } else { Err(StartError::Init(container.name.clone(), status)) }
    }

    /// Starts a container and keeps it running.
    fn supervise(&self, running: &mut Running, container: &Container, is_sidecar: bool) -> Result<(), StartError> {
        let child = self.launch(container)?;
        let stop = if is_sidecar { &running.stop_sidecars } else { &running.stop_containers };
        let supervisor = Supervisor { pod: self.clone(), container: container.clone(), stop: stop.clone() };
        running.supervisors.spawn(supervisor.run(child));
        Ok(())
    }

    async fn wait_until_started(&self, container: &Container) {
        while !self.probe(container, true).await {
            sleep(PROBE_UNREADY).await;
        }
        if container.name == labels::PROXY_CONTAINER {
            self.report.update(|state, ms| state.times.sidecar_ready_ms = Some(ms));
        }
    }

    async fn probe(&self, container: &Container, at_start: bool) -> bool {
        let probe = if at_start { &container.startup_probe } else { &container.readiness_probe };
        let ip = addresses(self.number)[0];
        probe::succeeds(&self.shared.node_netns, ip, container, probe.as_ref()).await
    }

    /// Watches readiness, renews tokens, and enrols the pod with every agent after `generation`.
    async fn watch(&self, mut generation: u64) {
        let spec = self.desired.pod.spec.clone().unwrap_or_default();
        let sidecars = spec.init_containers.iter().flatten().filter(|container| is_native_sidecar(container));
        let containers: Vec<&Container> = sidecars.chain(&spec.containers).collect();
        let mut renewed = Instant::now();
        loop {
            let ready = self.is_ready(&containers).await;
            if ready != self.report.snapshot().ready {
                self.report.update(|state, ms| {
                    state.ready = ready;
                    state.message = if ready { String::new() } else { "a readiness probe fails".to_owned() };
                    if ready {
                        state.times.ready_ms.get_or_insert(ms);
                    }
                });
            }
            if renewed.elapsed() > TOKEN_LIFETIME / 2 {
                renewed = Instant::now();
                if let Err(error) = prepare_volumes(&self.dir, &self.desired.pod, &self.shared.pki) {
                    tracing::warn!(%error, "tokens are not renewed");
                }
            }
            let pause = if ready { PROBE_READY } else { PROBE_UNREADY };
            tokio::select! {
                () = sleep(pause) => {}
                newer = self.newer_agent(generation) => {
                    generation = newer;
                    self.enrol_again().await;
                }
            }
        }
    }

    /// Waits for an agent that started after this one.
    async fn newer_agent(&self, generation: u64) -> u64 {
        let Some(agent) = &self.shared.agent else { return std::future::pending().await };
        let mut state = agent.state.clone();
        let newer = state.wait_for(|state| state.generation != generation).await.map(|state| state.generation);
        match newer {
            Ok(newer) => newer,
            Err(_) => std::future::pending().await,
        }
    }

    async fn is_ready(&self, containers: &[&Container]) -> bool {
        let state = self.report.snapshot();
        if state
            .containers
            .iter()
            .any(|container| container.pid.is_none() && containers.iter().any(|running| running.name == container.name))
        {
            return false;
        }
        for container in containers {
            if !self.probe(container, false).await {
                return false;
            }
        }
        true
    }

    async fn enrol_again(&self) {
        let Some(redirection) = &self.desired.redirection else { return };
        if let Err(error) = self.intercept(&self.report.snapshot(), redirection).await {
            tracing::error!(pod = %self.report.snapshot().name, %error, "the new agent does not know the pod");
        }
    }

    /// Stops all containers in order and removes the pod's resources from the host.
    async fn end(&self, mut running: Running) {
        self.report.update(|state, _| {
            state.ready = false;
            state.message = "terminating".to_owned();
        });
        let seconds = self.desired.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        let grace = seconds.and_then(|seconds| u64::try_from(seconds).ok()).map_or(GRACE, Duration::from_secs);
        running.stop_containers.cancel();
        let sidecar_count = self.sidecar_count();
        let deadline = Instant::now() + grace;
        // Sidecars serve until the applications are gone.
        while running.supervisors.len() > sidecar_count && Instant::now() < deadline {
            if timeout(deadline - Instant::now(), running.supervisors.join_next()).await.is_err() {
                break;
            }
        }
        running.stop_sidecars.cancel();
        let rest = async { while running.supervisors.join_next().await.is_some() {} };
        let _ = timeout(deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(2)), rest).await;
        running.supervisors.shutdown().await;
        self.kill_processes();
        let state = self.report.snapshot();
        if let (Some(agent), true) = (&self.shared.agent, state.meshed) {
            agent.withdraw(pod_ref(&state)).await;
        }
        if let Err(error) = network::detach_pod(&self.shared.layout, self.number).await {
            tracing::warn!(pod = %state.name, %error, "pod's network is not removed");
        }
        let directory = state.cgroup.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || cgroup::remove(&directory)).await {
            tracing::warn!(pod = %state.name, %error, "pod's cgroup is not removed");
        }
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::debug!(pod = %state.name, %error, "pod's directory is not removed");
        }
        let _ = self.report.events.send((self.number, PodEvent::Gone));
    }

    /// Number of supervisors of sidecars.
    fn sidecar_count(&self) -> usize {
        let spec = self.desired.pod.spec.as_ref();
        let sidecars = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
        sidecars.filter(|container| is_native_sidecar(container)).count()
    }

    fn kill_processes(&self) {
        if let Err(error) = cgroup::kill(&self.report.snapshot().cgroup) {
            tracing::warn!(%error, "pod's processes are not killed");
        }
    }
}

fn pod_ref(state: &PodState) -> PodRef {
    PodRef { namespace: state.namespace.clone(), name: state.name.clone() }
}

fn init_rules(redirection: &Redirection) -> iptables::InitRules {
    let ranges = |ports: &PortSet| -> Vec<String> {
        ports
            .ranges()
            .map(|range| match (range.start(), range.end()) {
                (first, last) if first == last => first.to_string(),
                (first, last) => format!("{first}-{last}"),
            })
            .collect()
    };
    // linkerd-init skips the proxy's own ports whether or not the proxy listens there.
    let mut skip_inbound = redirection.skip_inbound_ports.clone();
    [redirection.control_port, redirection.admin_port].into_iter().for_each(|port| skip_inbound.insert(port..=port));
    iptables::InitRules {
        proxy_uid: u32::try_from(redirection.proxy_uid).unwrap_or(u32::MAX),
        inbound_port: redirection.inbound_port,
        outbound_port: redirection.outbound_port,
        skip_inbound: ranges(&skip_inbound),
        skip_outbound: ranges(&redirection.skip_outbound_ports),
        skip_subnets: redirection.skip_subnets.iter().map(ToString::to_string).collect(),
        ipv6: false,
    }
}
