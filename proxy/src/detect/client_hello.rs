//! Reads the server name out of a TLS ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3) without being TLS.
//!
//! Reads untrusted bytes: every access is bounded, and anything odd is "not TLS".

const RECORD_HANDSHAKE: u8 = 22;
const HANDSHAKE_CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
const NAME_TYPE_HOST: u8 = 0;

/// What the first bytes of a connection are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hello {
    /// Something else than a ClientHello.
    NotTls,
    /// A ClientHello whose server name has not arrived yet.
    Incomplete,
    /// A ClientHello with the server name, if it has one.
    Complete(Option<String>),
}

/// Judges the first bytes of a connection. Only the first record counts: ClientHellos that are spread over several records
/// are as good as never sent, and Linkerd does not read them either.
pub(crate) fn parse_client_hello(bytes: &[u8]) -> Hello {
    if bytes.first().is_some_and(|first| *first != RECORD_HANDSHAKE) {
        return Hello::NotTls;
    }
    let mut record = Reader(bytes);
    let Some(_) = record.u8() else { return Hello::Incomplete };
    let Some(version) = record.u16() else { return Hello::Incomplete };
    if !(0x0301..=0x0303).contains(&version) {
        return Hello::NotTls;
    }
    let Some(length) = record.u16() else { return Hello::Incomplete };
    let whole = record.0.len() >= usize::from(length);
    let body = &record.0[..record.0.len().min(usize::from(length))];
    match server_name(body) {
        Ok(name) => Hello::Complete(name),
        Err(Stop::Malformed) => Hello::NotTls,
        Err(Stop::End) if whole => Hello::NotTls,
        Err(Stop::End) => Hello::Incomplete,
    }
}

enum Stop {
    /// The bytes end here.
    End,
    /// The bytes are no ClientHello.
    Malformed,
}

fn server_name(body: &[u8]) -> Result<Option<String>, Stop> {
    let mut hello = Reader(body);
    if hello.u8().ok_or(Stop::End)? != HANDSHAKE_CLIENT_HELLO {
        return Err(Stop::Malformed);
    }
    hello.skip(3)?; // length
    hello.skip(2 + 32)?; // version, random
    let session = hello.u8().ok_or(Stop::End)?;
    hello.skip(usize::from(session))?;
    let suites = hello.u16().ok_or(Stop::End)?;
    hello.skip(usize::from(suites))?;
    let compression = hello.u8().ok_or(Stop::End)?;
    hello.skip(usize::from(compression))?;
    let Some(mut left) = hello.u16().map(usize::from) else {
        // TLS 1.2 allows a ClientHello without extensions.
        return Err(Stop::End);
    };
    while left >= 4 {
        let kind = hello.u16().ok_or(Stop::End)?;
        let length = usize::from(hello.u16().ok_or(Stop::End)?);
        left = left.checked_sub(4 + length).ok_or(Stop::Malformed)?;
        if kind == EXTENSION_SERVER_NAME {
            let extension = hello.0.get(..length).ok_or(Stop::End)?;
            return host_name(extension).map(Some).ok_or(Stop::Malformed);
        }
        hello.skip(length)?;
    }
    Ok(None)
}

fn host_name(extension: &[u8]) -> Option<String> {
    let mut reader = Reader(extension);
    let _list = reader.u16()?;
    if reader.u8()? != NAME_TYPE_HOST {
        return None;
    }
    let length = usize::from(reader.u16()?);
    let name = std::str::from_utf8(reader.0.get(..length)?).ok()?;
    (!name.is_empty() && name.is_ascii()).then(|| name.to_ascii_lowercase())
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u8(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk::<2>()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*first))
    }

    fn skip(&mut self, length: usize) -> Result<(), Stop> {
        self.0 = self.0.get(length..).ok_or(Stop::End)?;
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rustls::pki_types::ServerName;

    use super::*;

    /// A real ClientHello, as rustls writes it.
    pub(in crate::detect) fn hello(name: &str) -> Vec<u8> {
        let config = rustls::ClientConfig::builder_with_provider(weft_tls::crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn reads_the_server_name() {
        assert_eq!(parse_client_hello(&hello("Web.Demo.example")), Hello::Complete(Some("web.demo.example".into())));
    }

    #[test]
    fn an_address_is_no_server_name() {
        assert_eq!(parse_client_hello(&hello("10.0.0.1")), Hello::Complete(None));
    }

    #[test]
    fn other_protocols_are_not_tls() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x02\x00\x00\x01x", b"\x16\x03\x01\x00\x01\x02", b"\x00"] {
            assert_eq!(parse_client_hello(bytes), Hello::NotTls, "{bytes:?}");
        }
    }

    #[test]
    fn every_prefix_is_incomplete_or_complete_and_never_wrong() {
        let bytes = hello("web.demo");
        for length in 0..bytes.len() {
            let judged = parse_client_hello(&bytes[..length]);
            assert!(
                matches!(&judged, Hello::Incomplete) || judged == Hello::Complete(Some("web.demo".into())),
                "{length}: {judged:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
            parse_client_hello(&bytes);
            if bytes.len() > 6 {
                bytes[0] = 22;
                bytes[1] = 3;
                bytes[2] = 1;
                bytes[5] = 1;
                parse_client_hello(&bytes);
            }
        }
    }
}
