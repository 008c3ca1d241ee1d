//! HTTPRoute, HTTPLocalRateLimitPolicy and EgressNetwork: bounds and defaults that Linkerd's definitions have beyond
//! types.

use serde_json::{Value, json};

use super::{Column, add_versions, derived, older, spec_of};
use crate::policy::{EgressNetwork, HttpLocalRateLimitPolicy, route::HttpRoute};

const AGE: Column = ("Age", "date", "When it was created", ".metadata.creationTimestamp");

/// Kubernetes' pattern of an API group.
const GROUP: &str = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// Kubernetes' pattern of a kind.
const KIND: &str = "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$";
/// Kubernetes' pattern of a namespace.
const NAMESPACE: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// The Gateway API's pattern of a host name without a wildcard, and of a section.
const HOSTNAME: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// The Gateway API's pattern of a host name.
const WILDCARD: &str = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// The Gateway API's pattern of the name of a header.
const HEADER: &str = r"^[A-Za-z0-9!#$%&'*+\-.^_\x60|~]+$";

/// Linkerd's HTTPRoute: versions before v1beta3 have no timeouts.
pub(super) fn http_route() -> Value {
    const HOSTNAMES: Column = ("Hostnames", "string", "The hosts of the requests", ".spec.hostnames");
    let mut crd = derived::<HttpRoute>(&[HOSTNAMES, AGE]);
    let latest = &mut crd["spec"]["versions"][0];
    let fields = &mut latest["schema"]["openAPIV3Schema"]["properties"];
    let everything = json!([{"path": {"type": "PathPrefix", "value": "/"}}]);
    add(fields, "spec/hostnames", json!({"maxItems": 16}));
    add(fields, "spec/hostnames/[]", json!({"minLength": 1, "maxLength": 253, "pattern": WILDCARD}));
    add(fields, "spec/parentRefs", json!({"maxItems": 32}));
    parent(fields, "spec/parentRefs/[]");
    add(fields, "spec/rules", json!({"maxItems": 16, "default": [{"matches": everything}]}));
    add(fields, "spec/rules/[]/matches", json!({"maxItems": 8, "default": everything}));
    matching(fields, "spec/rules/[]/matches/[]");
    filters(fields, "spec/rules/[]/filters");
    let backends = "spec/rules/[]/backendRefs";
    add(fields, backends, json!({"maxItems": 16}));
    reference(fields, &format!("{backends}/[]"), json!(""), json!("Service"));
    let weight = json!({"format": "int32", "minimum": 0, "maximum": 1_000_000, "default": 1});
    add(fields, &format!("{backends}/[]/weight"), weight);
    filters(fields, &format!("{backends}/[]/filters"));
    for timeout in ["request", "backendRequest"] {
        add(fields, &format!("spec/rules/[]/timeouts/{timeout}"), json!({"format": "duration"}));
    }
    add(fields, "status/parents", json!({"maxItems": 32}));
    parent(fields, "status/parents/[]/parentRef");

    let mut v1beta2 = older(latest, "v1beta2", None, &[]);
    let rule = &mut spec_of(&mut v1beta2)["properties"]["rules"]["items"]["properties"];
    rule.as_object_mut().map(|fields| fields.remove("timeouts"));
    let v1beta1 = older(&v1beta2, "v1beta1", None, &[]);
    let v1alpha1 = older(&v1beta2, "v1alpha1", None, &[]);
    add_versions(crd, vec![v1alpha1, v1beta1, v1beta2])
}

pub(super) fn http_local_rate_limit_policy() -> Value {
    const COLUMNS: [Column; 4] = [
        ("Target_kind", "string", "The resource kind to which the rate limit applies", ".spec.targetRef.kind"),
        ("Target_name", "string", "The resource name to which the rate limit applies", ".spec.targetRef.name"),
        ("Total_RPS", "integer", "The limit of all requests together", ".spec.total.requestsPerSecond"),
        ("Identity_RPS", "integer", "The limit of each identity", ".spec.identity.requestsPerSecond"),
    ];
    let mut crd = derived::<HttpLocalRateLimitPolicy>(&COLUMNS);
    let fields = &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    for at in ["spec/total", "spec/identity", "spec/overrides/[]"] {
        let rate = json!({"format": "int64", "minimum": 1, "maximum": u32::MAX});
        add(fields, &format!("{at}/requestsPerSecond"), rate);
    }
    crd
}

pub(super) fn egress_network() -> Value {
    let mut crd = derived::<EgressNetwork>(&[]);
    crd["spec"]["names"]["categories"] = json!(["policy"]);
    let fields = &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    add(fields, "spec/trafficPolicy", json!({"enum": ["Allow", "Deny"]}));
    crd
}

/// Bounds of a reference to a parent.
fn parent(fields: &mut Value, at: &str) {
    reference(fields, at, json!(crate::policy::GROUP), json!("Gateway"));
    add(fields, &format!("{at}/sectionName"), json!({"minLength": 1, "maxLength": 253, "pattern": HOSTNAME}));
}

