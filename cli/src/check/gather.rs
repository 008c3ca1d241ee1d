//! Queries all facts concurrently, in parts that arrive one by one. A query without an answer is a fact too and not an
//! error: the checks interpret it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{LocalBoxFuture, Shared, join_all},
    join,
    stream::FuturesUnordered,
};
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
    apimachinery::pkg::version::Info,
    jiff::{Timestamp, fmt::rfc2822},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, LogParams, PartialObjectMeta, PostParams},
    client::Body,
};
use serde::de::DeserializeOwned;
use weft_k8s_api::labels;
use weft_proto::viz::{Resource as VizResource, StatRequest, viz_client::VizClient};

use super::{
    facts::{Access, ClusterFacts, Crd, CreatedKind, CustomObject, Facts, Mode, Part, WebhookFacts, Workload},
    kubernetes::{CREATED, release},
    options::Scope,
    unsupported::KINDS,
    webhooks::{self, INJECTOR, NAMES},
};
use crate::{
    cluster::{ANSWER, Cluster, ClusterArgs, within},
    component,
    mesh::{Fetched, Mesh, list, other_agent::OtherAgent, pods},
    pod_network::PodNetwork,
};

/// How many pods are asked why they are not ready: the others usually have the same reason.
const ASKED: usize = 8;
/// How many lines of a log are read to find the last one.
const LOG_LINES: i64 = 3;

/// Facts of which parts arrive one by one.
pub(super) struct Gathering {
    pub(super) facts: Facts,
    arrived: BTreeSet<Part>,
    open: FuturesUnordered<LocalBoxFuture<'static, (Part, Update)>>,
}

/// Adds what a part has found.
type Update = Box<dyn FnOnce(&mut ClusterFacts)>;

/// The definitions, which two parts need.
type Definitions = Shared<LocalBoxFuture<'static, Fetched<BTreeMap<String, Crd>>>>;

/// The cluster to query, and the scope of the check.
#[derive(Clone)]
struct Source {
    cluster: Cluster,
    scope: Scope,
    definitions: Definitions,
}

impl Gathering {
    /// Asks for the version, then for the wanted parts at once. If nothing answers, no part would be answered either.
    pub(super) async fn start(scope: &Scope, wanted: &BTreeSet<Part>) -> Self {
        let cluster = scope.cluster.cluster().await.map_err(|error| format!("{error:#}"));
        let client = cluster.as_ref().map(|cluster| cluster.server.clone()).map_err(Clone::clone);
        let found = match &cluster {
            Ok(cluster) => within(ANSWER, cluster.client.apiserver_version()).await,
            Err(error) => Err(error.clone()),
        };
        let mut open = FuturesUnordered::new();
        if let (Ok(cluster), Ok(_)) = (cluster, &found) {
            let definitions = definitions(cluster.clone()).boxed_local().shared();
            let source = Source { cluster, scope: scope.clone(), definitions };
            open.extend(wanted.iter().map(|part| ask(*part, source.clone()).boxed_local()));
        }
        let namespace = &scope.cluster.linkerd_namespace;
        let unasked = |info: Info| {
            let (major, minor) = release(&info.git_version).unwrap_or_default();
            Box::new(ClusterFacts::unasked((major, minor, info.git_version), namespace))
        };
        let facts = Facts {
            mode: scope.mode,
            now: SystemTime::now(),
            cli_version: env!("CARGO_PKG_VERSION").to_owned(),
            expected_version: scope.expected_version.clone(),
            namespace: namespace.clone(),
            data_plane_namespace: scope.namespace.clone(),
            client,
            cluster: found.map(unasked),
        };
        Self { facts, arrived: BTreeSet::new(), open }
    }

    /// Whether these parts have arrived, or none will.
    pub(super) fn has(&self, parts: &[Part]) -> bool {
        self.open.is_empty() || parts.iter().all(|part| self.arrived.contains(part))
    }

    /// Waits for another part.
    pub(super) async fn next(&mut self) {
        if let Some((part, update)) = self.open.next().await {
            self.arrived.insert(part);
            if let Ok(cluster) = &mut self.facts.cluster {
                update(cluster);
            }
        }
    }
}

async fn definitions(cluster: Cluster) -> Fetched<BTreeMap<String, Crd>> {
    let all = list(Api::<CustomResourceDefinition>::all(cluster.client), &ListParams::default()).await;
    all.map(|all| all.into_iter().map(crd).collect())
}

