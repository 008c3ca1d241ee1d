//! The access log of requests that pass the inbound side.

use parking_lot::Mutex;
use regex::Regex;
use serde_json::Value;
use weft_runtime::telemetry::Lines;

use super::*;
use crate::{access_log::AccessLog, config::AccessLogFormat};

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn logged(app: SocketAddr, format: AccessLogFormat) -> (World, Written, Lines) {
    let written = Written::default();
    let (log, lines) = AccessLog::to(format, written.clone());
    let world = World::built(app, |_| {}, |shared| shared.access_log = Some(log)).await;
    (world, written, lines)
}

/// What was written, once all of it is.
fn text(written: &Written, lines: Lines) -> String {
    drop(lines);
    String::from_utf8(written.0.lock().clone()).unwrap()
}

/// Sends bytes over mutual TLS; returns the response's body.
async fn exchange(world: &World, request: &str) -> String {
    let mut stream = world.connect(Via::Tls, Some(ELSEWHERE)).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    // The proxy closes without TLS's farewell.
    let _ = stream.read_to_string(&mut answer).await;
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[tokio::test]
async fn a_json_line_has_linkerds_fields() {
    let (world, written, lines) = logged(http_app().await, AccessLogFormat::Json).await;
    let head = "POST /a?b=c HTTP/1.1\r\nhost: web.demo\r\nuser-agent: test/1\r\nx-request-id: 42\r\n";
    let body = exchange(&world, &format!("{head}content-length: 3\r\nconnection: close\r\n\r\nabc")).await;
    let text = text(&written, lines);
    let line: Value = serde_json::from_str(text.strip_suffix('\n').unwrap()).unwrap();
    let field = |name: &str| line[name].as_str().unwrap();
    for (name, expected) in [
        ("client.addr", ELSEWHERE),
        ("client.id", CLIENT),
        ("method", "POST"),
        ("uri", "/a?b=c"),
        ("version", "HTTP/1.1"),
        ("trace_id", "42"),
        ("request_bytes", "3"),
        ("user_agent", "test/1"),
        ("host", "web.demo"),
        ("response_bytes", &body.len().to_string()),
    ] {
        assert_eq!(field(name), expected, "{name}");
    }
    assert_eq!(line["status"], 200);
    let (total, processing): (u64, u64) = (field("total_ns").parse().unwrap(), field("processing_ns").parse().unwrap());
    assert!(0 < processing && processing <= total, "{processing} {total}");
    let timestamp = Regex::new(r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z$").unwrap();
    assert!(timestamp.is_match(field("timestamp")), "{line}");
    assert_eq!(line.as_object().unwrap().len(), 14, "{line}");
}

#[tokio::test]
async fn an_apache_line_is_linkerds_also_for_a_request_that_is_refused() {
    let (world, written, lines) = logged(http_app().await, AccessLogFormat::Apache).await;
    exchange(&world, "GET /a HTTP/1.1\r\nhost: web.demo\r\nconnection: close\r\n\r\n").await;
    world.policies.publish(world.app.port(), detecting(vec![authz("nobody", only(&["nobody.demo"]))]));
    exchange(&world, "GET /b HTTP/1.1\r\nhost: web.demo\r\nconnection: close\r\n\r\n").await;
    let request = Request::get("http://web.demo/c").body(()).unwrap();
    assert_eq!(world.get_http2(Via::Plain, Some(ELSEWHERE), request).await.0, 403);
    let text = text(&written, lines);
    let time = r"\[20[0-9T:.-]+Z\]";
    let expected = [
        format!(r#"{ELSEWHERE} {CLIENT} - {time} "GET /a HTTP/1.1" 200"#),
        format!(r#"{ELSEWHERE} {CLIENT} - {time} "GET /b HTTP/1.1" 403"#),
        format!(r#"{ELSEWHERE} - - {time} "GET http://web.demo/c HTTP/2.0" 403"#),
    ];
    let expected = Regex::new(&format!("^{}\n$", expected.join("\n"))).unwrap();
    assert!(expected.is_match(&text), "{text}");
}

#[tokio::test]
async fn a_line_is_written_when_the_response_ends_and_counts_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (world, written, lines) = logged(listener.local_addr().unwrap(), AccessLogFormat::Json).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\nconnection: close\r\n\r\n").await.unwrap();
    let (mut app, _) = listener.accept().await.unwrap();
    let mut head = [0; 16];
    app.read_exact(&mut head).await.unwrap();
    app.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nfirst").await.unwrap();
    let mut answer = vec![0; 256];
    let mut read = 0;
    while !answer[..read].windows(5).any(|window| window == b"first") {
        read += client.read(&mut answer[read..]).await.unwrap();
    }
    assert_eq!(*written.0.lock(), b"", "the response goes on");
    app.write_all(b"second").await.unwrap();
    drop(app);
    client.read_to_end(&mut Vec::new()).await.unwrap();
    let line: Value = serde_json::from_str(&text(&written, lines)).unwrap();
    assert_eq!(line["response_bytes"], "11");
}
