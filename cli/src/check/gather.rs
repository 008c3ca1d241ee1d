//! Queries all facts concurrently. A query without an answer is a fact too and not an error: the checks interpret it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use futures::{future::join_all, join};
use k8s_openapi::{
    api::{
        admissionregistration::v1::{
            MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
        },
        apps::v1::{DaemonSet, Deployment, StatefulSet},
        authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
        core::v1::{ConfigMap, ContainerStatus, Event, Namespace, Pod, Secret, Service, ServiceAccount},
        discovery::v1::EndpointSlice,
        rbac::v1::{ClusterRole, ClusterRoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::{Timestamp, fmt::rfc2822},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, LogParams, PostParams},
    client::Body,
};
use serde::de::DeserializeOwned;
use weft_k8s_api::labels;
use weft_proto::viz::{Resource as VizResource, StatRequest, viz_client::VizClient};

use super::{
    facts::{Access, ClusterFacts, Crd, CreatedKind, CustomObject, Facts, Mode, WebhookFacts, Workload},
    kubernetes::{CREATED, release},
    options::Scope,
    unsupported::KINDS,
    webhooks::{self, INJECTOR, NAMES},
};
use crate::{
    cluster::{ANSWER, Cluster, ClusterArgs, within},
    component,
    mesh::{Fetched, Mesh, list, pods},
    pod_network::PodNetwork,
};

/// How many pods are asked why they are not ready: the others usually have the same reason.
const ASKED: usize = 8;
/// How many lines of a log are read to find the last one.
const LOG_LINES: i64 = 3;

pub(super) async fn gather(scope: &Scope) -> Facts {
    let (args, mode, namespace) = (&scope.cluster, scope.mode, scope.namespace.as_deref());
    let cluster = args.cluster().await.map_err(|error| format!("{error:#}"));
    let client = cluster.as_ref().map(|cluster| cluster.server.clone()).map_err(Clone::clone);
    let mut facts = match &cluster {
        Ok(cluster) => gather_from(cluster, mode, namespace).await.map(Box::new),
        Err(error) => Err(error.clone()),
    };
    if let (Mode::Viz, Ok(facts)) = (mode, &mut facts) {
        facts.viz_answer = ask_viz(args).await;
    }
    Facts {
        mode,
        now: SystemTime::now(),
        cli_version: env!("CARGO_PKG_VERSION").to_owned(),
        expected_version: scope.expected_version.clone(),
        namespace: args.linkerd_namespace.clone(),
        data_plane_namespace: namespace.map(str::to_owned),
        client,
        cluster: facts,
    }
}

/// An error is that of the first query: if it fails, the others would only wait too.
async fn gather_from(cluster: &Cluster, mode: Mode, namespace: Option<&str>) -> Fetched<ClusterFacts> {
    let info = within(ANSWER, cluster.client.apiserver_version()).await?;
    let version = release(&info.git_version).unwrap_or_default();
    let control = cluster.namespace.as_str();
    let every = ListParams::default();
    let warnings = ListParams::default().fields("type=Warning");
    let proxy = mode == Mode::Proxy;
    let (
        (clock_skew, crds, access, namespaces),
        (config, trust_roots, issuer),
        (cluster_roles, cluster_role_bindings, service_accounts, services),
        (hooks, workloads, pods, events),
        (viz_deployments, viz_pods),
        mesh,
    ) = join!(
        async {
            join!(
                clock_skew(cluster),
                list(Api::<CustomResourceDefinition>::all(cluster.client.clone()), &every),
                access(cluster, mode),
                list(Api::<Namespace>::all(cluster.client.clone()), &every),
            )
        },
        async {
            join!(
                get::<ConfigMap>(cluster, "linkerd-config"),
                get::<ConfigMap>(cluster, "linkerd-identity-trust-roots"),
                get::<Secret>(cluster, "linkerd-identity-issuer"),
            )
        },
        async {
            join!(
                names(Api::<ClusterRole>::all(cluster.client.clone())),
                names(Api::<ClusterRoleBinding>::all(cluster.client.clone())),
                names(Api::<ServiceAccount>::namespaced(cluster.client.clone(), control)),
                list(Api::<Service>::all(cluster.client.clone()), &every),
            )
        },
        async {
            join!(
                join_all(NAMES.map(|name| webhook(cluster, name))),
                workloads(cluster, namespace, proxy),
                pods_to_inject(cluster, namespace, proxy),
                list(Api::<Event>::all(cluster.client.clone()), &warnings),
            )
        },
        async {
            let of_viz = ListParams::default().labels(component::SELECTOR);
            join!(
                list(Api::<Deployment>::all(cluster.client.clone()), &of_viz),
                list(Api::<Pod>::all(cluster.client.clone()), &of_viz),
            )
        },
        // The pods of the control plane are needed too, whatever the namespace.
        Mesh::gather(cluster, None),
    );
    let crds: Fetched<BTreeMap<_, _>> = crds.map(|crds| crds.into_iter().map(crd).collect());
    let (container_messages, objects) = join!(ask_not_ready(cluster, &mesh), custom_objects(cluster, &crds));
    Ok(ClusterFacts {
        viz_answer: None,
        version: (version.0, version.1, info.git_version),
        clock_skew,
        crds,
        access,
        namespaces,
        config,
        trust_roots,
        issuer,
        cluster_roles,
        cluster_role_bindings,
        service_accounts,
        services,
        objects,
        webhooks: NAMES.into_iter().zip(hooks).collect(),
        workloads,
        pods,
        events,
        container_messages,
        viz: viz_deployments.and_then(|deployments| Ok((deployments, viz_pods?))),
        mesh,
    })
}

/// Asks the component about its own namespace, as this user; `None` where there is no component.
async fn ask_viz(args: &ClusterArgs) -> Option<Fetched<()>> {
    let asking = async {
        let Some(component) = component::find(args).await.map_err(|error| format!("{error:#}"))? else {
            return Ok(None);
        };
        let resource = VizResource {
            kind: "deployment".to_owned(),
            namespace: component::NAMESPACE.to_owned(),
            name: String::new(),
        };
        let mut request = tonic::Request::new(StatRequest { resource: Some(resource), ..StatRequest::default() });
        request.metadata_mut().insert("authorization", component.authorization);
        let answer = VizClient::new(component.channel).stat(request).await;
        answer.map(|_| Some(())).map_err(|status| status.message().to_owned())
    };
    match tokio::time::timeout(ANSWER, asking).await {
        Ok(answer) => answer.transpose(),
        Err(_) => Some(Err(format!("no answer within {}s", ANSWER.as_secs()))),
    }
}

/// A namespaced object of the control plane.
async fn get<K>(cluster: &Cluster, name: &str) -> Fetched<Option<K>>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    K::DynamicType: Default,
{
    within(ANSWER, Api::<K>::namespaced(cluster.client.clone(), &cluster.namespace).get_opt(name)).await
}

async fn names<K>(api: Api<K>) -> Fetched<BTreeSet<String>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let all = within(ANSWER, api.list_metadata(&ListParams::default())).await?;
    Ok(all.iter().map(kube::ResourceExt::name_any).collect())
}

