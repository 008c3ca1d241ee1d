//! Peers whose bytes a test chooses.

use parking_lot::Mutex;

use super::*;

/// Bytes that are not HTTP.
pub(super) const BYTES: &[u8] = b"\x01\x02 not http ever";

/// A server of HTTP/1 and of bytes that answers the first bytes of each connection with its name, and closes.
pub(super) async fn named(name: &'static str) -> SocketAddr {
    serve_each(move |mut stream| async move {
        let mut first = [0; 4096];
        let read = stream.read(&mut first).await.unwrap_or(0);
        let length = name.len();
        let answer = match &first[..read] {
            [] => return,
            http if http.starts_with(b"GET ") => {
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{name}")
            }
            _ => name.to_owned(),
        };
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.shutdown().await;
    })
    .await
}

impl Proxy {
    /// Who answers a request, or the status of the proxy's own answer.
    pub(super) async fn who(&self) -> String {
        let response = self.get("/").await;
        match response.status() {
            StatusCode::OK => text(response).await,
            status => status.as_str().to_owned(),
        }
    }

    /// Everything that these bytes are answered with; nothing if the connection is closed or reset.
    pub(super) async fn exchange(&self, bytes: &[u8]) -> String {
        let mut client = self.connect().await;
        let mut answer = Vec::new();
        if client.write_all(bytes).await.is_ok() {
            let _ = client.read_to_end(&mut answer).await;
        }
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// A client of HTTP/2.
    pub(super) async fn http2(&self) -> conn::http2::SendRequest<Full<Bytes>> {
        let stream = TokioIo::new(self.connect().await);
        let (sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        sender
    }
}

/// The head of a request or response; `None` if the connection ends before it.
pub(super) async fn read_head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

/// An HTTP/1 application that answers each request without a body with the next of its bytes; a connection ends with an
/// answer that says so. After the last it repeats it.
#[derive(Clone)]
pub(super) struct RawApplication {
    pub(super) addr: SocketAddr,
    received: Arc<Mutex<Vec<(usize, String)>>>,
}

impl RawApplication {
    pub(super) async fn start(answers: &[&'static str]) -> Self {
        let received = Arc::default();
        let (receives, answers, mut connection) = (Arc::clone(&received), answers.to_vec(), 0);
        let addr = serve_each(move |stream| {
            connection += 1;
            serve_raw(stream, connection, Arc::clone(&receives), answers.clone())
        });
        Self { addr: addr.await, received }
    }

    /// The heads that it received, each with the number of its connection.
    pub(super) fn received(&self) -> Vec<(usize, String)> {
        self.received.lock().clone()
    }
}

async fn serve_raw(
    mut stream: TcpStream,
    connection: usize,
    received: Arc<Mutex<Vec<(usize, String)>>>,
    answers: Vec<&'static str>,
) {
    let mut bytes = Vec::new();
    loop {
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                return;
            }
            continue;
        };
        let head: Vec<u8> = bytes.drain(..end + 4).collect();
        let answer = {
            let mut received = received.lock();
            let answer = answers.get(received.len()).or(answers.last()).unwrap();
            received.push((connection, String::from_utf8(head).unwrap()));
            *answer
        };
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
        let (head, _) = answer.split_once("\r\n\r\n").unwrap();
        if head.contains("connection: close") || head.starts_with("HTTP/1.0") {
            return;
        }
    }
}
