//! Turns to look for pods on the node. A look takes time for each process of the pod, and a node has few processors, so
//! that few looks happen at a time. Pods with tens of thousands of processes have one turn together: they delay each
//! other and no other pod.

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

use super::Problem;

/// Pods that are located concurrently.
const LOOKS: usize = 4;
/// Pods whose look took long that are located concurrently.
const LONG_LOOKS: usize = 1;
/// Processor time of a look that took long: tens of times as much as a usual pod's.
const LONG: Duration = Duration::from_millis(50);
/// The most pods that are remembered; more than a node has.
const REMEMBERED: usize = 4096;

/// Permits for looks at pods: few for pods whose last look took long.
pub(super) struct Looks {
    usual: Semaphore,
    long: Semaphore,
    /// Uids of the pods whose last look took long.
    known: Mutex<BTreeSet<String>>,
}

impl Default for Looks {
    fn default() -> Self {
        Self { usual: Semaphore::new(LOOKS), long: Semaphore::new(LONG_LOOKS), known: Mutex::default() }
    }
}

impl Looks {
    /// Looks for a pod when it is its turn.
    ///
    /// # Errors
    /// When the look panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        uid: &str,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let turn = self.turn(uid).await?;
        let timed = spawn_blocking(move || {
            let start = processor_time();
            (look(), processor_time().saturating_sub(start))
        });
        let (found, took) = timed.await.map_err(|error| Problem::Failed(error.to_string()))?;
        drop(turn);
        self.took(uid, took);
        Ok(found)
    }

    async fn turn(&self, uid: &str) -> Result<SemaphorePermit<'_>, Problem> {
        let turns = if self.known().contains(uid) { &self.long } else { &self.usual };
        turns.acquire().await.map_err(|error| Problem::Failed(error.to_string()))
    }

    fn took(&self, uid: &str, time: Duration) {
        let mut known = self.known();
        if time < LONG {
            known.remove(uid);
        } else if known.len() < REMEMBERED {
            known.insert(uid.to_owned());
        } else {
            known.clear();
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of this thread: what others do on the node meanwhile does not count.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn pods_whose_looks_take_long_delay_each_other_and_no_other_pod() {
        let looks = Looks::default();
        let uids: Vec<String> = (0..2 * LOOKS).map(|number| format!("large-{number}")).collect();
        uids.iter().for_each(|uid| looks.took(uid, LONG));
        let turns: Vec<_> = uids.iter().filter_map(|uid| looks.turn(uid).now_or_never()).collect();
        assert_eq!(turns.len(), LONG_LOOKS);
        let usual = looks.turn("usual").now_or_never();
        assert!(usual.is_some_and(|turn| turn.is_ok()), "another pod's turn");
        drop(turns);
        assert_eq!(looks.run(&uids[0], || 7).await.unwrap(), 7);
        let turns: Vec<_> = uids[..2].iter().filter_map(|uid| looks.turn(uid).now_or_never()).collect();
        assert_eq!(turns.len(), 2, "the look of the first one took little time");
    }

    #[tokio::test]
    async fn a_look_is_long_by_what_its_thread_does() {
        let looks = Looks::default();
        let work = || {
            let start = processor_time();
            while processor_time().saturating_sub(start) < LONG {
                std::hint::spin_loop();
            }
        };
        looks.run("large", work).await.unwrap();
        looks.run("usual", || {}).await.unwrap();
        assert_eq!(*looks.known(), ["large".to_owned()].into());
        assert!(matches!(looks.run("usual", || panic!("on purpose")).await, Err::<(), _>(Problem::Failed(_))));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let looks = Looks::default();
        (0..3 * REMEMBERED).for_each(|number| looks.took(&format!("large-{number}"), LONG));
        assert!(looks.known().len() <= REMEMBERED);
    }
}
