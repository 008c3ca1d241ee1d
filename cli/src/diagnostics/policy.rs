//! `weft diagnostics policy` and `profile`: the first answer of the policy and destination APIs, as JSON or YAML.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt as _};
use serde::Deserialize;
use serde_json::Value;
use tonic::{Streaming, transport::Channel};
use weft_k8s_api::{
    policy::{EgressNetwork, EgressNetworkSpec},
    printable,
};
use weft_proto::linkerd::{
    destination::{GetDestination, destination_client::DestinationClient},
    inbound::{PortSpec, inbound_server_policies_client::InboundServerPoliciesClient},
    net::TcpAddress,
    outbound::{TrafficSpec, outbound_policies_client::OutboundPoliciesClient, traffic_spec::Target as Destination},
};

use super::{
    api::{ApiArgs, ProxyApi, answer},
    message,
};
use crate::{
    cluster::{ANSWER, Cluster, within},
    kind::{Kind, names},
    mesh::pods,
    output::{self, Data, progress},
    pod_network::PodNetwork,
    resource::{self, Resource, Selection},
};

/// The domain of Services where no configuration says another: Kubernetes' default.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// An address outside every cluster, for EgressNetworks without networks of their own (RFC 5737).
const OUTSIDE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics policy -n shop po/web-0 8080            inbound policy of a port of a pod
  weft diagnostics policy -n shop deploy/web 8080          or of one of a Deployment's pods
  weft diagnostics policy -n shop svc/web 80               outbound policy of a port of a Service
  weft diagnostics policy -n shop svc/web 80 --token shop:client-0
                                                           as for a client, which may have routes of its own
  weft diagnostics policy -n shop egressnetwork/internet 443
  weft diagnostics policy 10.96.0.7 80 -o json             outbound policy of an address
  weft diagnostics policy web.shop.svc.cluster.local 80    or of a name")]
