//! Which requests a tap is for: the matches of `ObserveRequest`, with Linkerd's rules
//! (`linkerd/proxy/tap/src/grpc/match_.rs`).
//!
//! Owns the decision, without I/O. Refuses matches that cannot be read as a whole.

use std::net::{IpAddr, SocketAddr};

use http::{Method, Request, uri::Scheme};
use ipnet::IpNet;
use weft_proto::linkerd::{
    http_types::{Scheme as SchemeMessage, scheme},
    net::IpAddress,
    tap::observe_request::{
        self,
        r#match::{self as message, http::string_match, tcp},
    },
};

use super::Subject;
use crate::metrics::Labels;

/// Which requests a tap is for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Match {
    /// All of them; an empty list matches every request.
    All(Vec<Self>),
    /// One of them; an empty list matches none.
    Any(Vec<Self>),
    /// Not this one.
    Not(Box<Self>),
    /// The client's address.
    Source(TcpMatch),
    /// The server's address.
    Destination(TcpMatch),
    /// A label of the server.
    DestinationLabel(LabelMatch),
    /// A label of the route.
    RouteLabel(LabelMatch),
    /// The scheme; HTTP if the request names none.
    Scheme(Scheme),
    /// The method, which is case-sensitive.
    Method(Method),
    /// The host that the request names.
    Authority(StringMatch),
    /// The path, without the query.
    Path(StringMatch),
}

/// A label with this value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LabelMatch {
    key: String,
    value: String,
}

/// Addresses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TcpMatch {
    /// Ports from the first to the second.
    Ports(u16, u16),
    /// A network.
    Net(IpNet),
}

/// Texts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StringMatch {
    /// This one.
    Exact(String),
    /// Those that begin with this.
    Prefix(String),
}

/// Why a match cannot be read. Messages are Linkerd's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidMatch {
    #[error("missing required field")]
    Empty,
    #[error("invalid port number")]
    Port,
    #[error("invalid network address")]
    Network,
    #[error("invalid http method")]
    Method,
    #[error("invalid request scheme")]
    Scheme,
}

impl Match {
    /// Reads a match. Messages are at most as deep as prost reads them: 100.
    ///
    /// # Errors
    /// The first part that is missing or malformed.
    pub(crate) fn read(message: Option<observe_request::Match>) -> Result<Self, InvalidMatch> {
        Ok(match message.and_then(|message| message.r#match).ok_or(InvalidMatch::Empty)? {
            message::Match::All(seq) => Self::All(read_seq(seq)?),
            message::Match::Any(seq) => Self::Any(read_seq(seq)?),
            message::Match::Not(not) => Self::Not(Box::new(Self::read(Some(*not))?)),
            message::Match::Source(source) => Self::Source(TcpMatch::read(source)?),
            message::Match::Destination(destination) => Self::Destination(TcpMatch::read(destination)?),
            message::Match::DestinationLabel(label) => Self::DestinationLabel(LabelMatch::read(label)?),
            message::Match::RouteLabel(label) => Self::RouteLabel(LabelMatch::read(label)?),
            message::Match::Http(http) => match http.r#match.ok_or(InvalidMatch::Empty)? {
                message::http::Match::Scheme(scheme) => Self::Scheme(read_scheme(scheme)?),
                message::http::Match::Method(method) => {
                    let method = method.r#type.ok_or(InvalidMatch::Empty)?;
                    Self::Method(method.try_into().map_err(|_| InvalidMatch::Method)?)
                }
                message::http::Match::Authority(authority) => Self::Authority(StringMatch::read(authority)?),
                message::http::Match::Path(path) => Self::Path(StringMatch::read(path)?),
            },
        })
    }

    /// Whether a request is one of those.
    pub(crate) fn matches<B>(&self, request: &Request<B>, subject: &Subject) -> bool {
        match self {
            Self::All(all) => all.iter().all(|inner| inner.matches(request, subject)),
            Self::Any(any) => any.iter().any(|inner| inner.matches(request, subject)),
            Self::Not(not) => !not.matches(request, subject),
            Self::Source(addresses) => addresses.matches(subject.source),
            Self::Destination(addresses) => addresses.matches(subject.destination),
            Self::DestinationLabel(label) => label.matches(&subject.destination_labels),
            Self::RouteLabel(label) => label.matches(&subject.route_labels),
            Self::Scheme(scheme) => request.uri().scheme().unwrap_or(&Scheme::HTTP) == scheme,
            Self::Method(method) => request.method() == method,
            Self::Authority(text) => authority(request).is_some_and(|authority| text.matches(authority)),
            Self::Path(text) => text.matches(request.uri().path()),
        }
    }
}

