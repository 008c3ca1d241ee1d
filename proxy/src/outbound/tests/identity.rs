//! Servers that are not who discovery says, those whose identity is a SPIFFE ID, and what is counted of TLS.

use weft_proto::linkerd::destination::tls_identity::{Strategy, UriLikeIdentity};

use super::{
    resilience::{Script, ejecting, metric},
    *,
};

#[tokio::test]
async fn the_wrong_server_is_refused() {
    let control = Control::default();
    let service = "10.1.1.5:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let proxy = Proxy::start_with(service, control, fails_fast, true).await;
    let (peer, port) = Peer::listen(&proxy.mesh.credentials("impostor.demo")).await;
    proxy.control.update(SERVICE, add(vec![endpoint("127.0.0.1:1".parse().unwrap(), Some((SERVER, port)))]));
    let _impostor = tokio::spawn(async move { peer.accept().await });
    let status = proxy.get("/").await.status();
    assert!(status.is_server_error(), "{status}");
}

#[tokio::test]
async fn a_server_with_a_spiffe_id_has_to_be_the_one_that_discovery_names() {
    const ID: &str = "spiffe://mesh.test/vm/web";
    for (actual, is_reached) in [(ID, true), ("spiffe://mesh.test/vm/other", false)] {
        let control = Control::default();
        let service = "10.1.4.1:80".parse().unwrap();
        control.policies.lock().insert(service, policy(SERVICE, vec![]));
        let change = if is_reached { (|_: &mut Config| {}) as fn(&mut Config) } else { fails_fast };
        let proxy = Proxy::start_with(service, control, change, true).await;
        let (peer, port) = Peer::listen(&proxy.mesh.svid(actual)).await;
        let mut workload = endpoint("127.0.0.1:8080".parse().unwrap(), Some((SERVER, port)));
        let strategy = Strategy::UriLikeIdentity(UriLikeIdentity { uri: ID.to_owned() });
        workload.tls_identity.as_mut().unwrap().strategy = Some(strategy);
        proxy.control.update(SERVICE, add(vec![workload]));
        tokio::spawn(async move {
            let (_, stream) = peer.accept().await;
            let service =
                service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) });
            http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await
        });
        let status = proxy.get("/").await.status();
        assert_eq!((status.is_success(), status.is_server_error()), (is_reached, !is_reached), "{actual}: {status}");
        let reached = format!(r#"tls="true",server_id="{ID}""#);
        let text = proxy.scrape();
        let opened = text.lines().find(|line| line.starts_with("tcp_open_total{") && line.contains(&reached));
        assert_eq!(opened.is_some_and(|line| line.ends_with(" 1")), is_reached, "{text}");
    }
}

#[tokio::test]
async fn no_endpoint_is_blamed_for_an_expired_certificate_and_the_next_one_is_used_at_once() {
    let control = Control::default();
    let service = "10.1.4.2:80".parse().unwrap();
    control.policies.lock().insert(service, ejecting(policy(SERVICE, vec![]), 1));
    let (certified, credentials) = watch::channel(None);
    let proxy = Proxy::start_certified(service, control, |_| {}, Some(credentials)).await;
    let (server, _drain) = testing::shared(testing::config(), &proxy.mesh);
    let port = testing::serve_direct(server).await;
    proxy.control.update(SERVICE, add(vec![endpoint(Script::default().listen().await, Some((testing::OWN, port)))]));
    let http2 = async || {
        let stream = TokioIo::new(proxy.connect().await);
        let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(Request::get("http://server.demo/").body(Empty::<Bytes>::new()).unwrap()).await
    };

    certified.send_replace(Some(proxy.mesh.expired(testing::OWN).await));
    for response in [proxy.get("/").await, http2().await.expect("the stream is answered")] {
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
        let reason = response.headers()["l5d-proxy-error"].to_str().unwrap();
        assert!(reason.contains(&format!("the proxy's certificate for {} expired at 20", testing::OWN)), "{reason}");
    }
    let mut bytes = proxy.connect().await;
    bytes.write_all(b"\x01\x02 these are not http").await.unwrap();
    assert!(matches!(bytes.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    eventually("the connection is counted", || {
        let counted = |line: &str| {
            line.starts_with("outbound_tcp_errors_total{") && line.ends_with(r#""certificate expired"} 1"#)
        };
        proxy.scrape().lines().any(counted)
    })
    .await;
    for kind in ["http", "tcp"] {
        let endpoints = format!("outbound_{kind}_balancer_endpoints");
        for (state, number) in [("ready", 1), ("pending", 0)] {
            let name = format!(r#"{endpoints}{{endpoint_state="{state}""#);
            assert_eq!(metric(&proxy, &name), number, "{name}");
        }
    }

    certified.send_replace(Some(proxy.mesh.credentials(testing::OWN)));
    assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
    assert_eq!(http2().await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn connections_of_the_pod_itself_have_no_tls_because_of_loopback() {
    let app = Script::default().listen().await;
    let proxy = Proxy::start(app, Control::default()).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
    let target = format!(r#"target_addr="{app}",target_ip="{}",target_port="{}""#, app.ip(), app.port());
    let expected = format!(
        r#"tcp_open_total{{direction="outbound",peer="src",{target},tls="no_identity",no_tls_reason="loopback"}} 1"#
    );
    let text = proxy.scrape();
    assert!(text.lines().any(|line| line == expected), "{expected} is not in\n{text}");
}
