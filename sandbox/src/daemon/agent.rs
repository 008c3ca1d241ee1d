//! The agent's process, and the sandbox's requests to it.
//!
//! Owns supervision: an agent that exits is restarted, as its DaemonSet would do, and every pod is enrolled again.

use std::{
    fs::OpenOptions,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    process::{Child, Command},
    sync::watch,
    time::{sleep, timeout},
};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;
use weft_k8s_api::{
    inject::{Exemption, Redirection},
    labels,
};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, PodRef, PortRange, StatusRequest, WithdrawRequest, pods_client::PodsClient,
    status_client::StatusClient,
};

use crate::config::Config;

/// Deadline for a starting agent to serve.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// Deadline for the agent's answer to a call.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// How often a starting agent is polled.
const POLL: Duration = Duration::from_millis(10);
/// Pause before a dead agent is restarted.
const RESTART_PAUSE: Duration = Duration::from_millis(200);

/// State of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AgentState {
    /// Number of agent starts; pods are enrolled again when it changes.
    pub(super) generation: u64,
    /// Pid of the agent, while it serves.
    pub(super) pid: Option<u32>,
}

/// A handle to the agent. Clones share the agent.
#[derive(Clone)]
pub(super) struct Agent {
    pub(super) state: watch::Receiver<AgentState>,
    channel: Channel,
}

/// Why the agent does not serve, or refuses a call.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its program could not be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// Path of the program.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// It exited, or did not serve in time.
    #[error("the agent does not serve ({reason}); its log says: {log}")]
    NotServing {
        /// How it exited.
        reason: String,
        /// The end of its log.
        log: String,
    },
    /// It refused a call.
    #[error("the agent refused pod {pod}: {status}")]
    Refused {
        /// Name of the pod.
        pod: String,
        /// The agent's answer.
        status: String,
    },
}

/// Starts an agent, waits until it serves, and returns the handle and its supervisor.
pub(super) async fn start(
    config: Arc<Config>,
    cgroup2: &Path,
) -> Result<(Agent, impl Future<Output = ()> + Send + use<>), AgentError> {
    let layout = config.layout();
    let socket = layout.agent_socket();
    let channel = connect(socket.clone());
    let (state_tx, state) = watch::channel(AgentState::default());
    let own_cgroup = cgroup2.join(layout.cgroup()).join("node");
    let kubepods = cgroup2.join(layout.kubepods());
    let launch = Launch { config, own_cgroup, kubepods, channel: channel.clone() };
    let mut child = launch.start().await?;
    state_tx.send_modify(|state| *state = AgentState { generation: 1, pid: child.id() });
    let supervise = async move {
        loop {
            let status = child.wait().await;
            tracing::warn!(?status, "the agent exited; restarting it");
            state_tx.send_modify(|state| state.pid = None);
            loop {
                sleep(RESTART_PAUSE).await;
                match launch.start().await {
                    Ok(started) => {
                        child = started;
                        break;
                    }
                    Err(error) => tracing::error!(%error, "cannot restart the agent"),
                }
            }
            state_tx.send_modify(|state| *state = AgentState { generation: state.generation + 1, pid: child.id() });
        }
    };
    Ok((Agent { state, channel }, supervise))
}

struct Launch {
    config: Arc<Config>,
    own_cgroup: PathBuf,
    kubepods: PathBuf,
    channel: Channel,
}

