//! The facts that checks evaluate: answers of the API server and the agents, or why there are none.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Event, Namespace, Pod, Secret, Service},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use weft_k8s_api::values::Values;

use crate::{
    chart,
    cluster::CONTROL_NAMESPACE,
    mesh::{Fetched, Mesh, installed::Installed, other_agent::OtherAgent},
};

/// The scope of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// A cluster before the installation.
    Pre,
    /// The control plane and the agents.
    Installed,
    /// Also the pods with a proxy.
    Proxy,
    /// The component weft-viz alone.
    Viz,
    /// Also what the pods with a proxy do for it.
    VizProxy,
    /// The custom resource definitions alone.
    Definitions,
    /// The agent alone, for Linkerd: where the control plane was to be checked, and Weft has none.
    AgentAlone,
}

impl Mode {
    /// Whether the component weft-viz is what is checked.
    pub(super) fn is_viz(self) -> bool {
        matches!(self, Self::Viz | Self::VizProxy)
    }
}

/// Facts that are asked for together. Those that come first or always, the client and the version, are no part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// Custom resource definitions.
    Definitions,
    /// Before an installation: permissions of this user, the API server's clock and Service.
    Access,
    /// Agents of other installations.
    OtherAgents,
    /// ConfigMap linkerd-config: the settings, and the tool that installed them, which remedies name.
    Config,
    /// Namespaces and certificates.
    Settings,
    /// Roles, bindings, ServiceAccounts and Services.
    Inventory,
    /// Configurations, certificates and endpoints of webhooks.
    Webhooks,
    /// Workloads and pods that may ask for injection.
    Workloads,
    /// Warning Events.
    Events,
    /// Nodes, Deployments, agents, and pods with a proxy.
    Mesh,
    /// The component weft-viz.
    Component,
    /// Objects of custom resources.
    Objects,
}

/// The known facts about a cluster.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) mode: Mode,
    pub(super) now: SystemTime,
    pub(super) cli_version: String,
    /// The control plane's namespace.
    pub(super) namespace: String,
    /// The version that everything should have; `None` means that there is no such expectation.
    pub(super) expected_version: Option<String>,
    /// With [`Mode::Proxy`]: the only namespace whose pods are checked; `None` means all.
    pub(super) data_plane_namespace: Option<String>,
    /// The API server's address, or why a client could not be created.
    pub(super) client: Fetched<String>,
    /// All other facts; an error if there is no client, or if nothing answers.
    pub(super) cluster: Fetched<Box<ClusterFacts>>,
}

#[derive(Clone, Debug)]
pub(super) struct ClusterFacts {
    /// `major`, `minor` and the whole version.
    pub(super) version: (u32, u32, String),
    /// The API server's clock minus ours, in seconds.
    pub(super) clock_skew: Option<i64>,
    pub(super) crds: Fetched<BTreeMap<String, Crd>>,
    /// Permissions of this user to create objects; only before an installation.
    pub(super) access: Vec<Access>,
    pub(super) namespaces: Fetched<Vec<Namespace>>,
    pub(super) config: Fetched<Option<ConfigMap>>,
    pub(super) trust_roots: Fetched<Option<ConfigMap>>,
    pub(super) issuer: Fetched<Option<Secret>>,
    pub(super) cluster_roles: Fetched<BTreeSet<String>>,
    pub(super) cluster_role_bindings: Fetched<BTreeSet<String>>,
    pub(super) service_accounts: Fetched<BTreeSet<String>>,
    pub(super) services: Fetched<Vec<Service>>,
    /// Facts about each webhook of [`super::webhooks::NAMES`].
    pub(super) webhooks: BTreeMap<&'static str, WebhookFacts>,
    /// Objects of kinds that Weft does not act on, completely or in some field.
    pub(super) objects: Fetched<Vec<CustomObject>>,
    /// Pod templates that may ask for injection; only with [`Mode::Proxy`].
    pub(super) workloads: Fetched<Vec<Workload>>,
    /// Pods of namespaces whose pods should have a proxy; only with [`Mode::Proxy`].
    pub(super) pods: Fetched<Vec<Pod>>,
    /// Warning Events of all namespaces.
    pub(super) events: Fetched<Vec<Event>>,
    /// Messages of containers that are not ready, by the full names of their pods.
    pub(super) container_messages: BTreeMap<String, Vec<String>>,
    /// The address of the API server's own Service.
    pub(super) service_address: Fetched<String>,
    /// Agents of other installations.
    pub(super) other_agents: Fetched<Vec<OtherAgent>>,
    /// Deployments and pods of the component weft-viz.
    pub(super) viz: Fetched<(Vec<Deployment>, Vec<Pod>)>,
    /// Whether the component answers this user; only if it is what is checked, and where there is one.
    pub(super) viz_answer: Option<Fetched<()>>,
    pub(super) mesh: Mesh,
}

