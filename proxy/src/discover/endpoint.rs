//! One endpoint from the control plane: its address, its identity, and the protocols of its proxy.
//!
//! Refuses endpoints whose identity cannot be parsed: they must never be used in plaintext instead.

use std::{borrow::Cow, collections::HashMap, net::SocketAddr, num::NonZeroU16};

use http::uri::Authority;
use rustls::pki_types::ServerName;
use weft_proto::linkerd::{
    destination::{WeightedAddr, http2_client_params::FlowControl, protocol_hint, tls_identity},
    net::InvalidIpAddress,
};
use weft_tls::identity::{Identity, ParseIdentityError};

use crate::{
    config::{Keepalive, MAX_WINDOW, Windows},
    metrics::{Labels, is_label_key},
    route::proto::duration,
};

/// The label with which the destination controller says that an endpoint may be sent nothing in plaintext.
const REQUIRE_MTLS: &str = "require_mtls";

/// An endpoint's description. Equal descriptions share connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointInfo {
    /// The workload's own address, regardless of its proxy's port.
    pub(crate) addr: SocketAddr,
    /// Its identity; `None` if it is not meshed.
    pub(crate) tls: Option<EndpointTls>,
    /// Protocols of its proxy.
    pub(crate) hint: ProtocolHint,
    /// Its proxy's port for connections with a transport header.
    pub(crate) transport_port: Option<NonZeroU16>,
    /// Replacement of `:authority`, for gateways.
    pub(crate) authority_override: Option<Authority>,
    /// Whether it may be sent nothing in plaintext: the Service is annotated with `weft.io/require-mtls`.
    pub(crate) requires_tls: bool,
    /// HTTP/2 pings on connections to it.
    pub(crate) pings: Option<Pings>,
    /// Windows of HTTP/2 connections to it.
    pub(crate) windows: NamedWindows,
    /// Metric labels, with the prefix `dst_`.
    pub(crate) labels: Labels,
    /// Whether the control plane knows it.
    pub(crate) is_discovered: bool,
}

/// Protocols of an endpoint's proxy (`protocol_hint`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ProtocolHint {
    /// Unknown.
    #[default]
    Unknown,
    /// HTTP/1 may travel as HTTP/2.
    Http2,
    /// The port's policy forwards bytes: a transport header must not announce HTTP, or the endpoint's proxy answers
    /// with 404.
    Opaque,
}

/// HTTP/2 pings on connections to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pings {
    /// How often, and for how long an answer may be missing.
    pub(crate) keepalive: Keepalive,
    /// Whether a connection without streams is pinged, too.
    pub(crate) while_idle: bool,
}

/// Windows that discovery names; `None` leaves one to the settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamedWindows {
    /// Bytes of a stream that are not read yet.
    pub(crate) stream: Option<u32>,
    /// Bytes of a connection.
    pub(crate) connection: Option<u32>,
}

/// The identity that an endpoint must prove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointTls {
    /// Must be in its certificate.
    pub(crate) server_id: Identity,
    /// Is sent in the ClientHello.
    pub(crate) server_name: ServerName<'static>,
}

