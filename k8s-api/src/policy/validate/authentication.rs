//! MeshTLSAuthentication and NetworkAuthentication.

use super::networks;
use crate::{
    field::{FieldPath, Invalid},
    policy::{MeshTLSAuthentication, NetworkAuthentication},
};

/// The problems of a MeshTLSAuthentication.
pub fn mesh_tls_authentication(authentication: &MeshTLSAuthentication) -> Vec<Invalid> {
    let spec = &authentication.spec;
    let mut found = Vec::new();
    let identities = spec.identities.as_ref().map_or(0, Vec::len);
    let refs = spec.identity_refs.as_deref().unwrap_or_default();
    match (identities, refs.len()) {
        (0, 0) => found.push(FieldPath::of("spec").invalid("no identity, expected identities or identityRefs")),
        (1.., 1..) => {
            found.push(FieldPath::of("spec.identityRefs").invalid("beside identities, expected one of the two"))
        }
        _ => {}
    }
    for (index, reference) in refs.iter().enumerate() {
        let at = FieldPath::of("spec.identityRefs").index(index);
        if reference.is("", "Namespace") {
            if reference.namespace.is_some() {
                found
                    .push(at.key("namespace").invalid("a Namespace has no namespace, expected the field to be absent"));
            }
        } else if !reference.is("", "ServiceAccount") {
            found.push(
                at.key("kind")
                    .invalid(format!("unsupported kind {:?}, expected ServiceAccount or Namespace", reference.kind)),
            );
        }
    }
    found
}

/// The problems of a NetworkAuthentication.
pub fn network_authentication(authentication: &NetworkAuthentication) -> Vec<Invalid> {
    let mut found = Vec::new();
    if authentication.spec.networks.is_empty() {
        found.push(FieldPath::of("spec.networks").invalid("empty, expected at least one network"));
    }
    found.extend(networks(&FieldPath::of("spec.networks"), &authentication.spec.networks));
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::validate::tests::check;

    #[test]
    fn mesh_tls_authentications() {
        let check = |spec, expected: &[&str]| {
            check(mesh_tls_authentication, "policy.linkerd.io/v1alpha1", "MeshTLSAuthentication", spec, expected)
        };
        check(json!({"identities": ["*"]}), &[]);
        check(
            json!({"identityRefs": [{"kind": "ServiceAccount", "name": "web"}, {"kind": "Namespace", "name": "shop"}]}),
            &[],
        );
        check(json!({}), &["spec"]);
        check(
            json!({"identities": ["*"], "identityRefs": [{"kind": "ServiceAccount", "name": "web"}]}),
            &["spec.identityRefs"],
        );
        check(json!({"identityRefs": [{"kind": "Pod", "name": "web"}]}), &["spec.identityRefs[0].kind"]);
        check(
            json!({"identityRefs": [{"kind": "Namespace", "name": "a", "namespace": "b"}]}),
            &["spec.identityRefs[0].namespace"],
        );
    }

    #[test]
    fn network_authentications() {
        let check = |spec, expected: &[&str]| {
            check(network_authentication, "policy.linkerd.io/v1alpha1", "NetworkAuthentication", spec, expected)
        };
        check(json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}]}), &[]);
        check(json!({"networks": []}), &["spec.networks"]);
        check(
            json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}]}),
            &["spec.networks[0].except[0]"],
        );
        check(json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["0.0.0.0/0"]}]}), &["spec.networks[0].except[0]"]);
    }
}
