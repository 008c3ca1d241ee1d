//! The owner of the datapath, a thread that makes every call, and the handle through which tasks request calls.
//!
//! ```text
//! tasks ──call──> queue ──> owner thread ──> Kernel: Datapath, or a fake in tests
//!   └── snapshots of names <───────┘
//! ```
//!
//! A slow call delays only the calls behind it: no task waits for a lock that is held during a call, and work that
//! depends on a pod's processes runs outside of the owner ([`takeover`]). Refuses to know what the calls do.

use std::{
    collections::BTreeSet,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::sync::{mpsc, oneshot};
use weft_runtime::error::chain;

use super::{
    DatapathError, Enrolment,
    cookies::Cookies,
    events::RingEvents,
    explain::{Answer, Question},
    keep::Found,
    names::{Names, Snapshot},
    netns::Netns,
    rules::{PodName, Rules},
    sample::{Losses, Sample},
    scans::ScanSlots,
    takeover::{self, ActiveSearches, Search, TakenListener},
};

/// Calls that may wait for the owner. Further callers wait for a free slot.
const QUEUE: usize = 64;
/// How long the owner may take to end: as long as the calls that wait for it take.
const END: Duration = Duration::from_secs(5);

/// The kernel operations of the owner.
pub(crate) trait Kernel: Send {
    /// Constants for the lifetime of the agent.
    fn facts(&self) -> Facts;

    /// The pods' names.
    fn names(&self) -> &Names;

    /// Puts a pod's rules in force, as far as that is possible without inspecting its processes. `listeners` are the
    /// results of the search that an earlier call requested.
    fn begin_enrolment(
        &mut self,
        netns: &Netns,
        rules: &Rules,
        listeners: Option<&[TakenListener]>,
    ) -> Result<Begun, DatapathError>;

    /// Completes what [`Self::begin_enrolment`] left pending, with the listeners that were found.
    fn complete_enrolment(&mut self, pending: Pending, listeners: &[TakenListener])
    -> Result<Enrolment, DatapathError>;

    /// What is still to be searched for of a pod that has been enrolled but for its proxy's listeners.
    fn search_again(&mut self, netns_cookie: u64) -> Result<Option<Search>, DatapathError>;

    /// Removes a pod. An unknown one is not an error.
    fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError>;

    /// Removes the pods whose network namespaces are gone, as far as their links say so.
    fn collect_garbage(&mut self) -> Result<Collected, DatapathError>;

    /// Removes suspects of [`Self::collect_garbage`] that a search of the node's processes did not find. Returns the
    /// cookies of those that are still suspect.
    fn remove_absent(&mut self, absent: &BTreeSet<u64>) -> Result<Vec<u64>, DatapathError>;

    /// Pods and counters, at most `max_age` old.
    fn sample(&mut self, max_age: Duration) -> Result<Arc<Sample>, DatapathError>;

    /// Runs the programs' decision functions on the live maps.
    fn explain(&self, question: &Question) -> Result<Answer, DatapathError>;

    /// Counts of what the programs had no room for.
    fn losses(&self) -> Result<Losses, DatapathError>;

    /// Whether all redirection of the node is switched off.
    fn bypassed(&self) -> Result<bool, DatapathError>;

    /// Recreates missing pins.
    fn keep_pins(&mut self) -> Result<Found, DatapathError>;

    /// Whether the programs are detached, as `unload` leaves them.
    fn is_unloaded(&self) -> Result<bool, DatapathError>;

    /// Turns the kernel's events on and opens their ring buffer.
    fn start_events(&mut self) -> Result<RingEvents, DatapathError>;

    /// Turns the kernel's events off.
    fn stop_events(&mut self) -> Result<(), DatapathError>;
}

/// Constants for the lifetime of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The digest of the attached programs.
    pub(crate) digest: String,
    /// The cgroup to which they are attached.
    pub(crate) cgroup: PathBuf,
    pub(crate) pin_dir: PathBuf,
    /// The way to get the cookie of a network namespace.
    pub(crate) cookies: Cookies,
}

/// The first part of an enrolment.
#[derive(Debug)]
pub(crate) enum Begun {
    Done(Enrolment),
    /// The proxy's listeners have to be known before its pod's inbound connections are steered to them, and there were
    /// some when the namespace was visited. Nothing has changed yet.
    Search {
        search: Search,
        otherwise: Otherwise,
    },
    /// The proxy began to listen before the programs could record it, or does not listen yet.
    Pending(Pending),
}

/// What happens if a search for listeners fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Otherwise {
    /// The pod is new: its own connections are redirected all the same.
    Outbound,
    /// The pod's inbound connections are redirected, and the new rules name another process as its proxy, or another
    /// admin port: the old rules stay.
    Nothing,
    /// The rules in force skip the admin port, as those of older agents do: it is still skipped, until the proxy's
    /// listener is found or has been replaced. Where no listener can be taken from a process, that is when the proxy
    /// starts again.
    SkippedAdminPort,
}

/// An enrolment that waits for the search for its proxy's listeners.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) enrolment: Enrolment,
    pub(crate) search: Search,
}

/// The result of a garbage collection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    /// Cookies of the pods that were removed.
    pub(crate) removed: Vec<u64>,
    /// Cookies of namespaces that have no link which ends with them, so that the node's processes have to be searched:
    /// those that the kernel enrolled a while ago, and those whose enrolment was interrupted.
    pub(crate) suspects: BTreeSet<u64>,
}

