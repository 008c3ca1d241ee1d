//! HTTP/1 as it was sent: bodies and their absence, responses that end with their connection, connections that are used
//! once.
//!
//! Everything is looked at as bytes, with one proxy and through two.

mod informational;

use super::{
    pair::{echo, in_front_of},
    raw::{RawApplication, read_head},
    resilience::Script,
    *,
};

/// The application's proxies, one and two.
pub(super) async fn ways(app: SocketAddr) -> [(&'static str, Proxy); 2] {
    [("one proxy", Proxy::start(app, Control::default()).await), ("two proxies", in_front_of(app).await)]
}

fn has_header(head: &str, name: &str) -> bool {
    head.lines().any(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))
}

#[tokio::test]
async fn requests_without_a_body_gain_none() {
    for (request, content_length) in [
        ("GET /plain HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n", None),
        ("DELETE /plain HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n", None),
        ("POST /plain HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n", None),
        ("POST /plain HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", Some("0")),
        ("GET /plain HTTP/1.0\r\nhost: server.demo\r\n\r\n", None),
    ] {
        let app = RawApplication::start(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]).await;
        for (way, proxy) in ways(app.addr).await {
            let answer = proxy.exchange(request.as_bytes()).await;
            assert!(answer.contains(" 200 ") && answer.ends_with("\r\n\r\nok"), "{way}: {answer}");
            let (_, head) = app.received().pop().unwrap();
            assert!(!has_header(&head, "transfer-encoding"), "{way}: {head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            assert_eq!(length, content_length, "{way}: {head}");
        }
    }
}

#[tokio::test]
async fn a_body_in_chunks_arrives_whatever_the_method() {
    let app = echo().await;
    for (way, proxy) in ways(app).await {
        for method in ["GET", "POST"] {
            let head = "/search HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\ntransfer-encoding: chunked\r\n";
            let request = format!("{method} {head}\r\n4\r\nbody\r\n0\r\n\r\n");
            let answer = proxy.exchange(request.as_bytes()).await;
            assert!(answer.contains(" 200 ") && answer.ends_with("\r\n4\r\nbody\r\n0\r\n\r\n"), "{way}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_read_is_a_bad_request() {
    // It answers when it has read the body.
    let app = Script::default().listen().await;
    for (way, proxy) in ways(app).await {
        for body in ["zz\r\nbody\r\n0\r\n\r\n", "4\r\nbodyless\r\n0\r\n\r\n", "ffffffffffffffffff\r\n"] {
            let head = "POST / HTTP/1.1\r\nhost: server.demo\r\ntransfer-encoding: chunked\r\n";
            let answer = proxy.exchange(format!("{head}\r\n{body}").as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{way}, {body}: {answer}");
        }
    }
}

#[tokio::test]
async fn responses_without_a_body_gain_none() {
    for (method, answer) in [
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", "HTTP/1.1 304 Not Modified\r\netag: \"x\"\r\n\r\n"),
        ("GET", "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
        ("HEAD", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        ("GET", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ] {
        let app = RawApplication::start(&[answer]).await;
        for (way, proxy) in ways(app.addr).await {
            let request = format!("{method} / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n");
            let received = proxy.exchange(request.as_bytes()).await;
            let (status, rest) = received.split_once("\r\n").unwrap();
            assert!(answer.starts_with(status), "{way}: {received}");
            assert!(rest.ends_with("\r\n\r\n") && rest.matches("\r\n\r\n").count() == 1, "{way}: {received}");
            assert!(!has_header(&received, "transfer-encoding"), "{way}: {received}");
            // RFC 9110 section 8.6 lets a 304 say the length of what it leaves out; nobody waits for that many bytes.
            let has_length = has_header(answer, "content-length") && !answer.contains("304");
            assert_eq!(has_header(&received, "content-length"), has_length, "{way}: {received}");
        }
    }
}

#[tokio::test]
async fn a_response_that_ends_with_its_connection_arrives_whole() {
    for answer in ["HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it", "HTTP/1.0 200 OK\r\n\r\nall of it"] {
        let app = RawApplication::start(&[answer]).await;
        for (way, proxy) in ways(app.addr).await {
            for _ in 0..2 {
                let response = proxy.get("/").await;
                assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, "all of it"), "{way}");
            }
            // A client of HTTP/1.0 knows no chunks: the end is its connection's, too.
            let old = proxy.exchange(b"GET / HTTP/1.0\r\nhost: server.demo\r\n\r\n").await;
            assert!(old.ends_with("\r\n\r\nall of it") && !has_header(&old, "transfer-encoding"), "{way}: {old}");
        }
    }
}

#[tokio::test]
async fn requests_of_http10_and_without_a_host_have_connections_of_their_own() {
    let app = RawApplication::start(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]).await;
    let proxy = Proxy::start(app.addr, Control::default()).await;
    for request in [
        "GET /kept HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n",
        "GET /kept HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n",
        "GET /own HTTP/1.0\r\nhost: server.demo\r\n\r\n",
        "GET /own HTTP/1.1\r\nconnection: close\r\n\r\n",
        "GET /kept HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n",
    ] {
        assert!(proxy.exchange(request.as_bytes()).await.contains(" 200 "), "{request}");
    }
    let connections: Vec<_> = app.received().iter().map(|(connection, _)| *connection).collect();
    assert_eq!(connections, [1, 1, 2, 3, 1]);
}

#[tokio::test]
async fn an_answer_to_connect_says_nothing_about_a_body() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-kept: 1\r\n\r\n",
    ] {
        let app = RawApplication::start(&[answer]).await;
        for (way, proxy) in ways(app.addr).await {
            let mut client = proxy.connect().await;
            client.write_all(b"CONNECT server.demo:443 HTTP/1.1\r\nhost: server.demo:443\r\n\r\n").await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                assert!(client.read_buf(&mut head).await.unwrap() > 0, "{way}: the tunnel ends");
            }
            let head = String::from_utf8(head).unwrap();
            assert!(head.starts_with("HTTP/1.1 200 "), "{way}: {head}");
            assert!(!has_header(&head, "content-length") && !has_header(&head, "transfer-encoding"), "{way}: {head}");
        }
    }
}

