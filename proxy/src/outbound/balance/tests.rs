//! Tests of rest and recovery; picking itself is tested with real endpoints in `outbound/tests.rs`.

use super::*;
use crate::discover::endpoint::EndpointInfo;
use crate::inbound::testing::{self, Mesh};

fn balanced() -> Balanced {
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let info = Arc::new(EndpointInfo::unmeshed("10.0.0.1:80".parse().unwrap()));
    let gauges = Gauges { ready: Gauge::default(), pending: Gauge::default() };
    let backoff = (Duration::from_millis(100), Duration::from_secs(60));
    Balanced::new(Arc::new(Endpoint::new(shared, info)), PeakEwma::DEFAULT, backoff, gauges)
}

#[tokio::test]
async fn an_endpoint_that_fails_rests_and_one_that_answers_is_ready() {
    let endpoint = balanced();
    let now = Instant::now();
    assert_eq!(endpoint.rests_until(now), None);
    endpoint.failed();
    let until = endpoint.rests_until(now).unwrap();
    assert!(until >= now + Duration::from_millis(100));
    endpoint.failed();
    assert_eq!(endpoint.rests_until(now), Some(until), "failures of one outage count once");
    assert_eq!((endpoint.gauges.ready.get(), endpoint.gauges.pending.get()), (0, 1));
    endpoint.recovered();
    assert_eq!(endpoint.rests_until(now), None);
    assert_eq!((endpoint.gauges.ready.get(), endpoint.gauges.pending.get()), (1, 0));
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
