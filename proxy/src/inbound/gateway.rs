//! The multicluster gateway: connections from other clusters' proxies whose transport header names a Service of this
//! one.
//!
//! ```text
//! direct -> name under a suffix -> policy of the proxy's own port -> no loop -> `forwarded` -> outbound side -> Service
//! ```
//!
//! Owns which names are served and how a request that comes back is noticed. Refuses to look a name up for a client
//! that policy has not admitted.

use std::{borrow::Cow, net::SocketAddr, sync::Arc};

use ::http::{
    HeaderMap, HeaderValue, Request, Response, Version,
    header::{FORWARDED, HOST},
    uri::Authority,
};
use tokio::io::{AsyncRead, AsyncWrite};
use weft_tls::identity::Identity;

use super::{Inbound, Serving, error::ConnectionError, tcp};
use crate::{
    destination::{Name, Suffix},
    http::{
        body::Body,
        headers::strip_hop_by_hop,
        informational::Informational,
        orig_proto::replace_authority,
        respond::{Failure, RequestKind},
        upgrade::Tunnel,
    },
    io::{Abort, Io},
    metrics::OTHER,
    outbound::RelayError,
    policy::{PortPolicy, authz::Client},
    transport_header::TransportHeader,
};

/// What all requests of one connection to a gateway share.
pub(super) struct Route {
    inbound: Arc<Inbound>,
    /// `None` if the gateway does not serve it.
    target: Option<Target>,
    /// Whether the client is this gateway.
    is_own: bool,
}

pub(crate) struct Target {
    name: Name,
    authority: Authority,
    host: HeaderValue,
    /// What the Service is told about the way of its requests.
    forwarded: HeaderValue,
}

impl Inbound {
    /// The name in a header, if it is one that this gateway serves.
    fn served(&self, header: &TransportHeader) -> Option<Name> {
        let name = Name::new(header.name.as_deref()?, header.port)?;
        let suffixes: &[Suffix] = &self.shared.config.inbound.gateway_suffixes;
        suffixes.iter().any(|suffix| suffix.covers(&name)).then_some(name)
    }

    /// The value of the label `target_name` for a header; empty for one of this pod.
    pub(super) fn target_name(&self, header: &TransportHeader) -> Cow<'static, str> {
        match &self.gateway {
            Some(_) if header.name.is_some() => match self.served(header) {
                Some(name) => self.shared.metrics.target_names.value(name.host()).to_owned().into(),
                None => OTHER.into(),
            },
            _ => "".into(),
        }
    }

    fn is_own(&self, client: &Client) -> bool {
        client.identity() == Some(&self.shared.config.identity.local_name)
    }
}

impl Route {
    /// The route of a connection with this header.
    pub(super) fn new(inbound: &Arc<Inbound>, header: &TransportHeader, client: &Client) -> Self {
        let own = &inbound.shared.config.identity.local_name;
        let target = inbound.served(header).and_then(|name| Target::new(name, own, client.identity()?));
        Self { inbound: Arc::clone(inbound), target, is_own: inbound.is_own(client) }
    }

    /// Sends a request that policy has admitted to the Service. Returns the tunnel that it opens, too.
    pub(super) async fn send(
        &self,
        mut request: Request<Body>,
        kind: RequestKind,
        informational: &Informational,
        client: SocketAddr,
    ) -> Result<(Response<Body>, Option<Tunnel>), RelayError> {
        let gateway = self.inbound.gateway.as_ref();
        let (Some(gateway), Some(target)) = (gateway, &self.target) else {
            return Err(RelayError::Failure(Failure::GatewayDomain));
        };
        if self.is_own || has_been_here(request.headers(), &self.inbound.shared.config.identity.local_name) {
            return Err(RelayError::Failure(Failure::Loop));
        }
        target.prepare(&mut request);
        if kind.orig_proto {
            // Upgrades are never carried.
            strip_hop_by_hop(request.headers_mut());
        }
        let named = gateway.named(&target.name, client).ok_or(RelayError::Failure(Failure::LoadShed))?;
        named.send(request, kind, informational).await
    }
}

impl Target {
    pub(crate) fn new(name: Name, own: &Identity, client: &Identity) -> Option<Self> {
        let host = name.http_authority();
        let forwarded = format!("by={own};for={client};host={host};proto=https");
        let forwarded = HeaderValue::try_from(forwarded).ok()?;
        Some(Self { authority: host.parse().ok()?, host: HeaderValue::try_from(host).ok()?, name, forwarded })
    }

    /// Gives a request the name that was checked, and says whom it comes from.
    pub(crate) fn prepare<B>(&self, request: &mut Request<B>) {
        let is_named = request.uri().authority().is_some_and(|named| {
            let has_port = named.port_u16().is_none_or(|port| port == self.name.port());
            has_port && named.host().eq_ignore_ascii_case(self.name.host())
        });
        if request.version() != Version::HTTP_2 || !is_named {
            replace_authority(request, &self.authority, &self.host);
        } else {
            request.headers_mut().remove(HOST);
        }
        request.headers_mut().append(FORWARDED, self.forwarded.clone());
    }
}

