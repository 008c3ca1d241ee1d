//! policy-validator: invalid policy resources are not stored.
//!
//! Routes of the Gateway API may belong to other controllers, also in shapes that this version does not know: one that
//! cannot be read is stored, with a warning.

use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionResponse},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use weft_k8s_api::{
    field::Invalid,
    policy::{GROUP, route::GATEWAY_GROUP, validate},
};

use super::{denied, needs_no_check, object, warned};

/// What the mesh makes of a route that it cannot read: something that takes no request stands for it.
const UNREADABLE_ROUTE: &str = "in the mesh, the route takes no request, and a Server that it names serves nothing by \
                                default; its last readable state stays in force until the control plane restarts";

/// Allows a valid policy resource or route, one that is being deleted, and kinds that are not policy.
pub(super) fn answer(request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
    let (group, kind) = (request.kind.group.as_str(), request.kind.kind.as_str());
    if needs_no_check(request) || !matches!(group, GROUP | GATEWAY_GROUP) {
        return request.into();
    }
    let checked = match object(request) {
        Ok(object) => check_kind(group, kind, &object),
        Err(error) => Err(error.to_string()),
    };
    let problems = match checked {
        Ok(found) if found.is_empty() => return warned(request),
        Ok(found) => found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        Err(problem) if group == GATEWAY_GROUP => {
            let mut response = warned(request);
            response.warnings.get_or_insert_default().push(format!("{problem}; {UNREADABLE_ROUTE}"));
            return response;
        }
        Err(problem) => problem,
    };
    denied(request, format!("{kind} {:?}: {problems}", request.name))
}

/// The problems of an object.
///
/// # Errors
/// When its types are wrong.
fn check_kind(group: &str, kind: &str, object: &Value) -> Result<Vec<Invalid>, String> {
    match (group, kind) {
        (GROUP, "Server") => check(object, validate::server),
        (GROUP, "ServerAuthorization") => check(object, validate::server_authorization),
        (GROUP, "AuthorizationPolicy") => check(object, validate::authorization_policy),
        (GROUP, "MeshTLSAuthentication") => check(object, validate::mesh_tls_authentication),
        (GROUP, "NetworkAuthentication") => check(object, validate::network_authentication),
        (GROUP, "HTTPLocalRateLimitPolicy") => check(object, validate::http_local_rate_limit_policy),
        (GROUP, "EgressNetwork") => check(object, validate::egress_network),
        (GROUP, "HTTPRoute") => check(object, validate::http_route),
        (GATEWAY_GROUP, "HTTPRoute") => check(object, validate::gateway_http_route),
        (GATEWAY_GROUP, "GRPCRoute") => check(object, validate::grpc_route),
        (GATEWAY_GROUP, "TLSRoute") => check(object, validate::tls_route),
        (GATEWAY_GROUP, "TCPRoute") => check(object, validate::tcp_route),
        _ => Ok(Vec::new()),
    }
}

