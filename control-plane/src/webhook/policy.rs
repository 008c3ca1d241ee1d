//! policy-validator: invalid policy resources are not stored.

use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionResponse},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use weft_k8s_api::{
    field::Invalid,
    policy::{GROUP, validate},
};

use super::{denied, object, warned};

/// Allows a valid policy resource, and kinds that are not policy.
pub(super) fn answer(request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
    if request.object.is_none() || request.kind.group != GROUP {
        return request.into();
    }
    let found = match object(request) {
        Ok(object) => problems(&request.kind.kind, &object),
        Err(error) => vec![error.to_string()],
    };
    if found.is_empty() {
        return warned(request);
    }
    denied(request, format!("{} {:?}: {}", request.kind.kind, request.name, found.join("; ")))
}

fn problems(kind: &str, object: &Value) -> Vec<String> {
    match kind {
        "Server" => check(object, validate::server),
        "ServerAuthorization" => check(object, validate::server_authorization),
        "AuthorizationPolicy" => check(object, validate::authorization_policy),
        "MeshTLSAuthentication" => check(object, validate::mesh_tls_authentication),
        "NetworkAuthentication" => check(object, validate::network_authentication),
        _ => Vec::new(),
    }
}

fn check<K: DeserializeOwned>(object: &Value, validate: fn(&K) -> Vec<Invalid>) -> Vec<String> {
    match serde_path_to_error::deserialize::<_, K>(object) {
        Ok(typed) => validate(&typed).iter().map(ToString::to_string).collect(),
        Err(error) => vec![format!("{}: {}", error.path(), error.inner())],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn denies(kind: &str, version: &str, spec: Value, expected: Option<&str>) {
        let api_version = format!("{GROUP}/{version}");
        let metadata = json!({"name": "x", "namespace": "shop"});
        let request = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "uid": "u",
            "kind": {"group": GROUP, "version": version, "kind": kind},
            "resource": {"group": GROUP, "version": version, "resource": "x"}, "name": "x", "namespace": "shop",
            "operation": "CREATE", "userInfo": {}, "dryRun": false,
            "object": {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}});
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request});
        let review: kube::core::admission::AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
        let response = answer(&review.try_into().unwrap());
        assert_eq!(response.allowed, expected.is_none(), "{kind} {spec}: {}", response.result.message);
        assert!(response.result.message.contains(expected.unwrap_or_default()), "{}", response.result.message);
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
        denies(
            "AuthorizationPolicy",
            "v1alpha1",
            route,
            Some("routes are not supported yet, expected Server or Namespace"),
        );
        denies("HTTPRoute", "v1beta3", json!({"anything": true}), None);
    }
}