/// Whether a `Forwarded` field (RFC 7239) names this gateway. Its replicas share an identity.
pub(crate) fn has_been_here(headers: &HeaderMap, own: &Identity) -> bool {
    let fields = headers.get_all(FORWARDED).iter().filter_map(|field| field.to_str().ok());
    let mut pairs = fields.flat_map(|field| field.split([',', ';'])).filter_map(|pair| pair.split_once('='));
    pairs.any(|(key, value)| key.trim().eq_ignore_ascii_case("by") && value.trim().trim_matches('"') == own.as_str())
}

/// Forwards a connection to the Service that its header names, as long as the policy of this proxy's own port allows
/// it.
///
/// # Errors
/// When policy denies it, or the Service is not served here.
pub(super) fn forward<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    client: Client,
    own: SocketAddr,
    header: &TransportHeader,
    mut policy: PortPolicy,
) -> Result<Serving, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    let stream = tcp::admit(inbound, stream, &client, own, &mut policy)?;
    let (Some(gateway), Some(name)) = (&inbound.gateway, inbound.served(header)) else {
        return Err(ConnectionError::Gateway);
    };
    if inbound.is_own(&client) {
        return Err(ConnectionError::GatewayLoop);
    }
    let named = gateway.named(&name, client.addr).ok_or(ConnectionError::TooManyNames)?;
    let inbound = Arc::clone(inbound);
    Ok(Box::pin(async move {
        tokio::select! {
            forwarded = named.forward(stream) => Ok(forwarded?),
            revoked = tcp::revoked(&inbound, &mut policy, &client, own) => Err(revoked),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.cluster.local";

    #[test]
    fn forwarded_tells_who_has_seen_a_request() {
        let own: Identity = OWN.parse().unwrap();
        let been = |fields: &[String]| {
            let mut headers = HeaderMap::new();
            for field in fields {
                headers.append(FORWARDED, field.parse().unwrap());
            }
            has_been_here(&headers, &own)
        };
        for field in [
            format!("by={OWN};for=client;host=web;proto=https"),
            format!("for=a;by=other, For=b; By = \"{OWN}\""),
            format!("proto=http;BY={OWN}"),
        ] {
            assert!(been(std::slice::from_ref(&field)), "{field}");
            assert!(been(&["by=other;for=a".to_owned(), field]));
        }
        for field in [format!("for={OWN};by=other"), format!("by=x{OWN}"), format!("xby={OWN}"), String::new()] {
            assert!(!been(std::slice::from_ref(&field)), "{field}");
        }
    }

    fn prepared(version: Version, target: &str, host: Option<&str>) -> (String, Option<String>) {
        let name = Name::new("web.demo.svc.cluster.local", 80.try_into().unwrap()).unwrap();
        let target_of = Target::new(name, &OWN.parse().unwrap(), &"client.demo".parse().unwrap()).unwrap();
        let mut request = Request::builder().version(version).uri(target).header("forwarded", "by=other");
        if let Some(host) = host {
            request = request.header("host", host);
        }
        let mut request = request.body(()).unwrap();
        target_of.prepare(&mut request);
        let forwarded: Vec<_> = request.headers().get_all(FORWARDED).iter().collect();
        let expected = format!("by={OWN};for=client.demo;host=web.demo.svc.cluster.local;proto=https");
        assert_eq!(forwarded, ["by=other", &expected]);
        let host = request.headers().get(HOST).map(|host| host.to_str().unwrap().to_owned());
        (request.uri().to_string(), host)
    }

    #[test]
    fn requests_get_the_name_that_was_checked() {
        const NAME: &str = "web.demo.svc.cluster.local";
        let named = || Some(NAME.to_owned());
        for (version, target, host, expected) in [
            (Version::HTTP_11, "/a?b", Some("web.remote"), ("/a?b".to_owned(), named())),
            (Version::HTTP_11, "/", None, ("/".to_owned(), named())),
            (Version::HTTP_11, "http://other/a", Some("other"), (format!("http://{NAME}/a"), named())),
            (Version::HTTP_2, "http://other/a", None, (format!("http://{NAME}/a"), None)),
            (Version::HTTP_2, "/a", Some("other"), (format!("http://{NAME}/a"), None)),
            (
                Version::HTTP_2,
                "http://web.demo.svc.cluster.local:80/a",
                None,
                ("http://web.demo.svc.cluster.local:80/a".to_owned(), None),
            ),
        ] {
            assert_eq!(prepared(version, target, host), expected, "{version:?} {target}");
        }
    }
}
