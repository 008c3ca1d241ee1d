//! proxy-injector: adds the proxy to pods that are to be meshed, their opaque ports to pods and Services, and to
//! Services what their namespace says of mutual TLS.
//!
//! [`inject()`] decides what to add; this turns it into a JSON patch, counts it, and reports it in an Event of the
//! pod's owner. A pod with an unreadable annotation is refused: if it started without a proxy, every client could
//! reach it.

mod owner;
pub(crate) mod patch;
mod settings;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use k8s_openapi::{
    api::core::v1::{Namespace, Pod, Service},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    core::{
        DynamicObject, PartialObjectMeta,
        admission::{AdmissionRequest, AdmissionResponse, Operation},
    },
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use weft_k8s_api::{
    field::Invalid,
    inject::{self, Decision, InjectConfig, Refusal, SkipReason, inject},
    labels, names, support,
};
use weft_runtime::{metrics::Metrics, readiness::Readiness, tasks::Tasks};

use super::{
    denied,
    metrics::{InjectorMetrics, RequestLabels},
    object,
};
use crate::api::events::Events;
use owner::{InjectionReport, Reporter};
use settings::Settings;

/// Deadline for asking the API server for a namespace that the cache does not have yet.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(3);

/// How many such requests may run at a time: anybody who reaches the webhook can name namespaces.
const MAX_LOOKUPS: usize = 8;

/// How much of a text that no API server sends a message repeats, in bytes.
const MAX_SHOWN: usize = 64;

/// Sources of the injector's settings.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// Namespace of the control plane.
    pub(crate) namespace: String,
    /// File of Helm values.
    pub(crate) values: PathBuf,
    /// File of trust anchors.
    pub(crate) anchors: PathBuf,
}

/// Decides about pods and Services.
pub(crate) struct Injector {
    settings: Settings,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    client: Client,
    /// Permits to ask the API server for a namespace.
    lookups: Semaphore,
    reporter: Reporter,
    metrics: InjectorMetrics,
}

impl Injector {
    /// Starts the injector's tasks: the reader of the settings, the cache of namespaces, the writer of Events.
    pub(crate) fn start(
        client: Client,
        sources: Sources,
        tasks: &mut Tasks,
        readiness: &Readiness,
        metrics: &Metrics,
    ) -> Self {
        let events = Events::new(client.clone(), "proxy-injector");
        let (settings, gate) = (Settings::default(), readiness.gate("values"));
        tasks.spawn("values", settings::reload(sources, settings.clone(), gate, events.clone()));

        let (namespaces, writer) = reflector::store();
        let gate = readiness.gate("namespaces");
        let watched = reflector::reflector(writer, watcher(Api::all(client.clone()), watcher::Config::default()))
            .default_backoff()
            .touched_objects();
        tasks.spawn("namespaces", follow_namespaces(watched, namespaces.clone(), gate));

        let (reporter, reporting) = owner::start(client.clone(), events);
        tasks.spawn("events", reporting);
        let metrics = metrics.register(InjectorMetrics::new);
        let lookups = Semaphore::new(MAX_LOOKUPS);
        Self { settings, namespaces, client, lookups, reporter, metrics }
    }

    /// Answers one request.
    pub(super) async fn answer(&self, request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
        let core = request.kind.group.is_empty() && matches!(request.operation, Operation::Create);
        match request.kind.kind.as_str() {
            "Pod" if core && request.sub_resource.is_none() => self.answer_with(request, Self::pod).await,
            "Service" if core && request.sub_resource.is_none() => self.answer_with(request, Self::service).await,
            _ => request.into(),
        }
    }

    async fn answer_with<K: DeserializeOwned>(
        &self,
        request: &AdmissionRequest<DynamicObject>,
        answer: impl FnOnce(
            &Self,
            &AdmissionRequest<DynamicObject>,
            K,
            Option<&Namespace>,
            &InjectConfig,
        ) -> AdmissionResponse,
    ) -> AdmissionResponse {
        // Anybody may send a review, and the name becomes a part of a request's path, and a label.
        if let Some(name) = request.namespace.as_deref().filter(|name| !names::is_label(name)) {
            let name = &name[..name.floor_char_boundary(MAX_SHOWN)];
            tracing::warn!(name, "review of a namespace that cannot exist");
            let expected = "expected lower case letters, digits and -, 63 characters at most";
            return denied(request, format!("request.namespace: {name:?} is no namespace's name, {expected}"));
        }
        let parts = async {
            let object = object(request).and_then(serde_json::from_value).context("the object cannot be read")?;
            let config = self.settings.get().context(
                "the injector has no settings: the Helm values or the trust anchors cannot be read, see its log",
            )?;
            let namespace = self.namespace(request.namespace.as_deref()).await?;
            anyhow::Ok((object, config, namespace))
        };
        match parts.await {
            Ok((object, config, namespace)) => answer(self, request, object, namespace.as_ref(), &config),
            Err(error) => {
                let (kind, namespace) = (&request.kind.kind, &request.namespace);
                tracing::error!(%error, kind, namespace, "cannot decide about injection");
                let mut response = denied(request, format!("{error:#}"));
                response.result.code = 500;
                response.result.reason = kube::core::response::reason::INTERNAL_ERROR.to_owned();
                response
            }
        }
    }

