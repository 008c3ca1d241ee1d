//! Kubernetes Events: what a person should know of an object, where `kubectl describe` shows it.
//!
//! Publishing never fails a caller and never makes it wait: an Event that the API refuses is logged.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use super::explain;

/// Longest note, in bytes, that the API accepts (`events.k8s.io/v1`: 1024).
const MAX_NOTE: usize = 1024;

/// Publishes Events as one component; without an API (the sandbox), drops them.
#[derive(Clone)]
pub(crate) struct Events(Option<Recorder>);

impl Events {
    /// Events of `linkerd.io/<component>`.
    pub(crate) fn new(client: Client, component: &str) -> Self {
        let controller = format!("linkerd.io/{component}");
        Self(Some(Recorder::new(client, Reporter { instance: std::env::var("HOSTNAME").ok(), controller })))
    }

    /// Events that nobody reads.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Publishes that something went as it should, in the background.
    pub(crate) fn normal(&self, reason: &'static str, note: String, regarding: ObjectReference) {
        self.spawn(EventType::Normal, reason, note, regarding);
    }

    /// Publishes that somebody should act, in the background.
    pub(crate) fn warning(&self, reason: &'static str, note: String, regarding: ObjectReference) {
        self.spawn(EventType::Warning, reason, note, regarding);
    }

    fn spawn(&self, type_: EventType, reason: &'static str, note: String, regarding: ObjectReference) {
        let events = self.clone();
        tokio::spawn(async move { events.publish(type_, reason, note, &regarding).await });
    }

    /// Publishes and waits until it is done, for a process that is about to end.
    pub(crate) async fn publish(
        &self,
        type_: EventType,
        reason: &'static str,
        note: String,
        regarding: &ObjectReference,
    ) {
        let Some(recorder) = &self.0 else { return };
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
