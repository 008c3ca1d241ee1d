//! The objects of a run: a namespace with the pods, and an account that may read their metrics.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};

use super::{page, proxies};
use crate::control_plane::{api::Api, objects::RUN_LABEL};

/// Requests at a time while objects are created.
const CONCURRENCY: usize = 32;
const RIGHTS: &str = "/apis/rbac.authorization.k8s.io/v1";
/// The caller's ServiceAccount.
const ACCOUNT: &str = "viewer";

/// Creates everything in a namespace with the run's name.
///
/// # Errors
/// The API server refuses an object.
pub(super) async fn create(api: &Api, run: &str, pods: u32, workloads: u32, port: u16) -> anyhow::Result<()> {
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": run, "labels": {RUN_LABEL: run}}});
    api.create("/api/v1/namespaces", &namespace).await?;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}});
    api.create(&format!("/api/v1/namespaces/{run}/serviceaccounts"), &account).await?;
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": ACCOUNT},
        "rules": [{"apiGroups": ["viz.weft.io"], "resources": ["stats"], "verbs": ["get"]}]});
    api.create(&format!("{RIGHTS}/namespaces/{run}/roles"), &role).await?;
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": run}]});
    api.create(&format!("{RIGHTS}/namespaces/{run}/rolebindings"), &binding).await?;
    let create = async |pod: u32| {
        let pods = format!("/api/v1/namespaces/{run}/pods");
        let object = pod_object(pod, pod % workloads, port);
        api.create(&pods, &object).await?;
        let address = proxies::address(pod);
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        api.merge(&format!("{pods}/{name}/status"), &status).await
    };
    stream::iter(0..pods).map(create).buffer_unordered(CONCURRENCY).try_for_each(async |_| Ok(())).await
}

/// A token of the account, for the component alone.
///
/// # Errors
/// The API server refuses it.
pub(super) async fn token(api: &Api, run: &str) -> anyhow::Result<String> {
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {"audiences": ["viz.weft.io"]}});
    let path = format!("/api/v1/namespaces/{run}/serviceaccounts/{ACCOUNT}/token");
    let answer = api.create(&path, &request).await?;
    Ok(answer["status"]["token"].as_str().unwrap_or_default().to_owned())
}

/// A pod without a kubelet, of a Deployment.
fn pod_object(pod: u32, workload: u32, port: u16) -> Value {
    let workload = page::name(workload);
    // Kubernetes' garbage collector deletes pods whose owner is gone; of this version it cannot know.
    let owner = json!({"apiVersion": "apps/v0", "kind": "ReplicaSet", "name": format!("{workload}-7f9"), "uid": "u", "controller": true});
    let proxy =
        json!({"name": "linkerd-proxy", "image": "none", "ports": [{"name": "linkerd-admin", "containerPort": port}]});
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("{workload}-7f9-{pod}"), "ownerReferences": [owner],
            "labels": {"app": workload, "pod-template-hash": "7f9", "linkerd.io/control-plane-ns": "linkerd"}},
        // Nobody schedules it: pods of a node that is not there are collected as well.
        "spec": {"schedulerName": "none", "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
            "containers": [proxy]}})
}