#[tokio::test]
async fn a_body_that_waits_for_100_continue_is_asked_for_only_if_it_is_wanted() {
    let refusal = failing(403, "refused");
    // It answers when it has read the body.
    let app = Script::default().listen().await;
    for (filters, expected) in [(vec![refusal], "HTTP/1.1 403 Forbidden\r\n"), (vec![], "HTTP/1.1 100 Continue\r\n")] {
        let control = Control::default();
        let service = "10.1.7.1:80".parse().unwrap();
        control.policies.lock().insert(service, policy(SERVICE, filters));
        control.update(SERVICE, add(vec![endpoint(app, None)]));
        let proxy = Proxy::start(service, control).await;
        let mut client = proxy.connect().await;
        let head = b"POST / HTTP/1.1\r\nhost: server.demo\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n";
        client.write_all(head).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            assert!(client.read_buf(&mut answer).await.unwrap() > 0, "closed after {}", answer.escape_ascii());
        }
        assert!(answer.starts_with(expected.as_bytes()), "{}", answer.escape_ascii());
    }
}

#[tokio::test]
async fn a_body_with_a_transfer_coding_arrives_with_its_coding() {
    let app = RawApplication::start(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]).await;
    for (way, proxy) in ways(app.addr).await {
        let head = "POST / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\ntransfer-encoding: gzip, chunked\r\n";
        let answer = proxy.exchange(format!("{head}\r\n0\r\n\r\n").as_bytes()).await;
        assert!(answer.contains(" 200 "), "{way}: {answer}");
        // It takes the chunks for more requests.
        let head = app.received().into_iter().map(|(_, head)| head).rfind(|head| head.starts_with("POST")).unwrap();
        assert!(head.to_ascii_lowercase().contains("transfer-encoding: gzip, chunked\r\n"), "{way}: {head}");
    }
}

#[tokio::test]
async fn a_response_with_a_length_beside_its_chunks_has_its_chunks() {
    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
    let app = RawApplication::start(&[answer]).await;
    for (way, proxy) in ways(app.addr).await {
        let answer = proxy.exchange(b"GET / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n1\r\nx\r\n0\r\n\r\n"), "{way}: {answer}");
        assert!(!has_header(&answer, "content-length"), "{way}: {answer}");
    }
}

#[tokio::test]
async fn an_unsolicited_switch_of_protocols_is_a_bad_gateway() {
    let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let app = RawApplication::start(&[answer]).await;
    for (way, proxy) in ways(app.addr).await {
        assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY, "{way}");
    }
}

