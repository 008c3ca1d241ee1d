//! The objects of the bench: their names, addresses and JSON. Pure functions of their numbers.
//!
//! Services have no selector, so that no controller writes EndpointSlices beside those of the bench. Nodes have no
//! kubelet and never report, therefore pods tolerate every taint, and end without a grace period.

use std::net::Ipv4Addr;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};

/// Port of every Service.
pub(super) const PORT: u16 = 80;
/// Port of every pod's application.
pub(super) const POD_PORT: u16 = 8080;
/// ServiceAccount of every pod.
pub(super) const ACCOUNT: &str = "bench";
/// Label of what has no namespace, which the end of a run selects by.
pub(crate) const RUN_LABEL: &str = "weft-bench/run";
/// Namespaces over which Services and pods are spread.
const NAMESPACES: u32 = 10;
const ZONES: u32 = 3;
/// Addresses of pods (RFC 1918); outside those of the API server's Services.
const POD_NETWORK: (Ipv4Addr, u32) = (Ipv4Addr::new(172, 16, 0, 0), 12);
/// Addresses that belong to one change each (RFC 6598).
const CHANGE_NETWORK: (Ipv4Addr, u32) = (Ipv4Addr::new(100, 64, 0, 0), 10);
/// What every pod would run, if anything ran it.
const IMAGE: &str = "localhost/weft-bench:none";

/// How many objects there are.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Size {
    /// Meshed pods.
    pub pods: u32,
    /// Services.
    pub services: u32,
    /// Nodes.
    pub nodes: u32,
    /// Servers, in one namespace.
    pub servers: u32,
    /// AuthorizationPolicies.
    pub policies: u32,
}

/// Names and contents of all objects of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Distinguishes runs.
    pub(super) run: String,
    pub(super) size: Size,
    namespaces: Vec<String>,
}

/// One endpoint of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Number of the pod.
    pub(super) pod: u32,
    /// How often it was restarted.
    pub(super) generation: u32,
    pub(super) address: Ipv4Addr,
    pub(super) ready: bool,
}

impl Plan {
    pub(super) fn new(run: &str, size: Size) -> Self {
        let namespaces = (0..NAMESPACES.min(size.services)).map(|number| format!("{run}-{number}")).collect();
        Self { run: run.to_owned(), size, namespaces }
    }

    pub(super) fn namespaces(&self) -> &[String] {
        &self.namespaces
    }

    /// Namespace of the control plane.
    pub(super) fn control_namespace(&self) -> String {
        format!("{}-mesh", self.run)
    }

    /// Namespace of a Service. Services beyond the first `size.services` double those, and have the same pods.
    pub(super) fn namespace(&self, service: u32) -> &str {
        let spread = service % self.size.services % self.namespaces.len() as u32;
        self.namespaces.get(spread as usize).map_or("", String::as_str)
    }

    pub(super) fn service_name(service: u32) -> String {
        format!("service-{service}")
    }

    /// The Service of a pod.
    pub(super) fn service_of(&self, pod: u32) -> u32 {
        pod / self.pods_per_service()
    }

    /// Numbers of a Service's pods.
    pub(super) fn pods_of(&self, service: u32) -> std::ops::Range<u32> {
        let first = (service % self.size.services).saturating_mul(self.pods_per_service());
        first.min(self.size.pods)..first.saturating_add(self.pods_per_service()).min(self.size.pods)
    }

    fn pods_per_service(&self) -> u32 {
        self.size.pods.div_ceil(self.size.services)
    }

    pub(super) fn pod_name(&self, pod: u32, generation: u32) -> String {
        format!("pod-{pod}-{generation}")
    }

    fn node_of(&self, pod: u32) -> u32 {
        pod % self.size.nodes
    }

    pub(super) fn node_name(&self, node: u32) -> String {
        format!("{}-{node}", self.run)
    }

    /// Label value for the name of the zone of a node.
    fn zone(node: u32) -> String {
        format!("zone-{}", node % ZONES)
    }

    /// The first address of a pod.
    pub(super) fn pod_address(&self, number: u32) -> anyhow::Result<Ipv4Addr> {
        // The first 256 look like a network's own.
        nth(POD_NETWORK, number.saturating_add(256)).context("no more addresses for pods")
    }

    /// The address of one change alone.
    pub(super) fn change_address(number: u32) -> anyhow::Result<Ipv4Addr> {
        nth(CHANGE_NETWORK, number.saturating_add(1)).context("no more addresses for changes, make fewer")
    }