async fn ask(part: Part, source: Source) -> (Part, Update) {
    let Source { cluster, scope, definitions } = source;
    let (client, namespace) = (|| cluster.client.clone(), scope.namespace.as_deref());
    let every = ListParams::default();
    let update: Update = match part {
        Part::Definitions => {
            let crds = definitions.await;
            Box::new(move |facts: &mut ClusterFacts| facts.crds = crds)
        }
        Part::Access => {
            let (access, clock_skew, address) =
                join!(access(&cluster), clock_skew(&cluster), cluster.service_address());
            Box::new(move |facts: &mut ClusterFacts| {
                (facts.access, facts.clock_skew, facts.service_address) = (access, clock_skew, address);
            })
        }
        Part::OtherAgents => {
            let agents = OtherAgent::list(&cluster).await;
            Box::new(move |facts: &mut ClusterFacts| facts.other_agents = agents)
        }
        Part::Config => {
            let config = get::<ConfigMap>(&cluster, "linkerd-config").await;
            Box::new(move |facts: &mut ClusterFacts| facts.config = config)
        }
        Part::Settings => {
            let (namespaces, trust_roots, issuer) = join!(
                list(Api::<Namespace>::all(client()), &every),
                get::<ConfigMap>(&cluster, "linkerd-identity-trust-roots"),
                get::<Secret>(&cluster, "linkerd-identity-issuer"),
            );
            Box::new(move |facts: &mut ClusterFacts| {
                (facts.namespaces, facts.trust_roots, facts.issuer) = (namespaces, trust_roots, issuer);
            })
        }
        Part::Inventory => {
            let (roles, bindings, accounts, services) = join!(
                names(Api::<PartialObjectMeta<ClusterRole>>::all(client())),
                names(Api::<PartialObjectMeta<ClusterRoleBinding>>::all(client())),
                names(Api::<PartialObjectMeta<ServiceAccount>>::namespaced(client(), &cluster.namespace)),
                list(Api::<Service>::all(client()), &every),
            );
            Box::new(move |facts: &mut ClusterFacts| {
                (facts.cluster_roles, facts.cluster_role_bindings) = (roles, bindings);
                (facts.service_accounts, facts.services) = (accounts, services);
            })
        }
        Part::Webhooks => {
            let hooks = join_all(NAMES.map(|name| webhook(&cluster, name))).await;
            Box::new(move |facts: &mut ClusterFacts| facts.webhooks = NAMES.into_iter().zip(hooks).collect())
        }
        Part::Workloads => {
            let wanted = scope.mode == Mode::Proxy;
            let (workloads, pods) =
                join!(workloads(&cluster, namespace, wanted), pods_to_inject(&cluster, namespace, wanted));
            Box::new(move |facts: &mut ClusterFacts| (facts.workloads, facts.pods) = (workloads, pods))
        }
        Part::Events => {
            let warnings = ListParams::default().fields("type=Warning");
            let events = list(Api::<Event>::all(client()), &warnings).await;
            Box::new(move |facts: &mut ClusterFacts| facts.events = events)
        }
        Part::Mesh => {
            // The pods of the control plane are needed too, whatever the namespace.
            let mesh = Mesh::gather(&cluster, None).await;
            let messages = ask_not_ready(&cluster, &mesh).await;
            Box::new(move |facts: &mut ClusterFacts| (facts.mesh, facts.container_messages) = (mesh, messages))
        }
        Part::Component => {
            let of_viz = ListParams::default().labels(component::SELECTOR);
            let answer = async { if scope.mode.is_viz() { ask_viz(&scope.cluster).await } else { None } };
            let (deployments, pods, answer) = join!(
                list(Api::<Deployment>::all(client()), &of_viz),
                list(Api::<Pod>::all(client()), &of_viz),
                answer,
            );
            let viz = deployments.and_then(|deployments| Ok((deployments, pods?)));
            Box::new(move |facts: &mut ClusterFacts| (facts.viz, facts.viz_answer) = (viz, answer))
        }
        Part::Objects => {
            let objects = custom_objects(&cluster, &definitions.await).await;
            Box::new(move |facts: &mut ClusterFacts| facts.objects = objects)
        }
    };
    (part, update)
}

