//! Informational responses (1xx): clients get them before the response, in order, and not without bound.

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    super::{
        raw::{RawApplication, read_head},
        *,
    },
    ways,
};

const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n";
const FINAL: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfinal";

/// What one client of HTTP/2 got: statuses and `link`, in order.
type Heads = Vec<(u16, Option<String>)>;

/// Sends a request over HTTP/2 and takes all that comes.
async fn http2(proxy: &Proxy) -> (Heads, Bytes) {
    let (mut sender, connection) = ::h2::client::handshake(proxy.connect().await).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://server.demo/").body(()).unwrap();
    let (mut response, _) = sender.send_request(request, true).unwrap();
    let mut heads = Vec::new();
    let mut head = |head: &Response<()>| {
        let link = head.headers().get("link").map(|link| link.to_str().unwrap().to_owned());
        heads.push((head.status().as_u16(), link));
    };
    while let Some(informational) = std::future::poll_fn(|cx| response.poll_informational(cx)).await {
        head(&informational.unwrap());
    }
    let (last, mut body) = response.await.unwrap().into_parts();
    head(&Response::from_parts(last, ()));
    (heads, body.data().await.unwrap().unwrap())
}

/// An HTTP/2 application that sends these informational statuses before its response.
async fn informing(statuses: &'static [u16], link: &'static str) -> SocketAddr {
    serve_each(move |stream| async move {
        let mut connection = ::h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            for status in statuses {
                let head = Response::builder().status(*status).header("link", link).header("l5d-client-id", "forged");
                respond.send_informational(head.body(()).unwrap()).unwrap();
            }
            let response = Response::builder().header("link", "</last>").body(()).unwrap();
            let mut body = respond.send_response(response, false).unwrap();
            body.send_data(Bytes::from_static(b"final"), true).unwrap();
        }
    })
    .await
}

#[tokio::test]
async fn hints_arrive_while_the_response_is_awaited() {
    let has_hints = Arc::new(Notify::new());
    let answers = Arc::clone(&has_hints);
    let app = serve_each(move |mut stream| {
        let has_hints = Arc::clone(&answers);
        async move {
            while read_head(&mut stream).await.is_some() {
                stream.write_all(HINTS.as_bytes()).await.unwrap();
                has_hints.notified().await;
                stream.write_all(FINAL.as_bytes()).await.unwrap();
            }
        }
    })
    .await;
    for (way, proxy) in ways(app).await {
        let mut client = proxy.connect().await;
        for _ in 0..2 {
            client.write_all(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
            let mut received = Vec::new();
            while received != HINTS.as_bytes() {
                assert!(HINTS.as_bytes().starts_with(&received), "{way}: {}", received.escape_ascii());
                assert!(client.read_buf(&mut received).await.unwrap() > 0, "{way}: closed");
            }
            has_hints.notify_one();
            let mut received = Vec::new();
            while !received.ends_with(b"final") {
                assert!(client.read_buf(&mut received).await.unwrap() > 0, "{way}: closed");
            }
            assert!(received.starts_with(b"HTTP/1.1 200 OK\r\n"), "{way}: {}", received.escape_ascii());
        }
    }
}

#[tokio::test]
async fn hints_and_the_response_that_come_together_arrive_in_order() {
    let app = RawApplication::start(&[&*format!("{}{FINAL}", HINTS.repeat(3)).leak()]).await;
    for (way, proxy) in ways(app.addr).await {
        // Both requests at once: the hints of the second come after the response to the first.
        let requests = "GET / HTTP/1.1\r\nhost: server.demo\r\n\r\nGET / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n";
        let received = proxy.exchange(requests.as_bytes()).await;
        let statuses: Vec<_> = received.split("HTTP/1.1 ").skip(1).map(|head| &head[..3]).collect();
        assert_eq!(statuses, ["103", "103", "103", "200", "103", "103", "103", "200"], "{way}: {received}");
        assert_eq!(received.matches("link: </a.css>\r\n").count(), 6, "{way}: {received}");
    }
}

#[tokio::test]
async fn clients_of_http_1_0_get_none() {
    let app = RawApplication::start(&[&*format!("{HINTS}{FINAL}").leak()]).await;
    for (way, proxy) in ways(app.addr).await {
        let received = proxy.exchange(b"GET / HTTP/1.0\r\nhost: server.demo\r\n\r\n").await;
        assert!(received.contains(" 200 OK\r\n") && !received.contains("103"), "{way}: {received}");
    }
}

#[tokio::test]
async fn clients_of_http2_get_hints_and_100_without_anything_of_the_mesh() {
    let app = informing(&[100, 102, 103], "</a.css>").await;
    for (way, proxy) in ways(app).await {
        let (heads, body) = http2(&proxy).await;
        let link = |link: &str| Some(link.to_owned());
        let expected =
            [(100, link("</a.css>")), (102, link("</a.css>")), (103, link("</a.css>")), (200, link("</last>"))];
        assert_eq!((&heads[..], &body[..]), (&expected[..], &b"final"[..]), "{way}");
    }
}

#[tokio::test]
async fn of_many_a_few_are_passed_on_and_the_response_is_whole() {
    let app = informing(&[103; 1000], "</a.css>").await;
    for (way, proxy) in ways(app).await {
        let (heads, body) = http2(&proxy).await;
        assert_eq!((heads.len(), &body[..]), (17, &b"final"[..]), "{way}");
        assert_eq!(heads.last().unwrap().0, 200, "{way}");
    }
    let app = RawApplication::start(&[&*format!("{}{FINAL}", HINTS.repeat(1000)).leak()]).await;
    for (way, proxy) in ways(app.addr).await {
        let received = proxy.exchange(b"GET / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n").await;
        assert_eq!(received.matches("103 Early Hints").count(), 16, "{way}");
        assert!(received.ends_with("\r\n\r\nfinal"), "{way}: {received}");
    }
}

#[tokio::test]
async fn a_client_of_http2_may_wait_for_its_servers_100() {
    let bodies = Arc::<Mutex<Vec<Bytes>>>::default();
    let received = Arc::clone(&bodies);
    let app = serve_each(move |stream| {
        let bodies = Arc::clone(&received);
        async move {
            let mut connection = ::h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let bodies = Arc::clone(&bodies);
                tokio::spawn(async move {
                    assert_eq!(request.headers()["expect"], "100-continue");
                    respond.send_informational(Response::builder().status(100).body(()).unwrap()).unwrap();
                    let body = request.into_body().data().await.unwrap().unwrap();
                    bodies.lock().push(body);
                    respond.send_response(Response::new(()), true).unwrap();
                });
            }
        }
    })
    .await;
    for (way, proxy) in ways(app).await {
        let (mut sender, connection) = ::h2::client::handshake(proxy.connect().await).await.unwrap();
        tokio::spawn(connection);
        let request = Request::post("http://server.demo/").header("expect", "100-continue").body(()).unwrap();
        let (mut response, mut body) = sender.send_request(request, false).unwrap();
        let informational = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!(informational.status(), StatusCode::CONTINUE, "{way}");
        body.send_data(Bytes::from_static(b"wanted"), true).unwrap();
        assert_eq!(response.await.unwrap().status(), StatusCode::OK, "{way}");
        assert_eq!(bodies.lock().pop().unwrap(), "wanted", "{way}");
    }
}
