//! Profiles of Services and of single endpoints.

use std::{net::SocketAddr, sync::Arc};

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use weft_k8s_api::profile::{self, ServiceProfileSpec};

use super::{Cluster, Endpoint, Key, store::Store, workload};

/// Which port of a Service, and who asks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProfileKey {
    /// The Service's port.
    pub(crate) port: u16,
    /// The client's namespace, where it is known: its own ServiceProfile comes before the Service's.
    pub(crate) namespace: Option<String>,
}

/// A ServiceProfile.
#[derive(Debug, PartialEq)]
pub(crate) struct ProfileRecord {
    pub(crate) key: Key,
    /// Routes and retry budget as they were written.
    pub(crate) spec: ServiceProfileSpec,
    /// Where requests go instead: authorities, and weights in ten thousandths.
    pub(crate) overrides: Vec<(String, u32)>,
}

impl ProfileRecord {
    /// Parses a ServiceProfile.
    ///
    /// # Errors
    /// When a weight is no quantity.
    pub(super) fn new(profile: profile::ServiceProfile) -> Result<Self, String> {
        let mut overrides = Vec::new();
        for (index, destination) in profile.spec.dst_overrides.iter().flatten().enumerate() {
            let weight = weight(&destination.weight).ok_or_else(|| {
                let found = &destination.weight;
                format!(
                    "spec.dstOverrides[{index}].weight: bad weight {found:?}, expected a quantity such as 1 or 500m"
                )
            })?;
            overrides.push((destination.authority.clone(), weight));
        }
        Ok(Self { key: Key::of(&profile.metadata), spec: profile.spec, overrides })
    }
}

/// A quantity in ten thousandths, as Linkerd sends it.
fn weight(quantity: &IntOrString) -> Option<u32> {
    const UNIT: f64 = 10_000.0;
    let units = match quantity {
        IntOrString::Int(number) => f64::from(*number),
        IntOrString::String(text) => match text.strip_suffix('m') {
            Some(thousandths) => thousandths.parse::<f64>().ok()? / 1000.0,
            None => text.parse().ok()?,
        },
    };
    let scaled = (units * UNIT).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    (0.0..=f64::from(u32::MAX)).contains(&scaled).then_some(scaled as u32)
}

/// The Service that a ServiceProfile's name means.
pub(super) fn service_of_profile(cluster: &Cluster, name: &str) -> Option<Key> {
    let labels = name.strip_suffix(&cluster.cluster_domain)?.strip_suffix(".svc.")?;
    let (service, namespace) = labels.split_once('.').filter(|(_, namespace)| !namespace.contains('.'))?;
    Some(Key::new(namespace, service))
}

/// What proxies should know of a Service's port before they connect.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ServiceProfile {
    /// The Service declares the port.
    Declared {
        /// The Service.
        service: Key,
        /// The port.
        port: u16,
        /// The Service's DNS name.
        name: String,
        /// Whether the port is opaque.
        opaque: bool,
        /// What a ServiceProfile says of it.
        profile: Option<Arc<ProfileRecord>>,
    },
    /// It does not, or there is no such Service (any more): the policy forbids it, the profile is empty.
    Undeclared,
}

/// What proxies should know of an address that is no Service's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointProfile {
    /// The endpoint.
    pub(crate) endpoint: Endpoint,
    /// Whether its port is opaque.
    pub(crate) opaque: bool,
}

pub(super) fn service(store: &Store, cluster: &Cluster, service: &Key, key: &ProfileKey) -> ServiceProfile {
    let Some(record) = store.service(service).filter(|record| record.port(key.port).is_some()) else {
        return ServiceProfile::Undeclared;
    };
    let name = cluster.service_name(&service.name, &service.namespace);
    let profile_in = |namespace: &str| store.profile(&Key::new(namespace, name.clone())).cloned();
    let profile = key.namespace.as_deref().and_then(profile_in).or_else(|| profile_in(&service.namespace));
    ServiceProfile::Declared {
        service: service.clone(),
        port: key.port,
        opaque: record.is_opaque(key.port, &cluster.default_opaque_ports),
        profile,
        name,
    }
}

/// The endpoint of the pod or the ExternalWorkload, or the bare address. An address that became ambiguous is bare, too: nothing can be said of it.
pub(super) fn endpoint(store: &Store, cluster: &Cluster, addr: SocketAddr) -> EndpointProfile {
    let pod = store.pod_by_addr(addr).ok().flatten();
    let known = pod.and_then(|(pod, port)| {
        let inner =
            SocketAddr::new(pod.ips.first().copied().filter(|_| port != addr.port()).unwrap_or(addr.ip()), port);
        let mut endpoint = workload::endpoint(store, cluster, pod, inner)?;
        endpoint.labels.insert("namespace".to_owned(), pod.key.namespace.clone());
        Some(endpoint)
    });
    let external = || {
        let external = store.workload_by_ip(addr.ip()).filter(|_| pod.is_none())?;
        Some(workload::external_endpoint(store, cluster, external, addr))
    };
    let endpoint = known.or_else(external).unwrap_or_else(|| Endpoint {
        opaque: cluster.default_opaque_ports.contains(addr.port()),
        ..Endpoint::plain(addr)
    });
    EndpointProfile { opaque: endpoint.opaque, endpoint }
}
