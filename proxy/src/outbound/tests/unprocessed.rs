//! Requests that an endpoint refuses before it has processed them.

use std::sync::atomic::AtomicUsize;

use tokio::task::JoinSet;
use weft_proto::linkerd::outbound::OutboundPolicy;

use super::{
    resilience::{Act, Script, changed, ejecting, metric, retry},
    *,
};
use crate::http::frames::frame;

type Client = conn::http2::SendRequest<Full<Bytes>>;
type Answer = Response<Incoming>;

#[tokio::test]
async fn a_stream_that_the_endpoint_refuses_is_sent_again_with_its_body() {
    let (proxy, peer, _) = meshed().await;
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let mut server = ::h2::server::handshake(stream).await.unwrap();
        let mut refused = false;
        while let Some(accepted) = server.accept().await {
            let (request, mut respond) = accepted.unwrap();
            if !std::mem::replace(&mut refused, true) {
                respond.send_reset(::h2::Reason::REFUSED_STREAM);
                continue;
            }
            tokio::spawn(async move {
                let mut body = request.into_body();
                let mut received = Vec::new();
                while let Some(chunk) = body.data().await {
                    let chunk = chunk.unwrap();
                    body.flow_control().release_capacity(chunk.len()).unwrap();
                    received.extend_from_slice(&chunk);
                }
                let mut stream = respond.send_response(Response::new(()), false).unwrap();
                stream.send_data(received.into(), true).unwrap();
            });
        }
    });
    let request = Request::post("/do").header("host", "server.demo").body(Full::new(Bytes::from_static(b"once more")));
    let request = request.unwrap();
    let response = proxy.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(text(response).await, "once more");
}

/// An endpoint of HTTP/2 without TLS that refuses every stream; returns how many there were.
async fn refusing() -> (SocketAddr, Arc<AtomicUsize>) {
    let refused = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&refused);
    let addr = serve_each(move |stream| {
        let refused = Arc::clone(&counted);
        async move {
            let mut server = ::h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = server.accept().await {
                refused.fetch_add(1, Ordering::Relaxed);
                respond.send_reset(::h2::Reason::REFUSED_STREAM);
            }
        }
    });
    (addr.await, refused)
}

fn over_http2() -> Request<Full<Bytes>> {
    Request::get("http://server.demo/").body(Full::default()).unwrap()
}

/// A proxy and its client; the service's only endpoint, at the returned address, has three requests to answer, so that
/// an endpoint added now gets the next one.
async fn before_a_busy_endpoint(policy: OutboundPolicy) -> (Proxy, Client, JoinSet<hyper::Result<Answer>>, SocketAddr) {
    let busy = Script::new([Act::Late(Duration::from_secs(3600), 200); 3]);
    let addr = busy.listen().await;
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy);
    control.update(SERVICE, add(vec![endpoint(addr, None)]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http2().await;
    let mut waiting = JoinSet::new();
    for _ in 0..3 {
        waiting.spawn(sender.send_request(over_http2()));
    }
    crate::testing::eventually("three requests wait", || busy.received().len() == 3).await;
    (proxy, sender, waiting, addr)
}

#[tokio::test]
async fn an_endpoint_that_refuses_every_stream_is_ejected_and_the_other_one_answers() {
    let (bad, refused) = refusing().await;
    let (proxy, sender, _waiting, _) = before_a_busy_endpoint(ejecting(policy(SERVICE, vec![]), 3)).await;
    proxy.control.update(SERVICE, add(vec![endpoint(bad, None)]));
    // None goes once more to the one that has just refused it.
    let answered =
        async || assert_eq!(sender.clone().send_request(over_http2()).await.unwrap().status(), StatusCode::OK);
    settled(async || {
        answered().await;
        let refused = refused.load(Ordering::Relaxed);
        if refused == 3 { Ok(()) } else { Err(format!("{refused} requests are refused")) }
    })
    .await;
    assert_eq!(metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\""), 1);
    for _ in 0..10 {
        answered().await;
    }
    assert_eq!(refused.load(Ordering::Relaxed), 3);
    let failures = r#"error="h2(REFUSED_STREAM)"} 3"#;
    assert!(proxy.scrape().contains(failures), "{}", proxy.scrape());
}