pub(super) struct PolicyArgs {
    #[arg(help = format!("KIND/NAME: {}, egressnetwork; or an address or name", names(Kind::with_pods().chain([Kind::Service]))))]
    resource: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Namespace of the resource [default: the context's]
    #[arg(short, long)]
    namespace: Option<String>,
    /// The client that outbound policy is for: NAMESPACE:POD, or {"ns", "pod"}
    #[arg(long, default_value = "default:diagnostics")]
    token: String,
    /// Output format
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Format,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics profile 10.96.0.7:80                  of a Service's address
  weft diagnostics profile 10.244.0.9:8080               of a pod's
  weft diagnostics profile web.shop.svc.cluster.local:80 -o yaml
  weft diagnostics profile web.shop.svc.cluster.local:80 --token '{\"ns\":\"shop\"}'")]
pub(super) struct ProfileArgs {
    /// ADDRESS:PORT or NAME:PORT
    address: String,
    /// Context token of the proxy to answer as: {"ns", "nodeName", "pod"}
    #[arg(long, default_value = "", hide_default_value = true)]
    token: String,
    /// Output format
    #[arg(short, long, value_enum, default_value = "json")]
    output: Format,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Yaml,
    Json,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    /// A pod, or one of a workload's.
    Pod(Resource),
    Service(String),
    EgressNetwork(String),
    Address(IpAddr),
    Name(String),
}

pub(super) async fn policy(args: PolicyArgs) -> Result<()> {
    let format = args.output;
    print(&progress::during("the control plane's policy", ask_policy(args)).await?, format)
}

async fn ask_policy(args: PolicyArgs) -> Result<Value> {
    let wanted = parse(&args.resource).map_err(anyhow::Error::msg)?;
    let (channel, network) = args.api.connect(ProxyApi::Policy).await?;
    let namespace = namespace(args.namespace.as_deref(), network.as_ref());
    let asked = format!("{} port {}", args.resource, args.port);
    if let Wanted::Pod(resource) = wanted {
        let (namespace, pod) = pod_of(resource, &namespace, network.as_ref()).await?;
        let request = PortSpec { workload: format!("{namespace}:{pod}"), port: args.port.into() };
        let server = inbound(channel, &asked, request).await?;
        return message::json("inbound.Server", &server);
    }
    let destination = match wanted {
        Wanted::Address(ip) => address(ip, args.port),
        Wanted::Name(name) => Destination::Authority(format!("{name}:{}", args.port)),
        Wanted::EgressNetwork(name) => address(inside(&name, &namespace, network.as_ref()).await?, args.port),
        Wanted::Service(name) => {
            let domain = cluster_domain(network.as_ref()).await?;
            Destination::Authority(format!("{name}.{namespace}.svc.{domain}:{}", args.port))
        }
        Wanted::Pod(_) => bail!("{asked}: has inbound policy"),
    };
    let request = TrafficSpec { source_workload: args.token, target: Some(destination) };
    let policy = answer(&asked, OutboundPoliciesClient::new(channel).get(request)).await?.into_inner();
    message::json("outbound.OutboundPolicy", &policy)
}

pub(super) async fn profile(args: ProfileArgs) -> Result<()> {
    let format = args.output;
    print(&progress::during("the control plane's profile", ask_profile(args)).await?, format)
}

async fn ask_profile(args: ProfileArgs) -> Result<Value> {
    let (channel, _) = args.api.connect(ProxyApi::Destination).await?;
    let request = GetDestination { scheme: "k8s".to_owned(), path: args.address.clone(), context_token: args.token };
    let updates = answer(&args.address, DestinationClient::new(channel).get_profile(request)).await?;
    let profile = first(&args.address, updates.into_inner()).await?;
    message::json("destination.DestinationProfile", &profile)
}

async fn inbound(channel: Channel, asked: &str, request: PortSpec) -> Result<weft_proto::linkerd::inbound::Server> {
    let answered = answer(asked, InboundServerPoliciesClient::new(channel).get_port(request)).await?;
    Ok(answered.into_inner())
}

async fn first<T>(asked: &str, mut updates: Streaming<T>) -> Result<T> {
    let update = answer(asked, updates.message()).await?;
    update.with_context(|| format!("{asked}: the control plane ended the stream without an answer"))
}

fn parse(text: &str) -> Result<Wanted, String> {
    let Some((kind, name)) = text.split_once('/') else {
        return match text.parse() {
            Ok(ip) => Ok(Wanted::Address(ip)),
            Err(_) if text.contains('.') && !text.contains(':') => Ok(Wanted::Name(text.to_owned())),
            Err(_) => Err(format!(
                "{text:?}: expected KIND/NAME, such as po/web-0 or svc/web, an address, or a name with dots"
            )),
        };
    };
    if name.is_empty() || name.contains('/') {
        return Err(format!("{text:?}: expected KIND/NAME"));
    }
    match kind {
        _ if Kind::parse(kind) == Some(Kind::Service) => Ok(Wanted::Service(name.to_owned())),
        "egressnetwork" | "egressnetworks" => Ok(Wanted::EgressNetwork(name.to_owned())),
        _ if Resource::is_kind(kind) => text.parse().map(Wanted::Pod),
        _ => Err(format!(
            "{kind:?} is not a kind with policy: expected {}, svc or egressnetwork",
            names(Kind::with_pods())
        )),
    }
}

fn namespace(named: Option<&str>, network: Option<&PodNetwork>) -> String {
    let of_context = match network {
        Some(PodNetwork::Cluster(cluster)) => cluster.default_namespace.as_str(),
        _ => "default",
    };
    named.unwrap_or(of_context).to_owned()
}

fn address(ip: IpAddr, port: u16) -> Destination {
    Destination::Addr(TcpAddress::from(SocketAddr::new(ip, port)))
}

/// Namespace and name of the pod.
async fn pod_of(resource: Resource, namespace: &str, network: Option<&PodNetwork>) -> Result<(String, String)> {
    let selection = match network {
        Some(PodNetwork::Cluster(cluster)) => {
            let selection = Selection::in_cluster(Some(resource), Some(namespace), cluster).await?;
            if selection.pod.is_none() {
                let all = resource::pods(cluster, &selection).await?;
                let best = all.iter().min_by_key(|pod| !pods::is_ready(pod));
                let best = best.with_context(|| format!("there is no such pod in namespace {namespace}"))?;
                return Ok((namespace.to_owned(), best.name_any()));
            }
            selection
        }
        Some(PodNetwork::Sandbox(state)) => Selection::in_sandbox(Some(resource), Some(namespace), state)?,
        None => Selection::on_socket(Some(resource), Some(namespace))?,
    };
    let pod = selection.one().context("name the pod: po/NAME")?;
    Ok((pod.namespace, pod.name))
}

/// An address of an EgressNetwork.
async fn inside(name: &str, namespace: &str, network: Option<&PodNetwork>) -> Result<IpAddr> {
    let Some(PodNetwork::Cluster(cluster)) = network else {
        bail!("only a cluster says which addresses EgressNetwork {name} has: give one of its addresses instead");
    };
    let networks: Api<EgressNetwork> = Api::namespaced(cluster.client.clone(), namespace);
    let network = within(ANSWER, networks.get(name)).await;
    let network = network.map_err(|error| anyhow!("EgressNetwork {namespace}/{name}: {error}"))?;
    first_address(&network.spec).with_context(|| format!("EgressNetwork {namespace}/{name} excludes all its addresses"))
}

/// The first address of the networks that is not an exception.
fn first_address(spec: &EgressNetworkSpec) -> Option<IpAddr> {
    let Some(networks) = &spec.networks else { return Some(OUTSIDE) };
    networks.iter().find_map(|network| {
        let (network, except) = (network.cidr.0, network.except.as_deref().unwrap_or_default());
        let mut address = network.network();
        // Each step leaves an exception behind it.
        while let Some(exception) = except.iter().find(|exception| exception.0.contains(&address)) {
            address = following(exception.0.broadcast()).filter(|next| network.contains(next))?;
        }
        Some(address)
    })
}

/// The address after another one.
fn following(address: IpAddr) -> Option<IpAddr> {
    Some(match address {
        IpAddr::V4(v4) => Ipv4Addr::from(u32::from(v4).checked_add(1)?).into(),
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6).checked_add(1)?).into(),
    })
}