/// A custom resource definition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Crd {
    /// Versions that the API server serves.
    pub(super) served: BTreeSet<String>,
    /// The Gateway API's release, if the definition is part of it.
    pub(super) bundle: Option<String>,
}

/// Whether this user may create objects of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) kind: CreatedKind,
    pub(super) allowed: Fetched<bool>,
}

/// A kind of which the installation creates objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CreatedKind {
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) namespaced: bool,
}

/// Facts about one webhook.
#[derive(Clone, Debug)]
pub(super) struct WebhookFacts {
    /// `None`: there is no configuration. Otherwise its caBundle, PEM.
    pub(super) ca_bundle: Fetched<Option<Option<String>>>,
    pub(super) secret: Fetched<Option<Secret>>,
    /// Number of ready endpoints of its Service.
    pub(super) endpoints: Fetched<usize>,
}

/// An object of a custom resource.
#[derive(Clone, Debug)]
pub(super) struct CustomObject {
    pub(super) group: &'static str,
    pub(super) kind: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
    /// The object as in the API server.
    pub(super) content: serde_json::Value,
}

/// A Deployment, StatefulSet or DaemonSet.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) kind: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
    /// Metadata of its pods.
    pub(super) template: ObjectMeta,
}

impl Facts {
    /// The facts about the cluster. Without them no check has an answer, and another check reports why.
    pub(super) fn cluster(&self) -> Result<&ClusterFacts, super::answer::Stop> {
        self.cluster.as_deref().map_err(|_| super::answer::Stop::Skip)
    }

    /// The remedy to upgrade the control plane with other values, by the tool that installed it.
    pub(super) fn upgrade(&self, with: &str) -> String {
        match self.installed() {
            Some(Installed::ByHelm(release)) => {
                format!("{}{}", helm_upgrade(&release, "weft-control-plane", &self.namespace), spaced(with))
            }
            Some(Installed::ByTemplate) if with.is_empty() => RENDER_AGAIN.to_owned(),
            Some(Installed::ByTemplate) => {
                let values = with.replace("--set-file ", "").replace("--set ", "");
                format!("set {values} in the values of the tool that renders the chart, such as Argo CD")
            }
            _ => format!("weft upgrade{}{} | kubectl apply -f -", self.namespace_option(), spaced(with)),
        }
    }

    /// The remedy to install the control plane.
    pub(super) fn install(&self) -> String {
        format!("weft install{} | kubectl apply -f -", self.namespace_option())
    }

    /// The remedy to install the custom resource definitions, or the missing ones.
    pub(super) fn install_crds(&self) -> String {
        match self.installed() {
            Some(Installed::ByHelm(_)) => helm_upgrade("--install weft-crds", "weft-crds", &self.namespace),
            Some(Installed::ByTemplate) => {
                "apply chart weft-crds with the tool that renders the charts, such as Argo CD".to_owned()
            }
            _ => "weft install --crds | kubectl apply --server-side -f -".to_owned(),
        }
    }

    /// What can be checked: where Weft has its agent alone, the agents.
    pub(super) fn applicable_mode(&self) -> Mode {
        match self.mode {
            Mode::Installed | Mode::Proxy if self.agent_alone().is_some() => Mode::AgentAlone,
            mode => mode,
        }
    }

    /// The agent in this namespace that enrols Linkerd's pods, where no control plane of ours is. It is not known where
    /// this user may not list DaemonSets.
    pub(super) fn agent_alone(&self) -> Option<&OtherAgent> {
        let is_here = |agent: &&OtherAgent| agent.alone_in() == Some(self.namespace.as_str());
        let is_other = matches!(self.installed(), Some(Installed::No | Installed::ByOthers));
        self.agents_for_linkerd().find(is_here).filter(|_| is_other)
    }

