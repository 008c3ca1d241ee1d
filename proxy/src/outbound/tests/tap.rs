//! Tap against running proxies: a client's and a server's, each with its tap server.

use tonic::{Code, transport::Endpoint};
use weft_proto::linkerd::{
    destination::{PathMatch, RequestMatch, Route, request_match},
    tap::{
        ObserveRequest, TapEvent, eos,
        observe_request::{Extract, Match, extract, r#match},
        tap_client::TapClient,
        tap_event::{self, ProxyDirection, http::Event},
    },
};

use super::{
    pair::{echo, pair},
    *,
};

const TAP: &str = "tap.linkerd-viz.serviceaccount.identity.linkerd.cluster.local";

async fn serve(shared: &Arc<Shared>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(crate::tap_server::run(Arc::clone(shared), TAP.parse().unwrap(), listener));
    addr
}

/// A client without TLS, as in the pod itself.
async fn plain(addr: SocketAddr) -> TapClient<tonic::transport::Channel> {
    TapClient::connect(format!("http://{addr}")).await.unwrap()
}

/// A client with this identity.
async fn meshed(mesh: &Mesh, addr: SocketAddr, identity: &str) -> TapClient<tonic::transport::Channel> {
    let config = mesh.credentials(identity).client_config(&testing::OWN.parse().unwrap(), &[]);
    let connect = tower::service_fn(move |_| {
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&config));
        async move {
            let name = rustls::pki_types::ServerName::try_from(testing::OWN).unwrap();
            let stream = connector.connect(name, TcpStream::connect(addr).await?).await?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    TapClient::new(Endpoint::from_static("http://proxy").connect_with_connector(connect).await.unwrap())
}

/// A tap of `limit` requests with their headers.
fn request(limit: u32) -> ObserveRequest {
    let all = r#match::Match::All(r#match::Seq { matches: Vec::new() });
    let headers = extract::http::Extract::Headers(extract::http::Headers {});
    let http = extract::Extract::Http(extract::Http { extract: Some(headers) });
    ObserveRequest {
        limit,
        r#match: Some(Match { r#match: Some(all) }),
        extract: Some(Extract { extract: Some(http) }),
    }
}

async fn collect(mut events: tonic::Streaming<TapEvent>) -> Vec<TapEvent> {
    let mut seen = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        seen.push(event);
    }
    seen
}

fn http(event: &TapEvent) -> &Event {
    let Some(tap_event::Event::Http(http)) = &event.event else { panic!("{event:?}") };
    http.event.as_ref().unwrap()
}

/// Sends a gRPC request whose messages come back; returns the client's address.
async fn grpc(proxy: &Proxy) -> SocketAddr {
    let stream = proxy.connect().await;
    let addr = stream.local_addr().unwrap();
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "5".parse().unwrap());
    let frames = [Frame::data(Bytes::from_static(b"message")), Frame::trailers(trailers)];
    let body = StreamBody::new(tokio_stream::iter(frames.map(Ok::<_, Infallible>)));
    let request = Request::post("http://server.demo/echo.Echo/Chat").header("content-type", "application/grpc");
    let response = sender.send_request(request.body(body).unwrap()).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "message");
    addr
}

#[tokio::test]
async fn a_request_is_seen_by_both_proxies() {
    let app = echo().await;
    let (proxy, server) = pair(app).await;
    let mut client_side = plain(serve(&proxy.shared).await).await;
    let mut server_side = meshed(&proxy.mesh, serve(&server).await, TAP).await;
    let client_side = client_side.observe(request(1)).await.unwrap().into_inner();
    let server_side = server_side.observe(request(1)).await.unwrap().into_inner();
    let client = grpc(&proxy).await;
    // One more, beyond the limit.
    assert_eq!(proxy.get("/more").await.status(), StatusCode::OK);

    let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let (client_side, server_side) = (collect(client_side).await, collect(server_side).await);
    for (events, direction) in [(&client_side, ProxyDirection::Outbound), (&server_side, ProxyDirection::Inbound)] {
        assert_eq!(events.len(), 3, "{events:?}");
        for event in events {
            assert_eq!(event.proxy_direction, i32::from(direction));
            let destination = event.destination.unwrap();
            assert_eq!(SocketAddr::try_from(destination).unwrap(), app, "the application, not its proxy");
        }
        let Event::RequestInit(init) = http(&events[0]) else { panic!("{events:?}") };
        assert_eq!((init.authority.as_str(), init.path.as_str()), ("server.demo", "/echo.Echo/Chat"));
        assert_eq!(init.method, Some(Method::POST.into()));
        let headers = &init.headers.as_ref().unwrap().headers;
        assert!(headers.iter().any(|it| it.name == "content-type" && it.value == b"application/grpc"), "{headers:?}");
        let Event::ResponseInit(init) = http(&events[1]) else { panic!("{events:?}") };
        assert_eq!(init.http_status, 200);
        assert!(init.since_request_init.is_some());
        let Event::ResponseEnd(end) = http(&events[2]) else { panic!("{events:?}") };
        assert_eq!(end.response_bytes, 7);
        assert_eq!(end.eos.unwrap().end, Some(eos::End::GrpcStatusCode(5)));
        assert_eq!(end.trailers.as_ref().unwrap().headers[0].name, "grpc-status");
        let since = |duration: Option<prost_types::Duration>| Duration::try_from(duration.unwrap()).unwrap();
        assert!(since(end.since_response_init) <= since(end.since_request_init));
    }
    let event = &client_side[0];
    assert_eq!(SocketAddr::try_from(event.source.unwrap()).unwrap(), client);
    assert_eq!(event.source_meta.as_ref().unwrap().labels, labels(&[("tls", "loopback")]));
    let tls = labels(&[("tls", "true"), ("server_id", testing::OWN)]);
    assert_eq!(event.destination_meta.as_ref().unwrap().labels, tls);
    let event = &server_side[0];
    let tls = labels(&[("tls", "true"), ("client_id", testing::OWN)]);
    assert_eq!(event.source_meta.as_ref().unwrap().labels, tls);
    let policy = &event.destination_meta.as_ref().unwrap().labels;
    assert_eq!((policy["tls"].as_str(), policy["srv_name"].as_str()), ("loopback", "all-unauthenticated"));
    assert_eq!(event.route_meta.as_ref().unwrap().labels["kind"], "default");
}

