//! Detects a client's protocol from its first bytes: HTTP/1, HTTP/2, TLS with its server name, or something else.
//!
//! Owns reading ahead and detection. Bytes that were read stay in the stream's read-ahead buffer, so that later
//! readers get them. Refuses to act on the result.

pub(crate) mod client_hello;

use std::{io, time::Duration};

use bytes::BytesMut;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    net::TcpStream,
};

use crate::io::Io;

use client_hello::{Hello, parse_client_hello};

/// Bytes read to detect HTTP: Linkerd's number.
const HTTP_BYTES: usize = 1024;
/// Bytes peeked at for TLS: a typical ClientHello fits.
const PEEK_BYTES: usize = 512;
/// The most bytes read for TLS, if a ClientHello is larger than the peeked bytes.
const TLS_BYTES: usize = 8192;
/// The start of HTTP/2 with prior knowledge (RFC 9113 section 3.4), enough of it to recognise it.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// The result of HTTP detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detected {
    /// HTTP/1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
    /// Bytes that are not HTTP.
    NotHttp,
    /// Nothing that can be judged arrived in time: the server speaks first, or neither side does.
    TimedOut,
}

/// Why detection failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DetectError {
    /// The client closed without a byte.
    #[error("the client closed the connection before it sent anything")]
    Closed,
    /// The connection failed.
    #[error("read the connection's first bytes")]
    Read(#[source] io::Error),
    /// TLS began and was not finished.
    #[error("the client did not finish its TLS ClientHello in time")]
    TimedOut,
}

impl Detected {
    /// The value of the metric label `result`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Http1 => "http/1",
            Self::Http2 => "http/2",
            Self::NotHttp => "not_http",
            Self::TimedOut => "read_timeout",
        }
    }
}

/// How much is read to detect HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// What arrives first, as in Linkerd: a client of another protocol that waits for an answer is not kept waiting.
    One,
    /// Until the bytes are HTTP or cannot become HTTP, for ports that take nothing else.
    UntilClear,
}

/// Detects HTTP.
///
/// # Errors
/// When the connection ends or fails before its first byte.
pub(crate) async fn http<S: AsyncRead + Unpin>(
    mut stream: Io<S>,
    timeout: Duration,
    reads: Reads,
) -> Result<(Detected, Io<S>), DetectError> {
    let mut buffer = BytesMut::with_capacity(HTTP_BYTES);
    let judged = async {
        loop {
            let read = stream.read_buf(&mut buffer).await.map_err(DetectError::Read)?;
            if buffer.is_empty() {
                return Err(DetectError::Closed);
            }
            if read == 0 || reads == Reads::One || !may_become_http(&buffer) {
                return Ok(judge_http(&buffer));
            }
        }
    };
    let detected = tokio::time::timeout(timeout, judged).await.unwrap_or(Ok(Detected::TimedOut))?;
    stream.read_again(buffer.freeze());
    Ok((detected, stream))
}

/// Whether these bytes are too few to be judged, and could be the beginning of HTTP.
fn may_become_http(bytes: &[u8]) -> bool {
    bytes.len() < H2_PREFACE.len()
        && (H2_PREFACE.starts_with(bytes) || httparse::Request::new(&mut []).parse(bytes).is_ok())
}

pub(crate) fn judge_http(bytes: &[u8]) -> Detected {
    if bytes.len() < H2_PREFACE.len() {
        return Detected::NotHttp;
    }
    if bytes.starts_with(H2_PREFACE) {
        return Detected::Http2;
    }
    let mut request = httparse::Request::new(&mut []);
    match request.parse(bytes) {
        // With no room for headers, the first header means that the request line was parsed.
        Ok(_) | Err(httparse::Error::TooManyHeaders) => Detected::Http1,
        Err(_) => Detected::NotHttp,
    }
}

