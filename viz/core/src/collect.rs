//! When proxies are scraped: on demand, a bounded number at a time, each with a deadline, and for as long as somebody
//! asks.
//!
//! ```text
//! answer ──> look ── asks the fleet for pods ──> proxies without two scrapes, or late: scrape, wait, scrape ──> View
//! run ─────> every interval: the proxies of all namespaces that somebody asked for
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    error::RequestError,
    exposition::Exposition,
    fleet::{Fleet, Phase, Pod},
    history::{History, WINDOW},
    intern::Interner,
};

/// The most pods that are remembered after they are gone.
const MOST_GONE: usize = 1000;

/// When and how proxies are asked.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The time between two scrapes of a proxy.
    pub interval: Duration,
    /// The time between the first two, which the first answer is made of.
    pub first: Duration,
    /// How many proxies are asked at a time.
    pub at_once: usize,
    /// The deadline of one proxy's answer.
    pub deadline: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            first: Duration::from_secs(1),
            at_once: 64,
            deadline: Duration::from_secs(5),
        }
    }
}

/// The proxies of a mesh and what they counted.
#[derive(Debug)]
pub(crate) struct Collector<F> {
    pub(crate) fleet: F,
    pub(crate) config: Config,
    slots: Semaphore,
    interner: Mutex<Interner>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The namespaces that are collected, with the time of the last request; "" is all.
    asked: BTreeMap<String, Instant>,
    /// By the pod's uid.
    proxies: HashMap<String, Arc<Proxy>>,
}

/// A pod's proxy.
#[derive(Debug)]
pub(crate) struct Proxy {
    state: Mutex<ProxyState>,
    /// Held by the task that is scraping.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
pub(crate) struct ProxyState {
    pub(crate) pod: Arc<Pod>,
    pub(crate) history: History,
    /// Why the last scrape failed.
    pub(crate) error: Option<String>,
    attempted: Option<Instant>,
    /// Since when the fleet does not have the pod.
    gone: Option<Instant>,
}

/// What a request sees.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) pods: Vec<Arc<Pod>>,
    /// Of pods that are there, and of those that are gone but counted in the window.
    pub(crate) proxies: Vec<Arc<Proxy>>,
    pub(crate) now: Instant,
    /// What is left out.
    pub(crate) remark: Option<String>,
}

