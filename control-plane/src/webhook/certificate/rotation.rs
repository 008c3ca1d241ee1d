//! What to do about a webhook's certificate, from what the Secret and the webhook configuration hold.
//!
//! A change-over has four steps, each begun only when the one before is seen to be done, so that no handshake fails:
//! write the new certificate and both authorities into the Secret; put both authorities into every `caBundle`; wait until
//! the API servers use it; serve the new certificate. The old one is valid for all that time, since it is replaced when a
//! third of its life is left.

use std::time::{Duration, SystemTime};

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::core::DynamicObject;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use weft_k8s_api::labels::GENERATED_CERTIFICATE;
use weft_tls::{
    anchors::TrustAnchors,
    serving::{self, Pair},
};

use super::super::Webhook;

/// How long API servers may take to use a `caBundle` that this process has seen in a watch. They watch the same object.
const SETTLE: Duration = Duration::from_secs(5);
/// How many earlier authorities stay in the bundle, as long as they are valid.
const EARLIER: usize = 2;

/// A webhook configuration, as far as it matters.
#[derive(Clone, Debug, Default)]
pub(super) struct Configuration {
    hooks: Vec<Hook>,
}

#[derive(Clone, Debug, Deserialize)]
struct Hook {
    name: String,
    #[serde(rename = "clientConfig")]
    client: ClientConfig,
}

#[derive(Clone, Debug, Deserialize)]
struct ClientConfig {
    service: Option<ServiceReference>,
    url: Option<String>,
    #[serde(rename = "caBundle")]
    bundle: Option<ByteString>,
}

#[derive(Clone, Debug, Deserialize)]
struct ServiceReference {
    name: String,
    namespace: String,
}

impl Configuration {
    /// Reads what the API server gave.
    pub(super) fn read(object: &DynamicObject) -> Self {
        let hooks = object.data.get("webhooks").cloned().unwrap_or_default();
        // The API server has validated it; what cannot be read has no webhooks, which is a problem that is reported.
        Self { hooks: serde_json::from_value(hooks).unwrap_or_default() }
    }

    /// The names by which the API server calls: those that a certificate must have.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self
            .hooks
            .iter()
            .filter_map(|hook| match (&hook.client.service, &hook.client.url) {
                (Some(service), _) => Some(format!("{}.{}.svc", service.name, service.namespace)),
                (None, Some(url)) => host(url),
                (None, None) => None,
            })
            .collect();
        names.sort();
        names.dedup();
        names
    }

    fn bundles(&self) -> impl Iterator<Item = &[u8]> {
        self.hooks.iter().map(|hook| hook.client.bundle.as_ref().map_or(&[][..], |bundle| &bundle.0))
    }

    fn includes(&self, authorities: &str) -> bool {
        self.bundles().all(|bundle| serving::includes(bundle, authorities.as_bytes()))
    }

    fn trusts(&self, pair: &Pair) -> bool {
        self.bundles().all(|bundle| {
            let anchors = std::str::from_utf8(bundle).ok().and_then(|bundle| TrustAnchors::from_pem(bundle).ok());
            anchors.is_some_and(|anchors| pair.chains_to(&anchors))
        })
    }
}

/// The host of an `https` URL.
fn host(url: &str) -> Option<String> {
    let authority = url.strip_prefix("https://")?.split(['/', '?']).next()?;
    match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().map(str::to_owned),
        None => authority.split(':').next().map(str::to_owned),
    }
}

/// What the Secret holds.
#[derive(Clone, Debug)]
enum Contents {
    Empty,
    /// Made here; `bundle` holds its authority and earlier ones.
    Ours {
        pair: Pair,
        bundle: String,
    },
    /// Supplied by somebody else.
    Theirs(Pair),
    Broken {
        ours: bool,
        why: String,
    },
}

impl Contents {
    fn read(secret: &Secret) -> Self {
        let value = |key: &str| {
            let value = secret.data.as_ref().and_then(|data| data.get(key));
            value.map_or(&[][..], |value| &value.0)
        };
        let (certificate, key) = (value("tls.crt"), value("tls.key"));
        if certificate.is_empty() && key.is_empty() {
            return Self::Empty;
        }
        let annotations = secret.metadata.annotations.as_ref();
        let generated = annotations.and_then(|annotations| annotations.get(GENERATED_CERTIFICATE));
        let pair = match Pair::from_pem(certificate, key) {
            Ok(pair) => pair,
            Err(error) => return Self::Broken { ours: generated.is_some(), why: error.to_string() },
        };
        // Whoever puts another, working certificate in place of a generated one means it.
        if generated != Some(&digest(certificate)) {
            return Self::Theirs(pair);
        }
        let bundle = std::str::from_utf8(value("ca.crt")).unwrap_or_default();
        if TrustAnchors::from_pem(bundle).is_ok_and(|anchors| pair.chains_to(&anchors)) {
            return Self::Ours { pair, bundle: bundle.to_owned() };
        }
        Self::Broken { ours: true, why: "ca.crt does not hold the authority that signed the certificate".to_owned() }
    }
}

