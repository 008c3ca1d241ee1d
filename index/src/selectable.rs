//! Workloads that a Server may select: pods, and machines outside the cluster.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use weft_k8s_api::{policy, ports::PortSet};

use super::records::{DefaultPolicyAnnotation, ExternalWorkloadRecord, PodRecord, ServerRecord};

/// A workload that a Server may select.
#[derive(Clone, Copy)]
pub(super) enum Selectable<'a> {
    Pod(&'a PodRecord),
    External(&'a ExternalWorkloadRecord),
}

impl<'a> Selectable<'a> {
    pub(super) fn namespace(self) -> &'a str {
        match self {
            Self::Pod(pod) => &pod.key.namespace,
            Self::External(workload) => &workload.key.namespace,
        }
    }

    pub(super) fn labels(self) -> &'a BTreeMap<String, String> {
        match self {
            Self::Pod(pod) => &pod.labels,
            Self::External(workload) => &workload.labels,
        }
    }

    /// Whether a Server selects the workload, whatever the port.
    pub(super) fn is_selected_by(self, server: &ServerRecord) -> bool {
        let selector = match self {
            Self::Pod(_) => &server.spec.pod_selector,
            Self::External(_) => &server.spec.external_workload_selector,
        };
        selector.as_ref().is_some_and(|selector| policy::selects(selector, Some(self.labels())))
    }

    /// Whether a number or the name of a port denotes the port.
    pub(super) fn port_is(self, wanted: &IntOrString, port: u16) -> bool {
        match self {
            Self::Pod(pod) => pod.port_is(wanted, port),
            Self::External(workload) => workload.port_is(wanted, port),
        }
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(super) fn is_opaque(self, port: u16, default: &PortSet) -> bool {
        match self {
            Self::Pod(pod) => pod.is_opaque(port, default),
            Self::External(workload) => workload.is_opaque(port, default),
        }
    }

    /// Paths of HTTP probes on a port; the kubelet probes no external workloads.
    pub(super) fn probe_paths(self, port: u16) -> Vec<String> {
        match self {
            Self::Pod(pod) => pod.probe_paths(port),
            Self::External(_) => Vec::new(),
        }
    }

    /// The workload's annotation about ports that no Server selects.
    pub(super) fn default_policy(self) -> DefaultPolicyAnnotation {
        match self {
            Self::Pod(pod) => pod.default_policy,
            Self::External(workload) => workload.default_policy,
        }
    }

    /// Whether only mesh identities may use the port under the default policy.
    pub(super) fn requires_identity(self, port: u16) -> bool {
        match self {
            Self::Pod(pod) => pod.require_identity.contains(port),
            Self::External(workload) => workload.require_identity.contains(port),
        }
    }
}
