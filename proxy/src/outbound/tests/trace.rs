//! Spans of both sides of the proxy, and of none when a collector does not do its part.

use tonic::Code;
use weft_proto::otlp::span::SpanKind;

use super::{
    resilience::{Act, Script, changed, retry},
    *,
};
use crate::{
    config::TraceConfig,
    trace::{
        Kind,
        testing::{Answer, Collector, Seen},
    },
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

fn traces_to(collector: SocketAddr, service: &str) -> Option<TraceConfig> {
    Some(TraceConfig { service_name: service.to_owned(), ..TraceConfig::to("127.0.0.1", collector.port()) })
}

/// A client's proxy and a server's, in front of an application that answers with the headers of its request.
async fn pair(collector: SocketAddr) -> Proxy {
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let proxy = Proxy::start_with(service, control, |config| config.trace = traces_to(collector, "client"), true).await;
    let mut config = testing::config();
    config.trace = traces_to(collector, "server");
    let (shared, drain) = testing::shared(config, &proxy.mesh);
    // The server's side is never drained here; forgetting it keeps it from ending with this function.
    std::mem::forget(drain);
    let port = testing::serve_direct(shared).await;
    let app = reflecting().await;
    proxy.control.update(SERVICE, add(vec![endpoint(app, Some((testing::OWN, port)))]));
    proxy
}

/// An application that answers with the headers of its request.
async fn reflecting() -> SocketAddr {
    serve_each(|stream| async move {
        let service = service_fn(|request: Request<Incoming>| async move {
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.headers_mut() = request.headers().clone();
            Ok::<_, Infallible>(response)
        });
        let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
        let _ = builder.serve_connection(TokioIo::new(stream), service).await;
    })
    .await
}

fn sampled(fields: &[(&'static str, &str)]) -> Request<Full<Bytes>> {
    let mut request = get("http://server.demo/path?query");
    for (name, value) in fields {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    request
}

fn w3c(flags: &str) -> String {
    format!("00-{TRACE}-{SPAN}-{flags}")
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The span of this process and kind.
fn find<'a>(spans: &'a [Seen], service: &str, kind: SpanKind) -> &'a Seen {
    let mut found = spans.iter().filter(|seen| seen.service == service && seen.span.kind() == kind);
    let span = found.next().unwrap_or_else(|| panic!("no {kind:?} of {service}: {spans:?}"));
    assert!(found.next().is_none(), "{spans:?}");
    span
}

#[tokio::test]
async fn the_spans_of_a_request_through_two_proxies_are_one_trace() {
    for (fields, seen_by_app) in [
        (vec![("traceparent", w3c("01")), ("tracestate", "vendor=1".to_owned())], "traceparent"),
        (vec![("b3", format!("{TRACE}-{SPAN}-1"))], "b3"),
        (
            vec![
                ("x-b3-traceid", TRACE.to_owned()),
                ("x-b3-spanid", SPAN.to_owned()),
                ("x-b3-sampled", "1".to_owned()),
            ],
            "x-b3-spanid",
        ),
    ] {
        for is_http2 in [false, true] {
            let collector = Collector::new(Answer::Accept);
            let proxy = pair(collector.serve().await).await;
            let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let response = if is_http2 {
                let stream = TokioIo::new(proxy.connect().await);
                let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
                tokio::spawn(connection);
                let mut request = sampled(&fields);
                request.headers_mut().remove("host");
                sender.send_request(request).await.unwrap()
            } else {
                proxy.http1().await.send_request(sampled(&fields)).await.unwrap()
            };
            assert_eq!(response.status(), StatusCode::OK);
            let spans = collector.has(4).await;
            assert_eq!(spans.len(), 4, "{spans:?}");
            let mut parent = SPAN.to_owned();
            for (service, direction) in [("client", "outbound"), ("server", "inbound")] {
                for kind in [SpanKind::Server, SpanKind::Client] {
                    let seen = find(&spans, service, kind);
                    assert_eq!(hex(&seen.span.trace_id), TRACE);
                    assert_eq!(hex(&seen.span.parent_span_id), parent, "{service} {kind:?}");
                    parent = hex(&seen.span.span_id);
                    assert_eq!(seen.span.name, "/path");
                    for (name, expected) in [
                        ("direction", direction),
                        ("http.request.method", "GET"),
                        ("http.response.status_code", "200"),
                        ("url.path", "/path"),
                        ("url.query", "query"),
                        ("url.full", "http://server.demo/path?query"),
                        ("server.address", "server.demo"),
                    ] {
                        assert_eq!(seen.attribute(name), expected, "{service} {kind:?} {name}");
                    }
                }
            }
            let seen = response.headers()[seen_by_app].to_str().unwrap();
            assert!(seen.contains(&parent), "the application's parent is the last span: {seen}");
        }
    }
}

#[tokio::test]
async fn requests_that_are_not_sampled_have_no_spans_and_keep_their_headers() {
    let collector = Collector::new(Answer::Accept);
    let proxy = pair(collector.serve().await).await;
    let mut sender = proxy.http1().await;
    for fields in [
        vec![],
        vec![("traceparent", w3c("00"))],
        vec![("traceparent", "malformed".to_owned()), ("b3", "0".to_owned())],
        vec![("traceparent", "00-zz".repeat(5000))],
    ] {
        let plain: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        sender.ready().await.unwrap();
        let response = sender.send_request(sampled(&plain)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        for (name, value) in &fields {
            assert_eq!(response.headers()[*name], **value);
        }
        assert!(fields.len() > 1 || !response.headers().contains_key("b3"));
    }
    sender.ready().await.unwrap();
    sender.send_request(sampled(&[("traceparent", &w3c("01"))])).await.unwrap();
    assert_eq!(collector.has(4).await.len(), 4);
}

#[tokio::test]
async fn each_attempt_has_a_span_below_the_requests() {
    let collector = Collector::new(Answer::Accept);
    let addr = collector.serve().await;
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, changed(|rule| rule.retry = Some(retry(1))));
    let script = Script::new([Act::Answer(503)]);
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    let change = |config: &mut Config| config.trace = traces_to(addr, "client");
    let proxy = Proxy::start_with(service, control, change, true).await;
    let response = proxy.http1().await.send_request(sampled(&[("traceparent", &w3c("01"))])).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let spans = collector.has(3).await;
    let request = find(&spans, "client", SpanKind::Server);
    assert_eq!(request.attribute("http.response.status_code"), "200");
    let attempts: Vec<_> = spans.iter().filter(|seen| seen.span.kind() == SpanKind::Client).collect();
    let statuses: Vec<_> = attempts.iter().map(|seen| seen.attribute("http.response.status_code")).collect();
    assert_eq!(statuses, ["503", "200"]);
    assert!(attempts.iter().all(|seen| seen.span.parent_span_id == request.span.span_id), "{spans:?}");
    assert_ne!(attempts[0].span.span_id, attempts[1].span.span_id);
}

#[tokio::test]
async fn a_request_that_no_endpoint_gets_has_spans_with_the_answer() {
    let collector = Collector::new(Answer::Accept);
    let addr = collector.serve().await;
    let change = |config: &mut Config| config.trace = traces_to(addr, "client");
    let proxy = Proxy::start_with(unused_addr(), Control::default(), change, true).await;
    let response = proxy.http1().await.send_request(sampled(&[("traceparent", &w3c("01"))])).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    let spans = collector.has(2).await;
    for kind in [SpanKind::Server, SpanKind::Client] {
        assert_eq!(find(&spans, "client", kind).attribute("http.response.status_code"), "502");
    }
}

#[tokio::test]
async fn requests_go_on_whatever_the_collector_does() {
    for (answer, is_away) in [
        (Answer::Never, true),
        (Answer::Never, false),
        (Answer::Refuse(Code::Unavailable), false),
        (Answer::Refuse(Code::Internal), false),
    ] {
        let collector = Collector::new(answer);
        let addr = if is_away { unused_addr() } else { collector.serve().await };
        let proxy = pair(addr).await;
        let tracing = &proxy.shared.tracing;
        let mut sender = proxy.http1().await;
        for _ in 0..20 {
            sender.ready().await.unwrap();
            let response = sender.send_request(sampled(&[("traceparent", &w3c("01"))])).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{answer:?}");
        }
        eventually("a batch is dropped", || tracing.counted()[4] > 0).await;
        // More than the queue and a batch hold: what has no room is dropped, and requests still go on.
        for _ in 0..4000 {
            drop(tracing.begin(&mut sampled(&[("traceparent", &w3c("01"))]), Kind::Server, Direction::Outbound));
        }
        sender.ready().await.unwrap();
        let response = sender.send_request(sampled(&[("traceparent", &w3c("01"))])).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{answer:?}");
        let [_, answered, exported, full, ..] = tracing.counted();
        assert!(full > 0, "{answer:?}");
        assert_eq!((answered, exported), (0, 0), "{answer:?}");
    }
}
