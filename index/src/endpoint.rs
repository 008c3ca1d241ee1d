//! One endpoint as clients see it.

use std::{collections::BTreeMap, net::SocketAddr};

/// How clients may use an endpoint's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Unknown.
    Unknown,
    /// The proxy accepts HTTP/1 inside HTTP/2.
    H2,
    /// The port is opaque: the proxy must not detect a protocol.
    Opaque,
}

/// The identity of an endpoint's proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerIdentity {
    /// A service account of the cluster: the name in its certificate, which clients also send as the TLS
    /// server name.
    ServiceAccount(String),
    /// A machine outside the cluster.
    External {
        /// Its SPIFFE ID.
        id: String,
        /// The TLS server name that clients send.
        server_name: String,
    },
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Address and port of the application.
    pub addr: SocketAddr,
    /// Labels of this endpoint alone.
    pub labels: BTreeMap<String, String>,
    /// Identity of its proxy; `None` means plain text.
    pub identity: Option<PeerIdentity>,
    /// What its proxy understands.
    pub hint: Hint,
    /// The proxy's port for connections with a transport header.
    pub transport_port: Option<u16>,
    /// Whether HTTP/2 connections to it are kept alive by pings.
    pub http2: bool,
    /// Whether its port is opaque.
    pub opaque: bool,
}

impl Endpoint {
    /// An address about which nothing is known.
    pub fn plain(addr: SocketAddr) -> Self {
        Self {
            addr,
            labels: BTreeMap::new(),
            identity: None,
            hint: Hint::Unknown,
            transport_port: None,
            http2: false,
            opaque: false,
        }
    }
}
