//! A client's connection closes after a fatal error.

use super::{
    routes::{prefix, route, routed, rule},
    *,
};

/// A server with a route for anybody.
fn with_route() -> weft_proto::linkerd::inbound::Server {
    routed(vec![authz("all", anybody())], |detect| {
        detect.http_routes.push(route("all", Vec::new(), rule(prefix("/"))));
    })
}

#[tokio::test]
async fn a_fatal_error_ends_a_clients_http2_connection_and_a_denial_does_not() {
    const MESHED: Via = Via::Direct(Some(SessionProtocol::Http2));
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let world = World::new(gone.local_addr().unwrap()).await;
    drop(gone);
    for (status, via, proto, is_told) in [
        (StatusCode::BAD_GATEWAY, MESHED, None, true),
        (StatusCode::BAD_GATEWAY, MESHED, Some("HTTP/1.1"), true),
        (StatusCode::BAD_GATEWAY, Via::Plain, None, false),
        (StatusCode::FORBIDDEN, MESHED, None, false),
        (StatusCode::BAD_REQUEST, MESHED, None, false),
    ] {
        match status {
            StatusCode::FORBIDDEN => {
                world.policies.publish(world.app.port(), detecting(vec![authz("other", only(&["other.demo"]))]));
            }
            StatusCode::BAD_REQUEST => world.policies.publish(world.app.port(), with_route()),
            _ => {}
        }
        let case = format!("{status} {proto:?} {is_told}");
        let stream = TokioIo::new(world.connect(via, Some(ELSEWHERE)).await);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        let connection = tokio::spawn(connection);
        // Where there are routes, a path with dots is refused.
        let mut request = Request::get("http://web.demo/./").body(Full::<Bytes>::default()).unwrap();
        if let Some(proto) = proto {
            request.headers_mut().insert("l5d-orig-proto", proto.parse().unwrap());
        }
        let response = sender.send_request(request.clone()).await.unwrap();
        assert_eq!(response.status(), status, "{case}");
        assert_eq!(response.headers().contains_key("l5d-proxy-connection"), is_told, "{case}");
        if status == StatusCode::BAD_GATEWAY {
            let ended = tokio::time::timeout(Duration::from_secs(10), connection).await;
            ended.unwrap_or_else(|_| panic!("{case}: it goes on")).unwrap().unwrap();
        } else {
            for _ in 0..2 {
                assert_eq!(sender.send_request(request.clone()).await.unwrap().status(), status, "{case}");
            }
            assert!(!connection.is_finished());
        }
    }
}
