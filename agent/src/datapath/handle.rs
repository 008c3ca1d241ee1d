//! The datapath's owner, a thread that makes every call, and the handle through which tasks ask for one.
//!
//! ```text
//! tasks ──call──> queue ──> owner thread ──> Kernel: Datapath, or a fake in tests
//!   └── names <── watch <──────────┘
//! ```
//!
//! A slow call delays the calls behind it and nothing else: no task waits for a lock, and what depends on a pod's processes
//! runs outside of the owner ([`takeover`]). Refuses to know what the calls do.

use std::{
    collections::BTreeMap,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    DatapathError, Enrolment,
    cookies::Cookies,
    events::RingEvents,
    explain::{Answer, Question},
    keep::Found,
    netns::Netns,
    rules::{PodName, Rules},
    sample::{Losses, Sample},
    takeover::{self, Search, TakenListener, Turns},
};

/// Calls that wait for the owner. Further callers wait for a place.
const QUEUE: usize = 64;

/// The pods' names by the cookies of their network namespaces. A snapshot.
pub(crate) type Names = Arc<BTreeMap<u64, PodName>>;

/// What the owner can do in the kernel.
pub(crate) trait Kernel: Send {
    /// What does not change while the agent runs.
    fn facts(&self) -> Facts;

    /// The pods' names, the same allocation until one changes.
    fn names(&self) -> &Names;

    /// Puts a pod's rules in force, as far as that is possible without looking into its processes. `listeners` are what the
    /// search found that an earlier call asked for.
    fn begin_enrolment(
        &mut self,
        netns: &Netns,
        rules: &Rules,
        listeners: Option<&[TakenListener]>,
    ) -> Result<Begun, DatapathError>;

    /// Ends what [`Self::begin_enrolment`] left pending, with the listeners that were found.
    fn complete_enrolment(&mut self, pending: Pending, listeners: &[TakenListener])
    -> Result<Enrolment, DatapathError>;

    /// What is still to be searched for of a pod that has been enrolled but for its proxy's listeners.
    fn search_again(&mut self, netns_cookie: u64) -> Result<Option<Search>, DatapathError>;

    /// Removes a pod. An unknown one is not an error.
    fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError>;

    /// Removes the pods whose network namespaces are gone. Returns their cookies.
    fn collect_garbage(&mut self) -> Result<Vec<u64>, DatapathError>;

    /// Pods and counters, at most `max_age` old.
    fn sample(&mut self, max_age: Duration) -> Result<Arc<Sample>, DatapathError>;

    /// Runs the programs' verdict functions on the live maps.
    fn explain(&self, question: &Question) -> Result<Answer, DatapathError>;

    /// What the programs had no room for.
    fn losses(&self) -> Result<Losses, DatapathError>;

    /// Whether all redirection of the node is switched off.
    fn bypassed(&self) -> Result<bool, DatapathError>;

    /// Creates again the pins that are missing.
    fn keep_pins(&mut self) -> Result<Found, DatapathError>;

    /// Whether the programs are detached, as `unload` leaves them.
    fn is_unloaded(&self) -> Result<bool, DatapathError>;

    /// Switches the kernel's events on and opens their ring buffer.
    fn start_events(&mut self) -> Result<RingEvents, DatapathError>;

    /// Switches the kernel's events off.
    fn stop_events(&mut self) -> Result<(), DatapathError>;
}

/// What does not change while an agent runs.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The digest of the attached programs.
    pub(crate) digest: String,
    /// The cgroup that they are attached to.
    pub(crate) cgroup: PathBuf,
    pub(crate) pin_dir: PathBuf,
    /// How to learn the cookie of a network namespace.
    pub(crate) cookies: Cookies,
}

/// The first part of an enrolment.
#[derive(Debug)]
pub(crate) enum Begun {
    Done(Enrolment),
    /// By the new rules another process is the proxy of a pod whose inbound connections are redirected: nothing changes
    /// before its listeners are looked for.
    Search(Search),
    /// The proxy listened before the programs could record it, or not at all yet.
    Pending(Pending),
}

/// An enrolment whose proxy's listeners have to be looked for.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) enrolment: Enrolment,
    pub(crate) search: Search,
}

