//! The certificate of a webhook: it is generated, kept in a Secret that all replicas share, renewed, and published to
//! the API server in the configuration's `caBundle`.
//!
//! [`rotation`] decides; this file watches the two objects and carries out the decisions. The first replica writes the
//! Secret: the API server refuses a second write of the same version. A certificate that somebody else put into the
//! Secret is served and otherwise left alone.

mod rotation;

use std::{
    pin::pin,
    time::{Duration, SystemTime},
};

use anyhow::anyhow;
use futures::StreamExt;
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::{ObjectReference, Secret},
    },
};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use serde_json::json;
use weft_runtime::readiness::Gate;
use weft_tls::serving::{self, CurrentPair};

use super::{ConfigurationKind, Webhook};
use crate::api::events::Events;
use rotation::{Configuration, Generation, Plan, Rotation, Step};

/// How long to wait before the next attempt after the API server refused a write.
const RETRY: Duration = Duration::from_secs(2);
/// The longest wait without looking at the clock again: a machine that slept has corrected its clock by then.
const LONGEST: Duration = Duration::from_secs(600);
/// HTTP status of a write after another replica's.
const CONFLICT: u16 = 409;

/// Keeps the certificate of one webhook current.
pub(super) struct CertificateKeeper {
    pub(super) webhook: &'static Webhook,
    pub(super) client: Client,
    pub(super) namespace: String,
    pub(super) lifetime: Duration,
    pub(super) current: CurrentPair,
    pub(super) gate: Gate,
    pub(super) events: Events,
}

