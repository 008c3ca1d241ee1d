//! Rotation: objects and times in, steps out.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::webhook::PROXY_INJECTOR;

const HOUR: Duration = Duration::from_secs(3600);
const NAME: &str = "linkerd-proxy-injector.linkerd.svc";

struct Fixture {
    rotation: Rotation,
    bundle: Vec<u8>,
}

fn secret(data: &[(&str, &str)], generated: Option<&str>) -> Secret {
    let mut secret = Secret::default();
    let value = |pem: &str| ByteString(pem.as_bytes().to_vec());
    secret.data = Some(data.iter().map(|(key, pem)| ((*key).to_owned(), value(pem))).collect());
    secret.metadata.annotations =
        generated.map(|digest| BTreeMap::from([(GENERATED_CERTIFICATE.to_owned(), digest.to_owned())]));
    secret
}

fn ours(made: &serving::Generated, bundle: &str) -> Secret {
    let data = [("tls.crt", made.certificate.as_str()), ("tls.key", made.key.as_str()), ("ca.crt", bundle)];
    secret(&data, Some(&digest(made.certificate.as_bytes())))
}

fn made(name: &str) -> serving::Generated {
    made_at(name, SystemTime::now())
}

fn made_at(name: &str, now: SystemTime) -> serving::Generated {
    serving::generate(&[name.to_owned()], now, HOUR).unwrap()
}

impl Fixture {
    fn new(secret: Option<&Secret>) -> Self {
        let mut fixture =
            Self { rotation: Rotation::new(&PROXY_INJECTOR, "linkerd".to_owned(), HOUR), bundle: Vec::new() };
        fixture.rotation.observe_secret(secret);
        fixture.configure(b"");
        fixture
    }

    fn configure(&mut self, bundle: &[u8]) {
        self.bundle = bundle.to_vec();
        let hook = json!({"name": "hook", "clientConfig": {"caBundle": ByteString(bundle.to_vec()),
            "service": {"name": "linkerd-proxy-injector", "namespace": "linkerd"}}});
        self.rotation.observe_configuration(Some(configuration(&json!([hook]))));
    }

    /// Plans and does what the caller would do; returns the names of the steps.
    fn step(&mut self, after: Duration) -> (Vec<&'static str>, Plan) {
        let now = SystemTime::now() + after;
        let mut plan = self.rotation.plan(now);
        let mut names = Vec::new();
        for step in std::mem::take(&mut plan.steps) {
            names.push(match step {
                Step::Serve(pair) => {
                    self.rotation.serving(pair);
                    "serve"
                }
                Step::Trust { bundle, hooks } => {
                    assert_eq!(hooks, ["hook"]);
                    self.configure(bundle.as_bytes());
                    "trust"
                }
                Step::Generate(generation) => {
                    assert_eq!(generation.names, [NAME]);
                    let made = made_at(NAME, now);
                    let bundle = format!("{}{}", made.authority, generation.earlier);
                    self.rotation.observe_secret(Some(&ours(&made, &bundle)));
                    "generate"
                }
            });
        }
        (names, plan)
    }
}

fn configuration(hooks: &Value) -> Configuration {
    let object = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "x"}, "webhooks": hooks});
    Configuration::read(&serde_json::from_value(object).unwrap())
}

#[test]
fn an_empty_secret_is_filled_and_made_known() {
    let mut fixture = Fixture::new(Some(&secret(&[], None)));
    assert_eq!(fixture.step(Duration::ZERO).0, ["generate"]);
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["serve", "trust"], false));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert!(steps.is_empty() && plan.ready && plan.problem.is_none(), "{plan:?}");
    assert!(plan.wake.unwrap() < SystemTime::now() + HOUR * 2 / 3 + Duration::from_secs(1));
}

#[test]
fn nothing_happens_before_both_objects_are_observed() {
    let mut rotation = Rotation::new(&PROXY_INJECTOR, "linkerd".to_owned(), HOUR);
    assert!(rotation.plan(SystemTime::now()).steps.is_empty());
    rotation.observe_secret(Some(&secret(&[], None)));
    let plan = rotation.plan(SystemTime::now());
    assert!(plan.steps.is_empty() && !plan.ready && plan.problem.is_none());
}

