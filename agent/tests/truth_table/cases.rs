//! The table: every case, and the rows that are not cases here. Each row of the reference tables must be in exactly one
//! of the two, which a test checks.

mod balancer;
mod bypass;
mod inbound;
mod options;
mod outbound;
mod sockets;

use crate::case::{Case, Elsewhere};

/// All cases, in the order in which they are run and shown.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [outbound::CASES, inbound::CASES, sockets::CASES, options::CASES, balancer::CASES, bypass::CASES]
        .into_iter()
        .flatten()
}

/// The rows that are covered by another test, or cannot have one.
pub(crate) const ELSEWHERE: &[Elsewhere] = &[
    Elsewhere {
        ids: &["O25"],
        what: "pod with host networking",
        where_: "cannot be meshed: the injector refuses it (`k8s-api`: tests of `inject`)",
    },
    Elsewhere {
        ids: &["K29"],
        what: "AF_RDS and AF_SMC",
        where_: "modules that no kernel of these tests has: see the limits",
    },
    Elsewhere {
        ids: &["W31"],
        what: "pod deleted, its network namespace gone",
        where_: "nothing is dialled; the agent's tests of clusters look at maps, links and pins",
    },
    Elsewhere {
        ids: &["W32"],
        what: "agent dead, pods that it enrolled",
        where_: "test `datapath`: a killed agent is not missed, and the next one takes over",
    },
    Elsewhere {
        ids: &["W33"],
        what: "agent dead, new meshed pod",
        where_: "a matter of probes and of self-enrolment, not of one connection; iptables have no agent",
    },
];

/// The last row of each table: O and I of Linkerd's, W of Weft's.
pub(crate) const ROWS: [(char, u32); 3] = [('O', 27), ('I', 19), ('W', 35)];
