//! Linked clusters. The other cluster is the same API server, read with the permissions that Linkerd's multicluster
//! extension grants to the readers of a cluster.

use k8s_openapi::{
    ByteString,
    api::rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};
use tonic::Code;
use weft_proto::linkerd::destination::{GetDestination, destination_client::DestinationClient, update};
use weft_test_kit::wait::eventually;

use crate::{
    process::{PATIENCE, Process},
    world::World,
};

const LABEL: &str = "multicluster.linkerd.io/remote-discovery";

/// A kubeconfig of an account that may read what a linked cluster's reader needs, and nothing else, as text.
async fn reader(world: &World) -> String {
    let path = world.account_kubeconfig("reader").await;
    let rule = |group: &str, resources: Value| json!({"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch"]});
    let name = &world.namespace;
    let role: ClusterRole = serde_json::from_value(json!({"metadata": {"name": name}, "rules": [
        rule("", json!(["pods", "endpoints", "services"])), rule("apps", json!(["replicasets"])), rule("batch", json!(["jobs"])),
        rule("discovery.k8s.io", json!(["endpointslices"])), rule("policy.linkerd.io", json!(["servers"]))]}))
    .unwrap();
    Api::all(world.client.clone()).create(&PostParams::default(), &role).await.unwrap();
    let binding: ClusterRoleBinding = serde_json::from_value(json!({"metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": name}]}))
    .unwrap();
    Api::all(world.client.clone()).create(&PostParams::default(), &binding).await.unwrap();
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cluster = config["clusters"][0]["cluster"].as_object_mut().unwrap();
    // A Secret contains its certificates; the environment's kubeconfig may name files.
    if let Some(file) = cluster.remove("certificate-authority").filter(|file| !file.is_null()) {
        let data = ByteString(std::fs::read(file.as_str().unwrap()).unwrap());
        cluster.insert("certificate-authority-data".to_owned(), json!(data));
    }
    config.to_string()
}

async fn forget_reader(world: &World) {
    let (roles, bindings): (Api<ClusterRole>, Api<ClusterRoleBinding>) =
        (Api::all(world.client.clone()), Api::all(world.client.clone()));
    roles.delete(&world.namespace, &DeleteParams::default()).await.unwrap();
    bindings.delete(&world.namespace, &DeleteParams::default()).await.unwrap();
}

/// The Secret that links a cluster.
fn secret(cluster: &str, kubeconfig: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
        "metadata": {"name": format!("link-{cluster}"), "labels": {"multicluster.linkerd.io/cluster-name": cluster},
            "annotations": {"multicluster.linkerd.io/trust-domain": "east.trust",
                "multicluster.linkerd.io/cluster-domain": "east.local"}},
        "data": {"kubeconfig": ByteString(kubeconfig.as_bytes().to_vec())}})
}

fn service(name: &str, metadata: &Value) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {"ports": [{"name": "http", "port": 80}]}});
    object["metadata"]["name"] = json!(name);
    object
}

/// The status of a request for endpoints.
async fn status(world: &World, destination: &Process, name: &str) -> Code {
    let addr = destination.bound("destination").await;
    let mut client = DestinationClient::connect(format!("http://{addr}")).await.unwrap();
    let path = format!("{name}.{}.svc.cluster.local:80", world.namespace);
    client
        .get(GetDestination { path, ..GetDestination::default() })
        .await
        .map_or_else(|status| status.code(), |_| Code::Ok)
}

/// Waits for a status.
async fn has_status(world: &World, destination: &Process, name: &str, expected: Code) {
    eventually("the status", PATIENCE, async || match status(world, destination, name).await {
        code if code == expected => Ok(()),
        code => Err(format!("{code:?}")),
    })
    .await;
}

#[tokio::test]
async fn a_linked_service_follows_the_other_cluster_until_the_link_is_removed() {
    let world = World::new().await;
    let kubeconfig = reader(&world).await;
    world.apply(world.slice("web-1", "192.0.2.1")).await;
    let linked = json!({"labels": {LABEL: "east", "multicluster.linkerd.io/remote-service": "web"}});
    world.apply(service("web-east", &linked)).await;
    world.apply(service("nameless", &json!({"labels": {LABEL: "east"}}))).await;
    let destination = world.destination("one", None).await;
    destination.ready().await;
    has_status(&world, &destination, "web-east", Code::NotFound).await;
    assert_eq!(status(&world, &destination, "nameless").await, Code::FailedPrecondition);

    world.apply(secret("east", &kubeconfig)).await;
    destination.says("objects of a linked cluster are known").await;
    let mut updates = world.watch_service(&destination, "web-east").await;
    assert_eq!(updates.next().await, "+192.0.2.1:8080");
    let update::Update::Add(added) = updates.last.clone().unwrap() else { panic!("{:?}", updates.last) };
    assert_eq!(added.metric_labels["service"], "web");
    world.apply(world.slice("web-2", "192.0.2.2")).await;
    assert_eq!(updates.next().await, "+192.0.2.2:8080");
    destination.counts("cluster_store_size 1").await;

    world.delete("Secret", "link-east").await;
    updates.end().await;
    has_status(&world, &destination, "web-east", Code::NotFound).await;
    forget_reader(&world).await;
    world.done().await;
}

#[tokio::test]
async fn a_federated_service_has_members_here_and_in_linked_clusters() {
    let world = World::new().await;
    let kubeconfig = reader(&world).await;
    let members =
        |linked: &str| json!({"annotations": {LABEL: linked, "multicluster.linkerd.io/local-discovery": "api"}});
    let mut here = world.slice("api-1", "192.0.2.9");
    here["metadata"]["labels"]["kubernetes.io/service-name"] = json!("api");
    world.apply(here).await;
    world.apply(world.slice("web-1", "192.0.2.1")).await;
    world.apply(service("api", &json!({}))).await;
    world.apply(service("all", &members("web@east"))).await;
    let destination = world.destination("one", None).await;
    destination.ready().await;
    let mut updates = world.watch_service(&destination, "all").await;
    assert_eq!(updates.next().await, "+192.0.2.9:8080");
    world.apply(secret("east", &kubeconfig)).await;
    assert_eq!(updates.next().await, "+192.0.2.1:8080");
    world.apply(service("all", &members("web@west"))).await;
    assert_eq!(updates.next().await, "-192.0.2.1:8080");
    world.apply(service("all", &members("web@east"))).await;
    assert_eq!(updates.next().await, "+192.0.2.1:8080");
    world.delete("Secret", "link-east").await;
    assert_eq!(updates.next().await, "-192.0.2.1:8080");
    world.delete("Service", "all").await;
    updates.end().await;
    forget_reader(&world).await;
    world.done().await;
}

#[tokio::test]
async fn a_secret_that_would_run_a_program_links_nothing() {
    let world = World::new().await;
    let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1"}}],
        "users": [{"name": "u", "user": {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh"}}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    let destination = world.destination("one", None).await;
    destination.ready().await;
    world.apply(secret("east", &kubeconfig.to_string())).await;
    world.has_event("Secret", "link-east", "LinkUnusable", "exec of \"u\" is refused").await;
    destination.counts("cluster_store_size 0").await;
    world.done().await;
}
