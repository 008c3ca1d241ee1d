//! From our request to Linkerd's, and from Linkerd's events to ours.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use weft_proto::{
    linkerd::{
        http_types::{self, scheme},
        net::TcpAddress,
        tap::{
            self as proxy, ObserveRequest, eos,
            observe_request::{
                Extract, Match,
                extract::{self, http::Headers},
                r#match::{self, Http, Label, Seq, http, http::StringMatch, http::string_match},
            },
            tap_event::{ProxyDirection, http::Event},
        },
    },
    viz::{self, Direction, TapEnd, TapRequest, TapRequestInit, TapResponseInit, tap_end, tap_event},
};

use crate::{
    error::RequestError,
    fleet::Pod,
    target::{Kind, Target},
};

/// A request's event among its others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Request,
    Response,
    End,
}

/// What a proxy is asked for.
pub(crate) fn observe_request(request: &TapRequest, limit: u32) -> Result<ObserveRequest, RequestError> {
    let mut all = Vec::new();
    let http = |matched| r#match::Match::Http(Http { r#match: Some(matched) });
    let prefix = |text: &str| StringMatch { r#match: Some(string_match::Match::Prefix(text.to_owned())) };
    if !request.method.is_empty() {
        let method = ::http::Method::from_bytes(request.method.to_ascii_uppercase().as_bytes());
        let method = method.map_err(|_| invalid("method", format!("{:?} is no method", request.method)))?;
        all.push(http(http::Match::Method(method.into())));
    }
    if !request.authority.is_empty() {
        all.push(http(http::Match::Authority(prefix(&request.authority))));
    }
    if !request.path.is_empty() {
        all.push(http(http::Match::Path(prefix(&request.path))));
    }
    match request.scheme.to_ascii_lowercase().as_str() {
        "" => {}
        "http" => all.push(http(http::Match::Scheme(registered(scheme::Registered::Http)))),
        "https" => all.push(http(http::Match::Scheme(registered(scheme::Registered::Https)))),
        other => return Err(invalid("scheme", format!("{other:?} is neither http nor https"))),
    }
    if let Some(to) = &request.to {
        all.extend(destination(&Target::read("to", Some(to.clone()), "")?)?);
    }
    let matches = all.into_iter().map(|matched| Match { r#match: Some(matched) }).collect();
    let headers = extract::Http { extract: Some(extract::http::Extract::Headers(Headers {})) };
    Ok(ObserveRequest {
        limit,
        r#match: Some(Match { r#match: Some(r#match::Match::All(Seq { matches })) }),
        extract: request.headers.then_some(Extract { extract: Some(extract::Extract::Http(headers)) }),
    })
}

fn invalid(field: &'static str, message: String) -> RequestError {
    RequestError::Invalid { field, message }
}

fn registered(scheme: scheme::Registered) -> http_types::Scheme {
    http_types::Scheme { r#type: Some(scheme::Type::Registered(scheme.into())) }
}

/// Destinations have the labels that the control plane gives them: the namespace, the Service, the pod and what it
/// belongs to.
fn destination(to: &Target) -> Result<Vec<r#match::Match>, RequestError> {
    let label = |key: &str, value: &str| {
        let label = Label { key: key.to_owned(), value: value.to_owned() };
        (!value.is_empty()).then_some(r#match::Match::DestinationLabel(label))
    };
    let own = match to.kind {
        Kind::Namespace => None,
        Kind::Pod => label("pod", &to.name),
        Kind::Service => label("service", &to.name),
        Kind::Owner("job") => label("k8s_job", &to.name),
        Kind::Owner(kind @ ("deployment" | "statefulset" | "daemonset" | "cronjob" | "replicationcontroller")) => {
            label(kind, &to.name)
        }
        Kind::Authority => {
            let exact = StringMatch { r#match: Some(string_match::Match::Exact(to.name.clone())) };
            let matched = Http { r#match: Some(http::Match::Authority(exact)) };
            return Ok((!to.name.is_empty()).then_some(r#match::Match::Http(matched)).into_iter().collect());
        }
        Kind::Owner(kind) => {
            return Err(invalid("to", format!("proxies do not know a destination's {kind}: name what it belongs to")));
        }
        Kind::Workload => return Err(invalid("to", "name the kind of the workload".to_owned())),
    };
    Ok(own.into_iter().chain(label("namespace", &to.namespace)).collect())
}

/// Our event, the request's id at its proxy, and which of its events it is. `None` for one that says nothing.
pub(super) fn event(pod: &Pod, event: proxy::TapEvent) -> Option<(viz::TapEvent, (u32, u64), Step)> {
    let direction = match event.proxy_direction() {
        ProxyDirection::Inbound => Direction::Inbound,
        ProxyDirection::Outbound => Direction::Outbound,
        ProxyDirection::Unknown => return None,
    };
    let proxy::TapEvent { source, source_meta, route_meta, destination, destination_meta, event, .. } = event;
    let proxy::tap_event::Event::Http(http) = event?;
    let (id, step, event) = match http.event? {
        Event::RequestInit(init) => {
            let request = TapRequestInit {
                method: method(init.method),
                scheme: scheme_name(init.scheme),
                authority: init.authority,
                path: init.path,
                headers: headers(init.headers),
            };
            (init.id?, Step::Request, tap_event::Event::Request(request))
        }
        Event::ResponseInit(init) => {
            let response = TapResponseInit {
                status: init.http_status,
                since_request_us: micros(init.since_request_init),
                headers: headers(init.headers),
            };
            (init.id?, Step::Response, tap_event::Event::Response(response))
        }
        Event::ResponseEnd(end) => {
            let outcome = end.eos.and_then(|eos| eos.end).map(|end| match end {
                eos::End::GrpcStatusCode(code) => tap_end::Outcome::GrpcStatus(code),
                eos::End::ResetErrorCode(code) => tap_end::Outcome::ResetCode(code),
            });
            let ended = TapEnd {
                since_request_us: micros(end.since_request_init),
                since_response_us: micros(end.since_response_init),
                response_bytes: end.response_bytes,
                outcome,
                trailers: headers(end.trailers),
            };
            (end.id?, Step::End, tap_event::Event::End(ended))
        }
    };
    let id = (id.base, id.stream);
    let labels = |labels: Option<HashMap<String, String>>| labels.unwrap_or_default();
    let event = viz::TapEvent {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        direction: direction.into(),
        id: format!("{}:{}", id.0, id.1),
        source: address(source),
        destination: address(destination),
        source_labels: labels(source_meta.map(|meta| meta.labels)),
        destination_labels: labels(destination_meta.map(|meta| meta.labels)),
        route_labels: labels(route_meta.map(|meta| meta.labels)),
        event: Some(event),
        skipped: 0,
    };
    Some((event, id, step))
}

fn address(address: Option<TcpAddress>) -> String {
    let address = address.and_then(|address| SocketAddr::try_from(address).ok());
    address.map(|address| address.to_string()).unwrap_or_default()
}

fn method(method: Option<http_types::HttpMethod>) -> String {
    let method = method.and_then(|method| ::http::Method::try_from(method).ok());
    method.map(|method| method.to_string()).unwrap_or_default()
}

fn scheme_name(scheme: Option<http_types::Scheme>) -> String {
    let scheme = scheme.and_then(|scheme| ::http::uri::Scheme::try_from(scheme).ok());
    scheme.map(|scheme| scheme.to_string()).unwrap_or_default()
}

fn micros(duration: Option<prost_types::Duration>) -> u64 {
    let duration = duration.and_then(|duration| Duration::try_from(duration).ok()).unwrap_or_default();
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn headers(headers: Option<http_types::Headers>) -> Vec<viz::Header> {
    let headers = headers.map(|headers| headers.headers).unwrap_or_default();
    let header = |header: http_types::headers::Header| viz::Header {
        name: header.name,
        value: String::from_utf8_lossy(&header.value).into_owned(),
    };
    headers.into_iter().map(header).collect()
}
