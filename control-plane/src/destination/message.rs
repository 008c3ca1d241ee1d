//! Snapshots as messages of the destination API.

use weft_k8s_api::profile::GROUP as PROFILE_GROUP;
use weft_proto::linkerd::{
    destination::{
        AuthorityOverride, DestinationProfile, ProtocolHint, TlsIdentity, WeightedAddr, protocol_hint, tls_identity,
    },
    meta::{Metadata, Resource, metadata},
};

use super::{http2::MeshedHttp2, routes};
use weft_index::{Endpoint, EndpointProfile, Hint, Key, Locality, PeerIdentity, ServiceProfile};

/// The weight of every endpoint, as in Linkerd.
const WEIGHT: u32 = 10_000;
/// The factor of weights in the client's zone, if zones count
/// (`linkerd2:controller/api/destination/endpoint_translator.go`).
const ZONE_FACTOR: u32 = 10;

/// Settings of messages about endpoints. They are the same for the whole process, because messages are shared.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndpointSettings {
    /// Parameters of HTTP/2 connections to meshed endpoints.
    pub(crate) http2: MeshedHttp2,
    /// Whether endpoints in the client's zone have a higher weight; proxies that balance by latency ignore it.
    pub(crate) zone_weights: bool,
}

/// The message of an endpoint. `locality` is that of the clients that asked for its Service, and unknown to those that
/// asked for its address.
pub(super) fn weighted_addr(
    endpoint: &Endpoint,
    locality: Option<Locality>,
    settings: &EndpointSettings,
) -> WeightedAddr {
    let prefers = settings.zone_weights && locality == Some(Locality::Local);
    let locality = locality.map(|locality| ("zone_locality".to_owned(), locality.label().to_owned()));
    WeightedAddr {
        addr: Some(endpoint.addr.into()),
        weight: if prefers { WEIGHT * ZONE_FACTOR } else { WEIGHT },
        metric_labels: endpoint.labels.clone().into_iter().chain(locality).collect(),
        tls_identity: endpoint.identity.as_ref().map(tls_identity),
        protocol_hint: protocol_hint(endpoint),
        http2: settings.http2.message().filter(|_| endpoint.http2),
        authority_override: endpoint
            .authority_override
            .clone()
            .map(|authority_override| AuthorityOverride { authority_override }),
        ..WeightedAddr::default()
    }
}

/// The profile of one endpoint.
pub(super) fn endpoint_profile(profile: &EndpointProfile, settings: &EndpointSettings) -> DestinationProfile {
    DestinationProfile {
        endpoint: Some(weighted_addr(&profile.endpoint, None, settings)),
        opaque_protocol: profile.opaque,
        retry_budget: Some(routes::default_retry_budget()),
        ..DestinationProfile::default()
    }
}

/// The profile of a Service; an empty message for a port that the Service does not declare.
pub(super) fn service_profile(profile: &ServiceProfile) -> DestinationProfile {
    let ServiceProfile::Declared { service, port, name, opaque, profile } = profile else {
        return DestinationProfile::default();
    };
    let resource = |group: &str, kind: &str, key: &Key, port: u16| {
        let (name, namespace) = (key.name.clone(), key.namespace.clone());
        let (group, kind) = (group.to_owned(), kind.to_owned());
        let resource = Resource { group, kind, name, namespace, section: String::new(), port: port.into() };
        Metadata { kind: Some(metadata::Kind::Resource(resource)) }
    };
    let mut message = DestinationProfile {
        fully_qualified_name: name.clone(),
        opaque_protocol: *opaque,
        retry_budget: Some(routes::default_retry_budget()),
        parent_ref: Some(resource("core", "Service", service, *port)),
        ..DestinationProfile::default()
    };
    if let Some(profile) = profile {
        // Linkerd names no kind here: the objects of its cache have none.
        message.profile_ref = Some(resource(PROFILE_GROUP, "", &profile.key, 0));
        message.routes = profile.routes.iter().map(routes::route).collect();
        if let Some(budget) = profile.retry_budget {
            message.retry_budget = Some(routes::retry_budget(budget));
        }
        message.dst_overrides =
            profile.overrides.iter().map(|destination| routes::weighted_dst(destination, *port)).collect();
    }
    message
}

