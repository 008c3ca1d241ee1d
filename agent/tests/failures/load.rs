//! Connections that continue during an event, and their results.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use weft_test_kit::{pod::APPLICATION_UID, world::World};

/// Connections per command; each command's answer is awaited.
const BATCH: usize = 25;
/// Pause between two batches, so that a machine with few processors has time for the agent.
const PAUSE: Duration = Duration::from_millis(2);
/// Ports of one client during the whole test: half of those that it may use.
const LIMIT: usize = 14_000;

/// Clients that connect until they are stopped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    batches: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    /// Meshed clients of a in both families, and one outside the mesh that calls b.
    pub(crate) fn start(world: &World) -> Self {
        Self::of(world, &[("a", "10.99.0.2:8080", 4140), ("a", "[fd99::2]:8080", 4140), ("c", "10.98.0.2:8080", 4143)])
    }

    /// Clients by namespace, target, and the expected listener.
    pub(crate) fn of(world: &World, clients: &[(&str, &str, u16)]) -> Self {
        let (stop, batches) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let start = |&(netns, target, listener): &(&str, &str, u16)| {
            let mut pod = world.pod(netns, APPLICATION_UID);
            let (stop, batches) = (stop.clone(), batches.clone());
            let (command, expected) = (format!("load {target} {BATCH}"), format!("{listener}={BATCH}"));
            thread::spawn(move || {
                let mut wrong = Vec::new();
                for _ in 0..LIMIT / BATCH {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let answer = pod.say(&command);
                    if answer != expected {
                        wrong.push(format!("{command}: {answer}"));
                    }
                    batches.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(PAUSE);
                }
                wrong
            })
        };
        let clients = clients.iter().map(start).collect();
        Self { stop, batches, clients }
    }

    /// Waits until every client has connected again, on average.
    pub(crate) fn goes_on(&self, world: &World) {
        let enough = self.batches.load(Ordering::Relaxed) + 2 * self.clients.len();
        world.eventually("connections", |_| {
            let ended = self.clients.iter().any(JoinHandle::is_finished);
            (ended || self.batches.load(Ordering::Relaxed) >= enough).then_some(())
        });
    }

    /// Ends it. Returns the number of connections, and the errors.
    pub(crate) fn end(self) -> (usize, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let wrong = self.clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        (self.batches.load(Ordering::Relaxed) * BATCH, wrong)
    }

    /// Ends it, and asserts that every connection reached the expected listener.
    pub(crate) fn all_well(self) {
        let (connections, wrong) = self.end();
        assert!(connections > 0, "nobody connected");
        assert!(wrong.is_empty(), "of {connections}: {wrong:#?}");
    }
}
