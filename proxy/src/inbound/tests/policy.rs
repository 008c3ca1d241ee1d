//! What policy admits: no bytes on HTTP ports, and no HTTP on opaque ports.

use super::*;

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
    let first = Arc::downgrade(&*world.policies.port(world.app.port()).await.borrow());
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
