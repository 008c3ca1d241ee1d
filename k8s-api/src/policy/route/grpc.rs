//! GRPCRoute of the Gateway API.

use std::collections::BTreeMap;

use kube::CustomResource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    BackendReference, Filter, HeaderMatch, HostMatch, HttpBackendReference, NamedMatch, ParentReference, RouteFilter,
    RouteStatus, read_all,
};
use crate::field::{FieldPath, Invalid};

/// Spec of a GRPCRoute (`gateway.networking.k8s.io/v1`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[kube(group = "gateway.networking.k8s.io", version = "v1", kind = "GRPCRoute", root = "GrpcRoute")]
#[kube(plural = "grpcroutes", namespaced, status = "RouteStatus", derive = "PartialEq", schema = "disabled")]
#[serde(rename_all = "camelCase")]
pub struct GrpcRouteSpec {
    /// The parents: Servers, Services or EgressNetworks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_refs: Option<Vec<ParentReference>>,
    /// Hosts of the requests; absent means every host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostnames: Option<Vec<String>>,
    /// The rules; absent means one that matches every request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Vec<GrpcRouteRule>>,
}

/// A rule: requests that one of the matches selects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GrpcRouteRule {
    /// The matches; absent or empty means every request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matches: Option<Vec<GrpcRouteMatch>>,
    /// Filters of the requests and their responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filters: Option<Vec<RouteFilter>>,
    /// Where the requests go; absent or empty means the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_refs: Option<Vec<GrpcBackendReference>>,
}

/// A backend and the filters of the requests that go there.
pub type GrpcBackendReference = HttpBackendReference;

/// Conditions on a request, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct GrpcRouteMatch {
    /// The method; absent means every method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<GrpcMethod>,
    /// Headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<Vec<NamedMatch>>,
    /// Conditions of later versions of the Gateway API.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, Value>,
}

/// A condition on the method, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
pub struct GrpcMethod {
    /// `Exact`, the default and the only type that Weft has.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub match_type: Option<String>,
    /// The service; absent means every service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// The method; absent means every method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
}

/// Conditions on a request, all of which must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcMatch {
    /// The service; absent means every service.
    pub service: Option<String>,
    /// The method; absent means every method.
    pub method: Option<String>,
    /// Headers.
    pub headers: Vec<HeaderMatch>,
}

impl GrpcRouteSpec {
    /// Hosts of the requests; none means every host.
    ///
    /// # Errors
    /// Lists every host that is not a DNS name; the paths begin at the spec.
    pub fn read_hostnames(&self) -> Result<Vec<HostMatch>, Vec<Invalid>> {
        read_all("hostnames", self.hostnames.as_deref().unwrap_or_default(), |name| HostMatch::read(name))
    }
}

impl GrpcRouteRule {
    /// The matches, one of which must hold; none means every request.
    ///
    /// # Errors
    /// Lists everything that is not understood; the paths begin at the rule.
    pub fn read_matches(&self) -> Result<Vec<GrpcMatch>, Vec<Invalid>> {
        read_all("matches", self.matches.as_deref().unwrap_or_default(), GrpcRouteMatch::read)
    }

    /// Reads the filters; a redirect, which only HTTP has, is [`Filter::Unsupported`].
    ///
    /// # Errors
    /// Lists every invalid setting; the paths begin at the rule.
    pub fn read_filters(&self) -> Result<Vec<Filter>, Vec<Invalid>> {
        read_all("filters", self.filters.as_deref().unwrap_or_default(), |filter| match filter.read()? {
            Filter::Redirect(_) => Ok(Filter::Unsupported(filter.filter_type.clone())),
            read => Ok(read),
        })
    }

    /// The backends, as written.
    pub fn backends(&self) -> impl Iterator<Item = &BackendReference> {
        self.backend_refs.iter().flatten().map(|reference| &reference.backend)
    }
}

impl GrpcRouteMatch {
    fn read(&self) -> Result<GrpcMatch, Vec<Invalid>> {
        let unknown = self.unknown.keys();
        let mut found: Vec<_> = unknown
            .map(|name| FieldPath::of(name).invalid("unsupported condition, expected method or headers"))
            .collect();
        let method = self.method.clone().unwrap_or_default();
        if let Some(other) = method.match_type.as_deref().filter(|match_type| *match_type != "Exact") {
            found.push(
                FieldPath::of("method.type").invalid(format!("unsupported match type {other:?}, expected Exact")),
            );
        }
        if self.method.is_some() && method.service.is_none() && method.method.is_none() {
            found.push(FieldPath::of("method").invalid("matches every method, expected service or method"));
        }
        let headers = read_all("headers", self.headers.as_deref().unwrap_or_default(), NamedMatch::read_header);
        match headers {
            Ok(headers) if found.is_empty() => {
                Ok(GrpcMatch { service: method.service, method: method.method, headers })
            }
            headers => Err(found.into_iter().chain(headers.err().into_iter().flatten()).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn matches_are_understood_entirely_or_not_at_all() {
        for (matches, expected) in [
            (json!([{"method": {"service": "a.B", "method": "C"}, "headers": [{"name": "x", "value": "1"}]}]), &[][..]),
            (json!([{"method": {"type": "Exact", "method": "C"}}]), &[]),
            (json!([{"headers": []}]), &[]),
            (json!([{"method": {}}]), &["matches[0].method"]),
            (json!([{"method": {"type": "RegularExpression", "service": "a.*"}}]), &["matches[0].method.type"]),
            (json!([{"headers": [{"name": "", "value": "1"}]}]), &["matches[0].headers[0].name"]),
            (json!([{"peer": "x"}]), &["matches[0].peer"]),
        ] {
            let rule: GrpcRouteRule = serde_json::from_value(json!({"matches": matches})).unwrap();
            let found = rule.read_matches().err().unwrap_or_default();
            let fields: Vec<_> = found.iter().map(|invalid| invalid.field.to_string()).collect();
            assert_eq!(fields, expected, "{matches}");
        }
    }

    #[test]
    fn a_filter_of_http_alone_is_unsupported() {
        let filters = json!([{"type": "RequestRedirect", "requestRedirect": {}}, {"type": "ExtensionRef"}]);
        let rule: GrpcRouteRule = serde_json::from_value(json!({"filters": filters})).unwrap();
        let unsupported = |name: &str| Filter::Unsupported(name.to_owned());
        assert_eq!(rule.read_filters(), Ok(vec![unsupported("RequestRedirect"), unsupported("ExtensionRef")]));
    }
}
