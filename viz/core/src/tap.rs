//! Live requests of many proxies as one stream.
//!
//! ```text
//! proxy ── up to the rate, opened again every second ──┐
//! proxy ───────────────────────────────────────────────┼─> Rate (all together) ──> queue, bounded ──> TapEvents
//! pods that come and go, every two seconds ────────────┘
//! ```
//!
//! A proxy sends no more requests than the rate allows, so that watching a busy service costs it little; a reader that
//! is slow loses whole requests, not the ends of some.

mod convert;

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use weft_proto::{
    linkerd::tap::{self as proxy, ObserveRequest},
    viz::{self, TapRequest, tap_event},
};

use crate::{
    collect::Collector,
    error::RequestError,
    fleet::{Fleet, Phase, Pod},
    target::Target,
};

pub(crate) use convert::observe_request;

/// Events of one tap, of all its proxies. Dropping it closes the taps.
pub type TapEvents = Pin<Box<dyn Stream<Item = viz::TapEvent> + Send>>;

/// Requests per second if the request does not say: Linkerd's.
const USUAL_RPS: u32 = 100;
/// The most requests per second.
const MOST_RPS: u32 = 1000;
/// Events that wait for the reader.
const QUEUE: usize = 2048;
/// What is said where no pod can be tapped yet.
const NONE: &str = "no pod that was asked for runs yet; requests are shown when one does";
/// How often pods are looked for.
const LOOK: Duration = Duration::from_secs(2);
/// The pause before a proxy is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// The time that a proxy's limit of requests is for.
const TURN: Duration = Duration::from_secs(1);
/// The most proxies of one tap.
const MOST_PROXIES: usize = 500;
/// The most requests of one proxy that have begun and not ended.
const MOST_OPEN: usize = 4096;