#[tokio::test]
async fn trailers_have_nothing_of_the_mesh() {
    let app = serve_each(|stream| async move {
        let service = service_fn(|request: Request<Incoming>| async move {
            let mut trailers = request.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
            let received = trailers.keys().map(HeaderName::as_str).collect::<Vec<_>>().join(" ");
            trailers.insert("x-received", received.parse().unwrap());
            trailers.insert("l5d-proxy-error", "forged".parse().unwrap());
            let frames = futures::stream::iter([Ok::<_, Infallible>(Frame::<Bytes>::trailers(trailers))]);
            Ok::<_, Infallible>(Response::new(StreamBody::new(frames)))
        });
        let _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
    })
    .await;
    for (way, proxy) in ways(app).await {
        let stream = TokioIo::new(proxy.connect().await);
        let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        let trailers = ["x-own", "l5d-client-id", "l5d_client_id"].map(HeaderName::from_static);
        let trailers = trailers.map(|name| (name, HeaderValue::from_static("1"))).into_iter().collect();
        let frames = [Frame::data(Bytes::from_static(b"body")), Frame::trailers(trailers)];
        let body = StreamBody::new(futures::stream::iter(frames.map(Ok::<_, Infallible>)));
        let request = Request::post("http://server.demo/").body(body).unwrap();
        let answer = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
        let answer = answer.trailers().unwrap();
        assert_eq!((&answer["x-received"], answer.len()), (&HeaderValue::from_static("x-own"), 2), "{way}: {answer:?}");
    }
}

#[tokio::test]
async fn trailers_of_http1_pass_where_they_are_announced_and_wanted() {
    let announced =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n4\r\nbody\r\n0\r\nx-sum: 7\r\n\r\n";
    let silent = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\nx-sum: 7\r\n\r\n";
    for (answer, te, passes) in
        [(announced, "te: trailers\r\n", true), (announced, "", false), (silent, "te: trailers\r\n", false)]
    {
        let app = RawApplication::start(&[answer]).await;
        for (way, proxy) in ways(app.addr).await {
            let mut client = proxy.connect().await;
            let request = format!("GET / HTTP/1.1\r\nhost: server.demo\r\n{te}connection: close\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            let mut received = String::new();
            client.read_to_string(&mut received).await.unwrap();
            assert!(received.contains("\r\nbody\r\n0\r\n"), "{way}: {received}");
            assert_eq!(received.contains("\r\nx-sum: 7\r\n"), passes, "{way}, {te}: {received}");
        }
    }
}

/// An application that answers when it has read the head of a request, and closes without reading the body.
async fn answers_early(body: usize) -> SocketAddr {
    serve_each(move |mut stream| async move {
        if read_head(&mut stream).await.is_none() {
            return;
        }
        let answer = format!("HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: {body}\r\n\r\n");
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.write_all(&vec![b'x'; body]).await;
    })
    .await
}

#[tokio::test]
async fn an_answer_before_the_end_of_an_upload_arrives_whole_although_the_server_closes() {
    const UPLOAD: usize = 10 << 20;
    const ANSWER: usize = 64 * 1024;
    let app = answers_early(ANSWER).await;
    for (way, proxy) in ways(app).await {
        for attempt in 0..10 {
            let mut client = proxy.connect().await;
            let (mut read, mut write) = client.split();
            let upload = async {
                let head = format!("POST /upload HTTP/1.1\r\nhost: server.demo\r\ncontent-length: {UPLOAD}\r\n\r\n");
                let _ = write.write_all(&[head.as_bytes(), &vec![b'u'; UPLOAD]].concat()).await;
                std::future::pending::<()>().await
            };
            let mut answer = Vec::new();
            tokio::select! {
                // The proxy's end may be a reset, too.
                _ = read.read_to_end(&mut answer) => {}
                () = upload => {}
            }
            let head = String::from_utf8_lossy(&answer[..answer.len().min(100)]);
            assert!(head.starts_with("HTTP/1.1 413 "), "{way}, {attempt}: {head}");
            assert!(answer.ends_with(&[b'x'; ANSWER]), "{way}, {attempt}: {} bytes", answer.len());
        }
    }
}

#[tokio::test]
async fn what_a_reset_cuts_off_is_not_taken_for_the_whole() {
    for (what, request, answer) in [
        ("bytes", &b"\x01\x02 not http ever"[..], &b"part of an answer"[..]),
        ("a server of HTTP/1.0", b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\npart"),
        (
            "a client of HTTP/1.0",
            b"GET / HTTP/1.0\r\nhost: server.demo\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
        ),
    ] {
        let was_read = Arc::new(tokio::sync::Notify::new());
        let reads = Arc::clone(&was_read);
        let app = serve_each(move |mut stream| {
            let was_read = Arc::clone(&reads);
            async move {
                let _ = stream.read(&mut [0; 1024]).await;
                stream.write_all(answer).await.unwrap();
                was_read.notified().await;
                stream.set_zero_linger().unwrap();
            }
        })
        .await;
        for (way, proxy) in ways(app).await {
            let mut client = proxy.connect().await;
            client.write_all(request).await.unwrap();
            let mut received = Vec::new();
            while !String::from_utf8_lossy(&received).contains("part") {
                client.read_buf(&mut received).await.unwrap();
            }
            was_read.notify_one();
            let end = client.read_to_end(&mut received).await;
            assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{what}, {way}");
        }
    }
}
