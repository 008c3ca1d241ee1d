//! The parts of each object that the index needs, parsed once.
//!
//! A record that equals its predecessor changes nothing. Parts of an object that cannot be parsed are
//! problems of its record, which the index reports once.

mod endpoints;
mod mirror;
mod pod;
mod profile;
mod route;
mod service;
mod status;
mod traffic;
mod workload;

use std::collections::BTreeMap;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use weft_k8s_api::{
    labels,
    policy::{
        DefaultPolicy, EgressNetwork, EgressNetworkSpec, HttpLocalRateLimitPolicy, HttpLocalRateLimitPolicySpec,
        IdentityMatch, NamespacedTargetRef, Server, ServerSpec, route::ParentKind,
    },
    ports::{PortList, PortSet},
};

pub(crate) use endpoints::subsets;
pub(crate) use mirror::Gateway;
pub(crate) use pod::{Lifecycle, PodRecord};
pub(crate) use profile::ProfileRecord;
pub use profile::{DstOverride, RetryBudget};
pub(crate) use route::{GrpcRule, HttpRule, RouteRecord, RuleBackend, Rules};
pub use route::{RouteId, RouteKind};
pub(crate) use service::ServiceRecord;
pub(crate) use service::{SliceEndpoint, SliceRecord, Target};
pub use status::Status;
pub(crate) use status::UNSET;
pub(crate) use traffic::Traffic;
pub(crate) use workload::ExternalWorkloadRecord;

/// Namespace and name of an object whose kind is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// The key of an object.
    pub fn of(metadata: &ObjectMeta) -> Self {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        Self { namespace: part(&metadata.namespace), name: part(&metadata.name) }
    }

    /// A key from its parts.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A workload's annotation about ports that no Server selects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DefaultPolicyAnnotation {
    /// The annotation is absent.
    Inherit,
    /// A policy.
    Policy(DefaultPolicy),
    /// The annotation cannot be parsed, which denies.
    Unreadable,
}

/// Labels of endpoints that no owner may replace.
const RESERVED: [&str; 10] = [
    "control_plane_ns",
    "external_workload",
    "namespace",
    "pod",
    "pod_template_hash",
    "require_mtls",
    "service",
    "serviceaccount",
    "zone",
    "zone_locality",
];
/// The labels of a mirrored Service have names of their own with this beginning, and none of them may be replaced.
const RESERVED_PREFIX: &str = "target_";
/// The longest kind that becomes a label, as names of kinds are DNS labels; bytes.
const MAX_KIND: usize = 63;
/// The longest name of an object, in bytes.
const MAX_NAME: usize = 253;

/// The owner of an object, whose kind and name become a label of endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub kind: String,
    pub name: String,
}

/// A MeshTLSAuthentication.
#[derive(Debug, PartialEq)]
pub(super) struct MeshTlsRecord {
    pub(super) identities: Vec<IdentityMatch>,
    pub(super) references: Vec<NamespacedTargetRef>,
}

/// An HTTPLocalRateLimitPolicy.
#[derive(Debug, PartialEq)]
pub(super) struct RateLimitRecord {
    pub(super) created: Option<Timestamp>,
    pub(super) spec: HttpLocalRateLimitPolicySpec,
}

/// An EgressNetwork.
#[derive(Debug, PartialEq)]
pub(super) struct EgressNetworkRecord {
    pub(super) key: Key,
    pub(super) created: Option<Timestamp>,
    pub(super) spec: EgressNetworkSpec,
    pub(super) traffic: Traffic,
    pub(super) opaque_ports: Option<PortList>,
    /// Parts that cannot be read.
    pub(super) problems: Vec<String>,
    /// Whether it stands for one of which a part has the wrong type. It denies, and has no routes.
    pub(super) is_unreadable: bool,
}

/// A Server.
#[derive(Debug, PartialEq)]
pub(super) struct ServerRecord {
    pub(super) key: Key,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) created: Option<Timestamp>,
    pub(super) spec: ServerSpec,
    /// Whether it stands for one that cannot be read. It admits nobody: what grants something to the Server may not
    /// grant it to all that this one selects.
    pub(super) is_unreadable: bool,
    /// Whether it may select more than the one for which it stands.
    pub(super) is_widened: bool,
}

impl DefaultPolicyAnnotation {
    /// Reads `config.linkerd.io/default-inbound-policy`.
    fn read(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let name = labels::DEFAULT_INBOUND_POLICY;
        match annotation(metadata, name).map(str::parse) {
            None => Self::Inherit,
            Some(Ok(policy)) => Self::Policy(policy),
            Some(Err(error)) => {
                problems.push(format!("annotation {name} cannot be read, and therefore denies: {error}"));
                Self::Unreadable
            }
        }
    }
}