#[tokio::test]
async fn a_tap_follows_labels_of_the_endpoint_and_of_a_profiles_route() {
    let service: SocketAddr = "10.1.4.1:80".parse().unwrap();
    let path = PathMatch { regex: "/books.*".to_owned() };
    let route = Route {
        condition: Some(RequestMatch { r#match: Some(request_match::Match::Path(path)) }),
        metrics_labels: [("route".to_owned(), "books".to_owned())].into(),
        ..Route::default()
    };
    let name = "server.demo.svc.cluster.local".to_owned();
    let profile = DestinationProfile { fully_qualified_name: name, routes: vec![route], ..Default::default() };
    let control = Control::default();
    control.profiles.lock().insert(service.to_string(), profile);
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let mut app = endpoint(application("app").await, None);
    app.metric_labels = [("deployment".to_owned(), "web".to_owned())].into();
    control.update(SERVICE, add(vec![app]));
    let proxy = Proxy::start(service, control).await;

    let label = |key: &str, value: &str| r#match::Label { key: key.to_owned(), value: value.to_owned() };
    let matches = [
        r#match::Match::RouteLabel(label("route", "books")),
        r#match::Match::DestinationLabel(label("deployment", "web")),
    ];
    let matches = matches.map(|inner| Match { r#match: Some(inner) }).into();
    let all = Match { r#match: Some(r#match::Match::All(r#match::Seq { matches })) };
    let mut client = plain(serve(&proxy.shared).await).await;
    let wanted = ObserveRequest { r#match: Some(all), extract: None, ..request(1) };
    let events = client.observe(wanted).await.unwrap().into_inner();
    for path in ["/other", "/books/1"] {
        assert_eq!(proxy.get(path).await.status(), StatusCode::OK);
    }
    let events = collect(events).await;
    let Event::RequestInit(init) = http(&events[0]) else { panic!("{events:?}") };
    assert_eq!((init.path.as_str(), &init.headers), ("/books/1", &None));
    let labels = &events[0].destination_meta.as_ref().unwrap().labels;
    assert_eq!((labels["deployment"].as_str(), labels["tls"].as_str()), ("web", "not_provided_by_service_discovery"));
    assert_eq!(events[0].route_meta.as_ref().unwrap().labels, [("route".to_owned(), "books".to_owned())].into());
}

#[tokio::test]
async fn only_the_named_client_may_tap_and_only_what_can_be_read() {
    let (proxy, server) = pair(echo().await).await;
    let addr = serve(&server).await;
    let mut stranger = meshed(&proxy.mesh, addr, "web.demo").await;
    assert_eq!(stranger.observe(request(1)).await.unwrap_err().code(), Code::Unauthenticated);
    let mut client = meshed(&proxy.mesh, addr, TAP).await;
    assert_eq!(client.observe(request(0)).await.unwrap_err().code(), Code::InvalidArgument);
    let empty = ObserveRequest { r#match: None, ..request(1) };
    assert_eq!(client.observe(empty).await.unwrap_err().code(), Code::InvalidArgument);

    // A tap whose client leaves makes room for another.
    let mut open = Vec::new();
    while let Ok(events) = client.observe(request(1)).await {
        open.push(events);
    }
    assert!(!open.is_empty());
    assert_eq!(client.observe(request(1)).await.unwrap_err().code(), Code::ResourceExhausted);
    drop(open.pop());
    let again = async {
        while client.observe(request(1)).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), again).await.expect("the closed tap makes room");
}

#[tokio::test]
async fn a_request_that_no_endpoint_gets_is_seen_with_its_end() {
    let addr = unused_addr();
    let proxy = Proxy::start(addr, Control::default()).await;
    let mut client = plain(serve(&proxy.shared).await).await;
    let events = client.observe(request(1)).await.unwrap().into_inner();
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
    let events = collect(events).await;
    let [begin, end] = &events[..] else { panic!("{events:?}") };
    assert!(matches!(http(begin), Event::RequestInit(_)));
    let Event::ResponseEnd(end) = http(end) else { panic!("{end:?}") };
    assert_eq!(end.eos.unwrap().end, Some(eos::End::ResetErrorCode(7)));
}

#[tokio::test]
async fn a_tap_ends_with_the_drain() {
    let mut proxy = Proxy::start(unused_addr(), Control::default()).await;
    let mut client = plain(serve(&proxy.shared).await).await;
    let events = client.observe(request(1)).await.unwrap().into_inner();
    let drained = proxy.drain.take().unwrap().drain(Duration::from_secs(10));
    let (drained, events) = tokio::join!(drained, collect(events));
    assert!(drained, "an open tap does not hold up the drain");
    assert!(events.is_empty());
}
