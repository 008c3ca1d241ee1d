//! A datapath without a kernel, for tests of code that uses the handle.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard},
};

use super::{
    DatapathError, Enrolment,
    cookies::Cookies,
    events::RingEvents,
    explain::{Answer, Question},
    handle::{Begun, Collected, Facts, Handle, Kernel, Otherwise, Pending},
    keep::Found,
    names::Names,
    netns::Netns,
    rules::{PodName, Rules},
    sample::{Losses, Sample},
    takeover::{Search, TakenListener},
};

/// Only records its calls. Clones share the record.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeKernel {
    state: Arc<Mutex<State>>,
    names: Names,
}

/// State that a test sets and inspects.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Namespaces that the next garbage collection removes.
    pub(crate) gone: Vec<u64>,
    /// Namespaces that garbage collections return as suspects.
    pub(crate) suspects: BTreeSet<u64>,
    /// The last rules of each pod, in the order of enrolment.
    pub(crate) enrolled: Vec<(u64, Rules)>,
    /// The error of the next enrolment.
    pub(crate) refusal: Option<DatapathError>,
    /// Enrolments ask for a search first; what happens if it fails.
    pub(crate) searches: Option<Otherwise>,
    /// Enrolments without what a search has found are left pending.
    pub(crate) is_pending: bool,
    /// What calls of an enrolment did, in their order.
    pub(crate) steps: Vec<&'static str>,
    pub(crate) bypassed: bool,
    pub(crate) losses: Losses,
}

impl FakeKernel {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Starts an owner thread for it.
    pub(crate) fn spawn(&self) -> Handle {
        Handle::spawn(self.clone()).unwrap()
    }
}

/// A search that any namespace answers: there are no such listeners.
fn nothing_to_find() -> Search {
    Search { proxy_uid: 0, proxy_cgroup: None, cgroup: "/".into(), ports: Vec::new(), own_ports: Vec::new() }
}

impl Kernel for FakeKernel {
    fn facts(&self) -> Facts {
        Facts { digest: "fake".into(), cgroup: "/".into(), pin_dir: "/".into(), cookies: Cookies::Kernel }
    }

    fn names(&self) -> &Names {
        &self.names
    }

    fn begin_enrolment(
        &mut self,
        netns: &Netns,
        rules: &Rules,
        listeners: Option<&[TakenListener]>,
    ) -> Result<Begun, DatapathError> {
        let searches = self.state().searches.filter(|_| listeners.is_none());
        if let Some(otherwise) = searches {
            self.state().steps.push("search");
            return Ok(Begun::Search { search: nothing_to_find(), otherwise });
        }
        if let Some(refusal) = self.state().refusal.take() {
            return Err(refusal);
        }
        self.names.insert(netns.cookie, &rules.pod);
        let mut state = self.state();
        state.steps.push("begin");
        state.enrolled.push((netns.cookie, rules.clone()));
        let enrolment = Enrolment { cookie: netns.cookie, generation: 1, changed: true, is_new: true };
        if state.is_pending {
            return Ok(Begun::Pending(Pending { enrolment, search: nothing_to_find() }));
        }
        Ok(Begun::Done(enrolment))
    }

    fn complete_enrolment(&mut self, pending: Pending, _: &[TakenListener]) -> Result<Enrolment, DatapathError> {
        self.state().steps.push("complete");
        Ok(pending.enrolment)
    }

    fn search_again(&mut self, _: u64) -> Result<Option<Search>, DatapathError> {
        Ok(None)
    }

    fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError> {
        self.names.cookies(pod).into_iter().for_each(|cookie| self.names.remove(cookie));
        self.state().enrolled.retain(|(_, rules)| rules.pod != *pod);
        Ok(())
    }

    fn collect_garbage(&mut self) -> Result<Collected, DatapathError> {
        let mut state = self.state();
        Ok(Collected { removed: std::mem::take(&mut state.gone), suspects: state.suspects.clone() })
    }

    fn remove_absent(&mut self, absent: &BTreeSet<u64>) -> Result<Vec<u64>, DatapathError> {
        let mut state = self.state();
        let removed = absent.intersection(&state.suspects).copied().collect();
        state.suspects.retain(|cookie| !absent.contains(cookie));
        Ok(removed)
    }

    fn sample(&mut self, _: std::time::Duration) -> Result<Arc<Sample>, DatapathError> {
        Ok(Arc::default())
    }

    fn explain(&self, _: &Question) -> Result<Answer, DatapathError> {
        Err(DatapathError::Stopped)
    }

    fn losses(&self) -> Result<Losses, DatapathError> {
        Ok(self.state().losses)
    }

    fn bypassed(&self) -> Result<bool, DatapathError> {
        Ok(self.state().bypassed)
    }

    fn keep_pins(&mut self) -> Result<Found, DatapathError> {
        Ok(Found::Whole)
    }

    fn is_unloaded(&self) -> Result<bool, DatapathError> {
        Ok(false)
    }

    fn start_events(&mut self) -> Result<RingEvents, DatapathError> {
        Err(DatapathError::Stopped)
    }

    fn stop_events(&mut self) -> Result<(), DatapathError> {
        Ok(())
    }
}

mod tests {
    use std::fs::File;

    use futures::FutureExt as _;

    use super::*;
    use crate::datapath::{
        rules::{Proxy, Wanted},
        takeover::TakeoverError,
    };

