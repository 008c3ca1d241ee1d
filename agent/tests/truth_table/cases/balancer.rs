//! Socket-level load balancers, which turn a Service's address into a backend's when an application connects.

use crate::case::*;

const HIDDEN: Outcome =
    OUTBOUND.but(&[("orig", "10.99.0.3:8080"), ("own-orig", "10.99.0.3:8080"), ("peername", "10.99.0.3:8080")]);

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["B1", "W34"],
        what: "ClusterIP, with a load balancer at a cgroup above (Cilium, at the root)",
        given: &[Given::BalancerAbove],
        to: &["10.96.0.10:80"],
        outcome: HIDDEN,
        differs: differs(
            OUTBOUND,
            "programs of an inner cgroup run first, so the balancer comes too late to hide the Service",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["B2", "W34"],
        what: "ClusterIP, with a load balancer at the application's own cgroup: it runs first",
        given: &[Given::BalancerBelow],
        to: &["10.96.0.10:80"],
        outcome: HIDDEN,
        ..REDIRECTED
    },
    Case {
        ids: &["B3", "W34"],
        what: "the proxy's own connections through a load balancer above",
        given: &[Given::BalancerAbove],
        by: PROXY,
        to: &["10.96.0.10:80"],
        outcome: DIRECT.but(BACKEND),
        verdicts: &["outbound pass_proxy"],
        ..UNTOUCHED
    },
];

const BACKEND: &[(&str, &str)] =
    &[("listener", "8080"), ("peername", "10.99.0.3:8080"), ("accepted-local", "10.99.0.3:8080")];