impl Proxy {
    fn new(pod: Arc<Pod>) -> Self {
        let state = ProxyState { pod, history: History::default(), error: None, attempted: None, gone: None };
        Self { state: Mutex::new(state), turn: tokio::sync::Mutex::new(()) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ProxyState> {
        self.state.lock()
    }
}

impl ProxyState {
    /// Whether the proxy is one to be asked.
    pub(crate) fn is_there(&self) -> bool {
        self.gone.is_none() && self.pod.proxy.is_some() && self.pod.phase == Phase::Running
    }
}

impl<F: Fleet> Collector<F> {
    pub(crate) fn new(fleet: F, config: Config) -> Self {
        let slots = Semaphore::new(config.at_once.max(1));
        Self { fleet, config, slots, interner: Mutex::default(), state: Mutex::default() }
    }

    /// What proxies share. To be locked after a proxy's state.
    pub(crate) fn interner(&self) -> &Mutex<Interner> {
        &self.interner
    }

    /// The pods of a namespace, of all when it is empty.
    pub(crate) async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, RequestError> {
        self.fleet.pods(namespace).await.map_err(RequestError::Unavailable)
    }

    /// The pods of a namespace and their proxies, with two scrapes each where they answer.
    pub(crate) async fn look(&self, namespace: &str) -> Result<View, RequestError> {
        let pods = self.pods(namespace).await?;
        Ok(self.look_at(namespace, pods, None).await)
    }

    /// As [`Self::look`] at all namespaces. Where the fleet may not show all, at one, which the view says.
    pub(crate) async fn look_everywhere(&self, otherwise: &str) -> Result<View, RequestError> {
        match self.pods("").await {
            Ok(pods) => Ok(self.look_at("", pods, None).await),
            Err(error) if otherwise.is_empty() => Err(error),
            Err(error) => {
                let remark = format!("only clients in namespace {otherwise} are counted: {error}");
                let pods = self.pods(otherwise).await?;
                Ok(self.look_at(otherwise, pods, Some(remark)).await)
            }
        }
    }

    async fn look_at(&self, namespace: &str, pods: Vec<Arc<Pod>>, remark: Option<String>) -> View {
        let began = Instant::now();
        let proxies = {
            let mut state = self.state.lock();
            state.asked.insert(namespace.to_owned(), began);
            state.update(namespace, &pods, began)
        };
        join_all(proxies.iter().map(|proxy| self.refresh(proxy))).await;
        View { pods, proxies, now: Instant::now(), remark }
    }

    /// Keeps what is asked for current, until it is dropped.
    pub(crate) async fn run(&self) {
        let mut rounds = tokio::time::interval(self.config.interval);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            rounds.tick().await;
            self.round().await;
        }
    }

    async fn round(&self) {
        let namespaces = self.state.lock().forget(Instant::now());
        for namespace in namespaces {
            // A fleet that does not know its pods now may know them at the next round; requests have the error.
            let Ok(pods) = self.fleet.pods(&namespace).await else { continue };
            let began = Instant::now();
            let proxies = self.state.lock().update(&namespace, &pods, began);
            join_all(proxies.iter().map(|proxy| async {
                let _turn = proxy.turn.lock().await;
                // A request may have been faster.
                let is_due = {
                    let state = proxy.state();
                    state.is_there() && state.attempted.is_none_or(|at| at < began)
                };
                if is_due {
                    self.scrape(proxy).await;
                }
            }))
            .await;
        }
    }

    /// Scrapes a proxy as often as an answer needs it. Requests at the same time share the scrapes.
    async fn refresh(&self, proxy: &Proxy) {
        let _turn = proxy.turn.lock().await;
        let late = self.config.interval + self.config.interval / 2;
        loop {
            let wait = {
                let state = proxy.state();
                let age = |at: Instant| at.elapsed();
                match (state.is_there(), state.attempted, state.history.last()) {
                    (false, ..) => return,
                    (_, None, _) => Duration::ZERO,
                    (_, Some(attempted), _) if age(attempted) > late => Duration::ZERO,
                    // It did not answer a moment ago.
                    (..) if state.error.is_some() => return,
                    (_, _, Some(last)) if state.history.len() < 2 => self.config.first.saturating_sub(age(last)),
                    _ => return,
                }
            };
            tokio::time::sleep(wait).await;
            self.scrape(proxy).await;
        }
    }

    async fn scrape(&self, proxy: &Proxy) {
        let Ok(_slot) = self.slots.acquire().await else { return };
        let (pod, mut text) = {
            let state = proxy.state();
            (Arc::clone(&state.pod), Exposition::new(Arc::clone(state.history.lines()), &self.interner))
        };
        let began = Instant::now();
        let answer = tokio::time::timeout(self.config.deadline, self.fleet.metrics(&pod, &mut text)).await;
        let answer =
            answer.unwrap_or_else(|_| Err(format!("no answer within {}s", self.config.deadline.as_secs_f32())));
        // The proxy counts until it answers, not until it is read.
        let at = Instant::now();
        let mut state = proxy.state();
        state.attempted = Some(began);
        state.error = answer.err();
        if state.error.is_none() {
            state.history.add(text.end(), at, self.interner.lock().bounds());
        }
    }

    /// How many proxies are remembered.
    #[cfg(test)]
    pub(crate) fn remembered(&self) -> usize {
        self.state.lock().proxies.len()
    }
}

impl State {
    /// Takes the pods of a namespace as they are now, and returns their proxies.
    fn update(&mut self, namespace: &str, pods: &[Arc<Pod>], now: Instant) -> Vec<Arc<Proxy>> {
        let there: HashSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        for pod in pods.iter().filter(|pod| pod.proxy.is_some()) {
            let proxy = self.proxies.entry(pod.uid.clone()).or_insert_with(|| Arc::new(Proxy::new(Arc::clone(pod))));
            let mut state = proxy.state();
            state.pod = Arc::clone(pod);
            state.gone = None;
        }
        let is_in = |pod: &Pod| namespace.is_empty() || pod.namespace == namespace;
        let mut gone = Vec::new();
        self.proxies.retain(|uid, proxy| {
            let mut state = proxy.state();
            if !is_in(&state.pod) || there.contains(uid.as_str()) {
                return true;
            }
            let since = *state.gone.get_or_insert(now);
            let is_kept = state.history.last().is_some_and(|last| now.saturating_duration_since(last) < WINDOW);
            if is_kept {
                gone.push((since, uid.clone()));
            }
            is_kept
        });
        gone.sort();
        for (_, uid) in gone.iter().take(gone.len().saturating_sub(MOST_GONE)) {
            self.proxies.remove(uid);
        }
        self.proxies.values().filter(|proxy| is_in(&proxy.state().pod)).cloned().collect()
    }

    /// Forgets what nobody has asked for, and returns the namespaces that are left; one when it is all of them.
    fn forget(&mut self, now: Instant) -> Vec<String> {
        self.asked.retain(|_, asked| now.saturating_duration_since(*asked) < WINDOW);
        if self.asked.contains_key("") {
            return vec![String::new()];
        }
        let asked = &self.asked;
        self.proxies.retain(|_, proxy| asked.contains_key(&proxy.state().pod.namespace));
        asked.keys().cloned().collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
