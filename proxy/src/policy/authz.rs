//! Authorization of clients by network and identity, without IO.
//!
//! ```text
//! Client { address, TLS } + [Authorization] -> the first authorization that matches, or none
//! ```
//!
//! Owns the decision. Refuses to know the source of authorizations and the consequence for a denied client.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, LazyLock},
};

use ipnet::IpNet;
use weft_tls::identity::Identity;

use crate::{
    metrics::{ClientIds, Labels, label},
    route::Meta,
};

/// The client of an accepted connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    /// The peer's address.
    pub(crate) addr: SocketAddr,
    /// The result of TLS.
    pub(crate) tls: ClientTls,
}

/// The result of TLS with a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientTls {
    /// Mesh TLS is terminated here; the identity is missing if the client sent no certificate.
    Established(Option<Identity>),
    /// TLS for another server, which is passed through. The client chose its name, so it is not stored.
    Passthrough,
    /// No TLS that concerns the mesh.
    None(NoTls),
}

/// Why there is no mesh TLS, for the label `no_tls_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NoTls {
    /// The port is opaque, so TLS was not detected.
    PortSkipped,
    /// The client did not start TLS.
    NotFromRemote,
}

/// One set of clients that are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Authorization {
    /// Networks of the client; never empty.
    pub(crate) networks: Vec<Network>,
    /// What the client must prove.
    pub(crate) authentication: Authentication,
    /// The resource that grants it.
    pub(crate) meta: Arc<Meta>,
}

/// A network with exceptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) net: IpNet,
    /// Parts that are excluded.
    pub(crate) except: Vec<IpNet>,
}

/// What a client must prove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Authentication {
    /// Nothing.
    Unauthenticated,
    /// Mesh TLS, with or without a certificate.
    TlsUnauthenticated,
    /// One of these identities.
    TlsIdentities {
        /// Exact names.
        identities: HashSet<Box<str>>,
        /// Suffixes of names.
        suffixes: Vec<Suffix>,
    },
}

/// A suffix of DNS-like names. URIs (SPIFFE ids) are not DNS names, so no suffix matches them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Suffix {
    /// Every DNS-like name.
    Any,
    /// Names that end with this; it starts with a dot, so that `*.b` is not `ab` and not `b`.
    EndsWith(Box<str>),
}

static LOCALHOST: LazyLock<Arc<Meta>> = LazyLock::new(|| Arc::new(Meta::built_in("localhost")));

/// Finds the authorization that allows a client; `None` denies.
pub(crate) fn authorize<'a>(authorizations: &'a [Authorization], client: &Client) -> Option<&'a Arc<Meta>> {
    authorizations.iter().find(|authorization| authorization.permits(client)).map(|authorization| &authorization.meta)
}

impl Authorization {
    /// Allows clients of the pod itself, which the proxy sees as 127.0.0.1 and ::1. Linkerd adds it to every server
    /// and route from the controller, and to no default policy.
    pub(crate) fn localhost() -> Self {
        let networks = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
        Self {
            networks: networks.map(|ip| Network::from(IpNet::from(ip))).into(),
            authentication: Authentication::Unauthenticated,
            meta: Arc::clone(&LOCALHOST),
        }
    }

    /// Whether this authorization allows a client.
    fn permits(&self, client: &Client) -> bool {
        let ip = client.addr.ip().to_canonical();
        self.networks.iter().any(|network| network.contains(ip)) && self.authentication.permits(&client.tls)
    }
}

impl Authentication {
    fn permits(&self, tls: &ClientTls) -> bool {
        match (self, tls) {
            (Self::Unauthenticated, _) | (Self::TlsUnauthenticated, ClientTls::Established(_)) => true,
            (Self::TlsIdentities { identities, suffixes }, ClientTls::Established(Some(identity))) => {
                identities.contains(identity.as_str()) || suffixes.iter().any(|suffix| suffix.matches(identity))
            }
            _ => false,
        }
    }
}

impl Network {
    fn contains(&self, ip: IpAddr) -> bool {
        self.net.contains(&ip) && !self.except.iter().any(|except| except.contains(&ip))
    }
}

