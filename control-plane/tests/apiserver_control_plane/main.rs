//! The control plane against a real API server: watches, tokens, the lease, the EndpointSlices that it guards,
//! webhooks.
//!
//! Every test has its own namespaces; what tests share beside them says which may run at a time ([`turn`]). They wait
//! more than they compute: `RUST_TEST_THREADS=16`, which `cargo xtask test` sets, lets one wait beside the others.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "waits for other processes, whose clock is the machine's")]

mod cert_manager;
mod clock;
mod link;
mod linked;
mod outage;
mod outbound;
mod process;
mod routes;
mod second;
mod status;
mod turn;
mod webhook;
mod world;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, api::ListParams};
use nix::sys::signal::Signal;
use serde_json::json;
use tonic::Code;
use weft_k8s_api::support::{self, State};
use weft_proto::linkerd::destination::{tls_identity::Strategy, update};
use weft_test_kit::wait::eventually;

use process::PATIENCE;
use turn::Uses;
use world::{World, define};

#[tokio::test]
async fn discovery_follows_watches_and_polls_nothing() {
    let world = World::new().await;
    let destination = world.destination("one", None).await;
    destination.ready().await;
    let mut updates = world.watch_service(&destination, "web").await;
    world.apply(world.slice("web-1", "192.0.2.1")).await;
    assert_eq!(updates.next().await, "+192.0.2.1:8080");
    world.apply(world.slice("web-1", "192.0.2.2")).await;
    assert_eq!(updates.next().await, "+192.0.2.2:8080");
    assert_eq!(updates.next().await, "-192.0.2.1:8080");
    world.delete("EndpointSlice", "web-1").await;
    assert_eq!(updates.next().await, "-192.0.2.2:8080");

    // Log lines pass through a queue: they appear later than their effects, in their order.
    let renewal = async |more: usize| {
        let before = destination.lines("renewed lease").len();
        eventually("renewals", PATIENCE, async || match destination.lines("renewed lease").len() {
            now if now >= before + more => Ok(()),
            now => Err(format!("{before}, now {now}")),
        })
        .await;
    };
    renewal(1).await;
    let requests = destination.lines("API request");
    let watches = |resource: &str| {
        let of = format!("/{resource}?");
        requests.iter().filter(|line| line.contains(&of) && line.contains("watch=true")).count()
    };
    for resource in ["services", "pods", "endpointslices", "nodes", "replicasets", "jobs"] {
        assert_eq!(watches(resource), 1, "{resource}: {requests:#?}");
    }
    let bookmarks = requests.iter().filter(|line| line.contains("watch=true"));
    assert!(bookmarks.clone().count() > 0 && bookmarks.clone().all(|line| line.contains("allowWatchBookmarks=true")));
    let read = |line: &&String| line.contains("\"method\":\"GET\"") && !line.contains("/leases");
    let before = destination.lines("API request").iter().filter(read).count();
    // Several renewals of the lease, and no other request in between.
    renewal(3).await;
    assert_eq!(destination.lines("API request").iter().filter(read).count(), before, "something is polled");
    assert_eq!(destination.lines("caches synced").len(), 1);
    assert_eq!(destination.lines(&format!("added EndpointSlice {}/web-1", world.namespace)).len(), 1);
    world.done().await;
}

#[tokio::test]
async fn what_happened_while_the_connection_was_cut_is_made_up_for() {
    let world = World::new().await;
    world.apply(world.slice("web-1", "192.0.2.1")).await;
    world.apply(world.slice("web-2", "192.0.2.2")).await;
    let link = world.link().await;
    let destination = world.destination("one", Some(&link)).await;
    destination.ready().await;
    let mut updates = world.watch_service(&destination, "web").await;
    assert_eq!(updates.next().await, "+192.0.2.1:8080 +192.0.2.2:8080");
    link.cut();
    world.delete("EndpointSlice", "web-1").await;
    world.apply(world.slice("web-3", "192.0.2.3")).await;
    destination.says("watch interrupted").await;
    link.mend();
    updates.bring(&["+192.0.2.3:8080", "-192.0.2.1:8080"]).await;
    world.done().await;
}

