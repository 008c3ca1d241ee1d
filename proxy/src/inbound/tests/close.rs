//! A client's connection closes after a fatal error.

use super::*;

#[tokio::test]
async fn a_fatal_error_ends_a_clients_http2_connection_and_a_denial_does_not() {
    const MESHED: Via = Via::Direct(Some(SessionProtocol::Http2));
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let world = World::new(gone.local_addr().unwrap()).await;
    drop(gone);
    for (is_allowed, via, proto, is_told) in [
        (true, MESHED, None, true),
        (true, MESHED, Some("HTTP/1.1"), true),
        (true, Via::Plain, None, false),
        (false, MESHED, None, false),
    ] {
        if !is_allowed {
            world.policies.publish(world.app.port(), detecting(vec![authz("other", only(&["other.demo"]))]));
        }
        let case = format!("{is_allowed} {proto:?} {is_told}");
        let stream = TokioIo::new(world.connect(via, Some(ELSEWHERE)).await);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut request = Request::get("http://web.demo/").body(Full::<Bytes>::default()).unwrap();
        if let Some(proto) = proto {
            request.headers_mut().insert("l5d-orig-proto", proto.parse().unwrap());
        }
        let status = if is_allowed { StatusCode::BAD_GATEWAY } else { StatusCode::FORBIDDEN };
        let response = sender.send_request(request.clone()).await.unwrap();
        assert_eq!(response.status(), status, "{case}");
        assert_eq!(response.headers().contains_key("l5d-proxy-connection"), is_told, "{case}");
        if is_allowed {
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
