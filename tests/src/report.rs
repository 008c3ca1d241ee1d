//! What tests expect of a client's report.

use std::collections::BTreeMap;

use weft_examples::client::Report;

/// Requires that the server's proxy named this client identity for every request: one without it went around a proxy.
///
/// # Panics
/// A request failed, had no identity or another one, or there was none.
#[track_caller]
pub fn assert_vouched_for(report: &Report, identity: &str) {
    assert!(report.requests > 0, "{report:?}");
    assert_eq!(report.by_client_id, BTreeMap::from([(identity.to_owned(), report.requests)]), "{report:?}");
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_request_without_the_identity_is_found() {
        let report = |by_client_id: &[(&str, u64)]| {
            let by_client_id = by_client_id.iter().map(|(identity, count)| ((*identity).to_owned(), *count)).collect();
            Report { requests: 20, by_client_id, ..Report::default() }
        };
        assert_vouched_for(&report(&[("client", 20)]), "client");
        for wrong in [&[("client", 1)][..], &[("client", 19), ("other", 1)], &[("other", 20)], &[]] {
            let report = report(wrong);
            assert!(catch_unwind(|| assert_vouched_for(&report, "client")).is_err(), "{wrong:?}");
        }
    }
}
