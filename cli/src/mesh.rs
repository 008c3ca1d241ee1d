//! The state of the mesh in a cluster: gathered once and concurrently, evaluated elsewhere.
//!
//! ```text
//! API server ──┐
//!              ├──gather──> Mesh ──> status, check
//! agents ──────┘
//! ```
//!
//! A query without an answer is a fact too: every list holds its objects or the error.

pub(crate) mod installed;
pub(crate) mod other_agent;
pub(crate) mod pods;

use futures::{future::join_all, join};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kube::{Api, Resource, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;
use weft_k8s_api::labels;
use weft_proto::agent::StatusResponse;

use crate::{
    agent,
    cluster::{ANSWER, Cluster, within},
};

/// The Deployments of the control plane.
pub(crate) const DEPLOYMENTS: [&str; 3] = ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector"];

/// Most objects in a page of a list, as kubectl asks for them.
const PAGE: u32 = 500;

/// An answer, or the error.
pub(crate) type Fetched<T> = Result<T, String>;

/// The mesh of one control plane.
#[derive(Clone, Debug)]
pub(crate) struct Mesh {
    /// The control plane's namespace.
    pub(crate) namespace: String,
    pub(crate) nodes: Fetched<Vec<Node>>,
    /// Deployments of the control plane, whatever their names.
    pub(crate) deployments: Fetched<Vec<Deployment>>,
    /// Of its agents.
    pub(crate) daemon_set: Fetched<Option<DaemonSet>>,
    /// Pods of the control plane, and of agents.
    pub(crate) control_pods: Fetched<Vec<Pod>>,
    pub(crate) lease: Fetched<Option<Lease>>,
    /// One for each scheduled agent pod.
    pub(crate) agents: Vec<Agent>,
    /// Pods with a proxy, including those of the control plane.
    pub(crate) meshed: Fetched<Vec<Pod>>,
}

/// A node's agent.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) pod: Pod,
    /// Its status; for a pod that does not run, the reason.
    pub(crate) answer: Fetched<StatusResponse>,
}

impl Agent {
    pub(crate) fn node(&self) -> &str {
        self.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
    }
}

impl Mesh {
    /// Queries everything at once. `namespace` limits the meshed pods; `None` means all.
    pub(crate) async fn gather(cluster: &Cluster, namespace: Option<&str>) -> Self {
        let control = cluster.namespace.as_str();
        let client = || cluster.client.clone();
        let every = ListParams::default();
        let component = ListParams::default().labels(labels::CONTROL_PLANE_COMPONENT);
        let of_agents = ListParams::default().labels(agent::SELECTOR);
        let with_proxy = ListParams::default().labels(labels::CONTROL_PLANE_NS);
        let pods = match namespace {
            Some(namespace) => Api::<Pod>::namespaced(client(), namespace),
            None => Api::all(client()),
        };
        let leases = Api::<Lease>::namespaced(client(), control);
        let with_agents = async {
            let pods = list(Api::<Pod>::namespaced(client(), control), &component).await;
            let agents: Vec<Pod> = pods.iter().flatten().filter(|pod| is_agent(pod)).cloned().collect();
            let agents = join_all(agents.into_iter().map(|pod| ask(cluster, pod))).await;
            (pods, agents)
        };
        let (nodes, deployments, daemon_sets, (control_pods, agents), lease, meshed) = join!(
            list(Api::<Node>::all(client()), &every),
            list(Api::<Deployment>::namespaced(client(), control), &component),
            list(Api::<DaemonSet>::namespaced(client(), control), &of_agents),
            with_agents,
            within(ANSWER, leases.get_opt(labels::ENDPOINT_WRITE_LEASE)),
            list(pods, &with_proxy),
        );
        let daemon_set = daemon_sets.map(|found| found.into_iter().next());
        let namespace = control.to_owned();
        let mut mesh = Self { namespace, nodes, deployments, daemon_set, control_pods, lease, agents, meshed };
        let of_every_mesh = mesh.is_agent_alone();
        if let Ok(pods) = &mut mesh.meshed {
            let is_ours = |pod: &Pod| pod.labels().get(labels::CONTROL_PLANE_NS).is_some_and(|found| found == control);
            pods.retain(|pod| (of_every_mesh || is_ours(pod)) && pods::proxy_container(pod).is_some());
        }
        mesh
    }

