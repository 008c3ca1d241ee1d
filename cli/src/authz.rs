//! `weft authz`: which authorizations apply to a workload, in Linkerd's columns.
//!
//! ```text
//! pods <──selects── Server <──targets── ServerAuthorization, AuthorizationPolicy
//!                     ^──attached── route <──targets── AuthorizationPolicy
//! ```
//!
//! Refuses to say what clients may do: that is the policy controller's answer, `weft diagnostics policy`.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow};
use clap::Args;
use futures::try_join;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::Pod, apimachinery::pkg::util::intstr::IntOrString};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use serde::{Serialize, de::DeserializeOwned};
use weft_k8s_api::policy::{AuthorizationPolicy, Server, ServerAuthorization, TargetRef, selects};

use crate::{
    cluster::{Cluster, ClusterArgs},
    kind::{Kind, names},
    mesh::list_if_served,
    output::{
        self, WideFormat, note, or_nothing,
        progress::{self, API_SERVER},
        table,
    },
    resource::{self, Resource, Selection},
};

/// The group of policies.
const POLICY: &str = "policy.linkerd.io";
/// Kinds of routes that can be attached to a Server: group, version, kind and plural.
const ROUTES: [(&str, &str, &str, &str); 3] = [
    (POLICY, "v1beta3", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "v1", "GRPCRoute", "grpcroutes"),
];

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft authz -n shop deploy/web
  weft authz -n shop deploy web
  weft authz -n shop po/web-0 -o wide      also what each authorization requires of clients
  weft authz -n shop deploy/web -o json

ROUTE is `*` for authorizations of the whole Server. Pods without a Server have the default policy, which no row shows:
`weft diagnostics policy po/NAME PORT` does.")]
pub(crate) struct AuthzArgs {
    #[arg(
        required = true,
        num_args = 1..=2,
        value_name = "RESOURCE",
        help = format!("KIND/NAME or KIND NAME: {}; a name alone is a pod's", names(Kind::with_pods()))
    )]
    resource: Vec<String>,
    /// Namespace of the resource [default: the context's]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Output format: wide adds the requirements for clients
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// An authorization that applies. The first four fields are Linkerd's columns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Row {
    /// `*` for the whole Server.
    route: String,
    server: String,
    authorization_policy: String,
    server_authorization: String,
    /// What a client must have, all of it; empty if every client is admitted.
    requires: Vec<String>,
}

/// A route that is attached to Servers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    group: &'static str,
    kind: &'static str,
    name: String,
    servers: BTreeSet<String>,
}

/// Policy of one namespace.
#[derive(Clone, Debug, Default)]
struct Policy {
    namespace: String,
    servers: Vec<Server>,
    server_authorizations: Vec<ServerAuthorization>,
    authorization_policies: Vec<AuthorizationPolicy>,
    routes: Vec<Route>,
}

pub(crate) async fn execute(args: AuthzArgs) -> Result<()> {
    let resource: Resource = args.resource.join("/").parse().map_err(anyhow::Error::msg)?;
    let cluster = args.cluster.cluster().await?;
    let asked = async {
        let selection = Selection::in_cluster(Some(resource), args.namespace.as_deref(), &cluster).await?;
        let namespace = selection.namespace.clone().unwrap_or_else(|| cluster.default_namespace.clone());
        let pods = resource::pods(&cluster, &selection).await?;
        anyhow::Ok((pods, Policy::read(&cluster, namespace).await?))
    };
    let (pods, policy) = progress::during(API_SERVER, asked).await?;
    let rows = rows(&pods, &policy);
    match (args.output.data(), args.output) {
        (Some(data), _) => data.print(&rows),
        _ if rows.is_empty() => {
            note("no authorization applies: no Server selects its pods, or nothing authorizes clients of it");
            Ok(())
        }
        (None, WideFormat::Wide) => Ok(output::print(&wide(&rows))?),
        (None, _) => Ok(output::print(&narrow(&rows))?),
    }
}

impl Policy {
    async fn read(cluster: &Cluster, namespace: String) -> Result<Self> {
        let (servers, server_authorizations, authorization_policies, routes) = try_join!(
            typed(cluster, &namespace),
            typed(cluster, &namespace),
            typed(cluster, &namespace),
            routes(cluster, &namespace),
        )?;
        Ok(Self { namespace, servers, server_authorizations, authorization_policies, routes })
    }
}

async fn typed<K>(cluster: &Cluster, namespace: &str) -> Result<Vec<K>>
where
    K: kube::Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    K::DynamicType: Default,
{
    let what = format!("{}.{}", K::plural(&K::DynamicType::default()), K::group(&K::DynamicType::default()));
    let found = list_if_served(Api::namespaced(cluster.client.clone(), namespace), &ListParams::default()).await;
    found.map_err(|error| anyhow!("{what} in namespace {namespace}: {error}"))
}

