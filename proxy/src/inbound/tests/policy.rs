//! What policy admits: no bytes on HTTP ports, and no HTTP on opaque ports.

use weft_proto::linkerd::inbound::{
    ProxyProtocol, Server,
    proxy_protocol::{Kind, Tls},
};

use super::{
    metrics::{SERVER, expect},
    *,
};

#[tokio::test]
async fn bytes_do_not_pass_where_policy_says_http() {
    let world = World::new(banner_app().await).await;
    for server in http_only(vec![authz("all", anybody())]) {
        world.policies.publish(world.app.port(), server);
        // A transport header without protocol, and the same from the pod itself.
        for peer in [Some(ELSEWHERE), None] {
            let mut stream = world.connect(Via::Direct(None), peer).await;
            stream.write_all(b"GET /admin HTTP/1.1\r\nhost: web\r\nl5d-client-id: forged\r\n\r\n").await.unwrap();
            expect_closed(&mut stream).await;
        }
        // TLS that the proxy does not terminate.
        let mut stream = world.raw(Some(ELSEWHERE), world.app).await;
        stream.write_all(&world.hello("somebody.else")).await.unwrap();
        expect_closed(&mut (Box::new(stream) as Box<dyn Duplex>)).await;
    }
    // Not HTTP inside mesh TLS.
    let [http1, ..] = http_only(vec![authz("all", anybody())]);
    world.policies.publish(world.app.port(), http1);
    let mut stream = world.connect(Via::Tls, Some(ELSEWHERE)).await;
    stream.write_all(b"not HTTP, and long enough to tell").await.unwrap();
    expect_closed(&mut stream).await;
}

#[tokio::test]
async fn bytes_stop_when_policy_changes_to_http() {
    let world = World::new(banner_app().await).await;
    for server in http_only(vec![authz("all", anybody())]) {
        world.policies.publish(world.app.port(), opaque(vec![authz("all", anybody())]));
        let mut stream = world.connect(Via::Direct(None), Some(ELSEWHERE)).await;
        expect_banner(&mut stream).await;
        world.policies.publish(world.app.port(), server);
        expect_closed(&mut stream).await;
    }
}

#[tokio::test]
async fn http_to_an_opaque_port_is_not_found() {
    let world = World::new(http_app().await).await;
    let via = Via::Direct(Some(SessionProtocol::Http1));
    world.policies.publish(world.app.port(), opaque(vec![authz("all", anybody())]));
    assert_eq!(world.get(via, Some(ELSEWHERE), "/").await.0, 404);
    world.policies.publish(world.app.port(), detecting(vec![authz("all", anybody())]));
    assert_eq!(world.get(via, Some(ELSEWHERE), "/").await.0, 200);
}

#[tokio::test]
async fn the_first_connection_of_a_port_waits_for_its_policy() {
    for via in [Via::Plain, Via::Tls, Via::Direct(Some(SessionProtocol::Http1))] {
        let wait = |config: &mut Config| config.inbound.policy_timeout = Duration::from_secs(60);
        let world = World::with(http_app().await, wait).await;
        let answer = async {
            tokio::task::yield_now().await;
            world.policies.publish(world.app.port(), detecting(vec![authz("other", only(&["other.demo"]))]));
        };
        let (response, ()) = tokio::join!(world.get(via, Some(ELSEWHERE), "/"), answer);
        assert_eq!(response.0, 403);
    }
}

#[tokio::test]
async fn a_connection_forgets_policies_that_are_replaced() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("a", anybody())]));
    let first = Arc::downgrade(&*world.policies.port(world.app.port(), world.app.ip()).await.borrow());
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    for name in ["b", "c"] {
        sender.ready().await.unwrap();
        let request = Request::get("/").header("host", "web.demo").body(Full::<Bytes>::default()).unwrap();
        sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
        world.policies.publish(world.app.port(), detecting(vec![authz(name, anybody())]));
    }
    assert!(first.upgrade().is_none(), "counters keep the first policy alive");
}

#[tokio::test]
async fn plaintext_is_refused_on_ports_that_require_tls_and_served_on_others() {
    let app = http_app().await;
    for (ports, admitted) in [(vec![], true), (vec![1, app.port()], false), (vec![1], true)] {
        let world = World::with(app, |config| config.inbound.tls_ports = ports.clone()).await;
        // Not even from the pod itself, and on a probe's path.
        for (peer, path) in [(Some(ELSEWHERE), "/"), (None, "/"), (Some(ELSEWHERE), "/healthz")] {
            if admitted {
                assert_eq!(world.get(Via::Plain, peer, path).await.0, 200, "{ports:?} {path}");
            } else {
                let mut stream = world.connect(Via::Plain, peer).await;
                stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: web\r\n\r\n").as_bytes()).await.unwrap();
                expect_closed(&mut stream).await;
            }
        }
        for via in [Via::Tls, Via::Direct(Some(SessionProtocol::Http1))] {
            assert_eq!(world.get(via, Some(ELSEWHERE), "/").await.0, 200, "{ports:?}");
        }
    }
}