impl Launch {
    async fn start(&self) -> Result<Child, AgentError> {
        let layout = self.config.layout();
        let path = self.config.bin_dir.join("weft-agent");
        let spawn = || -> io::Result<Child> {
            let log = OpenOptions::new().create(true).append(true).open(layout.agent_log())?;
            let mut command = Command::new(&path);
            command.arg("run").arg("--socket").arg(layout.agent_socket()).arg("--pin-dir").arg(layout.pin_dir());
            command.arg("--cgroup").arg(&self.kubepods);
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).kill_on_drop(true);
            command.spawn()
        };
        let mut child = spawn().map_err(|source| AgentError::Start { path: path.clone(), source })?;
        if let Some(pid) = child.id() {
            // So that the janitor finds it. If the process has already exited, that is reported below.
            let _ = std::fs::write(self.own_cgroup.join("cgroup.procs"), pid.to_string());
        }
        let serving = async {
            loop {
                if StatusClient::new(self.channel.clone()).get(StatusRequest {}).await.is_ok() {
                    return;
                }
                sleep(POLL).await;
            }
        };
        let reason = tokio::select! {
            () = serving => return Ok(child),
            status = child.wait() => status.map_or_else(|error| error.to_string(), |status| status.to_string()),
            () = sleep(START_DEADLINE) => format!("no answer for {}s", START_DEADLINE.as_secs()),
        };
        let log = std::fs::read_to_string(layout.agent_log()).unwrap_or_default();
        let log = log.lines().last().unwrap_or("nothing").to_owned();
        Err(AgentError::NotServing { reason, log })
    }
}

impl Agent {
    /// Enrols a pod; returns when its traffic is intercepted.
    pub(super) async fn enrol(
        &self,
        pod: PodRef,
        uid: &str,
        netns: &Path,
        ips: &[std::net::IpAddr],
        redirection: &Redirection,
    ) -> Result<EnrolResponse, AgentError> {
        let name = format!("{}/{}", pod.namespace, pod.name);
        let ranges = |ports: &weft_k8s_api::ports::PortSet| -> Vec<PortRange> {
            ports
                .ranges()
                .map(|range| PortRange { first: (*range.start()).into(), last: (*range.end()).into() })
                .collect()
        };
        let request = EnrolRequest {
            pod: Some(pod),
            uid: uid.to_owned(),
            netns_path: netns.display().to_string(),
            ips: ips.iter().map(ToString::to_string).collect(),
            proxy_uid: u32::try_from(redirection.proxy_uid).unwrap_or(u32::MAX),
            outbound_port: redirection.outbound_port.into(),
            inbound_port: redirection.inbound_port.into(),
            skip_outbound_ports: ranges(&redirection.skip_outbound_ports),
            skip_inbound_ports: ranges(&redirection.skip_inbound_ports),
            skip_subnets: redirection.skip_subnets.iter().map(ToString::to_string).collect(),
            proxy_gid: redirection.proxy_gid.map_or(0, |gid| u32::try_from(gid).unwrap_or(u32::MAX)),
            proxy_cgroup: 0,
            bypass: redirection.bypass,
            control_port: redirection.control_port.into(),
            admin_port: redirection.admin_port.into(),
        };
        let mut client = PodsClient::new(self.channel.clone());
        let refused = |status: String| AgentError::Refused { pod: name.clone(), status };
        if redirection.exemption == Exemption::Cgroup {
            let annotation = labels::PROXY_EXEMPTION;
            return Err(refused(format!("{annotation}: a sandbox recognises proxies by their user only; use `user`")));
        }
        match timeout(CALL_DEADLINE, client.enrol(request)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(refused(format!("{}: {}", status.code(), status.message()))),
            Err(_) => Err(refused(format!("no answer for {}s", CALL_DEADLINE.as_secs()))),
        }
    }

    /// Withdraws a pod.
    pub(super) async fn withdraw(&self, pod: PodRef) {
        let mut client = PodsClient::new(self.channel.clone());
        // An agent that does not answer removes pods without a namespace by itself.
        let _ = timeout(CALL_DEADLINE, client.withdraw(WithdrawRequest { pod: Some(pod) })).await;
    }
}

/// A channel to a unix socket, which connects and reconnects on demand.
fn connect(socket: PathBuf) -> Channel {
    let dial = service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The URI is never resolved: the connector has the path.
    Endpoint::from_static("http://agent").connect_with_connector_lazy(dial)
}
