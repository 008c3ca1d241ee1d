//! Turns to look at pods on the node. A look takes time for what a pod has: processes, addresses, listeners. A node has
//! few processors, so that few looks happen at a time. Pods that have tens of thousands of these have one turn
//! together: they delay each other and no other pod.
//!
//! A look may enter its pod's network namespace ([`netns`](super::netns)), which changes the thread. So looks have
//! threads of their own, on which nothing else of the agent runs.

use std::{
    collections::BTreeSet,
    io,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Semaphore, SemaphorePermit},
};

/// Pods that are looked at concurrently.
const LOOKS: usize = 4;
/// Pods whose look took long that are looked at concurrently.
const LONG_LOOKS: usize = 1;
/// Processor time of a look that took long: tens of times as much as a usual pod's.
const LONG: Duration = Duration::from_millis(50);
/// The most pods that are remembered; more than a node has.
const REMEMBERED: usize = 4096;
/// Threads at most: one for each turn, of looks for pods and of looks for listeners.
const THREADS: usize = 2 * (LOOKS + LONG_LOOKS);

/// The threads, which are started when they are needed and end when they are idle. No other task uses this runtime.
static RUNTIME: LazyLock<io::Result<Runtime>> =
    LazyLock::new(|| Builder::new_current_thread().thread_name("looks").max_blocking_threads(THREADS).build());

/// Permits for looks at pods: few for pods whose last look took long. `K` identifies a pod.
#[derive(Debug)]
pub(crate) struct Looks<K> {
    usual: Semaphore,
    long: Semaphore,
    /// The pods whose last look took long.
    known: Mutex<BTreeSet<K>>,
}

/// The processor time that a pod makes a look take.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Of this thread, when the look began: what others do on the node meanwhile does not count.
    start: Duration,
    /// What this thread did besides.
    left_out: Duration,
}

impl Meter {
    /// Begins a look in this thread.
    pub(crate) fn start() -> Self {
        Self { start: processor_time(), left_out: Duration::ZERO }
    }

    /// Does work that takes as long for any pod of the node.
    pub(crate) fn leave_out<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = processor_time();
        let done = work();
        self.left_out += processor_time().saturating_sub(start);
        done
    }

    /// The processor time so far.
    pub(crate) fn total(&self) -> Duration {
        processor_time().saturating_sub(self.start).saturating_sub(self.left_out)
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
    /// When the look panicked, or no thread can be started for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        pod: &K,
        look: impl FnOnce(&mut Meter) -> T + Send + 'static,
    ) -> io::Result<T> {
        let threads = RUNTIME.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
        let turn = self.turn(pod).await;
        let timed = threads.spawn_blocking(move || {
            let mut meter = Meter::start();
            (look(&mut meter), meter.total())
        });
        let (found, took) = timed.await.map_err(|_| io::Error::other("the look at the pod panicked"))?;
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
    use std::sync::{Arc, Barrier};

    use futures::{FutureExt as _, future::join_all};

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
        looks.run(&"large", |_| work_for_long()).await.unwrap();
        looks.run(&"usual", |meter| meter.leave_out(work_for_long)).await.unwrap();
        assert_eq!(*looks.known(), ["large"].into());
        let panicked: io::Result<()> = looks.run(&"usual", |_| panic!("on purpose")).await;
        assert_eq!(panicked.unwrap_err().to_string(), "the look at the pod panicked");
    }

    #[tokio::test]
    async fn looks_run_side_by_side() {
        let (looks, meeting) = (Looks::default(), Arc::new(Barrier::new(LOOKS)));
        let look = |pod: usize| {
            let (looks, meeting) = (&looks, Arc::clone(&meeting));
            async move { looks.run(&pod, move |_| meeting.wait()).await }
        };
        let all = tokio::time::timeout(Duration::from_secs(20), join_all((0..LOOKS).map(look))).await.unwrap();
        assert!(all.iter().all(Result::is_ok));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let looks = Looks::default();
        (0..3 * REMEMBERED).for_each(|number| looks.took(&number, LONG));
        assert!(looks.known().len() <= REMEMBERED);
    }
}
