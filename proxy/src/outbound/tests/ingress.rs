//! Ingress mode: requests that name their destination.

use super::{pair::echo, *};
use crate::{destination::Name, outbound::worker::MAX_NAMES};

const WEB: &str = "web.demo.svc.cluster.local:80";
const API: &str = "api.demo.svc.cluster.local:8080";

fn ingress(config: &mut Config) {
    config.outbound.ingress_mode = true;
    config.outbound.detect_timeout = Duration::from_millis(200);
}

fn naming(name: &str) -> Request<Full<Bytes>> {
    let mut request = get("/");
    request.headers_mut().append("l5d-dst-override", name.parse().unwrap());
    request
}

/// A service with a policy and these endpoints.
fn serve(control: &Control, name: &str, addr: SocketAddr) {
    control.named.lock().insert(name.to_owned(), policy(name, vec![]));
    control.update(name, add(vec![endpoint(addr, None)]));
}

#[tokio::test]
async fn each_request_goes_where_its_header_says() {
    let control = Control::default();
    serve(&control, WEB, application("web").await);
    serve(&control, API, application("api").await);
    let pod = application("pod").await;
    let proxy = Proxy::start_with(pod, control, ingress, true).await;
    let mut sender = proxy.http1().await;
    for (request, expected) in [
        (naming("web.demo.svc.cluster.local"), "web"),
        (naming("Web.demo.svc.cluster.local.:80"), "web"),
        (naming(API), "api"),
        (get("/"), "pod"),
        (naming(WEB), "web"),
    ] {
        sender.ready().await.unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(text(response).await, format!("{expected} / HTTP/1.1"));
    }
    assert_eq!(proxy.worker.known_names(), 2);
    let metrics = proxy.scrape();
    let of_pod = format!(r#"target_addr="{pod}""#);
    let tls = |line: &&str| line.starts_with("request_total") && line.contains(&of_pod);
    let line = metrics.lines().find(tls).expect("the request is counted");
    assert!(line.contains(r#"no_tls_reason="ingress_without_override""#), "{line}");
    assert!(metrics.contains(r#"no_tls_reason="not_provided_by_service_discovery""#), "{metrics}");
}

#[tokio::test]
async fn the_named_service_gets_mtls_and_not_the_header() {
    let control = Control::default();
    control.named.lock().insert(WEB.to_owned(), policy(SERVICE, vec![]));
    let proxy = Proxy::start_with(unused_addr(), control, ingress, true).await;
    let (peer, port) = Peer::listen(&proxy.mesh.credentials(SERVER)).await;
    let workload: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    proxy.control.update(SERVICE, add(vec![endpoint(workload, Some((SERVER, port)))]));
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let service = service_fn(|request: Request<Incoming>| async move {
            let leaked = request.headers().contains_key("l5d-dst-override");
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(format!("leaked={leaked}")))))
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await.unwrap();
    });
    let response = proxy.http1().await.send_request(naming(WEB)).await.unwrap();
    assert_eq!(text(response).await, "leaked=false");
}

#[tokio::test]
async fn a_malformed_name_is_refused_and_an_unknown_one_has_no_destination() {
    let pod = application("pod").await;
    let proxy = Proxy::start_with(pod, Control::default(), ingress, true).await;
    let status = async |request| proxy.http1().await.send_request(request).await.unwrap().status();
    assert_eq!(status(naming("10.0.0.1:80")).await, StatusCode::BAD_REQUEST);
    let mut two = naming(WEB);
    two.headers_mut().append("l5d-dst-override", API.parse().unwrap());
    assert_eq!(status(two).await, StatusCode::BAD_REQUEST);
    assert_eq!(status(naming(WEB)).await, StatusCode::BAD_GATEWAY);
    assert_eq!(status(get("/")).await, StatusCode::OK);
}

#[tokio::test]
async fn a_control_plane_that_says_nothing_about_a_destination_is_a_timeout() {
    let control = Control::default();
    control.instead(Call::Policy, [Instead::Silence; 100]);
    let soon = |config: &mut Config| {
        ingress(config);
        config.outbound.discovery_timeout = Duration::from_millis(100);
    };
    let proxy = Proxy::start_with(unused_addr(), control, soon, true).await;
    for request in [naming(WEB), get("/")] {
        let response = proxy.http1().await.send_request(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(response.headers()["connection"], "close");
    }
    let counted = r#"outbound_http_errors_total{error="discovery timeout"} 2"#;
    assert!(proxy.scrape().contains(counted), "{}", proxy.scrape());
    // Of no parent, because requests choose theirs.
    let accepted = r#"outbound_tcp_protocol_connections_total{protocol="detect",parent_group="","#;
    let is_counted = |line: &str| line.starts_with(accepted) && line.ends_with("} 2");
    assert!(proxy.scrape().lines().any(is_counted), "{}", proxy.scrape());
}

#[tokio::test]
async fn a_name_that_becomes_known_is_served() {
    let proxy = Proxy::start_with(unused_addr(), Control::default(), ingress, true).await;
    assert_eq!(proxy.http1().await.send_request(naming(WEB)).await.unwrap().status(), StatusCode::BAD_GATEWAY);
    serve(&proxy.control, WEB, application("web").await);
    settled(async || {
        let status = proxy.http1().await.send_request(naming(WEB)).await.unwrap().status();
        if status == StatusCode::OK { Ok(()) } else { Err(format!("still {status}")) }
    })
    .await;
}

#[tokio::test]
async fn a_profile_is_enough_to_know_a_name() {
    let control = Control::default();
    let profile =
        DestinationProfile { fully_qualified_name: "api.demo.svc.cluster.local".into(), ..Default::default() };
    control.profiles.lock().insert(API.to_owned(), profile);
    control.update(API, add(vec![endpoint(application("api").await, None)]));
    let proxy = Proxy::start_with(unused_addr(), control, ingress, true).await;
    assert_eq!(text(proxy.http1().await.send_request(naming(API)).await.unwrap()).await, "api / HTTP/1.1");
}

#[tokio::test]
async fn what_is_not_http_goes_to_its_original_destination() {
    let addr = serve_each(|mut stream| async move {
        stream.write_all(b"220 ready\r\n").await.unwrap();
        let (mut read, mut write) = stream.into_split();
        tokio::io::copy(&mut read, &mut write).await
    })
    .await;
    let proxy = Proxy::start_with(addr, Control::default(), ingress, true).await;
    for first in [&b"neither HTTP nor short\n"[..], b""] {
        let mut client = proxy.connect().await;
        client.write_all(first).await.unwrap();
        let mut banner = [0; 11];
        client.read_exact(&mut banner).await.unwrap();
        assert_eq!(&banner, b"220 ready\r\n");
        let mut echo = vec![0; first.len()];
        client.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, first);
    }
}

#[tokio::test]
async fn another_proxy_does_not_look_at_the_header() {
    let control = Control::default();
    serve(&control, WEB, application("web").await);
    let proxy = Proxy::start(application("pod").await, control).await;
    let response = proxy.http1().await.send_request(naming(WEB)).await.unwrap();
    assert_eq!(text(response).await, "pod / HTTP/1.1");
}

#[tokio::test]
async fn names_are_bounded_and_forgotten() {
    let proxy = Proxy::start_with(unused_addr(), Control::default(), ingress, true).await;
    let name = |index: usize| Name::parse(&format!("web-{index}.demo:80"), 80.try_into().unwrap()).unwrap();
    for index in 0..MAX_NAMES + 10 {
        assert!(proxy.worker.named(&name(index)).is_some());
    }
    assert_eq!(proxy.worker.known_names(), MAX_NAMES);
    let mut used: Vec<_> = (0..MAX_NAMES).map(|index| proxy.worker.named(&name(index)).unwrap()).collect();
    assert!(proxy.worker.named(&name(MAX_NAMES)).is_none(), "all names are in use");
    used.pop();
    assert!(proxy.worker.named(&name(MAX_NAMES)).is_some());
    let idle = proxy.shared.config.outbound.discovery_idle_timeout;
    proxy.worker.sweep(Instant::now() + idle);
    assert_eq!(proxy.worker.known_names(), used.len(), "those in use stay");
}

#[tokio::test]
async fn addresses_are_forgotten_after_the_idle_time() {
    let proxy = Proxy::start(unused_addr(), Control::default()).await;
    let idle = proxy.shared.config.outbound.discovery_idle_timeout;
    assert_eq!(idle, Duration::from_secs(5));
    let addr = |last| SocketAddr::from(([10, 1, 5, last], 80));
    let (unused, in_use) = (Arc::downgrade(&proxy.worker.target(addr(1))), proxy.worker.target(addr(2)));
    proxy.worker.sweep(Instant::now() + idle - Duration::from_secs(1));
    assert!(unused.upgrade().is_some());
    proxy.worker.sweep(Instant::now() + idle);
    assert!(unused.upgrade().is_none(), "nothing uses it");
    assert!(Arc::ptr_eq(&in_use, &proxy.worker.target(addr(2))), "what is in use stays");
}

#[tokio::test]
async fn a_tunnel_does_not_keep_its_destination_in_use() {
    let app = echo().await;
    let proxy = Proxy::start(app, Control::default()).await;
    let mut request = get("/ws");
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let mut response = proxy.http1().await.send_request(request).await.unwrap();
    let mut tunnel = TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
    let target = Arc::downgrade(&proxy.worker.target(app));
    let idle = proxy.shared.config.outbound.discovery_idle_timeout;
    let mut now = Instant::now();
    eventually("the destination is forgotten", || {
        now += idle;
        proxy.worker.sweep(now);
        target.upgrade().is_none()
    })
    .await;
    tunnel.write_all(b"ping").await.unwrap();
    let mut answer = [0; 4];
    tunnel.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ping");
}