impl From<IpNet> for Network {
    fn from(net: IpNet) -> Self {
        Self { net, except: Vec::new() }
    }
}

impl Suffix {
    /// Joins labels in their order: `["b", "c"]` is `*.b.c`. An empty list means every DNS-like name.
    pub(crate) fn from_labels(labels: &[String]) -> Self {
        if labels.is_empty() {
            return Self::Any;
        }
        let mut end = String::new();
        for label in labels {
            end.push('.');
            end.push_str(&label.to_ascii_lowercase());
        }
        Self::EndsWith(end.into())
    }

    fn matches(&self, identity: &Identity) -> bool {
        match (self, identity) {
            (_, Identity::Uri(_)) => false,
            (Self::Any, Identity::Dns(_)) => true,
            (Self::EndsWith(end), Identity::Dns(name)) => name.len() > end.len() && name.ends_with(&**end),
        }
    }
}

impl Client {
    /// Whether the client belongs to the mesh, and may therefore see why it was refused.
    pub(crate) fn is_meshed(&self) -> bool {
        matches!(self.tls, ClientTls::Established(Some(_)))
    }

    /// The client's identity, if it has proven one.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        match &self.tls {
            ClientTls::Established(identity) => identity.as_ref(),
            ClientTls::Passthrough | ClientTls::None(_) => None,
        }
    }
}

impl ClientTls {
    /// Appends `tls` and the labels that belong to it; `ids` are the clients that have a label of their own.
    pub(crate) fn append_labels(&self, ids: &ClientIds, labels: &mut Labels) {
        match self {
            Self::Established(identity) => {
                let id = identity.as_ref().map(|identity| ids.value(identity.as_str()).to_owned()).unwrap_or_default();
                labels.extend([label("tls", "true"), label("client_id", id)]);
            }
            Self::Passthrough => labels.push(label("tls", "opaque")),
            Self::None(reason) => {
                labels.extend([label("tls", "no_identity"), label("no_tls_reason", reason.label())]);
            }
        }
    }
}

impl NoTls {
    /// The label's value.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::PortSkipped => "port_skipped",
            Self::NotFromRemote => "no_tls_from_remote",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(ip: &str, tls: ClientTls) -> Client {
        Client { addr: SocketAddr::new(ip.parse().unwrap(), 40_000), tls }
    }

    fn meshed(name: &str) -> ClientTls {
        ClientTls::Established(Some(name.parse().unwrap()))
    }

    const PLAIN: ClientTls = ClientTls::None(NoTls::NotFromRemote);

    fn identities(names: &[&str], suffixes: &[&[&str]]) -> Authentication {
        let suffixes = suffixes.iter().map(|labels| labels.iter().map(|label| (*label).to_owned()).collect::<Vec<_>>());
        Authentication::TlsIdentities {
            identities: names.iter().map(|name| (*name).into()).collect(),
            suffixes: suffixes.map(|labels| Suffix::from_labels(&labels)).collect(),
        }
    }

    fn check(name: &str, networks: &[&str], authentication: &Authentication, client: Client, expected: bool) {
        let networks = networks.iter().map(|net| Network::from(net.parse::<IpNet>().unwrap())).collect();
        let meta = Arc::new(Meta::built_in("test"));
        let authorization = Authorization { networks, authentication: authentication.clone(), meta };
        assert_eq!(authorize(&[authorization], &client).is_some(), expected, "{name}");
    }

