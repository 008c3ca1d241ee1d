//! What discovery looks up: the address that a connection was made to, or the name and port in a header.
//!
//! Owns the syntax of names. Refuses what is no DNS name: a name becomes part of questions to the control plane, of
//! headers and of log lines, and an application or another cluster chooses it.

use std::{fmt, net::SocketAddr, num::NonZeroU16, sync::Arc};

use http::uri::Authority;
use rustls::pki_types::DnsName;

/// A destination of connections or requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Destination {
    /// An original destination.
    Addr(SocketAddr),
    /// A name from a header.
    Name(Name),
}

/// A service's DNS name, in lower case and without a trailing dot, and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    host: Arc<str>,
    port: NonZeroU16,
}

/// The end of DNS names, at whole labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Suffix(
    /// Without dots at its ends; empty for every name.
    Box<str>,
);

impl Destination {
    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Addr(addr) => addr.port(),
            Self::Name(name) => name.port(),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addr(addr) => addr.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl From<SocketAddr> for Destination {
    fn from(addr: SocketAddr) -> Self {
        Self::Addr(addr)
    }
}

impl Name {
    /// The name with this host; `None` if it is no DNS name.
    pub(crate) fn new(host: &str, port: NonZeroU16) -> Option<Self> {
        Some(Self { host: read_host(host)?.into(), port })
    }

    /// Reads `host` or `host:port`; `None` if that is malformed, or if the host is an address.
    pub(crate) fn parse(text: &str, default_port: NonZeroU16) -> Option<Self> {
        let authority: Authority = text.parse().ok()?;
        let port = match text.strip_prefix(authority.host())? {
            "" => default_port,
            // A number may be parsed with a sign.
            port => port.strip_prefix(':').filter(|port| !port.starts_with('+'))?.parse().ok()?,
        };
        Self::new(authority.host(), port)
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port.get()
    }

    /// The name as an HTTP request contains it, without HTTP's own port.
    pub(crate) fn http_authority(&self) -> String {
        if self.port.get() == 80 { self.host.to_string() } else { self.to_string() }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Suffix {
    /// Reads a suffix such as `svc.cluster.local.`; a single dot is every name.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text == "." {
            return Some(Self("".into()));
        }
        read_host(text.strip_prefix('.').unwrap_or(text)).map(|host| Self(host.into()))
    }

    /// Whether a name has this suffix.
    pub(crate) fn covers(&self, name: &Name) -> bool {
        let before = name.host.strip_suffix(&*self.0);
        before.is_some_and(|before| before.is_empty() || self.0.is_empty() || before.ends_with('.'))
    }
}

fn read_host(host: &str) -> Option<String> {
    let host = host.strip_suffix('.').unwrap_or(host);
    // `DnsName` takes a trailing dot, too.
    let name = DnsName::try_from(host).ok().filter(|_| !host.ends_with('.'))?;
    Some(name.as_ref().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP: NonZeroU16 = NonZeroU16::new(80).unwrap();

    #[test]
    fn names_have_one_form() {
        for (text, expected) in [
            ("web.demo.svc.cluster.local", Some("web.demo.svc.cluster.local:80")),
            ("Web.Demo.svc.cluster.local.:8080", Some("web.demo.svc.cluster.local:8080")),
            ("web", Some("web:80")),
            ("", None),
            ("10.0.0.1:80", None),
            ("[::1]:80", None),
            ("web:", None),
            ("web:0", None),
            ("web:65536", None),
            ("web:+80", None),
            ("user@web:80", None),
            ("web/path", None),
            ("http://web", None),
            ("web..demo", None),
            ("web..", None),
            ("web demo", None),
            ("-web", None),
        ] {
            let name = Name::parse(text, HTTP).map(|name| name.to_string());
            assert_eq!(name.as_deref(), expected, "{text}");
        }
        let label = "a".repeat(63);
        assert!(Name::parse(&[&*label; 4].join("."), HTTP).is_none(), "longer than DNS allows");
    }

    #[test]
    fn requests_leave_out_the_port_of_http() {
        let authority = |text| Name::parse(text, HTTP).unwrap().http_authority();
        assert_eq!(authority("web:80"), "web");
        assert_eq!(authority("web:8080"), "web:8080");
    }

    #[test]
    fn a_suffix_ends_at_a_label() {
        for (suffix, name, is_covered) in [
            ("svc.cluster.local.", "web.demo.svc.cluster.local", true),
            ("SVC.cluster.local", "web.demo.svc.cluster.local", true),
            (".svc.cluster.local", "web.demo.svc.cluster.local", true),
            ("svc.cluster.local", "svc.cluster.local", true),
            ("svc.cluster.local", "web.demo.notsvc.cluster.local", false),
            ("svc.cluster.local", "svc.cluster.local.example.com", false),
            (".", "example.com", true),
        ] {
            let name = Name::parse(name, HTTP).unwrap();
            assert_eq!(Suffix::parse(suffix).unwrap().covers(&name), is_covered, "{suffix} {name}");
        }
        for malformed in ["", "..", "a b", "10.0.0.1"] {
            assert_eq!(Suffix::parse(malformed), None, "{malformed}");
        }
    }
}