    /// The agents that enrol Linkerd's pods, of all namespaces.
    pub(super) fn agents_for_linkerd(&self) -> impl Iterator<Item = &OtherAgent> {
        let others = self.cluster.iter().flat_map(|cluster| cluster.other_agents.iter().flatten());
        others.filter(|agent| agent.alone_in().is_some())
    }

    /// What installed the mesh, if that can be read. It names no release of another mesh, which no remedy may replace.
    pub(super) fn installed(&self) -> Option<Installed> {
        Some(Installed::of(self.cluster.as_ref().ok()?.config.as_ref().ok()?.as_ref()))
    }

    fn namespace_option(&self) -> String {
        if self.namespace == CONTROL_NAMESPACE { String::new() } else { format!(" -L {}", self.namespace) }
    }

    /// A namespaced object of the control plane, for messages.
    pub(super) fn named(&self, kind: &str, name: &str) -> String {
        format!("{kind} {}/{name}", self.namespace)
    }
}

/// The remedy where another tool renders the chart.
pub(super) const RENDER_AGAIN: &str = "apply the chart again with the tool that renders it, such as Argo CD";

/// The remedy where helm installed the chart.
pub(super) fn helm_upgrade(release: &str, chart: &str, namespace: &str) -> String {
    let chart = chart::reference(chart);
    format!("helm upgrade {release} {chart} --namespace {namespace} --reset-then-reuse-values")
}

fn spaced(options: &str) -> String {
    if options.is_empty() { String::new() } else { format!(" {options}") }
}

impl ClusterFacts {
    /// A cluster of which only the version is known.
    pub(super) fn unasked(version: (u32, u32, String), namespace: &str) -> Self {
        fn unasked<T>() -> Fetched<T> {
            Err("was not asked for".to_owned())
        }
        let mesh = Mesh {
            namespace: namespace.to_owned(),
            nodes: unasked(),
            deployments: unasked(),
            daemon_set: unasked(),
            control_pods: unasked(),
            lease: unasked(),
            agents: Vec::new(),
            meshed: unasked(),
        };
        Self {
            version,
            clock_skew: None,
            crds: unasked(),
            access: Vec::new(),
            service_address: unasked(),
            other_agents: unasked(),
            namespaces: unasked(),
            config: unasked(),
            trust_roots: unasked(),
            issuer: unasked(),
            cluster_roles: unasked(),
            cluster_role_bindings: unasked(),
            service_accounts: unasked(),
            services: unasked(),
            webhooks: BTreeMap::new(),
            objects: unasked(),
            workloads: unasked(),
            pods: unasked(),
            events: unasked(),
            container_messages: BTreeMap::new(),
            viz: unasked(),
            viz_answer: None,
            mesh,
        }
    }

    /// The mesh's values, if they can be read.
    pub(super) fn values(&self) -> Option<Values> {
        Values::parse(self.config_yaml()?).ok()
    }

    /// The text of the mesh's values.
    pub(super) fn config_yaml(&self) -> Option<&str> {
        self.config.as_ref().ok()?.as_ref()?.data.as_ref()?.get("values").map(String::as_str)
    }

