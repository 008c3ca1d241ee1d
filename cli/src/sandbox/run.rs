//! `weft sandbox run`: the daemon in the foreground, or a child in the background.
//!
//! Pods that become ready are printed on standard output; logs go to standard error. The first SIGINT or SIGTERM ends
//! the sandbox in order, the second one at once: then the janitor cleans up.

use std::{collections::BTreeMap, fs, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use weft_sandbox::{
    client::{ClientError, Sandbox},
    config::{Config, ControlPlane},
    daemon,
    state::{PodState, State},
};

use super::{RunArgs, ps};
use crate::output::{self, Format, progress};

/// Longest wait of `--detach`. Generous: pods start within seconds, but a busy host may take longer.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// How the message of a starting pod begins.
const STARTING: &str = ": waiting for ";
/// Exit status of a command that Ctrl-C ended, as in shells.
const INTERRUPTED: u8 = 130;

pub(super) async fn execute(args: RunArgs) -> Result<ExitCode> {
    let config = config(&args)?;
    if args.detach {
        return detached(&config, args.output).await;
    }
    let filter = EnvFilter::try_new(&config.log_level).with_context(|| {
        format!("`{}` is not a log filter: expected e.g. `info` or `warn,weft=debug`", args.log_level)
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(output::colour::on_stderr())
        .with_writer(std::io::stderr)
        .init();
    let shutdown = shutdown()?;
    let mut progress = Progress::new(args.output);
    daemon::run(config, shutdown, |state| progress.show(state)).await?;
    Ok(ExitCode::SUCCESS)
}

fn config(args: &RunArgs) -> Result<Config> {
    let weft = std::env::current_exe().context("find the directory of this program")?;
    let bin_dir = weft.parent().map(PathBuf::from).unwrap_or_default();
    // Absolute, because containers start in another directory, and `weft sandbox list` may be called from one.
    let manifests = fs::canonicalize(&args.dir)
        .with_context(|| format!("cannot read manifests in {}; expected a directory", args.dir.display()))?;
    let mut config = Config::new(&args.sandbox.name, manifests, bin_dir)?;
    config.interception = args.interception;
    if let Some(proxy) = &args.proxy {
        let found = fs::canonicalize(proxy)
            .with_context(|| format!("cannot find the proxy {}; --proxy takes a path", proxy.display()))?;
        config.proxy = Some(found);
    }
    if args.without_control_plane {
        config.control_plane = ControlPlane::None;
    }
    config.log_level.clone_from(&args.log_level);
    Ok(config)
}

async fn detached(config: &Config, format: Format) -> Result<ExitCode> {
    let name = &config.name;
    if let Ok(running) = Sandbox::open(name) {
        let pid = running.state()?.daemon_pid;
        bail!("sandbox `{name}` runs already (pid {pid}): stop it with `weft sandbox stop --sandbox {name}`");
    }
    let mut interrupted = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminated = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut sandbox = Sandbox::start(config)?;
    let ready = tokio::select! {
        ready = progress::during("the pods of the sandbox", sandbox.wait_ready(READY_WITHIN)) => Some(ready),
        _ = interrupted.recv() => None,
        _ = terminated.recv() => None,
    };
    match ready {
        // There is no terminal to report to.
        None => {
            sandbox.stop().await?;
            Ok(ExitCode::from(INTERRUPTED))
        }
        Some(Ok(state)) => {
            print_ready(&state, format)?;
            // The daemon's log has them too, but users do not look at it while everything seems fine.
            if format == Format::Table
                && let Some(faults) = ps::faults_below(&state)
            {
                output::line(&faults)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Some(Err(error @ ClientError::NotReady { .. })) => {
            if let Ok(state) = sandbox.state() {
                ps::faults(&state).iter().for_each(|fault| output::note(fault));
            }
            Err(anyhow!(
                "{error}; it goes on running: see `weft sandbox ps --sandbox {name}` and {}, or stop it with \
                 `weft sandbox stop --sandbox {name}`",
                config.layout().daemon_log().display()
            ))
        }
        Some(Err(error)) => Err(error.into()),
    }
}

fn print_ready(state: &State, format: Format) -> Result<()> {
    match format.data() {
        Some(data) => data.print(state),
        None => ps::overview(state),
    }
}

/// Completes at the first SIGINT or SIGTERM. Signals are caught from this call on.
fn shutdown() -> Result<impl Future<Output = ()> + use<>> {
    let mut interrupted = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminated = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    Ok(async move {
        either(&mut interrupted, &mut terminated).await;
        tracing::info!("stopping; again to stop at once");
        tokio::spawn(async move {
            either(&mut interrupted, &mut terminated).await;
            std::process::exit(i32::from(INTERRUPTED));
        });
    })
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}

/// What was printed on standard output so far.
struct Progress {
    format: Format,
    /// The last line about each pod.
    pods: BTreeMap<String, String>,
    /// Errors in manifests and ignored objects.
    faults: Vec<String>,
    introduced: bool,
    ready: bool,
}

impl Progress {
    fn new(format: Format) -> Self {
        Self { format, pods: BTreeMap::new(), faults: Vec::new(), introduced: false, ready: false }
    }

    fn show(&mut self, state: &State) {
        let lines = self.changes(state);
        if self.format == Format::Table {
            for line in &lines {
                say(output::line(line).map_err(Into::into));
            }
        }
        let became_ready = state.ready && !self.ready;
        self.ready = state.ready;
        if !became_ready {
            return;
        }
        if self.introduced {
            if self.format == Format::Table {
                say(output::line(&format!("all {} pods are ready", state.pods.len())).map_err(Into::into));
            }
            return;
        }
        self.introduced = true;
        if self.format == Format::Table {
            say(output::line("").map_err(Into::into));
        }
        say(print_ready(state, self.format));
    }

    /// A line for every pod whose readiness changed since the last call, and for every new fault of a manifest.
    fn changes(&mut self, state: &State) -> Vec<String> {
        let mut lines = Vec::new();
        let faults = ps::faults(state);
        lines.extend(faults.iter().filter(|fault| !self.faults.contains(*fault)).cloned());
        self.faults = faults;
        let mut now = BTreeMap::new();
        for pod in &state.pods {
            now.insert(format!("{}/{}", pod.namespace, pod.name), describe(pod));
        }
        for (pod, line) in &now {
            let before = self.pods.get(pod).map_or("", String::as_str);
            // A starting pod waits for several things, which is not worth a line.
            let starting = line.contains(STARTING) && !before.starts_with("ready");
            if !line.is_empty() && before != line && !starting {
                lines.push(line.clone());
            }
        }
        for pod in self.pods.keys().filter(|pod| !now.contains_key(*pod)) {
            lines.push(format!("gone     {pod}"));
        }
        self.pods = now;
        lines
    }
}

/// The mesh continues if nobody reads its output.
fn say(result: Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "cannot write to standard output");
    }
}

/// Empty for a pod that just started.
fn describe(pod: &PodState) -> String {
    let name = format!("{}/{}", pod.namespace, pod.name);
    if pod.ready {
        let kind = if pod.meshed { "meshed" } else { "not meshed" };
        let after = pod.times.ready_ms.map(|ms| format!(" after {ms:.0} ms")).unwrap_or_default();
        format!("ready    {name} ({kind}){after}")
    } else if pod.message.is_empty() {
        String::new()
    } else {
        format!("waiting  {name}: {}", pod.message)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fixture, *};

    fn state(ready: bool, message: &str) -> State {
        State { ready, ..fixture::state("default", vec![fixture::pod(ready, message)]) }
    }

    #[test]
    fn each_change_is_printed_once() {
        let mut progress = Progress::new(Format::Table);
        assert!(progress.changes(&state(false, "")).is_empty());
        assert_eq!(
            progress.changes(&state(false, "container web ended")),
            ["waiting  shop/web-0: container web ended"]
        );
        assert!(progress.changes(&state(false, "container web ended")).is_empty());
        assert_eq!(progress.changes(&state(true, "")), ["ready    shop/web-0 (meshed)"]);
        let mut empty = state(true, "");
        empty.pods.clear();
        assert_eq!(progress.changes(&empty), ["gone     shop/web-0"]);
    }

    #[test]
    fn waiting_is_reported_only_for_a_pod_that_was_ready() {
        let mut progress = Progress::new(Format::Table);
        assert!(progress.changes(&state(false, "waiting for its network")).is_empty());
        assert!(progress.changes(&state(false, "waiting for its readiness probes")).is_empty());
        assert_eq!(progress.changes(&state(true, "")).len(), 1);
        let again = progress.changes(&state(false, "waiting for container web"));
        assert_eq!(again, ["waiting  shop/web-0: waiting for container web"]);
    }

    #[test]
    fn an_error_in_a_manifest_is_printed_once_and_again_when_it_returns() {
        let mut progress = Progress::new(Format::Table);
        let mut broken = state(false, "");
        broken.manifest_errors.push("a.yaml:3: no kind".to_owned());
        assert_eq!(progress.changes(&broken), ["manifest a.yaml:3: no kind"]);
        assert!(progress.changes(&broken).is_empty());
        assert!(progress.changes(&state(false, "")).is_empty());
        assert_eq!(progress.changes(&broken).len(), 1);
        broken.ignored_manifests.push("b.yaml:1: CronJob j".to_owned());
        assert_eq!(progress.changes(&broken), ["ignored  b.yaml:1: CronJob j"]);
    }
}
