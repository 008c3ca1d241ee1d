//! Names of destinations in requests: an authority, and the Service or pod that it refers to.

use std::net::IpAddr;

use weft_index::Key;

/// Port of an authority without one.
const DEFAULT_PORT: u16 = 80;
/// The longest authority that is parsed: a DNS name of 253 characters (RFC 1035) with dot, colon and port.
pub(crate) const MAX_AUTHORITY: usize = 260;

/// Host and port.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Authority {
    /// Host, without brackets.
    pub(crate) host: String,
    /// Port, 80 where none is given.
    pub(crate) port: u16,
}

/// What a host refers to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// An address.
    Ip(IpAddr),
    /// `service.namespace.svc.<domain>`.
    Service(Key),
    /// `hostname.service.namespace.svc.<domain>`.
    Instance(String, Key),
}

impl Authority {
    /// Parses `host`, `host:port`, `[v6]:port` or a bare IPv6 address; `None` for anything else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.len() > MAX_AUTHORITY {
            return None;
        }
        let port = |text: &str| text.parse().ok().filter(|port| *port != 0);
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if rest.is_empty() { DEFAULT_PORT } else { port(rest.strip_prefix(':')?)? })
        } else if text.parse::<std::net::Ipv6Addr>().is_ok() {
            (text, DEFAULT_PORT)
        } else {
            match text.split_once(':') {
                Some((host, number)) => (host, port(number)?),
                None => (text, DEFAULT_PORT),
            }
        };
        (!host.is_empty()).then(|| Self { host: host.to_owned(), port })
    }
}

/// What `host` refers to in a cluster of this domain; `None` for other names, which proxies then resolve by
/// DNS.
pub(crate) fn resolve(host: &str, domain: &str) -> Option<Host> {
    if let Ok(ip) = host.parse() {
        return Some(Host::Ip(ip));
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let name = name.strip_suffix(domain)?.strip_suffix(".svc.")?;
    let labels: Vec<_> = name.split('.').collect();
    if labels.iter().any(|label| label.is_empty()) {
        return None;
    }
    match labels[..] {
        [service, namespace] => Some(Host::Service(Key::new(namespace, service))),
        [hostname, service, namespace] => Some(Host::Instance(hostname.to_owned(), Key::new(namespace, service))),
        _ => None,
    }
}

/// The start of a client's text, short enough for an answer or a log.
pub(crate) fn excerpt(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_AUTHORITY)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_neither_read_nor_repeated() {
        let long = format!("{}.shop.svc.cluster.local", "\u{e4}".repeat(1 << 20));
        assert_eq!(Authority::parse(&long), None);
        assert!(excerpt(&long).len() <= MAX_AUTHORITY && long.starts_with(excerpt(&long)));
        assert_eq!(excerpt("web:80"), "web:80");
    }

    #[test]
    fn authorities() {
        for (text, expected) in [
            ("web.shop.svc.cluster.local:8080", Some(("web.shop.svc.cluster.local", 8080))),
            ("web.shop.svc.cluster.local", Some(("web.shop.svc.cluster.local", 80))),
            ("10.0.0.1:8080", Some(("10.0.0.1", 8080))),
            ("[fd00::1]:8080", Some(("fd00::1", 8080))),
            ("fd00::1", Some(("fd00::1", 80))),
            ("web:0", None),
            ("web:65536", None),
            ("web:http", None),
            (":80", None),
            ("", None),
            ("[fd00::1", None),
            ("[web]:80", None),
        ] {
            let got = Authority::parse(text);
            assert_eq!(got.as_ref().map(|a| (a.host.as_str(), a.port)), expected, "{text:?}");
        }
    }

    #[test]
    fn hosts() {
        for (text, expected) in [
            ("10.0.0.1", Some(Host::Ip("10.0.0.1".parse().unwrap()))),
            ("web.shop.svc.cluster.local", Some(Host::Service(Key::new("shop", "web")))),
            ("web.shop.svc.cluster.local.", Some(Host::Service(Key::new("shop", "web")))),
            ("db-0.db.shop.svc.cluster.local", Some(Host::Instance("db-0".into(), Key::new("shop", "db")))),
            ("web.shop.svc.other.local", None),
            ("web.svc.cluster.local", None),
            ("a.b.c.d.svc.cluster.local", None),
            (".shop.svc.cluster.local", None),
            ("example.org", None),
        ] {
            assert_eq!(resolve(text, "cluster.local"), expected, "{text:?}");
        }
    }
}
