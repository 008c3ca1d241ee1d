//! Bypasses: connections go to the address that was dialled, and the verdicts say so.

use crate::case::*;

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["N1"],
        what: "from a pod whose redirection is switched off",
        given: &[Given::Bypassed],
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "127.0.0.1:8080"],
        verdicts: &["outbound pass_pod_bypassed"],
        ..UNTOUCHED
    },
    Case {
        ids: &["N1"],
        what: "to a pod whose redirection is switched off",
        given: &[Given::Bypassed],
        by: STRANGER,
        to: &["10.99.0.2:8080", "[fd99::2]:8080"],
        verdicts: &["inbound pass_pod_bypassed"],
        ..UNTOUCHED
    },
    Case {
        ids: &["N2"],
        what: "from a pod on a node whose redirection is switched off",
        given: &[Given::NodeBypassed],
        to: &["10.99.0.3:8080", "[fd99::3]:8080"],
        verdicts: &["outbound pass_node_bypassed"],
        ..UNTOUCHED
    },
    Case {
        ids: &["N2"],
        what: "to a pod on a node whose redirection is switched off",
        given: &[Given::NodeBypassed],
        by: STRANGER,
        to: &["10.99.0.2:8080", "[fd99::2]:8080"],
        verdicts: &["inbound pass_node_bypassed"],
        ..UNTOUCHED
    },
];
