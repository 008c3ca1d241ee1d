//! Which backend gets a request or a connection.

use weft_proto::linkerd::destination::{AddrSet, NoEndpoints, Update, WeightedDst, update};

use super::{
    connecting::full,
    fake::{Over, balancer, detecting, distributing, forward, http_route, opaque_route},
    raw::{BYTES, named},
    resilience::{Act, Script, metric},
    *,
};
use crate::{
    metrics::BalancerKind,
    outbound::backends::Resolved,
    testing::{INJECTORS_FILTER, Lines},
};

const FIRST: &str = "first.demo:80";
const SECOND: &str = "second.demo:80";
const EMPTY: &str = "empty.demo:80";

fn service() -> SocketAddr {
    "10.1.6.1:80".parse().unwrap()
}

/// A control plane that knows two services with an endpoint each, and one without.
async fn services() -> Control {
    let control = Control::default();
    control.update(FIRST, add(vec![endpoint(named("first").await, None)]));
    control.update(SECOND, add(vec![endpoint(named("second").await, None)]));
    control.update(EMPTY, none(true));
    control
}

fn none(exists: bool) -> Update {
    Update { update: Some(update::Update::NoEndpoints(NoEndpoints { exists })) }
}

fn remove(addr: SocketAddr) -> Update {
    Update { update: Some(update::Update::Remove(AddrSet { addrs: vec![addr.into()] })) }
}

/// Asks until another backend answers requests and connections.
async fn moves_to(proxy: &Proxy, name: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.who().await != name || proxy.exchange(BYTES).await != name {
        assert!(Instant::now() < deadline, "{name} is not used");
    }
    for _ in 0..10 {
        assert_eq!((proxy.who().await, proxy.exchange(BYTES).await), (name.to_owned(), name.to_owned()));
    }
}

#[tokio::test]
async fn the_first_backend_with_an_endpoint_gets_everything() {
    let control = services().await;
    let over = Over::First(vec![balancer(EMPTY), balancer(FIRST), balancer(SECOND)]);
    control.policies.lock().insert(service(), distributing(&over));
    let proxy = Proxy::start(service(), control).await;
    let answers = (proxy.who().await, proxy.exchange(BYTES).await);
    let known = ["first".to_owned(), "second".to_owned()];
    assert!(known.contains(&answers.0) && known.contains(&answers.1), "from the beginning: {answers:?}");
    moves_to(&proxy, "first").await;
    let preferred = named("preferred").await;
    for _ in 0..2 {
        proxy.control.update(EMPTY, add(vec![endpoint(preferred, None)]));
        moves_to(&proxy, "preferred").await;
        proxy.control.update(EMPTY, remove(preferred));
        moves_to(&proxy, "first").await;
    }
    proxy.control.update(FIRST, none(false));
    moves_to(&proxy, "second").await;
}

#[tokio::test]
async fn a_policy_splits_by_weight_among_backends_with_endpoints() {
    let control = services().await;
    let weighted =
        [(balancer(FIRST), 800), (balancer(SECOND), 100), (Default::default(), 300), (balancer(EMPTY), 1800)];
    control.policies.lock().insert(service(), distributing(&Over::Random(weighted.to_vec())));
    let proxy = Proxy::start(service(), control).await;
    let mut answers = std::collections::BTreeMap::<_, u32>::new();
    for _ in 0..200 {
        *answers.entry(proxy.who().await).or_default() += 1;
    }
    // 200 draws with p = 0.1: 4 to 50 is seven deviations wide. One does not exist, and has a tenth of all weights; the
    // other has a ninth of what is left.
    let (second, missing) = (answers["second"], answers["500"]);
    assert!((4..50).contains(&second) && (4..50).contains(&missing), "{answers:?}");
    assert_eq!(answers["first"] + second + missing, 200, "{answers:?}");
}

