//! EgressNetwork.

use super::networks;
use crate::{
    field::{FieldPath, Invalid},
    policy::EgressNetwork,
};

/// The problems of an EgressNetwork.
pub fn egress_network(egress: &EgressNetwork) -> Vec<Invalid> {
    let spec = &egress.spec;
    let mut found = Vec::new();
    if spec.traffic_policy().is_none() {
        let problem = format!("unknown policy {:?}, expected Allow or Deny", spec.traffic_policy);
        found.push(FieldPath::of("spec.trafficPolicy").invalid(problem));
    }
    let at = FieldPath::of("spec.networks");
    match spec.networks.as_deref() {
        Some([]) => found.push(at.invalid("empty, expected at least one network, or no such field for all")),
        listed => found.extend(networks(&at, listed.unwrap_or_default())),
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::validate::tests::check;

    #[test]
    fn egress_networks() {
        let check = |spec: Value, expected: &[&str]| {
            check(egress_network, "policy.linkerd.io/v1alpha1", "EgressNetwork", spec, expected);
        };
        check(json!({"trafficPolicy": "Allow"}), &[]);
        check(json!({"trafficPolicy": "Deny", "networks": [{"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}]}), &[]);
        check(json!({"trafficPolicy": "Audit"}), &["spec.trafficPolicy"]);
        check(json!({"trafficPolicy": "Allow", "networks": []}), &["spec.networks"]);
        check(
            json!({"trafficPolicy": "Allow", "networks": [{"cidr": "10.0.0.0/8", "except": ["11.0.0.0/8"]}]}),
            &["spec.networks[0].except[0]"],
        );
        check(
            json!({"trafficPolicy": "Allow", "networks": [{"cidr": "10.0.0.0/8", "except": ["0.0.0.0/0"]}]}),
            &["spec.networks[0].except[0]"],
        );
    }
}
