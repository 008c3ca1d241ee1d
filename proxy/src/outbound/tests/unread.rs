//! Responses that their clients do not read.

use std::sync::atomic::AtomicUsize;

use super::*;

/// Of a response, more than all sockets on its way hold.
const LARGE: usize = 128 * 1024 * 1024;
/// The most that the sockets and the proxy hold: the kernel has up to 10 MiB for each of the two connections.
const HELD: usize = 48 * 1024 * 1024;
/// How long it may take on a machine that is busy until nothing moves.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers `/large`, and counts what it could write of it; anything else is answered with nothing.
async fn application_of_much(written: Arc<AtomicUsize>) -> SocketAddr {
    serve_each(move |mut stream| {
        let written = Arc::clone(&written);
        async move {
            let mut request = [0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            if !request[..read].starts_with(b"GET /large ") {
                let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
                return;
            }
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
            let _ = stream.write_all(head.as_bytes()).await;
            let chunk = vec![b'x'; 64 * 1024];
            while written.load(Ordering::Relaxed) < LARGE && stream.write_all(&chunk).await.is_ok() {
                written.fetch_add(chunk.len(), Ordering::Relaxed);
            }
        }
    })
    .await
}

async fn status(addr: SocketAddr) -> StatusCode {
    let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender.send_request(get("/")).await.unwrap().status()
}

#[tokio::test]
async fn a_client_of_http1_that_does_not_read_holds_its_server_up() {
    for side in ["outbound", "inbound"] {
        let written = Arc::<AtomicUsize>::default();
        let app = application_of_much(Arc::clone(&written)).await;
        let proxy = Proxy::start(app, Control::default()).await;
        let addr = if side == "outbound" {
            proxy.addr
        } else {
            SocketAddr::from(([127, 0, 0, 1], testing::serve_port(Arc::clone(&proxy.shared), app).await))
        };
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(b"GET /large HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
        let stuck = tokio::time::timeout(PATIENCE, async {
            // Nothing moves any more when it has not moved while others were answered.
            let (mut seen, mut answers) = (0, 0);
            while answers < 20 {
                assert_eq!(status(addr).await, StatusCode::NO_CONTENT);
                let now = written.load(Ordering::Relaxed);
                answers = if now == seen && now > 0 { answers + 1 } else { 0 };
                seen = now;
            }
            seen
        });
        let seen = stuck.await.expect("the response does not begin, or never stops");
        assert!(seen <= HELD, "{side}: {} MiB are on their way", seen / 1024 / 1024);
        let mut received = 0;
        let mut buffer = vec![0; 1024 * 1024];
        while received < LARGE {
            let read = client.read(&mut buffer).await.unwrap();
            assert_ne!(read, 0, "{side}: the response ends after {received} bytes");
            received += read;
        }
    }
}
