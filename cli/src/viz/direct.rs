//! The pods of a cluster or of a sandbox, and their proxies, as the engine reads them from a person's machine: on the
//! loopback address of each pod, which a port-forward and a network namespace reach.

use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod as KubePod;
use kube::{Api, ResourceExt as _, api::ListParams};
use tonic::Streaming;
use weft_k8s_api::observe;
use weft_proto::linkerd::tap::{ObserveRequest, TapEvent, tap_client::TapClient};
use weft_sandbox::{client::Sandbox, state::PodState};
use weft_viz_core::fleet::{Exposition, Fleet, Phase, Pod, ProxyPorts};

use crate::{agent::reason, mesh::list, pod_network::PodNetwork};

/// The fleet of the command line.
pub(crate) struct Direct {
    /// A sandbox's state is read again with its pods.
    network: Mutex<PodNetwork>,
}

impl Direct {
    pub(crate) fn new(network: PodNetwork) -> Self {
        Self { network: Mutex::new(network) }
    }

    fn network(&self) -> PodNetwork {
        self.network.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Fleet for Direct {
    async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        match self.network() {
            PodNetwork::Cluster(cluster) => {
                let (api, place) = match namespace {
                    "" => (Api::<KubePod>::all(cluster.client.clone()), "of all namespaces".to_owned()),
                    one => (Api::namespaced(cluster.client.clone(), one), format!("of namespace {one}")),
                };
                let pods = list(api, &ListParams::default()).await;
                let pods = pods.map_err(|error| format!("the pods {place}: {error}"))?;
                Ok(pods.iter().map(|pod| Arc::new(of_cluster(pod))).collect())
            }
            PodNetwork::Sandbox(state) => {
                let state = Sandbox::open(&state.config.name).and_then(|sandbox| sandbox.state());
                let state = Arc::new(state.map_err(|error| error.to_string())?);
                *self.network.lock().unwrap_or_else(PoisonError::into_inner) = PodNetwork::Sandbox(Arc::clone(&state));
                let wanted = |pod: &&PodState| namespace.is_empty() || pod.namespace == namespace;
                Ok(state.pods.iter().filter(wanted).map(|pod| Arc::new(of_sandbox(pod))).collect())
            }
        }
    }

    async fn metrics(&self, pod: &Pod, metrics: &mut Exposition<'_>) -> Result<(), String> {
        let port = pod.proxy.ok_or("has no proxy")?.admin;
        let answer = self.network().get(&pod.namespace, &pod.name, port, "/metrics").await?;
        match answer.status {
            200 => metrics.read(answer.body.as_bytes()),
            status => Err(format!("port {port} answered {status}: {}", answer.body.trim())),
        }
    }

    async fn tap(&self, pod: &Pod, request: ObserveRequest) -> Result<Streaming<TapEvent>, String> {
        let port = pod.proxy.and_then(|proxy| proxy.tap).ok_or("its proxy does not serve tap")?;
        let channel = self.network().grpc(&pod.namespace, &pod.name, port).await;
        let channel = channel.map_err(|error| format!("port {port}: {error}"))?;
        let events = TapClient::new(channel).observe(request).await;
        events.map(tonic::Response::into_inner).map_err(|status| format!("port {port}: {}", reason(&status)))
    }
}

fn of_cluster(pod: &KubePod) -> Pod {
    let spec = pod.spec.as_ref();
    let status = pod.status.as_ref();
    let addresses = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
    let phase = match status.and_then(|status| status.phase.as_deref()) {
        // What is being deleted has a proxy that may be gone at any time.
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        _ => Phase::Pending,
    };
    Pod {
        namespace: pod.namespace().unwrap_or_default(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        owners: observe::owners(pod),
        labels: pod.labels().clone(),
        addresses: addresses.filter_map(|address| address.ip.parse().ok()).collect(),
        node: spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        service_account: spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        phase,
        status: observe::status(pod),
        proxy: observe::listeners(pod).map(|ports| ProxyPorts { admin: ports.admin, tap: ports.tap }),
    }
}

fn of_sandbox(pod: &PodState) -> Pod {
    let runs = pod.containers.iter().any(|container| container.pid.is_some());
    Pod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        owners: pod.owners.clone(),
        labels: pod.labels.clone(),
        addresses: pod.ips.clone(),
        node: String::new(),
        service_account: pod.service_account.clone(),
        phase: if runs { Phase::Running } else { Phase::Pending },
        status: if runs { "Running" } else { "Pending" }.to_owned(),
        proxy: pod.admin_port.map(|admin| ProxyPorts { admin, tap: pod.tap_port }),
    }
}