    pub(super) fn namespace_object(&self, name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {RUN_LABEL: self.run}}})
    }

    pub(super) fn account_object(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}})
    }

    pub(super) fn node_object(&self, node: u32) -> Value {
        let name = self.node_name(node);
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {
            RUN_LABEL: self.run, "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": Self::zone(node)}}})
    }

    /// A meshed pod, bound to its node.
    pub(super) fn pod_object(&self, pod: u32, generation: u32) -> Value {
        let service = Self::service_name(self.service_of(pod));
        let listen = |name: &str, address: &str| json!({"name": format!("LINKERD2_PROXY_{name}"), "value": address});
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.pod_name(pod, generation), "labels": {
                "app": service,
                "pod-template-hash": "5d78f8b7c9",
                "linkerd.io/control-plane-ns": self.control_namespace(),
                "linkerd.io/proxy-deployment": service,
                "linkerd.io/workload-ns": self.namespace(self.service_of(pod))}},
            "spec": {
                "nodeName": self.node_name(self.node_of(pod)),
                "serviceAccountName": ACCOUNT,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                "tolerations": [{"operator": "Exists"}],
                "containers": [
                    {"name": "app", "image": IMAGE, "ports": [{"name": "http", "containerPort": POD_PORT}],
                        "readinessProbe": {"httpGet": {"path": "/ready", "port": POD_PORT}}},
                    {"name": "linkerd-proxy", "image": IMAGE,
                        "ports": [{"name": "linkerd-proxy", "containerPort": 4143},
                            {"name": "linkerd-admin", "containerPort": 4191}],
                        "env": [listen("INBOUND_LISTEN_ADDR", "0.0.0.0:4143"),
                            listen("OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140"),
                            listen("ADMIN_LISTEN_ADDR", "0.0.0.0:4191"),
                            listen("CONTROL_LISTEN_ADDR", "0.0.0.0:4190")]}]}})
    }

    /// What a kubelet would say of a running pod, as a merge patch.
    pub(super) fn pod_status(address: Ipv4Addr) -> Value {
        let condition = |kind: &str| json!({"type": kind, "status": "True"});
        json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [condition("Initialized"), condition("ContainersReady"), condition("Ready")]}})
    }

    pub(super) fn service_object(&self, service: u32) -> Value {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": Self::service_name(service)},
            "spec": {"ports": [{"name": "http", "port": PORT, "targetPort": POD_PORT}]}})
    }

    pub(super) fn slice_object(&self, service: u32, slots: &[Slot]) -> Value {
        let namespace = self.namespace(service);
        let endpoints: Vec<_> = slots
            .iter()
            .map(|slot| {
                let node = self.node_of(slot.pod);
                json!({"addresses": [slot.address],
                    "conditions": {"ready": slot.ready, "serving": slot.ready, "terminating": false},
                    "nodeName": self.node_name(node), "zone": Self::zone(node),
                    "targetRef": {"kind": "Pod", "namespace": namespace,
                        "name": self.pod_name(slot.pod, slot.generation)}})
            })
            .collect();
        let name = Self::service_name(service);
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name,
                "endpointslice.kubernetes.io/managed-by": "weft-bench"}},
            "ports": [{"name": "http", "port": POD_PORT, "protocol": "TCP"}], "endpoints": endpoints})
    }

    /// Namespace of all Servers and policies.
    pub(super) fn policy_namespace(&self) -> &str {
        self.namespace(0)
    }

    /// A Server of one port of one Service's pods; no two are of the same.
    pub(super) fn server_object(&self, server: u32) -> Value {
        let step = self.namespaces.len() as u32;
        let services_there = self.size.services.div_ceil(step);
        let service = server % services_there * step;
        let port = u32::from(POD_PORT) + server / services_there;
        json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server", "metadata": {"name": server_name(server)},
            "spec": {"podSelector": {"matchLabels": {"app": Self::service_name(service)}}, "port": port,
                "proxyProtocol": "HTTP/1"}})
    }

    /// Every meshed client of the run.
    pub(super) fn authentication_object(&self) -> Value {
        let identity = |namespace: &String| {
            let mesh = self.control_namespace();
            format!("{ACCOUNT}.{namespace}.serviceaccount.identity.{mesh}.cluster.local")
        };
        let identities: Vec<_> = self.namespaces.iter().map(identity).collect();
        json!({"apiVersion": "policy.linkerd.io/v1alpha1", "kind": "MeshTLSAuthentication",
            "metadata": {"name": ACCOUNT}, "spec": {"identities": identities}})
    }

    pub(super) fn policy_object(&self, policy: u32) -> Value {
        let of = |kind: &str, name: &str| json!({"group": "policy.linkerd.io", "kind": kind, "name": name});
        let target = of("Server", &server_name(policy));
        json!({"apiVersion": "policy.linkerd.io/v1alpha1", "kind": "AuthorizationPolicy",
            "metadata": {"name": format!("policy-{policy}")},
            "spec": {"targetRef": target, "requiredAuthenticationRefs": [of("MeshTLSAuthentication", ACCOUNT)]}})
    }

    /// The workload that a pod's proxy says it is, to the policy service.
    pub(super) fn workload(&self, pod: u32) -> String {
        json!({"ns": self.namespace(self.service_of(pod)), "pod": self.pod_name(pod, 0)}).to_string()
    }

    /// The context token of a pod's proxy, for the destination service.
    pub(super) fn context_token(&self, pod: u32) -> String {
        json!({"ns": self.namespace(self.service_of(pod)), "nodeName": self.node_name(self.node_of(pod)),
            "pod": self.pod_name(pod, 0)})
        .to_string()
    }
}

