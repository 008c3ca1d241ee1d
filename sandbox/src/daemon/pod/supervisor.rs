//! Keeps one container running: restarts it when it exits, stops it when the pod is terminated.

use std::{process::ExitStatus, time::Duration};

use k8s_openapi::api::core::v1::Container;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::Child,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::PodLifecycle;

/// Pause before a container's first restart; doubles with each further one, like Kubernetes' crash loop back-off.
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
/// The longest pause: Kubernetes' five minutes.
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// A container that ran this long restarts with the first pause again: Kubernetes' ten minutes.
const BACKOFF_RESET: Duration = Duration::from_secs(600);

/// Keeps one container running.
pub(super) struct Supervisor {
    pub(super) pod: PodLifecycle,
    pub(super) container: Container,
    pub(super) stop: CancellationToken,
}

impl Supervisor {
    pub(super) async fn run(self, mut child: Child) {
        let mut backoff = BACKOFF_FIRST;
        loop {
            let started = Instant::now();
            let status = tokio::select! {
                status = child.wait() => status,
                () = self.stop.cancelled() => {
                    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                    }
                    let _ = child.wait().await;
                    return;
                }
            };
            let last_exit = status.map_or_else(|error| error.to_string(), describe);
            self.pod.report.container(&self.container.name, |state| {
                state.pid = None;
                state.last_exit = Some(last_exit.clone());
            });
            let message = format!("container {} ended ({last_exit}); see `weft sandbox logs`", self.container.name);
            self.pod.report.update(|state, _| {
                state.ready = false;
                state.message = message;
            });
            if started.elapsed() > BACKOFF_RESET {
                backoff = BACKOFF_FIRST;
            }
            loop {
                tokio::select! {
                    () = sleep(backoff) => {}
                    () = self.stop.cancelled() => return,
                }
                backoff = (backoff * 2).min(BACKOFF_MAX);
                match self.pod.launch(&self.container) {
                    Ok(started) => {
                        child = started;
                        break;
                    }
                    Err(error) => self.pod.report.update(|state, _| state.message = error.to_string()),
                }
            }
            self.pod.report.container(&self.container.name, |state| state.restarts += 1);
        }
    }
}

pub(super) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