#[tokio::test]
async fn a_missing_definition_is_named_and_its_installation_noticed() {
    let world = World::using(Uses::Cluster).await;
    world.undefine("externalworkloads.workload.linkerd.io").await;
    let policy = world.policy().await;
    eventually("the reason is reported", PATIENCE, async || {
        let (status, body) = policy.get("/ready").await;
        let named = body.contains("externalworkloads.workload.linkerd.io") && body.contains("helm install weft-crds");
        if status == 503 && named { Ok(()) } else { Err(format!("{status} {body}")) }
    })
    .await;
    assert_eq!(policy.get("/ping").await, (200, "pong\n".to_owned()));
    // Log lines pass through a queue: they appear later than their effects.
    let errors = || {
        let error = |line: &&String| line.contains("\"ERROR\"") && line.contains("helm install weft-crds");
        policy.lines("externalworkloads").iter().filter(error).count()
    };
    let logged = async || if errors() > 0 { Ok(()) } else { Err("it is not") };
    eventually("the reason is logged", PATIENCE, logged).await;
    define(&world.client, "externalworkloads.workload.linkerd.io").await;
    policy.ready().await;
    assert_eq!(errors(), 1, "once, however often it was tried");
    world.done().await;
}

#[tokio::test]
async fn without_permission_the_remedy_is_named() {
    let world = World::new().await;
    let kubeconfig = world.account_kubeconfig("nobody").await;
    let policy = world.policy_as(&kubeconfig).await;
    eventually("the reason is reported", PATIENCE, async || {
        let (status, body) = policy.get("/ready").await;
        let named = body.contains("pods of the core group may not be watched") && body.contains("ClusterRole");
        if status == 503 && named { Ok(()) } else { Err(format!("{status} {body}")) }
    })
    .await;
    let certificates = world.certificates();
    let identity = world.identity_as(Some(&kubeconfig), &certificates).await;
    let (code, log) = identity.ended().await;
    assert_eq!(code, Some(1));
    assert!(log.contains("may not create tokenreviews.authentication.k8s.io"), "{log}");
    world.done().await;
}

#[tokio::test]
async fn tokens_are_reviewed_with_linkerds_codes() {
    let world = World::new().await;
    let certificates = world.certificates();
    let identity = world.identity_as(None, &certificates).await;
    let any_audience = world.identity_of_any_audience(&certificates).await;
    identity.ready().await;
    any_audience.ready().await;
    for account in ["web", "api"] {
        world.service_account(account).await;
    }
    let name = world.identity_of("web");
    let genuine = world.token("web", "identity.l5d.io").await;
    let mut forged = genuine.clone();
    forged.replace_range(forged.len() - 8.., "AAAAAAAA");
    for (case, token, expected) in [
        ("its own token", genuine, Ok(())),
        ("a token for the API server", world.token("web", "").await, Err(Code::InvalidArgument)),
        ("a token for others", world.token("web", "vault").await, Err(Code::InvalidArgument)),
        ("another account's", world.token("api", "identity.l5d.io").await, Err(Code::FailedPrecondition)),
        ("a forged one", forged, Err(Code::InvalidArgument)),
        ("garbage", "token".to_owned(), Err(Code::InvalidArgument)),
    ] {
        let got = world.certify(&identity, &name, &token).await;
        assert_eq!(got.as_ref().map(drop).map_err(tonic::Status::code), expected, "{case}: {got:?}");
    }
    let default = world.token("web", "").await;
    world.certify(&any_audience, &name, &default).await.unwrap();
    let for_others = world.token("web", "vault").await;
    assert_eq!(world.certify(&any_audience, &name, &for_others).await.unwrap_err().code(), Code::InvalidArgument);
    world
        .has_event("ServiceAccount", "web", "IssuedLeafCertificate", &format!("issued certificate for {name} until"))
        .await;
    world.done().await;
}

#[tokio::test]
async fn certificates_that_do_not_fit_are_an_event_on_the_deployment() {
    let world = World::new().await;
    world.deployment("linkerd-identity").await;
    let (good, other) = (world.certificates(), world.certificates());
    std::fs::copy(other.path().join("ca.pem"), good.path().join("ca.pem")).unwrap();
    let (code, log) = world.identity_as(None, &good).await.ended().await;
    assert_eq!(code, Some(1));
    let secret = format!("Secret {}/linkerd-identity-issuer, key crt.pem", world.namespace);
    for part in [secret.as_str(), "linkerd-identity-trust-roots, key ca-bundle.crt", "identityTrustAnchorsPEM"] {
        assert!(log.contains(part), "{log}");
    }
    world.has_event("Deployment", "linkerd-identity", "IssuerValidationFailed", &secret).await;

    // A running process keeps the issuer that works, and reports the bad one.
    let dir = world.certificates();
    let identity = world.identity_as(None, &dir).await;
    identity.ready().await;
    std::fs::copy(other.path().join("issuer/key.pem"), dir.path().join("issuer/key.pem")).unwrap();
    world.has_event("Deployment", "linkerd-identity", "IssuerUpdateSkipped", "linkerd-identity-issuer, key").await;
    world.done().await;
}

