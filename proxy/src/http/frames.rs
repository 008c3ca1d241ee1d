//! HTTP/2 frames as bytes, for tests of peers that no library would be.

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The client's preface and its empty SETTINGS.
pub(crate) fn preface() -> Vec<u8> {
    preface_with(&[])
}

/// The client's preface and its SETTINGS.
pub(crate) fn preface_with(settings: &[u8]) -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, settings)].concat()
}

/// One frame (RFC 9113 section 4.1).
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A head in HPACK: method (0x82 is GET, 0x83 is POST), scheme, path, authority.
pub(crate) fn head(method: u8, path: &str) -> Vec<u8> {
    let path_length = u8::try_from(path.len()).unwrap();
    [&[method, 0x86, 0x04, path_length], path.as_bytes(), b"\x41\x0bserver.demo"].concat()
}

/// The number of a client's stream after the first.
pub(crate) fn stream(n: u32) -> u32 {
    2 * n + 3
}

/// A GET on that stream that is reset at once.
pub(crate) fn canceled(n: u32, path: &str) -> Vec<u8> {
    [frame(1, 5, stream(n), &head(0x82, path)), frame(3, 0, stream(n), &[0, 0, 0, 8])].concat()
}

/// A frame from the peer.
pub(crate) struct Received {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// The next frame; `None` when the connection ends.
pub(crate) async fn next_frame(peer: &mut (impl AsyncRead + Unpin)) -> Option<Received> {
    let mut head = [0; 9];
    peer.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    peer.read_exact(&mut payload).await.ok()?;
    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    Some(Received { kind: head[3], flags: head[4], stream, payload })
}
