//! HTTPLocalRateLimitPolicy.

use crate::{
    field::{FieldPath, Invalid},
    policy::{GROUP, HttpLocalRateLimitPolicy},
};

/// The problems of an HTTPLocalRateLimitPolicy.
pub fn http_local_rate_limit_policy(policy: &HttpLocalRateLimitPolicy) -> Vec<Invalid> {
    let spec = &policy.spec;
    let mut found = Vec::new();
    if !spec.target_ref.is(GROUP, "Server") {
        let group = spec.target_ref.group.as_deref().unwrap_or_default();
        let problem = format!("{:?} of group {group:?}, expected Server of group {GROUP:?}", spec.target_ref.kind);
        found.push(FieldPath::of("spec.targetRef").invalid(problem));
    }
    let total = spec.total.map(|limit| limit.requests_per_second);
    let mut check = |at: FieldPath, rate: u32| {
        let at = at.key("requestsPerSecond");
        match total {
            _ if rate == 0 => found.push(at.invalid("0, expected at least 1")),
            Some(total) if rate > total => {
                found.push(at.invalid(format!("{rate}, expected at most the total, {total}")));
            }
            _ => {}
        }
    };
    if let Some(rate) = total {
        check(FieldPath::of("spec.total"), rate);
    }
    if let Some(limit) = spec.identity {
        check(FieldPath::of("spec.identity"), limit.requests_per_second);
    }
    for (index, limit) in spec.overrides.iter().flatten().enumerate() {
        check(FieldPath::of("spec.overrides").index(index), limit.requests_per_second);
    }
    for (index, limit) in spec.overrides.iter().flatten().enumerate() {
        for (number, client) in limit.client_refs.iter().enumerate() {
            if !client.is("", "ServiceAccount") {
                let at = FieldPath::of("spec.overrides").index(index).key("clientRefs").index(number).key("kind");
                found.push(at.invalid(format!("unsupported kind {:?}, expected ServiceAccount", client.kind)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::validate::tests::check;

    #[test]
    fn rate_limits() {
        let check = |mut spec: Value, expected: &[&str]| {
            if spec.get("targetRef").is_none() {
                spec["targetRef"] = json!({"group": GROUP, "kind": "Server", "name": "web"});
            }
            let api = "policy.linkerd.io/v1alpha1";
            check(http_local_rate_limit_policy, api, "HTTPLocalRateLimitPolicy", spec, expected);
        };
        let rate = |rate: u32| json!({"requestsPerSecond": rate});
        let clients =
            |rate: u32, kind: &str| json!([{"requestsPerSecond": rate, "clientRefs": [{"kind": kind, "name": "a"}]}]);
        check(json!({}), &[]);
        check(json!({"total": rate(10), "identity": rate(10), "overrides": clients(10, "ServiceAccount")}), &[]);
        check(json!({"identity": rate(10), "overrides": clients(20, "ServiceAccount")}), &[]);
        check(json!({"total": rate(0)}), &["spec.total.requestsPerSecond"]);
        check(json!({"identity": rate(0)}), &["spec.identity.requestsPerSecond"]);
        check(json!({"total": rate(10), "identity": rate(11)}), &["spec.identity.requestsPerSecond"]);
        check(
            json!({"total": rate(10), "overrides": clients(11, "ServiceAccount")}),
            &["spec.overrides[0].requestsPerSecond"],
        );
        check(json!({"overrides": clients(0, "ServiceAccount")}), &["spec.overrides[0].requestsPerSecond"]);
        check(json!({"overrides": clients(1, "Pod")}), &["spec.overrides[0].clientRefs[0].kind"]);
        check(json!({"targetRef": {"kind": "Server", "name": "web"}}), &["spec.targetRef"]);
        check(json!({"targetRef": {"group": GROUP, "kind": "HTTPRoute", "name": "web"}}), &["spec.targetRef"]);
    }
}
