//! Tests of backoff and recovery; picking itself is tested with real endpoints in `outbound/tests.rs`.

use super::*;
use crate::{
    discover::endpoint::EndpointInfo,
    inbound::testing::{self, Mesh},
};

fn balanced() -> Balanced {
    balanced_with(None)
}

fn balanced_with(accrual: Option<Arc<Accrual>>) -> Balanced {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let info = Arc::new(EndpointInfo::unmeshed("10.0.0.1:80".parse().unwrap()));
    let of = Arc::clone(&shared);
    let look_up = move || of.metrics.balancer(BalancerKind::Http, &Labels::new(), Duration::from_secs(3));
    let config = shared.config.outbound.clone();
    let pool = Arc::new(PoolState::new(Box::new(look_up)));
    pool.endpoints.store(2, Ordering::Relaxed);
    Balanced::new(Arc::new(Endpoint::new(shared, info)), Load::DEFAULT, accrual, &config, pool)
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_fails_rests_and_one_that_answers_is_ready() {
    let endpoint = balanced();
    let now = Instant::now();
    assert_eq!(endpoint.backs_off_until(now), None);
    endpoint.failed();
    let until = endpoint.backs_off_until(now).unwrap();
    assert!(until >= now + Duration::from_millis(100));
    endpoint.failed();
    assert_eq!(endpoint.backs_off_until(now), Some(until), "failures of one outage count once");
    assert_eq!((endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get()), (0, 1));
    endpoint.recovered();
    assert_eq!(endpoint.backs_off_until(now), None);
    assert_eq!((endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get()), (1, 0));
}

#[tokio::test]
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
async fn one_connection_tries_an_endpoint_after_its_rest() {
    let endpoint = balanced();
    endpoint.failed();
    let first = endpoint.backs_off_until(Instant::now()).unwrap();
    tokio::time::advance(first - Instant::now()).await;
    let now = Instant::now();
    assert_eq!(endpoint.backs_off_until(now), None, "the backoff is over");
    endpoint.picked(now);
    assert_eq!(endpoint.backs_off_until(now), Some(now + endpoint.probe), "the others wait for its result");
    endpoint.failed();
    let second = endpoint.backs_off_until(now).unwrap();
    assert!(second >= now + Duration::from_millis(200) && second < now + endpoint.probe, "a longer backoff");
    tokio::time::advance(second - now).await;
    endpoint.picked(Instant::now());
    let woken = endpoint.pool.available.notified();
    endpoint.recovered();
    assert_eq!(endpoint.backs_off_until(Instant::now()), None);
    woken.await;
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
    let begin = std::time::Instant::now();
    assert!(balancer.is_available());
    // Comparing every pair takes seconds in a debug build.
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    assert_eq!(counts(), (9_999, 9_999, (1, 0, 1)));
    let state = balancer.state.lock();
    assert_eq!(state.endpoints.len(), 9_999);
    assert!(Arc::ptr_eq(state.endpoints.last().unwrap(), &kept), "an unchanged endpoint keeps its connections");
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_responses_fail_is_ejected_and_probed() {
    let backoff =
        crate::request::backoff::Backoff { min: Duration::from_secs(1), max: Duration::from_secs(60), jitter: 0.0 };
    let accrual = Accrual {
        max_failures: std::num::NonZeroU32::new(2),
        success_rate: None,
        backoff,
        honors_retry_after: false,
        min_ready: 1,
    };
    let endpoint = Arc::new(balanced_with(Some(Arc::new(accrual))));
    let request = || {
        endpoint.picked(Instant::now());
        InFlight::start(Arc::clone(&endpoint), Instant::now())
    };
    let counts = || (endpoint.pool.metrics.ready.get(), endpoint.pool.metrics.pending.get());
    request().report(Report::Failed);
    drop(request());
    request().report(Report::Failed);
    let until = Instant::now() + Duration::from_secs(1);
    assert_eq!((endpoint.blocked_until(Instant::now()), counts()), (Some(until), (0, 1)));
    tokio::time::advance(Duration::from_secs(1)).await;
    drop(request());
    assert_eq!(endpoint.blocked_until(Instant::now()), None, "a probe that is given up is repeated");
    let probe = request();
    assert!(endpoint.blocked_until(Instant::now()).is_some());
    let answer = crate::request::classify::Answer { status: http::StatusCode::OK, grpc: None, retry_after: None };
    probe.report(Report::Answered { answer, is_failure: false });
    assert_eq!((endpoint.blocked_until(Instant::now()), counts()), (None, (1, 0)));
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
    let (first, second, third) = tokio::join!(http.select(deadline), http.select(deadline), http.select(deadline));
    assert_eq!([first.err(), second.err()], [Some(SelectError::FailFast); 2]);
    assert_eq!(third.err(), Some(SelectError::QueueFull));
    assert_eq!(http.pool.waiting.load(Ordering::Relaxed), 0);
    for kind in [BalancerKind::Tcp, BalancerKind::Tls] {
        let (_known, opaque) = balancer(kind);
        assert_eq!(opaque.select(deadline).await.err(), Some(SelectError::QueueFull));
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_are_longer_by_no_more_than_the_jitter() {
    for (jitter, longest) in [(0.0, Duration::from_millis(100)), (2.0, Duration::from_millis(300))] {
        for _ in 0..50 {
            let mut endpoint = balanced();
            endpoint.backoff_jitter = jitter;
            let now = Instant::now();
            endpoint.failed();
            let pause = endpoint.backs_off_until(now).unwrap() - now;
            assert!(pause >= Duration::from_millis(100) && pause <= longest, "{pause:?}");
        }
    }
}
