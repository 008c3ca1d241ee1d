//! What the agent reads from a Pod: whether it has to be enrolled, and with which rules. Pure.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use weft_k8s_api::{
    inject::{InjectError, Redirection, RedirectionDefaults},
    labels,
};

use crate::datapath::rules::{PodName, Proxy, Wanted};

/// A pod that this agent has to enrol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MeshedPod {
    pub(crate) name: PodName,
    pub(crate) uid: String,
    /// Addresses in the API server: empty until the kubelet has reported them, and for a while those of a sandbox that
    /// was replaced.
    pub(crate) ips: Vec<IpAddr>,
    /// Whether the pod's user ids differ from the host's.
    pub(crate) user_namespace: bool,
    /// Whether `linkerd-init` made iptables rules in the pod.
    pub(crate) has_iptables: bool,
    /// The runtime's id of the proxy's container, once it runs.
    pub(crate) proxy_container: Option<String>,
    /// The rules, or the annotation that cannot be read.
    pub(crate) rules: Result<Redirection, InjectError>,
}

impl MeshedPod {
    /// Reads a pod; `None` if it has no proxy or has ended. One with `linkerd-init` is enrolled too: outbound, its
    /// iptables rules find nothing left to redirect, and inbound they have the same effect.
    pub(crate) fn read(pod: &Pod, defaults: &RedirectionDefaults) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let status = pod.status.clone().unwrap_or_default();
        pod.metadata.labels.as_ref()?.get(labels::CONTROL_PLANE_NS)?;
        let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        if !containers.any(|container| container.name == labels::PROXY_CONTAINER) {
            return None;
        }
        let mut statuses =
            status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
        let proxy = statuses.find(|status| status.name == labels::PROXY_CONTAINER);
        let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if spec.host_network == Some(true) || ended {
            return None;
        }
        let ips = status.pod_ips.unwrap_or_default();
        Some(Self {
            name: PodName { namespace: pod.metadata.namespace.clone()?, name: pod.metadata.name.clone()? },
            uid: pod.metadata.uid.clone()?,
            ips: ips.iter().filter_map(|ip| ip.ip.parse().ok()).collect(),
            user_namespace: spec.host_users == Some(false),
            has_iptables: spec.init_containers.iter().flatten().any(|init| init.name == labels::INIT_CONTAINER),
            // In the form containerd://0123abcd.
            proxy_container: proxy
                .and_then(|status| status.container_id.as_deref())
                .and_then(|id| id.split_once("://"))
                .map(|(_, id)| id.to_owned()),
            rules: Redirection::of(pod, defaults),
        })
    }
}