    /// Whether there are agents for Linkerd, whose control plane is elsewhere, and no control plane of Weft.
    pub(crate) fn is_agent_alone(&self) -> bool {
        self.daemon_set.iter().flatten().any(other_agent::is_alone)
    }

    /// Whether a pod is to be enrolled, according to the agents' arguments, which are read once for all pods. Pods of
    /// control planes that these do not name are left alone where the kernel enrols none by itself.
    pub(crate) fn enrols(&self) -> impl Fn(&Pod) -> bool {
        let control_planes = self.enrolled_control_planes();
        move |pod: &Pod| {
            let of_pod = pod.labels().get(labels::CONTROL_PLANE_NS);
            let is_of = |namespace: &&str| of_pod.is_some_and(|of_pod| of_pod == namespace);
            control_planes.as_ref().is_none_or(|namespaces| namespaces.iter().any(is_of))
        }
    }

    /// The namespaces of the control planes whose pods are enrolled; `None` if those of any are.
    fn enrolled_control_planes(&self) -> Option<Vec<&str>> {
        const NAMED: &str = "--controller-namespace=";
        const LEAVES_ALONE: &str = "--no-self-enrol";
        let spec = self.daemon_set.iter().flatten().find_map(|daemon_set| daemon_set.spec.template.spec.as_ref())?;
        let arguments = || spec.containers.iter().flat_map(|container| container.args.iter().flatten());
        let named = arguments().find_map(|argument| argument.strip_prefix(NAMED))?;
        arguments().any(|argument| argument == LEAVES_ALONE).then(|| named.split(',').collect())
    }

    /// The name of the agents' DaemonSet.
    pub(crate) fn daemon_set_name(&self) -> String {
        self.daemon_set.iter().flatten().next().map_or_else(|| agent::DAEMON_SET.to_owned(), ResourceExt::name_any)
    }
}

/// All objects that match, or the error; of a `PartialObjectMeta`, their metadata alone. They arrive in pages, because
/// a deadline for all of them would depend on their number.
pub(crate) async fn list<K>(api: Api<K>, params: &ListParams) -> Fetched<Vec<K>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    pages(api, params, false).await
}

/// As [`list`]; none if the API server does not have the kind.
pub(crate) async fn list_if_served<K>(api: Api<K>, params: &ListParams) -> Fetched<Vec<K>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    pages(api, params, true).await
}

async fn pages<K>(api: Api<K>, params: &ListParams, is_optional: bool) -> Fetched<Vec<K>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let (mut params, mut all) = (params.clone().limit(PAGE), Vec::new());
    loop {
        let page = async {
            match api.list(&params).await {
                Err(kube::Error::Api(status)) if is_optional && status.code == 404 => Ok(None),
                page => page.map(Some),
            }
        };
        let Some(page) = within(ANSWER, page).await? else { return Ok(all) };
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}

async fn ask(cluster: &Cluster, pod: Pod) -> Agent {
    let answer = match pods::phase(&pod) {
        "Running" => agent::status_of(cluster, &pod).await.map_err(|error| pods::trouble(&pod).unwrap_or(error)),
        _ => Err(pods::trouble(&pod).unwrap_or_else(|| format!("its pod is {}", pods::phase(&pod)))),
    };
    Agent { pod, answer }
}

/// Whether a pod of the control plane's namespace is a node's agent.
pub(crate) fn is_agent(pod: &Pod) -> bool {
    pod.labels().get(labels::CONTROL_PLANE_COMPONENT).is_some_and(|component| component == "agent")
}
