//! The watch of one kind, kept alive.

use std::pin::pin;

use futures::{Stream, StreamExt};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client,
    core::{DynamicObject, ObjectMeta, PartialObjectMeta},
    runtime::{
        utils::Backoff,
        watcher::{self, Config, DefaultBackoff, Event as Watch},
    },
};
use weft_k8s_api::manifest::{self, Object, ObjectRef, Unreadable};

use super::{definition, kinds::Watched, requests};
use crate::{
    api::{explain_watch, next_pause},
    metrics::{Delivered, WatchMetrics},
};

/// A message of a watch.
#[derive(Debug)]
pub(super) enum Update {
    /// A list begins: objects that are not in it are gone.
    ListBegins,
    /// An object of the list.
    Listed(Read),
    /// The list is complete.
    ListEnds,
    /// An object was created or changed.
    Changed(Read),
    /// An object was deleted.
    Deleted(ObjectRef),
    /// The watch goes on where it was interrupted.
    Resumed,
    /// The watch fails at present.
    Trouble(Trouble),
    /// The kind is not installed, and need not be.
    NotInstalled,
}

/// Why a watch cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    /// The problem, and a remedy.
    pub(super) problem: String,
    /// Whether it lasts until somebody acts.
    pub(super) lasting: bool,
}

/// An object as it was parsed.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) reference: ObjectRef,
    /// Its resource version.
    pub(super) version: String,
    /// When it was last written, by the API server's clock.
    pub(super) written: Option<Timestamp>,
    pub(super) uid: Option<String>,
    pub(super) object: Result<Object, Unreadable>,
}

/// Annotation in which `kubectl apply` repeats the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// HTTP statuses that mean something other than "try again".
const NOT_FOUND: u16 = 404;
const FORBIDDEN: u16 = 403;
const GONE: u16 = 410;
const UNPROCESSABLE: u16 = 422;

/// How a watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// With a streamed list.
    Stream,
    /// With a paged list of the newest state.
    List,
}

/// State of a watch between attempts.
struct WatchState {
    /// Index into the kind's versions.
    version: usize,
    start: Start,
    /// Whether the last answer was that the watch's position is too old.
    gone: bool,
}

/// What to do after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    /// Resume the watch where it was, after a wait.
    Resume,
    /// Start anew, after a wait.
    Restart,
    /// Start anew at once, as intended.
    RestartNow,
}

impl WatchState {
    fn new() -> Self {
        Self { version: 0, start: Start::Stream, gone: false }
    }

    /// Takes in an update that shows that the watch works.
    fn succeeded(&mut self, update: &Update) {
        self.gone = false;
        // A later list takes the load of one page at a time off the API server: every watch may need one at once.
        if matches!(update, Update::ListEnds) {
            self.start = Start::List;
        }
    }

    /// Decides what to do after an error. kube's watcher resumes by itself. If the API server no longer has the
    /// position, it starts anew only if a watch event says so, not if the request to resume is refused, and then
    /// always with a streamed list.
    fn failed(&mut self, versions: usize, error: &watcher::Error) -> Retry {
        match status(error) {
            // The API server has no streamed lists (Kubernetes 1.32 to 1.34, by feature gate).
            Some(UNPROCESSABLE) if self.start == Start::Stream => {
                self.start = Start::List;
                Retry::RestartNow
            }
            Some(GONE) if !std::mem::replace(&mut self.gone, true) => Retry::RestartNow,
            Some(GONE) => Retry::Restart,
            Some(NOT_FOUND) if self.version + 1 < versions => {
                self.version += 1;
                Retry::RestartNow
            }
            Some(NOT_FOUND) => {
                self.version = 0;
                Retry::Restart
            }
            _ if matches!(error, watcher::Error::NoResourceVersion) => Retry::Restart,
            _ => Retry::Resume,
        }
    }
}

