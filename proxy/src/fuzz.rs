//! Entry points of the fuzz targets: the proxy's parsers of bytes from a peer, an application or a control plane.
//!
//! Each function panics if a parser violates its guarantee, and returns nothing.

mod discovery;
mod form;
mod inbound;
mod outbound;
mod probe;
mod routes;
mod svid;
mod wire;

use futures::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Version};
use prost::Message as _;
use weft_proto::linkerd::tap::observe_request;

use crate::{
    destination::Name,
    detect::{
        self,
        client_hello::{Hello, parse_client_hello},
    },
    http::{body::Body, headers, orig_proto},
    request::{
        classify::{Answer, MAX_RETRY_AFTER},
        overrides,
        terms::Terms,
    },
    tap::matching::Match,
    trace::Context,
    transport_header::TransportHeader,
};

/// The headers that set a request's terms.
const OVERRIDES: [&str; 7] = [
    "l5d-timeout",
    "l5d-request-timeout",
    "l5d-response-timeout",
    "l5d-retry-timeout",
    "l5d-retry-http",
    "l5d-retry-grpc",
    "l5d-retry-limit",
];

/// The headers that say which trace a request belongs to.
const TRACES: [&str; 7] =
    ["traceparent", "grpc-trace-bin", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-sampled", "x-b3-flags"];

/// Parses the first bytes of a connection that may be TLS. Further bytes do not change the result.
pub fn client_hello(bytes: &[u8]) {
    match parse_client_hello(bytes) {
        decided @ (Hello::Complete(_) | Hello::NotTls) => {
            assert_eq!(parse_client_hello(&[bytes, &[0; 64]].concat()), decided);
        }
        Hello::Incomplete => {}
    }
}

/// Parses the first bytes of a connection that may be HTTP.
pub fn protocol(bytes: &[u8]) {
    let _ = detect::judge_http(bytes);
}

/// Parses the first message of a direct connection. A parsed message can be written and parsed again.
pub fn transport_header(mut bytes: &[u8]) {
    let Some(Ok(header)) = TransportHeader::read(&mut bytes).now_or_never() else { return };
    let written = header.encode();
    let again = TransportHeader::read(&mut &written[..]).now_or_never();
    assert_eq!(again.and_then(Result::ok).as_ref(), Some(&header));
    // A gateway's name is looked up and sent on: every name that is accepted has one form.
    let Some(name) = header.name.and_then(|host| Name::new(&host, header.port)) else { return };
    assert_eq!(Name::parse(&name.to_string(), header.port), Some(name));
}

/// Parses target and headers of an HTTP/1 request: `METHOD TARGET HTTP/1.1` and headers, one a line. The request is
/// then sent to the peer's proxy over HTTP/2, where it becomes HTTP/1 again. If it is not refused, it names one host,
/// and a gateway that it passed notices when it comes back.
pub fn request(bytes: &[u8]) {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut parsed = httparse::Request::new(&mut fields);
    if !matches!(parsed.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return;
    }
    let mut request = Request::builder().method(parsed.method.unwrap_or("GET")).uri(parsed.path.unwrap_or("/"));
    request = request.version(if parsed.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 });
    for field in parsed.headers.iter() {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(field.name.as_bytes()), HeaderValue::from_bytes(field.value))
        {
            request = request.header(name, value);
        }
    }
    let Ok(request) = request.body(()) else { return };
    form::check(&request);
    let mut request = request.map(|()| Body::Empty);
    let version = request.version();
    let _ = headers::wants_upgrade(&request);
    let fallback = orig_proto::host(request.headers());
    orig_proto::to_absolute_form(&mut request, fallback.as_ref());
    orig_proto::upgrade_request(&mut request);
    assert_eq!(request.version(), Version::HTTP_2);
    let is_carried = orig_proto::downgrade_request(&mut request).is_some();
    assert_eq!(is_carried, request.method() != Method::CONNECT);
    assert_eq!(request.version(), if is_carried { version } else { Version::HTTP_2 });
    orig_proto::to_origin_form(&mut request);
    headers::strip_hop_by_hop(request.headers_mut());
    assert!(!request.headers().contains_key(http::header::CONNECTION));
}

/// Parses the head of an HTTP/1 response: `HTTP/1.1 STATUS REASON` and headers, one a line. It is then sent to the
/// client's proxy over HTTP/2, where it becomes HTTP/1 again.
pub fn response(bytes: &[u8]) {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut parsed = httparse::Response::new(&mut fields);
    if !matches!(parsed.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return;
    }
    let version = if parsed.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let mut response = Response::builder().status(parsed.code.unwrap_or(200)).version(version);
    for field in parsed.headers.iter() {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(field.name.as_bytes()), HeaderValue::from_bytes(field.value))
        {
            response = response.header(name, value);
        }
    }
    let Ok(mut response) = response.body(()) else { return };
    let answer = Answer::of_head(response.status(), response.headers());
    assert!(answer.retry_after.is_none_or(|away| away <= MAX_RETRY_AFTER));
    orig_proto::upgrade_response(&mut response);
    assert_eq!(response.version(), Version::HTTP_2);
    // HTTP/2 refuses a response with any of them (RFC 9113 section 8.2.2).
    let forbidden = ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"];
    assert!(forbidden.iter().all(|name| !response.headers().contains_key(*name)), "{:?}", response.headers());
    orig_proto::downgrade_response(&mut response);
    assert_eq!(response.version(), version);
    // What balancers and circuit breakers are told is what the application said.
    assert_eq!(Answer::of_head(response.status(), response.headers()), answer);
}

