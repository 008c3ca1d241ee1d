//! The preamble in which one proxy sends another, inside mTLS, the port of the connection.
//!
//! ```text
//! "transport.l5d.io/v1\r\n\r\n" | u32 big-endian length | protobuf Header { port, name, session_protocol }
//! ```
//!
//! Owns encoding and decoding. Refuses to decide when a header is sent: the endpoint and ALPN determine that.

use std::{io, num::NonZeroU16};

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncReadExt};

/// The ALPN protocol that both sides negotiate before a header is sent.
pub(crate) const ALPN: &[u8] = b"transport.l5d.io/v1";

const PREFACE: &[u8] = b"transport.l5d.io/v1\r\n\r\n";

/// Longest header accepted, in bytes: the size of Linkerd's read buffer.
const MAX_HEADER: usize = 64 * 1024;

/// The destination of a connection between proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TransportHeader {
    /// The port of the workload.
    pub(crate) port: NonZeroU16,
    /// The destination's name, only for gateways.
    pub(crate) name: Option<String>,
    /// The HTTP version on the wire; `None` for opaque connections.
    pub(crate) protocol: Option<SessionProtocol>,
}

/// The protocol after a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SessionProtocol {
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
}

/// Why no header could be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadHeaderError {
    /// The connection ended or failed inside the header.
    #[error("read the transport header")]
    Read(#[source] io::Error),
    /// The first bytes are not a header.
    #[error("the connection does not start with a transport header although it was negotiated")]
    Preface,
    /// The declared length is too large.
    #[error("the transport header is {0} bytes long, more than the limit of 65536")]
    Length(usize),
    /// The bytes are not a valid message.
    #[error("decode the transport header")]
    Decode(#[source] prost::DecodeError),
    /// The port is zero or too large.
    #[error("the transport header names port {0}, expected 1 to 65535")]
    Port(i32),
}

impl SessionProtocol {
    /// The value of the metric label `session_protocol`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Http1 => "http/1",
            Self::Http2 => "http/2",
        }
    }
}

impl TransportHeader {
    /// The header as sent.
    pub(crate) fn encode(&self) -> Bytes {
        let kind = self.protocol.map(|protocol| match protocol {
            SessionProtocol::Http1 => wire::Kind::Http1(wire::Empty {}),
            SessionProtocol::Http2 => wire::Kind::Http2(wire::Empty {}),
        });
        let message = wire::Header {
            port: i32::from(self.port.get()),
            name: self.name.clone().unwrap_or_default(),
            session_protocol: kind.map(|kind| wire::SessionProtocol { kind: Some(kind) }),
        };
        let length = message.encoded_len();
        let mut bytes = BytesMut::with_capacity(PREFACE.len() + 4 + length);
        bytes.put_slice(PREFACE);
        bytes.put_u32(length as u32);
        bytes.put_slice(&message.encode_to_vec());
        bytes.freeze()
    }

    /// Reads one header and nothing beyond it. The caller sets the deadline.
    pub(crate) async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Self, ReadHeaderError> {
        let mut start = [0_u8; PREFACE.len() + 4];
        stream.read_exact(&mut start).await.map_err(ReadHeaderError::Read)?;
        let (preface, length) = start.split_at(PREFACE.len());
        if preface != PREFACE {
            return Err(ReadHeaderError::Preface);
        }
        let length = length.iter().fold(0_usize, |length, byte| (length << 8) | usize::from(*byte));
        if length > MAX_HEADER {
            return Err(ReadHeaderError::Length(length));
        }
        let mut message = vec![0_u8; length];
        stream.read_exact(&mut message).await.map_err(ReadHeaderError::Read)?;
        Self::decode(&message)
    }

    fn decode(message: &[u8]) -> Result<Self, ReadHeaderError> {
        let header = wire::Header::decode(message).map_err(ReadHeaderError::Decode)?;
        let port =
            u16::try_from(header.port).ok().and_then(NonZeroU16::new).ok_or(ReadHeaderError::Port(header.port))?;
        let kind = header.session_protocol.and_then(|protocol| protocol.kind);
        Ok(Self {
            port,
            name: Some(header.name).filter(|name| !name.is_empty()),
            protocol: kind.map(|kind| match kind {
                wire::Kind::Http1(_) => SessionProtocol::Http1,
                wire::Kind::Http2(_) => SessionProtocol::Http2,
            }),
        })
    }
}

/// The message, defined here because the published crate does not contain it.
mod wire {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Header {
        #[prost(int32, tag = "1")]
        pub(super) port: i32,
        #[prost(string, tag = "2")]
        pub(super) name: String,
        #[prost(message, optional, tag = "3")]
        pub(super) session_protocol: Option<SessionProtocol>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct SessionProtocol {
        #[prost(oneof = "Kind", tags = "1, 2")]
        pub(super) kind: Option<Kind>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Kind {
        #[prost(message, tag = "1")]
        Http1(Empty),
        #[prost(message, tag = "2")]
        Http2(Empty),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Empty {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(port: u16, name: Option<&str>, protocol: Option<SessionProtocol>) -> TransportHeader {
        TransportHeader { port: NonZeroU16::new(port).unwrap(), name: name.map(str::to_owned), protocol }
    }

    #[test]
    fn encodes_the_bytes_that_linkerd_expects() {
        let bytes = header(8080, None, Some(SessionProtocol::Http2)).encode();
        let mut expected = b"transport.l5d.io/v1\r\n\r\n\x00\x00\x00\x07".to_vec();
        expected.extend([0x08, 0x90, 0x3f, 0x1a, 0x02, 0x12, 0x00]);
        assert_eq!(bytes, expected);
        assert_eq!(&header(1, None, None).encode()[23..], [0, 0, 0, 2, 0x08, 0x01]);
    }

    #[tokio::test]
    async fn refuses_what_is_no_header() {
        for (bytes, expected) in [
            (&b"GET / HTTP/1.1\r\nhost: example.com\r\n\r\n"[..], "does not start"),
            (b"transport.l5d.io/v1\r\n\r\n\xff\xff\xff\xff", "more than the limit"),
            (b"transport.l5d.io/v1\r\n\r\n\0\0\0\x02\x08\x00", "names port 0"),
            (b"transport.l5d.io/v1\r\n\r\n\0\0\0\x01\x08", "decode"),
            (b"transport.l5d.io/v1\r\n", "read the"),
        ] {
            let mut stream = bytes;
            let error = TransportHeader::read(&mut stream).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[tokio::test]
    async fn leaves_what_follows_unread() {
        let mut bytes = header(80, None, None).encode().to_vec();
        bytes.extend(b"payload");
        let mut stream = &bytes[..];
        TransportHeader::read(&mut stream).await.unwrap();
        assert_eq!(stream, b"payload");
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_read_back(port in 1_u16.., name in proptest::option::of("[a-z.]{1,40}"), kind in 0_u8..3) {
            let protocol = [None, Some(SessionProtocol::Http1), Some(SessionProtocol::Http2)][usize::from(kind)];
            let sent = header(port, name.as_deref(), protocol);
            let bytes = sent.encode();
            let read = TransportHeader::decode(&bytes[PREFACE.len() + 4..]).unwrap();
            prop_assert_eq!(read, sent);
        }
    }
}
