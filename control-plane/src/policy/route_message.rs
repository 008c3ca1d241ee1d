//! Parts of routes as messages: hosts, matches and filters, as Linkerd's `grpc/src/routes` writes them.

use http::{HeaderName, HeaderValue, StatusCode};
use weft_k8s_api::policy::route::{
    GrpcMatch, HeaderMatch, HeaderModifier, HostMatch, HttpMatch, PathMatch, QueryMatch, Redirect, RedirectPath,
    ValueMatch,
};
use weft_proto::linkerd::{
    grpc_route::{self, GrpcRpcMatch},
    http_route::{
        self, PathModifier, RequestHeaderModifier, RequestRedirect, header_match, host_match, path_match,
        path_modifier, query_param_match,
    },
    http_types::{Headers, headers::Header},
};

/// The Gateway API's status of redirects that name none; the API server fills it in, files do not.
const REDIRECT_STATUS: StatusCode = StatusCode::FOUND;

/// A host, of which the labels of a suffix go from the end.
pub(super) fn host(host: &HostMatch) -> http_route::HostMatch {
    let found = match host {
        HostMatch::Exact(name) => host_match::Match::Exact(name.clone()),
        HostMatch::Suffix(labels) => {
            host_match::Match::Suffix(host_match::Suffix { reverse_labels: labels.iter().rev().cloned().collect() })
        }
    };
    http_route::HostMatch { r#match: Some(found) }
}

/// Conditions on an HTTP request.
pub(super) fn http_match(found: &HttpMatch) -> http_route::HttpRouteMatch {
    let path = |path: &PathMatch| match path {
        PathMatch::Exact(path) => path_match::Kind::Exact(path.clone()),
        PathMatch::Prefix(prefix) => path_match::Kind::Prefix(prefix.clone()),
        PathMatch::Regex(regex) => path_match::Kind::Regex(regex.clone()),
    };
    http_route::HttpRouteMatch {
        path: found.path.as_ref().map(|found| http_route::PathMatch { kind: Some(path(found)) }),
        headers: found.headers.iter().map(header_match).collect(),
        query_params: found.query.iter().map(query_match).collect(),
        method: found.method.clone().map(Into::into),
    }
}

/// Conditions on a gRPC request; a message without a method is about every method.
pub(super) fn grpc_match(found: &GrpcMatch) -> grpc_route::GrpcRouteMatch {
    let rpc = (found.service.is_some() || found.method.is_some()).then(|| GrpcRpcMatch {
        service: found.service.clone().unwrap_or_default(),
        method: found.method.clone().unwrap_or_default(),
    });
    grpc_route::GrpcRouteMatch { rpc, headers: found.headers.iter().map(header_match).collect() }
}

/// A filter that changes headers of requests.
pub(super) fn request_headers(modifier: &HeaderModifier) -> RequestHeaderModifier {
    let all = |headers: &[(HeaderName, HeaderValue)]| Headers {
        headers: headers
            .iter()
            .map(|(name, value)| Header { name: name.to_string(), value: value.as_bytes().to_vec() })
            .collect(),
    };
    RequestHeaderModifier {
        add: Some(all(&modifier.add)),
        set: Some(all(&modifier.set)),
        remove: modifier.remove.iter().map(ToString::to_string).collect(),
    }
}

/// A filter that answers with another location.
pub(super) fn redirect(redirect: &Redirect) -> RequestRedirect {
    let path = |path: &RedirectPath| match path {
        RedirectPath::Full(path) => path_modifier::Replace::Full(path.clone()),
        RedirectPath::Prefix(prefix) => path_modifier::Replace::Prefix(prefix.clone()),
    };
    RequestRedirect {
        scheme: redirect.scheme.as_deref().map(Into::into),
        host: redirect.hostname.clone().unwrap_or_default(),
        path: redirect.path.as_ref().map(|found| PathModifier { replace: Some(path(found)) }),
        port: redirect.port.map(u32::from).unwrap_or_default(),
        status: redirect.status.unwrap_or(REDIRECT_STATUS).as_u16().into(),
    }
}

fn header_match(found: &HeaderMatch) -> http_route::HeaderMatch {
    let value = match &found.value {
        ValueMatch::Exact(value) => header_match::Value::Exact(value.clone().into_bytes()),
        ValueMatch::Regex(regex) => header_match::Value::Regex(regex.clone()),
    };
    http_route::HeaderMatch { name: found.name.to_string(), value: Some(value) }
}

fn query_match(found: &QueryMatch) -> http_route::QueryParamMatch {
    let value = match &found.value {
        ValueMatch::Exact(value) => query_param_match::Value::Exact(value.clone()),
        ValueMatch::Regex(regex) => query_param_match::Value::Regex(regex.clone()),
    };
    http_route::QueryParamMatch { name: found.name.clone(), value: Some(value) }
}