/// Finds the server name of a TLS client; `None` if it is not TLS or has none.
///
/// Usually peeks, so that a TLS implementation later reads the socket itself.
///
/// # Errors
/// When the connection ends or fails, or a ClientHello begins and is not complete in time.
pub(crate) async fn tls(stream: TcpStream, timeout: Duration) -> Result<(Option<String>, Io<TcpStream>), DetectError> {
    match tokio::time::timeout(timeout, tls_unbounded(stream)).await {
        Ok(result) => result,
        Err(_) => Err(DetectError::TimedOut),
    }
}

async fn tls_unbounded(stream: TcpStream) -> Result<(Option<String>, Io<TcpStream>), DetectError> {
    let mut peeked = [0_u8; PEEK_BYTES];
    let length = stream.peek(&mut peeked).await.map_err(DetectError::Read)?;
    if length == 0 {
        return Err(DetectError::Closed);
    }
    let mut stream = Io::new(stream);
    match parse_client_hello(&peeked[..length]) {
        Hello::NotTls => return Ok((None, stream)),
        Hello::Complete(name) => return Ok((name, stream)),
        Hello::Incomplete => {}
    }
    let mut buffer = BytesMut::with_capacity(TLS_BYTES);
    let name = loop {
        let read = stream.read_buf(&mut buffer).await.map_err(DetectError::Read)?;
        match parse_client_hello(&buffer) {
            Hello::Complete(name) => break name,
            Hello::NotTls => break None,
            Hello::Incomplete if read == 0 || buffer.len() >= TLS_BYTES => break None,
            Hello::Incomplete => {}
        }
    };
    stream.read_again(buffer.freeze());
    Ok((name, stream))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;
    use crate::testing::tcp_pair;

    #[test]
    fn judges_http_by_its_first_bytes() {
        for (bytes, expected) in [
            (&b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"[..], Detected::Http1),
            (b"GET / HTTP/1.0\r\n\r\n", Detected::Http1),
            (b"POST /a/long/path/with", Detected::Http1),
            (b"GET / HTTP/1.1\r\na: b\r\nc: d\r\n", Detected::Http1),
            (b"CONNECT a:443 HTTP/1.1\r\n\r\n", Detected::Http1),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Detected::Http2),
            (b"GET / HT", Detected::NotHttp),
            (b"SSH-2.0-OpenSSH_9.0\r\n", Detected::NotHttp),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\0\0\0\0", Detected::NotHttp),
            (b"*1\r\n$4\r\nPING\r\n\r\n", Detected::NotHttp),
        ] {
            assert_eq!(judge_http(bytes), expected, "{}", bytes.escape_ascii());
        }
    }

    #[tokio::test]
    async fn detected_bytes_are_read_again() {
        let (mut client, server) = duplex(1024);
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        drop(client);
        let (detected, mut stream) = http(Io::new(server), Duration::from_secs(1), Reads::One).await.unwrap();
        assert_eq!(detected, Detected::Http1);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"GET / HTTP/1.1\r\n\r\n");
    }

    #[tokio::test]
    async fn where_nothing_else_passes_pieces_are_read_until_they_are_clear() {
        for (pieces, one, until_clear) in [
            (&["GET ", "/ HTTP/1.1\r\n\r\n"][..], Detected::NotHttp, Detected::Http1),
            (&["PRI", " * ", "HTTP/2.0\r\n\r\nSM\r\n\r\n"], Detected::NotHttp, Detected::Http2),
            (&["*1\r\n", "$4\r\nPING\r\n"], Detected::NotHttp, Detected::NotHttp),
            (&["GET a", "\r\n and more"], Detected::NotHttp, Detected::NotHttp),
            (&["GET"], Detected::NotHttp, Detected::NotHttp),
        ] {
            for (reads, expected) in [(Reads::One, one), (Reads::UntilClear, until_clear)] {
                let (mut client, server) = duplex(1024);
                let send = async {
                    for piece in pieces {
                        client.write_all(piece.as_bytes()).await.unwrap();
                        // In one of two turns it is the other side's first.
                        for _ in 0..2 {
                            tokio::task::yield_now().await;
                        }
                    }
                    drop(client);
                };
                let (detected, ()) = tokio::join!(http(Io::new(server), Duration::from_secs(1), reads), send);
                let (detected, mut stream) = detected.unwrap();
                assert_eq!(detected, expected, "{pieces:?} {reads:?}");
                let mut all = String::new();
                stream.read_to_string(&mut all).await.unwrap();
                assert_eq!(all, pieces.concat());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_line_times_out_and_is_read_again() {
        let (mut client, server) = duplex(1024);
        client.write_all(b"GET ").await.unwrap();
        let (detected, mut stream) = http(Io::new(server), Duration::from_secs(1), Reads::UntilClear).await.unwrap();
        assert_eq!(detected, Detected::TimedOut);
        let mut bytes = [0; 4];
        stream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"GET ");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_times_out_and_an_end_is_an_error() {
        let (client, server) = duplex(1024);
        let (detected, _stream) = http(Io::new(server), Duration::from_secs(10), Reads::One).await.unwrap();
        assert_eq!(detected, Detected::TimedOut);
        drop(client);
        let (client, server) = duplex(1024);
        drop(client);
        assert!(matches!(http(Io::new(server), Duration::from_secs(10), Reads::One).await, Err(DetectError::Closed)));
    }

    #[tokio::test]
    async fn plaintext_is_not_consumed_by_tls_detection() {
        let (mut client, server) = tcp_pair().await;
        client.write_all(b"hello").await.unwrap();
        let (name, mut stream) = tls(server, Duration::from_secs(5)).await.unwrap();
        assert_eq!(name, None);
        let mut read = [0; 5];
        stream.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"hello");
    }

    #[tokio::test]
    async fn a_client_hello_in_pieces_is_read_whole() {
        let (mut client, server) = tcp_pair().await;
        client.set_nodelay(true).unwrap();
        let hello = client_hello::tests::hello("web.demo");
        let (first, second) = hello.split_at(20);
        client.write_all(first).await.unwrap();
        let detect = tokio::spawn(tls(server, Duration::from_secs(5)));
        tokio::task::yield_now().await;
        client.write_all(second).await.unwrap();
        let (name, mut stream) = detect.await.unwrap().unwrap();
        assert_eq!(name.as_deref(), Some("web.demo"));
        let mut read = vec![0; hello.len()];
        stream.read_exact(&mut read).await.unwrap();
        assert!(read == hello);
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_client_hello_is_not_waited_for_longer_than_the_timeout() {
        let (mut client, server) = tcp_pair().await;
        client.write_all(&client_hello::tests::hello("web.demo")[..20]).await.unwrap();
        let began = tokio::time::Instant::now();
        assert!(matches!(tls(server, Duration::from_secs(10)).await, Err(DetectError::TimedOut)));
        assert_eq!(began.elapsed().as_secs(), 10);
    }

    #[tokio::test]
    async fn a_client_hello_that_is_too_large_is_not_tls_and_is_read_again() {
        // A record of 16 KiB with an extension before the name (RFC 8446 section 4.1.2).
        let hello = |before_name: u16| {
            let name = b"web.demo";
            let mut bytes = [&[22, 3, 1, 0x40, 0, 1, 0, 0, 0, 3, 3][..], &[0; 32], &[0, 0, 2, 0x13, 1, 1, 0]].concat();
            bytes.extend((before_name + 4 + 9 + name.len() as u16).to_be_bytes());
            bytes.extend([0xfa, 0xfa].into_iter().chain(before_name.to_be_bytes()));
            bytes.extend(vec![0; usize::from(before_name)]);
            let length = name.len() as u8;
            bytes.extend([0, 0, 0, length + 5, 0, length + 3, 0, 0, length]);
            bytes.extend(name);
            bytes
        };
        for (before_name, expected) in [(7000, Some("web.demo")), (9000, None)] {
            let (mut client, server) = tcp_pair().await;
            let hello = hello(before_name);
            client.write_all(&hello).await.unwrap();
            let (name, mut stream) = tls(server, Duration::from_secs(5)).await.unwrap();
            assert_eq!(name.as_deref(), expected, "{before_name}");
            let mut read = vec![0; hello.len()];
            stream.read_exact(&mut read).await.unwrap();
            assert!(read == hello);
        }
    }
}