#[tokio::test]
async fn a_burst_to_a_server_outside_the_mesh_keeps_to_its_limit_of_streams() {
    for limit in [100, 25, 1] {
        burst_to_a_server_with(limit).await;
    }
}

/// Requests that a server gets before it has announced its limit: all are answered, and none counts against it.
async fn burst_to_a_server_with(limit: u32) {
    const BURST: usize = 200;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control = Control::default();
    let service = "10.1.2.2:80".parse().unwrap();
    control.policies.lock().insert(service, ejecting(policy(SERVICE, vec![]), 7));
    control.update(SERVICE, add(vec![endpoint(listener.local_addr().unwrap(), None)]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http2().await;
    let mut answers = JoinSet::new();
    for _ in 0..BURST {
        answers.spawn(sender.send_request(over_http2()));
    }
    // The kernel has all of them before the server announces its limit.
    eventually("all are sent", || metric(&proxy, "request_total") == BURST as u64).await;
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service =
                service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) });
            let mut server = http2::Builder::new(TokioExecutor::new());
            server.max_concurrent_streams(limit);
            tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
        }
    });
    let answers = tokio::time::timeout(Duration::from_secs(60), answers.join_all()).await.expect("some hang");
    let are_all_answered = answers.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.status() == 200));
    assert!(are_all_answered, "limit {limit}: {answers:?}");
    assert_eq!(metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\""), 0, "limit {limit}");
    assert_eq!(metric(&proxy, "request_total"), BURST as u64, "limit {limit}");
}

#[tokio::test]
async fn a_policy_repeats_what_an_endpoint_refuses_after_its_pause() {
    let (bad, refused) = refusing().await;
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, changed(|rule| rule.retry = Some(retry(2))));
    control.update(SERVICE, add(vec![endpoint(bad, None)]));
    let proxy = Proxy::start(service, control).await;
    let error = proxy.http2().await.send_request(over_http2()).await.unwrap_err();
    let reason = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<::h2::Error>()?.reason());
    assert_eq!(reason, Some(::h2::Reason::REFUSED_STREAM), "{error:?}");
    // At once three times more for each of the policy's three attempts.
    assert_eq!(refused.load(Ordering::Relaxed), 12);
    assert_eq!(metric(&proxy, "outbound_http_route_retry_limit_exceeded_total"), 1);
    assert_eq!(metric(&proxy, "request_total"), 12);
}

/// An endpoint of HTTP/2 that says goodbye to every connection before it has processed a request.
async fn leaving() -> SocketAddr {
    serve_each(|mut stream| async move {
        // GOAWAY without an error, and no stream before it.
        let goodbye = [frame(4, 0, 0, &[]), frame(7, 0, 0, &[0; 8])].concat();
        stream.read_exact(&mut [0; 24]).await.unwrap();
        stream.write_all(&goodbye).await.unwrap();
        while matches!(stream.read(&mut [0; 1024]).await, Ok(read) if read > 0) {}
    })
    .await
}

#[tokio::test]
async fn a_request_that_goes_to_another_endpoint_is_counted_where_it_is_answered() {
    let leaving = leaving().await;
    let (proxy, mut sender, _waiting, answering) = before_a_busy_endpoint(policy(SERVICE, vec![])).await;
    let count = |name: &str, addr: SocketAddr| {
        let (of, text) = (format!("target_addr=\"{addr}\""), proxy.scrape());
        let lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(&of));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum::<u64>()
    };
    proxy.control.update(SERVICE, add(vec![endpoint(leaving, None)]));
    let mut answers = 0;
    // Until the proxy knows the other endpoint, which gets the next request.
    while count("request_total", leaving) == 0 {
        assert!(answers < 10_000, "the other endpoint gets none");
        let response = sender.send_request(over_http2()).await.unwrap();
        assert_eq!((response.status(), &*text(response).await), (StatusCode::OK, "answer"));
        answers += 1;
    }
    assert_eq!((count("request_total", answering), count("response_total", answering)), (3 + answers, answers));
    assert_eq!((count("request_total", leaving), count("response_total", leaving)), (1, 0), "it was sent there, too");
}
