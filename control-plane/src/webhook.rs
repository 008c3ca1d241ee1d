//! Admission webhooks: the API server calls them before it stores an object.
//!
//! ```text
//! Secret, webhook configuration --watch--> certificate --pair--> server <--AdmissionReview-- API server
//!                                   '--caBundle--> configuration   '--> Admission: injector | profile | policy
//! ```
//!
//! Each webhook runs where Linkerd runs it: the injector in its own Deployment, the validators beside destination. The
//! webhook itself creates, renews and publishes its certificate ([`certificate`]); it shares only the names below with
//! the chart.

mod certificate;
pub(crate) mod injector;
mod metrics;
mod policy;
mod profile;
pub(crate) mod server;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use kube::{
    Client,
    core::{
        DynamicObject,
        admission::{AdmissionRequest, AdmissionResponse},
    },
};
use tokio::net::TcpListener;
use weft_k8s_api::support;
use weft_runtime::{drain, metrics::Metrics, readiness::Readiness, tasks::Tasks};
use weft_tls::{anchors::TrustAnchors, serving::CurrentPair};

use crate::api::events::Events;
pub(crate) use injector::{Injector, Sources};

/// The two kinds of webhook configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfigurationKind {
    /// `MutatingWebhookConfiguration`.
    Mutating,
    /// `ValidatingWebhookConfiguration`.
    Validating,
}

/// The names that the chart and a webhook share.
#[derive(Debug)]
pub(crate) struct Webhook {
    /// The component, in Events and task names.
    pub(crate) component: &'static str,
    /// Name of the Secret with the certificate.
    pub(crate) secret: &'static str,
    /// Kind of the webhook configuration.
    pub(crate) kind: ConfigurationKind,
    /// Name of the webhook configuration.
    pub(crate) configuration: &'static str,
}

/// The proxy injector.
pub(crate) static PROXY_INJECTOR: Webhook = Webhook {
    component: "proxy-injector",
    secret: "linkerd-proxy-injector-k8s-tls",
    kind: ConfigurationKind::Mutating,
    configuration: "linkerd-proxy-injector-webhook-config",
};

/// The validator of ServiceProfiles.
pub(crate) static SP_VALIDATOR: Webhook = Webhook {
    component: "sp-validator",
    secret: "linkerd-sp-validator-k8s-tls",
    kind: ConfigurationKind::Validating,
    configuration: "linkerd-sp-validator-webhook-config",
};

/// The validator of policy resources.
pub(crate) static POLICY_VALIDATOR: Webhook = Webhook {
    component: "policy-validator",
    secret: "linkerd-policy-validator-k8s-tls",
    kind: ConfigurationKind::Validating,
    configuration: "linkerd-policy-validator-webhook-config",
};

/// The decision that a webhook makes.
pub(crate) enum Admission {
    /// Add proxies.
    Injector(Injector),
    /// Check ServiceProfiles.
    Profiles,
    /// Check policy resources.
    Policies,
}

impl Admission {
    /// Answers one request.
    pub(crate) async fn answer(&self, request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
        match self {
            Self::Injector(injector) => injector.answer(request).await,
            Self::Profiles => profile::answer(request),
            Self::Policies => policy::answer(request),
        }
    }
}

/// Dependencies of a webhook.
pub(crate) struct Parts<'a> {
    pub(crate) tasks: &'a mut Tasks,
    pub(crate) watch: &'a drain::Watch,
    pub(crate) readiness: &'a Readiness,
    pub(crate) metrics: &'a Metrics,
    pub(crate) client: Client,
    /// Namespace of the control plane, where the Secret is.
    pub(crate) namespace: String,
    /// Lifetime of generated certificates.
    pub(crate) lifetime: Duration,
    /// Authorities that sign certificates of the webhook's clients; `None` accepts any client.
    pub(crate) clients: Option<TrustAnchors>,
}

/// Starts the tasks of a webhook on a bound address.
pub(crate) fn start(webhook: &'static Webhook, listener: TcpListener, admission: Admission, parts: Parts<'_>) {
    let current = CurrentPair::default();
    let keeper = certificate::CertificateKeeper {
        webhook,
        events: Events::new(parts.client.clone(), webhook.component),
        client: parts.client,
        namespace: parts.namespace,
        lifetime: parts.lifetime,
        current: current.clone(),
        gate: parts.readiness.gate("webhook certificate"),
    };
    parts.metrics.register(|registry| metrics::register_ttl(registry, webhook.component, current.clone()));
    parts.tasks.spawn("webhook certificate", keeper.run());
    let tls = current.server_config(&server::ALPN, parts.clients.as_ref());
    let serving = server::serve(listener, tls, Arc::new(admission), parts.watch.clone(), server::LINGER);
    parts.tasks.spawn(
        webhook.component,
        parts.watch.track(async move {
            serving.await;
            Result::Ok(())
        }),
    );
}

/// The object of a request, as sent by the API server.
pub(crate) fn object(request: &AdmissionRequest<DynamicObject>) -> serde_json::Result<serde_json::Value> {
    serde_json::to_value(&request.object)
}

/// Whether there is nothing to check: no object, or one that is being deleted. A controller that removes its finalizer
/// from such an object cannot correct the rest of it.
fn needs_no_check(request: &AdmissionRequest<DynamicObject>) -> bool {
    request.object.as_ref().is_none_or(|object| object.metadata.deletion_timestamp.is_some())
}

/// Allows, with a warning for each part that Weft does not act on.
fn warned(request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
    let mut response = AdmissionResponse::from(request);
    let object = object(request).unwrap_or_default();
    let found = support::object_warnings(&request.kind.group, &request.kind.kind, &object);
    response.warnings = (!found.is_empty()).then(|| found.iter().map(ToString::to_string).collect());
    response
}

/// A denial with a status that clients show: `Invalid`, HTTP 400, as Linkerd's.
fn denied(request: &AdmissionRequest<DynamicObject>, message: impl ToString) -> AdmissionResponse {
    let mut response = AdmissionResponse::from(request).deny(message);
    response.result.code = 400;
    response.result.reason = kube::core::response::reason::BAD_REQUEST.to_owned();
    response
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn an_invalid_object_is_refused_unless_it_is_being_deleted() {
        let invalid = json!({"podSelector": {}, "port": 80, "accessPolicy": "everybody"});
        for (admission, group, kind, spec) in [
            (Admission::Policies, weft_k8s_api::policy::GROUP, "Server", invalid),
            (Admission::Profiles, weft_k8s_api::profile::GROUP, "ServiceProfile", json!({"routes": 1})),
        ] {
            let is_allowed = async |deleted: Value| {
                let metadata = json!({"name": "x", "namespace": "shop", "deletionTimestamp": deleted});
                let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                    "uid": "u", "kind": {"group": group, "version": "v1", "kind": kind},
                    "resource": {"group": group, "version": "v1", "resource": "x"}, "name": "x", "namespace": "shop",
                    "operation": "UPDATE", "userInfo": {}, "dryRun": false, "object": {
                        "apiVersion": format!("{group}/v1"), "kind": kind, "metadata": metadata, "spec": spec}}});
                admission.answer(&server::read(&serde_json::to_vec(&review).unwrap()).unwrap()).await.allowed
            };
            assert!(!is_allowed(Value::Null).await, "{kind}");
            assert!(is_allowed(json!("2026-01-01T00:00:00Z")).await, "{kind}");
        }
    }
}