async fn routes(cluster: &Cluster, namespace: &str) -> Result<Vec<Route>> {
    let mut all = Vec::new();
    for (group, version, kind, plural) in ROUTES {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        let api = Api::<DynamicObject>::namespaced_with(cluster.client.clone(), namespace, &resource);
        let found = list_if_served(api, &ListParams::default()).await;
        let found = found.map_err(|error| anyhow!("{plural}.{group} in namespace {namespace}: {error}"))?;
        all.extend(found.iter().map(|object| Route {
            group,
            kind,
            name: object.name_any(),
            servers: servers_of(&object.data),
        }));
    }
    Ok(all)
}

/// Names of the Servers that are parents of a route.
fn servers_of(route: &serde_json::Value) -> BTreeSet<String> {
    let parents = route["spec"]["parentRefs"].as_array().into_iter().flatten();
    let is_server =
        |parent: &&serde_json::Value| parent["kind"] == "Server" && parent["group"].as_str() == Some(POLICY);
    parents.filter(is_server).filter_map(|parent| parent["name"].as_str().map(str::to_owned)).collect()
}

fn rows(pods: &[Pod], policy: &Policy) -> Vec<Row> {
    let mut rows = BTreeSet::new();
    let selecting = policy.servers.iter().filter(|server| pods.iter().any(|pod| selects_port(server, pod)));
    for server in selecting {
        let name = server.name_any();
        for authorization in &policy.server_authorizations {
            if reaches(authorization, server) {
                rows.insert(Row {
                    route: "*".to_owned(),
                    server: name.clone(),
                    authorization_policy: String::new(),
                    server_authorization: authorization.name_any(),
                    requires: required_by(authorization),
                });
            }
        }
        for authorization in &policy.authorization_policies {
            for route in targets(&authorization.spec.target_ref, &name, policy) {
                rows.insert(Row {
                    route,
                    server: name.clone(),
                    authorization_policy: authorization.name_any(),
                    server_authorization: String::new(),
                    requires: authentications(authorization),
                });
            }
        }
    }
    rows.into_iter().collect()
}

/// Whether a Server selects a pod and has a port of it: any number, or a name that a container gives a port.
fn selects_port(server: &Server, pod: &Pod) -> bool {
    let Some(selector) = &server.spec.pod_selector else { return false };
    if !selects(selector, pod.metadata.labels.as_ref()) {
        return false;
    }
    let IntOrString::String(wanted) = &server.spec.port else { return true };
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    containers.flat_map(|container| container.ports.iter().flatten()).any(|port| port.name.as_ref() == Some(wanted))
}

fn reaches(authorization: &ServerAuthorization, server: &Server) -> bool {
    let reference = &authorization.spec.server;
    let by_labels = reference.selector.as_ref().is_some_and(|it| selects(it, server.metadata.labels.as_ref()));
    by_labels || reference.name.as_deref().is_some_and(|name| name == server.name_any())
}

/// What of a Server a policy protects: `*`, or routes that are attached to it.
fn targets(target: &TargetRef, server: &str, policy: &Policy) -> Vec<String> {
    if target.is(POLICY, "Server") {
        return if target.name == server { vec!["*".to_owned()] } else { Vec::new() };
    }
    if target.is("", "Namespace") {
        return if target.name == policy.namespace { vec!["*".to_owned()] } else { Vec::new() };
    }
    let attached = policy.routes.iter().filter(|route| {
        target.is(route.group, route.kind) && target.name == route.name && route.servers.contains(server)
    });
    attached.map(|route| route.name.clone()).collect()
}

fn authentications(policy: &AuthorizationPolicy) -> Vec<String> {
    let own = policy.namespace().unwrap_or_default();
    let named = |reference: &weft_k8s_api::policy::NamespacedTargetRef| {
        let namespace = reference.namespace.as_ref().filter(|namespace| **namespace != own);
        match namespace {
            Some(namespace) => format!("{}/{namespace}/{}", reference.kind, reference.name),
            None => format!("{}/{}", reference.kind, reference.name),
        }
    };
    policy.spec.required_authentication_refs.iter().map(named).collect()
}

fn required_by(authorization: &ServerAuthorization) -> Vec<String> {
    let client = &authorization.spec.client;
    let mut requires = Vec::new();
    if client.networks.is_some() {
        requires.push("networks".to_owned());
    }
    if !client.unauthenticated && client.mesh_tls.is_some() {
        requires.push("meshTLS".to_owned());
    }
    requires
}

