//! The server behind the proxies: HTTP/1.1, HTTP/2 with gRPC, and plain bytes, on one thread and with as little work as
//! possible, because it shares the processors with what is measured.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};

/// HTTP/1.1.
pub(crate) const HTTP1: u16 = 9101;
/// HTTP/2 with prior knowledge.
pub(crate) const HTTP2: u16 = 9102;
/// HTTP/1.1, marked as opaque.
pub(crate) const OPAQUE_HTTP1: u16 = 9103;
/// HTTP/2, marked as opaque.
pub(crate) const OPAQUE_HTTP2: u16 = 9104;
/// Plain bytes, marked as opaque: the client's first byte says what happens.
pub(crate) const TCP: u16 = 9105;
/// First byte of [`TCP`]: every byte is sent back.
pub(super) const ECHO: u8 = b'e';
/// First byte of [`TCP`]: the server sends until the connection ends.
pub(super) const SEND: u8 = b's';
/// Bytes of an HTTP response's body.
pub(super) const BODY_BYTES: usize = 1024;
/// A gRPC method that returns its message.
pub(super) const UNARY: &str = "/weft.bench.Echo/Unary";
/// A gRPC method that returns each message.
pub(super) const STREAM: &str = "/weft.bench.Echo/Stream";

const BACKLOG: u32 = 4096;
const REQUEST_BYTES: usize = 16 * 1024;
const SEND_BYTES: usize = 256 * 1024;
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 1 << 24;
/// Pause after a failed accept, such as one without a descriptor.
const PAUSE: Duration = Duration::from_millis(10);

static BODY: [u8; BODY_BYTES] = [b'x'; BODY_BYTES];

/// The serving thread, which ends with the process.
#[derive(Debug)]
pub(super) struct Server {
    _thread: thread::JoinHandle<()>,
}

impl Server {
    /// Listens on every port and serves.
    ///
    /// # Errors
    /// A port is taken.
    pub(super) fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut listeners = Vec::new();
        {
            let _context = runtime.enter();
            for port in [HTTP1, HTTP2, OPAQUE_HTTP1, OPAQUE_HTTP2, TCP] {
                let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
                listeners.push((port, listen(address).with_context(|| format!("listen on {address}"))?));
            }
        }
        let serve = move || {
            runtime.block_on(async {
                for (port, listener) in listeners {
                    tokio::spawn(accept(listener, port));
                }
                std::future::pending::<()>().await;
            });
        };
        Ok(Self { _thread: thread::Builder::new().name("server".to_owned()).spawn(serve)? })
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves the protocol of a port on each connection.
pub(super) async fn accept(listener: TcpListener, port: u16) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        tokio::spawn(async move {
            stream.set_nodelay(true)?;
            // The client counts its failures; a connection that ends is none.
            match port {
                HTTP1 | OPAQUE_HTTP1 => http1(stream).await,
                HTTP2 | OPAQUE_HTTP2 => http2(stream).await,
                _ => tcp(stream).await,
            }
        });
    }
}

async fn http1(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut response = format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {BODY_BYTES}\r\n\r\n");
    response.extend(BODY.map(char::from));
    let mut buffer = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        // Proxies do not pipeline, so a request ends where the buffer does.
        if !buffer.ends_with(b"\r\n\r\n") {
            anyhow::ensure!(buffer.len() < REQUEST_BYTES, "a request without an end");
            continue;
        }
        let last = says_close(&buffer);
        buffer.clear();
        stream.write_all(response.as_bytes()).await?;
        if last {
            return Ok(stream.shutdown().await?);
        }
    }
}

/// Whether a request asks for the connection to be closed.
fn says_close(request: &[u8]) -> bool {
    let mut lines = request.split(|byte| *byte == b'\n');
    lines.any(|line| line.trim_ascii().eq_ignore_ascii_case(b"connection: close"))
}

async fn http2(stream: TcpStream) -> anyhow::Result<()> {
    let mut builder = h2::server::Builder::new();
    builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    let mut connection = builder.handshake::<_, Bytes>(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        match request.uri().path() {
            UNARY | STREAM => drop(tokio::spawn(grpc(request, respond))),
            // Answered on the spot: nothing to wait for.
            _ => get(respond)?,
        }
    }
    Ok(())
}

fn get(mut respond: SendResponse<Bytes>) -> anyhow::Result<()> {
    let response = Response::builder().header("content-type", "text/plain").header("content-length", BODY_BYTES);
    respond.send_response(response.body(())?, false)?.send_data(Bytes::from_static(&BODY), true)?;
    Ok(())
}

/// Both methods: what arrives is sent back, with a status at the end.
async fn grpc(request: Request<RecvStream>, mut respond: SendResponse<Bytes>) -> anyhow::Result<()> {
    let mut body = request.into_body();
    let response = Response::builder().header("content-type", "application/grpc").body(())?;
    let mut sending = respond.send_response(response, false)?;
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        sending.send_data(data, false)?;
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    sending.send_trailers(trailers)?;
    Ok(())
}

async fn tcp(mut stream: TcpStream) -> anyhow::Result<()> {
    if stream.read_u8().await? == SEND {
        let bytes = vec![b'x'; SEND_BYTES];
        loop {
            stream.write_all(&bytes).await?;
        }
    }
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..count]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_whether_it_is_the_last() {
        assert!(says_close(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"));
        assert!(!says_close(b"GET / HTTP/1.1\r\nconnection: keep-alive\r\n\r\n"));
    }
}
