//! Rules beyond types, for each kind that has some.

use k8s_openapi::{
    api::{
        core::v1::{Endpoints, Pod, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::Object;
use crate::{
    field::{FieldPath, Invalid},
    inject,
    policy::validate,
    profile, workload,
};

/// The problems of an object whose types are right.
pub(super) fn check(object: &Object) -> Vec<Invalid> {
    match object {
        Object::Namespace(namespace) => inject::check_annotations(&namespace.metadata),
        Object::Pod(pod) => check_pod(pod),
        Object::Service(service) => check_service(service),
        Object::Endpoints(endpoints) => check_endpoints(endpoints),
        Object::EndpointSlice(slice) => check_slice(slice),
        Object::Deployment(deployment) => check_template(deployment.spec.template.metadata.as_ref()),
        Object::ReplicaSet(set) => {
            check_template(set.spec.template.as_ref().and_then(|template| template.metadata.as_ref()))
        }
        Object::Server(server) => validate::server(server),
        Object::ServerAuthorization(authorization) => validate::server_authorization(authorization),
        Object::AuthorizationPolicy(policy) => validate::authorization_policy(policy),
        Object::MeshTLSAuthentication(authentication) => validate::mesh_tls_authentication(authentication),
        Object::NetworkAuthentication(authentication) => validate::network_authentication(authentication),
        Object::ServiceProfile(profile) => profile::validate(profile),
        Object::ExternalWorkload(external) => workload::check(external),
        Object::HttpLocalRateLimitPolicy(policy) => validate::http_local_rate_limit_policy(policy),
        Object::EgressNetwork(egress) => validate::egress_network(egress),
        Object::HttpRoute(route) => validate::http_route(route),
        Object::GatewayHttpRoute(route) => validate::gateway_http_route(route),
        Object::GrpcRoute(route) => validate::grpc_route(route),
        Object::TlsRoute(route) => validate::tls_route(route),
        Object::TcpRoute(route) => validate::tcp_route(route),
        Object::Node(_)
        | Object::Job(_)
        | Object::ServiceAccount(_)
        | Object::ConfigMap(_)
        | Object::Secret(_)
        | Object::ReferenceGrant(_) => Vec::new(),
    }
}

fn check_template(metadata: Option<&ObjectMeta>) -> Vec<Invalid> {
    let found = metadata.map(inject::check_annotations).unwrap_or_default();
    let under = |invalid: Invalid| Invalid { field: invalid.field.under(FieldPath::of("spec.template")), ..invalid };
    found.into_iter().map(under).collect()
}

fn check_pod(pod: &Pod) -> Vec<Invalid> {
    let mut found = inject::check_annotations(&pod.metadata);
    let ips = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    for (index, ip) in ips.enumerate() {
        if ip.ip.parse::<std::net::IpAddr>().is_err() {
            found.push(
                FieldPath::of("status.podIPs")
                    .index(index)
                    .key("ip")
                    .invalid(format!("bad address {:?}, expected an IP address", ip.ip)),
            );
        }
    }
    found
}

fn check_service(service: &Service) -> Vec<Invalid> {
    let mut found = Vec::from_iter(inject::check_opaque_ports(&service.metadata).err());
    let Some(spec) = &service.spec else { return found };
    for (index, port) in spec.ports.iter().flatten().enumerate() {
        if u16::try_from(port.port).map_or(true, |port| port == 0) {
            found.push(
                FieldPath::of("spec.ports")
                    .index(index)
                    .key("port")
                    .invalid(format!("bad port {}, expected 1-65535", port.port)),
            );
        }
    }
    let ips = spec
        .cluster_ips
        .iter()
        .flatten()
        .enumerate()
        .map(|(index, ip)| (FieldPath::of("spec.clusterIPs").index(index), ip));
    for (field, ip) in ips.chain(spec.cluster_ip.iter().map(|ip| (FieldPath::of("spec.clusterIP"), ip))) {
        if !ip.is_empty() && ip != "None" && ip.parse::<std::net::IpAddr>().is_err() {
            found.push(field.invalid(format!("bad address {ip:?}, expected an IP address or None")));
        }
    }
    found
}

fn check_endpoints(endpoints: &Endpoints) -> Vec<Invalid> {
    let mut found = Vec::new();
    for (index, subset) in endpoints.subsets.iter().flatten().enumerate() {
        for (number, address) in subset.addresses.iter().flatten().enumerate() {
            if address.ip.parse::<std::net::IpAddr>().is_err() {
                let field = FieldPath::of("subsets").index(index).key("addresses").index(number).key("ip");
                found.push(field.invalid(format!("bad address {:?}, expected an IP address", address.ip)));
            }
        }
    }
    found
}

fn check_slice(slice: &EndpointSlice) -> Vec<Invalid> {
    let fits = |address: &str| match slice.address_type.as_str() {
        "IPv4" => address.parse::<std::net::Ipv4Addr>().is_ok(),
        "IPv6" => address.parse::<std::net::Ipv6Addr>().is_ok(),
        _ => true,
    };
    let mut found = Vec::new();
    if !matches!(slice.address_type.as_str(), "IPv4" | "IPv6" | "FQDN") {
        found.push(
            FieldPath::of("addressType")
                .invalid(format!("unknown type {:?}, expected IPv4, IPv6 or FQDN", slice.address_type)),
        );
    }
    for (index, endpoint) in slice.endpoints.iter().flatten().enumerate() {
        for (number, address) in endpoint.addresses.iter().enumerate().filter(|(_, address)| !fits(address)) {
            let field = FieldPath::of("endpoints").index(index).key("addresses").index(number);
            found.push(field.invalid(format!("bad address {address:?}, expected an {} address", slice.address_type)));
        }
    }
    found
}
