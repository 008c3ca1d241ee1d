//! HTTPRoute, of both groups that have one: `policy.linkerd.io` and the Gateway API.

use std::{collections::BTreeMap, time::Duration};

use ::http::Method;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    BackendReference, Filter, HeaderMatch, HostMatch, NamedMatch, ParentReference, PathMatch, PathValue, QueryMatch,
    RouteFilter, RouteStatus,
    matching::{self},
    read_all,
};
use crate::{
    duration,
    field::{FieldPath, Invalid},
};

/// Methods that a match may name; the Gateway API has no others.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Spec of an HTTPRoute (`policy.linkerd.io/v1beta3`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1beta3", kind = "HTTPRoute", root = "HttpRoute")]
#[kube(plural = "httproutes", namespaced, status = "RouteStatus", derive = "PartialEq")]
#[serde(rename_all = "camelCase")]
pub struct HttpRouteSpec {
    /// The parents: Servers, Services or EgressNetworks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_refs: Option<Vec<ParentReference>>,
    /// Hosts of the requests; absent means every host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostnames: Option<Vec<String>>,
    /// The rules; absent means one that matches every request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Vec<HttpRouteRule>>,
}

/// Spec of an HTTPRoute (`gateway.networking.k8s.io/v1`), whose parts that Weft acts on have the shape of Linkerd's.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[kube(group = "gateway.networking.k8s.io", version = "v1", kind = "HTTPRoute", root = "GatewayHttpRoute")]
#[kube(plural = "httproutes", namespaced, status = "RouteStatus", derive = "PartialEq", schema = "disabled")]
#[serde(transparent)]
pub struct GatewayHttpRouteSpec {
    /// The fields of Linkerd's HTTPRoute, which the two resources share.
    pub route: HttpRouteSpec,
}

/// A rule: requests that one of the matches selects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpRouteRule {
    /// The matches; absent or empty means every request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matches: Option<Vec<HttpRouteMatch>>,
    /// Filters of the requests and their responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filters: Option<Vec<RouteFilter>>,
    /// Where the requests go; absent or empty means the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_refs: Option<Vec<HttpBackendReference>>,
    /// Limits of the time that requests take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeouts: Option<HttpTimeouts>,
}

/// Conditions on a request, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpRouteMatch {
    /// The path; absent means every path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathValue>,
    /// Headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<Vec<NamedMatch>>,
    /// Query parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_params: Option<Vec<NamedMatch>>,
    /// Method of the request; absent means every method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Conditions of later versions of the Gateway API.
    #[serde(flatten)]
    #[schemars(skip)]
    pub unknown: BTreeMap<String, Value>,
}

/// A backend and the filters of the requests that go there.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct HttpBackendReference {
    /// The reference; its fields are inlined.
    #[serde(flatten)]
    pub backend: BackendReference,
    /// Filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filters: Option<Vec<RouteFilter>>,
}

/// Limits of the time that requests take, as written: durations such as `10s`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpTimeouts {
    /// Limit of a request with its retries; `0s` means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Limit of one try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_request: Option<String>,
}

/// Conditions on a request, all of which must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpMatch {
    /// The path; absent means every path.
    pub path: Option<PathMatch>,
    /// Headers.
    pub headers: Vec<HeaderMatch>,
    /// Query parameters.
    pub query: Vec<QueryMatch>,
    /// The method; absent means every method.
    pub method: Option<Method>,
}

/// Limits of the time that requests take. Zero means none, as in the Gateway API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RuleTimeouts {
    /// Limit of a request with its retries.
    pub request: Option<Duration>,
    /// Limit of one try.
    pub backend_request: Option<Duration>,
}

impl HttpRouteSpec {
    /// Hosts of the requests; none means every host.
    ///
    /// # Errors
    /// Lists every host that is not a DNS name; the paths begin at the spec.
    pub fn read_hostnames(&self) -> Result<Vec<HostMatch>, Vec<Invalid>> {
        read_all("hostnames", self.hostnames.as_deref().unwrap_or_default(), |name| HostMatch::read(name))
    }
}

impl HttpRouteRule {
    /// The matches, one of which must hold; none means every request.
    ///
    /// # Errors
    /// Lists everything that is not understood; the paths begin at the rule.
    pub fn read_matches(&self) -> Result<Vec<HttpMatch>, Vec<Invalid>> {
        read_all("matches", self.matches.as_deref().unwrap_or_default(), HttpRouteMatch::read)
    }

    /// Reads the rule's filters, in their order.
    ///
    /// # Errors
    /// Lists every invalid setting; the paths begin at the rule.
    pub fn read_filters(&self) -> Result<Vec<Filter>, Vec<Invalid>> {
        read_all("filters", self.filters.as_deref().unwrap_or_default(), RouteFilter::read)
    }

    /// Reads the timeouts, which are durations of the Gateway API.
    ///
    /// # Errors
    /// When one is not a duration, or one try may take longer than the request; the paths begin at the rule.
    pub fn read_timeouts(&self) -> Result<RuleTimeouts, Vec<Invalid>> {
        let mut found = Vec::new();
        let mut read = |name: &str, text: Option<&String>| {
            let read = read_timeout(text?).map_err(|problem| FieldPath::of("timeouts").key(name).invalid(problem));
            read.map_err(|invalid| found.push(invalid)).ok()
        };
        let written = self.timeouts.as_ref();
        let request = read("request", written.and_then(|timeouts| timeouts.request.as_ref()));
        let backend_request = read("backendRequest", written.and_then(|timeouts| timeouts.backend_request.as_ref()));
        if let (Some(request), Some(backend)) = (request, backend_request)
            && !request.is_zero()
            && backend > request
        {
            let problem = format!("{backend:?}, expected at most the request's {request:?}");
            found.push(FieldPath::of("timeouts.backendRequest").invalid(problem));
        }
        if found.is_empty() { Ok(RuleTimeouts { request, backend_request }) } else { Err(found) }
    }
}

