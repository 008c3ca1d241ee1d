//! A sandbox seen from outside: starting and stopping its daemon, reading its state, running commands in its pods.
//!
//! Owns no state: everything is in the daemon and in its `state.json`.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

use crate::{
    config::{Config, ControlPlane, Layout, RUN_DIR},
    daemon::container_spec_file,
    host::{HostError, container},
    state::{PodState, State},
};

/// How often the state file is read while waiting.
const POLL: Duration = Duration::from_millis(20);
/// How long the daemon may take to clean up: two pod grace periods.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// A sandbox on this host.
#[derive(Debug)]
pub struct Sandbox {
    layout: Layout,
    weft: PathBuf,
    daemon: Option<Child>,
}

/// Why a request to a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no such sandbox.
    #[error(
        "no sandbox `{0}` runs here: start one with `weft sandbox run DIR --sandbox {0}`, or see `weft sandbox list`"
    )]
    NotFound(String),
    /// The state cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ReadState {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The daemon's program does not start.
    #[error("cannot start {}: {source}; `install.sh` installs it, `cargo xtask demo` builds it", path.display())]
    StartDaemon {
        /// Path of the program.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The daemon ended before the sandbox was ready.
    #[error("the sandbox ended ({status}): {log}")]
    DaemonEnded {
        /// Its exit status.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// The mesh is not ready in time.
    #[error("the sandbox is not ready after {}s: {pending}", deadline.as_secs())]
    NotReady {
        /// The deadline that passed.
        deadline: Duration,
        /// What is missing.
        pending: String,
    },
    /// There is no such pod.
    #[error("no pod `{pod}` in sandbox `{sandbox}`, or several: see `weft sandbox ps --sandbox {sandbox}`")]
    NoPod {
        /// The name that was asked for.
        pod: String,
        /// Name of the sandbox.
        sandbox: String,
    },
    /// There is no such container.
    #[error("pod {pod} has no container `{container}`: it has {has}")]
    NoContainer {
        /// Name of the pod.
        pod: String,
        /// The name that was asked for.
        container: String,
        /// Names of its containers.
        has: String,
    },
    /// A command could not be run.
    #[error("cannot run a command in pod {pod}: {source}")]
    Exec {
        /// Name of the pod.
        pod: String,
        /// Error of the system.
        source: io::Error,
    },
    /// An operation on the host failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The daemon does not stop.
    #[error("sandbox `{name}` (pid {pid}) is still cleaning up after {}s", STOP_DEADLINE.as_secs())]
    StillRunning {
        /// Name of the sandbox.
        name: String,
        /// Pid of its daemon.
        pid: u32,
    },
}

impl Sandbox {
    /// Starts a daemon as a child of this process. Dropping the value does not stop it, and it survives this process.
    ///
    /// # Errors
    /// When the program cannot be started. [`Self::wait_ready`] reports whether the mesh comes up.
    pub fn start(config: &Config) -> Result<Self, ClientError> {
        let weft = config.bin_dir.join("weft");
        let layout = config.layout();
        let log = layout.daemon_log();
        let start = || {
            fs::create_dir_all(RUN_DIR)?;
            let log = fs::File::create(&log)?;
            let mut command = Command::new(&weft);
            command.args(["sandbox", "run"]).arg(&config.manifests).args(["--sandbox", &config.name]);
            command.args(["--interception", &config.interception.to_string(), "--log-level", &config.log_level]);
            if let Some(proxy) = &config.proxy {
                command.arg("--proxy").arg(proxy);
            }
            if config.control_plane == ControlPlane::None {
                command.arg("--without-control-plane");
            }
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).spawn()
        };
        let daemon = start().map_err(|source| ClientError::StartDaemon { path: weft.clone(), source })?;
        Ok(Self { layout, weft, daemon: Some(daemon) })
    }

    /// Finds a running sandbox.
    ///
    /// # Errors
    /// [`ClientError::NotFound`] when no sandbox has this name.
    pub fn open(name: &str) -> Result<Self, ClientError> {
        let layout = Layout::of(name);
        let state = read(&layout)?.ok_or_else(|| ClientError::NotFound(name.to_owned()))?;
        Ok(Self { layout, weft: state.config.bin_dir.join("weft"), daemon: None })
    }

    /// The paths of the sandbox's files.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The current state.
    ///
    /// # Errors
    /// [`ClientError::NotFound`] when the sandbox no longer exists.
    pub fn state(&self) -> Result<State, ClientError> {
        read(&self.layout)?.ok_or_else(|| ClientError::NotFound(self.name()))
    }

    /// Waits until everything in the manifests is ready.
    ///
    /// # Errors
    /// When that takes longer than the deadline (the error says what is missing), or the daemon exits first.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<State, ClientError> {
        let give_up = Instant::now() + deadline;
        loop {
            let state = read(&self.layout)?;
            if let Some(state) = &state
                && state.ready
            {
                return Ok(state.clone());
            }
            if let Some(daemon) = &mut self.daemon
                && let Ok(Some(status)) = daemon.try_wait()
            {
                let log = last_lines(&self.layout.daemon_log());
                self.remove_log();
                return Err(ClientError::DaemonEnded { status: status.to_string(), log });
            }
            if Instant::now() > give_up {
                return Err(ClientError::NotReady { deadline, pending: pending(state.as_ref()) });
            }
            sleep(POLL).await;
        }
    }

    /// Runs a command in a pod, as the container's user and in its cgroup, and collects its output.
    ///
    /// `container`: by default the first that is not a sidecar.
    ///
    /// # Errors
    /// When the pod or container does not exist or the command cannot be started. A failing exit status is not an
    /// error.
    pub async fn exec<S: AsRef<OsStr>>(
        &self,
        pod: &str,
        container: Option<&str>,
        argv: &[S],
    ) -> Result<Output, ClientError> {
        let child = self.spawn(pod, container, argv, Stdio::null(), Stdio::piped(), Stdio::piped())?;
        child.wait_with_output().await.map_err(|source| ClientError::Exec { pod: pod.to_owned(), source })
    }

    /// Starts a command in a pod.
    ///
    /// # Errors
    /// As [`Self::exec`].
    pub fn spawn<S: AsRef<OsStr>>(
        &self,
        pod: &str,
        container: Option<&str>,
        argv: &[S],
        stdin: Stdio,
        stdout: Stdio,
        stderr: Stdio,
    ) -> Result<Child, ClientError> {
        let state = self.state()?;
        let pod = self.find(&state, pod)?;
        let container = find_container(pod, container)?;
        let dir = self.layout.pod_dir(&pod.namespace, &pod.name);
        let failed = |source| ClientError::Exec { pod: pod.name.clone(), source };
        let base = fs::read(container_spec_file(&dir, &container)).map_err(failed)?;
        let mut spec: container::Spec = serde_json::from_slice(&base).map_err(io::Error::from).map_err(failed)?;
        spec.argv = argv.iter().map(|argument| argument.as_ref().to_string_lossy().into_owned()).collect();
        // The child reads the file and removes it; unique names let commands run in parallel.
        let file = tempfile::Builder::new().prefix(".exec-").suffix(".json").tempfile_in(&dir).map_err(failed)?;
        let path = file.into_temp_path().keep().map_err(|error| failed(error.error))?;
        Ok(container::spawn(&self.weft, &path, &spec, stdin, stdout, stderr)?)
    }

    /// The environment of a container.
    ///
    /// # Errors
    /// When the pod or container does not exist.
    pub fn environment(&self, pod: &str, container: &str) -> Result<Vec<(String, String)>, ClientError> {
        let state = self.state()?;
        let pod = self.find(&state, pod)?;
        let container = find_container(pod, Some(container))?;
        let failed = |source| ClientError::Exec { pod: pod.name.clone(), source };
        let file = container_spec_file(&self.layout.pod_dir(&pod.namespace, &pod.name), &container);
        let spec: container::Spec =
            serde_json::from_slice(&fs::read(file).map_err(failed)?).map_err(io::Error::from).map_err(failed)?;
        Ok(spec.env)
    }

    /// The file with a container's output.
    ///
    /// # Errors
    /// When the pod or container does not exist.
    pub fn log_path(&self, pod: &str, container: Option<&str>) -> Result<PathBuf, ClientError> {
        let state = self.state()?;
        let pod = self.find(&state, pod)?;
        let name = find_container(pod, container)?;
        let log = pod.containers.iter().find(|container| container.name == name).map(|container| container.log.clone());
        Ok(log.unwrap_or_default())
    }

    /// Stops the sandbox and waits until nothing of it is left.
    ///
    /// # Errors
    /// When it takes longer than a minute.
    pub async fn stop(&mut self) -> Result<(), ClientError> {
        // Only the starter knows a daemon that has not reported yet; its janitor cleans up after one that exited.
        let child = self.daemon.as_ref().and_then(Child::id);
        let pid = read(&self.layout)?.map(|state| state.daemon_pid).or(child).unwrap_or_default();
        if pid != 0 {
            signal(pid, Signal::SIGTERM);
        }
        let give_up = Instant::now() + STOP_DEADLINE;
        while self.layout.run_dir().exists() || self.layout.lock_file().exists() {
            if let Some(daemon) = &mut self.daemon {
                // Reaps the child, so that its pid does not look alive for ever.
                let _ = daemon.try_wait();
            }
            if Instant::now() > give_up {
                return Err(ClientError::StillRunning { name: self.name(), pid });
            }
            sleep(POLL).await;
        }
        self.remove_log();
        Ok(())
    }

    /// Kills the daemon as a crash would (SIGKILL). Its janitor cleans up.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn kill_daemon(&self) -> Result<(), ClientError> {
        signal(self.state()?.daemon_pid, Signal::SIGKILL);
        Ok(())
    }

    fn name(&self) -> String {
        self.layout.run_dir().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn remove_log(&self) {
        // A daemon in the foreground has no such file.
        let _ = fs::remove_file(self.layout.daemon_log());
    }

    fn find<'a>(&self, state: &'a State, pod: &str) -> Result<&'a PodState, ClientError> {
        state.pod(pod).ok_or_else(|| ClientError::NoPod { pod: pod.to_owned(), sandbox: self.name() })
    }
}