impl CertificateKeeper {
    /// Runs until dropped.
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let mut rotation = Rotation::new(self.webhook, self.namespace.clone(), self.lifetime);
        let mut secrets = pin!(watch_object(self.secrets(), self.webhook.secret).default_backoff());
        let mut configurations =
            pin!(watch_object(self.configurations(), self.webhook.configuration).default_backoff());
        let mut said = None;
        loop {
            let plan = rotation.plan(SystemTime::now());
            self.report(&plan, &mut said);
            let wait = match self.execute(&mut rotation, plan).await {
                Executed::Again => continue,
                Executed::Wait(wait) => wait,
            };
            tokio::select! {
                Some(received) = secrets.next() => match received {
                    Ok(secret) => rotation.observe_secret(secret.as_ref()),
                    Err(error) => self.report_failed_watch("Secret", self.webhook.secret, &error),
                },
                Some(received) = configurations.next() => match received {
                    Ok(object) => rotation.observe_configuration(object.map(|object| Configuration::read(&object))),
                    Err(error) => self.report_failed_watch(self.webhook.kind.name(), self.webhook.configuration, &error),
                },
                () = tokio::time::sleep(wait) => {}
                else => return Err(anyhow!("the watches ended")),
            }
        }
    }

    /// Carries out a plan; afterwards there may be more to plan.
    async fn execute(&self, rotation: &mut Rotation, plan: Plan) -> Executed {
        for step in plan.steps {
            match step {
                Step::Serve(pair) => {
                    tracing::info!(webhook = self.webhook.component, expires = %until(pair.not_after), "serving certificate");
                    self.current.set(pair.clone());
                    rotation.serving(pair);
                }
                Step::Generate(generation) => {
                    return match self.generate(*generation).await {
                        Ok(Some(secret)) => {
                            rotation.observe_secret(Some(&secret));
                            Executed::Again
                        }
                        // Another replica was first; the watch will deliver what it wrote.
                        Ok(None) => Executed::Wait(RETRY),
                        Err(error) => self.failed("Secret", self.webhook.secret, &error),
                    };
                }
                Step::Trust { bundle, hooks } => {
                    return match self.trust(&bundle, &hooks).await {
                        Ok(written) => {
                            tracing::info!(configuration = self.webhook.configuration, "caBundle set");
                            rotation.observe_configuration(Some(Configuration::read(&written)));
                            // The watch delivers the change at once. The wait keeps this from spinning if somebody
                            // overwrites it each time.
                            Executed::Wait(RETRY)
                        }
                        Err(error) => self.failed(self.webhook.kind.name(), self.webhook.configuration, &error),
                    };
                }
            }
        }
        let now = SystemTime::now();
        Executed::Wait(plan.wake.map_or(LONGEST, |at| at.duration_since(now).unwrap_or_default().min(LONGEST)))
    }

    /// Writes a new certificate into the Secret as it was read; `None` if the Secret has changed since.
    async fn generate(&self, generation: Generation) -> anyhow::Result<Option<Secret>> {
        let Generation { mut secret, names, earlier, reason } = generation;
        let made = serving::generate(&names, SystemTime::now(), self.lifetime)?;
        let bundle = format!("{}{earlier}", made.authority);
        secret.metadata.annotations.get_or_insert_default().insert(
            weft_k8s_api::labels::GENERATED_CERTIFICATE.to_owned(),
            rotation::digest(made.certificate.as_bytes()),
        );
        secret.data.get_or_insert_default().extend(
            [("tls.crt", made.certificate), ("tls.key", made.key), ("ca.crt", bundle)]
                .map(|(key, pem)| (key.to_owned(), ByteString(pem.into_bytes()))),
        );
        match self.secrets().replace(self.webhook.secret, &PostParams::default(), &secret).await {
            Ok(secret) => {
                tracing::info!(secret = self.webhook.secret, reason, names = names.join(","), "certificate generated");
                let note = format!("certificate for {} generated: {reason}", names.join(", "));
                self.events.normal("CertificateGenerated", note, self.secret());
                Ok(Some(secret))
            }
            Err(kube::Error::Api(status)) if status.code == CONFLICT => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts the trust bundle into the configuration. A strategic merge by the webhooks' names changes nothing else.
    async fn trust(&self, bundle: &str, hooks: &[String]) -> kube::Result<DynamicObject> {
        let bundle = ByteString(bundle.as_bytes().to_vec());
        let hooks: Vec<_> =
            hooks.iter().map(|name| json!({"name": name, "clientConfig": {"caBundle": bundle}})).collect();
        let patch = Patch::Strategic(json!({"webhooks": hooks}));
        self.configurations().patch(self.webhook.configuration, &PatchParams::default(), &patch).await
    }

    /// Opens or closes the gate, and reports a problem once.
    fn report(&self, plan: &Plan, said: &mut Option<String>) {
        match &plan.problem {
            Some(problem) if said.as_ref() != Some(problem) => {
                tracing::error!(webhook = self.webhook.component, %problem, "webhook certificate is invalid");
                self.events.warning("CertificateInvalid", problem.clone(), self.secret());
            }
            _ => {}
        }
        said.clone_from(&plan.problem);
        if plan.ready {
            self.gate.open();
        } else {
            self.gate.close();
            self.gate.explain(plan.problem.clone().unwrap_or_else(|| plan.waiting_for.clone()));
        }
    }

    fn report_failed_watch(&self, kind: &str, name: &str, error: &impl std::fmt::Display) {
        tracing::warn!(kind, name, %error, "object cannot be watched, retrying");
        if self.current.get().is_none() {
            self.gate.explain(format!("{kind} {name} cannot be watched: {error}"));
        }
    }

    fn failed(&self, kind: &str, name: &str, error: &impl std::fmt::Display) -> Executed {
        tracing::error!(kind, name, %error, "cannot be written, trying again");
        self.gate.explain(format!("{kind} {name} cannot be written: {error}"));
        Executed::Wait(RETRY)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn configurations(&self) -> Api<DynamicObject> {
        let resource = match self.webhook.kind {
            ConfigurationKind::Mutating => ApiResource::erase::<MutatingWebhookConfiguration>(&()),
            ConfigurationKind::Validating => ApiResource::erase::<ValidatingWebhookConfiguration>(&()),
        };
        Api::all_with(self.client.clone(), &resource)
    }

    fn secret(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(Secret::api_version(&()).into_owned()),
            kind: Some(Secret::kind(&()).into_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(self.webhook.secret.to_owned()),
            ..ObjectReference::default()
        }
    }
}

enum Executed {
    /// Plan again, because this process changed something.
    Again,
    /// Nothing to do until an object changes, or for this long.
    Wait(Duration),
}

impl ConfigurationKind {
    /// Name of the kind.
    fn name(self) -> &'static str {
        match self {
            Self::Mutating => "MutatingWebhookConfiguration",
            Self::Validating => "ValidatingWebhookConfiguration",
        }
    }
}

/// Seconds or days until a time, for the log.
fn until(time: SystemTime) -> String {
    let left = time.duration_since(SystemTime::now()).unwrap_or_default().as_secs();
    if left > 2 * 86_400 { format!("in {} days", left / 86_400) } else { format!("in {left} s") }
}