/// From the `Date` of an answer; `None` if the server, or a proxy in front of it, sends none.
async fn clock_skew(cluster: &Cluster) -> Option<i64> {
    let request = http::Request::get("/version").body(Body::empty()).ok()?;
    let answer = within(ANSWER, cluster.client.send(request)).await.ok()?;
    let date = answer.headers().get(http::header::DATE)?.to_str().ok()?;
    let theirs = rfc2822::parse(date).ok()?.timestamp();
    Some(theirs.as_second() - Timestamp::now().as_second())
}

fn crd(definition: CustomResourceDefinition) -> (String, Crd) {
    let bundle = definition.annotations().get("gateway.networking.k8s.io/bundle-version").cloned();
    let name = definition.name_any();
    let served = definition.spec.versions.into_iter().filter(|version| version.served).map(|version| version.name);
    (name, Crd { served: served.collect(), bundle })
}

/// Objects of the relevant kinds that exist in the cluster.
async fn custom_objects(cluster: &Cluster, crds: &Fetched<BTreeMap<String, Crd>>) -> Fetched<Vec<CustomObject>> {
    let crds = crds.as_ref().map_err(Clone::clone)?;
    let served = KINDS.iter().filter_map(|(group, kind, plural)| {
        let version = crds.get(&format!("{plural}.{group}"))?.served.last()?;
        let gvk = GroupVersionKind::gvk(group, version, kind);
        Some((*group, *kind, ApiResource::from_gvk_with_plural(&gvk, plural)))
    });
    let every = ListParams::default();
    let lists = join_all(served.map(async |(group, kind, resource)| {
        let api = Api::<DynamicObject>::all_with(cluster.client.clone(), &resource);
        let found = list(api, &every).await?;
        Ok::<_, String>(found.into_iter().map(move |object| CustomObject {
            group,
            kind,
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            content: object.data,
        }))
    }));
    let lists = lists.await.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(lists.into_iter().flatten().collect())
}