/// Reads which requests a tap is for. What is read is read as a part of another match too, unless that is too deep.
pub fn tap_match(bytes: &[u8]) {
    let Ok(message) = observe_request::Match::decode(bytes) else { return };
    let found = Match::read(Some(message.clone()));
    let not = observe_request::r#match::Match::Not(Box::new(message));
    let inverse = Match::read(Some(observe_request::Match { r#match: Some(not) }));
    assert_eq!(inverse.ok(), found.ok().map(|found| Match::Not(Box::new(found))));
}

/// Reads the headers with which an application sets a request's terms, their values one a line. Where they are not
/// allowed they change nothing; where they are they end here, and nobody is granted more than 100 retries.
pub fn overrides(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for (name, value) in OVERRIDES.into_iter().zip(bytes.split(|byte| *byte == b'\n')) {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(name, value);
        }
    }
    let mut unread = headers.clone();
    assert_eq!(overrides::apply(Terms::default(), &mut unread), Terms::default());
    assert_eq!(unread, headers);
    let terms = overrides::apply(Terms { allow_headers: true, ..Terms::default() }, &mut headers);
    assert!(headers.is_empty());
    assert!(terms.retry.is_none_or(|retry| retry.limit <= 100));
}

/// Reads the headers that say which trace a request belongs to, their values one a line. A trace that was read and is
/// written with another span is the same trace when the next proxy reads it.
pub fn trace_context(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for (name, value) in TRACES.into_iter().zip(bytes.split(|byte| *byte == b'\n')) {
        if let Ok(value) = HeaderValue::from_bytes(value)
            && !value.is_empty()
        {
            headers.append(name, value);
        }
    }
    let Some(context) = Context::read(&headers) else { return };
    context.write(&mut headers, 1);
    let again = Context::read(&headers).expect("what was written is a context");
    assert_eq!(again.is_sampled(), context.is_sampled());
    let mut written = headers.clone();
    again.write(&mut written, 2);
    assert_eq!(written.len(), headers.len());
}

/// Reads a port's policy, an `inbound.Server`. It is understood as a whole, and then those clients get in that it
/// admits, or denies every client.
pub fn inbound_policy(bytes: &[u8]) {
    inbound::policy(bytes);
}

/// Reads a destination's policy, an `outbound.OutboundPolicy`. It is understood as a whole, within bounds, or refuses
/// every request and connection.
pub fn outbound_policy(bytes: &[u8]) {
    outbound::policy(bytes);
}

/// Reads a change of a Service's endpoints, a `destination.Update`. What was sent with an identity has that identity,
/// or is no endpoint.
pub fn endpoints(bytes: &[u8]) {
    discovery::endpoints(bytes);
}

/// Reads a destination's profile, a `destination.DestinationProfile`. It is understood as a whole, within bounds, or
/// not at all.
pub fn destination_profile(bytes: &[u8]) {
    discovery::profile(bytes);
}

/// Reads certificates, keys and trust bundles, an `X509SVIDResponse`. Credentials have the name that was asked for, and
/// no part is skipped.
pub fn svid(bytes: &[u8]) {
    svid::update(bytes);
}

/// Changes one field of the protobuf message in the first `size` bytes of `data`; returns the new size, at most
/// `max_size`. Now and then, and where there is no message, `change_bytes` changes the bytes: libFuzzer's
/// `fuzzer_mutate`, which takes and returns the same sizes.
pub fn mutate_message(
    data: &mut [u8],
    size: usize,
    max_size: usize,
    seed: u32,
    change_bytes: fn(&mut [u8], usize, usize) -> usize,
) -> usize {
    wire::mutate(data, size, max_size, seed, change_bytes)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    type Target = fn(&[u8]);

    const TARGETS: [(&str, Target); 6] = [
        ("inbound_policy", inbound_policy),
        ("outbound_policy", outbound_policy),
        ("endpoints", endpoints),
        ("destination_profile", destination_profile),
        ("svid", svid),
        ("request", request),
    ];

    /// The inputs that a target starts from.
    pub(super) fn seeds(target: &str) -> Vec<Vec<u8>> {
        let own = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        let directory = Path::new(&own).join("../fuzz/corpus").join(target);
        let files = fs::read_dir(&directory).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        let found: Vec<_> = files.collect();
        assert!(!found.is_empty(), "{}", directory.display());
        found
    }

    /// Without coverage, and in seconds: every seed, beginnings of it, and what differs from it in one byte.
    #[test]
    fn seeds_and_what_is_near_them_keep_the_guarantees() {
        for (target, run) in TARGETS {
            for mut seed in seeds(target) {
                run(&seed);
                for at in (0..seed.len()).step_by(3) {
                    run(&seed[..at]);
                    let byte = seed[at];
                    for other in [0, byte ^ 1, 0xff] {
                        seed[at] = other;
                        run(&seed);
                    }
                    seed[at] = byte;
                }
            }
        }
    }
}