fn narrow(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION"]);
    for row in rows {
        shown.add_row(columns(row));
    }
    shown
}

fn wide(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION", "REQUIRES"]);
    for row in rows {
        let [route, server, policy, authorization] = columns(row);
        shown.add_row([route, server, policy, authorization, or_nothing(&row.requires.join(","))]);
    }
    shown
}

fn columns(row: &Row) -> [String; 4] {
    [&row.route, &row.server, &row.authorization_policy, &row.server_authorization].map(|text| or_nothing(text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object<T: DeserializeOwned>(value: serde_json::Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn pod() -> Pod {
        object(json!({"metadata": {"name": "web-0", "namespace": "shop", "labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "ports": [{"name": "http", "containerPort": 8080}]}]}}))
    }

    fn server(name: &str, app: &str, port: serde_json::Value) -> Server {
        object(json!({"metadata": {"name": name, "namespace": "shop", "labels": {"of": app}},
            "spec": {"podSelector": {"matchLabels": {"app": app}}, "port": port}}))
    }

    fn authorization_policy(name: &str, target: serde_json::Value) -> AuthorizationPolicy {
        let refs = json!([{"group": POLICY, "kind": "MeshTLSAuthentication", "name": "clients", "namespace": "ops"}]);
        object(json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"targetRef": target, "requiredAuthenticationRefs": refs}}))
    }

    fn shop() -> Policy {
        let saz = |name: &str, server: serde_json::Value| {
            object(
                json!({"metadata": {"name": name}, "spec": {"server": server, "client": {"meshTLS": {"identities": ["*"]}}}}),
            )
        };
        let route = |name: &str, server: &str| Route {
            group: POLICY,
            kind: "HTTPRoute",
            name: name.into(),
            servers: [server.to_owned()].into(),
        };
        let target = |kind: &str, name: &str| json!({"group": POLICY, "kind": kind, "name": name});
        Policy {
            namespace: "shop".into(),
            servers: vec![
                server("web-http", "web", json!("http")),
                server("web-admin", "web", json!("admin")),
                server("api-http", "api", json!(8080)),
            ],
            server_authorizations: vec![
                saz("by-name", json!({"name": "web-http"})),
                saz("by-label", json!({"selector": {"matchLabels": {"of": "web"}}})),
                saz("other", json!({"name": "api-http"})),
            ],
            authorization_policies: vec![
                authorization_policy("of-server", target("Server", "web-http")),
                authorization_policy("of-route", target("HTTPRoute", "get")),
                authorization_policy("of-other-route", target("HTTPRoute", "put")),
                authorization_policy("of-namespace", json!({"kind": "Namespace", "name": "shop"})),
                authorization_policy("of-other-namespace", json!({"kind": "Namespace", "name": "ops"})),
            ],
            routes: vec![route("get", "web-http"), route("put", "api-http")],
        }
    }

    #[test]
    fn a_workloads_authorizations_are_those_of_its_servers_and_their_routes() {
        let found = rows(&[pod()], &shop());
        let shown: Vec<[&str; 4]> = found
            .iter()
            .map(|row| [&*row.route, &*row.server, &*row.authorization_policy, &*row.server_authorization])
            .collect();
        assert_eq!(
            shown,
            [
                ["*", "web-http", "", "by-label"],
                ["*", "web-http", "", "by-name"],
                ["*", "web-http", "of-namespace", ""],
                ["*", "web-http", "of-server", ""],
                ["get", "web-http", "of-route", ""],
            ]
        );
        assert_eq!(found[4].requires, ["MeshTLSAuthentication/ops/clients"]);
        assert_eq!(found[0].requires, ["meshTLS"]);
    }

    #[test]
    fn a_pod_that_no_server_selects_has_no_rows() {
        let other = Pod { metadata: object(json!({"name": "x", "labels": {"app": "x"}})), ..pod() };
        assert_eq!(rows(&[other], &shop()), []);
    }

    #[test]
    fn the_columns_are_linkerds() {
        let text = narrow(&rows(&[pod()], &shop())).trim_fmt();
        let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(lines.next().unwrap(), ["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION"]);
        assert_eq!(lines.next().unwrap(), ["*", "web-http", "-", "by-label"]);
    }

    #[test]
    fn a_routes_servers_are_its_parents_of_that_kind() {
        let route = json!({"spec": {"parentRefs": [{"group": POLICY, "kind": "Server", "name": "web"},
            {"group": "core", "kind": "Service", "name": "web-svc"}, {"kind": "Server", "name": "gateway"}]}});
        assert_eq!(servers_of(&route), ["web".to_owned()].into());
    }
}
