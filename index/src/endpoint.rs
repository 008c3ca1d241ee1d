//! One endpoint as clients see it.

use std::{collections::BTreeMap, fmt, net::SocketAddr, ops::Deref, sync::OnceLock};

use bytes::Bytes;

/// The label of endpoints that may be sent nothing in plaintext.
const REQUIRE_MTLS: &str = "require_mtls";

/// How clients may use an endpoint's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// None: there is no proxy, or nothing is known of it.
    Unknown,
    /// The proxy detects the protocol: HTTP/1 is not upgraded.
    Detect,
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
    /// The gateway of another cluster: the name in its certificate. No server name is sent to clients, as in Linkerd;
    /// they use the same one.
    Gateway(String),
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
    /// Labels of this endpoint alone, without the locality, which differs between clients.
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
    /// The authority by which a gateway knows what is behind it.
    pub authority_override: Option<String>,
    /// The zone that its EndpointSlice names.
    pub zone: Option<String>,
}

impl Hint {
    /// Of a meshed port.
    pub(super) fn of(opaque: bool, h2_upgrade: bool) -> Self {
        match (opaque, h2_upgrade) {
            (true, _) => Self::Opaque,
            (false, true) => Self::H2,
            (false, false) => Self::Detect,
        }
    }
}

/// Where an endpoint is, seen from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locality {
    /// In the client's zone.
    Local,
    /// In another zone.
    Remote,
    /// The zone of one of them is not known.
    Unknown,
}

/// An endpoint that views share, with the bytes of each of the forms in which clients see it.
pub struct SharedEndpoint {
    endpoint: Endpoint,
    forms: [OnceLock<Bytes>; 3],
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
            authority_override: None,
            zone: None,
        }
    }

    /// Marks it as one that may be sent nothing in plaintext.
    pub(super) fn require_mtls(&mut self) {
        // Proxies without this feature show it as one more label in their metrics.
        self.labels.insert(REQUIRE_MTLS.to_owned(), "true".to_owned());
    }
}

impl Locality {
    /// The locality of an endpoint for a client, by their zones.
    pub(crate) fn new(client: Option<&str>, endpoint: Option<&str>) -> Self {
        match (client, endpoint) {
            (Some(client), Some(endpoint)) if client == endpoint => Self::Local,
            (Some(_), Some(_)) => Self::Remote,
            _ => Self::Unknown,
        }
    }

    /// The value of Linkerd's label `zone_locality`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Remote => "remote",
            Self::Unknown => "unknown",
        }
    }
}

impl SharedEndpoint {
    /// An endpoint that is not encoded yet.
    pub fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, forms: Default::default() }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The endpoint as clients with this locality see it, as bytes; encoded by the first reader.
    pub fn form(&self, locality: Locality, encode: impl FnOnce(&Endpoint) -> Bytes) -> Bytes {
        self.forms[locality as usize].get_or_init(|| encode(&self.endpoint)).clone()
    }
}

impl Deref for SharedEndpoint {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl PartialEq for SharedEndpoint {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.endpoint == other.endpoint
    }
}

impl fmt::Debug for SharedEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.endpoint.fmt(f)
    }
}