    fn enrolment(name: &str, cookie: u64) -> (Netns, Rules) {
        let file = File::open("/proc/self/ns/net").unwrap();
        let netns = Netns { file, cookie, addresses: Vec::new(), listening: None };
        let rules = Rules::new(Wanted {
            pod: PodName::new("shop".into(), name.into()).unwrap(),
            ips: vec!["10.244.0.5".parse().unwrap()],
            loopback_source: false,
            proxy: Proxy::default(),
            bypass: false,
            outbound_port: 4140,
            inbound_port: 4143,
            control_port: 4190,
            admin_port: 4191,
            skip_outbound_ports: Vec::new(),
            skip_inbound_ports: Vec::new(),
            skip_subnets: Vec::new(),
        });
        (netns, rules.unwrap())
    }

    #[tokio::test]
    async fn names_follow_enrolments() {
        let kernel = FakeKernel::default();
        let handle = kernel.spawn();
        let before = handle.names();
        let (netns, rules) = enrolment("web-0", 7);
        handle.enrol(netns, rules.clone()).await.unwrap();
        assert_eq!(kernel.state().enrolled, [(7, rules.clone())]);
        assert_eq!(handle.names().get(&7).map(|name| &**name), Some(&rules.pod));
        assert!(before.is_empty(), "a snapshot does not change");
        let pod = rules.pod.clone();
        handle.call(move |kernel| kernel.withdraw(&pod)).await.unwrap();
        assert!(handle.names().is_empty());
    }

    #[tokio::test]
    async fn a_refusal_reaches_the_caller_and_no_name_is_left() {
        let kernel = FakeKernel::default();
        let handle = kernel.spawn();
        kernel.state().refusal = Some(DatapathError::Superseded);
        let (netns, rules) = enrolment("web-0", 7);
        assert!(matches!(handle.enrol(netns, rules).await, Err(DatapathError::Superseded)));
        assert!(handle.names().is_empty());
    }

    #[tokio::test]
    async fn an_enrolment_searches_first_where_it_has_to_and_completes_what_is_pending() {
        for (searches, is_pending, expected) in [
            (None, false, &["begin"][..]),
            (None, true, &["begin", "complete"]),
            (Some(Otherwise::Nothing), false, &["search", "begin"]),
            (Some(Otherwise::Outbound), true, &["search", "begin", "complete"]),
        ] {
            let kernel = FakeKernel::default();
            (kernel.state().searches, kernel.state().is_pending) = (searches, is_pending);
            let (netns, rules) = enrolment("web-0", 7);
            kernel.spawn().enrol(netns, rules).await.unwrap();
            assert_eq!(kernel.state().steps, expected);
        }
    }

    #[tokio::test]
    async fn a_search_that_fails_changes_nothing_where_it_is_needed_and_is_an_error_all_the_same() {
        for (otherwise, expected) in
            [(Otherwise::Nothing, &["search"][..]), (Otherwise::Outbound, &["search", "begin"])]
        {
            let kernel = FakeKernel::default();
            (kernel.state().searches, kernel.state().is_pending) = (Some(otherwise), true);
            let (netns, rules) = enrolment("web-0", 7);
            let no_namespace = Netns { file: File::open("/dev/null").unwrap(), ..netns };
            let error = kernel.spawn().enrol(no_namespace, rules).await.unwrap_err();
            assert!(matches!(error, DatapathError::Takeover(TakeoverError::Ask(_))), "{error}");
            assert_eq!(kernel.state().steps, expected);
            let enrolled = usize::from(otherwise == Otherwise::Outbound);
            assert_eq!(kernel.state().enrolled.len(), enrolled, "the pod's own connections do not wait");
        }
    }

    #[tokio::test]
    async fn the_admin_port_is_skipped_until_its_listener_is_found() {
        for (path, is_found) in [("/proc/self/ns/net", true), ("/dev/null", false)] {
            let kernel = FakeKernel::default();
            kernel.state().searches = Some(Otherwise::SkippedAdminPort);
            let (netns, rules) = enrolment("web-0", 7);
            let netns = Netns { file: File::open(path).unwrap(), ..netns };
            kernel.spawn().enrol(netns, rules.clone()).await.unwrap();
            let expected = if is_found { rules } else { rules.with_admin_port_skipped() };
            assert_eq!(kernel.state().enrolled, [(7, expected)], "{path}");
        }
    }

    #[tokio::test]
    async fn the_owner_ends_after_the_calls_that_it_has() {
        let handle = FakeKernel::default().spawn();
        let (go_on_tx, go_on) = std::sync::mpsc::channel();
        let mut call = Box::pin(handle.call(move |_| Ok(go_on.recv().unwrap())));
        let mut stop = Box::pin(handle.stop());
        assert!(call.as_mut().now_or_never().is_none() && stop.as_mut().now_or_never().is_none());
        go_on_tx.send(7).unwrap();
        stop.await;
        assert_eq!(call.now_or_never().unwrap().unwrap(), 7);
        assert!(matches!(handle.call(|kernel| kernel.bypassed()).await, Err(DatapathError::Stopped)));
    }

    #[tokio::test]
    async fn the_owner_outlives_a_call_that_panics() {
        let handle = FakeKernel::default().spawn();
        let panicked: Result<(), _> = handle.call(|_| panic!("on purpose")).await;
        assert!(matches!(panicked, Err(DatapathError::Stopped)));
        assert!(!handle.call(|kernel| kernel.bypassed()).await.unwrap());
    }
}