#[tokio::test]
async fn a_backend_that_does_not_exist_fails_no_more_than_its_share() {
    const DEAD: &str = "dead.demo:80";
    // At first, nothing is known about the others. Then one rests, because it refuses connections.
    for (others, http, bytes) in [
        (&[FIRST][..], "first", "first"),
        (&[DEAD][..], "504", ""),
        // What leaves one backend goes to one that has an endpoint.
        (&[DEAD, SECOND][..], "second", "second"),
    ] {
        let control = services().await;
        control.update(DEAD, add(vec![endpoint(unused_addr(), None)]));
        let weighted = others.iter().map(|path| balancer(path)).zip([u32::MAX, 1]);
        let over = Over::Random(weighted.chain([(Default::default(), 1000)]).collect());
        control.policies.lock().insert(service(), distributing(&over));
        let change = |config: &mut Config| {
            restless(config);
            if http == "504" {
                config.outbound.backoff_max = Duration::from_secs(60);
                config.outbound.backoff_min = Duration::from_secs(60);
                fails_fast(config);
            }
        };
        let proxy = Proxy::start_with(service(), control, change, true).await;
        for _ in 0..2 {
            let answers = (proxy.who().await, proxy.exchange(BYTES).await);
            assert_eq!(answers, (http.to_owned(), bytes.to_owned()), "{others:?}");
        }
    }
}

#[tokio::test]
async fn what_leaves_a_backend_goes_to_one_that_exists() {
    let control = services().await;
    let over = Over::First(vec![balancer(FIRST), Default::default(), balancer(SECOND)]);
    control.policies.lock().insert(service(), distributing(&over));
    let proxy = Proxy::start(service(), control).await;
    let target = proxy.worker.target(service());
    let plan = target.ready().await.unwrap();
    let backends = &plan.http_routes(false).unwrap().actions().next().unwrap().backends;
    let pick = |avoided: Option<&Resolved>| plan.pick(backends, BalancerKind::Http, avoided).unwrap().1;
    eventually("the first backend has an endpoint", || pick(None).is_available()).await;
    let first = pick(None);
    eventually("another one has", || plan.has_available(backends, BalancerKind::Http, Some(&first))).await;
    let other = pick(Some(&first));
    assert!(other.is_available() && !other.shares_endpoints(&first));
}

/// Rests are short, so that there are many.
fn restless(config: &mut Config) {
    config.outbound.backoff_min = Duration::from_millis(20);
    config.outbound.backoff_max = Duration::from_millis(20);
}

/// Repeats something until there were this number of further attempts to connect that failed.
async fn while_connections_fail(lines: &Lines, attempts: usize, mut what: impl AsyncFnMut()) {
    let failed = || lines.text().matches("Failed to connect").count();
    let (enough, deadline) = (failed() + attempts, Instant::now() + Duration::from_secs(60));
    while failed() < enough {
        assert!(Instant::now() < deadline, "nothing connects:\n{}", lines.text());
        what().await;
    }
}

#[tokio::test]
async fn what_one_backend_cannot_take_goes_to_another_one() {
    const DEAD: &str = "dead.demo:80";
    let in_turn = Over::First(vec![balancer(DEAD), balancer(SECOND)]);
    let by_weight = Over::Random(vec![(balancer(DEAD), 1), (balancer(SECOND), 1)]);
    for over in [in_turn, by_weight] {
        let lines = Lines::default();
        let _guard = lines.of_this_thread(INJECTORS_FILTER);
        let control = services().await;
        control.update(DEAD, add(vec![endpoint(unused_addr(), None)]));
        control.policies.lock().insert(service(), distributing(&over));
        let proxy = Proxy::start_with(service(), control, restless, true).await;
        while_connections_fail(&lines, 10, async || {
            let answers = (proxy.who().await, proxy.exchange(BYTES).await);
            assert_eq!(answers, ("second".to_owned(), "second".to_owned()), "{}", lines.text());
        })
        .await;
        assert_eq!(metric(&proxy, "outbound_http_balancer_queue_gate_shut_total"), 0, "{}", lines.text());
        assert_eq!(metric(&proxy, "outbound_tcp_balancer_queue_gate_shut_total"), 0, "{}", lines.text());
    }
}