#[tokio::test]
async fn the_lease_moves_when_its_holder_is_killed_and_at_once_when_it_stops() {
    let world = World::new().await;
    let first = world.destination("first", None).await;
    world.holder("first").await;
    let second = world.destination("second", None).await;
    let third = world.destination("third", None).await;
    for one in [&second, &third] {
        one.ready().await;
        assert!(one.lines("acquired lease").is_empty(), "there is a holder");
    }
    // Stopped: released, and taken without waiting for the lease to expire.
    let since = Instant::now();
    first.end(Signal::SIGTERM).await;
    assert_eq!(first.lines("released lease").len(), 1);
    let holder = world.another_holder("first").await;
    // A lease that is not released runs out 30 s after its last renewal, of which there is one every 2 s.
    assert!(since.elapsed() < Duration::from_secs(25), "{:?}", since.elapsed());
    let (holder, heir) = if holder == "second" { (second, third) } else { (third, second) };
    // Killed: taken when the lease expires, not before.
    let since = Instant::now();
    let name = world.lease_holder().await.unwrap();
    holder.end(Signal::SIGKILL).await;
    let next = world.another_holder(&name).await;
    assert!(since.elapsed() >= Duration::from_secs(20), "{next} took it after {:?}", since.elapsed());
    heir.says("acquired lease").await;
    world.done().await;
}

#[tokio::test]
async fn a_holder_that_stops_while_it_renews_releases_the_lease() {
    let world = World::new().await;
    let link = world.link().await;
    let destination = world.destination("one", Some(&link)).await;
    // The next renewal uses the same connection; a mute link accepts no new one.
    destination.says("renewed lease").await;
    link.mute();
    world.renewal().await;
    // Now the API server has a version of the lease that its holder does not know.
    destination.signal(Signal::SIGTERM);
    destination.says("shutting down").await;
    link.mend();
    destination.ended().await;
    assert_eq!(world.lease_holder().await, None);
    assert_eq!(destination.lines("released lease").len(), 1);
    world.done().await;
}

#[tokio::test]
async fn external_workloads_become_endpoints() {
    let world = World::using(Uses::Cluster).await;
    let destination = world.destination("one", None).await;
    destination.ready().await;
    let mut updates = world.watch_service(&destination, "web").await;
    world.apply(world.external_workload("vm", "192.0.2.7")).await;
    let slices: Api<EndpointSlice> = Api::namespaced(world.client.clone(), &world.namespace);
    let ours =
        ListParams::default().labels("endpointslice.kubernetes.io/managed-by=linkerd-external-workloads-controller");
    let written = async || slices.list(&ours).await.unwrap().items;
    eventually("a slice", PATIENCE, async || if written().await.len() == 1 { Ok(()) } else { Err("none".to_owned()) })
        .await;
    let slice = written().await.remove(0);
    assert!(slice.metadata.name.as_ref().unwrap().starts_with("linkerd-external-web-"));
    assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].name, "web");
    assert_eq!(slice.endpoints.as_ref().unwrap()[0].conditions.as_ref().unwrap().ready, Some(false));

    // Times of writes are whole seconds, and one of the same second as the last is not measured.
    let seconds = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let written_at = seconds();
    eventually("another second", PATIENCE, async || if seconds() > written_at { Ok(()) } else { Err("the same") })
        .await;
    world.set_ready("vm", true).await;
    assert_eq!(updates.next().await, "+192.0.2.7:8080");
    let update::Update::Add(added) = updates.last.clone().unwrap() else { panic!("{:?}", updates.last) };
    let identity = added.addrs[0].tls_identity.clone().unwrap();
    assert_eq!(identity.server_name.unwrap().name, "vm.cluster.local");
    assert!(matches!(identity.strategy, Some(Strategy::UriLikeIdentity(uri)) if uri.uri == "spiffe://root/vm"));
    world.set_ready("vm", false).await;
    assert_eq!(updates.next().await, "-192.0.2.7:8080");
    world.delete("ExternalWorkload", "vm").await;
    eventually("no slice", PATIENCE, async || if written().await.is_empty() { Ok(()) } else { Err("one".to_owned()) })
        .await;
    let of_workloads = "{kind=\"ExternalWorkload\",group=\"workload.linkerd.io\",version=\"v1beta1\"}";
    let expected = [
        ("externalworkload_informer_lag_seconds_count".to_owned(), 1.0),
        ("workqueue_adds_total{name=\"endpoints_controller_workqueue\"}".to_owned(), 3.0),
        ("workqueue_depth{name=\"endpoints_controller_workqueue\"}".to_owned(), 0.0),
        (format!("kube_watch_applies_total{of_workloads}"), 3.0),
        (format!("kube_watch_deletes_total{of_workloads}"), 1.0),
        (format!("kube_watch_restarts_total{of_workloads}"), 1.0),
        ("weft_watch_up{group=\"workload.linkerd.io\",kind=\"ExternalWorkload\"}".to_owned(), 1.0),
    ];
    // The slice's end can be read before its writer has the answer and counts.
    let metrics = eventually("everything is counted", PATIENCE, async || {
        let (_, metrics) = destination.get("/metrics").await;
        let value = |series: &str| metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        let missing = expected.iter().find(|(series, least)| value(series).is_none_or(|value: f64| value < *least));
        missing.map_or_else(|| Ok(metrics.clone()), |missing| Err(format!("{missing:?}: {metrics}")))
    })
    .await;
    for row in support::DISCOVERY_API_METRICS {
        let family = format!("\n# TYPE {} ", row.name);
        assert_eq!(metrics.contains(&family), row.state == State::Works, "{}: {metrics}", row.name);
    }
    world.done().await;
}