    /// The trust anchors, PEM.
    pub(super) fn anchors_pem(&self) -> Option<&str> {
        self.trust_roots.as_ref().ok()?.as_ref()?.data.as_ref()?.get("ca-bundle.crt").map(String::as_str)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use k8s_openapi::ByteString;
    use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
    use serde_json::{Value, json};
    use sha2::{Digest as _, Sha256};
    use weft_proto::agent::{PodRef, PodState, PodStatus, StatusResponse};
    use weft_tls::ca::Root;

    use super::{
        super::{
            answer::Stop,
            installed::{cluster_role_binding_names, cluster_role_names},
            kubernetes::our_crds,
            webhooks,
        },
        *,
    };
    use crate::{
        cluster::HELM_RELEASE,
        mesh::{
            Agent, DEPLOYMENTS,
            installed::{PART_OF, RENDERED_BY_HELM},
        },
        problem::Problem,
    };

    /// Checks the result of a check: the object of each problem, and a part of its text.
    pub(in crate::check) fn check(found: Result<Vec<Problem>, Stop>, expected: &[(&str, &str)]) {
        let found = found.expect("an answer");
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (problem, (object, part)) in found.iter().zip(expected) {
            assert!(problem.object == *object && problem.problem.contains(part), "{problem:#?}");
            assert!(!problem.remedy.is_empty(), "{problem:#?}");
        }
    }

    /// A mesh without problems: one node, one meshed pod `shop/web-0`.
    pub(in crate::check) fn healthy() -> Facts {
        let root = Root::generate("root.linkerd.cluster.local").unwrap();
        let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
        let issuer = [("crt.pem", issuer.certificate), ("key.pem", issuer.key)];
        let data = issuer.map(|(key, pem)| (key.to_owned(), ByteString(pem.into_bytes())));
        let crds = our_crds().into_iter().map(|(name, served)| (name, Crd { served, bundle: None })).collect();
        let values = "clusterNetworks: 10.0.0.0/8\nproxy: {image: {name: localhost/weft-proxy, version: 0.1.0}}\n";
        let roles = cluster_role_names("linkerd").into_iter().collect();
        let bindings = cluster_role_binding_names("linkerd").into_iter().collect();
        let accounts = ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector", "weft-agent"];
        let names = webhooks::NAMES;
        Facts {
            mode: Mode::Proxy,
            now: SystemTime::now(),
            cli_version: "0.1.0".into(),
            expected_version: None,
            namespace: "linkerd".into(),
            data_plane_namespace: None,
            client: Ok("https://127.0.0.1:6443".into()),
            cluster: Ok(Box::new(ClusterFacts {
                version: (1, 36, "v1.36.3".into()),
                clock_skew: Some(0),
                crds: Ok(crds),
                access: Vec::new(),
                service_address: Ok("10.96.0.1".to_owned()),
                other_agents: Ok(Vec::new()),
                namespaces: Ok(vec![object(json!({"metadata": {"name": "linkerd"}}))]),
                config: Ok(Some(object(
                    json!({"metadata": {"labels": {PART_OF.0: PART_OF.1}}, "data": {"values": values}}),
                ))),
                trust_roots: Ok(Some(object(json!({"data": {"ca-bundle.crt": root.certificate_pem()}})))),
                issuer: Ok(Some(Secret { data: Some(data.into()), ..Secret::default() })),
                cluster_roles: Ok(roles),
                cluster_role_bindings: Ok(bindings),
                service_accounts: Ok(accounts.map(str::to_owned).into()),
                services: Ok(vec![object(json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1"}}))]),
                webhooks: names.map(|name| (name, webhook(&format!("linkerd-{name}.linkerd.svc")))).into(),
                objects: Ok(Vec::new()),
                workloads: Ok(Vec::new()),
                pods: Ok(Vec::new()),
                events: Ok(Vec::new()),
                container_messages: BTreeMap::new(),
                viz: Ok((Vec::new(), Vec::new())),
                viz_answer: None,
                mesh: mesh(root.certificate_pem()),
            })),
        }
    }

    pub(in crate::check) fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn mesh(anchors_pem: &str) -> Mesh {
        let deployment = |name: &str| {
            object(json!({"metadata": {"name": name}, "spec": {"replicas": 1, "selector": {}, "template": {}},
                "status": {"readyReplicas": 1, "updatedReplicas": 1}}))
        };
        let daemon_set = json!({"metadata": {"name": "weft-agent"}, "spec": {"selector": {}, "template": {}},
            "status": {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberReady": 1, "numberMisscheduled": 0}});
        let agent = json!({"metadata": {"name": "weft-agent-1", "namespace": "linkerd",
            "labels": {"linkerd.io/control-plane-component": "agent"}}, "spec": {"nodeName": "a",
            "containers": [{"name": "agent", "image": "localhost/weft-agent:0.1.0"}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let enrolled = PodStatus {
            pod: Some(PodRef { namespace: "shop".into(), name: "web-0".into() }),
            outbound: true,
            inbound: true,
            state: PodState::Enrolled.into(),
            ..PodStatus::default()
        };
        let answer = StatusResponse { version: "0.1.0".into(), pods: vec![enrolled], ..StatusResponse::default() };
        Mesh {
            namespace: "linkerd".into(),
            nodes: Ok(vec![object(json!({"metadata": {"name": "a"}, "spec": {"podCIDRs": ["10.244.0.0/24"]}}))]),
            deployments: Ok(DEPLOYMENTS.map(deployment).into()),
            daemon_set: Ok(Some(object(daemon_set))),
            control_pods: Ok(vec![object(agent.clone())]),
            lease: Ok(None),
            agents: vec![Agent { pod: object(agent), answer: Ok(answer) }],
            meshed: Ok(vec![meshed(anchors_pem)]),
        }
    }

    fn meshed(anchors_pem: &str) -> Pod {
        let digest: String = Sha256::digest(anchors_pem).iter().map(|byte| format!("{byte:02x}")).collect();
        object(json!({
            "metadata": {"name": "web-0", "namespace": "shop", "annotations": {"linkerd.io/trust-root-sha256": digest}},
            "spec": {"nodeName": "a", "containers": [],
                "initContainers": [{"name": "linkerd-proxy", "image": "localhost/weft-proxy:0.1.0"}]},
            "status": {"phase": "Running", "podIP": "10.244.0.7", "initContainerStatuses": [{"name": "linkerd-proxy",
                "ready": true, "restartCount": 0, "image": "i", "imageID": "i"}]},
        }))
    }

    /// A webhook that the API server can call by this name.
    pub(in crate::check) fn webhook(name: &str) -> WebhookFacts {
        let (certificate, key, ca) = server_certificate(name);
        let data =
            [("tls.crt", certificate), ("tls.key", key)].map(|(key, pem)| (key.to_owned(), ByteString(pem.into())));
        let secret = Secret { data: Some(data.into()), ..Secret::default() };
        WebhookFacts { ca_bundle: Ok(Some(Some(ca))), secret: Ok(Some(secret)), endpoints: Ok(1) }
    }

    fn installed_with(metadata: Value) -> Facts {
        let mut facts = healthy();
        let config = object(json!({"metadata": metadata, "data": {}}));
        facts.cluster.as_mut().unwrap().config = Ok(Some(config));
        facts
    }

    /// Who has the artefacts of a release has no source tree.
    #[test]
    fn remedies_are_commands_of_the_tool_that_installed_the_mesh() {
        let facts = healthy();
        assert_eq!(facts.upgrade("--set a=b"), "weft upgrade --set a=b | kubectl apply -f -");
        assert_eq!(facts.install_crds(), "weft install --crds | kubectl apply --server-side -f -");
        let elsewhere = Facts { namespace: "mesh".into(), ..healthy() };
        assert_eq!(elsewhere.install(), "weft install -L mesh | kubectl apply -f -");
        let labels = json!({PART_OF.0: PART_OF.1, RENDERED_BY_HELM.0: RENDERED_BY_HELM.1});
        let by_helm = installed_with(json!({"labels": labels, "annotations": {HELM_RELEASE: "mesh"}}));
        let chart = format!("weft-control-plane-{}.tgz", env!("CARGO_PKG_VERSION"));
        assert_eq!(
            by_helm.upgrade(""),
            format!("helm upgrade mesh {chart} --namespace linkerd --reset-then-reuse-values")
        );
        assert!(by_helm.install_crds().starts_with("helm upgrade --install weft-crds weft-crds-"));
        // Its tool has the values: what `weft upgrade` rendered would have a new root.
        let by_template = installed_with(json!({"labels": labels}));
        let options = "--set-file a.b=c.crt --set-file d=e.crt";
        let remedies = [by_template.upgrade(""), by_template.upgrade(options), by_template.install_crds()];
        assert!(remedies.iter().all(|remedy| remedy.contains("Argo CD") && !remedy.contains("weft upgrade")));
        assert!(remedies[1].starts_with("set a.b=c.crt d=e.crt in the values of the tool"), "{remedies:?}");
    }

    /// Certificate, key and the CA that signed it, PEM.
    pub(in crate::check) fn server_certificate(name: &str) -> (String, String, String) {
        let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let mut leaf = CertificateParams::new([name.to_owned()]).unwrap();
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = leaf.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
        (leaf.pem(), key.serialize_pem(), ca_pem)
    }
}