#[test]
fn a_bundle_that_somebody_overwrote_is_repaired() {
    let first = made(NAME);
    let mut fixture = Fixture::new(Some(&ours(&first, &first.authority)));
    fixture.step(Duration::ZERO);
    assert!(fixture.step(Duration::ZERO).1.ready);
    fixture.configure(made(NAME).authority.as_bytes());
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["trust"], false));
    assert!(fixture.step(Duration::ZERO).1.ready);
    // Further authorities are left alone: another replica may know a newer Secret.
    let both = format!("{}{}", made(NAME).authority, first.authority);
    fixture.configure(both.as_bytes());
    assert!(fixture.step(Duration::ZERO).0.is_empty());
}

#[test]
fn a_change_over_serves_the_new_certificate_only_when_it_is_trusted() {
    let first = made(NAME);
    let mut fixture = Fixture::new(Some(&ours(&first, &first.authority)));
    fixture.step(Duration::ZERO);
    fixture.step(Duration::ZERO);
    let due = HOUR * 2 / 3 + Duration::from_secs(5);
    let (steps, plan) = fixture.step(due);
    assert_eq!((steps, plan.ready), (vec!["generate"], true));
    let (steps, plan) = fixture.step(due);
    assert_eq!((steps, plan.ready), (vec!["trust"], true));
    assert!(serving::includes(&fixture.bundle, first.authority.as_bytes()), "the old authority stays");
    let (steps, plan) = fixture.step(due);
    assert!(steps.is_empty() && plan.ready, "the old certificate is served while API servers catch up");
    assert!(plan.wake.is_some());
    let (steps, plan) = fixture.step(due + SETTLE);
    assert_eq!((steps, plan.ready), (vec!["serve"], true));
    assert!(fixture.step(due + SETTLE).0.is_empty());
}

/// Clients refuse a certificate that is not valid yet, and the wait for API servers must not last until it is.
#[test]
fn a_certificate_made_while_the_clock_was_ahead_is_replaced_when_it_is_right_again() {
    let ahead = HOUR * 24;
    let mut fixture = Fixture::new(Some(&secret(&[], None)));
    assert_eq!(fixture.step(ahead).0, ["generate"]);
    assert_eq!(fixture.step(ahead).0, ["serve", "trust"]);
    assert_eq!(fixture.step(ahead).0, [""; 0]);
    let (steps, _) = fixture.step(Duration::ZERO);
    assert_eq!(steps, ["generate"]);
    assert_eq!(fixture.step(Duration::ZERO).0, ["trust"], "the old one is served while API servers catch up");
    assert!(fixture.step(Duration::ZERO).0.is_empty());
    // Set back a little meanwhile.
    let (steps, plan) = fixture.step(SETTLE);
    assert_eq!((steps, plan.ready), (vec!["serve"], true));
    assert!(fixture.step(SETTLE).0.is_empty());
}

#[test]
fn the_wait_for_api_servers_is_not_longer_if_the_clock_is_set_back() {
    let first = made(NAME);
    let mut fixture = Fixture::new(Some(&ours(&first, &first.authority)));
    fixture.step(Duration::ZERO);
    let due = HOUR * 2 / 3 + Duration::from_secs(5);
    assert_eq!(fixture.step(due).0, ["generate"]);
    assert_eq!(fixture.step(due).0, ["trust"]);
    let back = due - Duration::from_secs(20);
    let (steps, plan) = fixture.step(back);
    assert!(steps.is_empty() && plan.wake.unwrap() <= SystemTime::now() + back + SETTLE, "{plan:?}");
    assert_eq!(fixture.step(back + SETTLE).0, ["serve"]);
}

#[test]
fn a_secret_that_somebody_empties_is_filled_without_a_gap() {
    let first = made(NAME);
    let mut fixture = Fixture::new(Some(&ours(&first, &first.authority)));
    fixture.step(Duration::ZERO);
    fixture.rotation.observe_secret(Some(&secret(&[], None)));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["generate"], true));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["trust"], true), "the old certificate is still served");
    assert!(serving::includes(&fixture.bundle, first.authority.as_bytes()));
}

#[test]
fn a_replica_that_starts_late_serves_what_is_there() {
    let first = made(NAME);
    let mut fixture = Fixture::new(Some(&ours(&first, &first.authority)));
    fixture.configure(first.authority.as_bytes());
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["serve"], true));
}

