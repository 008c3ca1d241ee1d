//! A datapath without a kernel, for tests of code that uses the handle.

use std::sync::{Arc, Mutex, MutexGuard};

use super::{
    DatapathError, Enrolment,
    cookies::Cookies,
    events::RingEvents,
    explain::{Answer, Question},
    handle::{Begun, Facts, Handle, Kernel, Names, Pending},
    keep::Found,
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
    /// The last rules of each pod, in the order of enrolment.
    pub(crate) enrolled: Vec<(u64, Rules)>,
    /// The error of the next enrolment.
    pub(crate) refusal: Option<DatapathError>,
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
        _: Option<&[TakenListener]>,
    ) -> Result<Begun, DatapathError> {
        if let Some(refusal) = self.state().refusal.take() {
            return Err(refusal);
        }
        Arc::make_mut(&mut self.names).insert(netns.cookie, rules.pod.clone());
        self.state().enrolled.push((netns.cookie, rules.clone()));
        Ok(Begun::Done(Enrolment { cookie: netns.cookie, generation: 1, changed: true, is_new: true }))
    }

    fn complete_enrolment(&mut self, pending: Pending, _: &[TakenListener]) -> Result<Enrolment, DatapathError> {
        Ok(pending.enrolment)
    }

    fn search_again(&mut self, _: u64) -> Result<Option<Search>, DatapathError> {
        Ok(None)
    }

    fn withdraw(&mut self, pod: &PodName) -> Result<(), DatapathError> {
        Arc::make_mut(&mut self.names).retain(|_, name| name != pod);
        self.state().enrolled.retain(|(_, rules)| rules.pod != *pod);
        Ok(())
    }

    fn collect_garbage(&mut self) -> Result<Vec<u64>, DatapathError> {
        Ok(std::mem::take(&mut self.state().gone))
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

    use super::*;
    use crate::datapath::rules::{Proxy, Wanted};

    fn enrolment(name: &str, cookie: u64) -> (Netns, Rules) {
        let netns = Netns { file: File::open("/proc/self/ns/net").unwrap(), cookie, addresses: Vec::new() };
        let rules = Rules::new(Wanted {
            pod: PodName::new("shop".into(), name.into()).unwrap(),
            ips: vec!["10.244.0.5".parse().unwrap()],
            loopback_source: false,
            proxy: Proxy::default(),
            bypass: false,
            outbound_port: 4140,
            inbound_port: 4143,
            control_port: 4190,
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
        assert_eq!(handle.names().get(&7), Some(&rules.pod));
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
    async fn the_owner_outlives_a_call_that_panics() {
        let handle = FakeKernel::default().spawn();
        let panicked: Result<(), _> = handle.call(|_| panic!("on purpose")).await;
        assert!(matches!(panicked, Err(DatapathError::Stopped)));
        assert!(!handle.call(|kernel| kernel.bypassed()).await.unwrap());
    }
}