/// Sends calls to the owner. Cheap to clone; the owner ends with the last clone, or when it is stopped.
#[derive(Clone)]
pub(crate) struct Handle {
    /// `None` stops the owner.
    calls: mpsc::Sender<Option<Call>>,
    names: Names,
    facts: Arc<Facts>,
    searches: ActiveSearches,
    /// Of searches for listeners, by the namespace's cookie.
    scans: Arc<ScanSlots<u64>>,
}

/// A call, which answers its caller.
type Call = Box<dyn FnOnce(&mut dyn Kernel) + Send>;

impl Handle {
    /// Starts the owner's thread.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn spawn(mut kernel: impl Kernel + 'static) -> io::Result<Self> {
        let (calls, mut queue) = mpsc::channel::<Option<Call>>(QUEUE);
        let (names, facts) = (kernel.names().clone(), Arc::new(kernel.facts()));
        thread::Builder::new().name("datapath".into()).spawn(move || {
            while let Some(Some(call)) = queue.blocking_recv() {
                // A call that panics leaves the kernel's maps valid, because each write is complete. Its caller gets
                // `Stopped`.
                drop(catch_unwind(AssertUnwindSafe(|| call(&mut kernel))));
            }
        })?;
        Ok(Self { calls, names, facts, searches: ActiveSearches::default(), scans: Arc::default() })
    }

    /// Queues a call for the owner, and waits for its result.
    ///
    /// # Errors
    /// The call's own error; `Stopped` when it panicked, or the owner has been stopped.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut dyn Kernel) -> Result<T, DatapathError> + Send + 'static,
    ) -> Result<T, DatapathError> {
        let (answer, answered) = oneshot::channel();
        let call: Call = Box::new(move |kernel| drop(answer.send(call(kernel))));
        self.calls.send(Some(call)).await.map_err(|_| DatapathError::Stopped)?;
        answered.await.map_err(|_| DatapathError::Stopped)?
    }

    /// Ends the owner, after the calls that were requested before. Later ones fail with `Stopped`.
    pub(crate) async fn stop(&self) {
        let ended = async {
            if self.calls.send(None).await.is_ok() {
                self.calls.closed().await;
            }
        };
        if tokio::time::timeout(END, ended).await.is_err() {
            tracing::warn!("the datapath's calls have not ended in time");
        }
    }

    /// Puts a pod's rules in force in both directions. Repeating the same rules changes nothing.
    ///
    /// # Errors
    /// Those of the kernel and of the search for the proxy's listeners. The pod's own connections are redirected even
    /// then, and another attempt completes the enrolment.
    pub(crate) async fn enrol(&self, netns: Netns, rules: Rules) -> Result<Enrolment, DatapathError> {
        let netns = Arc::new(netns);
        let mut rules = Arc::new(rules);
        let (mut found, mut failed, mut skipped) = (None, None, None);
        loop {
            let begun = {
                let (netns, rules) = (Arc::clone(&netns), Arc::clone(&rules));
                self.call(move |kernel| kernel.begin_enrolment(&netns, &rules, found.as_deref())).await?
            };
            match begun {
                Begun::Done(enrolment) => {
                    if let Some(error) = skipped.filter(|_| enrolment.changed) {
                        tracing::warn!(error = chain(&error), "the admin port is skipped until the proxy starts again");
                    }
                    return Ok(enrolment);
                }
                Begun::Search { search, otherwise } => {
                    let listeners = self.find_listeners(&netns, search, false).await;
                    found = Some(listeners.or_else(|error| {
                        match otherwise {
                            Otherwise::Nothing => return Err(error),
                            Otherwise::Outbound => failed = Some(error),
                            Otherwise::SkippedAdminPort => {
                                let skipping = rules.with_admin_port_skipped();
                                // Where the pod's own rules skip it, there is nothing to report.
                                skipped = (skipping != *rules).then_some(error);
                                rules = Arc::new(skipping);
                            }
                        }
                        Ok(Vec::new())
                    })?);
                }
                Begun::Pending(pending) => {
                    // The pod's own connections are redirected by now; another search would end like the first.
                    if let Some(error) = failed {
                        return Err(error);
                    }
                    let listeners = self.find_listeners(&netns, pending.search.clone(), true).await?;
                    return self.call(move |kernel| kernel.complete_enrolment(pending, &listeners)).await;
                }
            }
        }
    }

    /// Finds a proxy's listeners. With the rules in force (`in_force`), the programs record a proxy that begins to
    /// listen meanwhile: then there is less to take, or nothing.
    async fn find_listeners(
        &self,
        netns: &Arc<Netns>,
        mut search: Search,
        in_force: bool,
    ) -> Result<Vec<TakenListener>, DatapathError> {
        let (cookie, guard) = (netns.cookie, self.searches.begin(netns.cookie)?);
        let Some(wanted) = takeover::look(&self.scans, Arc::clone(netns), search.clone()).await? else {
            return Ok(Vec::new());
        };
        if in_force {
            let again = self.call(move |kernel| kernel.search_again(cookie)).await?;
            let Some(again) = again else { return Ok(Vec::new()) };
            search = again;
        }
        Ok(takeover::take(wanted, &search, guard).await?)
    }

    /// The current names of the pods.
    pub(crate) fn names(&self) -> Snapshot {
        self.names.snapshot()
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }
}
