//! What the control plane answers about a destination, and what follows: codes, streams that end, policies that cannot
//! be read.

use tonic::Code;
use weft_proto::linkerd::outbound::OutboundPolicy;

use super::{
    raw::{BYTES, named},
    *,
};

/// How long a call that is final must not be repeated: twice the first pause of those that are.
const PATIENCE: Duration = Duration::from_millis(250);

/// Asserts that there are no more calls than these.
async fn is_final(control: &Control, call: Call, calls: usize) {
    let more = eventually("", || control.calls(call) > calls);
    assert!(tokio::time::timeout(PATIENCE, more).await.is_err(), "{call:?} was asked again");
}

#[tokio::test]
async fn codes_about_policies_refuse_connections_or_leave_them_to_the_profile_or_are_asked_about_again() {
    let worlds = [
        (Instead::Fail(Code::InvalidArgument), "", 1),
        (Instead::Fail(Code::FailedPrecondition), "", 1),
        (Instead::Fail(Code::Unimplemented), "as it is", 1),
        (Instead::Fail(Code::Unavailable), "policy", 2),
        (Instead::Fail(Code::Internal), "policy", 2),
        (Instead::End, "policy", 2),
    ];
    futures::future::join_all(worlds.map(async |(instead, expected, calls)| {
        let control = Control::default();
        let service = named("as it is").await;
        control.policies.lock().insert(service, policy(SERVICE, vec![]));
        control.update(SERVICE, add(vec![endpoint(named("policy").await, None)]));
        control.instead(Call::Policy, [instead]);
        let proxy = Proxy::start(service, control).await;
        assert_eq!(proxy.exchange(BYTES).await, expected, "{instead:?}");
        let (ip, port) = (service.ip(), service.port());
        let target = format!(r#"target_addr="{service}",target_ip="{ip}",target_port="{port}""#);
        let counted = format!(r#"outbound_tcp_errors_total{{{target},error="discovery refused"}} 1"#);
        let refused = proxy.scrape().lines().any(|line| line == counted);
        assert_eq!(refused, expected.is_empty(), "{instead:?}: {}", proxy.scrape());
        is_final(&proxy.control, Call::Policy, calls).await;
        assert_eq!(proxy.control.calls(Call::Policy), calls, "{instead:?}");
    }))
    .await;
}

#[tokio::test]
async fn codes_about_profiles_and_endpoints_are_final_or_asked_about_again() {
    let worlds = [
        (Call::Profile, Instead::Fail(Code::InvalidArgument), "as it is", 1),
        (Call::Profile, Instead::Fail(Code::FailedPrecondition), "as it is", 1),
        (Call::Profile, Instead::Fail(Code::NotFound), "profile", 2),
        (Call::Profile, Instead::Fail(Code::Unavailable), "profile", 2),
        (Call::Profile, Instead::End, "profile", 2),
        (Call::Endpoints, Instead::Fail(Code::InvalidArgument), "504", 1),
        (Call::Endpoints, Instead::Fail(Code::FailedPrecondition), "504", 1),
        (Call::Endpoints, Instead::Fail(Code::NotFound), "policy", 2),
        (Call::Endpoints, Instead::End, "policy", 2),
    ];
    futures::future::join_all(worlds.map(async |(call, instead, expected, calls)| {
        let control = Control::default();
        let service = named("as it is").await;
        if call == Call::Endpoints {
            control.policies.lock().insert(service, policy(SERVICE, vec![]));
            control.update(SERVICE, add(vec![endpoint(named("policy").await, None)]));
        } else {
            let endpoint = Some(endpoint(named("profile").await, None));
            let profile = DestinationProfile { endpoint, ..DestinationProfile::default() };
            control.profiles.lock().insert(service.to_string(), profile);
        }
        control.instead(call, [instead]);
        let proxy = match expected {
            "504" => Proxy::start_with(service, control, fails_fast, true).await,
            _ => Proxy::start(service, control).await,
        };
        assert_eq!(proxy.who().await, expected, "{call:?} {instead:?}");
        is_final(&proxy.control, call, calls).await;
        assert_eq!(proxy.control.calls(call), calls, "{call:?} {instead:?}");
    }))
    .await;
}

#[tokio::test]
async fn the_last_endpoints_stay_until_a_new_stream_replaces_them() {
    let control = Control::default();
    let service = "10.1.7.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let (old, kept) = (named("old").await, named("kept").await);
    control.update(SERVICE, add(vec![endpoint(old, None)]));
    let proxy = Proxy::start(service, control).await;
    assert_eq!(proxy.who().await, "old");
    proxy.control.instead(Call::Endpoints, [Instead::Fail(Code::Unavailable), Instead::Silence]);
    proxy.control.replace(SERVICE, add(vec![endpoint(kept, None)]));
    eventually("the stream is opened again", || proxy.control.calls(Call::Endpoints) == 3).await;
    assert_eq!(proxy.who().await, "old", "nothing newer is known");
    proxy.control.speak();
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.who().await != "kept" {
        assert!(Instant::now() < deadline, "the new endpoint is not used");
    }
    for _ in 0..20 {
        assert_eq!(proxy.who().await, "kept", "the old one is gone");
    }
}

#[tokio::test]
async fn endpoints_that_are_gone_when_the_stream_is_back_are_no_longer_used() {
    let control = Control::default();
    let service = "10.1.7.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(named("old").await, None)]));
    let proxy = Proxy::start_with(service, control, fails_fast, true).await;
    assert_eq!(proxy.who().await, "old");
    proxy.control.replace(SERVICE, add(vec![]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.who().await != "504" {
        assert!(Instant::now() < deadline, "the old endpoint is still used");
    }
}

#[tokio::test]
async fn a_destination_is_used_when_policy_and_profile_are_known_which_are_asked_for_at_once() {
    for silent in [Call::Policy, Call::Profile] {
        let control = Control::default();
        let service = named("as it is").await;
        control.policies.lock().insert(service, policy(SERVICE, vec![]));
        control.update(SERVICE, add(vec![endpoint(named("policy").await, None)]));
        control.instead(silent, [Instead::Silence]);
        let proxy = Arc::new(Proxy::start(service, control.clone()).await);
        let client = Arc::clone(&proxy);
        let mut answer = tokio::spawn(async move { client.exchange(BYTES).await });
        let both = || control.calls(Call::Policy) == 1 && control.calls(Call::Profile) == 1;
        eventually("both are asked for", both).await;
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut answer).await.is_err(), "without {silent:?}");
        control.speak();
        assert_eq!(answer.await.unwrap(), "policy");
    }
}

#[tokio::test]
async fn profiles_are_asked_for_within_the_networks_of_the_settings() {
    for (networks, expected, calls) in
        [(vec!["127.0.0.0/8"], "profile", 1), (vec!["10.0.0.0/8", "::/0"], "as it is", 0), (vec![], "as it is", 0)]
    {
        let control = Control::default();
        let service = named("as it is").await;
        let endpoint = Some(endpoint(named("profile").await, None));
        let profile = DestinationProfile { endpoint, ..DestinationProfile::default() };
        control.profiles.lock().insert(service.to_string(), profile);
        let within = |config: &mut Config| {
            config.destination.networks = networks.iter().map(|network| network.parse().unwrap()).collect();
        };
        let proxy = Proxy::start_with(service, control, within, true).await;
        assert_eq!(proxy.who().await, expected, "{networks:?}");
        assert_eq!(proxy.control.calls(Call::Profile), calls, "{networks:?}");
    }
}

#[tokio::test]
async fn a_policy_that_cannot_be_read_fails_requests_and_closes_other_connections() {
    let control = Control::default();
    let service = named("as it is").await;
    control.policies.lock().insert(service, OutboundPolicy::default());
    let proxy = Proxy::start(service, control).await;
    let response = proxy.get("/").await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(response.headers()["l5d-proxy-error"], "invalid policy");
    assert_eq!(proxy.exchange(BYTES).await, "");
    let metrics = proxy.scrape();
    let closed = |line: &&str| {
        line.starts_with("outbound_tcp_route_close_total") && line.ends_with(r#"error="invalid_policy"} 1"#)
    };
    assert!(metrics.lines().any(|line| closed(&line)), "{metrics}");
    // A policy that can be read heals it.
    proxy.control.update(SERVICE, add(vec![endpoint(named("policy").await, None)]));
    proxy.control.change_policy(service, policy(SERVICE, vec![]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.who().await != "policy" {
        assert!(Instant::now() < deadline, "the new policy is not used");
    }
}