#[tokio::test]
async fn a_backend_whose_endpoints_take_no_connection_in_time_is_left_for_another_one() {
    const FULL: &str = "full.demo:80";
    let (one, other) = (full().await, full().await);
    let addrs = [&one, &other].map(|(listener, _)| listener.local_addr().unwrap());
    let control = services().await;
    control.update(FULL, add(addrs.map(|addr| endpoint(addr, None)).to_vec()));
    control.policies.lock().insert(service(), distributing(&Over::First(vec![balancer(FULL), balancer(SECOND)])));
    // While one endpoint takes no connection, the rest of the other ends.
    let change = |config: &mut Config| {
        restless(config);
        config.outbound.connect_timeout = Duration::from_millis(300);
    };
    let proxy = Proxy::start_with(service(), control, change, true).await;
    for _ in 0..3 {
        assert_eq!((proxy.who().await.as_str(), proxy.exchange(BYTES).await.as_str()), ("second", "second"));
    }
}

#[tokio::test]
async fn a_backend_whose_endpoints_rest_is_preferred_to_one_without_any() {
    const DEAD: &str = "dead.demo:80";
    let in_turn = Over::First(vec![balancer(EMPTY), balancer(DEAD)]);
    let by_weight = Over::Random(vec![(balancer(EMPTY), u32::MAX), (balancer(DEAD), 1)]);
    for over in [in_turn, by_weight] {
        let control = services().await;
        control.update(DEAD, add(vec![endpoint(unused_addr(), None)]));
        control.policies.lock().insert(service(), distributing(&over));
        let change = |config: &mut Config| {
            config.outbound.backoff_min = Duration::from_secs(60);
            config.outbound.backoff_max = Duration::from_secs(60);
            fails_fast(config);
        };
        let proxy = Proxy::start_with(service(), control, change, true).await;
        let target = proxy.worker.target(service());
        let plan = target.ready().await.unwrap();
        let backends = &plan.http_routes(false).unwrap().actions().next().unwrap().backends;
        let pick = || plan.pick(backends, BalancerKind::Http, None).unwrap().1;
        eventually("the endpoint is known", || pick().has_endpoints()).await;
        assert_eq!(proxy.who().await, "504");
        assert!(!plan.has_available(backends, BalancerKind::Http, None), "its endpoint rests");
        assert!((0..20).all(|_| pick().has_endpoints()));
    }
}

#[tokio::test]
async fn a_connection_that_probes_an_endpoint_ends_no_fail_fast() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let control = Control::default();
    control.policies.lock().insert(service(), policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(unused_addr(), None)]));
    let change = |config: &mut Config| {
        restless(config);
        fails_fast(config);
    };
    let proxy = Proxy::start_with(service(), control, change, true).await;
    let entered = || lines.text().matches("Unavailable; entering failfast").count();
    settled(async || {
        let _ = (proxy.who().await, proxy.exchange(BYTES).await);
        if entered() == 2 { Ok(()) } else { Err("requests and connections do not fail fast") }
    })
    .await;
    while_connections_fail(&lines, 10, async || {
        assert_eq!((proxy.who().await.as_str(), proxy.exchange(BYTES).await.as_str()), ("504", ""));
    })
    .await;
    assert_eq!((entered(), lines.text().contains("exited failfast")), (2, false), "{}", lines.text());
}

#[tokio::test]
async fn a_backend_of_weight_0_gets_nothing_while_the_others_have_no_endpoint() {
    let control = services().await;
    let over = Over::Random(vec![(balancer(EMPTY), 1), (balancer(SECOND), 0)]);
    control.policies.lock().insert(service(), distributing(&over));
    let proxy = Proxy::start_with(service(), control, fails_fast, true).await;
    for _ in 0..3 {
        assert_eq!((proxy.who().await, proxy.exchange(BYTES).await), ("504".to_owned(), String::new()));
    }
}