    fn pod(
        &self,
        request: &AdmissionRequest<DynamicObject>,
        mut pod: Pod,
        namespace: Option<&Namespace>,
        config: &InjectConfig,
    ) -> AdmissionResponse {
        if !is_complete(&pod) {
            // The API server says what is missing, once the webhooks have allowed it.
            return request.into();
        }
        // The object may leave the namespace to the URL; only the request's is known to exist.
        pod.metadata.namespace = Some(request.namespace.clone().unwrap_or_else(|| "default".to_owned()));
        let annotation_at = annotation_at(&pod.metadata, namespace);
        let labels = request_labels(&pod.metadata, "pod", annotation_at);
        self.metrics.count_request(&labels);
        let report = |report: InjectionReport| {
            if !request.dry_run {
                self.reporter.report(&pod.metadata, report);
            }
        };
        match inject(&pod, namespace, config) {
            Ok(Decision::Injected(injected)) => {
                self.metrics.count_response(labels, "");
                report(InjectionReport::Injected);
                let mut response = patched(request, patch::pod(&pod, &injected));
                response.warnings = warnings(&injected.metadata);
                response
            }
            Ok(Decision::Skipped(reason)) => {
                self.metrics.count_response(labels, reason.label());
                if matters(reason, &pod.metadata, namespace) {
                    report(InjectionReport::Skipped(reason));
                }
                let ports = inject::pod_opaque_ports(&pod, namespace, config);
                patched(request, patch::annotations(&pod.metadata, [(labels::OPAQUE_PORTS, ports)]))
            }
            Err(error) => {
                self.metrics.count_response(labels, refusal_label(&error));
                let problem = explain(&error, &pod.metadata, namespace);
                tracing::warn!(namespace = pod.metadata.namespace, %problem, "pod refused");
                report(InjectionReport::Failed(problem.clone()));
                denied(request, problem)
            }
        }
    }

    fn service(
        &self,
        request: &AdmissionRequest<DynamicObject>,
        service: Service,
        namespace: Option<&Namespace>,
        config: &InjectConfig,
    ) -> AdmissionResponse {
        let ports = inject::service_opaque_ports(&service, namespace, config);
        let require_mtls = inject::service_require_mtls(&service, namespace);
        let added = [(labels::OPAQUE_PORTS, ports), (labels::REQUIRE_MTLS, require_mtls)];
        let mut response = patched(request, patch::annotations(&service.metadata, added));
        // Not worth refusing a Service: an unreadable entry is ignored, and the protocol of its ports is detected.
        let unreadable = inject::check_opaque_ports(&service.metadata).err();
        let unreadable = unreadable.map(|it| Invalid { problem: format!("{}; ignored", it.problem), ..it });
        let unsupported = support::service_warnings(&service.metadata);
        response.warnings = texts(unreadable.into_iter().chain(unsupported).collect());
        response
    }

    /// The namespace's annotations, from the cache, or from the API server if the cache does not have the namespace
    /// yet.
    async fn namespace(&self, name: Option<&str>) -> anyhow::Result<Option<Namespace>> {
        let Some(name) = name else { return Ok(None) };
        let metadata = match self.namespaces.get(&ObjectRef::new(name)) {
            Some(known) => known.metadata.clone(),
            None => {
                let api: Api<Namespace> = Api::all(self.client.clone());
                let request = async {
                    let _turn = self.lookups.acquire().await?;
                    anyhow::Ok(api.get_metadata(name).await?)
                };
                let request = tokio::time::timeout(NAMESPACE_TIMEOUT, request).await;
                let found = request.context("no answer in time").and_then(|found| found);
                found.with_context(|| format!("namespace {name} is not known"))?.metadata
            }
        };
        Ok(Some(Namespace { metadata, ..Namespace::default() }))
    }
}

