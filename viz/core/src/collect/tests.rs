//! When proxies are asked, and what is forgotten, against a fleet in memory.

use std::sync::atomic::{AtomicU64, Ordering};

use weft_proto::linkerd::tap::{ObserveRequest, TapEvent};

use super::*;
use crate::fleet::ProxyPorts;

/// A fleet whose proxies answer one request more at each scrape.
#[derive(Debug, Default)]
pub(crate) struct FakeFleet {
    pub(crate) pods: Mutex<Vec<Arc<Pod>>>,
    pub(crate) scrapes: AtomicU64,
    /// Pods that never answer.
    pub(crate) silent: Mutex<HashSet<String>>,
    pub(crate) at_once: AtomicU64,
    pub(crate) most_at_once: AtomicU64,
}

pub(crate) fn pod(namespace: &str, name: &str) -> Arc<Pod> {
    Arc::new(Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: format!("{namespace}/{name}"),
        owners: vec![("replicaset".to_owned(), "web-1".to_owned()), ("deployment".to_owned(), "web".to_owned())],
        labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
        addresses: Vec::new(),
        node: "a".to_owned(),
        service_account: "web".to_owned(),
        phase: Phase::Running,
        status: "Running".to_owned(),
        proxy: Some(ProxyPorts { admin: 4191, tap: Some(4190) }),
    })
}

impl FakeFleet {
    pub(crate) fn of(pods: impl IntoIterator<Item = Arc<Pod>>) -> Self {
        Self { pods: Mutex::new(pods.into_iter().collect()), ..Self::default() }
    }
}

impl Fleet for FakeFleet {
    async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        let pods = self.pods.lock();
        Ok(pods.iter().filter(|pod| namespace.is_empty() || pod.namespace == namespace).cloned().collect())
    }

    async fn metrics(&self, pod: &Pod, metrics: &mut Exposition<'_>) -> Result<(), String> {
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(now, Ordering::SeqCst);
        if self.silent.lock().contains(&pod.name) {
            self.at_once.fetch_sub(1, Ordering::SeqCst);
            return std::future::pending().await;
        }
        tokio::task::yield_now().await;
        self.at_once.fetch_sub(1, Ordering::SeqCst);
        let count = self.scrapes.fetch_add(1, Ordering::SeqCst);
        let text = format!("response_total{{direction=\"inbound\",classification=\"success\"}} {count}\n");
        metrics.read(text.as_bytes())
    }

    async fn tap(&self, _pod: &Pod, _request: ObserveRequest) -> Result<tonic::Streaming<TapEvent>, String> {
        Err("no tap here".to_owned())
    }
}

fn collector(fleet: FakeFleet) -> Collector<FakeFleet> {
    let config = Config {
        interval: Duration::from_secs(10),
        first: Duration::from_millis(5),
        at_once: 4,
        deadline: Duration::from_millis(50),
    };
    Collector::new(fleet, config)
}

#[tokio::test]
async fn the_first_answer_has_two_scrapes_of_each_proxy_and_the_next_none() {
    let collector = collector(FakeFleet::of((0..20).map(|index| pod("shop", &format!("web-{index}")))));
    let view = collector.look("shop").await.unwrap();
    assert!(view.proxies.iter().all(|proxy| proxy.state().history.len() == 2));
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 40);
    let most = collector.fleet.most_at_once.load(Ordering::SeqCst);
    assert!((2..=4).contains(&most), "{most} at once");
    collector.look("shop").await.unwrap();
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 40);
}

#[tokio::test]
async fn requests_at_the_same_time_share_the_scrapes() {
    let collector = collector(FakeFleet::of([pod("shop", "web-0")]));
    let (a, b, c) = tokio::join!(collector.look("shop"), collector.look("shop"), collector.look(""));
    assert!([a, b, c].iter().all(|view| view.as_ref().unwrap().proxies[0].state().history.len() == 2));
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_proxy_that_does_not_answer_has_a_reason_and_delays_nobody_twice() {
    let collector = collector(FakeFleet::of([pod("shop", "web-0"), pod("shop", "web-1")]));
    collector.fleet.silent.lock().insert("web-1".to_owned());
    for _ in 0..3 {
        let view = collector.look("shop").await.unwrap();
        for proxy in &view.proxies {
            let state = proxy.state();
            let is_silent = state.pod.name == "web-1";
            assert_eq!(state.error.is_some(), is_silent);
            assert_eq!(state.history.len(), if is_silent { 0 } else { 2 });
        }
    }
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_pod_that_is_replaced_by_one_of_its_name_counts_for_itself() {
    let collector = collector(FakeFleet::of([pod("shop", "web-0")]));
    collector.look("shop").await.unwrap();
    let mut other = (*pod("shop", "web-0")).clone();
    other.uid = "another".to_owned();
    *collector.fleet.pods.lock() = vec![Arc::new(other)];
    let view = collector.look("shop").await.unwrap();
    // The first is gone, and counted in the window all the same.
    let there: Vec<bool> = view.proxies.iter().map(|proxy| proxy.state().is_there()).collect();
    assert_eq!(there.iter().filter(|there| **there).count(), 1);
    assert_eq!(view.proxies.len(), 2);
    assert!(view.proxies.iter().all(|proxy| proxy.state().history.len() == 2));
}

#[tokio::test]
async fn rounds_keep_what_is_asked_for_and_forget_the_rest() {
    let collector = collector(FakeFleet::of([pod("shop", "web-0"), pod("other", "web-0")]));
    collector.look("shop").await.unwrap();
    collector.look("other").await.unwrap();
    collector.round().await;
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 6);
    assert_eq!(collector.remembered(), 2);
    // Somebody goes on to ask for one of them.
    let later = Instant::now() + WINDOW;
    collector.state.lock().asked.insert("shop".to_owned(), later);
    assert_eq!(collector.state.lock().forget(later), ["shop"]);
    assert_eq!(collector.remembered(), 1);
    collector.round().await;
    assert_eq!(collector.fleet.scrapes.load(Ordering::SeqCst), 7);
}
