//! Snapshots as messages of the destination API.

use std::time::Duration;

use weft_k8s_api::profile::GROUP as PROFILE_GROUP;
use weft_proto::linkerd::{
    destination::{
        DestinationProfile, Http2ClientParams, ProtocolHint, TlsIdentity, WeightedAddr, http2_client_params::KeepAlive,
        protocol_hint, tls_identity,
    },
    meta::{Metadata, Resource, metadata},
};

use super::routes;
use weft_index::{Endpoint, EndpointProfile, Hint, Key, Locality, PeerIdentity, ServiceProfile};

/// Weight of every endpoint; proxies ignore it, Linkerd sends this.
const WEIGHT: u32 = 10_000;
/// How often proxies ping idle and busy HTTP/2 connections, Linkerd's chart default.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a proxy waits for the answer to a ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// The message of an endpoint. `locality` is that of the clients that asked for its Service, and unknown to those that asked
/// for its address.
pub(super) fn weighted_addr(endpoint: &Endpoint, locality: Option<Locality>) -> WeightedAddr {
    let locality = locality.map(|locality| ("zone_locality".to_owned(), locality.label().to_owned()));
    WeightedAddr {
        addr: Some(endpoint.addr.into()),
        weight: WEIGHT,
        metric_labels: endpoint.labels.clone().into_iter().chain(locality).collect(),
        tls_identity: endpoint.identity.as_ref().map(tls_identity),
        protocol_hint: protocol_hint(endpoint),
        http2: endpoint.http2.then(|| Http2ClientParams {
            keep_alive: Some(KeepAlive {
                interval: KEEP_ALIVE_INTERVAL.try_into().ok(),
                timeout: KEEP_ALIVE_TIMEOUT.try_into().ok(),
                while_idle: true,
            }),
            ..Http2ClientParams::default()
        }),
        ..WeightedAddr::default()
    }
}

/// The profile of one endpoint.
pub(super) fn endpoint_profile(profile: &EndpointProfile) -> DestinationProfile {
    DestinationProfile {
        endpoint: Some(weighted_addr(&profile.endpoint, None)),
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
        PeerIdentity::ServiceAccount(name) => (name, tls_identity::Strategy::DnsLikeIdentity(dns(name))),
        PeerIdentity::External { id, server_name } => {
            let uri = tls_identity::UriLikeIdentity { uri: id.clone() };
            (server_name, tls_identity::Strategy::UriLikeIdentity(uri))
        }
    };
    TlsIdentity { server_name: Some(dns(server_name)), strategy: Some(strategy) }
}

fn protocol_hint(endpoint: &Endpoint) -> Option<ProtocolHint> {
    let protocol = match endpoint.hint {
        Hint::Unknown => return None,
        Hint::H2 => protocol_hint::Protocol::H2(protocol_hint::H2 {}),
        Hint::Opaque => protocol_hint::Protocol::Opaque(protocol_hint::Opaque {}),
    };
    let opaque_transport =
        endpoint.transport_port.map(|port| protocol_hint::OpaqueTransport { inbound_port: port.into() });
    Some(ProtocolHint { opaque_transport, protocol: Some(protocol) })
}
