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
