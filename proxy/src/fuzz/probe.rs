//! Requests that a match is for, made from the message.

use http::{HeaderValue, Method, Request, Uri};
use weft_proto::linkerd::{
    grpc_route::GrpcRouteMatch,
    http_route::{
        HeaderMatch, HostMatch, HttpRouteMatch, header_match, host_match::Match, path_match, query_param_match,
    },
};

/// A request for a match of an HTTP route; `None` where it takes more than copying to make one, or where none is valid.
pub(super) fn http(hosts: &[HostMatch], wanted: &HttpRouteMatch) -> Option<Request<()>> {
    let path = match &wanted.path {
        None => "/",
        Some(path) => match path.kind.as_ref()? {
            path_match::Kind::Exact(path) | path_match::Kind::Prefix(path) => path,
            path_match::Kind::Regex(_) => return None,
        },
    };
    let mut query = form_urlencoded::Serializer::new(String::new());
    for param in &wanted.query_params {
        let query_param_match::Value::Exact(value) = param.value.as_ref()? else { return None };
        query.append_pair(&param.name, value);
    }
    let method = wanted.method.clone().map_or(Some(Method::GET), |method| Method::try_from(method).ok())?;
    request(method, hosts, path, &query.finish(), &wanted.headers)
}

/// A request for a match of a gRPC route; `None` as for HTTP.
pub(super) fn grpc(hosts: &[HostMatch], wanted: &GrpcRouteMatch) -> Option<Request<()>> {
    let rpc = wanted.rpc.clone().unwrap_or_default();
    if [&rpc.service, &rpc.method].iter().any(|name| name.contains('/')) {
        return None;
    }
    request(Method::POST, hosts, &format!("/{}/{}", some(&rpc.service), some(&rpc.method)), "", &wanted.headers)
}

fn some(name: &str) -> &str {
    if name.is_empty() { "any" } else { name }
}

fn request(
    method: Method,
    hosts: &[HostMatch],
    path: &str,
    query: &str,
    headers: &[HeaderMatch],
) -> Option<Request<()>> {
    let host = host(hosts)?;
    let mark = if query.is_empty() { "" } else { "?" };
    let uri: Uri = format!("http://{host}{path}{mark}{query}").parse().ok()?;
    if uri.path() != path || uri.host() != Some(&host) {
        return None;
    }
    let mut request = Request::builder().method(method).uri(uri);
    for header in headers {
        let header_match::Value::Exact(value) = header.value.as_ref()? else { return None };
        request = request.header(header.name.as_str(), HeaderValue::from_bytes(value).ok()?);
    }
    request.body(()).ok()
}

/// A host of the route.
fn host(hosts: &[HostMatch]) -> Option<String> {
    let Some(first) = hosts.first() else { return Some("web.demo".to_owned()) };
    match first.r#match.as_ref()? {
        Match::Exact(host) => Some(host.clone()),
        Match::Suffix(suffix) if suffix.reverse_labels.iter().any(|label| label.contains('.')) => None,
        Match::Suffix(suffix) => {
            let labels: Vec<_> = suffix.reverse_labels.iter().map(String::as_str).chain(["any"]).rev().collect();
            Some(labels.join("."))
        }
    }
}
