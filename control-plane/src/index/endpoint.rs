//! One endpoint as clients see it.

use std::{collections::BTreeMap, net::SocketAddr};

/// How clients may speak to an endpoint's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// Nothing is known.
    Unknown,
    /// HTTP/1 may travel in HTTP/2.
    H2,
    /// Nothing may be read.
    Opaque,
}

/// Who an endpoint's proxy proves to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerIdentity {
    /// A service account of the cluster, by its name, which is also what clients ask for in TLS.
    ServiceAccount(String),
    /// A machine outside the cluster.
    External {
        /// Its SPIFFE ID.
        id: String,
        /// The name that clients ask for in TLS.
        server_name: String,
    },
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Its address.
    pub(crate) addr: SocketAddr,
    /// Its own labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Identity of its proxy; `None` means plain text.
    pub(crate) identity: Option<PeerIdentity>,
    /// What its proxy understands.
    pub(crate) hint: Hint,
    /// The proxy's port for connections with a transport header.
    pub(crate) transport_port: Option<u16>,
    /// Whether HTTP/2 connections to it are kept alive by pings.
    pub(crate) http2: bool,
    /// Whether its port is opaque.
    pub(crate) opaque: bool,
}

impl Endpoint {
    /// An address of which nothing is known.
    pub(crate) fn plain(addr: SocketAddr) -> Self {
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
