//! The sandbox's control plane: one meshed pod with `weft-control-plane all`, and the Services that proxies connect
//! to.
//! proxies find it.
//! Its own proxy connects to it on loopback, in plain text, because the proxy cannot have a certificate before
//! identity serves. For the same reason that proxy is an ordinary container and not a sidecar that other containers
//! wait for.

use std::path::Path;

use k8s_openapi::api::core::v1::EnvVar;
use serde_json::{Value, json};
use weft_k8s_api::{
    inject::{ControlPlaneAddrs, InjectConfig, TapClient},
    labels,
    manifest::Object,
};

use super::{
    desired::{Allocator, Desired, desired},
    spec::{BIN_DIR, PROXY_DIR},
};
use crate::config::{CLUSTER_DOMAIN, CONTROL_NAMESPACE, Config, Interception};

const ACCOUNT: &str = "linkerd-destination";
const PUBLISHED_DIR: &str = "/run/weft/published";
const PKI_DIR: &str = "/run/weft/pki";

/// The injector's settings in this sandbox.
pub(super) fn inject_config(config: &Config, anchors_pem: &str) -> InjectConfig {
    let mut inject = InjectConfig::new("weft-proxy", env!("CARGO_PKG_VERSION"), anchors_pem);
    inject.proxy_command = vec![match config.proxy.as_deref().and_then(Path::file_name) {
        Some(proxy) => format!("{PROXY_DIR}/{}", proxy.to_string_lossy()),
        None => format!("{BIN_DIR}/weft-proxy"),
    }];
    // Containers are programs of this host.
    inject.tuning.debug = None;
    inject.ipv6 = true;
    inject.log_level.clone_from(&config.log_level);
    // One process has one identity, for all its services.
    let mut addrs = ControlPlaneAddrs::in_cluster(CONTROL_NAMESPACE, CLUSTER_DOMAIN, CLUSTER_DOMAIN);
    addrs.identity.name.clone_from(&addrs.destination.name);
    inject.control_plane = addrs;
    // No component taps here: this starts the proxies' tap servers, for clients in the pods' own namespaces.
    inject.tap = Some(TapClient::default());
    if config.interception == Interception::Ebpf && config.proxy.is_none() {
        inject.extra_env.push(EnvVar {
            name: "WEFT_PROXY_REQUIRE_REDIRECT".to_owned(),
            value: Some("true".to_owned()),
            ..EnvVar::default()
        });
    }
    inject
}

/// The control plane's own pod and Services.
pub(super) fn control_plane(config: &Config, inject: &InjectConfig, allocator: &mut Allocator) -> Desired {
    let mut inject = inject.clone();
    inject.control_plane = inject.control_plane.on_localhost();
    let mut all = desired(objects(config), &inject, allocator);
    for pod in &mut all.pods {
        let Some(spec) = &mut pod.pod.spec else { continue };
        let sidecars = spec.init_containers.take().unwrap_or_default();
        spec.containers.extend(sidecars.into_iter().map(|mut sidecar| {
            sidecar.restart_policy = None;
            sidecar
        }));
    }
    all
}

fn objects(config: &Config) -> Vec<Object> {
    let layout = config.layout();
    let metadata = |name: &str| json!({"name": name, "namespace": CONTROL_NAMESPACE});
    let service = |name: &str, port: u16| {
        json!({
            "metadata": metadata(name),
            "spec": {
                "clusterIP": "None",
                "selector": {labels::CONTROL_PLANE_COMPONENT: "destination"},
                "ports": [{"name": "grpc", "port": port, "targetPort": port}]
            }
        })
    };
    let networks: Vec<String> =
        weft_k8s_api::inject::default_cluster_networks().iter().map(ToString::to_string).collect();
    let command = [
        &format!("{BIN_DIR}/weft-control-plane"),
        "all",
        "--source=file",
        &format!("--dir={PUBLISHED_DIR}"),
        // Pods have addresses of both families, and the proxies may use either.
        "--identity-addr=[::]:8080",
        "--destination-addr=[::]:8086",
        "--policy-addr=[::]:8090",
        &format!("--identity-issuer-dir={PKI_DIR}"),
        &format!("--identity-trust-anchors={PKI_DIR}/ca-bundle.crt"),
        &format!("--token-key={PKI_DIR}/token.pub"),
        &format!("--controller-namespace={CONTROL_NAMESPACE}"),
        &format!("--trust-domain={CLUSTER_DOMAIN}"),
        &format!("--cluster-domain={CLUSTER_DOMAIN}"),
        &format!("--cluster-networks={}", networks.join(",")),
        &format!("--log-level={}", config.log_level),
    ];
    let pod = json!({
        "metadata": {
            "name": "linkerd-destination-0",
            "namespace": CONTROL_NAMESPACE,
            "labels": {labels::CONTROL_PLANE_COMPONENT: "destination"},
            "annotations": {labels::INJECT: "enabled"}
        },
        "spec": {
            "serviceAccountName": ACCOUNT,
            "volumes": [
                {"name": "published", "hostPath": {"path": layout.published_dir()}},
                {"name": "pki", "hostPath": {"path": layout.pki_dir()}}
            ],
            "containers": [{
                "name": "control-plane",
                "command": command,
                "ports": [
                    {"name": "identity", "containerPort": 8080},
                    {"name": "destination", "containerPort": 8086},
                    {"name": "policy", "containerPort": 8090}
                ],
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 9990}},
                "volumeMounts": [
                    {"name": "published", "mountPath": PUBLISHED_DIR, "readOnly": true},
                    {"name": "pki", "mountPath": PKI_DIR, "readOnly": true}
                ]
            }]
        }
    });
    vec![
        Object::Namespace(typed(json!({"metadata": {"name": CONTROL_NAMESPACE}}))),
        Object::ServiceAccount(typed(json!({"metadata": metadata(ACCOUNT)}))),
        Object::Service(typed(service("linkerd-dst-headless", 8086))),
        Object::Service(typed(service("linkerd-policy", 8090))),
        Object::Service(typed(service("linkerd-identity-headless", 8080))),
        Object::Pod(typed(pod)),
    ]
}

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the literals above are Kubernetes objects")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_plane_is_a_meshed_pod_that_does_not_wait_for_its_proxy() {
        let config = Config::new("test", "/manifests", "/bin").unwrap();
        let inject = inject_config(&config, "anchors");
        let all = control_plane(&config, &inject, &mut Allocator::default());
        assert!(all.errors.is_empty(), "{:?}", all.errors);
        let pod = &all.pods[0];
        assert!(pod.redirection.is_some());
        let spec = pod.pod.spec.as_ref().unwrap();
        assert!(spec.init_containers.is_none());
        let proxy = spec.containers.iter().find(|container| container.name == labels::PROXY_CONTAINER).unwrap();
        let env = proxy.env.as_ref().unwrap();
        let identity = env.iter().find(|env| env.name == "LINKERD2_PROXY_IDENTITY_SVC_ADDR").unwrap();
        assert_eq!(identity.value.as_deref(), Some("localhost.:8080"));
    }
}
