//! Who may ask on the port of the dashboard: the page that has the key, and no other site that a browser shows.
//!
//! - **Host**: a name that somebody made point at this machine (DNS rebinding) is refused; an address is no name.
//! - **Origin**: a browser says which site asks; another one than that of the page is refused.
//! - **Key**: random for each run, in the part of the address that browsers do not send; the page sends it with every
//!   question in a header that other sites cannot set. It also keeps other users of this machine out.

use std::net::IpAddr;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, Response, StatusCode, header, uri::Authority};

use super::{Body, failure};

/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// A new key, as it stands in addresses.
pub fn new_key() -> String {
    BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; KEY_BYTES]>())
}

/// What a request has to bring.
#[derive(Clone, Debug)]
pub struct Guard {
    port: u16,
    key: String,
}

impl Guard {
    /// A guard of the page on this port.
    pub fn new(port: u16, key: String) -> Self {
        Self { port, key }
    }

    /// Whether this is `localhost` or an address, with the port.
    fn is_own(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host().trim_start_matches('[').trim_end_matches(']');
        // Browsers leave the port of HTTP out.
        let port = authority.port_u16().unwrap_or(80);
        port == self.port && (name == "localhost" || name.parse::<IpAddr>().is_ok())
    }

    /// Admits a request for the page itself, which is no secret.
    ///
    /// # Errors
    /// The answer that refuses it.
    #[expect(clippy::result_large_err, reason = "it is sent as it is")]
    pub fn admit_page(&self, headers: &HeaderMap) -> Result<(), Response<Body>> {
        if only(headers, &header::HOST).is_some_and(|host| self.is_own(host)) {
            return Ok(());
        }
        let message = format!("the dashboard answers to `localhost` or an IP address, with the port {}", self.port);
        Err(failure(StatusCode::MISDIRECTED_REQUEST, &message))
    }

    /// Admits a question.
    ///
    /// # Errors
    /// The answer that refuses it.
    #[expect(clippy::result_large_err, reason = "it is sent as it is")]
    pub fn admit_question(&self, headers: &HeaderMap) -> Result<(), Response<Body>> {
        self.admit_page(headers)?;
        if headers.contains_key(header::ORIGIN) {
            let origin = only(headers, &header::ORIGIN).and_then(|origin| origin.strip_prefix("http://"));
            if origin.is_none() || origin != only(headers, &header::HOST) {
                return Err(failure(StatusCode::FORBIDDEN, "another site asks"));
            }
        }
        let key = only(headers, &header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
        if !key.is_some_and(|key| same(key.as_bytes(), self.key.as_bytes())) {
            return Err(failure(StatusCode::UNAUTHORIZED, "the key is missing or wrong"));
        }
        let kind = only(headers, &header::CONTENT_TYPE).unwrap_or_default();
        if kind != "application/json" {
            return Err(failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "a question is application/json"));
        }
        Ok(())
    }
}

/// A header's value, if it is there once and is text.
fn only<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { value.to_str().ok() }
}

/// Compares in a time that does not depend on where the difference is.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    given.len() == wanted.len() && given.iter().zip(wanted).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(host: &str, origin: Option<&str>, key: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
        headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
        headers
    }

    #[test]
    fn the_page_with_its_key_may_ask_and_others_may_not() {
        let guard = Guard::new(50750, "key".to_owned());
        for (host, origin, key, expected) in [
            ("127.0.0.1:50750", Some("http://127.0.0.1:50750"), "key", None),
            ("localhost:50750", Some("http://localhost:50750"), "key", None),
            ("[::1]:50750", None, "key", None),
            ("192.0.2.1:50750", Some("http://192.0.2.1:50750"), "key", None),
            ("[2001:db8::1]:50750", Some("http://[2001:db8::1]:50750"), "key", None),
            ("127.0.0.1:50750", Some("http://192.0.2.1:50750"), "key", Some(StatusCode::FORBIDDEN)),
            ("127.0.0.1:50750", None, "", Some(StatusCode::UNAUTHORIZED)),
            ("127.0.0.1:50750", None, "kez", Some(StatusCode::UNAUTHORIZED)),
            ("127.0.0.1:50750", None, "keyy", Some(StatusCode::UNAUTHORIZED)),
            ("127.0.0.1:50750", Some("https://example.org"), "key", Some(StatusCode::FORBIDDEN)),
            ("127.0.0.1:50750", Some("http://127.0.0.1:8080"), "key", Some(StatusCode::FORBIDDEN)),
            ("127.0.0.1:50750", Some("null"), "key", Some(StatusCode::FORBIDDEN)),
            ("evil.example.org:50750", None, "key", Some(StatusCode::MISDIRECTED_REQUEST)),
            ("127.0.0.1.example.org:50750", None, "key", Some(StatusCode::MISDIRECTED_REQUEST)),
            ("127.0.0.1:50751", None, "key", Some(StatusCode::MISDIRECTED_REQUEST)),
            ("127.0.0.1", None, "key", Some(StatusCode::MISDIRECTED_REQUEST)),
        ] {
            let refused = guard.admit_question(&question(host, origin, key)).err().map(|answer| answer.status());
            assert_eq!(refused, expected, "{host} {origin:?} {key}");
        }
    }

    #[test]
    fn the_port_of_http_is_left_out() {
        let guard = Guard::new(80, "key".to_owned());
        assert!(guard.admit_question(&question("127.0.0.1", Some("http://127.0.0.1"), "key")).is_ok());
    }

    #[test]
    fn a_question_without_a_preflight_is_none() {
        let guard = Guard::new(50750, "key".to_owned());
        let mut headers = question("localhost:50750", None, "key");
        headers.insert(header::CONTENT_TYPE, "text/plain".parse().unwrap());
        let refused = guard.admit_question(&headers).unwrap_err();
        assert_eq!(refused.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }

    #[test]
    fn a_host_that_is_given_twice_is_none() {
        let guard = Guard::new(50750, "key".to_owned());
        let mut headers = question("localhost:50750", None, "key");
        headers.append(header::HOST, "evil.example.org".parse().unwrap());
        assert!(guard.admit_page(&headers).is_err());
    }

    #[test]
    fn keys_are_long_and_differ() {
        let (one, other) = (new_key(), new_key());
        assert!(one.len() >= 43 && one != other);
        assert!(one.chars().all(|it| it.is_ascii_alphanumeric() || it == '-' || it == '_'), "{one}");
    }
}