/// SHA-256 in hexadecimal.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is to be done.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// When to plan again if nothing is heard.
    pub(super) wake: Option<SystemTime>,
    /// Whether API servers accept what is served, or will be as soon as the steps are done.
    pub(super) ready: bool,
    /// What a person has to repair.
    pub(super) problem: Option<String>,
    /// Why it is not ready although there is no problem.
    pub(super) waiting_for: String,
}

/// One thing to do.
#[derive(Debug)]
pub(super) enum Step {
    /// Show this certificate to new connections.
    Serve(Pair),
    /// Write a new certificate into the Secret, and end this plan.
    Generate(Box<Generation>),
    /// Put this into the `caBundle` of these webhooks, and end this plan.
    Trust { bundle: String, hooks: Vec<String> },
}

/// A certificate to be made.
#[derive(Debug)]
pub(super) struct Generation {
    /// The Secret as it was read, with its version.
    pub(super) secret: Secret,
    /// Names of the certificate.
    pub(super) names: Vec<String>,
    /// Authorities to keep in the bundle, PEM.
    pub(super) earlier: String,
    /// Why, for the log.
    pub(super) reason: String,
}

/// What was heard of the two objects; `None` before anything was.
pub(super) struct Rotation {
    webhook: &'static Webhook,
    namespace: String,
    lifetime: Duration,
    secret: Option<Option<(Secret, Contents)>>,
    configuration: Option<Option<Configuration>>,
    serving: Option<Pair>,
    /// Authorities of the last usable Secret of ours, for when somebody empties or breaks it.
    last_bundle: String,
    /// Since when every `caBundle` has the Secret's authorities.
    trusted_since: Option<SystemTime>,
}

impl Rotation {
    /// Before anything was heard.
    pub(super) fn new(webhook: &'static Webhook, namespace: String, lifetime: Duration) -> Self {
        Self {
            webhook,
            namespace,
            lifetime,
            secret: None,
            configuration: None,
            serving: None,
            last_bundle: String::new(),
            trusted_since: None,
        }
    }

    /// The Secret as it is now, `None` when there is none.
    pub(super) fn observe_secret(&mut self, secret: Option<&Secret>) {
        let contents = secret.map(|secret| (secret.clone(), Contents::read(secret)));
        if let Some((_, Contents::Ours { bundle, .. })) = &contents {
            self.last_bundle.clone_from(bundle);
        }
        self.secret = Some(contents);
        self.trusted_since = None;
    }

    /// The configuration as it is now, `None` when there is none.
    pub(super) fn observe_configuration(&mut self, configuration: Option<Configuration>) {
        self.configuration = Some(configuration);
    }

    /// Remembers what is served.
    pub(super) fn serving(&mut self, pair: Pair) {
        self.serving = Some(pair);
    }

    /// What is to be done at `now`.
    pub(super) fn plan(&mut self, now: SystemTime) -> Plan {
        let (Some(secret), Some(configuration)) = (&self.secret, &self.configuration) else {
            let waiting_for = format!("waiting for Secret {} and {}", self.webhook.secret, self.webhook.configuration);
            return Plan { waiting_for, ..Plan::default() };
        };
        let Some(configuration) = configuration.clone() else {
            return self.stuck(format!(
                "{} {} does not exist, install the chart weft-control-plane",
                self.webhook.kind.name(),
                self.webhook.configuration
            ));
        };
        let names = configuration.names();
        if names.is_empty() {
            return self.stuck(format!(
                "{} {} names no service to call, install the chart weft-control-plane again",
                self.webhook.kind.name(),
                self.webhook.configuration
            ));
        }
        let Some((secret, contents)) = secret.clone() else {
            return self.stuck(format!(
                "Secret {} does not exist in namespace {}, install the chart weft-control-plane again or create the \
                 Secret with tls.crt and tls.key",
                self.webhook.secret, self.namespace
            ));
        };
        let generate = |reason: String, bundle: &str| Plan {
            steps: vec![Step::Generate(Box::new(Generation {
                secret: secret.clone(),
                names: names.clone(),
                earlier: serving::still_valid(bundle, now, EARLIER),
                reason,
            }))],
            ready: self.serving.as_ref().is_some_and(|pair| configuration.trusts(pair)),
            waiting_for: "generating a certificate".to_owned(),
            ..Plan::default()
        };
        match contents {
            Contents::Empty => generate("the Secret was empty".to_owned(), &self.last_bundle),
            Contents::Broken { ours: true, why } => generate(why, &self.last_bundle),
            Contents::Broken { ours: false, why } => self.stuck(format!(
                "Secret {} in namespace {}: {why}; correct tls.crt and tls.key, or remove both to have them generated",
                self.webhook.secret, self.namespace
            )),
            Contents::Theirs(pair) => self.plan_theirs(now, pair, &configuration, &names),
            Contents::Ours { pair, bundle } => {
                if let Some(name) = names.iter().find(|name| !pair.covers(name)) {
                    return generate(format!("the certificate was not for {name}"), &bundle);
                }
                if now >= self.rotates_at(&pair) {
                    return generate("the certificate comes of age".to_owned(), &bundle);
                }
                self.plan_ours(now, pair, bundle, &configuration)
            }
        }
    }