    #[test]
    fn identity_decides_where_it_is_asked_for() {
        let all = &["0.0.0.0/0", "::/0"][..];
        let anybody = Authentication::Unauthenticated;
        let any_tls = Authentication::TlsUnauthenticated;
        let web = identities(&["web.demo"], &[]);
        let demo = identities(&[], &[&["demo", "mesh"]]);
        let any_identity = identities(&[], &[&[]]);
        let empty = identities(&[], &[]);
        let anonymous = || ClientTls::Established(None);
        for (name, authentication, tls, expected) in [
            ("anybody: plain", &anybody, PLAIN, true),
            ("anybody: passed through", &anybody, ClientTls::Passthrough, true),
            ("any tls: without certificate", &any_tls, anonymous(), true),
            ("any tls: plain", &any_tls, PLAIN, false),
            ("any tls: passed through", &any_tls, ClientTls::Passthrough, false),
            ("web: web", &web, meshed("web.demo"), true),
            ("web: other", &web, meshed("other.demo"), false),
            ("web: longer", &web, meshed("a.web.demo"), false),
            ("web: without certificate", &web, anonymous(), false),
            ("web: plain", &web, PLAIN, false),
            ("web: passed through by its name", &web, ClientTls::Passthrough, false),
            ("suffix: inside", &demo, meshed("web.demo.mesh"), true),
            ("suffix: itself", &demo, meshed("demo.mesh"), false),
            ("suffix: half a label", &demo, meshed("webdemo.mesh"), false),
            ("suffix: a URI", &demo, meshed("spiffe://x.demo.mesh"), false),
            ("any identity: a name", &any_identity, meshed("a"), true),
            ("any identity: a URI", &any_identity, meshed("spiffe://td/a"), false),
            ("any identity: without certificate", &any_identity, anonymous(), false),
            ("no identities: a name", &empty, meshed("a"), false),
        ] {
            check(name, all, authentication, client("10.0.0.1", tls), expected);
        }
    }

    #[test]
    fn networks_decide_by_the_address_of_the_peer() {
        let anybody = Authentication::Unauthenticated;
        for (name, networks, ip, expected) in [
            ("inside", &["10.0.0.0/8"][..], "10.1.2.3", true),
            ("outside", &["10.0.0.0/8"], "11.0.0.1", false),
            ("mapped", &["10.0.0.0/8"], "::ffff:10.0.0.1", true),
            ("second", &["10.0.0.0/8", "fd00::/8"], "fd00::1", true),
            ("other family", &["0.0.0.0/0"], "fd00::1", false),
            ("no network", &[], "10.0.0.1", false),
        ] {
            check(name, networks, &anybody, client(ip, PLAIN), expected);
        }
        let network = Network { net: "10.0.0.0/8".parse().unwrap(), except: vec!["10.9.0.0/16".parse().unwrap()] };
        assert!(network.contains("10.8.0.1".parse().unwrap()));
        assert!(!network.contains("10.9.0.1".parse().unwrap()));
    }

    #[test]
    fn localhost_is_two_addresses_and_needs_its_authorization() {
        for (ip, expected) in
            [("127.0.0.1", true), ("127.8.0.1", false), ("::1", true), ("::ffff:127.0.0.1", true), ("10.0.0.1", false)]
        {
            assert_eq!(authorize(&[Authorization::localhost()], &client(ip, PLAIN)).is_some(), expected, "{ip}");
            assert!(authorize(&[], &client(ip, PLAIN)).is_none(), "{ip}");
        }
    }

    #[test]
    fn the_first_authorization_that_fits_is_named() {
        let named = |name: &str, authentication| Authorization {
            networks: vec![Network::from("0.0.0.0/0".parse::<IpNet>().unwrap())],
            authentication,
            meta: Arc::new(Meta::built_in(name)),
        };
        let list = [named("web", identities(&["web.demo"], &[])), named("rest", Authentication::Unauthenticated)];
        assert_eq!(&*authorize(&list, &client("10.0.0.1", meshed("web.demo"))).unwrap().name, "web");
        assert_eq!(&*authorize(&list, &client("10.0.0.1", PLAIN)).unwrap().name, "rest");
    }

    #[test]
    fn clients_beyond_a_number_share_a_label() {
        let ids = ClientIds::default();
        let labels = |number| {
            let mut labels = Labels::new();
            meshed(&format!("a{number}.demo")).append_labels(&ids, &mut labels);
            labels
        };
        let seen: std::collections::HashSet<_> = (0..5000).map(labels).collect();
        assert_eq!(seen.len(), 1024 + 1);
        assert!(seen.contains(&vec![label("tls", "true"), label("client_id", "other")]));
        assert_eq!(labels(0)[1], label("client_id", "a0.demo"), "the first ones keep their own");
    }
}
