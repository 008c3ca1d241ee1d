//! The index behind one thread: the only place that changes it, and the only one that looks into it.
//!
//! ```text
//! source ──batches──> thread: apply, publish ──watch──> streams
//! streams ─questions─────^
//! ```
//!
//! Updates come before questions, and after each batch the thread answers for a few milliseconds at most: when every
//! client comes back at once, changes still reach those that are served, and everybody is answered in turn. No stream
//! and no probe ever waits for a lock.

use std::{
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

use super::{Applied, Cluster, Event, Index, PendingStatuses};

/// Questions that may wait; those who ask wait beyond.
const QUESTIONS: usize = 1024;
/// How long questions are answered before the next look at updates.
const ANSWERING: Duration = Duration::from_millis(5);
/// How long a waiting client accepts that no client is answered. Then it tries again, at another replica if there is
/// one. While others are answered it keeps waiting: asking again would make the queue longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The index, shared by the gRPC services. The thread ends with the last handle. Every stream has one, so it is one
/// pointer.
#[derive(Clone)]
pub struct SharedIndex(Arc<Shared>);

struct Shared {
    cluster: Arc<Cluster>,
    batches: mpsc::Sender<Batch>,
    questions: mpsc::Sender<Question>,
    ineffective: Arc<AtomicUsize>,
    /// Number of questions that were answered.
    answered: Arc<AtomicU64>,
    statuses: PendingStatuses,
}

/// Why a question was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// Nobody is answered.
    #[error("too many requests, try again")]
    Busy,
    /// The index has stopped.
    #[error("shutting down")]
    Stopped,
}

type Question = Box<dyn FnOnce(&mut Index) + Send>;

struct Batch {
    events: Vec<Event>,
    applied: oneshot::Sender<Applied>,
}

impl SharedIndex {
    /// Starts the thread with an empty index.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn start(cluster: Cluster) -> io::Result<Self> {
        let (batches, batch_rx) = mpsc::channel(1);
        let (questions, question_rx) = mpsc::channel(QUESTIONS);
        let index = Index::new(cluster);
        let (cluster, ineffective, answered) = (index.cluster().clone(), Arc::default(), Arc::default());
        let statuses = index.statuses();
        let serving = Serving { index, ineffective: Arc::clone(&ineffective), answered: Arc::clone(&answered) };
        let shared = Shared { cluster, batches, questions, ineffective, answered, statuses };
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let thread = std::thread::Builder::new().name("index".to_owned());
        thread.spawn(move || runtime.block_on(serving.serve(batch_rx, question_rx)))?;
        Ok(Self(Arc::new(shared)))
    }

    /// Settings of the mesh, which never change.
    pub fn cluster(&self) -> &Cluster {
        &self.0.cluster
    }

    /// Applies a batch and publishes what it changed.
    ///
    /// # Errors
    /// When the index has stopped.
    pub async fn apply(&self, events: Vec<Event>) -> Result<Applied, Unanswered> {
        let (applied, answer) = oneshot::channel();
        self.0.batches.send(Batch { events, applied }).await.map_err(|_| Unanswered::Stopped)?;
        answer.await.map_err(|_| Unanswered::Stopped)
    }

    /// Asks the index. The question must be quick: everybody else waits for it.
    ///
    /// # Errors
    /// When nobody is answered for long, or the index has stopped.
    pub fn ask<R: Send + 'static, Q: FnOnce(&mut Index) -> R + Send + 'static>(
        &self,
        question: Q,
    ) -> impl Future<Output = Result<R, Unanswered>> + Send + use<R, Q> {
        let (answer, answered) = oneshot::channel();
        // On the heap before the first wait: when all clients come back at once, hundreds of thousands wait here, and a
        // future keeps several copies of what is moved through it.
        let question: Question = Box::new(move |index| {
            // A caller that has given up needs no answer.
            if !answer.is_closed() {
                let _ = answer.send(question(index));
            }
        });
        let (questions, others) = (self.0.questions.clone(), Arc::clone(&self.0.answered));
        async move {
            let mut asking = pin!(async move {
                questions.send(question).await.map_err(|_| Unanswered::Stopped)?;
                answered.await.map_err(|_| Unanswered::Stopped)
            });
            loop {
                let before = others.load(Ordering::Relaxed);
                match timeout(PATIENCE, asking.as_mut()).await {
                    Ok(answer) => return answer,
                    Err(_) if others.load(Ordering::Relaxed) == before => return Err(Unanswered::Busy),
                    Err(_) => {}
                }
            }
        }
    }

    /// Number of questions that wait for the index.
    pub fn waiting_questions(&self) -> usize {
        self.0.questions.max_capacity() - self.0.questions.capacity()
    }

    /// Statuses that are to be written.
    pub fn statuses(&self) -> PendingStatuses {
        self.0.statuses.clone()
    }

    /// Number of AuthorizationPolicies that grant nothing.
    pub fn ineffective_policies(&self) -> usize {
        self.0.ineffective.load(Ordering::Relaxed)
    }
}