/// Asks the owner. Cheap to clone; the owner ends with the last clone.
#[derive(Clone)]
pub(crate) struct Handle {
    calls: mpsc::Sender<Call>,
    names: watch::Receiver<Names>,
    facts: Arc<Facts>,
    turns: Turns,
}

/// A call, which returns how to answer its caller: after the names are published, so that the caller finds its own.
type Call = Box<dyn FnOnce(&mut dyn Kernel) -> Box<dyn FnOnce()> + Send>;

impl Handle {
    /// Starts the owner's thread.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(crate) fn spawn(mut kernel: impl Kernel + 'static) -> io::Result<Self> {
        let (calls, mut queue) = mpsc::channel::<Call>(QUEUE);
        let (names_tx, names) = watch::channel(Arc::clone(kernel.names()));
        let facts = Arc::new(kernel.facts());
        thread::Builder::new().name("datapath".into()).spawn(move || {
            while let Some(call) = queue.blocking_recv() {
                // A call that panics leaves the kernel's maps valid: each write is complete. Its caller gets `Stopped`.
                let answer = catch_unwind(AssertUnwindSafe(|| call(&mut kernel)));
                names_tx.send_if_modified(|known| {
                    let changed = !Arc::ptr_eq(known, kernel.names());
                    *known = Arc::clone(kernel.names());
                    changed
                });
                if let Ok(answer) = answer {
                    answer();
                }
            }
        })?;
        Ok(Self { calls, names, facts, turns: Turns::default() })
    }

    /// Has the owner make a call, and waits for its result.
    ///
    /// # Errors
    /// The call's own; `Stopped` when it panicked.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut dyn Kernel) -> Result<T, DatapathError> + Send + 'static,
    ) -> Result<T, DatapathError> {
        let (answer, answered) = oneshot::channel();
        let call: Call = Box::new(move |kernel| {
            let result = call(kernel);
            Box::new(move || drop(answer.send(result)))
        });
        self.calls.send(call).await.map_err(|_| DatapathError::Stopped)?;
        answered.await.map_err(|_| DatapathError::Stopped)?
    }

    /// Puts a pod's rules in force in both directions. The same rules again change nothing.
    ///
    /// # Errors
    /// The kernel's, or those of the search for the proxy's listeners. The pod's own connections are redirected even then,
    /// and another attempt completes the enrolment.
    pub(crate) async fn enrol(&self, netns: Netns, rules: Rules) -> Result<Enrolment, DatapathError> {
        let netns = Arc::new(netns);
        let rules = Arc::new(rules);
        let mut found = None;
        loop {
            let begun = {
                let (netns, rules) = (Arc::clone(&netns), Arc::clone(&rules));
                self.call(move |kernel| kernel.begin_enrolment(&netns, &rules, found.as_deref())).await?
            };
            match begun {
                Begun::Done(enrolment) => return Ok(enrolment),
                Begun::Search(search) => {
                    found = Some(self.find_listeners(&netns, search, |search| async { Ok(Some(search)) }).await?);
                }
                Begun::Pending(pending) => {
                    let cookie = netns.cookie;
                    // A proxy that has begun to listen since the rules are in force is recorded by the programs.
                    let again = |_| self.call(move |kernel| kernel.search_again(cookie));
                    let listeners = self.find_listeners(&netns, pending.search.clone(), again).await?;
                    return self.call(move |kernel| kernel.complete_enrolment(pending, &listeners)).await;
                }
            }
        }
    }

    /// Finds a proxy's listeners. `again` says what is still to be taken after some have been seen.
    async fn find_listeners<A: Future<Output = Result<Option<Search>, DatapathError>>>(
        &self,
        netns: &Arc<Netns>,
        search: Search,
        again: impl FnOnce(Search) -> A,
    ) -> Result<Vec<TakenListener>, DatapathError> {
        let turn = self.turns.take(netns.cookie)?;
        let Some(wanted) = takeover::look(Arc::clone(netns), search.clone()).await? else { return Ok(Vec::new()) };
        let Some(search) = again(search).await? else { return Ok(Vec::new()) };
        Ok(takeover::take(wanted, &search, turn).await?)
    }

    /// The pods' names as they are now.
    pub(crate) fn names(&self) -> Names {
        self.names.borrow().clone()
    }

    /// What does not change.
    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }
}
