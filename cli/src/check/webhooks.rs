//! Checks of webhooks: the API server must know them, trust them and reach them.

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use weft_tls::{
    anchors::TrustAnchors,
    inspect::{certificates, check_server},
};

use super::{
    answer::{Stop, known},
    facts::{Facts, WebhookFacts},
    identity::{data_field, ending, overdue, text},
};
use crate::problem::Problem;

/// Linkerd's names, which configurations, Secrets and Services are named after.
pub(super) const NAMES: [&str; 3] = [INJECTOR, SP_VALIDATOR, POLICY_VALIDATOR];
pub(super) const INJECTOR: &str = "proxy-injector";
pub(super) const SP_VALIDATOR: &str = "sp-validator";
pub(super) const POLICY_VALIDATOR: &str = "policy-validator";

/// Annotation of Secrets whose certificate the control plane generates and renews.
const GENERATED: &str = "weft.io/generated-certificate";

/// The configuration's name.
pub(super) fn configuration(webhook: &str) -> String {
    format!("linkerd-{webhook}-webhook-config")
}

/// The Secret's name.
pub(super) fn secret(webhook: &str) -> String {
    format!("linkerd-{webhook}-k8s-tls")
}

/// The Service's name.
pub(super) fn service(webhook: &str) -> String {
    format!("linkerd-{webhook}")
}

fn kind(webhook: &str) -> &'static str {
    if webhook == INJECTOR { "MutatingWebhookConfiguration" } else { "ValidatingWebhookConfiguration" }
}

pub(super) fn mutating_exist(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    exist(facts, &[INJECTOR])
}

pub(super) fn validating_exist(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    exist(facts, &[SP_VALIDATOR, POLICY_VALIDATOR])
}

fn exist(facts: &Facts, names: &[&str]) -> Result<Vec<Problem>, Stop> {
    let mut found = Vec::new();
    for name in names {
        let object = format!("{} {}", kind(name), configuration(name));
        if known(&object, &of(facts, name)?.ca_bundle)?.is_none() {
            found.push(Problem::new(object, "does not exist", facts.upgrade("")));
        }
    }
    Ok(found)
}

pub(super) fn injector_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    valid(facts, INJECTOR)
}

pub(super) fn injector_lasts(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    lasts(facts, INJECTOR)
}

pub(super) fn sp_validator_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    valid(facts, SP_VALIDATOR)
}

pub(super) fn sp_validator_lasts(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    lasts(facts, SP_VALIDATOR)
}

pub(super) fn policy_validator_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    valid(facts, POLICY_VALIDATOR)
}

pub(super) fn policy_validator_lasts(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    lasts(facts, POLICY_VALIDATOR)
}

pub(super) fn have_endpoints(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mut found = Vec::new();
    for name in NAMES {
        let object = facts.named("Service", &service(name));
        if *known(&object, &of(facts, name)?.endpoints)? == 0 {
            let component = if name == INJECTOR { "proxy-injector" } else { "destination" };
            let remedy = format!(
                "kubectl -n {} describe pods -l linkerd.io/control-plane-component={component}",
                facts.namespace
            );
            found.push(Problem::new(
                object,
                "has no endpoint that is ready, so the API server cannot reach the webhook",
                remedy,
            ));
        }
    }
    Ok(found)
}

/// The API server's view: the Service's certificate, verified with the configuration's bundle, for the Service's name.
fn valid(facts: &Facts, name: &str) -> Result<Vec<Problem>, Stop> {
    let webhook = of(facts, name)?;
    let configuration = format!("{} {}", kind(name), configuration(name));
    let secret_name = secret(name);
    let secret_object = facts.named("Secret", &secret_name);
    let Some(secret) = known(&secret_object, &webhook.secret)? else {
        return Ok(vec![Problem::new(secret_object, "does not exist", facts.upgrade(""))]);
    };
    // Empty until the control plane has started.
    let filled = "the control plane fills it in when it runs: see the webhook's log, or the tool that manages it";
    let field = data_field(facts, &secret_name, "tls.crt");
    let chain = match text(secret, "tls.crt") {
        None => return Ok(vec![Problem::new(field, "is missing", filled)]),
        Some(Err(())) => return Ok(vec![Problem::new(field, "is not text", renew(facts, secret))]),
        Some(Ok(chain)) => chain,
    };
    if text(secret, "tls.key").is_none() {
        return Ok(vec![Problem::new(data_field(facts, &secret_name, "tls.key"), "is missing", filled)]);
    }
    let bundle_field = format!("{configuration}, webhooks[0].clientConfig.caBundle");
    let bundle = match known(&configuration, &webhook.ca_bundle)? {
        // Another check reports that it does not exist.
        None => return Err(Stop::Skip),
        Some(None) => {
            return Ok(vec![Problem::new(
                bundle_field,
                "is empty, so the API server trusts no certificate there",
                filled,
            )]);
        }
        Some(Some(bundle)) => bundle,
    };
    let anchors = match TrustAnchors::from_pem(bundle) {
        Ok(anchors) => anchors,
        Err(error) => return Ok(vec![Problem::new(bundle_field, error.to_string(), renew(facts, secret))]),
    };
    let dialled = format!("{}.{}.svc", service(name), facts.namespace);
    Ok(match check_server(&chain, &anchors, &dialled) {
        Ok(()) => Vec::new(),
        Err(error) => {
            let problem = format!("{error} (against {bundle_field})");
            vec![Problem::new(field, problem, renew(facts, secret))]
        }
    })
}