#[tokio::test]
async fn policies_of_the_cluster_decide() {
    let world = World::using(Uses::Statuses).await;
    world.apply(world.meshed_pod("web-1")).await;
    let policy = world.policy().await;
    policy.ready().await;
    world.port_policy(&policy, "web-1", 8080, &["all-unauthenticated"]).await;
    world.apply(world.policy_object("Server", "v1beta2", "web", json!({"podSelector": {}, "port": 8080}))).await;
    world.port_policy(&policy, "web-1", 8080, &[]).await;
    let client = json!({"meshTLS": {"serviceAccounts": [{"name": "client"}]}});
    let spec = json!({"server": {"name": "web"}, "client": client});
    world.apply(world.policy_object("ServerAuthorization", "v1beta1", "saz", spec)).await;
    world.port_policy(&policy, "web-1", 8080, &["saz"]).await;
    let object = |kind: &str, name: &str| json!({"group": "policy.linkerd.io", "kind": kind, "name": name});
    let networks = |cidr: &str| {
        let spec = json!({"networks": [{"cidr": cidr}]});
        world.policy_object("NetworkAuthentication", "v1alpha1", "office", spec)
    };
    world.apply(networks("192.0.2.0/24")).await;
    let refs = json!([object("NetworkAuthentication", "office")]);
    let spec = json!({"targetRef": object("Server", "web"), "requiredAuthenticationRefs": refs});
    world.apply(world.policy_object("AuthorizationPolicy", "v1alpha1", "authz", spec)).await;
    world.port_policy(&policy, "web-1", 8080, &["authz", "saz"]).await;
    world.delete("ServerAuthorization", "saz").await;
    world.port_policy(&policy, "web-1", 8080, &["authz"]).await;
    // A resource that the schema accepts and that cannot be parsed denies, and is reported.
    world.apply(networks("192.0.2.0/240")).await;
    world.port_policy(&policy, "web-1", 8080, &[]).await;
    policy.says("object cannot be read").await;
    let reported = policy.lines("object cannot be read");
    let named = |line: &String| line.contains("spec.networks[0].cidr") && line.contains("\"ERROR\"");
    assert!(reported.len() == 1 && reported.iter().all(named), "{reported:?}");
    world.has_event("NetworkAuthentication", "office", "Unreadable", "spec.networks[0].cidr: ").await;
    world.apply(networks("192.0.2.0/25")).await;
    world.port_policy(&policy, "web-1", 8080, &["authz"]).await;
    world.delete("Server", "web").await;
    world.port_policy(&policy, "web-1", 8080, &["all-unauthenticated"]).await;
    world.done().await;
}