    /// A third of its life before the end.
    fn rotates_at(&self, pair: &Pair) -> SystemTime {
        let whole = pair.not_after.duration_since(pair.not_before).unwrap_or_default();
        pair.not_after - whole.min(self.lifetime) / 3
    }

    fn plan_ours(&mut self, now: SystemTime, pair: Pair, bundle: String, configuration: &Configuration) -> Plan {
        let mut plan = Plan { wake: Some(self.rotates_at(&pair)), ..Plan::default() };
        if configuration.includes(&bundle) {
            self.trusted_since.get_or_insert(now);
        } else {
            self.trusted_since = None;
            plan.waiting_for = format!("caBundle of {} is being set", self.webhook.configuration);
        }
        let usable = |pair: &Pair| now < pair.not_after && configuration.names().iter().all(|name| pair.covers(name));
        match &self.serving {
            Some(serving) if serving.same(&pair) => {}
            // A change-over: the old one goes on until the new one is trusted everywhere.
            Some(serving) if usable(serving) => match self.trusted_since.map(|since| since + self.settle()) {
                Some(at) if now >= at => plan.steps.push(Step::Serve(pair.clone())),
                Some(at) => plan.wake = Some(at),
                None => {}
            },
            _ => plan.steps.push(Step::Serve(pair.clone())),
        }
        if self.trusted_since.is_none() {
            let hooks = configuration.hooks.iter().map(|hook| hook.name.clone()).collect();
            plan.steps.push(Step::Trust { bundle, hooks });
        }
        plan.ready = self.trusted_since.is_some()
            || self.serving.as_ref().is_some_and(|serving| usable(serving) && configuration.trusts(serving));
        plan
    }

    fn plan_theirs(&self, now: SystemTime, pair: Pair, configuration: &Configuration, names: &[String]) -> Plan {
        let mut plan = Plan { ready: configuration.trusts(&pair), ..Plan::default() };
        let (secret, namespace, hooks) = (self.webhook.secret, &self.namespace, self.webhook.configuration);
        plan.problem = if now >= pair.not_after {
            Some(format!("Secret {secret} in namespace {namespace}: the certificate in tls.crt has expired, renew it"))
        } else if let Some(name) = names.iter().find(|name| !pair.covers(name)) {
            Some(format!(
                "Secret {secret} in namespace {namespace}: the certificate in tls.crt is not for {name}, by which the API \
                 server calls; issue it for that DNS name"
            ))
        } else if !plan.ready {
            Some(format!(
                "{hooks}: caBundle does not hold the authority that signed tls.crt of Secret {secret}, set it there (the \
                 chart's value caBundle) or empty the Secret to have a certificate generated"
            ))
        } else {
            plan.wake = Some(pair.not_after);
            None
        };
        if self.serving.as_ref().is_none_or(|serving| !serving.same(&pair)) {
            plan.steps.push(Step::Serve(pair));
        }
        plan
    }

    /// What is served goes on.
    fn stuck(&self, problem: String) -> Plan {
        let configuration = self.configuration.as_ref().and_then(Option::as_ref);
        let trusted = |pair| configuration.is_some_and(|configuration| configuration.trusts(pair));
        let ready = self.serving.as_ref().is_some_and(trusted);
        Plan { ready, problem: Some(problem), ..Plan::default() }
    }

    fn settle(&self) -> Duration {
        SETTLE.min(self.lifetime / 10)
    }
}

#[cfg(test)]
mod tests;