/// Follows a kind and passes every update to `send`, until that returns false.
pub(super) async fn follow<F: Future<Output = bool>>(
    client: Client,
    kind: Watched,
    metrics: &WatchMetrics,
    send: impl Fn(Update) -> F,
) {
    let (client, mut resumed) = requests::of_watch(&client);
    let mut backoff = DefaultBackoff::default();
    let mut state = WatchState::new();
    loop {
        let version = kind.versions[state.version];
        metrics.watching(kind.kind, version);
        let mut events = pin!(events(&client, kind, version, state.start));
        // kube's watcher says that a list begins before it asks for it. It has begun when something of it is there.
        let mut list_begins = false;
        let mut listed = false;
        loop {
            let event = tokio::select! {
                biased;
                Ok(()) = resumed.changed() => Ok(Update::Resumed),
                event = events.next() => match event {
                    Some(event) => event,
                    None => break,
                },
            };
            let error = match event {
                Ok(Update::ListBegins) => {
                    (list_begins, listed) = (true, false);
                    continue;
                }
                Ok(update) => {
                    if works(&update) {
                        backoff.reset();
                        state.succeeded(&update);
                    }
                    if let Some(what) = delivered(&update) {
                        metrics.delivered(kind.kind, version, what);
                    }
                    listed |= matches!(update, Update::ListEnds);
                    if std::mem::take(&mut list_begins) && !send(Update::ListBegins).await {
                        return;
                    }
                    if !send(update).await {
                        return;
                    }
                    continue;
                }
                // Without bookmarks, that is no trouble: the API server is asked, and has to answer.
                Err(error) if listed && is_silence(&error) => {
                    tracing::debug!(kind = %kind.kind, "watch is silent, resuming it");
                    continue;
                }
                Err(error) => error,
            };
            metrics.failed(kind.kind, version, &error);
            // What was accepted before this error does not end it.
            resumed.mark_unchanged();
            let retry = state.failed(kind.versions.len(), &error);
            if retry == Retry::RestartNow {
                tracing::debug!(kind = %kind.kind, error = explain_watch(&error), "watch begins anew");
                break;
            }
            let absent = kind.optional && status(&error) == Some(NOT_FOUND);
            let update =
                if absent { Update::NotInstalled } else { Update::Trouble(explain(kind, status(&error), &error)) };
            if !send(update).await {
                return;
            }
            if absent {
                definition::installed(&client, kind).await;
            }
            tokio::time::sleep(next_pause(&mut backoff)).await;
            if retry == Retry::Restart {
                break;
            }
        }
    }
}

/// Whether an update shows that the watch works: it may fail in the middle of a list, each time, or after it is
/// accepted.
const fn works(update: &Update) -> bool {
    matches!(update, Update::ListEnds | Update::Changed(_) | Update::Deleted(_))
}

/// What an update counts as.
const fn delivered(update: &Update) -> Option<Delivered> {
    match update {
        Update::ListEnds => Some(Delivered::Restart),
        Update::Changed(_) => Some(Delivered::Apply),
        Update::Deleted(_) => Some(Delivered::Delete),
        _ => None,
    }
}

