//! Events of a tapped request, in the form of Linkerd's API. What a request chooses is cut to a bound, because events
//! wait in a buffer.

use std::time::Duration;

use http::{HeaderMap, Method, Request, Response, Version, uri::Scheme};
use weft_proto::linkerd::{
    http_types::{Headers, headers::Header},
    net::TcpAddress,
    tap::{
        Eos, TapEvent, eos,
        tap_event::{
            self, EndpointMeta, ProxyDirection, RouteMeta,
            http::{Event, RequestInit, ResponseEnd, ResponseInit, StreamId},
        },
    },
};

use super::{Subject, matching::authority};
use crate::metrics::{Direction, Labels};

/// The most bytes of a path or an authority in an event.
const MAX_TEXT: usize = 8 * 1024;
/// The most bytes of a method in an event.
const MAX_METHOD: usize = 64;
/// The most bytes of headers in an event; those beyond are left out.
const MAX_HEADERS: usize = 16 * 1024;

/// What all events of a request have in common.
pub(super) fn base(subject: &Subject) -> TapEvent {
    let direction = match subject.direction {
        Direction::Inbound => ProxyDirection::Inbound,
        Direction::Outbound => ProxyDirection::Outbound,
    };
    let labels = |labels: &Labels| labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    TapEvent {
        source: Some(TcpAddress::from(subject.source)),
        source_meta: Some(EndpointMeta { labels: labels(&subject.source_labels) }),
        destination: Some(TcpAddress::from(subject.destination)),
        destination_meta: Some(EndpointMeta { labels: labels(&subject.destination_labels) }),
        route_meta: Some(RouteMeta { labels: labels(&subject.route_labels) }),
        proxy_direction: direction.into(),
        event: None,
    }
}

/// A whole event.
pub(super) fn of(base: &TapEvent, event: Event) -> TapEvent {
    let http = tap_event::Http { event: Some(event) };
    TapEvent { event: Some(tap_event::Event::Http(http)), ..base.clone() }
}

/// The beginning of a request.
pub(super) fn request<B>(id: StreamId, request: &Request<B>, with_headers: bool) -> Event {
    let uri = request.uri();
    let scheme = uri.scheme().unwrap_or(&Scheme::HTTP);
    let authority = authority(request).unwrap_or_default();
    // The beginning of a method is one.
    let method = Method::from_bytes(cut(request.method().as_str(), MAX_METHOD).as_bytes()).unwrap_or_default();
    let headers = with_headers.then(|| {
        let path = uri.path_and_query().map_or("", |path| path.as_str());
        let pseudo =
            [(":method", method.as_str()), (":scheme", scheme.as_str()), (":authority", authority), (":path", path)];
        headers(if request.version() == Version::HTTP_2 { &pseudo } else { &[] }, request.headers())
    });
    Event::RequestInit(RequestInit {
        id: Some(id),
        method: Some(method.into()),
        scheme: Some(scheme.into()),
        authority: cut(authority, MAX_TEXT).to_owned(),
        path: cut(uri.path(), MAX_TEXT).to_owned(),
        headers,
    })
}

/// The beginning of a response.
pub(super) fn response<B>(id: StreamId, since: Duration, response: &Response<B>, with_headers: bool) -> Event {
    let headers = with_headers.then(|| {
        let status = response.status();
        let pseudo = [(":status", status.as_str())];
        headers(if response.version() == Version::HTTP_2 { &pseudo } else { &[] }, response.headers())
    });
    Event::ResponseInit(ResponseInit {
        id: Some(id),
        since_request_init: since.try_into().ok(),
        http_status: response.status().as_u16().into(),
        headers,
    })
}

/// The end of a response, or of a request that gets none.
pub(super) fn end(
    id: StreamId,
    since_request: Duration,
    since_response: Option<Duration>,
    response_bytes: u64,
    end: Option<eos::End>,
    trailers: Option<&HeaderMap>,
) -> Event {
    Event::ResponseEnd(ResponseEnd {
        id: Some(id),
        since_request_init: since_request.try_into().ok(),
        since_response_init: since_response.and_then(|since| since.try_into().ok()),
        response_bytes,
        eos: Some(Eos { end }),
        trailers: trailers.map(|trailers| headers(&[], trailers)),
    })
}

/// gRPC's status in headers or trailers.
pub(super) fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// The beginning of a text, up to `most` bytes.
fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

fn headers(pseudo: &[(&str, &str)], headers: &HeaderMap) -> Headers {
    let pseudo = pseudo.iter().map(|(name, value)| (*name, value.as_bytes()));
    let fields = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    let mut room = MAX_HEADERS;
    let headers = pseudo.chain(fields).map_while(|(name, value)| {
        room = room.checked_sub(name.len() + value.len())?;
        Some(Header { name: name.to_owned(), value: value.to_vec() })
    });
    Headers { headers: headers.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_chooses_is_bounded() {
        let long = format!("/{}", "a".repeat(40_000));
        let head = Request::get(&long).header("a", "1").header("b", "2".repeat(MAX_HEADERS));
        let head = head.method("M".repeat(40_000).as_str()).body(()).unwrap();
        let Event::RequestInit(event) = request(StreamId::default(), &head, true) else { panic!() };
        assert_eq!(event.path.len(), MAX_TEXT);
        assert_eq!(Method::try_from(event.method.unwrap()).unwrap().as_str().len(), MAX_METHOD);
        let names: Vec<_> = event.headers.unwrap().headers.into_iter().map(|header| header.name).collect();
        assert_eq!(names, ["a"]);
    }

    #[test]
    fn http2_has_its_pseudo_headers() {
        let mut head = Request::get("http://web.demo/a?b").header("x", "y").body(()).unwrap();
        *head.version_mut() = Version::HTTP_2;
        let Event::RequestInit(event) = request(StreamId::default(), &head, true) else { panic!() };
        let seen: Vec<_> = event
            .headers
            .unwrap()
            .headers
            .into_iter()
            .map(|header| format!("{}={}", header.name, String::from_utf8(header.value).unwrap()))
            .collect();
        assert_eq!(seen, [":method=GET", ":scheme=http", ":authority=web.demo", ":path=/a?b", "x=y"]);
        assert_eq!((event.authority.as_str(), event.path.as_str()), ("web.demo", "/a"));
    }
}
