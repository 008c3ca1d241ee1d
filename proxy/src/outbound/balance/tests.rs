//! Tests of rests and recovery; picking itself is tested with real endpoints in `outbound/tests.rs`.

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};

use super::*;
use crate::{
    discover::{endpoint::EndpointInfo, route::SuccessRate},
    inbound::testing::{self, Mesh},
};

fn refused() -> ConnectError {
    ConnectError::Timeout("10.0.0.1:80".parse().unwrap())
}

fn balanced() -> Balanced {
    balanced_with(None)
}

fn balanced_with(accrual: Option<Arc<Accrual>>) -> Balanced {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let info = Arc::new(EndpointInfo::unmeshed("10.0.0.1:80".parse().unwrap()));
    let of = Arc::clone(&shared);
    let look_up = move || of.metrics.balancer(BalancerKind::Http, &Labels::new(), Duration::from_secs(3));
    let config = shared.config.outbound.clone();
    let fail_fast = FailFast::new("server.demo.svc.cluster.local:80".to_owned(), Duration::from_secs(3));
    let pool = Arc::new(PoolState::new(Box::new(look_up), fail_fast));
    pool.endpoints.store(2, Ordering::Relaxed);
    Balanced::new(Arc::new(Endpoint::new(shared, info, None)), Load::DEFAULT, accrual, &config, pool)
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_fails_rests_and_one_that_answers_is_ready() {
    let endpoint = balanced();
    let now = Instant::now();
    assert_eq!(endpoint.rests_until(now), None);
    endpoint.failed(&refused());
    let until = endpoint.rests_until(now).unwrap();
    assert!(until >= now + Duration::from_millis(100));
    endpoint.failed(&refused());
    assert_eq!(endpoint.rests_until(now), Some(until), "failures of one outage count once");
    assert_eq!((endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get()), (0, 1));
    endpoint.recovered();
    assert_eq!(endpoint.rests_until(now), None);
    assert_eq!((endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_is_load() {
    let endpoint = Arc::new(balanced());
    let now = Instant::now();
    let idle = endpoint.cost(now);
    let mut first = InFlight::start(Arc::clone(&endpoint), now);
    let second = InFlight::start(Arc::clone(&endpoint), now);
    assert!((endpoint.cost(now) - idle * 3.0).abs() < 1e-9);
    drop(second);
    assert!((endpoint.cost(now) - idle * 2.0).abs() < 1e-9);
    first.finish();
    assert_eq!(endpoint.in_flight.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_measured_when_it_is_made_and_is_load_until_it_ends() {
    let endpoint = Arc::new(balanced());
    let mut connection = InFlight::start(Arc::clone(&endpoint), Instant::now());
    tokio::time::advance(Duration::from_secs(1)).await;
    connection.measured();
    let now = Instant::now();
    assert!((endpoint.cost(now) - 2.0).abs() < 1e-9, "a second, for it and the next one: {}", endpoint.cost(now));
    tokio::time::advance(Duration::from_secs(10)).await;
    let now = Instant::now();
    drop(connection);
    let faded = (-1.0_f64).exp();
    assert!((endpoint.cost(now) - faded).abs() < 1e-9, "its end is no latency: {}", endpoint.cost(now));
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_measured_when_it_begins() {
    let endpoint = Arc::new(balanced());
    let mut request = InFlight::start(Arc::clone(&endpoint), Instant::now());
    tokio::time::advance(Duration::from_secs(1)).await;
    request.finish();
    tokio::time::advance(Duration::from_secs(10)).await;
    request.finish();
    drop(request);
    let faded = (-1.0_f64).exp();
    assert!((endpoint.cost(Instant::now()) - faded).abs() < 1e-9, "neither its end nor a repetition counts");
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_raises_the_load_and_never_lowers_it() {
    let endpoint = Arc::new(balanced());
    let request = || InFlight::start(Arc::clone(&endpoint), Instant::now());
    let cost = || endpoint.cost(Instant::now());
    let (given_up, failed) = (request(), request());
    tokio::time::advance(Duration::from_secs(5)).await;
    drop(given_up);
    assert!((cost() - 10.0).abs() < 1e-9, "five seconds, for the one in flight and the next: {}", cost());
    tokio::time::advance(Duration::from_secs(1)).await;
    drop(failed);
    assert!((cost() - 6.0).abs() < 1e-9, "the longer time counts: {}", cost());
    drop(request());
    request().report(Report::Failed);
    assert!((cost() - 6.0).abs() < 1e-9, "a fast failure is no latency: {}", cost());
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_before_its_body_counts_until_its_head() {
    let endpoint = Arc::new(balanced());
    let mut stream = InFlight::start(Arc::clone(&endpoint), Instant::now());
    tokio::time::advance(Duration::from_secs(1)).await;
    stream.answered();
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(endpoint.in_flight(), 1, "it is load until its body begins");
    drop(stream);
    assert!((endpoint.cost(Instant::now()) - 1.0).abs() < 1e-9, "{}", endpoint.cost(Instant::now()));
}

#[tokio::test(start_paused = true)]
async fn of_two_endpoints_the_cheaper_one_is_picked() {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let addrs = (1..=3).map(|n| SocketAddr::from(([10, 0, 0, n], 80)));
    let set = addrs.map(|addr| (addr, Arc::new(EndpointInfo::unmeshed(addr)))).collect();
    let (_known, discovered) = Endpoints::for_test(set);
    let balancer = Balancer::new(shared, BalancerKind::Http, Labels::new(), Arc::new(discovered), Load::DEFAULT, None);
    assert!(balancer.is_available());
    let now = Instant::now();
    for (endpoint, millis) in balancer.state.lock().endpoints.iter().zip([100, 200, 300]) {
        endpoint.rtt.lock().add(Duration::from_millis(millis), now);
    }
    let picked = || balancer.try_select(None).ok().unwrap().balanced().unwrap().endpoint.info.addr.ip().to_string();
    let mut counts = std::collections::BTreeMap::<_, u32>::new();
    for _ in 0..300 {
        *counts.entry(picked()).or_default() += 1;
    }
    assert!(!counts.contains_key("10.0.0.3"), "each of the others is cheaper: {counts:?}");
    // Of three pairs, one is without the first: 300 draws with p = 1/3, seven deviations wide.
    assert!((43..=157).contains(&counts["10.0.0.2"]), "{counts:?}");
    // Load is latency times what is in flight: nine times 100 ms are more than 300 ms.
    let cheapest = Arc::clone(&balancer.state.lock().endpoints[0]);
    let _busy: Vec<_> = (0..8).map(|_| InFlight::start(Arc::clone(&cheapest), now)).collect();
    let busy: std::collections::BTreeSet<_> = (0..50).map(|_| picked()).collect();
    assert!(!busy.contains("10.0.0.1"), "{busy:?}");
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_after_its_rest_is_available_and_not_known_to_be_reachable() {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let addrs = (1..=2).map(|n| SocketAddr::from(([10, 0, 0, n], 80)));
    let set = addrs.map(|addr| (addr, Arc::new(EndpointInfo::unmeshed(addr)))).collect();
    let (_known, discovered) = Endpoints::for_test(set);
    let balancer = Balancer::new(shared, BalancerKind::Http, Labels::new(), Arc::new(discovered), Load::DEFAULT, None);
    let states = || (balancer.is_available(), balancer.is_reachable());
    assert_eq!(states(), (true, true));
    let endpoints = balancer.state.lock().endpoints.clone();
    endpoints[0].failed(&refused());
    assert_eq!(states(), (true, true), "the other one has not failed");
    endpoints[1].failed(&refused());
    assert_eq!(states(), (false, false));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(states(), (true, false), "both are to be probed");
    endpoints[1].recovered();
    assert_eq!(states(), (true, true));
}

#[tokio::test(start_paused = true)]
async fn one_connection_tries_an_endpoint_after_its_rest() {
    let endpoint = balanced();
    endpoint.failed(&refused());
    let first = endpoint.rests_until(Instant::now()).unwrap();
    tokio::time::advance(first - Instant::now()).await;
    let now = Instant::now();
    assert_eq!(endpoint.rests_until(now), None, "the rest is over");
    endpoint.picked(now);
    assert_eq!(endpoint.rests_until(now), Some(now + endpoint.probe), "the others wait for its result");
    endpoint.failed(&refused());
    let second = endpoint.rests_until(now).unwrap();
    assert!(second >= now + Duration::from_millis(200) && second < now + endpoint.probe, "a longer rest");
    tokio::time::advance(second - now).await;
    endpoint.picked(Instant::now());
    let woken = endpoint.pool.woken.notified();
    endpoint.recovered();
    assert_eq!(endpoint.rests_until(Instant::now()), None);
    woken.await;
}

#[tokio::test(start_paused = true)]
async fn rests_get_longer_until_a_connection_works() {
    let mut endpoint = balanced();
    endpoint.backoff.jitter = 0.0;
    let fails_after = |connected: fn(&Balanced)| {
        connected(&endpoint);
        endpoint.failed(&refused());
        (endpoint.rests_until(Instant::now()).unwrap() - Instant::now()).as_millis()
    };
    assert_eq!(fails_after(|_| {}), 100);
    assert_eq!(fails_after(|endpoint| endpoint.connected(&Ok(()))), 200, "HTTP/2 fails on the new connection");
    assert_eq!(fails_after(Balanced::recovered), 100);
}

#[tokio::test(start_paused = true)]
async fn fail_fast_ends_when_a_probe_is_connected() {
    let endpoint = balanced();
    endpoint.failed(&refused());
    endpoint.pool.fail_fast.enter(&endpoint.pool.metrics);
    let rest = endpoint.rests_until(Instant::now()).unwrap();
    tokio::time::advance(rest - Instant::now()).await;
    endpoint.picked(Instant::now());
    endpoint.connected::<()>(&Err(refused()));
    assert!(endpoint.pool.fail_fast.is_active(), "the probe failed");
    endpoint.connected(&Ok(()));
    assert!(!endpoint.pool.fail_fast.is_active(), "no request has to come before the others may wait");
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_fails_on_this_side_leaves_the_endpoint_to_the_next_connection() {
    let endpoint = balanced();
    endpoint.untried();
    assert_eq!(endpoint.rests_until(Instant::now()), None);
    endpoint.failed(&refused());
    let rest = endpoint.rests_until(Instant::now()).unwrap();
    endpoint.untried();
    assert_eq!(endpoint.rests_until(Instant::now()), Some(rest), "a connection that began before has no say");
    tokio::time::advance(rest - Instant::now()).await;
    endpoint.picked(Instant::now());
    assert!(endpoint.rests_until(Instant::now()).is_some());
    let woken = endpoint.pool.woken.notified();
    endpoint.untried();
    woken.await;
    assert_eq!(endpoint.rests_until(Instant::now()), None);
    endpoint.picked(Instant::now());
    assert!(endpoint.rests_until(Instant::now()).is_some(), "one at a time");
    endpoint.failed(&refused());
    let longer = endpoint.rests_until(Instant::now()).unwrap();
    assert!(longer >= Instant::now() + Duration::from_millis(200), "it was never reached");
}

#[tokio::test]
async fn thousands_of_endpoints_are_reconciled_in_one_pass() {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let addrs = (0..10_000_u32).map(|n| SocketAddr::from((std::net::Ipv4Addr::from_bits(0x0a00_0000 + n), 80)));
    let set: crate::discover::endpoints::EndpointSet =
        addrs.map(|addr| (addr, Arc::new(EndpointInfo::unmeshed(addr)))).collect();
    let (known, discovered) = Endpoints::for_test(set.clone());
    let balancer = Balancer::new(shared, BalancerKind::Http, Labels::new(), Arc::new(discovered), Load::DEFAULT, None);
    assert!(balancer.is_available());
    let kept = balancer.state.lock().endpoints.last().cloned().unwrap();
    let mut changed = set;
    changed.pop_first();
    let counts = || {
        let metrics = &balancer.pool.metrics;
        let updates = (metrics.reset.get(), metrics.added.get(), metrics.removed.get());
        (metrics.ready.get(), metrics.endpoints.get(), updates)
    };
    assert_eq!(counts(), (10_000, 10_000, (1, 0, 0)));
    known.send_replace(EndpointsState::Known(Arc::new(changed)));
    // Of this thread, which on a busy machine may wait for a processor.
    let processor_time = || {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
        usage.user_time() + usage.system_time()
    };
    let before = processor_time();
    assert!(balancer.is_available());
    let took = (processor_time() - before).num_milliseconds();
    // Comparing every pair takes seconds in a debug build.
    assert!(took < 500, "{took} ms");
    assert_eq!(counts(), (9_999, 9_999, (1, 0, 1)));
    let state = balancer.state.lock();
    assert_eq!(state.endpoints.len(), 9_999);
    assert!(Arc::ptr_eq(state.endpoints.last().unwrap(), &kept), "an unchanged endpoint keeps its connections");
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_responses_fail_is_ejected_and_probed() {
    let backoff = Backoff { min: Duration::from_secs(1), max: Duration::from_secs(60), jitter: 0.0 };
    let accrual = Accrual {
        max_failures: std::num::NonZeroU32::new(2),
        success_rate: None,
        backoff,
        honors_retry_after: false,
        min_ready: 1,
    };
    let endpoint = Arc::new(balanced_with(Some(Arc::new(accrual))));
    let request = || InFlight::start(Arc::clone(&endpoint), Instant::now());
    let counts = || (endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get());
    let old = request();
    request().report(Report::Failed);
    drop(request());
    request().report(Report::Failed);
    let until = Instant::now() + Duration::from_secs(1);
    assert_eq!((endpoint.blocked_until(Instant::now()), counts()), (Some(until), (0, 1)));
    tokio::time::advance(Duration::from_secs(1)).await;
    drop(request());
    assert_eq!(endpoint.blocked_until(Instant::now()), None, "a probe that is given up is repeated");
    let probe = request();
    drop(old);
    assert!(endpoint.blocked_until(Instant::now()).is_some(), "a request from before the ejection is no probe");
    let answer = crate::request::classify::Answer { status: http::StatusCode::OK, grpc: None, retry_after: None };
    probe.report(Report::Answered { answer, is_failure: false });
    assert_eq!((endpoint.blocked_until(Instant::now()), counts()), (None, (1, 0)));
}

#[tokio::test(start_paused = true)]
async fn too_much_to_do_lowers_the_share_of_successes_and_is_no_failure_in_a_row() {
    let success_rate = SuccessRate { threshold: 0.8, window: Duration::from_secs(10), min_requests: 5 };
    let backoff = Backoff { min: Duration::from_secs(1), max: Duration::from_secs(60), jitter: 0.0 };
    for (status, grpc) in [(200, Some(8)), (429, None)] {
        for (max_failures, success_rate, is_ejected) in [(2, None, false), (0, Some(success_rate), true)] {
            let max_failures = std::num::NonZeroU32::new(max_failures);
            let accrual = Accrual { max_failures, success_rate, backoff, honors_retry_after: false, min_ready: 1 };
            let endpoint = Arc::new(balanced_with(Some(Arc::new(accrual))));
            for _ in 0..5 {
                tokio::time::advance(Duration::from_secs(1)).await;
                let status = http::StatusCode::from_u16(status).unwrap();
                let answer = crate::request::classify::Answer { status, grpc, retry_after: None };
                let request = InFlight::start(Arc::clone(&endpoint), Instant::now());
                request.report(Report::Answered { answer, is_failure: false });
            }
            assert_eq!(endpoint.blocked_until(Instant::now()).is_some(), is_ejected, "{status} {grpc:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_more_wait_for_an_endpoint_than_the_capacity_of_their_kind() {
    let mut config = testing::config();
    config.outbound.http_queue.capacity = 2;
    config.outbound.tcp_queue.capacity = 0;
    let (shared, _drain) = testing::shared(config, &Mesh::new());
    let balancer = |kind| {
        let (known, discovered) = Endpoints::for_test(Default::default());
        let discovered = Arc::new(discovered);
        (known, Balancer::new(Arc::clone(&shared), kind, Labels::new(), discovered, Load::DEFAULT, None))
    };
    let (_known, http) = balancer(BalancerKind::Http);
    let deadline = Instant::now() + Duration::from_secs(3);
    let (first, second, third) =
        tokio::join!(http.select(deadline, None), http.select(deadline, None), http.select(deadline, None));
    assert_eq!([first.err(), second.err()], [Some(SelectError::FailFast); 2]);
    assert_eq!(third.err(), Some(SelectError::QueueFull));
    assert_eq!(http.pool.waiting.load(Ordering::Relaxed), 0);
    for kind in [BalancerKind::Tcp, BalancerKind::Tls] {
        let (_known, opaque) = balancer(kind);
        assert_eq!(opaque.select(deadline, None).await.err(), Some(SelectError::QueueFull));
    }
}

#[tokio::test(start_paused = true)]
async fn what_waits_fails_when_fail_fast_begins() {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let (_known, discovered) = Endpoints::for_test(Default::default());
    let balancer = Balancer::new(shared, BalancerKind::Http, Labels::new(), Arc::new(discovered), Load::DEFAULT, None);
    let began = Instant::now();
    let waits = |seconds| {
        let balancer = &balancer;
        async move {
            let selected = balancer.select(began + Duration::from_secs(seconds), None).await;
            (selected.err(), began.elapsed().as_secs())
        }
    };
    let (first, later) = tokio::join!(waits(3), waits(3600));
    assert_eq!([first, later], [(Some(SelectError::FailFast), 3); 2]);
}

#[tokio::test(start_paused = true)]
async fn pauses_are_longer_by_no_more_than_the_jitter() {
    for (jitter, longest) in [(0.0, Duration::from_millis(100)), (2.0, Duration::from_millis(300))] {
        for _ in 0..50 {
            let mut endpoint = balanced();
            endpoint.backoff.jitter = jitter;
            let now = Instant::now();
            endpoint.failed(&refused());
            let pause = endpoint.rests_until(now).unwrap() - now;
            assert!(pause >= Duration::from_millis(100) && pause <= longest, "{pause:?}");
        }
    }
}