/// Opens a tap.
pub(crate) async fn open<F: Fleet>(
    collector: Arc<Collector<F>>,
    request: TapRequest,
) -> Result<TapEvents, RequestError> {
    let target = Target::read_with_pods("resource", request.resource.clone(), &request.selector)?;
    let max_rps = match request.max_rps {
        0 => USUAL_RPS,
        rps if rps <= MOST_RPS => rps,
        rps => {
            let message = format!("{rps} is more than {MOST_RPS}");
            return Err(RequestError::Invalid { field: "max_rps", message });
        }
    };
    let observe = observe_request(&request, max_rps)?;
    // The client gets an error at once if the pods are not known.
    let pods = collector.pods(&target.namespace).await?;
    let (events_tx, events) = mpsc::channel(QUEUE);
    if !pods.iter().any(|pod| is_wanted(pod, &target)) {
        let event = Some(tap_event::Event::Problem(NONE.to_owned()));
        // It is the first event: there is room.
        let _ = events_tx.try_send(viz::TapEvent { event, ..viz::TapEvent::default() });
    }
    let shared = Arc::new(Tapping {
        observe,
        rate: Mutex::new(Rate::new(max_rps)),
        skipped: AtomicU64::new(0),
        events: events_tx,
    });
    #[expect(clippy::disallowed_methods, reason = "the stream that it fills ends it")]
    let driver = tokio::spawn(drive(collector, target, pods, shared));
    let driver = AbortOnDrop(driver.abort_handle());
    let events = futures::stream::unfold((events, driver), |(mut events, driver)| async {
        let event = events.recv().await?;
        Some((event, (events, driver)))
    });
    Ok(events.boxed())
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What the proxies of one tap share.
struct Tapping {
    observe: ObserveRequest,
    rate: Mutex<Rate>,
    /// Requests since the last event that were left out.
    skipped: AtomicU64,
    events: mpsc::Sender<viz::TapEvent>,
}

/// A bucket of tokens: a second's requests at once at most.
#[derive(Debug)]
struct Rate {
    per_second: f64,
    tokens: f64,
    filled: Option<Instant>,
}

impl Rate {
    fn new(per_second: u32) -> Self {
        Self { per_second: per_second.into(), tokens: per_second.into(), filled: None }
    }

    fn take(&mut self, now: Instant) -> bool {
        let since = self.filled.map_or(Duration::ZERO, |filled| now.saturating_duration_since(filled));
        self.filled = Some(now);
        self.tokens = (self.tokens + since.as_secs_f64() * self.per_second).min(self.per_second);
        let has = self.tokens >= 1.0;
        if has {
            self.tokens -= 1.0;
        }
        has
    }
}

impl Tapping {
    /// Whether a request is to be shown.
    fn admits(&self) -> bool {
        let admits = self.events.capacity() > 0 && self.rate.lock().take(Instant::now());
        if !admits {
            self.skipped.fetch_add(1, Ordering::Relaxed);
        }
        admits
    }

    /// Sends an event with the number of requests that were left out before; whether there was room.
    fn send(&self, mut event: viz::TapEvent) -> bool {
        let skipped = self.skipped.swap(0, Ordering::Relaxed);
        event.skipped = skipped;
        let is_sent = self.events.try_send(event).is_ok();
        if !is_sent {
            self.skipped.fetch_add(skipped, Ordering::Relaxed);
        }
        is_sent
    }

    async fn problem(&self, pod: &Pod, why: String) {
        let event = Some(tap_event::Event::Problem(why));
        let (namespace, pod) = (pod.namespace.clone(), pod.name.clone());
        // The reader may be gone; then everything ends.
        let _ = self.events.send(viz::TapEvent { namespace, pod, event, ..viz::TapEvent::default() }).await;
    }
}

/// Opens taps as pods come, and ends them as pods go.
async fn drive<F: Fleet>(collector: Arc<Collector<F>>, target: Target, mut pods: Vec<Arc<Pod>>, shared: Arc<Tapping>) {
    let mut tasks = JoinSet::new();
    let mut running: HashMap<String, AbortHandle> = HashMap::new();
    let mut told: HashSet<String> = HashSet::new();
    loop {
        let wanted: Vec<&Arc<Pod>> = pods.iter().filter(|pod| is_wanted(pod, &target)).collect();
        let there: HashSet<&str> = wanted.iter().map(|pod| pod.uid.as_str()).collect();
        running.retain(|uid, task| {
            let is_there = there.contains(uid.as_str());
            if !is_there {
                task.abort();
            }
            is_there
        });
        told.retain(|uid| there.contains(uid.as_str()));
        for pod in wanted {
            if running.contains_key(&pod.uid) || told.contains(&pod.uid) {
                continue;
            }
            if let Some(why) = untapped(pod, running.len()) {
                told.insert(pod.uid.clone());
                shared.problem(pod, why).await;
                continue;
            }
            let task = observe(Arc::clone(&collector), Arc::clone(pod), Arc::clone(&shared));
            running.insert(pod.uid.clone(), tasks.spawn(task));
        }
        // What ended is not kept.
        while tasks.try_join_next().is_some() {}
        tokio::time::sleep(LOOK).await;
        if let Ok(found) = collector.pods(&target.namespace).await {
            pods = found;
        }
    }
}

fn is_wanted(pod: &Pod, target: &Target) -> bool {
    pod.phase == Phase::Running && target.row_of(pod).is_some()
}

/// Why a pod cannot be tapped.
fn untapped(pod: &Pod, running: usize) -> Option<String> {
    match pod.proxy {
        None => Some("has no proxy: add it to the mesh with `weft inject` or the annotation linkerd.io/inject, and restart it".to_owned()),
        Some(ports) if ports.tap.is_none() => Some(
            "its proxy does not serve tap: remove the annotation viz.linkerd.io/disable-tap from the pod and its namespace, \
             and restart the pod, so that the injector enables it"
                .to_owned(),
        ),
        Some(_) if running >= MOST_PROXIES => {
            Some(format!("is beyond the limit: {MOST_PROXIES} proxies are tapped at a time; name fewer pods"))
        }
        Some(_) => None,
    }
}

/// Reads one proxy's events until the task is aborted.
async fn observe<F: Fleet>(collector: Arc<Collector<F>>, pod: Arc<Pod>, shared: Arc<Tapping>) {
    let mut last_problem = String::new();
    loop {
        let opened = Instant::now();
        let tap = collector.fleet.tap(&pod, shared.observe.clone());
        let problem = match tokio::time::timeout(collector.config.deadline, tap).await {
            Err(_) => format!("its tap server did not answer within {}s", collector.config.deadline.as_secs_f32()),
            Ok(Err(why)) => why,
            Ok(Ok(mut events)) => {
                let mut proxy = OfProxy::new(&pod);
                loop {
                    match events.message().await {
                        Ok(Some(event)) => proxy.event(event, &shared),
                        Ok(None) => break String::new(),
                        Err(status) => break status.message().to_owned(),
                    }
                }
            }
        };
        if problem.is_empty() {
            // It sent as many requests as it may in this turn.
            last_problem.clear();
            tokio::time::sleep(TURN.saturating_sub(opened.elapsed())).await;
            continue;
        }
        if problem != last_problem {
            shared.problem(&pod, problem.clone()).await;
            last_problem = problem;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// The requests of one stream of a proxy.
struct OfProxy<'a> {
    pod: &'a Pod,
    /// Of the requests that are shown: those that have not ended.
    open: HashSet<(u32, u64)>,
}

impl<'a> OfProxy<'a> {
    fn new(pod: &'a Pod) -> Self {
        Self { pod, open: HashSet::new() }
    }

    fn event(&mut self, event: proxy::TapEvent, shared: &Tapping) {
        let Some((event, id, step)) = convert::event(self.pod, event) else { return };
        match step {
            convert::Step::Request => {
                if self.open.len() >= MOST_OPEN || !shared.admits() {
                    return;
                }
                if shared.send(event) {
                    self.open.insert(id);
                } else {
                    shared.skipped.fetch_add(1, Ordering::Relaxed);
                }
            }
            convert::Step::Response if self.open.contains(&id) => {
                shared.send(event);
            }
            convert::Step::End if self.open.remove(&id) => {
                shared.send(event);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