/// The domain of the cluster's Services, from the control plane's values.
async fn cluster_domain(network: Option<&PodNetwork>) -> Result<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Domain {
        cluster_domain: Option<String>,
    }
    let Some(PodNetwork::Cluster(cluster)) = network else { return Ok(CLUSTER_DOMAIN.to_owned()) };
    let config = config(cluster).await?;
    let values = config.data.and_then(|data| data.get("values").cloned()).unwrap_or_default();
    let domain = serde_yaml_ng::from_str::<Option<Domain>>(&values)
        .with_context(|| format!("ConfigMap {}/linkerd-config, data.values", cluster.namespace))?;
    Ok(domain.and_then(|domain| domain.cluster_domain).unwrap_or_else(|| CLUSTER_DOMAIN.to_owned()))
}

async fn config(cluster: &Cluster) -> Result<ConfigMap> {
    let namespace = &cluster.namespace;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    within(ANSWER, maps.get("linkerd-config"))
        .await
        .map_err(|error| anyhow!("ConfigMap {namespace}/linkerd-config: {error}"))
}

fn print(value: &Value, format: Format) -> Result<()> {
    match format {
        // In lines, as Linkerd prints it.
        Format::Json => Ok(output::styled(&printable::json(&serde_json::to_string_pretty(value)?))?),
        Format::Yaml => Data::Yaml.print(value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resources_are_kinds_and_names_or_addresses() {
        assert!(matches!(parse("po/web-0"), Ok(Wanted::Pod(_))));
        assert!(matches!(parse("deploy/web"), Ok(Wanted::Pod(_))));
        assert_eq!(parse("service/web"), Ok(Wanted::Service("web".into())));
        assert_eq!(parse("egressnetwork/all"), Ok(Wanted::EgressNetwork("all".into())));
        assert_eq!(parse("fd00::1"), Ok(Wanted::Address("fd00::1".parse().unwrap())));
        assert_eq!(parse("web.shop.svc.cluster.local"), Ok(Wanted::Name("web.shop.svc.cluster.local".into())));
    }

    #[test]
    fn what_has_no_policy_is_refused_with_what_was_expected() {
        for (text, word) in
            [("web", "KIND/NAME"), ("svc/", "KIND/NAME"), ("ns/shop", "egressnetwork"), ("a.b:80", "KIND/NAME")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn an_egress_network_is_asked_for_by_an_address_of_it() {
        let spec = |networks: serde_json::Value| -> EgressNetworkSpec {
            serde_json::from_value(json!({"trafficPolicy": "Allow", "networks": networks})).unwrap()
        };
        let first = |networks| first_address(&spec(networks)).map(|ip| ip.to_string());
        assert_eq!(first(json!(null)).as_deref(), Some("192.0.2.1"));
        assert_eq!(first(json!([{"cidr": "203.0.113.0/24"}])).as_deref(), Some("203.0.113.0"));
        let excepted = json!([{"cidr": "203.0.113.0/24", "except": ["203.0.113.0/30"]}]);
        assert_eq!(first(excepted).as_deref(), Some("203.0.113.4"));
        let halves = json!([{"cidr": "10.0.0.0/8", "except": ["10.128.0.0/9", "10.0.0.0/9"]}, {"cidr": "fd00::/64", "except": ["fd00::/96"]}]);
        assert_eq!(first(halves).as_deref(), Some("fd00::1:0:0"));
        let excepted = json!([{"cidr": "203.0.113.0/24", "except": ["203.0.113.0/24"]}, {"cidr": "255.255.255.255", "except": ["255.255.255.255"]}]);
        assert_eq!(first(excepted), None);
    }

    #[test]
    fn without_a_namespace_it_is_kubernetes_default() {
        assert_eq!(namespace(None, None), "default");
        assert_eq!(namespace(Some("shop"), None), "shop");
    }
}