#[test]
fn a_broken_secret_of_ours_is_replaced_and_another_one_reported() {
    let (one, two) = (made(NAME), made(NAME));
    let mismatch = [("tls.crt", one.certificate.as_str()), ("tls.key", two.key.as_str())];
    let mut fixture = Fixture::new(Some(&secret(&mismatch, Some("x"))));
    assert_eq!(fixture.step(Duration::ZERO).0, ["generate"]);

    let mut fixture = Fixture::new(Some(&secret(&mismatch, None)));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert!(steps.is_empty() && !plan.ready);
    let problem = plan.problem.unwrap();
    assert!(
        problem.contains("Secret linkerd-proxy-injector-k8s-tls in namespace linkerd: the key does not fit"),
        "{problem}"
    );

    let mut fixture = Fixture::new(Some(&ours(&one, &two.authority)));
    assert_eq!(fixture.step(Duration::ZERO).0, ["generate"], "the bundle is not the certificate's");
}

#[test]
fn a_supplied_certificate_is_served_and_the_configuration_left_alone() {
    let theirs = made(NAME);
    let data = [("tls.crt", theirs.certificate.as_str()), ("tls.key", theirs.key.as_str())];
    let mut fixture = Fixture::new(Some(&secret(&data, None)));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert_eq!((steps, plan.ready), (vec!["serve"], false));
    assert!(plan.problem.unwrap().contains("caBundle does not hold the authority"));
    fixture.configure(theirs.authority.as_bytes());
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert!(steps.is_empty() && plan.ready && plan.problem.is_none());
    assert!(fixture.step(2 * HOUR).1.problem.unwrap().contains("has expired"));

    let other = made("other.linkerd.svc");
    let data = [("tls.crt", other.certificate.as_str()), ("tls.key", other.key.as_str())];
    // The same holds if it replaced a generated one.
    let mut fixture = Fixture::new(Some(&secret(&data, Some("digest of another"))));
    let problem = fixture.step(Duration::ZERO).1.problem.unwrap();
    assert!(problem.contains("is not for linkerd-proxy-injector.linkerd.svc"), "{problem}");
}

#[test]
fn a_supplied_certificate_of_another_authority_is_served_when_it_is_trusted() {
    let theirs = |made: &serving::Generated| {
        secret(&[("tls.crt", made.certificate.as_str()), ("tls.key", made.key.as_str())], None)
    };
    let (old, new) = (made(NAME), made(NAME));
    let mut fixture = Fixture::new(Some(&theirs(&old)));
    fixture.configure(old.authority.as_bytes());
    assert_eq!(fixture.step(Duration::ZERO).0, ["serve"]);
    fixture.rotation.observe_secret(Some(&theirs(&new)));
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert!(steps.is_empty() && plan.ready, "the old one is trusted: {plan:?}");
    assert!(plan.problem.unwrap().contains("caBundle does not hold the authority"));
    fixture.configure(new.authority.as_bytes());
    let (steps, plan) = fixture.step(Duration::ZERO);
    assert!(steps == ["serve"] && plan.ready && plan.problem.is_none(), "{plan:?}");
    // The opposite: the served one is of no use any more.
    fixture.rotation.observe_secret(Some(&theirs(&old)));
    assert_eq!(fixture.step(2 * HOUR).0, ["serve"]);
}

#[test]
fn a_generated_certificate_follows_the_name_by_which_it_is_called() {
    let other = made("other.linkerd.svc");
    let mut fixture = Fixture::new(Some(&ours(&other, &other.authority)));
    assert_eq!(fixture.step(Duration::ZERO).0, ["generate"]);
}

#[test]
fn what_is_missing_is_named() {
    let mut fixture = Fixture::new(None);
    assert!(
        fixture
            .step(Duration::ZERO)
            .1
            .problem
            .unwrap()
            .contains("Secret linkerd-proxy-injector-k8s-tls does not exist")
    );
    fixture.rotation.observe_configuration(None);
    let problem = fixture.step(Duration::ZERO).1.problem.unwrap();
    assert!(problem.contains("MutatingWebhookConfiguration linkerd-proxy-injector-webhook-config"), "{problem}");
}

#[test]
fn names_come_from_services_and_urls() {
    for (client, expected) in [
        (json!({"service": {"name": "a", "namespace": "b", "path": "/"}}), "a.b.svc"),
        (json!({"url": "https://10.0.0.1:8443/path?x"}), "10.0.0.1"),
        (json!({"url": "https://hook.example"}), "hook.example"),
        (json!({"url": "https://[fd00::1]:8443/"}), "fd00::1"),
    ] {
        assert_eq!(configuration(&json!([{"name": "x", "clientConfig": client}])).names(), [expected]);
    }
}