#[tokio::test]
async fn an_opaque_port_that_requires_tls_passes_it_on_unread() {
    let app = banner_app().await;
    let world = World::with(app, |config| config.inbound.tls_ports = vec![app.port()]).await;
    world.policies.publish(app.port(), opaque(vec![authz("all", anybody())]));
    let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    stream.write_all(b"not TLS, and long enough to tell").await.unwrap();
    expect_closed(&mut stream).await;
    let mut stream = world.raw(Some(ELSEWHERE), app).await;
    stream.write_all(&world.hello("somebody.else")).await.unwrap();
    expect_banner(&mut (Box::new(stream) as Box<dyn Duplex>)).await;
}

/// Sends bytes and returns all that comes back until the connection ends.
async fn answer_to(world: &World, via: Via, sent: &[u8]) -> Vec<u8> {
    let mut stream = world.connect(via, Some(ELSEWHERE)).await;
    stream.write_all(sent).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    // However it ends.
    let _ = tokio::time::timeout(Duration::from_secs(5), read).await.expect("it stays open");
    answer
}

#[tokio::test]
async fn http_that_policy_names_is_not_detected_but_for_the_version_of_meshed_clients() {
    let world = World::new(http_app().await).await;
    let port = world.app.port();
    let [http1, http2, _] = http_only(vec![authz("all", anybody())]);
    let request = || Request::get("http://web.demo/x");
    world.policies.publish(port, http2);
    for via in [Via::Plain, Via::Tls] {
        let (status, _, body) = world.get_http2(via, Some(ELSEWHERE), request().body(()).unwrap()).await;
        assert_eq!(status, 200);
        assert!(body.starts_with("HTTP/2.0 GET http://web.demo/x"), "{body}");
        let answer = answer_to(&world, via, b"GET / HTTP/1.1\r\nhost: web\r\nconnection: close\r\n\r\n").await;
        assert!(!answer.starts_with(b"HTTP/1.1"), "{}", answer.escape_ascii());
    }
    world.policies.publish(port, http1);
    let (status, _, body) = world.get(Via::Plain, Some(ELSEWHERE), "/x").await;
    assert_eq!(status, 200);
    assert!(body.starts_with("HTTP/1.1 GET /x"), "{body}");
    let answer = answer_to(&world, Via::Plain, &crate::http::frames::preface()).await;
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{}", answer.escape_ascii());
    const RESULTS: &str = "inbound_tcp_detect_http_results_total";
    expect(&world, RESULTS, &[]).await;

    // A meshed client may carry HTTP/1 over HTTP/2; if it says nothing, it speaks HTTP/1.
    let carried = request().header("l5d-orig-proto", "HTTP/1.1").body(()).unwrap();
    let (status, headers, body) = world.get_http2(Via::Tls, Some(ELSEWHERE), carried).await;
    assert_eq!((status.as_u16(), &headers["l5d-orig-proto"]), (200, &"HTTP/1.1".parse().unwrap()));
    assert!(body.starts_with("HTTP/1.1 GET /x"), "{body}");
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, 200);
    let silent = world.connect(Via::Tls, Some(ELSEWHERE)).await;
    let detected = |result: &str| format!(r#"result="{result}",{SERVER},srv_port="{port}""#);
    let expected = ["http/2", "http/1", "read_timeout"].map(detected);
    expect(&world, RESULTS, &expected.each_ref().map(|labels| (labels.as_str(), 1))).await;
    assert_eq!(get_over(silent, "/").await.0, 200);
}

#[tokio::test]
async fn a_port_of_tls_forwards_bytes_unread() {
    let world = World::new(banner_app().await).await;
    let tls = |authorizations| {
        let protocol = Some(ProxyProtocol { kind: Some(Kind::Tls(Tls {})) });
        Server { protocol, ..detecting(authorizations) }
    };
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: web\r\nl5d-client-id: sent\r\n\r\n";
    let hello = world.hello("somebody.else");
    for (permit, admits_others) in [(only(&[CLIENT]), false), (anybody(), true)] {
        world.policies.publish(world.app.port(), tls(vec![authz("a", permit)]));
        // The mesh's TLS is terminated, and the server speaks first.
        let mut stream = world.connect(Via::Tls, Some(ELSEWHERE)).await;
        expect_banner(&mut stream).await;
        stream.write_all(REQUEST).await.unwrap();
        let mut echo = vec![0; REQUEST.len()];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, REQUEST);
        for sent in [&hello[..], REQUEST] {
            let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
            stream.write_all(sent).await.unwrap();
            if admits_others {
                expect_banner(&mut stream).await;
                let mut echo = vec![0; sent.len()];
                stream.read_exact(&mut echo).await.unwrap();
                assert_eq!(echo, sent);
            } else {
                expect_closed(&mut stream).await;
            }
        }
    }
    expect(&world, "inbound_tcp_detect_http_results_total", &[]).await;
}