fn server_name(server: u32) -> String {
    format!("server-{server}")
}

fn nth((network, prefix): (Ipv4Addr, u32), number: u32) -> Option<Ipv4Addr> {
    (number < 1 << (32 - prefix)).then(|| Ipv4Addr::from(u32::from(network) + number))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn plan(pods: u32, services: u32) -> Plan {
        Plan::new("run", Size { pods, services, nodes: 7, servers: 70, policies: 10 })
    }

    #[test]
    fn every_pod_is_in_one_service() {
        for (pods, services) in [(100, 10), (101, 10), (5, 10), (10, 3)] {
            let plan = plan(pods, services);
            let all: Vec<_> = (0..services).flat_map(|service| plan.pods_of(service)).collect();
            assert_eq!(all, (0..pods).collect::<Vec<_>>(), "{pods} pods, {services} Services");
            assert!((0..pods).all(|pod| plan.pods_of(plan.service_of(pod)).contains(&pod)));
        }
    }

    #[test]
    fn a_doubled_service_has_the_pods_and_the_namespace_of_the_first() {
        let plan = plan(100, 25);
        for service in 0..25 {
            assert_eq!(plan.pods_of(service), plan.pods_of(service + 25));
            assert_eq!(plan.namespace(service), plan.namespace(service + 25));
        }
    }

    #[test]
    fn no_two_servers_select_the_same_port_of_the_same_pods() {
        let plan = plan(1000, 100);
        let selected: HashSet<String> = (0..140).map(|server| plan.server_object(server)["spec"].to_string()).collect();
        assert_eq!(selected.len(), 140);
        for server in 0..140 {
            let app = plan.server_object(server)["spec"]["podSelector"]["matchLabels"]["app"].clone();
            let service = (0..100).find(|service| app == Plan::service_name(*service)).unwrap();
            assert_eq!(plan.namespace(service), plan.policy_namespace());
        }
    }

    #[test]
    fn addresses_of_pods_and_of_changes_never_meet_and_end() {
        let plan = plan(10, 1);
        assert_eq!(plan.pod_address(0).unwrap(), Ipv4Addr::new(172, 16, 1, 0));
        assert_eq!(Plan::change_address(0).unwrap(), Ipv4Addr::new(100, 64, 0, 1));
        assert_eq!(Plan::change_address((1 << 22) - 2).unwrap(), Ipv4Addr::new(100, 127, 255, 255));
        assert!(Plan::change_address((1 << 22) - 1).is_err());
        assert!(plan.pod_address(1 << 20).is_err());
    }

    #[test]
    fn a_slice_says_which_endpoints_are_ready() {
        let plan = plan(4, 2);
        let slot = |pod, ready| Slot { pod, generation: 1, address: Ipv4Addr::new(172, 16, 1, 1), ready };
        let slice = plan.slice_object(1, &[slot(2, true), slot(3, false)]);
        assert_eq!(slice["endpoints"][0]["targetRef"]["name"], "pod-2-1");
        assert_eq!(slice["endpoints"][0]["conditions"]["ready"], true);
        assert_eq!(slice["endpoints"][1]["conditions"]["ready"], false);
    }
}
