//! What a policy says about the protocol: what is read first, which route it takes, what its filters do, and what is
//! counted.

use weft_proto::linkerd::{
    grpc_route::GrpcFailureInjector,
    http_route::{RequestRedirect, ResponseHeaderModifier},
    http_types::{Headers, headers::Header},
    outbound::{OutboundPolicy, grpc_route, proxy_protocol},
    tls_route::sni_match,
};

use super::{
    fake::{Over, balancer, forward, grpc_policy, http_route, of_kind, opaque_route, tls_route},
    raw::{BYTES, named},
    resilience::Script,
    *,
};
use crate::detect::client_hello::tests::hello;

async fn proxy(policy: OutboundPolicy) -> (Proxy, Script) {
    let control = Control::default();
    let service = "10.1.8.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy);
    let script = Script::default();
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    (Proxy::start(service, control).await, script)
}

fn grpc() -> Request<Full<Bytes>> {
    let request = Request::post("http://server.demo/echo.Echo/Say").header("content-type", "application/grpc");
    request.body(Full::default()).unwrap()
}

#[tokio::test]
async fn nothing_is_read_first_where_the_policy_says_the_protocol() {
    let over = Over::First(vec![balancer(SERVICE)]);
    let routes = || vec![http_route(&over, vec![])];
    let http1 = proxy_protocol::Http1 { routes: routes(), failure_accrual: None };
    let http2 = proxy_protocol::Http2 { routes: routes(), failure_accrual: None };
    let opaque = proxy_protocol::Opaque { routes: vec![opaque_route(&over)] };
    for (policy, detects, protocol) in [
        (policy(SERVICE, vec![]), true, "detect"),
        (of_kind(proxy_protocol::Kind::Http1(http1)), false, "http/1"),
        (of_kind(proxy_protocol::Kind::Http2(http2)), false, "http/2"),
        (grpc_policy(SERVICE, None), false, "http/2"),
        (of_kind(proxy_protocol::Kind::Opaque(opaque)), false, "opaq"),
    ] {
        let (proxy, script) = proxy(policy).await;
        let response = match protocol {
            "http/2" => proxy.http2().await.send_request(grpc()).await.unwrap(),
            _ => proxy.get("/").await,
        };
        assert_eq!((response.status(), script.received().len()), (StatusCode::OK, 1));
        let counted = |count: u64| {
            let metrics = proxy.scrape();
            let begin = format!(r#"outbound_tcp_protocol_connections_total{{protocol="{protocol}",parent_group="#);
            let is_it = |line: &str| line.starts_with(&begin) && line.ends_with(&format!("}} {count}"));
            assert!(metrics.lines().any(is_it), "{metrics}");
            let of_family = |line: &&str| line.starts_with("outbound_tcp_protocol_connections_total{");
            assert_eq!(metrics.lines().filter(of_family).count(), 1, "{metrics}");
        };
        counted(1);
        let metrics = proxy.scrape();
        assert_eq!(metrics.contains("outbound_tcp_detect_http_results_total{"), detects, "{protocol}");
        if protocol == "http/2" {
            let answer = proxy.exchange(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await;
            assert!(!answer.contains("HTTP/1.1") && script.received().len() == 1, "another version: {answer}");
            counted(2);
        }
    }
}

#[tokio::test]
async fn tls_takes_the_route_of_the_most_specific_server_name() {
    let exact = |name: &str| sni_match::Match::Exact(name.to_owned());
    let suffix = |labels: &[&str]| {
        let reverse_labels = labels.iter().map(|label| (*label).to_owned()).collect();
        sni_match::Match::Suffix(sni_match::Suffix { reverse_labels })
    };
    let mut routes = Vec::new();
    for (names, server) in [
        (vec![], "rest"),
        (vec![suffix(&["demo"])], "suffix"),
        (vec![suffix(&["demo", "a"]), exact("other.test")], "longer"),
        (vec![exact("web.a.demo")], "exact"),
        (vec![exact("web.a.demo")], "later"),
    ] {
        routes.push(tls_route(&names, &Over::First(vec![forward(named(server).await)])));
    }
    let tls = |routes| of_kind(proxy_protocol::Kind::Tls(proxy_protocol::Tls { routes }));
    let named_ones = routes[1..].to_vec();
    let (all, _) = proxy(tls(routes)).await;
    for (name, expected) in [
        ("web.a.demo", "exact"),
        ("WEB.a.demo", "exact"),
        ("api.a.demo", "longer"),
        ("other.test", "longer"),
        ("web.demo", "suffix"),
        // A suffix needs a label before it.
        ("demo", "rest"),
        ("elsewhere.test", "rest"),
        // Without a name.
        ("10.0.0.1", "rest"),
    ] {
        assert_eq!(all.exchange(&hello(name)).await, expected, "{name}");
    }
    assert_eq!(all.exchange(BYTES).await, "rest", "no TLS has no name");
    let (without_rest, _) = proxy(tls(named_ones)).await;
    assert_eq!(without_rest.exchange(&hello("web.a.demo")).await, "exact");
    for unnamed in [hello("elsewhere.test"), hello("10.0.0.1")] {
        assert_eq!(without_rest.exchange(&unnamed).await, "", "no route is no connection");
    }
    let metrics = without_rest.scrape();
    let target = r#"target_addr="10.1.8.1:80",target_ip="10.1.8.1",target_port="80""#;
    let counted = format!(r#"outbound_tcp_errors_total{{{target},error="no route"}} 2"#);
    assert!(metrics.lines().any(|line| line == counted), "{metrics}");
}

#[tokio::test]
async fn filters_answer_requests_and_change_responses() {
    let header = |name: &str, value: &str| {
        let headers = vec![Header { name: name.into(), value: value.into() }];
        Some(Headers { headers })
    };
    let redirect = RequestRedirect { host: "elsewhere.demo".into(), status: 302, ..RequestRedirect::default() };
    let redirect = http_route::Filter { kind: Some(http_route::filter::Kind::Redirect(redirect)) };
    let (redirecting, script) = proxy(policy(SERVICE, vec![redirect])).await;
    let response = redirecting.get("/a?b=c").await;
    assert_eq!((response.status(), script.received().len()), (StatusCode::FOUND, 0));
    assert_eq!(response.headers()["location"], "http://elsewhere.demo/a?b=c");
    assert_eq!(response.headers()["content-length"], "0");
    assert!(!response.headers().contains_key("connection") && !response.headers().contains_key("l5d-proxy-error"));

    let change = ResponseHeaderModifier {
        add: header("x-added", "1"),
        set: header("content-type", "text/changed"),
        remove: vec!["content-length".into()],
    };
    let change = http_route::Filter { kind: Some(http_route::filter::Kind::ResponseHeaderModifier(change)) };
    let (changing, _) = proxy(policy(SERVICE, vec![change])).await;
    let response = changing.get("/").await;
    assert_eq!(
        (&response.headers()["x-added"], &response.headers()["content-type"]),
        (&"1".parse().unwrap(), &"text/changed".parse().unwrap())
    );
    assert_eq!(text(response).await, "answer");

    let fail = GrpcFailureInjector { code: 7, message: "not you".into(), ratio: None };
    let fail = grpc_route::Filter { kind: Some(grpc_route::filter::Kind::FailureInjector(fail)) };
    let mut policy = grpc_policy(SERVICE, None);
    let Some(proxy_protocol::Kind::Grpc(of)) = policy.protocol.as_mut().and_then(|of| of.kind.as_mut()) else {
        panic!("another protocol")
    };
    of.routes[0].rules[0].filters = vec![fail];
    let (failing, script) = proxy(policy).await;
    let response = failing.http2().await.send_request(grpc()).await.unwrap();
    assert_eq!((response.status(), script.received().len()), (StatusCode::OK, 0));
    assert_eq!(
        (&response.headers()["grpc-status"], &response.headers()["grpc-message"]),
        (&"7".parse().unwrap(), &"not you".parse().unwrap())
    );
}

#[tokio::test]
async fn closed_connections_are_counted_by_what_closed_them() {
    let over = [
        ("invalid_backend", Over::First(vec![Default::default()])),
        ("unexpected", Over::First(vec![forward(unused_addr())])),
    ];
    for (error, over) in over {
        let opaque =
            of_kind(proxy_protocol::Kind::Opaque(proxy_protocol::Opaque { routes: vec![opaque_route(&over)] }));
        let tls = of_kind(proxy_protocol::Kind::Tls(proxy_protocol::Tls { routes: vec![tls_route(&[], &over)] }));
        for (policy, family) in [(opaque, "outbound_tcp_route_close_total"), (tls, "outbound_tls_route_close_total")] {
            let (proxy, _) = proxy(policy).await;
            assert_eq!(proxy.exchange(&hello("web.demo")).await, "");
            let metrics = proxy.scrape();
            let is_it = |line: &str| line.starts_with(family) && line.ends_with(&format!(r#"error="{error}"}} 1"#));
            assert!(metrics.lines().any(is_it), "{metrics}");
        }
    }
}

#[tokio::test]
async fn a_connection_without_a_destination_is_closed_and_the_next_one_is_served() {
    // Where the kernel tracks connections it answers the proxy's own address, which is refused as loopback.
    let refuse = |config: &mut Config| config.outbound.allow_loopback = false;
    let proxy = Proxy::start_with("127.0.0.1:1".parse().unwrap(), Control::default(), refuse, true).await;
    let pretended = proxy.worker.pretended_dst.lock().take();
    assert_eq!(proxy.exchange(BYTES).await, "");
    assert!(proxy.scrape().contains("outbound_tcp_errors_total{target_addr="), "{}", proxy.scrape());
    *proxy.worker.pretended_dst.lock() = pretended;
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY, "served, and refused as loopback");
}