async fn access(cluster: &Cluster, mode: Mode) -> Vec<Access> {
    if mode != Mode::Pre {
        return Vec::new();
    }
    join_all(CREATED.map(|kind| async move { Access { kind, allowed: may_create(cluster, kind).await } })).await
}

async fn may_create(cluster: &Cluster, kind: CreatedKind) -> Fetched<bool> {
    let attributes = ResourceAttributes {
        group: Some(kind.group.to_owned()),
        resource: Some(kind.plural.to_owned()),
        namespace: kind.namespaced.then(|| cluster.namespace.clone()),
        verb: Some("create".to_owned()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let reviews = Api::<SelfSubjectAccessReview>::all(cluster.client.clone());
    let answer = within(ANSWER, reviews.create(&PostParams::default(), &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

async fn webhook(cluster: &Cluster, name: &'static str) -> WebhookFacts {
    let configuration = webhooks::configuration(name);
    let ca_bundle = async {
        if name == INJECTOR {
            let api = Api::<MutatingWebhookConfiguration>::all(cluster.client.clone());
            let found = within(ANSWER, api.get_opt(&configuration)).await?;
            Ok(found.map(|found| bundle(found.webhooks.into_iter().flatten().map(|webhook| webhook.client_config))))
        } else {
            let api = Api::<ValidatingWebhookConfiguration>::all(cluster.client.clone());
            let found = within(ANSWER, api.get_opt(&configuration)).await?;
            Ok(found.map(|found| bundle(found.webhooks.into_iter().flatten().map(|webhook| webhook.client_config))))
        }
    };
    let (secret_name, service) = (webhooks::secret(name), webhooks::service(name));
    let of_service = ListParams::default().labels(&format!("{}={service}", labels::SERVICE_NAME));
    let slices = Api::<EndpointSlice>::namespaced(cluster.client.clone(), &cluster.namespace);
    let (ca_bundle, secret, slices) = join!(ca_bundle, get::<Secret>(cluster, &secret_name), list(slices, &of_service));
    WebhookFacts { ca_bundle, secret, endpoints: slices.map(|slices| slices.iter().map(ready_endpoints).sum()) }
}

fn bundle(mut clients: impl Iterator<Item = WebhookClientConfig>) -> Option<String> {
    let bundle = clients.next()?.ca_bundle.filter(|bundle| !bundle.0.is_empty())?;
    Some(String::from_utf8_lossy(&bundle.0).into_owned())
}

fn ready_endpoints(slice: &EndpointSlice) -> usize {
    let all = slice.endpoints.iter().flatten();
    all.filter(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false)).count()
}

fn scoped<K>(cluster: &Cluster, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match namespace {
        Some(namespace) => Api::namespaced(cluster.client.clone(), namespace),
        None => Api::all(cluster.client.clone()),
    }
}

async fn workloads(cluster: &Cluster, namespace: Option<&str>, wanted: bool) -> Fetched<Vec<Workload>> {
    if !wanted {
        return Ok(Vec::new());
    }
    let every = ListParams::default();
    let (deployments, stateful_sets, daemon_sets) = join!(
        list(scoped::<Deployment>(cluster, namespace), &every),
        list(scoped::<StatefulSet>(cluster, namespace), &every),
        list(scoped::<DaemonSet>(cluster, namespace), &every),
    );
    let mut all = Vec::new();
    all.extend(deployments?.into_iter().map(|it| workload("Deployment", &it, it.spec.template.metadata.clone())));
    all.extend(stateful_sets?.into_iter().map(|it| workload("StatefulSet", &it, it.spec.template.metadata.clone())));
    all.extend(daemon_sets?.into_iter().map(|it| workload("DaemonSet", &it, it.spec.template.metadata.clone())));
    Ok(all)
}

fn workload<K: Resource>(
    kind: &'static str,
    object: &K,
    template: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>,
) -> Workload {
    Workload {
        kind,
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
        template: template.unwrap_or_default(),
    }
}

async fn pods_to_inject(cluster: &Cluster, namespace: Option<&str>, wanted: bool) -> Fetched<Vec<Pod>> {
    if !wanted {
        return Ok(Vec::new());
    }
    list(scoped::<Pod>(cluster, namespace), &ListParams::default()).await
}

/// Messages of containers that are not ready: from the admin server of a running one, otherwise the end of its log.
async fn ask_not_ready(cluster: &Cluster, mesh: &Mesh) -> BTreeMap<String, Vec<String>> {
    let all = mesh.control_pods.iter().flatten().chain(mesh.meshed.iter().flatten());
    let broken = all.filter(|pod| !pods::is_over(pod) && !pods::is_leaving(pod) && !pods::is_ready(pod));
    let mut asked: BTreeMap<String, &Pod> = BTreeMap::new();
    for pod in broken {
        if asked.len() < ASKED {
            asked.insert(pods::full_name(pod), pod);
        }
    }
    let answers =
        join_all(asked.into_iter().map(|(name, pod)| async move { (name, ask_pod(cluster, pod).await) })).await;
    answers.into_iter().filter(|(_, messages)| !messages.is_empty()).collect()
}

async fn ask_pod(cluster: &Cluster, pod: &Pod) -> Vec<String> {
    let broken: Vec<_> = pods::statuses(pod).filter(|status| !status.ready).collect();
    let messages = join_all(broken.into_iter().map(|status| ask_container(cluster, pod, status))).await;
    messages.into_iter().flatten().collect()
}

async fn ask_container(cluster: &Cluster, pod: &Pod, status: &ContainerStatus) -> Option<String> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let state = status.state.as_ref()?;
    let said = if state.running.is_some() {
        let network = PodNetwork::Cluster(cluster.clone());
        let answer = network.get(&namespace, &name, pods::admin_port(pod, &status.name)?, "/ready").await.ok()?;
        Some(answer.body.trim().to_owned()).filter(|_| answer.status != 200)
    } else if status.restart_count > 0 && !has_last_words(status) {
        let params = LogParams {
            container: Some(status.name.clone()),
            previous: true,
            tail_lines: Some(LOG_LINES),
            ..LogParams::default()
        };
        let log = within(ANSWER, Api::<Pod>::namespaced(cluster.client.clone(), &namespace).logs(&name, &params))
            .await
            .ok()?;
        log.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
    } else {
        None
    };
    said.filter(|said| !said.is_empty()).map(|said| format!("container {}: {said}", status.name))
}

/// Whether Kubernetes kept the last message of a container that ended.
fn has_last_words(status: &ContainerStatus) -> bool {
    let ended = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    ended.is_some_and(|ended| ended.message.as_ref().is_some_and(|message| !message.is_empty()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::tests::object;

    #[test]
    fn endpoints_count_unless_they_are_not_ready() {
        let slice = object(json!({"addressType": "IPv4", "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false}},
            {"addresses": ["10.0.0.3"]},
        ]}));
        assert_eq!(ready_endpoints(&slice), 2);
    }

    #[test]
    fn a_definition_serves_what_it_marks_as_served() {
        let definition = object(
            json!({"metadata": {"name": "servers.policy.linkerd.io"}, "spec": {"group": "g", "scope": "Namespaced",
            "names": {"kind": "Server", "plural": "servers"}, "versions": [
                {"name": "v1beta2", "served": false, "storage": false}, {"name": "v1beta3", "served": true, "storage": true}]}}),
        );
        let (name, crd) = crd(definition);
        assert_eq!((name.as_str(), crd.served), ("servers.policy.linkerd.io", ["v1beta3".to_owned()].into()));
    }
}