/// The pod's rules in the datapath's form.
///
/// `namespace_ips` are the addresses in the pod's network namespace: these are the pod's own, and no others. The API
/// server's addresses may be late or belong to another pod by now; they only decide which one comes first and so
/// becomes the source of redirected connections.
pub(crate) fn wanted(pod: &MeshedPod, rules: &Redirection, namespace_ips: &[IpAddr], proxy: Proxy) -> Wanted {
    let mut ips = namespace_ips.to_vec();
    ips.sort_by_key(|ip| pod.ips.iter().position(|known| known == ip).unwrap_or(usize::MAX));
    ips.truncate(weft_ebpf_abi::pod::ADDRESSES);
    Wanted {
        pod: pod.name.clone(),
        ips,
        loopback_source: pod.has_iptables,
        proxy,
        bypass: rules.bypass,
        outbound_port: rules.outbound_port,
        inbound_port: rules.inbound_port,
        control_port: rules.control_port,
        admin_port: rules.admin_port,
        skip_outbound_ports: rules.skip_outbound_ports.ranges().collect(),
        skip_inbound_ports: rules.skip_inbound_ports.ranges().collect(),
        skip_subnets: rules.skip_subnets.clone(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A meshed pod, with `change` merged into it (RFC 7396).
    pub(in crate::kubernetes) fn pod(name: &str, change: &Value) -> Pod {
        let mut pod = json!({
            "metadata": {
                "namespace": "shop", "name": name, "uid": format!("uid-{name}"),
                "labels": {"linkerd.io/control-plane-ns": "linkerd"},
            },
            "spec": {
                "nodeName": "n",
                "initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always"}],
                "containers": [{"name": "web"}],
            },
            "status": {"phase": "Pending"},
        });
        merge(&mut pod, change);
        serde_json::from_value(pod).unwrap()
    }

    fn merge(target: &mut Value, change: &Value) {
        match (target, change) {
            (Value::Object(target), Value::Object(change)) => {
                for (key, value) in change {
                    merge(target.entry(key).or_insert(Value::Null), value);
                }
            }
            (target, change) => *target = change.clone(),
        }
    }

    fn read(change: &Value) -> Option<MeshedPod> {
        MeshedPod::read(&pod("web-0", change), &RedirectionDefaults::default())
    }

    #[test]
    fn only_pods_with_a_proxy_and_a_network_of_their_own_are_enrolled() {
        let ordinary = json!([{"name": "web"}, {"name": "linkerd-proxy"}]);
        let rows = [
            ("a native sidecar", json!({}), true),
            ("an ordinary container", json!({"spec": {"initContainers": null, "containers": ordinary}}), true),
            ("running", json!({"status": {"phase": "Running"}}), true),
            ("no label", json!({"metadata": {"labels": null}}), false),
            ("no proxy", json!({"spec": {"initContainers": null}}), false),
            ("host network", json!({"spec": {"hostNetwork": true}}), false),
            (
                "also redirected by iptables",
                json!({"spec": {"initContainers": [{"name": "linkerd-init"}, {"name": "linkerd-proxy"}]}}),
                true,
            ),
            ("succeeded", json!({"status": {"phase": "Succeeded"}}), false),
            ("failed", json!({"status": {"phase": "Failed"}}), false),
        ];
        for (row, change, meshed) in rows {
            assert_eq!(read(&change).is_some(), meshed, "{row}");
        }
    }

    #[test]
    fn annotations_become_rules() {
        let change = json!({"metadata": {"annotations": {
            "config.linkerd.io/skip-outbound-ports": "25,8000-8002",
            "config.linkerd.io/proxy-uid": "2200",
        }}, "status": {"podIPs": [{"ip": "10.244.0.7"}, {"ip": "fd00::7"}]}});
        let pod = read(&change).unwrap();
        let rules = pod.rules.clone().unwrap();
        assert_eq!(rules.proxy_uid, 2200);
        let proxy = Proxy { uid: 102_200, gid: 0, cgroup: 9 };
        let wanted = wanted(&pod, &rules, &["10.244.0.7".parse().unwrap()], proxy);
        assert_eq!(wanted.proxy, proxy);
        assert_eq!(wanted.skip_outbound_ports, [25..=25, 8000..=8002]);
        assert_eq!(wanted.skip_inbound_ports, [4567..=4568]);
        assert_eq!((wanted.control_port, wanted.admin_port), (4190, 4191));
    }

    #[test]
    fn redirected_connections_have_a_loopback_source_where_iptables_redirect_too() {
        for (first, has_iptables) in [("linkerd-init", true), ("linkerd-network-validator", false)] {
            let change = json!({"spec": {"initContainers": [{"name": first}, {"name": "linkerd-proxy"}]}});
            let pod = read(&change).unwrap();
            let rules = pod.rules.clone().unwrap();
            assert_eq!(wanted(&pod, &rules, &[], Proxy::default()).loopback_source, has_iptables, "{first}");
        }
    }

    #[test]
    fn the_pods_own_addresses_are_those_of_its_namespace() {
        let namespace: Vec<IpAddr> =
            ["172.17.0.1", "10.244.0.7", "fd00::7"].into_iter().map(|ip| ip.parse().unwrap()).collect();
        let rows: [(&str, Value, [&str; 3]); 3] = [
            ("not reported yet", json!([]), ["172.17.0.1", "10.244.0.7", "fd00::7"]),
            ("told", json!([{"ip": "10.244.0.7"}, {"ip": "fd00::7"}]), ["10.244.0.7", "fd00::7", "172.17.0.1"]),
            ("of the last sandbox", json!([{"ip": "10.244.0.6"}]), ["172.17.0.1", "10.244.0.7", "fd00::7"]),
        ];
        for (row, ips, expected) in rows {
            let pod = read(&json!({"status": {"podIPs": ips}})).unwrap();
            let rules = pod.rules.clone().unwrap();
            let ips = wanted(&pod, &rules, &namespace, Proxy::default()).ips;
            assert_eq!(ips, expected.map(|ip| ip.parse::<IpAddr>().unwrap()), "{row}");
        }
    }

    #[test]
    fn an_annotation_that_cannot_be_read_is_named() {
        let change = json!({"metadata": {"annotations": {"config.linkerd.io/skip-inbound-ports": "http"}}});
        let error = read(&change).unwrap().rules.unwrap_err();
        assert_eq!(error.annotation, "config.linkerd.io/skip-inbound-ports");
        assert_eq!(error.value, "http");
    }
}