fn check<K: DeserializeOwned>(object: &Value, validate: fn(&K) -> Vec<Invalid>) -> Result<Vec<Invalid>, String> {
    let typed = serde_path_to_error::deserialize::<_, K>(object);
    typed.map(|typed| validate(&typed)).map_err(|error| format!("{}: {}", error.path(), error.inner()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn answered(group: &str, kind: &str, version: &str, spec: &Value) -> AdmissionResponse {
        let api_version = format!("{group}/{version}");
        let metadata = json!({"name": "x", "namespace": "shop"});
        let request = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "uid": "u",
            "kind": {"group": group, "version": version, "kind": kind},
            "resource": {"group": group, "version": version, "resource": "x"}, "name": "x", "namespace": "shop",
            "operation": "CREATE", "userInfo": {}, "dryRun": false,
            "object": {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}});
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request});
        let review: kube::core::admission::AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
        answer(&review.try_into().unwrap())
    }

    #[track_caller]
    fn denies_in(group: &str, kind: &str, version: &str, spec: Value, expected: Option<&str>) {
        let response = answered(group, kind, version, &spec);
        assert_eq!(response.allowed, expected.is_none(), "{kind} {spec}: {}", response.result.message);
        assert!(response.result.message.contains(expected.unwrap_or_default()), "{}", response.result.message);
    }

    #[track_caller]
    fn denies(kind: &str, version: &str, spec: Value, expected: Option<&str>) {
        denies_in(GROUP, kind, version, spec, expected);
    }

    #[test]
    fn names_the_field_and_what_was_expected() {
        let selector = json!({"matchLabels": {"app": "web"}});
        denies("Server", "v1beta3", json!({"podSelector": selector, "port": 80}), None);
        denies("Server", "v1beta1", json!({"podSelector": selector, "port": "http"}), None);
        denies(
            "Server",
            "v1beta3",
            json!({"podSelector": selector, "port": 80, "accessPolicy": "everybody"}),
            Some("Server \"x\": spec.accessPolicy: unknown policy \"everybody\""),
        );
        denies("NetworkAuthentication", "v1alpha1", json!({"networks": [{"cidr": "10.0.0.0/8"}]}), None);
        denies(
            "NetworkAuthentication",
            "v1alpha1",
            json!({"networks": [{"cidr": "10.0.0.0/99"}]}),
            Some("spec.networks[0].cidr: bad network \"10.0.0.0/99\""),
        );
        denies("MeshTLSAuthentication", "v1alpha1", json!({"identities": ["*"]}), None);
        denies("MeshTLSAuthentication", "v1alpha1", json!({"identities": ["A B"]}), Some("spec.identities[0]"));
        denies(
            "ServerAuthorization",
            "v1beta1",
            json!({"server": {"name": "s"}, "client": {"unauthenticated": true}}),
            None,
        );
        denies(
            "ServerAuthorization",
            "v1beta1",
            json!({"server": {"name": "s"}, "client": {"unauthenticated": true, "meshTLS": {"identities": ["*"]}}}),
            Some("spec.client.unauthenticated"),
        );
        let target = |namespace: &str| json!({"targetRef": {"kind": "Namespace", "name": namespace}, "requiredAuthenticationRefs": []});
        denies("AuthorizationPolicy", "v1alpha1", target("shop"), None);
        denies("AuthorizationPolicy", "v1alpha1", target("other"), Some("spec.targetRef.name: namespace \"other\""));
        let route =
            json!({"targetRef": {"group": GROUP, "kind": "HTTPRoute", "name": "r"}, "requiredAuthenticationRefs": []});
        denies("AuthorizationPolicy", "v1alpha1", route, None);
        let service = json!({"targetRef": {"kind": "Service", "name": "web"}, "requiredAuthenticationRefs": []});
        denies("AuthorizationPolicy", "v1alpha1", service, Some("spec.targetRef: \"Service\""));
    }

    #[test]
    fn limits_and_egress_are_checked() {
        let limit = |total: u32| json!({"targetRef": {"group": GROUP, "kind": "Server", "name": "s"}, "total": {"requestsPerSecond": total}});
        denies("HTTPLocalRateLimitPolicy", "v1alpha1", limit(1), None);
        denies("HTTPLocalRateLimitPolicy", "v1alpha1", limit(0), Some("spec.total.requestsPerSecond: 0"));
        let negative =
            json!({"targetRef": {"group": GROUP, "kind": "Server", "name": "s"}, "total": {"requestsPerSecond": -1}});
        denies("HTTPLocalRateLimitPolicy", "v1alpha1", negative, Some("spec.total.requestsPerSecond: invalid value"));
        denies("EgressNetwork", "v1alpha1", json!({"trafficPolicy": "Deny"}), None);
        denies(
            "EgressNetwork",
            "v1alpha1",
            json!({"trafficPolicy": "Deny", "networks": []}),
            Some("spec.networks: empty"),
        );
    }

    #[test]
    fn routes_are_checked_in_both_groups() {
        let web = json!({"group": "core", "kind": "Service", "name": "web", "port": 80});
        let path = |path: &str| json!({"parentRefs": [web], "rules": [{"matches": [{"path": {"value": path}}]}]});
        let rules = |count: usize| json!({"parentRefs": [web], "rules": vec![json!({}); count]});
        let method =
            |service: &str| json!({"parentRefs": [web], "rules": [{"matches": [{"method": {"type": service}}]}]});
        for version in ["v1alpha1", "v1beta1", "v1beta2", "v1beta3"] {
            denies("HTTPRoute", version, path("/a"), None);
            denies("HTTPRoute", version, path("a"), Some("spec.rules[0].matches[0].path.value: relative path"));
        }
        for version in ["v1beta1", "v1"] {
            denies_in(GATEWAY_GROUP, "HTTPRoute", version, path("/a"), None);
            denies_in(GATEWAY_GROUP, "HTTPRoute", version, path("a"), Some("relative path"));
        }
        let good = json!({"parentRefs": [web], "rules": [{"matches": [{"method": {"service": "a.B"}}]}]});
        denies_in(GATEWAY_GROUP, "GRPCRoute", "v1", good, None);
        denies_in(GATEWAY_GROUP, "GRPCRoute", "v1", method("RegularExpression"), Some("unsupported match type"));
        for kind in ["TLSRoute", "TCPRoute"] {
            denies_in(GATEWAY_GROUP, kind, "v1alpha2", rules(1), None);
            denies_in(GATEWAY_GROUP, kind, "v1alpha2", rules(2), Some("spec.rules: 2 rules"));
        }
        denies("HTTPRoute", "v1beta3", json!({"rules": 1}), Some("spec.rules: invalid type"));
        denies_in("gateway.example.org", "HTTPRoute", "v1", path("a"), None);
    }

    #[test]
    fn routes_of_other_controllers_are_left_to_them() {
        let front = json!({"name": "front"});
        let path = json!({"parentRefs": [front], "rules": [{"matches": [{"path": {"value": "a"}}]}]});
        let response = answered(GATEWAY_GROUP, "HTTPRoute", "v1", &path);
        assert!(response.allowed && response.warnings.is_none(), "{:?}", response.warnings);
        let unreadable = json!({"parentRefs": [front], "rules": {"of": "another version"}});
        let response = answered(GATEWAY_GROUP, "HTTPRoute", "v9", &unreadable);
        let warnings = response.warnings.unwrap_or_default().join("; ");
        assert!(response.allowed && warnings.contains("spec.rules: invalid type"), "{warnings}");
    }

    /// As [`weft_k8s_api::manifest`] reads it, and the index attaches what stands for it.
    #[test]
    fn a_warning_says_what_an_unreadable_route_does_to_its_server() {
        let server = json!({"group": GROUP, "kind": "Server", "name": "s"});
        let spec = json!({"parentRefs": [server], "rules": {"of": "another version"}});
        for kind in ["HTTPRoute", "GRPCRoute"] {
            let warnings = answered(GATEWAY_GROUP, kind, "v9", &spec).warnings.unwrap_or_default();
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            for part in
                ["spec.rules: invalid type", "takes no request", "a Server that it names serves nothing by default"]
            {
                assert!(warning.contains(part), "{warning}");
            }
            assert!(!warning.contains("no effect"), "{warning}");
        }
    }

    #[test]
    fn what_has_no_effect_yet_is_said() {
        let web = json!({"group": "core", "kind": "Service", "name": "web", "port": 80});
        let answered = |rules: Value| {
            let response = answered(GROUP, "HTTPRoute", "v1beta3", &json!({"parentRefs": [web], "rules": rules}));
            assert!(response.allowed);
            response.warnings.unwrap_or_default().join("; ")
        };
        assert_eq!(answered(json!([{"timeouts": {"request": "10s"}}])), "");
        let warnings = answered(json!([{"timeouts": {"backendRequest": "10s"}}]));
        assert!(warnings.contains("not supported yet"), "{warnings}");
    }
}