/// Whether nothing was received for as long as the client waits.
fn is_silence(error: &watcher::Error) -> bool {
    let mut cause = Some(error as &(dyn std::error::Error + 'static));
    while let Some(error) = cause {
        if error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn status(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status.code),
        watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

fn explain(kind: Watched, status: Option<u16>, error: &watcher::Error) -> Trouble {
    let (group, plural) = (kind.kind.group(), kind.plural);
    match status {
        Some(NOT_FOUND) if kind.is_custom() => Trouble {
            problem: format!(
                "custom resource definition {plural}.{group} is not installed (served as {}); run: helm install weft-crds",
                kind.versions.join(", ")
            ),
            lasting: true,
        },
        Some(FORBIDDEN) => {
            let group = if group.is_empty() { "the core group" } else { group };
            let problem = format!(
                "{plural} of {group} may not be watched: {}; grant list and watch to this ServiceAccount in its \
                 ClusterRole, which helm upgrade weft-control-plane does",
                explain_watch(error)
            );
            Trouble { problem, lasting: true }
        }
        _ => Trouble { problem: format!("{plural} cannot be watched: {}", explain_watch(error)), lasting: false },
    }
}

fn events(
    client: &Client,
    kind: Watched,
    version: &str,
    start: Start,
) -> std::pin::Pin<Box<dyn Stream<Item = Result<Update, watcher::Error>> + Send>> {
    let resource = kind.resource(version);
    let mut config = Config::default();
    if let Some(label) = kind.label {
        config = config.labels(label);
    }
    if start == Start::Stream {
        config = config.streaming_lists();
    }
    if kind.metadata_only {
        let api = Api::<PartialObjectMeta<DynamicObject>>::all_with(client.clone(), &resource);
        let events = watcher::watcher(api, config);
        events.map(move |event| event.map(|event| update(kind, event, |meta| (meta.metadata, None)))).boxed()
    } else {
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let events = watcher::watcher(api, config);
        let split = |object: DynamicObject| (object.metadata, Some(object.data));
        events.map(move |event| event.map(|event| update(kind, event, split))).boxed()
    }
}

fn update<K>(kind: Watched, event: Watch<K>, split: impl Fn(K) -> (ObjectMeta, Option<serde_json::Value>)) -> Update {
    let read = |object: K| {
        let (metadata, data) = split(object);
        read(kind, metadata, data)
    };
    match event {
        Watch::Init => Update::ListBegins,
        Watch::InitApply(object) => Update::Listed(read(object)),
        Watch::InitDone => Update::ListEnds,
        Watch::Apply(object) => Update::Changed(read(object)),
        Watch::Delete(object) => Update::Deleted(reference(kind, &split(object).0)),
    }
}

/// Parses an object, without long parts that are not used.
fn read(kind: Watched, mut metadata: ObjectMeta, data: Option<serde_json::Value>) -> Read {
    // As in Linkerd (`latestUpdated`): the newest time that any writer of a field has.
    let writers = metadata.managed_fields.take().into_iter().flatten();
    let written = writers.filter_map(|writer| Some(writer.time?.0)).max();
    if let Some(annotations) = &mut metadata.annotations {
        annotations.remove(LAST_APPLIED);
    }
    let reference = reference(kind, &metadata);
    let (version, uid) = (metadata.resource_version.clone().unwrap_or_default(), metadata.uid.clone());
    let mut whole = data.unwrap_or_else(|| serde_json::json!({}));
    if let Some(fields) = whole.as_object_mut() {
        fields.insert("apiVersion".to_owned(), kind.resource(kind.versions[0]).api_version.into());
        fields.insert("kind".to_owned(), kind.kind.name().into());
        fields.insert("metadata".to_owned(), serde_json::json!(metadata));
        // A ReplicaSet's type requires a spec, which is not part of its metadata.
        if kind.metadata_only {
            fields.insert("spec".to_owned(), serde_json::json!({"selector": {}, "template": {}}));
        }
    }
    Read { reference, version, written, uid, object: manifest::from_api(kind.kind, whole) }
}

fn reference(kind: Watched, metadata: &ObjectMeta) -> ObjectRef {
    ObjectRef {
        kind: kind.kind,
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::{Interest, watched};
    use super::*;

    fn kind(plural: &str) -> Watched {
        let all = watched(Interest::Parts {
            discovery: Some(weft_index::EndpointsFrom::Slices),
            policy: true,
            reference_grants: true,
        });
        all.into_iter().find(|kind| kind.plural == plural).unwrap()
    }

    fn metadata(json: serde_json::Value) -> ObjectMeta {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn metadata_alone_is_an_object_of_its_kind() {
        for plural in ["nodes", "replicasets", "jobs"] {
            let read = read(kind(plural), metadata(serde_json::json!({"name": "x", "labels": {"a": "b"}})), None);
            let object = read.object.unwrap();
            assert_eq!(object.kind(), kind(plural).kind);
            assert_eq!(object.metadata().labels.as_ref().unwrap()["a"], "b");
        }
    }

    #[test]
    fn long_parts_are_dropped_and_fields_are_named() {
        let meta = serde_json::json!({"name": "s", "namespace": "shop", "resourceVersion": "7",
            "managedFields": [{"manager": "kubectl", "time": "2026-01-02T03:04:05Z"}, {"manager": "x"},
                {"manager": "y", "time": "2026-01-02T03:04:04Z"}], "annotations": {LAST_APPLIED: "{}", "a": "b"}});
        let spec = serde_json::json!({"spec": {"podSelector": {}, "port": 80}});
        let good = read(kind("servers"), metadata(meta.clone()), Some(spec));
        assert_eq!((good.reference.to_string().as_str(), good.version.as_str()), ("Server shop/s", "7"));
        assert_eq!(good.written.map(|at| at.to_string()).as_deref(), Some("2026-01-02T03:04:05Z"));
        let object = good.object.unwrap();
        assert!(object.metadata().managed_fields.is_none());
        assert_eq!(object.metadata().annotations.as_ref().unwrap().len(), 1);

        let spec = serde_json::json!({"spec": {"podSelector": {"matchLabels": 7}, "port": 80}});
        let bad = read(kind("servers"), metadata(meta), Some(spec)).object.unwrap_err();
        assert_eq!(bad.problems[0].field, "spec.podSelector.matchLabels");
    }

    /// Answers as an API server that accepts a streamed list, refuses to resume, and then accepts a list.
    fn answer(query: &str) -> http::Response<kube::client::Body> {
        let server = serde_json::json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
            "metadata": {"name": "a", "namespace": "shop", "resourceVersion": "4"}, "spec": {"podSelector": {}, "port": 80}});
        let bookmark = serde_json::json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
            "metadata": {"name": "", "resourceVersion": "5", "annotations": {"k8s.io/initial-events-end": "true"}}});
        let (code, body) = if query.contains("sendInitialEvents=true") {
            let events = [("ADDED", server), ("BOOKMARK", bookmark)];
            let lines = events.map(|(kind, object)| serde_json::json!({"type": kind, "object": object}).to_string());
            (200, lines.join("\n"))
        } else if query.contains("resourceVersion=5") {
            let status = serde_json::json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 410,
                "reason": "Expired", "message": "too old resource version: 5 (8)"});
            (410, status.to_string())
        } else {
            let list = serde_json::json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "ServerList",
                "metadata": {"resourceVersion": "9"}, "items": []});
            (200, list.to_string())
        };
        http::Response::builder().status(code).body(kube::client::Body::from(body.into_bytes())).unwrap()
    }

    #[tokio::test]
    async fn a_watch_that_may_not_resume_lists_what_is_newest() {
        let queries = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
        let asked = queries.clone();
        let api = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let query = request.uri().query().unwrap_or_default().to_owned();
            asked.lock().push(query.clone());
            async move { Ok::<_, std::convert::Infallible>(answer(&query)) }
        });
        let updates = parking_lot::Mutex::new(Vec::new());
        let metrics = WatchMetrics::default();
        follow(Client::new(api, "default"), kind("servers"), &metrics, |update| {
            let mut updates = updates.lock();
            updates.push(match &update {
                Update::Listed(read) => format!("listed {}", read.reference.name),
                other => format!("{other:?}"),
            });
            let lists = updates.iter().filter(|update| *update == "ListEnds").count();
            std::future::ready(lists < 2)
        })
        .await;
        assert_eq!(*updates.lock(), ["ListBegins", "listed a", "ListEnds", "ListBegins", "ListEnds"]);
        let queries = queries.lock();
        assert_eq!(queries.len(), 3, "{queries:?}");
        assert!(!queries[0].contains("resourceVersion="), "{queries:?}");
        // Without a version, a list has the newest state; version 0 would allow an older one than was already seen.
        assert!(!queries[2].contains("resourceVersion") && !queries[2].contains("watch=true"), "{queries:?}");
    }

    #[test]
    fn troubles_name_their_remedy() {
        let api = |code: u16| {
            let status = kube::core::Status { code, message: "no".to_owned(), ..kube::core::Status::default() };
            watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status)))
        };
        let text = |plural, code| {
            let error = api(code);
            explain(kind(plural), status(&error), &error)
        };
        for (plural, code, part, lasting) in [
            ("servers", 404, "servers.policy.linkerd.io is not installed", true),
            ("servers", 404, "helm install weft-crds", true),
            ("pods", 403, "grant list and watch", true),
            ("pods", 500, "pods cannot be watched", false),
            ("tcproutes", 403, "tcproutes of gateway.networking.k8s.io may not be watched", true),
            ("servers", 429, "servers cannot be watched", false),
        ] {
            let trouble = text(plural, code);
            assert!(trouble.problem.contains(part), "{trouble:?}");
            assert_eq!(trouble.lasting, lasting, "{trouble:?}");
        }
    }
}