/// Bounds of a reference to an object with a port, and the defaults of its group and kind.
fn reference(fields: &mut Value, at: &str, group: Value, kind: Value) {
    let bounds = [
        ("group", json!({"maxLength": 253, "pattern": GROUP, "default": group})),
        ("kind", json!({"minLength": 1, "maxLength": 63, "pattern": KIND, "default": kind})),
        ("name", json!({"minLength": 1, "maxLength": 253})),
        ("namespace", json!({"minLength": 1, "maxLength": 63, "pattern": NAMESPACE})),
        ("port", port()),
    ];
    for (field, bounds) in bounds {
        add(fields, &format!("{at}/{field}"), bounds);
    }
}

fn port() -> Value {
    json!({"format": "int32", "minimum": 1, "maximum": 65535})
}

fn matching(fields: &mut Value, at: &str) {
    let path_types = json!(["Exact", "PathPrefix", "RegularExpression"]);
    let methods = json!(["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]);
    let bounds = [
        ("path", json!({"default": {"type": "PathPrefix", "value": "/"}})),
        ("path/type", json!({"enum": path_types, "default": "PathPrefix"})),
        ("path/value", json!({"maxLength": 1024, "default": "/"})),
        ("method", json!({"enum": methods})),
        ("headers/[]/name", json!({"minLength": 1, "maxLength": 256, "pattern": HEADER})),
        ("headers/[]/value", json!({"minLength": 1, "maxLength": 4096})),
        ("queryParams/[]/name", json!({"minLength": 1, "maxLength": 256})),
        ("queryParams/[]/value", json!({"minLength": 1, "maxLength": 1024})),
    ];
    for (field, bounds) in bounds {
        add(fields, &format!("{at}/{field}"), bounds);
    }
    for list in ["headers", "queryParams"] {
        let types = json!({"enum": ["Exact", "RegularExpression"], "default": "Exact"});
        add(fields, &format!("{at}/{list}"), named_list());
        add(fields, &format!("{at}/{list}/[]/type"), types);
    }
}

/// A list of at most 16 entries with distinct names.
fn named_list() -> Value {
    json!({"maxItems": 16, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})
}

fn filters(fields: &mut Value, at: &str) {
    let types = json!(["RequestHeaderModifier", "ResponseHeaderModifier", "RequestRedirect"]);
    let changes = json!(["ReplaceFullPath", "ReplacePrefixMatch"]);
    add(fields, at, json!({"maxItems": 16}));
    let bounds = [
        ("type", json!({"enum": types})),
        ("requestRedirect/scheme", json!({"enum": ["http", "https"]})),
        ("requestRedirect/hostname", json!({"minLength": 1, "maxLength": 253, "pattern": HOSTNAME})),
        ("requestRedirect/port", port()),
        ("requestRedirect/statusCode", json!({"enum": [301, 302], "default": 302})),
        ("requestRedirect/path/type", json!({"enum": changes})),
        ("requestRedirect/path/replaceFullPath", json!({"maxLength": 1024})),
        ("requestRedirect/path/replacePrefixMatch", json!({"maxLength": 1024})),
    ];
    for (field, bounds) in bounds {
        add(fields, &format!("{at}/[]/{field}"), bounds);
    }
    let status = at_path(fields, &format!("{at}/[]/requestRedirect/statusCode"));
    status.as_object_mut().map(|status| (status.remove("minimum"), status.remove("maximum")));
    for modifier in ["requestHeaderModifier", "responseHeaderModifier"] {
        let at = format!("{at}/[]/{modifier}");
        add(fields, &format!("{at}/remove"), json!({"maxItems": 16}));
        for list in ["set", "add"] {
            add(fields, &format!("{at}/{list}"), named_list());
            let name = json!({"minLength": 1, "maxLength": 256, "pattern": HEADER});
            add(fields, &format!("{at}/{list}/[]/name"), name);
            add(fields, &format!("{at}/{list}/[]/value"), json!({"minLength": 1, "maxLength": 4096}));
        }
    }
}

/// Adds keywords to the schema of a field. `[]` in the path stands for the elements of a list.
fn add(fields: &mut Value, path: &str, keywords: Value) {
    let schema = at_path(fields, path).as_object_mut().expect("a schema is an object");
    if let Value::Object(keywords) = keywords {
        schema.extend(keywords);
    }
}

fn at_path<'a>(fields: &'a mut Value, path: &str) -> &'a mut Value {
    // Elements follow a list, fields an object; the first field is that of `fields` itself.
    let pointer = path.split('/').enumerate().map(|(index, step)| match step {
        "[]" => "/items".to_owned(),
        field if index == 0 => format!("/{field}"),
        field => format!("/properties/{field}"),
    });
    let pointer: String = pointer.collect();
    fields.pointer_mut(&pointer).unwrap_or_else(|| panic!("{path}: the type has no such field"))
}
