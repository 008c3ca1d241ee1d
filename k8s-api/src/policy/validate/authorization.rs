//! AuthorizationPolicy.

use crate::{
    field::{FieldPath, Invalid},
    policy::{AuthorizationPolicy, GROUP, NamespacedTargetRef, route::GATEWAY_GROUP},
};

/// Targets beside the policy's own Namespace: group and kind.
const TARGETS: [(&str, &str); 4] =
    [(GROUP, "Server"), (GROUP, "HTTPRoute"), (GATEWAY_GROUP, "HTTPRoute"), (GATEWAY_GROUP, "GRPCRoute")];

/// The problems of an AuthorizationPolicy.
pub fn authorization_policy(policy: &AuthorizationPolicy) -> Vec<Invalid> {
    let target = &policy.spec.target_ref;
    let mut found = Vec::new();
    if target.is("", "Namespace") {
        let own = policy.metadata.namespace.as_deref().unwrap_or("default");
        if target.name != own {
            found.push(
                FieldPath::of("spec.targetRef.name")
                    .invalid(format!("namespace {:?}, expected the policy's own, {own:?}", target.name)),
            );
        }
    } else if !TARGETS.iter().any(|(group, kind)| target.is(group, kind)) {
        let group = target.group.as_deref().unwrap_or_default();
        found.push(FieldPath::of("spec.targetRef").invalid(format!(
            "{:?} of group {group:?}: unsupported target, expected Server, HTTPRoute, GRPCRoute or Namespace",
            target.kind
        )));
    }
    found.extend(required_authentications(&policy.spec.required_authentication_refs));
    found
}

fn required_authentications(refs: &[NamespacedTargetRef]) -> Vec<Invalid> {
    let at = |index: usize| FieldPath::of("spec.requiredAuthenticationRefs").index(index);
    let mut found = Vec::new();
    let (mut identity, mut networks) = (0, 0);
    for (index, reference) in refs.iter().enumerate() {
        if reference.is(GROUP, "MeshTLSAuthentication") || reference.is("", "ServiceAccount") {
            identity += 1;
            if identity > 1 {
                found.push(at(index).invalid(
                    "second identity requirement, expected at most one MeshTLSAuthentication or ServiceAccount",
                ));
            }
        } else if reference.is(GROUP, "NetworkAuthentication") {
            networks += 1;
            if networks > 1 {
                found.push(at(index).invalid("second network requirement, expected at most one NetworkAuthentication"));
            }
        } else {
            found.push(at(index).key("kind").invalid(format!(
                "unsupported kind {:?}, expected MeshTLSAuthentication, NetworkAuthentication or ServiceAccount",
                reference.kind
            )));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::validate::tests::check;

    #[test]
    fn authorization_policies() {
        let check = |target, refs, expected: &[&str]| {
            let spec = json!({"targetRef": target, "requiredAuthenticationRefs": refs});
            check(authorization_policy, "policy.linkerd.io/v1alpha1", "AuthorizationPolicy", spec, expected);
        };
        let srv = json!({"group": GROUP, "kind": "Server", "name": "s"});
        let tls = json!({"group": GROUP, "kind": "MeshTLSAuthentication", "name": "m"});
        let net = json!({"group": GROUP, "kind": "NetworkAuthentication", "name": "n"});
        let sa = json!({"kind": "ServiceAccount", "name": "a"});
        check(srv.clone(), json!([tls, net]), &[]);
        check(srv.clone(), json!([]), &[]);
        check(srv.clone(), json!([sa]), &[]);
        check(srv.clone(), json!([tls, sa]), &["spec.requiredAuthenticationRefs[1]"]);
        check(srv.clone(), json!([net, net]), &["spec.requiredAuthenticationRefs[1]"]);
        check(srv, json!([{"kind": "Secret", "name": "x"}]), &["spec.requiredAuthenticationRefs[0].kind"]);
        check(json!({"kind": "Namespace", "name": "shop"}), json!([]), &[]);
        check(json!({"kind": "Namespace", "name": "other"}), json!([]), &["spec.targetRef.name"]);
        check(json!({"kind": "Service", "name": "web"}), json!([]), &["spec.targetRef"]);
        for (group, kind) in [(GROUP, "HTTPRoute"), (GATEWAY_GROUP, "HTTPRoute"), (GATEWAY_GROUP, "GRPCRoute")] {
            check(json!({"group": group, "kind": kind, "name": "r"}), json!([]), &[]);
        }
        for (group, kind) in [(GROUP, "GRPCRoute"), (GATEWAY_GROUP, "TCPRoute"), ("", "HTTPRoute")] {
            check(json!({"group": group, "kind": kind, "name": "r"}), json!([]), &["spec.targetRef"]);
        }
    }
}
