//! A running sandbox with its manifests, and requests from inside its pods.
//!
//! The code that starts a [`Mesh`] stops it; if it is dropped instead, because a test failed or was killed, the sandbox
//! cleans up after itself.

mod guard;
mod http;
mod shared;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use weft_examples::client::Report;
pub use weft_sandbox::config::{ControlPlane, Interception};
use weft_sandbox::{
    client::Sandbox,
    config::Config,
    state::{PodState, State},
};

use crate::{agent::Agent, binaries, manifests::Manifests, metrics::Metrics};
use guard::Guard;
pub use shared::{Kept, Shared};

/// Time limit for every pod of the example to become ready, on a slow and busy machine too.
const READY_WITHIN: Duration = Duration::from_secs(90);
/// The proxy's admin port in every pod.
const ADMIN_PORT: u16 = 4191;

/// Options of a mesh.
#[derive(Clone, Debug)]
pub struct Options {
    /// The sandbox's name; see [`unique_name`].
    pub name: String,
    /// How connections reach the proxies.
    pub interception: Interception,
    /// The sidecar's program in place of `weft-proxy`.
    pub proxy: Option<PathBuf>,
    /// Whether there is a control plane.
    pub control_plane: ControlPlane,
    /// The directory of every program of the product, in place of the running program's.
    pub programs: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: unique_name("mesh"),
            interception: Interception::Ebpf,
            proxy: None,
            control_plane: ControlPlane::Weft,
            programs: None,
        }
    }
}

/// A pod of the mesh.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its namespace, within which its name is unique.
    pub namespace: String,
    /// Its name, with the template's hash and a suffix if a Deployment controls it.
    pub name: String,
    /// Its IPv4 address.
    pub ip: String,
    /// Its IPv6 address, where it has one.
    pub ipv6: Option<String>,
    /// Its network namespace.
    pub netns: PathBuf,
    /// Whether it has a proxy.
    pub meshed: bool,
    /// Time from the decision to run it until its proxy is ready, milliseconds.
    pub ready_ms: Option<u64>,
}

/// A running sandbox.
#[derive(Debug)]
pub struct Mesh {
    name: String,
    sandbox: Sandbox,
    manifests: Manifests,
    guard: Guard,
}

/// A name that nothing else on this host uses: a prefix, the process id, and the time of the first name plus one for
/// each further one, because tests that begin together may ask within a microsecond.
pub fn unique_name(prefix: &str) -> String {
    static FIRST: LazyLock<u32> =
        LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_micros());
    static NAMES: AtomicU32 = AtomicU32::new(0);
    let number = *FIRST + NAMES.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{:x}-{number:x}", std::process::id())
}

impl Mesh {
    /// Starts a sandbox from these manifests and waits until every pod is ready.
    ///
    /// # Errors
    /// A program is missing, the sandbox does not start, or a pod does not become ready; the error names it and the
    /// reason.
    pub async fn start(manifests: Manifests, options: Options) -> anyhow::Result<Self> {
        let programs = options.programs.map_or_else(binaries::directory, Ok)?;
        let mut config = Config::new(&options.name, manifests.path(), programs)?;
        config.interception = options.interception;
        config.proxy = options.proxy;
        config.control_plane = options.control_plane;
        let guard = Guard::watch(&config.bin_dir.join("weft"), &config.layout(), &config.name, manifests.path())
            .context("start a guard")?;
        let sandbox = Sandbox::start(&config).context("start the sandbox")?;
        let mut mesh = Self { name: options.name, sandbox, manifests, guard };
        if let Err(error) = mesh.sandbox.wait_ready(READY_WITHIN).await {
            let pods = mesh.unready_pods();
            mesh.stop().await.context("clean up after a failed start")?;
            return Err(error).with_context(|| format!("the mesh did not become ready: {pods}"));
        }
        Ok(mesh)
    }

    /// The sandbox's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The manifests it runs from; edits take effect.
    pub fn manifests(&self) -> &Manifests {
        &self.manifests
    }

