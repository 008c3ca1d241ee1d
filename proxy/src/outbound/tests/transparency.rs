//! What a client and a server see of each other is the same without a proxy, with one, and through two: rows of bytes,
//! with what each has to see.

use futures::future::join_all;

use super::{raw::read_head, *};

/// How a client reaches an application. The proxies live as long as they are held.
async fn ways(app: SocketAddr) -> [(&'static str, SocketAddr, Option<Proxy>); 3] {
    let [one, two] = fidelity::ways(app).await.map(|(way, proxy)| (way, proxy.addr, Some(proxy)));
    [("no proxy", app, None), one, two]
}

/// An application that answers each head with these bytes, and closes then if `closes`.
async fn answers(answer: &'static [u8], closes: bool) -> SocketAddr {
    serve_each(move |mut stream| async move {
        while read_head(&mut stream).await.is_some() {
            stream.write_all(answer).await.unwrap();
            if closes {
                return;
            }
        }
    })
    .await
}

/// The status and the body that a client of HTTP/1 gets for a request; empty if it gets no whole answer.
async fn answer(addr: SocketAddr, method: &str) -> String {
    let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().method(method).uri("/").header("host", "server.demo");
    let Ok(response) = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await else {
        return String::new();
    };
    let status = response.status().as_u16();
    let body = response.into_body().collect().await;
    body.map_or_else(|_| String::new(), |body| format!("{status} {}", body.to_bytes().escape_ascii()))
}

#[tokio::test]
async fn a_client_gets_what_the_server_sent() {
    let rows: [(&str, bool, &[u8], &str); 22] = [
        ("GET", false, b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 200 As You Like It\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 299 Own\r\ncontent-length: 1\r\n\r\nx", "299 x"),
        ("GET", false, b"HTTP/1.1 799 Own\r\ncontent-length: 1\r\n\r\nx", "799 x"),
        ("GET", false, b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\netag: x\r\n\r\n", "304 "),
        ("DELETE", false, b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n", "204 "),
        ("HEAD", false, b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", "200 "),
        ("PROPFIND", false, b"HTTP/1.1 207 Multi-Status\r\ncontent-length: 1\r\n\r\nx", "207 x"),
        (
            "GET",
            false,
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx-t: 1\r\n\r\n",
            "200 abc",
        ),
        ("GET", false, b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 200 OK\r\nx-l: caf\xe9\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 200 OK\ncontent-length: 1\n\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", false, b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxyz", "200 x"),
        ("GET", false, b"HTTP/1.1 426 Upgrade Required\r\nupgrade: foo\r\ncontent-length: 1\r\n\r\nx", "426 x"),
        ("GET", true, b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", "200 until the end"),
        ("GET", true, b"HTTP/1.0 200 OK\r\n\r\nuntil the end", "200 until the end"),
        ("GET", true, b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx", "200 x"),
        ("GET", true, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", ""),
        ("GET", true, b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nab", ""),
        ("GET", true, b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx", "403 x"),
    ];
    join_all(rows.map(async |(method, closes, sent, expected)| {
        for (way, addr, _proxy) in ways(answers(sent, closes).await).await {
            assert_eq!(answer(addr, method).await, expected, "{way}: {method}, {}", sent.escape_ascii());
        }
    }))
    .await;
}

#[tokio::test]
async fn what_is_no_answer_is_a_bad_gateway() {
    let rows: [&[u8]; 6] = [
        b"",
        b"hello",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\nx-a: b\r\n c\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nx-a : b\r\ncontent-length: 1\r\n\r\nx",
    ];
    join_all(rows.map(async |sent| {
        for (way, addr, proxy) in ways(answers(sent, true).await).await {
            let expected = if proxy.is_some() { "502 " } else { "" };
            assert_eq!(answer(addr, "GET").await, expected, "{way}: {}", sent.escape_ascii());
        }
    }))
    .await;
}

/// An application that answers with what it understood: method, target and body.
async fn understands() -> SocketAddr {
    serve_each(|stream| async move {
        let service = service_fn(|request: Request<Incoming>| async move {
            let line = format!("{} {} ", request.method(), request.uri());
            let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes)?;
            Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from([line.as_bytes(), &body[..]].concat()))))
        });
        let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    })
    .await
}

/// Bodies with a length, chunks, both or neither are where two readers of one connection may differ.
#[tokio::test]
async fn a_server_understands_what_the_client_sent_or_it_is_refused() {
    const HOST: &str = " HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n";
    const CHUNKS: &str = "\r\n1\r\nx\r\n0\r\n\r\n";
    let rows = [
        (format!("GET /{HOST}\r\n"), "200 GET / "),
        (format!("OPTIONS *{HOST}\r\n"), "200 OPTIONS * "),
        (format!("GET http://server.demo?x=1{HOST}\r\n"), "200 GET http://server.demo/?x=1 "),
        (format!("GET /a#b{HOST}\r\n"), "200 GET /a "),
        (format!("GET /caf\u{e9}{HOST}\r\n"), "200 GET /caf\u{e9} "),
        (format!("GET /{HOST}content-length: 2\r\n\r\nhi"), "200 GET / hi"),
        (format!("POST /{HOST}\r\n"), "200 POST / "),
        (format!("POST /{HOST}transfer-encoding: chunked\r\n{CHUNKS}"), "200 POST / x"),
        (format!("POST /{HOST}transfer-encoding:\tchunked\r\n{CHUNKS}"), "200 POST / x"),
        (format!("POST /{HOST}content-length: 3\r\ntransfer-encoding: chunked\r\n{CHUNKS}"), "200 POST / x"),
        (format!("POST /{HOST}transfer-encoding: chunked\r\ncontent-length: 3\r\n{CHUNKS}"), "200 POST / x"),
        (format!("POST /{HOST}content_length: 3\r\n\r\n"), "200 POST / "),
        (format!("POST /{HOST}connection: content-length\r\ncontent-length: 3\r\n\r\nabc"), "200 POST / abc"),
        (format!("POST /{HOST}expect: magic\r\ncontent-length: 3\r\n\r\nabc"), "200 POST / abc"),
        (format!("POST /{HOST}content-length: 3\r\ncontent-length: 4\r\n\r\nabcd"), "400"),
        (format!("POST /{HOST}content-length: 3, 3\r\n\r\nabc"), "400"),
        (format!("POST /{HOST}content-length: +3\r\n\r\nabc"), "400"),
        (format!("POST /{HOST}transfer-encoding: xchunked\r\ncontent-length: 3\r\n\r\nabc"), "400"),
        (format!("POST /{HOST}transfer-encoding: identity\r\ncontent-length: 3\r\n\r\nabc"), "400"),
        (format!("POST /{HOST}transfer-encoding: chunked, identity\r\n{CHUNKS}"), "400"),
        (format!("POST /{HOST}transfer-encoding: \u{b}chunked\r\ncontent-length: 3\r\n\r\nabc"), "400"),
        (format!("POST /{HOST}transfer-encoding : chunked\r\n{CHUNKS}"), "400"),
        (format!("POST /{HOST}transfer-encoding:\r\n chunked\r\n{CHUNKS}"), "400"),
        (format!("GET /{HOST}x-a: b\rx-b: c\r\n\r\n"), "400"),
        (format!("POST / HTTP/1.0\r\nhost: server.demo\r\ntransfer-encoding: chunked\r\n{CHUNKS}"), "400"),
    ];
    let app = understands().await;
    for (way, addr, _proxy) in ways(app).await {
        join_all(rows.iter().map(async |(sent, expected)| {
            let mut client = TcpStream::connect(addr).await.unwrap();
            client.write_all(sent.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer).await;
            let answer = String::from_utf8_lossy(&answer);
            let status = answer.get(9..12).unwrap_or("none");
            let understood = match answer.split_once("\r\n\r\n") {
                Some((_, body)) if status == "200" => format!("{status} {body}"),
                _ => status.to_owned(),
            };
            assert_eq!(understood, *expected, "{way}: {}", sent.escape_debug());
        }))
        .await;
    }
}