/// Why an endpoint from the control plane cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndpointError {
    /// There is no address.
    #[error("the endpoint has no address")]
    NoAddr,
    /// The address is malformed.
    #[error("read the endpoint's address")]
    Addr(#[from] InvalidIpAddress),
    /// The port is zero or too large.
    #[error("the endpoint's port is {0}, expected 1 to 65535")]
    Port(u32),
    /// The identity is malformed.
    #[error("read the endpoint's identity")]
    Identity(#[from] ParseIdentityError),
    /// The identity has no name, or one that TLS cannot ask for.
    #[error("the endpoint's identity has no name")]
    NoName,
    /// The authority is malformed.
    #[error("read the endpoint's authority override")]
    Authority(#[from] http::uri::InvalidUri),
}

impl EndpointInfo {
    /// An address about which nothing is known: plaintext, as the application sent it.
    pub(crate) fn unmeshed(addr: SocketAddr) -> Self {
        Self {
            addr,
            tls: None,
            hint: ProtocolHint::Unknown,
            transport_port: None,
            authority_override: None,
            requires_tls: false,
            pings: None,
            windows: NamedWindows::default(),
            labels: Vec::new(),
            is_discovered: false,
        }
    }

    /// Parses an endpoint. `set_labels` are the labels of its set.
    pub(crate) fn read(message: WeightedAddr, set_labels: &HashMap<String, String>) -> Result<Self, EndpointError> {
        let addr = message.addr.ok_or(EndpointError::NoAddr)?;
        if addr.port == 0 || addr.port > u32::from(u16::MAX) {
            return Err(EndpointError::Port(addr.port));
        }
        let addr = SocketAddr::try_from(addr)?;
        let (hint, transport_port) = match message.protocol_hint {
            None => (ProtocolHint::Unknown, None),
            Some(message) => {
                let port = message.opaque_transport.and_then(|opaque| u16::try_from(opaque.inbound_port).ok());
                let hint = match message.protocol {
                    None => ProtocolHint::Unknown,
                    Some(protocol_hint::Protocol::H2(_)) => ProtocolHint::Http2,
                    Some(protocol_hint::Protocol::Opaque(_)) => ProtocolHint::Opaque,
                };
                // As in Linkerd, port 65535 counts as absent.
                (hint, port.filter(|port| *port < u16::MAX).and_then(NonZeroU16::new))
            }
        };
        let tls = match message.tls_identity {
            None => None,
            Some(identity) => {
                let server_id: Identity = match identity.strategy.ok_or(EndpointError::NoName)? {
                    tls_identity::Strategy::DnsLikeIdentity(dns) => dns.name.parse()?,
                    tls_identity::Strategy::UriLikeIdentity(uri) => uri.uri.parse()?,
                };
                let name = match (identity.server_name, &server_id) {
                    (Some(name), _) => name.name,
                    (None, Identity::Dns(name)) => name.to_string(),
                    (None, Identity::Uri(_)) => return Err(EndpointError::NoName),
                };
                let server_name = ServerName::try_from(name).map_err(|_| EndpointError::NoName)?;
                Some(EndpointTls { server_id, server_name })
            }
        };
        let authority_override = match message.authority_override {
            Some(over) if !over.authority_override.is_empty() => Some(over.authority_override.parse()?),
            _ => None,
        };
        let windows =
            message.http2.as_ref().and_then(|http2| http2.flow_control).map(NamedWindows::read).unwrap_or_default();
        let pings = message.http2.and_then(|http2| http2.keep_alive).and_then(|keepalive| {
            let read = |message| duration(message, "interval of pings").ok().flatten();
            let (interval, timeout) = (read(keepalive.interval)?, read(keepalive.timeout)?);
            let pings = Pings { keepalive: Keepalive { interval, timeout }, while_idle: keepalive.while_idle };
            (!interval.is_zero()).then_some(pings)
        });
        let requires_tls = message.metric_labels.get(REQUIRE_MTLS).is_some_and(|value| value == "true");
        let labels = read_labels(set_labels, &message.metric_labels);
        Ok(Self {
            addr,
            tls,
            hint,
            transport_port,
            authority_override,
            requires_tls,
            pings,
            windows,
            labels,
            is_discovered: true,
        })
    }
}

impl NamedWindows {
    /// These, and `others` for those that discovery does not name.
    pub(crate) fn or(self, others: Windows) -> Windows {
        Windows {
            stream: self.stream.unwrap_or(others.stream),
            connection: self.connection.unwrap_or(others.connection),
        }
    }

    /// Windows that would follow the bandwidth stay as the settings say.
    fn read(message: FlowControl) -> Self {
        let named = |size: u32| (size > 0 && !message.adaptive_flow_control).then_some(size.min(MAX_WINDOW));
        Self {
            stream: named(message.initial_stream_window_size),
            connection: named(message.initial_connection_window_size),
        }
    }
}

/// The set's labels and the endpoint's own, which take precedence, in a fixed order. Names of labels are written to the
/// metrics as they are, so those that Prometheus does not accept are left out: one of them would lose the whole scrape.
fn read_labels(set: &HashMap<String, String>, own: &HashMap<String, String>) -> Labels {
    let mut labels: Labels = set
        .iter()
        .filter(|(key, _)| !own.contains_key(*key))
        .chain(own)
        .filter(|(key, _)| is_label_key(key))
        .map(|(key, value)| (Cow::Owned(format!("dst_{key}")), Cow::Owned(value.clone())))
        .collect();
    labels.sort();
    labels
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::destination::{
        ProtocolHint, TlsIdentity,
        tls_identity::{DnsLikeIdentity, Strategy, UriLikeIdentity},
    };

    use super::*;

    fn meshed(strategy: Option<Strategy>, server_name: Option<&str>) -> WeightedAddr {
        WeightedAddr {
            addr: Some("10.0.0.1:8080".parse::<SocketAddr>().unwrap().into()),
            weight: 1,
            protocol_hint: Some(ProtocolHint {
                protocol: Some(protocol_hint::Protocol::H2(protocol_hint::H2 {})),
                opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: 4143 }),
            }),
            tls_identity: Some(TlsIdentity {
                strategy,
                server_name: server_name.map(|name| DnsLikeIdentity { name: name.to_owned() }),
            }),
            metric_labels: [("pod".to_owned(), "web-0".to_owned())].into(),
            ..Default::default()
        }
    }

    fn dns(name: &str) -> Option<Strategy> {
        Some(Strategy::DnsLikeIdentity(DnsLikeIdentity { name: name.to_owned() }))
    }

    #[test]
    fn reads_a_meshed_endpoint() {
        let set = [("service".to_owned(), "web".to_owned()), ("pod".to_owned(), "?".to_owned())].into();
        let endpoint = EndpointInfo::read(meshed(dns("web.demo"), Some("web.demo")), &set).unwrap();
        assert_eq!(endpoint.addr, "10.0.0.1:8080".parse().unwrap());
        assert_eq!(endpoint.hint, super::ProtocolHint::Http2);
        assert_eq!(endpoint.transport_port.unwrap().get(), 4143);
        assert_eq!(endpoint.tls.unwrap().server_id, "web.demo".parse().unwrap());
        assert_eq!(endpoint.labels, vec![("dst_pod".into(), "web-0".into()), ("dst_service".into(), "web".into())]);
    }

    #[test]
    fn keys_that_are_no_label_names_are_left_out() {
        let labels = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), "n".to_owned())).collect();
        let set = labels(&["service", "a b", "x=\"\"} 1\nrequest_total{y"]);
        let own = labels(&["pod", "k8s_job", "0", "a-b", "a.b", "é", "a\n", "a\"", "a{", "a,b"]);
        let mut message = meshed(dns("web.demo"), None);
        message.metric_labels = own;
        let found = EndpointInfo::read(message, &set).unwrap().labels;
        let names: Vec<_> = found.iter().map(|(key, _)| key.as_ref()).collect();
        assert_eq!(names, ["dst_0", "dst_k8s_job", "dst_pod", "dst_service"]);
    }

    #[test]
    fn a_port_for_headers_is_above_0_and_below_65535() {
        let read = |port| {
            let mut message = meshed(dns("web.demo"), Some("web.demo"));
            message.protocol_hint.as_mut().unwrap().opaque_transport.as_mut().unwrap().inbound_port = port;
            EndpointInfo::read(message, &HashMap::new()).unwrap().transport_port.map(std::num::NonZeroU16::get)
        };
        assert_eq!([0, 1, 65_534, 65_535, 65_536, 70_000].map(read), [None, Some(1), Some(65_534), None, None, None]);
    }

    #[test]
    fn an_unreadable_identity_is_an_error_and_never_plaintext() {
        let uri = Some(Strategy::UriLikeIdentity(UriLikeIdentity { uri: "spiffe://td/web".to_owned() }));
        for (strategy, name) in
            [(None, None), (dns("not a name"), None), (uri.clone(), None), (dns("web"), Some("b d"))]
        {
            assert!(EndpointInfo::read(meshed(strategy, name), &HashMap::new()).is_err());
        }
        assert!(EndpointInfo::read(meshed(uri, Some("web.demo")), &HashMap::new()).is_ok());
    }

    /// A change of weights keeps connections, because the descriptions are equal.
    #[test]
    fn a_weight_changes_nothing() {
        let weighted = |weight| {
            EndpointInfo::read(WeightedAddr { weight, ..meshed(dns("web.demo"), None) }, &HashMap::new()).unwrap()
        };
        assert_eq!(weighted(1), weighted(10_000));
        assert_eq!(weighted(0), weighted(1));
    }

    #[test]
    fn no_identity_is_plaintext() {
        let mut message = meshed(None, None);
        message.tls_identity = None;
        assert_eq!(EndpointInfo::read(message, &HashMap::new()).unwrap().tls, None);
    }
}