    /// Stops it and removes everything that it created.
    ///
    /// # Errors
    /// Something could not be removed.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.sandbox.stop().await.context("stop the sandbox")?;
        self.guard.dismiss();
        Ok(())
    }

    /// Kills the sandbox's daemon, as a crash would; its janitor removes what it created.
    ///
    /// # Errors
    /// There is no daemon.
    pub fn crash(self) -> anyhow::Result<()> {
        self.sandbox.kill_daemon()?;
        self.guard.dismiss();
        Ok(())
    }

    /// Keeps it running without this process, and returns the directory of its manifests.
    pub fn keep(self) -> PathBuf {
        self.guard.dismiss();
        self.manifests.keep()
    }

    /// Every pod, the control plane's included.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn pods(&self) -> anyhow::Result<Vec<Pod>> {
        Ok(self.state()?.pods.iter().map(Pod::from).collect())
    }

    /// The pod with this name.
    ///
    /// # Errors
    /// There is no such pod.
    pub async fn pod(&self, namespace: &str, name: &str) -> anyhow::Result<Pod> {
        let pods = self.pods().await?;
        let found = pods.into_iter().find(|pod| pod.namespace == namespace && pod.name == name);
        found.with_context(|| format!("there is no pod {namespace}/{name}"))
    }

    /// The name of the first pod of an app: the pod itself, or the first replica of a Deployment.
    ///
    /// # Errors
    /// The app has no pod.
    pub async fn pod_of(&self, namespace: &str, app: &str) -> anyhow::Result<String> {
        let replica = format!("{app}-");
        let pods = self.pods().await?.into_iter().filter(|pod| pod.namespace == namespace);
        let mut names: Vec<_> =
            pods.map(|pod| pod.name).filter(|name| name == app || name.starts_with(&replica)).collect();
        names.sort();
        names.into_iter().next().with_context(|| format!("there is no pod of {namespace}/{app}"))
    }

    /// Runs a command in a pod's network namespace and cgroup, as `kubectl exec` would.
    ///
    /// # Errors
    /// The command could not be started; its own failure is in the output.
    pub async fn exec(&self, namespace: &str, pod: &str, command: &[&str]) -> anyhow::Result<Output> {
        let pod = format!("{namespace}/{pod}");
        self.sandbox.exec(&pod, None, command).await.with_context(|| format!("run {} in {pod}", command.join(" ")))
    }

    /// Runs `weft-client` with these arguments in a pod, and reads its report.
    ///
    /// # Errors
    /// The client printed no report; failed requests are in the report.
    pub async fn load(&self, namespace: &str, pod: &str, arguments: &[&str]) -> anyhow::Result<Report> {
        let command = [&["weft-client"], arguments, &["--json"]].concat();
        let output = self.exec(namespace, pod, &command).await?;
        report(&output).with_context(|| format!("{} in {namespace}/{pod}", command.join(" ")))
    }

    /// The same load until something else has happened, whose outcome is returned as well.
    ///
    /// # Errors
    /// As [`Mesh::load`].
    pub async fn load_during<T>(
        &self,
        namespace: &str,
        pod: &str,
        arguments: &[&str],
        happens: impl Future<Output = T>,
    ) -> anyhow::Result<(Report, T)> {
        let pod = format!("{namespace}/{pod}");
        let command = [&["weft-client"], arguments, &["--until-eof", "--json"]].concat();
        let client = self.sandbox.spawn(&pod, None, &command, Stdio::piped(), Stdio::piped(), Stdio::piped())?;
        let outcome = happens.await;
        // This closes the client's standard input, which ends the load.
        let output = client.wait_with_output().await?;
        let report = report(&output).with_context(|| format!("{} in {pod}", command.join(" ")))?;
        Ok((report, outcome))
    }

    /// Repeats a load until this many pods have answered, or `within` has passed, and adds the reports up. A balancer
    /// that prefers fast replicas avoids one for a while after a slow answer, so no number of requests would be enough.
    ///
    /// # Errors
    /// As [`Mesh::load`].
    pub async fn load_all(
        &self,
        namespace: &str,
        pod: &str,
        arguments: &[&str],
        replicas: usize,
        within: Duration,
    ) -> anyhow::Result<Report> {
        let started = Instant::now();
        let mut report = self.load(namespace, pod, arguments).await?;
        while report.by_backend.len() < replicas && report.failures == 0 && started.elapsed() < within {
            report.absorb(&self.load(namespace, pod, arguments).await?);
        }
        Ok(report)
    }

    /// A connection to the agent that runs now.
    ///
    /// # Errors
    /// No agent answers.
    pub async fn agent(&self) -> anyhow::Result<Agent> {
        let socket = self.state()?.agent_socket.context("this sandbox has no agent")?;
        Agent::connect(&socket).await.with_context(|| format!("connect to the agent at {}", socket.display()))
    }

    /// Kills the agent with SIGKILL and returns its process id.
    ///
    /// # Errors
    /// No agent answers, or it cannot be killed.
    pub async fn kill_agent(&self) -> anyhow::Result<u32> {
        let pid = self.state()?.agent_pid.context("no agent runs")?;
        let target = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
        nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGKILL).context("kill the agent")?;
        Ok(pid)
    }

    /// The process of an agent that is not `old` and answers, with every meshed pod in both directions.
    ///
    /// # Errors
    /// There is no such process yet.
    pub async fn agent_after(&self, old: u32) -> anyhow::Result<u32> {
        let pid = self.state()?.agent_pid.filter(|pid| *pid != old).context("no new agent runs")?;
        let status = self.agent().await?.status().await?;
        let meshed = self.pods().await?.iter().filter(|pod| pod.meshed).count();
        let enrolled = status.pods.iter().filter(|pod| pod.outbound && pod.inbound).count();
        anyhow::ensure!(enrolled == meshed, "{enrolled} of {meshed} meshed pods are enrolled");
        Ok(pid)
    }

    /// The metrics of a pod's proxy.
    ///
    /// # Errors
    /// The pod has no proxy, or it does not answer.
    pub async fn metrics(&self, namespace: &str, pod: &str) -> anyhow::Result<Metrics> {
        Ok(Metrics::parse(&self.admin(namespace, pod, "/metrics").await?))
    }

    /// The metrics of the proxies of all pods of an app, together.
    ///
    /// # Errors
    /// As [`Mesh::metrics`].
    pub async fn metrics_of(&self, namespace: &str, app: &str) -> anyhow::Result<Metrics> {
        let replica = format!("{app}-");
        let mut all = Metrics::default();
        for pod in self.pods().await? {
            if pod.namespace == namespace && (pod.name == app || pod.name.starts_with(&replica)) {
                all.extend(self.metrics(namespace, &pod.name).await?);
            }
        }
        Ok(all)
    }

    /// The body of the proxy's answer on its admin port.
    ///
    /// # Errors
    /// The pod has no proxy, or it does not answer 200.
    pub async fn admin(&self, namespace: &str, pod: &str, path: &str) -> anyhow::Result<String> {
        let netns = self.pod(namespace, pod).await?.netns;
        let path = path.to_owned();
        let answer = tokio::task::spawn_blocking(move || http::get(&netns, ADMIN_PORT, &path)).await?;
        answer.with_context(|| format!("ask the proxy of {namespace}/{pod}"))
    }

    /// The cluster IPs of all Services.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn service_ips(&self) -> anyhow::Result<BTreeSet<String>> {
        Ok(self.state()?.services.iter().filter_map(|service| Some(service.cluster_ip?.to_string())).collect())
    }

    /// The sandbox's errors about its manifests, one line each.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub fn manifest_errors(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.state()?.manifest_errors)
    }

    /// The status of the sandbox.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub fn state(&self) -> anyhow::Result<State> {
        Ok(self.sandbox.state()?)
    }

    fn unready_pods(&self) -> String {
        let Ok(state) = self.state() else { return "the sandbox is gone".to_owned() };
        let unready = state.pods.iter().filter(|pod| !pod.ready);
        let mut lines: Vec<_> =
            unready.map(|pod| format!("{}/{}: {}{}", pod.namespace, pod.name, pod.message, log_tail(pod))).collect();
        lines.extend(state.manifest_errors);
        lines.join("; ")
    }
}