#[tokio::test]
async fn a_backend_that_nothing_is_known_about_is_waited_for_once() {
    let control = services().await;
    control.instead(Call::Endpoints, [Instead::Silence; 2]);
    let over = Over::First(vec![balancer(FIRST), balancer(SECOND)]);
    control.policies.lock().insert(service(), distributing(&over));
    let timeout = Duration::from_secs(5);
    let proxy = Proxy::start_with(service(), control, |config| wait_for_endpoints(config, timeout), true).await;
    assert_eq!(proxy.who().await, "504");
    let again = Instant::now();
    for _ in 0..2 {
        assert_eq!(proxy.who().await, "504");
    }
    assert!(again.elapsed() < timeout, "failing fast does not wait again");
    proxy.control.speak();
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.who().await == "504" {
        assert!(Instant::now() < deadline, "the backend that is known now is not used");
    }
}

#[tokio::test]
async fn without_a_backend_requests_fail_and_connections_are_closed() {
    let control = Control::default();
    control.policies.lock().insert(service(), distributing(&Over::Nothing));
    let proxy = Proxy::start(service(), control).await;
    let response = proxy.get("/").await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(response.headers()["l5d-proxy-error"], "the route has no backend");
    assert_eq!(proxy.exchange(BYTES).await, "");
    let is_counted = |line: &str| {
        line.starts_with("outbound_tcp_errors_total{target_addr=") && line.ends_with(r#",error="invalid backend"} 1"#)
    };
    assert!(proxy.scrape().lines().any(is_counted), "{}", proxy.scrape());
}

#[tokio::test]
async fn an_address_of_a_policy_gets_requests_and_connections() {
    let (http, bytes) = (forward(named("requests").await), forward(named("bytes").await));
    let (http, bytes) = (Over::First(vec![http]), Over::First(vec![bytes]));
    let control = Control::default();
    control.policies.lock().insert(service(), detecting(http_route(&http, vec![]), opaque_route(&bytes)));
    let proxy = Proxy::start(service(), control).await;
    assert_eq!((proxy.who().await.as_str(), proxy.exchange(BYTES).await.as_str()), ("requests", "bytes"));
}

#[tokio::test]
async fn a_policy_that_changes_moves_the_requests_of_an_open_connection() {
    let control = Control::default();
    let of = |addr| distributing(&Over::First(vec![forward(addr)]));
    let before = of(application("before").await);
    control.policies.lock().insert(service(), before);
    let proxy = Proxy::start(service(), control).await;
    let mut sender = proxy.http1().await;
    let mut answer = async || {
        sender.ready().await.expect("the connection stays");
        text(sender.send_request(get("/")).await.unwrap()).await
    };
    assert_eq!(answer().await, "before / HTTP/1.1");
    proxy.control.change_policy(service(), of(application("after").await));
    let deadline = Instant::now() + Duration::from_secs(60);
    while answer().await != "after / HTTP/1.1" {
        assert!(Instant::now() < deadline, "the new policy is not used");
    }
}

/// The share of the policy and of the profile, with overrides or without, and opaque or not.
#[tokio::test]
async fn overrides_of_a_profile_take_requests_and_bytes_from_the_policy() {
    for (overrides, opaque_protocol) in [(true, false), (true, true), (false, true), (false, false)] {
        let control = services().await;
        control.policies.lock().insert(service(), policy(FIRST, vec![]));
        let second = WeightedDst { authority: SECOND.into(), weight: 1, backend_ref: None };
        let profile = DestinationProfile {
            fully_qualified_name: "server.demo.svc.cluster.local".into(),
            opaque_protocol,
            dst_overrides: if overrides { vec![second] } else { vec![] },
            ..DestinationProfile::default()
        };
        control.profiles.lock().insert(service().to_string(), profile);
        let proxy = Proxy::start(service(), control).await;
        let expected = if overrides { "second" } else { "first" };
        let answers = (proxy.who().await, proxy.exchange(BYTES).await);
        assert_eq!(answers, (expected.to_owned(), expected.to_owned()), "{overrides} {opaque_protocol}");
        let detects = proxy.scrape().contains("outbound_tcp_detect_http_results_total{");
        assert_eq!(detects, !opaque_protocol);
    }
}

#[tokio::test]
async fn a_request_is_load_until_its_response_begins() {
    let script = Script::new([Act::Late(Duration::from_secs(3600), 200), Act::Stall]);
    let control = Control::default();
    control.policies.lock().insert(service(), policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    let proxy = Proxy::start(service(), control).await;
    let target = proxy.worker.target(service());
    let plan = target.ready().await.unwrap();
    let backends = &plan.http_routes(false).unwrap().actions().next().unwrap().backends;
    let picked = plan.pick(backends, BalancerKind::Http, None);
    let Some((_, Resolved::Balance(balancer))) = picked else { panic!("no balancer") };
    let picked = balancer.select(Instant::now() + Duration::from_secs(60), None).await.unwrap();
    let endpoint = Arc::clone(picked.balanced().unwrap());
    drop(picked);
    assert_eq!(endpoint.in_flight(), 0);
    let mut sender = proxy.http1().await;
    let late = tokio::spawn(async move { sender.send_request(get("/")).await });
    eventually("a request without a response is load", || endpoint.in_flight() == 1).await;
    let mut response = proxy.get("/").await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(endpoint.in_flight(), 1, "the response that goes on is none");
    late.abort();
    eventually("the client of the other left", || endpoint.in_flight() == 0).await;
}

#[tokio::test]
async fn requests_and_connections_wait_for_an_endpoint_as_long_as_their_own_setting_says() {
    let (long, short) = (Duration::from_secs(3600), Duration::from_millis(50));
    for (of_requests, of_connections) in [(long, short), (short, long)] {
        let control = Control::default();
        let over = Over::First(vec![balancer(EMPTY)]);
        control.policies.lock().insert(service(), detecting(http_route(&over, vec![]), opaque_route(&over)));
        control.update(EMPTY, none(true));
        let apart = |config: &mut Config| {
            config.outbound.http_queue.failfast_timeout = of_requests;
            config.outbound.tcp_queue.failfast_timeout = of_connections;
        };
        let proxy = Proxy::start_with(service(), control, apart, true).await;
        tokio::select! {
            answer = proxy.get("/") => assert_eq!((answer.status(), of_requests), (StatusCode::GATEWAY_TIMEOUT, short)),
            answer = proxy.exchange(BYTES) => assert_eq!((answer.as_str(), of_connections), ("", short)),
        }
    }
}

#[tokio::test]
async fn where_mutual_tls_is_required_the_meshed_endpoints_of_a_service_get_everything() {
    let (proxy, peer, workload) = meshed_with(|config| config.outbound.require_mtls = true).await;
    let port = peer.port();
    tokio::spawn(async move {
        loop {
            let (_, stream) = peer.accept().await;
            let service = service_fn(|_: Request<Incoming>| async {
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("meshed"))))
            });
            tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service));
        }
    });
    proxy.control.update(SERVICE, add(vec![endpoint(named("plaintext").await, None)]));
    for _ in 0..20 {
        assert_eq!(proxy.who().await, "meshed");
    }
    proxy.control.update(SERVICE, remove(workload));
    let settles = async |expected: &'static str| {
        settled(async || match proxy.who().await {
            who if who == expected => Ok(()),
            who => Err(format!("{who} instead of {expected}")),
        })
        .await;
    };
    settles("502").await;
    proxy.control.update(SERVICE, add(vec![endpoint(workload, Some((SERVER, port)))]));
    settles("meshed").await;
}
