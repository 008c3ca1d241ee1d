//! The pods of a mesh and how to reach their proxies, as the engine needs it. The component and the command line
//! implement it.

use std::{collections::BTreeMap, future::Future, sync::Arc};

use weft_proto::linkerd::tap::{ObserveRequest, TapEvent};

pub use crate::exposition::Exposition;

/// A pod, meshed or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace, within which its name is unique at a time.
    pub namespace: String,
    /// Its name, which a later pod may have again.
    pub name: String,
    /// Its uid: another pod of the same name is another pod.
    pub uid: String,
    /// What it belongs to, nearest first, as (kind, name) with kinds as in `weft.viz.v1.Resource`: a ReplicaSet, then
    /// its Deployment.
    pub owners: Vec<(String, String)>,
    /// Its labels, by which selectors find it.
    pub labels: BTreeMap<String, String>,
    /// Its addresses, at most one of each family; empty before it has one.
    pub addresses: Vec<std::net::IpAddr>,
    /// Its node; empty before it has one.
    pub node: String,
    /// Its ServiceAccount.
    pub service_account: String,
    /// Its phase, as in its status.
    pub phase: Phase,
    /// Its status in a word or two, as `kubectl get pods` has it.
    pub status: String,
    /// The ports of its proxy; `None` without one.
    pub proxy: Option<ProxyPorts>,
}

/// Where the proxy of a pod listens for those who look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyPorts {
    /// Metrics: 4191.
    pub admin: u16,
    /// Tap: 4190; `None` where tap is off.
    pub tap: Option<u16>,
}

/// What a pod's status says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not running yet.
    Pending,
    /// Running.
    Running,
    /// All containers ended well.
    Succeeded,
    /// A container failed for good.
    Failed,
}

/// Pods and connections to their proxies. Errors are sentences for people: what was not reached, and why.
pub trait Fleet: Send + Sync + 'static {
    /// The pods of a namespace, of all when it is empty, as they are now.
    fn pods(&self, namespace: &str) -> impl Future<Output = Result<Vec<Arc<Pod>>, String>> + Send;

    /// Reads a proxy's `/metrics` into `metrics`, piece by piece, to the end. The engine drops it after its deadline.
    fn metrics(&self, pod: &Pod, metrics: &mut Exposition<'_>) -> impl Future<Output = Result<(), String>> + Send;

    /// Opens a tap at a proxy. It ends when the stream is dropped.
    fn tap(
        &self,
        pod: &Pod,
        request: ObserveRequest,
    ) -> impl Future<Output = Result<tonic::Streaming<TapEvent>, String>> + Send;
}