/// The host that a request names: its target's, else its `Host` field.
pub(super) fn authority<B>(request: &Request<B>) -> Option<&str> {
    let host = || request.headers().get(http::header::HOST).and_then(|host| host.to_str().ok());
    request.uri().authority().map(http::uri::Authority::as_str).or_else(host)
}

/// Empty members are skipped, as by Linkerd.
fn read_seq(seq: message::Seq) -> Result<Vec<Match>, InvalidMatch> {
    seq.matches.into_iter().filter(|inner| inner.r#match.is_some()).map(|inner| Match::read(Some(inner))).collect()
}

fn read_scheme(message: SchemeMessage) -> Result<Scheme, InvalidMatch> {
    match message.r#type.ok_or(InvalidMatch::Empty)? {
        scheme::Type::Registered(http) if http == i32::from(scheme::Registered::Http) => Ok(Scheme::HTTP),
        scheme::Type::Registered(https) if https == i32::from(scheme::Registered::Https) => Ok(Scheme::HTTPS),
        scheme::Type::Registered(_) => Err(InvalidMatch::Scheme),
        scheme::Type::Unregistered(name) => name.parse().map_err(|_| InvalidMatch::Scheme),
    }
}

impl LabelMatch {
    fn read(message: message::Label) -> Result<Self, InvalidMatch> {
        let message::Label { key, value } = message;
        if key.is_empty() || value.is_empty() {
            return Err(InvalidMatch::Empty);
        }
        Ok(Self { key, value })
    }

    fn matches(&self, labels: &Labels) -> bool {
        labels.iter().any(|(key, value)| *key == self.key && *value == self.value)
    }
}

impl TcpMatch {
    fn read(message: message::Tcp) -> Result<Self, InvalidMatch> {
        match message.r#match.ok_or(InvalidMatch::Empty)? {
            tcp::Match::Ports(tcp::PortRange { min, max }) => {
                // If one of them is not set, the range is the other.
                let (first, last) = (if min == 0 { max } else { min }, if max == 0 { min } else { max });
                if first == 0 || last == 0 {
                    return Err(InvalidMatch::Empty);
                }
                let port = |number: u32| u16::try_from(number).map_err(|_| InvalidMatch::Port);
                Ok(Self::Ports(port(first)?, port(last)?))
            }
            tcp::Match::Netmask(tcp::Netmask { ip, mask }) => {
                if mask == 0 {
                    return Err(InvalidMatch::Empty);
                }
                let ip = IpAddr::try_from(ip.unwrap_or(IpAddress { ip: None })).map_err(|_| InvalidMatch::Empty)?;
                let length = u8::try_from(mask).map_err(|_| InvalidMatch::Network)?;
                Ok(Self::Net(IpNet::new(ip, length).map_err(|_| InvalidMatch::Network)?))
            }
        }
    }

    fn matches(&self, addr: SocketAddr) -> bool {
        match self {
            Self::Ports(first, last) => (*first..=*last).contains(&addr.port()),
            Self::Net(net) => net.contains(&addr.ip()),
        }
    }
}