impl Owner {
    /// The kind as the name of a label; `job` has another meaning in Prometheus.
    pub(crate) fn label(&self) -> String {
        let kind = self.kind.to_lowercase();
        if kind == "job" { "k8s_job".to_owned() } else { kind }
    }

    /// Whether the kind may be the name of a label, and the name its value. Kubernetes checks neither in a reference to
    /// an owner, which every author of pods can write, and proxies add the label to the metrics of their own pods.
    fn is_label(&self) -> bool {
        let mut characters = self.kind.chars();
        let is_name = characters.next().is_some_and(|first| first.is_ascii_alphabetic())
            && characters.all(|other| other.is_ascii_alphanumeric() || other == '_');
        if !is_name || self.kind.len() > MAX_KIND || self.name.len() > MAX_NAME {
            return false;
        }
        let label = self.label();
        !RESERVED.contains(&label.as_str()) && !label.starts_with(RESERVED_PREFIX)
    }
}

impl RateLimitRecord {
    pub(super) fn new(policy: HttpLocalRateLimitPolicy) -> Self {
        Self { created: created(&policy.metadata), spec: policy.spec }
    }

    /// Name of the Server that it is about; `None` if its target is of another kind, and then it means nothing.
    pub(super) fn server(&self) -> Option<&str> {
        let target = &self.spec.target_ref;
        target.is(ParentKind::Server.group(), ParentKind::Server.name()).then_some(target.name.as_str())
    }
}

impl EgressNetworkRecord {
    pub(super) fn new(network: EgressNetwork) -> Self {
        let mut problems = Vec::new();
        Self {
            key: Key::of(&network.metadata),
            created: created(&network.metadata),
            traffic: Traffic::of_egress_network(&network.metadata, &mut problems),
            opaque_ports: opaque_ports(&network.metadata, &mut problems),
            is_unreadable: annotation(&network.metadata, labels::UNREADABLE).is_some(),
            spec: network.spec,
            problems,
        }
    }
}

impl ServerRecord {
    pub(super) fn new(server: &Server) -> Self {
        Self {
            key: Key::of(&server.metadata),
            labels: server.metadata.labels.clone().unwrap_or_default(),
            created: created(&server.metadata),
            spec: server.spec.clone(),
            is_unreadable: annotation(&server.metadata, labels::UNREADABLE).is_some(),
            is_widened: annotation(&server.metadata, labels::UNREADABLE_SELECTION).is_some(),
        }
    }
}

/// Creation time of an object; manifests in files have none.
pub(super) fn created(metadata: &ObjectMeta) -> Option<Timestamp> {
    metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// The owner, if there is exactly one, and it may be a label.
pub(super) fn single_owner(metadata: &ObjectMeta) -> Option<Owner> {
    match metadata.owner_references.as_deref().unwrap_or_default() {
        [owner] => Some(Owner { kind: owner.kind.clone(), name: owner.name.clone() }).filter(Owner::is_label),
        _ => None,
    }
}

fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// An annotation that only optimises: an unreadable one is a problem and counts as absent.
fn optional<T: std::str::FromStr<Err: std::fmt::Display>>(
    metadata: &ObjectMeta,
    name: &'static str,
    problems: &mut Vec<String>,
) -> Option<T> {
    let parsed = annotation(metadata, name)?.parse();
    parsed.map_err(|error| problems.push(format!("annotation {name} is ignored: {error}"))).ok()
}

/// The annotation about opaque ports: an entry that cannot be read is a problem, and the others count.
fn opaque_ports(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Option<PortList> {
    let name = labels::OPAQUE_PORTS;
    let (list, bad) = PortList::read(annotation(metadata, name)?);
    problems.extend(bad.map(|error| format!("a part of annotation {name} is ignored: {error}")));
    Some(list)
}

/// Ports that require an identity under the default policy: an unreadable annotation means every port.
fn require_identity(metadata: &ObjectMeta, problems: &mut Vec<String>) -> PortSet {
    let name = labels::REQUIRE_IDENTITY_PORTS;
    let Some(value) = annotation(metadata, name) else { return PortSet::default() };
    value.parse().unwrap_or_else(|error| {
        problems.push(format!("annotation {name} cannot be read, every port therefore requires an identity: {error}"));
        let mut all = PortSet::default();
        all.insert(1..=u16::MAX);
        all
    })
}