impl Pod {
    /// All its addresses.
    pub fn addresses(&self) -> Vec<String> {
        std::iter::once(self.ip.clone()).chain(self.ipv6.clone()).collect()
    }

    /// Whether this is one of its addresses.
    pub fn has(&self, ip: &str) -> bool {
        self.ip == ip || self.ipv6.as_deref() == Some(ip)
    }
}

/// What `weft-client` has printed.
fn report(output: &Output) -> anyhow::Result<Report> {
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("it printed no report: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// The last line of each container's log: the reason why a pod is not ready.
fn log_tail(pod: &PodState) -> String {
    let last = |path: &Path| -> io::Result<Option<String>> {
        Ok(fs::read_to_string(path)?.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned))
    };
    let lines = pod.containers.iter().filter_map(|container| {
        let line = last(&container.log).ok()??;
        Some(format!(" [{}: {line}]", container.name))
    });
    lines.collect()
}

impl From<&PodState> for Pod {
    fn from(pod: &PodState) -> Self {
        let address = |v4: bool| pod.ips.iter().find(|ip| ip.is_ipv4() == v4).map(ToString::to_string);
        let times = pod.times;
        Self {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            ip: address(true).unwrap_or_default(),
            ipv6: address(false),
            netns: pod.netns.clone(),
            meshed: pod.meshed,
            // Rounded up, so that a ready pod never counts as zero.
            ready_ms: times.sidecar_ready_ms.or(times.ready_ms).map(|time| time.ceil() as u64),
        }
    }
}