/// The sandboxes that run on this host.
///
/// # Errors
/// When their directory cannot be read. A missing directory is not an error.
pub fn list() -> Result<Vec<State>, ClientError> {
    let entries = match fs::read_dir(RUN_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ClientError::ReadState { path: RUN_DIR.into(), source }),
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        found.extend(read(&Layout::of(&entry.file_name().to_string_lossy()))?);
    }
    found.sort_by(|one: &State, other| one.config.name.cmp(&other.config.name));
    Ok(found)
}

/// The state of a sandbox whose daemon lives.
fn read(layout: &Layout) -> Result<Option<State>, ClientError> {
    let path = layout.state_file();
    match State::read(&path) {
        Ok(state) if is_alive(state.daemon_pid) => Ok(Some(state)),
        Ok(_) => Ok(None),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(source) => Err(ClientError::ReadState { path, source }),
    }
}

fn find_container(pod: &PodState, wanted: Option<&str>) -> Result<String, ClientError> {
    let names: Vec<&str> = pod.containers.iter().map(|container| container.name.as_str()).collect();
    let found = match wanted {
        Some(wanted) => names.iter().find(|name| **name == wanted),
        None => names.iter().find(|name| **name != weft_k8s_api::labels::PROXY_CONTAINER),
    };
    found.map(|name| (*name).to_owned()).ok_or_else(|| ClientError::NoContainer {
        pod: pod.name.clone(),
        container: wanted.unwrap_or_default().to_owned(),
        has: names.join(", "),
    })
}

fn pending(state: Option<&State>) -> String {
    let Some(state) = state else { return "the daemon has not reported yet".to_owned() };
    let waiting = state.pods.iter().filter(|pod| !pod.ready);
    let lines: Vec<String> = waiting.map(|pod| format!("{}/{}: {}", pod.namespace, pod.name, pod.message)).collect();
    if lines.is_empty() { "no pod is waiting".to_owned() } else { lines.join("; ") }
}

fn is_alive(pid: u32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
}

fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        // A process that has already exited is not an error.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

fn last_lines(log: &Path) -> String {
    const LINES: usize = 5;
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("; ")
}