impl StringMatch {
    fn read(message: message::http::StringMatch) -> Result<Self, InvalidMatch> {
        Ok(match message.r#match.ok_or(InvalidMatch::Empty)? {
            string_match::Match::Exact(text) => Self::Exact(text),
            string_match::Match::Prefix(text) => Self::Prefix(text),
        })
    }

    fn matches(&self, value: &str) -> bool {
        match self {
            Self::Exact(text) => value == text,
            Self::Prefix(text) => value.starts_with(text.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::http_types::HttpMethod;

    use super::{super::tests::subject, *};

    fn wrap(inner: message::Match) -> observe_request::Match {
        observe_request::Match { r#match: Some(inner) }
    }

    fn seq(inner: Vec<message::Match>) -> message::Seq {
        message::Seq { matches: inner.into_iter().map(wrap).collect() }
    }

    fn http(inner: message::http::Match) -> message::Match {
        message::Match::Http(message::Http { r#match: Some(inner) })
    }

    fn exact(text: &str) -> message::http::StringMatch {
        message::http::StringMatch { r#match: Some(string_match::Match::Exact(text.to_owned())) }
    }

    fn prefix(text: &str) -> message::http::StringMatch {
        message::http::StringMatch { r#match: Some(string_match::Match::Prefix(text.to_owned())) }
    }

    fn ports(min: u32, max: u32) -> message::Tcp {
        message::Tcp { r#match: Some(tcp::Match::Ports(tcp::PortRange { min, max })) }
    }

    fn net(ip: &str, mask: u32) -> message::Tcp {
        let ip = Some(ip.parse::<IpAddr>().unwrap().into());
        message::Tcp { r#match: Some(tcp::Match::Netmask(tcp::Netmask { ip, mask })) }
    }

    fn label(key: &str, value: &str) -> message::Label {
        message::Label { key: key.to_owned(), value: value.to_owned() }
    }

    fn scheme(kind: scheme::Type) -> message::Match {
        http(message::http::Match::Scheme(SchemeMessage { r#type: Some(kind) }))
    }

    fn method(method: &str) -> message::Match {
        http(message::http::Match::Method(HttpMethod::from(Method::from_bytes(method.as_bytes()).unwrap())))
    }

    #[test]
    fn requests_are_matched_as_by_linkerd() {
        use message::{Match as M, http::Match as H};
        let request = Request::post("/books/1?q").header("host", "web.demo:80").body(()).unwrap();
        for (name, message, expected) in [
            ("all of nothing", M::All(seq(vec![])), true),
            ("any of nothing", M::Any(seq(vec![])), false),
            ("not", M::Not(Box::new(wrap(M::All(seq(vec![]))))), false),
            ("all", M::All(seq(vec![method("POST"), method("GET")])), false),
            ("any", M::Any(seq(vec![method("POST"), method("GET")])), true),
            ("source port", M::Source(ports(50_000, 0)), true),
            ("another source port", M::Source(ports(0, 50_001)), false),
            ("destination ports", M::Destination(ports(8000, 8080)), true),
            ("ports below", M::Destination(ports(1, 8079)), false),
            ("source network", M::Source(net("10.1.0.0", 16)), true),
            ("another family", M::Source(net("fd00::", 8)), false),
            ("destination network", M::Destination(net("10.1.0.0", 16)), false),
            ("destination label", M::DestinationLabel(label("deployment", "web")), true),
            ("another value", M::DestinationLabel(label("deployment", "db")), false),
            ("a label of the route is none of the destination", M::DestinationLabel(label("route", "books")), false),
            ("route label", M::RouteLabel(label("route", "books")), true),
            ("scheme", scheme(scheme::Type::Registered(0)), true),
            ("https", scheme(scheme::Type::Registered(1)), false),
            ("a scheme by its name", scheme(scheme::Type::Unregistered("ftp".to_owned())), false),
            ("a method that is not registered", method("PURGE"), false),
            ("authority", http(H::Authority(exact("web.demo:80"))), true),
            ("a part of the authority", http(H::Authority(exact("web.demo"))), false),
            ("beginning of the authority", http(H::Authority(prefix("web."))), true),
            ("path without its query", http(H::Path(exact("/books/1"))), true),
            ("beginning of the path", http(H::Path(prefix("/books"))), true),
            ("another path", http(H::Path(prefix("/authors"))), false),
        ] {
            let read = Match::read(Some(wrap(message))).unwrap();
            assert_eq!(read.matches(&request, &subject()), expected, "{name}");
        }
    }

    #[test]
    fn http2_names_its_host_in_its_target() {
        let request = Request::get("http://web.demo/").header("host", "other").body(()).unwrap();
        assert_eq!(authority(&request), Some("web.demo"));
        assert_eq!(authority(&Request::get("/").body(()).unwrap()), None);
    }

    #[test]
    fn a_match_that_cannot_be_read_is_refused_as_a_whole() {
        use message::{Match as M, http::Match as H};
        let unregistered = HttpMethod {
            r#type: Some(weft_proto::linkerd::http_types::http_method::Type::Unregistered("a b".to_owned())),
        };
        let empty = observe_request::Match { r#match: None };
        for (message, expected) in [
            (M::Not(Box::new(empty)), InvalidMatch::Empty),
            (M::Source(message::Tcp { r#match: None }), InvalidMatch::Empty),
            (M::Source(ports(0, 0)), InvalidMatch::Empty),
            (M::Source(ports(1, 65_536)), InvalidMatch::Port),
            (M::Source(net("10.0.0.0", 0)), InvalidMatch::Empty),
            (M::Source(net("10.0.0.0", 33)), InvalidMatch::Network),
            (M::Source(net("fd00::", 300)), InvalidMatch::Network),
            (M::DestinationLabel(label("", "x")), InvalidMatch::Empty),
            (M::RouteLabel(label("x", "")), InvalidMatch::Empty),
            (M::Http(message::Http { r#match: None }), InvalidMatch::Empty),
            (http(H::Path(message::http::StringMatch { r#match: None })), InvalidMatch::Empty),
            (http(H::Method(unregistered)), InvalidMatch::Method),
            (scheme(scheme::Type::Registered(2)), InvalidMatch::Scheme),
            (scheme(scheme::Type::Unregistered("a b".to_owned())), InvalidMatch::Scheme),
            (M::All(seq(vec![method("GET"), M::Source(ports(0, 0))])), InvalidMatch::Empty),
        ] {
            assert_eq!(Match::read(Some(wrap(message.clone()))), Err(expected), "{message:?}");
        }
        assert_eq!(Match::read(None), Err(InvalidMatch::Empty));
    }
}
