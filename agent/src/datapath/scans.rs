//! Limits scans of pods on the node. A scan takes time for what a pod has: processes, addresses, listeners. A node has
//! few processors, so that few scans run at a time. Pods that have tens of thousands of these share one slot: they
//! delay each other and no other pod.
//!
//! A scan may enter its pod's network namespace ([`netns`](super::netns)), which changes the thread. So scans have
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

/// Pods that are scanned at a time.
const SLOTS: usize = 4;
/// Pods whose last scan took long that are scanned at a time.
const LONG_SLOTS: usize = 1;
/// Processor time of a scan that took long: tens of times as much as a usual pod's.
const LONG: Duration = Duration::from_millis(50);
/// The most pods that are remembered; more than a node has.
const REMEMBERED: usize = 4096;
/// Threads at most: one for each slot, of scans for pods and of scans for listeners.
const THREADS: usize = 2 * (SLOTS + LONG_SLOTS);

/// The threads, which are started when they are needed and end when they are idle. No other task uses this runtime.
static RUNTIME: LazyLock<io::Result<Runtime>> =
    LazyLock::new(|| Builder::new_current_thread().thread_name("scans").max_blocking_threads(THREADS).build());

/// Slots for scans of pods: few for pods whose last scan took long. `K` identifies a pod.
#[derive(Debug)]
pub(crate) struct ScanSlots<K> {
    usual: Semaphore,
    long: Semaphore,
    /// The pods whose last scan took long.
    known: Mutex<BTreeSet<K>>,
}

/// The processor time that a pod makes a scan take.
#[derive(Debug)]
pub(crate) struct CpuMeter {
    /// Of this thread, when the scan began: what others do on the node meanwhile does not count.
    start: Duration,
    /// What this thread did besides.
    left_out: Duration,
}

impl CpuMeter {
    /// Begins a scan in this thread.
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

impl<K> Default for ScanSlots<K> {
    fn default() -> Self {
        Self { usual: Semaphore::new(SLOTS), long: Semaphore::new(LONG_SLOTS), known: Mutex::default() }
    }
}

impl<K: Ord + Clone> ScanSlots<K> {
    /// Scans a pod when it has a slot.
    ///
    /// # Errors
    /// When the scan panicked, or the runtime of its threads cannot be built.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        pod: &K,
        scan: impl FnOnce(&mut CpuMeter) -> T + Send + 'static,
    ) -> io::Result<T> {
        let threads = RUNTIME.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
        let slot = self.slot(pod).await;
        let timed = threads.spawn_blocking(move || {
            let mut meter = CpuMeter::start();
            (scan(&mut meter), meter.total())
        });
        let (found, took) = timed.await.map_err(|_| io::Error::other("the scan of the pod panicked"))?;
        drop(slot);
        self.took(pod, took);
        Ok(found)
    }

    async fn slot(&self, pod: &K) -> Option<SemaphorePermit<'_>> {
        let slots = if self.known().contains(pod) { &self.long } else { &self.usual };
        // Neither is ever closed.
        slots.acquire().await.ok()
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

    /// Uses as much processor time as a scan that takes long.
    pub(crate) fn work_for_long() {
        let start = processor_time();
        while processor_time().saturating_sub(start) < LONG {
            std::hint::spin_loop();
        }
    }

    /// Whether a scan with this time counts as long.
    pub(crate) fn is_long(meter: &CpuMeter) -> bool {
        meter.total() >= LONG
    }

    #[tokio::test]
    async fn pods_whose_scans_take_long_delay_each_other_and_no_other_pod() {
        let scans = ScanSlots::default();
        let pods: Vec<String> = (0..2 * SLOTS).map(|number| format!("large-{number}")).collect();
        pods.iter().for_each(|pod| scans.took(pod, LONG));
        let slots: Vec<_> = pods.iter().filter_map(|pod| scans.slot(pod).now_or_never()).collect();
        assert_eq!(slots.len(), LONG_SLOTS);
        let usual = scans.slot(&"usual".to_owned()).now_or_never();
        assert!(usual.flatten().is_some(), "another pod's slot");
        drop(slots);
        assert_eq!(scans.run(&pods[0], |_| 7).await.unwrap(), 7);
        let slots: Vec<_> = pods[..2].iter().filter_map(|pod| scans.slot(pod).now_or_never()).collect();
        assert_eq!(slots.len(), 2, "the scan of the first one took little time");
    }

    #[tokio::test]
    async fn a_scan_is_long_by_what_its_pod_has() {
        let scans = ScanSlots::default();
        scans.run(&"large", |_| work_for_long()).await.unwrap();
        scans.run(&"usual", |meter| meter.leave_out(work_for_long)).await.unwrap();
        assert_eq!(*scans.known(), ["large"].into());
        let panicked: io::Result<()> = scans.run(&"usual", |_| panic!("on purpose")).await;
        assert_eq!(panicked.unwrap_err().to_string(), "the scan of the pod panicked");
    }

    #[tokio::test]
    async fn scans_run_side_by_side() {
        let (scans, meeting) = (ScanSlots::default(), Arc::new(Barrier::new(SLOTS)));
        let scan = |pod: usize| {
            let (scans, meeting) = (&scans, Arc::clone(&meeting));
            async move { scans.run(&pod, move |_| meeting.wait()).await }
        };
        let all = tokio::time::timeout(Duration::from_secs(20), join_all((0..SLOTS).map(scan))).await.unwrap();
        assert!(all.iter().all(Result::is_ok));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let scans = ScanSlots::default();
        (0..3 * REMEMBERED).for_each(|number| scans.took(&number, LONG));
        assert!(scans.known().len() <= REMEMBERED);
    }
}