impl HttpBackendReference {
    /// Reads the backend's filters, in their order.
    ///
    /// # Errors
    /// Lists every invalid setting; the paths begin at the backend.
    pub fn read_filters(&self) -> Result<Vec<Filter>, Vec<Invalid>> {
        read_all("filters", self.filters.as_deref().unwrap_or_default(), RouteFilter::read)
    }
}

impl HttpRouteMatch {
    fn read(&self) -> Result<HttpMatch, Vec<Invalid>> {
        let mut found: Vec<_> = matching::unknown(&self.unknown).collect();
        let path = self.path.as_ref().map(PathValue::read).transpose().map_err(|invalid| {
            found.push(Invalid { field: invalid.field.under(FieldPath::of("path")), ..invalid });
        });
        let headers = read_all("headers", self.headers.as_deref().unwrap_or_default(), NamedMatch::read_header)
            .map_err(|invalid| found.extend(invalid));
        let query = read_all("queryParams", self.query_params.as_deref().unwrap_or_default(), NamedMatch::read_query)
            .map_err(|invalid| found.extend(invalid));
        let method = self.method.as_deref().map(read_method).transpose().map_err(|invalid| found.push(invalid));
        match (path, headers, query, method) {
            (Ok(path), Ok(headers), Ok(query), Ok(method)) if found.is_empty() => {
                Ok(HttpMatch { path, headers, query, method })
            }
            _ => Err(found),
        }
    }
}

fn read_method(name: &str) -> Result<Method, Invalid> {
    let known = METHODS.iter().find(|known| **known == name).and_then(|known| known.parse().ok());
    known.ok_or_else(|| {
        FieldPath::of("method").invalid(format!("unsupported method {name:?}, expected one of {}", METHODS.join(", ")))
    })
}

fn read_timeout(text: &str) -> Result<Duration, String> {
    if text.trim_start().starts_with('-') {
        return Err(format!("negative duration {text:?}, expected one such as 10s"));
    }
    duration::parse(text).ok_or_else(|| format!("bad duration {text:?}, expected one such as 10s or 500ms"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields<T>(read: Result<T, Vec<Invalid>>) -> Vec<String> {
        read.err().into_iter().flatten().map(|invalid| invalid.field.to_string()).collect()
    }

    fn rule(rule: Value) -> HttpRouteRule {
        serde_json::from_value(rule).unwrap()
    }

    #[test]
    fn matches_are_understood_entirely_or_not_at_all() {
        let good = rule(json!({"matches": [{
            "path": {"type": "Exact", "value": "/a"}, "method": "GET", "headers": [{"name": "x-a", "value": "1"}],
            "queryParams": [{"type": "RegularExpression", "name": "q", "value": ".*"}],
        }]}));
        let read = good.read_matches().unwrap();
        assert_eq!((read.len(), &read[0].method), (1, &Some(Method::GET)));
        assert_eq!(rule(json!({})).read_matches(), Ok(vec![]));
        for (matches, expected) in [
            (json!([{"path": {"value": "a"}}]), &["matches[0].path.value"][..]),
            (json!([{}, {"method": "get"}]), &["matches[1].method"]),
            (json!([{"method": "BREW"}]), &["matches[0].method"]),
            (json!([{"clientCertificate": {"subject": "x"}}]), &["matches[0].clientCertificate"]),
            (
                json!([{"headers": [{"name": "x y", "value": ""}], "queryParams": [{"name": "", "value": ""}]}]),
                &["matches[0].headers[0].name", "matches[0].queryParams[0].name"],
            ),
        ] {
            assert_eq!(fields(rule(json!({"matches": matches})).read_matches()), expected, "{matches}");
        }
    }

    #[test]
    fn one_try_takes_at_most_as_long_as_the_request() {
        for (timeouts, expected) in [
            (json!({"request": "10s", "backendRequest": "10s"}), &[][..]),
            (json!({"request": "1h30m"}), &[]),
            (json!({"request": "0s", "backendRequest": "1s"}), &[]),
            (json!({"request": "1s", "backendRequest": "2s"}), &["timeouts.backendRequest"]),
            (json!({"request": "-1s"}), &["timeouts.request"]),
            (json!({"request": "10", "backendRequest": "soon"}), &["timeouts.request", "timeouts.backendRequest"]),
        ] {
            assert_eq!(fields(rule(json!({"timeouts": timeouts})).read_timeouts()), expected, "{timeouts}");
        }
    }

    #[test]
    fn both_groups_have_one_shape_and_say_which_they_are() {
        let spec = json!({"parentRefs": [{"name": "web", "kind": "Service", "group": ""}],
            "rules": [{"backendRefs": [{"name": "web", "port": 80, "filters": [{"type": "CORS"}]}]}]});
        let object = json!({"metadata": {"name": "r"}, "spec": spec});
        let policy: HttpRoute = serde_json::from_value(object.clone()).unwrap();
        let gateway: GatewayHttpRoute = serde_json::from_value(object).unwrap();
        assert_eq!(policy.spec, gateway.spec.route);
        for (written, version) in [
            (serde_json::to_value(policy).unwrap(), "policy.linkerd.io/v1beta3"),
            (serde_json::to_value(gateway).unwrap(), "gateway.networking.k8s.io/v1"),
        ] {
            assert_eq!((&written["apiVersion"], &written["kind"]), (&json!(version), &json!("HTTPRoute")));
            assert_eq!(written["spec"], spec);
        }
    }
}
