//! The application's connection closes after a fatal error, and when the proxy of an endpoint asks for it.

use tokio::{sync::Notify, task::JoinHandle};

use super::*;

type Sender = conn::http2::SendRequest<Full<Bytes>>;

/// An HTTP/2 connection to the proxy.
async fn http2(proxy: &Proxy) -> (Sender, JoinHandle<hyper::Result<()>>) {
    let stream = TokioIo::new(proxy.connect().await);
    let (sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    (sender, tokio::spawn(connection))
}

fn request(path: &str) -> Request<Full<Bytes>> {
    Request::get(format!("http://server.demo{path}")).body(Full::default()).unwrap()
}

async fn expect_end(connection: JoinHandle<hyper::Result<()>>) {
    let ended = tokio::time::timeout(Duration::from_secs(10), connection).await;
    ended.expect("the connection goes on").unwrap().unwrap();
}

/// Several requests are answered with this status, and the connection goes on.
async fn expect_more(mut sender: Sender, connection: JoinHandle<hyper::Result<()>>, status: StatusCode) {
    for _ in 0..3 {
        assert_eq!(sender.send_request(request("/")).await.unwrap().status(), status);
    }
    assert!(!connection.is_finished());
}

/// An application that answers `/held` when it may.
async fn holding(arrived: Arc<Notify>, may_answer: Arc<Notify>) -> SocketAddr {
    serve_each(move |stream| {
        let (arrived, may_answer) = (Arc::clone(&arrived), Arc::clone(&may_answer));
        let service = service_fn(move |request: Request<Incoming>| {
            let (arrived, may_answer) = (Arc::clone(&arrived), Arc::clone(&may_answer));
            async move {
                if request.uri().path() == "/held" {
                    arrived.notify_one();
                    may_answer.notified().await;
                }
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service)
    })
    .await
}

#[tokio::test]
async fn a_fatal_error_ends_an_http2_connection_when_its_requests_are_answered() {
    let (arrived, may_answer) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let app = holding(Arc::clone(&arrived), Arc::clone(&may_answer)).await;
    let proxy = Proxy::start(app, Control::default()).await;
    let (mut sender, connection) = http2(&proxy).await;
    let held = tokio::spawn(sender.send_request(request("/held")));
    arrived.notified().await;
    let mut fatal = request("/");
    fatal.headers_mut().insert("l5d-require-id", "not a name".parse().unwrap());
    assert_eq!(sender.send_request(fatal).await.unwrap().status(), StatusCode::BAD_GATEWAY);
    // Requests that are sent before the client has read that the connection ends are answered.
    let ends = async { while sender.send_request(request("/")).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(10), ends).await.expect("the connection goes on");
    assert!(!held.is_finished());
    may_answer.notify_one();
    assert_eq!(held.await.unwrap().unwrap().status(), StatusCode::OK);
    expect_end(connection).await;
}

#[tokio::test]
async fn an_answer_of_policy_ends_no_connection() {
    let service = "10.1.5.1:80".parse().unwrap();
    let control = Control::default();
    let filter = failing(403, "traffic not allowed");
    control.policies.lock().insert(service, policy(SERVICE, vec![filter]));
    let proxy = Proxy::start(service, control).await;
    let (sender, connection) = http2(&proxy).await;
    expect_more(sender, connection, StatusCode::FORBIDDEN).await;
}

async fn ask_to_close(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::builder().header("l5d-proxy-connection", "close").body(Full::default()).unwrap())
}

/// A proxy whose endpoint asks it to close the application's connection.
async fn asked(is_meshed: bool, is_balanced: bool) -> Proxy {
    let service: SocketAddr = "10.1.5.2:80".parse().unwrap();
    let proxy = Proxy::start(service, Control::default()).await;
    let endpoint = if is_meshed {
        let (peer, port) = Peer::listen(&proxy.mesh.credentials(SERVER)).await;
        tokio::spawn(async move {
            loop {
                let (_, stream) = peer.accept().await;
                let server = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service_fn(ask_to_close)));
            }
        });
        endpoint("127.0.0.1:8080".parse().unwrap(), Some((SERVER, port)))
    } else {
        let addr = serve_each(move |stream| async move {
            let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection(TokioIo::new(stream), service_fn(ask_to_close)).await;
        })
        .await;
        endpoint(addr, None)
    };
    if is_balanced {
        proxy.control.policies.lock().insert(service, policy(SERVICE, vec![]));
        proxy.control.update(SERVICE, add(vec![endpoint]));
    } else {
        let profile = DestinationProfile { endpoint: Some(endpoint), ..Default::default() };
        proxy.control.profiles.lock().insert(service.to_string(), profile);
    }
    proxy
}

#[tokio::test]
async fn the_proxy_of_an_address_may_close_the_applications_connection_and_nobody_else() {
    for (is_meshed, is_balanced, closes) in [(true, false, true), (true, true, false), (false, false, false)] {
        let proxy = asked(is_meshed, is_balanced).await;
        let response = proxy.get("/").await;
        let case = format!("meshed: {is_meshed}, balanced: {is_balanced}: {:?}", response.headers());
        assert_eq!(response.status(), StatusCode::OK, "{case}");
        assert_eq!(response.headers().get("connection").is_some_and(|value| value == "close"), closes, "{case}");
        assert!(!response.headers().contains_key("l5d-proxy-connection"), "{case}");
        let (mut sender, connection) = http2(&proxy).await;
        if closes {
            let response = sender.send_request(request("/")).await.unwrap();
            assert!(!response.headers().contains_key("l5d-proxy-connection"), "{case}");
            expect_end(connection).await;
        } else {
            expect_more(sender, connection, StatusCode::OK).await;
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_while_its_answer_is_awaited() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(silent.local_addr().unwrap(), Control::default()).await;
    // Also with bytes of the next request, which wait for the answer.
    for next in ["", "\r\n", "GET /next HTTP/1.1\r\nhost: "] {
        let mut client = proxy.connect().await;
        let request = format!("GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n{next}");
        client.write_all(request.as_bytes()).await.unwrap();
        let (mut server, _) = silent.accept().await.unwrap();
        let mut head = [0; 14];
        server.read_exact(&mut head).await.unwrap();
        drop(client);
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(5), server.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "the server's connection continues without a client: {next:?}");
    }
}