/// Follows the namespaces, and opens the gate when all of them are known.
async fn follow_namespaces(
    watched: impl futures::Stream<Item = watcher::Result<PartialObjectMeta<Namespace>>> + Send,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    gate: weft_runtime::readiness::Gate,
) -> anyhow::Result<()> {
    use futures::StreamExt;
    let mut watched = std::pin::pin!(watched);
    let following = async {
        while let Some(received) = watched.next().await {
            if let Err(error) = received {
                tracing::warn!(%error, "namespaces cannot be watched, trying again");
                gate.explain(format!("cannot be watched: {error}"));
            }
        }
        anyhow::bail!("the watch of namespaces ended")
    };
    let opening = async {
        namespaces.wait_until_ready().await?;
        gate.open();
        anyhow::Ok(())
    };
    tokio::try_join!(following, opening).map(|((), ())| ())
}

/// Whether there is a container to add a proxy to. The API server asks before it checks pods.
pub(crate) fn is_complete(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| !spec.containers.is_empty())
}

/// Allows, with the patch unless it is empty.
fn patched(request: &AdmissionRequest<DynamicObject>, patch: json_patch::Patch) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    if patch.0.is_empty() {
        return response;
    }
    match response.with_patch(patch) {
        Ok(response) => response,
        Err(error) => denied(request, format!("the patch cannot be written: {error}")),
    }
}

/// Whether a person who asked for a proxy should get an Event that there is none.
fn matters(reason: SkipReason, metadata: &ObjectMeta, namespace: Option<&Namespace>) -> bool {
    let asks = |metadata: &ObjectMeta| requested(metadata).is_some_and(|value| value != "disabled");
    let refuses = requested(metadata) == Some("disabled");
    !refuses
        && !matches!(reason, SkipReason::AnnotationAbsent | SkipReason::AnnotationDisabled)
        && (asks(metadata) || namespace.is_some_and(|namespace| asks(&namespace.metadata)))
}

/// The value of the label `skip_reason` for a refusal.
fn refusal_label(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Annotation(_) => "invalid_annotation",
        Refusal::Forbidden(_) => "forbidden_annotation",
        Refusal::ProxyId { .. } => "proxy_id_in_use",
        Refusal::SharedProcesses { .. } => "shared_processes",
    }
}

/// Warnings about a pod's annotations, which Kubernetes shows to the pod's creator with the answer.
fn warnings(metadata: &ObjectMeta) -> Option<Vec<String>> {
    texts(support::pod_warnings(metadata))
}

fn texts(warnings: Vec<Invalid>) -> Option<Vec<String>> {
    (!warnings.is_empty()).then(|| warnings.iter().map(ToString::to_string).collect())
}

/// The problem, and where the annotation is set.
fn explain(error: &Refusal, metadata: &ObjectMeta, namespace: Option<&Namespace>) -> String {
    let own = error.annotation().is_none_or(|annotation| value(metadata, annotation).is_some());
    match namespace.and_then(|namespace| namespace.metadata.name.as_deref()).filter(|_| !own) {
        Some(namespace) => format!("cannot inject the proxy: {error} (set on namespace {namespace})"),
        None => format!("cannot inject the proxy: {error}"),
    }
}

fn annotation_at(metadata: &ObjectMeta, namespace: Option<&Namespace>) -> &'static str {
    if requested(metadata).is_some() {
        "workload"
    } else if namespace.is_some_and(|namespace| requested(&namespace.metadata).is_some()) {
        "namespace"
    } else {
        ""
    }
}

fn request_labels(metadata: &ObjectMeta, kind: &'static str, annotation_at: &'static str) -> RequestLabels {
    // Anybody may send a review, so its text must not become a label.
    let owner_kind = match owner::controller(metadata).map(|owner| owner.kind.as_str()) {
        None => kind,
        // The Deployment stands for its ReplicaSet: nearly all have one.
        Some("ReplicaSet" | "Deployment") => "deployment",
        Some("StatefulSet") => "statefulset",
        Some("DaemonSet") => "daemonset",
        Some("Job") => "job",
        Some("CronJob") => "cronjob",
        Some("ReplicationController") => "replicationcontroller",
        Some("Node") => "node",
        Some(_) => "other",
    };
    RequestLabels { owner_kind, namespace: metadata.namespace.clone().unwrap_or_default(), annotation_at }
}

fn requested(metadata: &ObjectMeta) -> Option<&str> {
    inject::requested(metadata.annotations.as_ref())
}

fn value<'a>(metadata: &'a ObjectMeta, annotation: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(annotation).map(String::as_str)
}

/// The settings that injection uses at present.
type Current = Option<Arc<InjectConfig>>;

#[cfg(test)]
mod tests;
