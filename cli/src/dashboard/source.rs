//! Answers about requests: an engine in this process reads the proxies of the cluster or the sandbox.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::Result;
use bytes::Bytes;
use http::Response;
use k8s_openapi::api::core::v1::Pod as KubernetesPod;
use kube::{Api, ResourceExt as _, api::ListParams};
use weft_k8s_api::observe;
use weft_proto::linkerd::tap::{ObserveRequest, TapEvent, tap_client::TapClient};
use weft_sandbox::client::Sandbox;
use weft_viz_core::{
    Config, Engine,
    fleet::{Fleet, Phase, Pod, ProxyPorts},
    page::{self, Body},
};

use crate::{
    mesh::{list, pods},
    pod_network::PodNetwork,
};

pub(super) struct Source(Engine<MeshFleet>);

impl Source {
    pub(super) async fn choose(network: PodNetwork) -> Result<Self> {
        Ok(Self(Engine::new(MeshFleet(network), Config::default())))
    }

    pub(super) fn name(&self) -> &'static str {
        "read from the proxies by this command"
    }

    pub(super) async fn run(&self) {
        self.0.run().await;
    }

    pub(super) async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        self.0.fleet().pods(namespace).await
    }

    pub(super) async fn question(&self, name: &str, content: &[u8]) -> Option<Response<Body>> {
        page::question(&self.0, name, content).await
    }
}

struct MeshFleet(PodNetwork);

impl Fleet for MeshFleet {
    async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        match &self.0 {
            PodNetwork::Cluster(cluster) => {
                let api: Api<KubernetesPod> = if namespace.is_empty() {
                    Api::all(cluster.client.clone())
                } else {
                    Api::namespaced(cluster.client.clone(), namespace)
                };
                Ok(list(api, &ListParams::default()).await?.iter().map(|pod| Arc::new(of_cluster(pod))).collect())
            }
            PodNetwork::Sandbox(state) => {
                let state = Sandbox::open(&state.config.name).and_then(|sandbox| sandbox.state());
                let state = state.map_err(|error| error.to_string())?;
                let wanted = state.pods.iter().filter(|pod| namespace.is_empty() || pod.namespace == namespace);
                Ok(wanted.map(|pod| Arc::new(of_sandbox(pod))).collect())
            }
        }
    }

    async fn metrics(&self, pod: &Pod) -> Result<Bytes, String> {
        let port = pod.proxy.ok_or("it has no proxy")?.admin;
        let answer = self.0.get(&pod.namespace, &pod.name, port, "/metrics").await?;
        if answer.status == 200 { Ok(answer.body.into()) } else { Err(format!("its proxy answered {}", answer.status)) }
    }

    async fn tap(&self, pod: &Pod, request: ObserveRequest) -> Result<tonic::Streaming<TapEvent>, String> {
        let port = pod.proxy.and_then(|ports| ports.tap).ok_or("tap is off")?;
        let channel = self.0.grpc(&pod.namespace, &pod.name, port).await?;
        let events = TapClient::new(channel).observe(request).await.map_err(|status| status.message().to_owned())?;
        Ok(events.into_inner())
    }
}

fn of_cluster(pod: &KubernetesPod) -> Pod {
    let listeners = observe::listeners(pod);
    let status = pod.status.as_ref();
    Pod {
        namespace: pod.namespace().unwrap_or_default(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        owners: observe::owners(pod),
        labels: pod.labels().clone(),
        addresses: status
            .and_then(|status| status.pod_ips.as_ref())
            .into_iter()
            .flatten()
            .filter_map(|ip| ip.ip.parse().ok())
            .collect(),
        node: pods::node(pod).to_owned(),
        service_account: pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        phase: match pods::phase(pod) {
            "Running" => Phase::Running,
            "Succeeded" => Phase::Succeeded,
            "Failed" => Phase::Failed,
            _ => Phase::Pending,
        },
        proxy: listeners.map(|it| ProxyPorts { admin: it.admin, tap: it.tap }),
    }
}

fn of_sandbox(pod: &weft_sandbox::state::PodState) -> Pod {
    let mut owners = Vec::new();
    if let Some((set, _)) = pod.name.rsplit_once('-')
        && let Some((deployment, _)) = set.rsplit_once('-')
    {
        owners = vec![("replicaset".to_owned(), set.to_owned()), ("deployment".to_owned(), deployment.to_owned())];
    }
    Pod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        owners,
        labels: BTreeMap::new(),
        addresses: pod.ips.clone(),
        node: String::new(),
        service_account: String::new(),
        phase: Phase::Running,
        proxy: pod.meshed.then_some(ProxyPorts { admin: 4191, tap: None }),
    }
}