/// What the thread owns.
struct Serving {
    index: Index,
    ineffective: Arc<AtomicUsize>,
    answered: Arc<AtomicU64>,
}

impl Serving {
    async fn serve(mut self, mut batches: mpsc::Receiver<Batch>, mut questions: mpsc::Receiver<Question>) {
        loop {
            let question = tokio::select! {
                biased;
                batch = batches.recv() => {
                    let Some(batch) = batch else { return };
                    self.apply(batch);
                    None
                }
                question = questions.recv() => question,
            };
            let until = Instant::now() + ANSWERING;
            let mut next = question.or_else(|| questions.try_recv().ok());
            while let Some(question) = next {
                question(&mut self.index);
                self.answered.fetch_add(1, Ordering::Relaxed);
                next = if Instant::now() < until { questions.try_recv().ok() } else { None };
            }
        }
    }

    fn apply(&mut self, batch: Batch) {
        let applied = self.index.apply(batch.events);
        self.ineffective.store(self.index.ineffective_policies(), Ordering::Relaxed);
        // The source may have ended meanwhile.
        let _ = batch.applied.send(applied);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> SharedIndex {
        SharedIndex::start(crate::tests::cluster()).unwrap()
    }

    #[tokio::test]
    async fn it_is_asked_and_changed_from_everywhere() {
        let index = index();
        assert!(index.apply(vec![Event::Synced]).await.unwrap().synced);
        let asked = (0..100).map(|number| {
            let index = index.clone();
            tokio::spawn(async move { index.ask(move |_| number).await })
        });
        for (number, asked) in asked.collect::<Vec<_>>().into_iter().enumerate() {
            assert_eq!(asked.await.unwrap(), Ok(number));
        }
    }

    #[tokio::test]
    async fn updates_do_not_wait_for_the_questions_that_wait() {
        let index = index();
        // The first question holds the thread until all others wait.
        let (go, wait) = std::sync::mpsc::channel();
        let held = tokio::spawn({
            let index = index.clone();
            async move { index.ask(move |_| wait.recv().unwrap()).await }
        });
        let slow = |index: SharedIndex| async move {
            index
                .ask(|index| {
                    std::thread::sleep(ANSWERING);
                    index.ineffective_policies()
                })
                .await
        };
        let waiting: Vec<_> = (0..40).map(|_| tokio::spawn(slow(index.clone()))).collect();
        while index.0.questions.capacity() > QUESTIONS - 40 {
            tokio::task::yield_now().await;
        }
        go.send(()).unwrap();
        held.await.unwrap().unwrap();
        index.apply(vec![Event::Synced]).await.unwrap();
        let left = QUESTIONS - index.0.questions.capacity();
        assert!(left > 20, "{left} of 40 questions were answered after the update");
        for waiting in waiting {
            waiting.await.unwrap().unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_waits_as_long_as_others_are_answered() {
        let index = index();
        // A question that takes as long as the test says.
        let ask = || {
            let (go, wait) = std::sync::mpsc::channel();
            (go, tokio::spawn(index.ask(move |_| wait.recv().unwrap())))
        };
        let most = PATIENCE * 9 / 10;
        let ((first_go, first), (second_go, mut second)) = (ask(), ask());
        tokio::task::yield_now().await;
        tokio::time::advance(most).await;
        first_go.send(()).unwrap();
        // The clock would go on if this task waited. An answer is sent before it is counted.
        while !first.is_finished() || index.0.answered.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(first.await.unwrap(), Ok(()));
        for _ in 0..2 {
            tokio::time::advance(most / 2).await;
            tokio::task::yield_now().await;
        }
        let early = tokio::select! {
            biased;
            early = &mut second => Some(early),
            () = tokio::task::yield_now() => None,
        };
        assert!(early.is_none(), "it has waited for too long: {early:?}");
        second_go.send(()).unwrap();
        while !second.is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(second.await.unwrap(), Ok(()));
        // The opposite: nobody is answered.
        let ((third_go, third), (_fourth_go, fourth)) = (ask(), ask());
        tokio::task::yield_now().await;
        tokio::time::advance(PATIENCE).await;
        assert_eq!((third.await.unwrap(), fourth.await.unwrap()), (Err(Unanswered::Busy), Err(Unanswered::Busy)));
        // It fails if the index dropped the question: its asker had given up before it was its turn.
        let _ = third_go.send(());
    }

    #[tokio::test]
    async fn a_question_that_fails_is_the_end() {
        let index = index();
        let panicked = index.ask(|_| panic!("a bug")).await;
        assert_eq!(panicked, Err::<(), _>(Unanswered::Stopped));
        assert_eq!(index.apply(Vec::new()).await.err(), Some(Unanswered::Stopped));
    }
}
