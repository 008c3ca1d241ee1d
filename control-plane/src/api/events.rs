//! Kubernetes Events: what a person should know about an object, shown by `kubectl describe`.
//!
//! Publishing never fails the caller and never makes it wait: an Event that the API server refuses is logged.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

use super::explain;
use crate::allowance::{Allowance, Rate};

/// The longest note that the API server accepts, in bytes (`events.k8s.io/v1`: 1024).
const MAX_NOTE: usize = 1024;

/// The most Events that may be in flight. Further ones are dropped: clients of the control plane cause
/// Events, and a slow API server must not cost memory here.
const MAX_PENDING: usize = 64;

/// Events that something went well: a renewal of every certificate in a cluster causes one each, and the API server
/// stores each of them. Warnings are not among them; those wait for [`MAX_PENDING`] alone.
const NORMAL: Rate = Rate { burst: 200.0, per_second: 10.0 };

/// Warnings that any client can cause, as often as it asks: one a minute.
const REPEATED: Rate = Rate { burst: 1.0, per_second: 1.0 / 60.0 };

/// Publishes Events as one component; without an API (the sandbox), drops them.
#[derive(Clone)]
pub(crate) struct Events {
    recorder: Option<Recorder>,
    pending: Arc<Semaphore>,
    normal: Arc<Mutex<Allowance>>,
    repeated: Arc<Mutex<Allowance>>,
}

impl Events {
    /// Events of `linkerd.io/<component>`.
    pub(crate) fn new(client: Client, component: &str) -> Self {
        let controller = format!("linkerd.io/{component}");
        let reporter = Reporter { instance: std::env::var("HOSTNAME").ok(), controller };
        Self { recorder: Some(Recorder::new(client, reporter)), ..Self::none() }
    }

    /// Drops every Event.
    pub(crate) fn none() -> Self {
        let full = |rate| Arc::new(Mutex::new(Allowance::new(rate, Instant::now())));
        let pending = Arc::new(Semaphore::new(MAX_PENDING));
        Self { recorder: None, pending, normal: full(NORMAL), repeated: full(REPEATED) }
    }

    /// Publishes in the background that something went well, unless there are too many of these.
    pub(crate) fn normal(&self, reason: &'static str, note: String, regarding: ObjectReference) {
        if !self.normal.lock().take(Instant::now()) {
            return tracing::debug!(reason, "event dropped, the rate is too high");
        }
        self.spawn(EventType::Normal, reason, note, regarding);
    }

    /// Publishes in the background that somebody should act.
    pub(crate) fn warning(&self, reason: &'static str, note: String, regarding: ObjectReference) {
        self.spawn(EventType::Warning, reason, note, regarding);
    }

    /// As [`Self::warning`], for what every request finds again: at most one a minute.
    pub(crate) fn repeated_warning(&self, reason: &'static str, note: String, regarding: ObjectReference) {
        if self.repeated.lock().take(Instant::now()) {
            self.warning(reason, note, regarding);
        }
    }

    #[expect(clippy::disallowed_methods, reason = "an event is worth no wait at the end")]
    fn spawn(&self, type_: EventType, reason: &'static str, note: String, regarding: ObjectReference) {
        let Ok(permit) = self.pending.clone().try_acquire_owned() else {
            return tracing::debug!(reason, "event dropped, too many are waiting");
        };
        let events = self.clone();
        tokio::spawn(async move {
            events.publish(type_, reason, note, &regarding).await;
            drop(permit);
        });
    }

    /// Publishes and waits until that is done, for a process that is about to end.
    pub(crate) async fn publish(
        &self,
        type_: EventType,
        reason: &'static str,
        note: String,
        regarding: &ObjectReference,
    ) {
        let Some(recorder) = &self.recorder else { return };
        let note = Some(shortened(note));
        let event = Event { type_, reason: reason.to_owned(), note, action: reason.to_owned(), secondary: None };
        if let Err(error) = recorder.publish(&event, regarding).await {
            let (kind, name) = (regarding.kind.as_deref(), regarding.name.as_deref());
            let error = explain(&error);
            tracing::warn!(error, reason, kind, name, "event cannot be published");
        }
    }
}

fn shortened(mut note: String) -> String {
    if note.len() > MAX_NOTE {
        note.truncate(note.floor_char_boundary(MAX_NOTE));
    }
    note
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use kube::client::Body;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_warning_that_every_request_causes_is_published_once_a_minute() {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let api = tower::service_fn(move |_: http::Request<Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok::<_, Infallible>(http::Response::new(Body::empty())))
        });
        let events = Events::new(Client::new(api, "default"), "identity");
        for minute in 1..=3 {
            for _ in 0..100 {
                events.repeated_warning("IssuerValidationFailed", "expired".to_owned(), ObjectReference::default());
            }
            tokio::time::sleep(Duration::from_secs(61)).await;
            assert_eq!(sent.load(Ordering::Relaxed), minute);
        }
    }
}