fn tls_identity(identity: &PeerIdentity) -> TlsIdentity {
    let dns = |name: &str| tls_identity::DnsLikeIdentity { name: name.to_owned() };
    let (server_name, strategy) = match identity {
        PeerIdentity::ServiceAccount(name) => (Some(name), tls_identity::Strategy::DnsLikeIdentity(dns(name))),
        PeerIdentity::Gateway(name) => (None, tls_identity::Strategy::DnsLikeIdentity(dns(name))),
        PeerIdentity::External { id, server_name } => {
            let uri = tls_identity::UriLikeIdentity { uri: id.clone() };
            (Some(server_name), tls_identity::Strategy::UriLikeIdentity(uri))
        }
    };
    TlsIdentity { server_name: server_name.map(|name| dns(name)), strategy: Some(strategy) }
}

fn protocol_hint(endpoint: &Endpoint) -> Option<ProtocolHint> {
    let protocol = match endpoint.hint {
        Hint::Unknown => return None,
        Hint::Detect => None,
        Hint::H2 => Some(protocol_hint::Protocol::H2(protocol_hint::H2 {})),
        Hint::Opaque => Some(protocol_hint::Protocol::Opaque(protocol_hint::Opaque {})),
    };
    let opaque_transport =
        endpoint.transport_port.map(|port| protocol_hint::OpaqueTransport { inbound_port: port.into() });
    Some(ProtocolHint { opaque_transport, protocol })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> EndpointSettings {
        EndpointSettings { http2: crate::destination::http2::DEFAULT.parse().unwrap(), zone_weights: false }
    }

    fn meshed(identity: PeerIdentity, hint: Hint) -> WeightedAddr {
        let plain = Endpoint::plain("10.0.0.1:80".parse().unwrap());
        weighted_addr(
            &Endpoint { identity: Some(identity), hint, http2: true, transport_port: Some(4143), ..plain },
            None,
            &settings(),
        )
    }

    #[test]
    fn a_gateways_identity_has_no_server_name() {
        let name = |identity: PeerIdentity| {
            let tls = meshed(identity, Hint::H2).tls_identity.unwrap();
            let Some(tls_identity::Strategy::DnsLikeIdentity(dns)) = tls.strategy else { panic!("{tls:?}") };
            (dns.name, tls.server_name.map(|name| name.name))
        };
        assert_eq!(name(PeerIdentity::Gateway("gw".to_owned())), ("gw".to_owned(), None));
        assert_eq!(name(PeerIdentity::ServiceAccount("sa".to_owned())), ("sa".to_owned(), Some("sa".to_owned())));
    }

    #[test]
    fn only_meshed_endpoints_have_a_hint_and_http2_parameters() {
        let account = || PeerIdentity::ServiceAccount("sa".to_owned());
        let detect = meshed(account(), Hint::Detect).protocol_hint.unwrap();
        assert_eq!(detect.protocol, None);
        assert_eq!(detect.opaque_transport.unwrap().inbound_port, 4143);
        let opaque = meshed(account(), Hint::Opaque).protocol_hint.unwrap().protocol;
        assert!(matches!(opaque, Some(protocol_hint::Protocol::Opaque(_))));
        assert_eq!(meshed(account(), Hint::H2).http2, settings().http2.message());
        let plain = weighted_addr(&Endpoint::plain("10.0.0.1:80".parse().unwrap()), None, &settings());
        assert_eq!((plain.protocol_hint, plain.http2, plain.weight), (None, None, 10_000));
    }

    #[test]
    fn an_authority_is_overridden_where_there_is_one() {
        let plain = Endpoint::plain("10.0.0.1:80".parse().unwrap());
        assert_eq!(weighted_addr(&plain, None, &settings()).authority_override, None);
        let gateway = Endpoint { authority_override: Some("web.shop.svc.east.local:80".to_owned()), ..plain };
        let authority = weighted_addr(&gateway, None, &settings()).authority_override.unwrap().authority_override;
        assert_eq!(authority, "web.shop.svc.east.local:80");
    }

    #[test]
    fn endpoints_in_the_clients_zone_weigh_more_if_zones_count() {
        let weight = |zone_weights, locality| {
            let settings = EndpointSettings { zone_weights, ..settings() };
            weighted_addr(&Endpoint::plain("10.0.0.1:80".parse().unwrap()), locality, &settings).weight
        };
        assert_eq!(weight(false, Some(Locality::Local)), 10_000);
        assert_eq!(weight(true, Some(Locality::Local)), 100_000);
        for locality in [Some(Locality::Remote), Some(Locality::Unknown), None] {
            assert_eq!(weight(true, locality), 10_000, "{locality:?}");
        }
    }
}
