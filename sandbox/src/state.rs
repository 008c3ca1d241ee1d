//! The sandbox's state: the daemon writes it to `state.json` after every change, other processes read it.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::config::Config;

/// A running sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Settings that it was started with.
    pub config: Config,
    /// Pid of the daemon.
    pub daemon_pid: u32,
    /// Pid of the agent, while it runs. Changes when the agent is restarted.
    pub agent_pid: Option<u32>,
    /// The agent's gRPC socket, when the sandbox has an agent.
    pub agent_socket: Option<PathBuf>,
    /// The node's network namespace.
    pub node_netns: PathBuf,
    /// The cgroup2 directory of all pods.
    pub kubepods: PathBuf,
    /// Whether everything in the manifests runs and is ready.
    pub ready: bool,
    /// Every pod, the control plane's included.
    pub pods: Vec<PodState>,
    /// Every Service.
    pub services: Vec<ServiceState>,
    /// Faults in the manifests: one line each, with file, line and field. Valid manifests run.
    pub manifest_errors: Vec<String>,
    /// Objects of kinds that Weft or the sandbox does not use: one line each, with file and line.
    // A daemon of an older version does not write it.
    #[serde(default)]
    pub ignored_manifests: Vec<String>,
}

/// A pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PodState {
    /// Its namespace; `default` if the manifest names none.
    pub namespace: String,
    /// Its name; as in Kubernetes, pods of a Deployment have the template's hash and a suffix in theirs.
    pub name: String,
    /// Its unique id.
    pub uid: String,
    /// The pod's addresses, IPv4 first.
    pub ips: Vec<IpAddr>,
    /// Its network namespace, a file under /run/netns.
    pub netns: PathBuf,
    /// Its cgroup2 directory, with a directory for each container.
    pub cgroup: PathBuf,
    /// Whether it has a proxy.
    pub meshed: bool,
    /// What controls it, nearest first, as (kind in small letters, name).
    pub owners: Vec<(String, String)>,
    /// Labels, those that the injector adds included.
    pub labels: BTreeMap<String, String>,
    /// Its ServiceAccount.
    pub service_account: String,
    /// The port of its proxy's metrics.
    pub admin_port: Option<u16>,
    /// The port of its proxy's tap server; `None` where tap is off.
    pub tap_port: Option<u16>,
    /// Whether it is ready: every container started, the sidecar and the probes succeed.
    pub ready: bool,
    /// Why it is not ready; empty if it is.
    pub message: String,
    /// Its containers, sidecars first.
    pub containers: Vec<ContainerState>,
    /// Durations of the steps of its start.
    pub times: PodTimes,
}

/// A container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerState {
    /// Its name, unique within the pod.
    pub name: String,
    /// Pid of its process, while it runs.
    pub pid: Option<u32>,
    /// Number of restarts.
    pub restarts: u32,
    /// How its last process ended, e.g. `exit 64`, `signal 9`.
    pub last_exit: Option<String>,
    /// File with its output.
    pub log: PathBuf,
}

/// Milliseconds since the pod was created from the manifests; `None` until it happens.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct PodTimes {
    /// The network namespace got its addresses.
    pub network_ms: Option<f64>,
    /// The agent enrolled both directions.
    pub enrolled_ms: Option<f64>,
    /// The sidecar's startup probe succeeded.
    pub sidecar_ready_ms: Option<f64>,
    /// The pod became ready.
    pub ready_ms: Option<f64>,
}

/// A Service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceState {
    /// Its namespace; `default` if the manifest names none.
    pub namespace: String,
    /// Its name, the first label of its DNS name.
    pub name: String,
    /// Its cluster IP; `None` if it is headless.
    pub cluster_ip: Option<IpAddr>,
    /// `port/protocol` for each port, as in kubectl.
    pub ports: Vec<String>,
    /// Number of ready endpoints.
    pub endpoints: usize,
}

impl State {
    /// The pod with this name, which may be `NAMESPACE/NAME`, or a prefix that only one pod has.
    #[must_use]
    pub fn pod(&self, name: &str) -> Option<&PodState> {
        let (namespace, name) = match name.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        };
        let here = || self.pods.iter().filter(move |pod| namespace.is_none_or(|namespace| pod.namespace == namespace));
        let mut exact = here().filter(|pod| pod.name == name);
        if let (Some(pod), None) = (exact.next(), exact.next()) {
            return Some(pod);
        }
        let mut similar = here().filter(|pod| pod.name.starts_with(name));
        match (similar.next(), similar.next()) {
            (Some(pod), None) => Some(pod),
            _ => None,
        }
    }

    /// Reads a state file.
    ///
    /// # Errors
    /// When the sandbox does not exist (`NotFound`), or its state cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&fs::read(path)?).map_err(io::Error::from)
    }

    /// Replaces the state file in one step.
    ///
    /// # Errors
    /// When the directory is not writable.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_atomically(path, &serde_json::to_vec_pretty(self)?)
    }
}

/// Writes a file so that readers see the old content or the new, never a part.
///
/// # Errors
/// When the directory is not writable.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    // The leading dot keeps directory watchers from taking the half-written file for a manifest.
    let file_name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{file_name}.new"));
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path)
}
