//! Prints the kernel's verdicts while requests run, from the agent's trace.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;
use weft_proto::agent::{Direction, Event, WatchRequest};
use weft_test_kit::agent::Agent;

/// Maximum number of verdicts printed per step; all are counted.
const SHOWN_PER_STEP: u64 = 6;

/// A running trace.
pub(super) struct Trace {
    counts: Arc<Counts>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Counts {
    all: AtomicU64,
    step: AtomicU64,
}

impl Trace {
    /// Watches everything from now on.
    pub(super) async fn start(agent: &Agent) -> anyhow::Result<Self> {
        let mut events = agent.watch(WatchRequest::default()).await?;
        let counts = Arc::new(Counts::default());
        let task: JoinHandle<()> = tokio::spawn({
            let counts = Arc::clone(&counts);
            async move {
                // The stream ends with the agent; the trace is only printed, and nothing depends on it.
                while let Ok(Some(event)) = events.message().await {
                    counts.all.fetch_add(1, Ordering::Relaxed);
                    if counts.step.fetch_add(1, Ordering::Relaxed) < SHOWN_PER_STEP {
                        println!("    kernel  {}", line(&event));
                    }
                }
            }
        });
        Ok(Self { counts, _task: AbortOnDropHandle::new(task) })
    }

    /// Ends a step: prints how many verdicts were not shown, and shows the first ones of the next step again.
    pub(super) fn end_step(&self) {
        let seen = self.counts.step.swap(0, Ordering::Relaxed);
        if seen > SHOWN_PER_STEP {
            println!("    kernel  ... and {} more", seen - SHOWN_PER_STEP);
        }
    }

    /// Verdicts seen so far.
    pub(super) fn seen(&self) -> u64 {
        self.counts.all.load(Ordering::Relaxed)
    }
}

/// One verdict in readable form: pod, command, original destination, new destination, reason.
fn line(event: &Event) -> String {
    let pod = event.pod.clone().unwrap_or_default();
    let (direction, command) = match event.direction() {
        Direction::Inbound => ("in ", event.source.clone()),
        _ => ("out", format!("{}[{}]", event.command, event.pid)),
    };
    format!(
        "{direction} {}/{} {command} {} -> {} {}",
        pod.namespace, pod.name, event.original_destination, event.new_destination, event.verdict
    )
}

#[cfg(test)]
mod tests {
    use weft_proto::agent::PodRef;

    use super::*;

    #[test]
    fn an_event_is_one_readable_line() {
        let event = Event {
            pod: Some(PodRef { namespace: "shop".to_owned(), name: "client-0".to_owned() }),
            direction: Direction::Outbound.into(),
            pid: 7,
            command: "curl".to_owned(),
            original_destination: "10.96.0.5:80".to_owned(),
            new_destination: "127.0.0.1:4140".to_owned(),
            verdict: "redirect".to_owned(),
            ..Event::default()
        };
        assert_eq!(line(&event), "out shop/client-0 curl[7] 10.96.0.5:80 -> 127.0.0.1:4140 redirect");
    }
}
