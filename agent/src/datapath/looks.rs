//! Turns to look at pods on the node. A look takes time for what a pod has: processes, addresses, listeners. A node has
//! few processors, so that few looks happen at a time. Pods that have tens of thousands of these have one turn
//! together: they delay each other and no other pod.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::spawn_blocking,
};

/// Pods that are looked at concurrently.
const LOOKS: usize = 4;
/// Pods whose look took long that are looked at concurrently.
const LONG_LOOKS: usize = 1;
/// Processor time of a look that took long: tens of times as much as a usual pod's.
const LONG: Duration = Duration::from_millis(50);
/// The most pods that are remembered; more than a node has.
const REMEMBERED: usize = 4096;

/// Permits for looks at pods: few for pods whose last look took long. `K` identifies a pod.
#[derive(Debug)]
pub(crate) struct Looks<K> {
    usual: Semaphore,
    long: Semaphore,
    /// The pods whose last look took long.
    known: Mutex<BTreeSet<K>>,
}

/// A look panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the look at the pod panicked")]
pub(crate) struct Panicked;

/// The processor time that a pod makes a look take.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Of this thread, when the look began: what others do on the node meanwhile does not count.
    start: Duration,
    /// What this thread did besides.
    left_out: Duration,
    /// What other threads did for it.
    added: Duration,
}

impl Meter {
    /// Begins a look in this thread.
    pub(crate) fn start() -> Self {
        Self { start: processor_time(), left_out: Duration::ZERO, added: Duration::ZERO }
    }

    /// Does work that takes as long for any pod of the node.
    pub(crate) fn leave_out<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = processor_time();
        let done = work();
        self.left_out += processor_time().saturating_sub(start);
        done
    }

    /// Adds processor time of another thread.
    pub(crate) fn add(&mut self, time: Duration) {
        self.added += time;
    }

    /// The processor time so far.
    pub(crate) fn total(&self) -> Duration {
        processor_time().saturating_sub(self.start).saturating_sub(self.left_out) + self.added
    }
}

impl<K> Default for Looks<K> {
    fn default() -> Self {
        Self { usual: Semaphore::new(LOOKS), long: Semaphore::new(LONG_LOOKS), known: Mutex::default() }
    }
}

impl<K: Ord + Clone> Looks<K> {
    /// Looks at a pod when it is its turn.
    ///
    /// # Errors
    /// When the look panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        pod: &K,
        look: impl FnOnce(&mut Meter) -> T + Send + 'static,
    ) -> Result<T, Panicked> {
        let turn = self.turn(pod).await;
        let timed = spawn_blocking(move || {
            let mut meter = Meter::start();
            (look(&mut meter), meter.total())
        });
        let (found, took) = timed.await.map_err(|_| Panicked)?;
        drop(turn);
        self.took(pod, took);
        Ok(found)
    }

    async fn turn(&self, pod: &K) -> Option<SemaphorePermit<'_>> {
        let turns = if self.known().contains(pod) { &self.long } else { &self.usual };
        // Neither is ever closed.
        turns.acquire().await.ok()
    }

    fn took(&self, pod: &K, time: Duration) {
        let mut known = self.known();
        if time < LONG {
            known.remove(pod);
        } else if known.len() < REMEMBERED {
            known.insert(pod.clone());
        } else {
            known.clear();
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<K>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The processor time that this thread has used.
pub(crate) fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// Uses as much processor time as a look that takes long.
    pub(crate) fn work_for_long() {
        let start = processor_time();
        while processor_time().saturating_sub(start) < LONG {
            std::hint::spin_loop();
        }
    }

    /// Whether a look with this time counts as long.
    pub(crate) fn is_long(meter: &Meter) -> bool {
        meter.total() >= LONG
    }

    #[tokio::test]
    async fn pods_whose_looks_take_long_delay_each_other_and_no_other_pod() {
        let looks = Looks::default();
        let pods: Vec<String> = (0..2 * LOOKS).map(|number| format!("large-{number}")).collect();
        pods.iter().for_each(|pod| looks.took(pod, LONG));
        let turns: Vec<_> = pods.iter().filter_map(|pod| looks.turn(pod).now_or_never()).collect();
        assert_eq!(turns.len(), LONG_LOOKS);
        let usual = looks.turn(&"usual".to_owned()).now_or_never();
        assert!(usual.flatten().is_some(), "another pod's turn");
        drop(turns);
        assert_eq!(looks.run(&pods[0], |_| 7).await.unwrap(), 7);
        let turns: Vec<_> = pods[..2].iter().filter_map(|pod| looks.turn(pod).now_or_never()).collect();
        assert_eq!(turns.len(), 2, "the look of the first one took little time");
    }

    #[tokio::test]
    async fn a_look_is_long_by_what_its_pod_has() {
        let looks = Looks::default();
        looks.run(&"processes", |_| work_for_long()).await.unwrap();
        looks.run(&"listeners", |meter| meter.add(LONG)).await.unwrap();
        looks.run(&"usual", |meter| meter.leave_out(work_for_long)).await.unwrap();
        assert_eq!(*looks.known(), ["listeners", "processes"].into());
        assert_eq!(looks.run(&"usual", |_| panic!("on purpose")).await, Err::<(), _>(Panicked));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let looks = Looks::default();
        (0..3 * REMEMBERED).for_each(|number| looks.took(&number, LONG));
        assert!(looks.known().len() <= REMEMBERED);
    }
}