/// Asks the component about its own namespace, as this user; `None` where there is no component.
async fn ask_viz(args: &ClusterArgs) -> Option<Fetched<()>> {
    let asking = async {
        let Some(component) = component::find(args).await.map_err(|error| format!("{error:#}"))? else {
            return Ok(None);
        };
        let resource =
            VizResource { kind: "deployment".to_owned(), namespace: component.namespace, name: String::new() };
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
    let all = list(api, &ListParams::default()).await?;
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

async fn access(cluster: &Cluster) -> Vec<Access> {
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
    use std::{fs, future};

    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::{
        check::{facts::tests::object, round},
        cluster::HELM_RELEASE,
        mesh::installed::PART_OF,
        output::progress::Progress,
    };

    /// The scope of an API server that answers about its version, custom resource definitions and a configuration
    /// that helm installed, has a list of nodes in two pages, and leaves all other requests open.
    async fn half_an_api_server(mode: Mode) -> (tempfile::TempDir, Scope) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream));
            }
        });
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "a",
            "clusters": [{"name": "a", "cluster": {"server": server}}], "users": [{"name": "a", "user": {}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]});
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        fs::write(&file, config.to_string()).unwrap();
        let linkerd_namespace = "linkerd".to_owned();
        let cluster = ClusterArgs { kubeconfig: Some(file), linkerd_namespace, ..ClusterArgs::default() };
        (directory, Scope { mode, cluster, namespace: None, expected_version: None })
    }

    async fn answer(stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        loop {
            let (mut head, mut line) = (String::new(), String::new());
            while stream.read_line(&mut line).await.is_ok_and(|length| length > 0) && line != "\r\n" {
                head.push_str(&std::mem::take(&mut line));
            }
            let body = match head.split(' ').nth(1) {
                Some("/version") => json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3", "gitCommit": "",
                    "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "", "platform": ""}),
                Some(path) if path.contains("customresourcedefinitions") => {
                    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinitionList",
                        "metadata": {}, "items": []})
                }
                Some(path) if path.ends_with("/namespaces/linkerd/configmaps/linkerd-config") => {
                    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "linkerd-config",
                        "namespace": "linkerd", "annotations": {HELM_RELEASE: "mesh"},
                        "labels": {PART_OF.0: PART_OF.1}}})
                }
                Some(path) if path.starts_with("/api/v1/nodes?") && path.contains("limit=") => {
                    let is_last = path.contains("continue=next");
                    let metadata = if is_last { json!({}) } else { json!({"continue": "next"}) };
                    json!({"apiVersion": "v1", "kind": "NodeList", "metadata": metadata,
                        "items": [{"metadata": {"name": if is_last { "b" } else { "a" }}}]})
                }
                Some(_) => future::pending().await,
                None => return,
            };
            let body = body.to_string();
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json";
            let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn each_part_is_there_as_soon_as_it_is_answered() {
        let (_directory, scope) = half_an_api_server(Mode::Installed).await;
        let wanted = [Part::Definitions, Part::Settings, Part::Events].into();
        let mut gathering = Gathering::start(&scope, &wanted).await;
        assert_eq!(gathering.facts.cluster.as_ref().unwrap().version, (1, 36, "v1.36.3".to_owned()));
        assert!(gathering.has(&[]) && !gathering.has(&[Part::Definitions]));
        gathering.next().await;
        assert!(gathering.has(&[Part::Definitions]) && !gathering.has(&[Part::Definitions, Part::Settings]));
        let facts = gathering.facts.cluster.unwrap();
        assert_eq!((facts.crds, facts.events.is_err()), (Ok(BTreeMap::new()), true));
    }

    /// What is open does not matter: it was not asked for.
    #[tokio::test]
    async fn the_definitions_alone_are_judged_without_other_answers() {
        let (_directory, scope) = half_an_api_server(Mode::Definitions).await;
        let outcome = round(&scope, None, &mut Progress::new()).await.unwrap();
        let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
        assert_eq!(names, ["kubernetes-api", "kubernetes-version", "gateway-api-crd", "linkerd-crd"]);
        let errors: Vec<_> = outcome.checks().filter(|check| check.is_error()).collect();
        let [missing] = errors.as_slice() else { panic!("{outcome:#?}") };
        let remedies: Vec<_> = missing.problems.iter().map(|problem| problem.remedy.as_str()).collect();
        let by_helm = |remedy: &&str| remedy.starts_with("helm upgrade --install weft-crds ");
        assert!(!outcome.success && !remedies.is_empty() && remedies.iter().all(by_helm), "{remedies:#?}");
    }

    #[tokio::test]
    async fn a_cluster_that_does_not_answer_ends_the_round() {
        let (directory, mut scope) = half_an_api_server(Mode::Installed).await;
        scope.cluster.kubeconfig = Some(directory.path().join("missing"));
        let outcome = round(&scope, None, &mut Progress::new()).await.unwrap();
        let [category] = outcome.categories.as_slice() else { panic!("{outcome:#?}") };
        assert_eq!((category.category_name, outcome.is_fatal()), ("kubernetes-api", true));
    }

    #[tokio::test]
    async fn a_list_is_read_to_its_last_page() {
        let (_directory, scope) = half_an_api_server(Mode::Installed).await;
        let client = scope.cluster.cluster().await.unwrap().client;
        let nodes = list(Api::<Node>::all(client.clone()), &ListParams::default()).await.unwrap();
        assert_eq!(nodes.iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>(), ["a", "b"]);
        let of_metadata = names(Api::<PartialObjectMeta<Node>>::all(client)).await.unwrap();
        assert_eq!(of_metadata, BTreeSet::from(["a", "b"].map(str::to_owned)));
    }

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