fn lasts(facts: &Facts, name: &str) -> Result<Vec<Problem>, Stop> {
    let webhook = of(facts, name)?;
    let secret_name = secret(name);
    let secret = known(&facts.named("Secret", &secret_name), &webhook.secret)?.as_ref().ok_or(Stop::Skip)?;
    let Some(Ok(chain)) = text(secret, "tls.crt") else { return Err(Stop::Skip) };
    let chain = certificates(&chain).map_err(|_| Stop::Skip)?;
    let field = data_field(facts, &secret_name, "tls.crt");
    Ok(ending(&field, chain.get(..1).unwrap_or_default(), facts.now, overdue, &renew(facts, secret)))
}

fn is_generated(secret: &Secret) -> bool {
    secret.annotations().contains_key(GENERATED)
}

fn renew(facts: &Facts, secret: &Secret) -> String {
    if is_generated(secret) {
        format!(
            "the control plane renews it: kubectl -n {} rollout restart deployment, and see the webhook's log",
            facts.namespace
        )
    } else {
        "renew it with the tool that created it; to let the control plane generate and renew it, set externalSecret=false"
            .to_owned()
    }
}

fn of<'a>(facts: &'a Facts, name: &str) -> Result<&'a WebhookFacts, Stop> {
    facts.cluster()?.webhooks.get(name).ok_or(Stop::Skip)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::ByteString;
    use weft_tls::serving::generate;

    use super::*;
    use crate::check::facts::tests::{check, healthy, server_certificate, webhook};

    const CRT: &str = "Secret linkerd/linkerd-proxy-injector-k8s-tls, data[\"tls.crt\"]";

    fn with(webhook: WebhookFacts) -> Facts {
        let mut facts = healthy();
        facts.cluster.as_mut().unwrap().webhooks.insert(INJECTOR, webhook);
        facts
    }

    #[test]
    fn good_webhooks_pass_every_check() {
        let facts = healthy();
        for judge in
            [mutating_exist, validating_exist, injector_valid, injector_lasts, sp_validator_valid, have_endpoints]
        {
            assert_eq!(judge(&facts), Ok(Vec::new()));
        }
    }

    #[test]
    fn a_webhook_without_certificate_is_named_by_its_secret() {
        let mut webhook = webhook("linkerd-proxy-injector.linkerd.svc");
        webhook.secret.as_mut().unwrap().as_mut().unwrap().data = None;
        check(injector_valid(&with(webhook)), &[(CRT, "is missing")]);
    }

    #[test]
    fn a_configuration_without_bundle_is_named_by_the_field() {
        let mut webhook = webhook("linkerd-proxy-injector.linkerd.svc");
        webhook.ca_bundle = Ok(Some(None));
        let object =
            "MutatingWebhookConfiguration linkerd-proxy-injector-webhook-config, webhooks[0].clientConfig.caBundle";
        check(injector_valid(&with(webhook)), &[(object, "is empty")]);
    }

    #[test]
    fn a_certificate_of_another_bundle_or_for_another_name_is_refused() {
        let mut other = webhook("linkerd-proxy-injector.linkerd.svc");
        other.ca_bundle = Ok(Some(Some(server_certificate("other").2)));
        check(injector_valid(&with(other)), &[(CRT, "does not verify")]);
        check(injector_valid(&with(webhook("linkerd-proxy-injector.other.svc"))), &[(CRT, "is not for")]);
    }

    /// What cert-manager issues is valid for 90 days by default, as what the control plane generates is.
    #[test]
    fn an_end_is_a_problem_when_a_renewal_is_overdue() {
        let days = |count: u64| Duration::from_secs(count * 24 * 60 * 60);
        for (validity, left, is_overdue) in
            [(90, 29, false), (90, 17, true), (1, 1, false), (365, 61, false), (365, 59, true)]
        {
            let mut facts = with(webhook("linkerd-proxy-injector.linkerd.svc"));
            let made = generate(&["injector".to_owned()], facts.now, days(validity)).unwrap();
            facts.now += days(validity - left);
            let secret = &mut facts.cluster.as_mut().unwrap().webhooks.get_mut(INJECTOR).unwrap().secret;
            let data = secret.as_mut().unwrap().as_mut().unwrap().data.as_mut().unwrap();
            data.insert("tls.crt".to_owned(), ByteString(made.certificate.into_bytes()));
            let expected: &[(&str, &str)] = if is_overdue { &[(CRT, "expires in")] } else { &[] };
            check(injector_lasts(&facts), expected);
        }
    }

    #[test]
    fn a_webhook_without_endpoints_cannot_be_reached() {
        let mut webhook = webhook("linkerd-proxy-injector.linkerd.svc");
        webhook.endpoints = Ok(0);
        check(have_endpoints(&with(webhook)), &[("Service linkerd/linkerd-proxy-injector", "cannot reach")]);
    }
}
