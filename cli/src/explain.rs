//! `weft explain`: what the kernel would do with a connection, by which rule, and what to change; in a cluster also
//! which endpoints the pod's proxy would reach, and why one would be reached in plaintext. The agent of the pod's node
//! answers from the kernel's maps, the destination controller as it answers proxies; this file finds the agent and
//! resolves names. No packet is sent.

mod backends;
mod endpoints;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde::{Deserialize, Serialize};
use tonic::transport::Channel;
use weft_k8s_api::printable;
use weft_proto::agent::{Direction, ExplainRequest, ExplainResponse, PodRef, PodState, trace_client::TraceClient};
use weft_sandbox::state::State;

use crate::{
    agent,
    cluster::{ANSWER, Cluster, within},
    mesh::list,
    output::{self, Format, Tone, colour, progress},
    resource::{Resource, Selection},
    target::{Target, TargetArgs},
};
use endpoints::Endpoint;

/// The verdict of a connection that goes to the pod's proxy.
const REDIRECT: &str = "redirect";

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft explain web-0 10.96.0.10:53 -n shop         a connection of the pod's application, to an address
  weft explain deploy/web to payments:80 -n shop   or to a Service, as the pod would resolve it
  weft explain web-0 10.0.0.9:4567 --uid 2102      by a process of that user
  weft explain web-0 --inbound 8080 -n shop        a connection to the pod, from anywhere
  weft explain web-0 --inbound 8080 --from 10.9.0.7
                                                   from this client
  weft explain web-0 10.96.0.10:53 --udp -o json   for programs

Ends with 0 whatever the verdict is; with 1 when nobody could tell.")]
pub(crate) struct ExplainArgs {
    /// The pod: NAME, NAMESPACE/NAME, or KIND/NAME of a workload for one of its pods, e.g. deploy/web
    pod: Resource,
    /// The destination: ADDRESS:PORT or SERVICE[.NAMESPACE]:PORT, with or without `to` before it; with --inbound PORT
    /// or ADDRESS:PORT
    #[arg(required = true, num_args = 1..=2, value_name = "DESTINATION")]
    destination: Vec<String>,
    /// An arrow between the two, quoted for the shell, instead of `to`
    #[arg(short = '>', hide = true)]
    arrow: bool,
    /// The pod's namespace [default: the context's; in a sandbox the only one with such a pod]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Explain a connection to the pod instead of from it
    #[arg(long)]
    inbound: bool,
    /// Address of the client [default: some other host]
    #[arg(long, value_name = "ADDRESS", requires = "inbound")]
    from: Option<IpAddr>,
    /// User of the connecting process, as the host numbers users [default: one that is not the proxy's]
    #[arg(long, conflicts_with_all = ["inbound", "as_proxy"])]
    uid: Option<u32>,
    /// Group of the connecting process
    #[arg(long, conflicts_with_all = ["inbound", "as_proxy"])]
    gid: Option<u32>,
    /// Explain a connection of the pod's proxy itself
    #[arg(long, conflicts_with = "inbound")]
    as_proxy: bool,
    /// Explain UDP, or anything else that is not TCP
    #[arg(long)]
    udp: bool,
    /// The socket is bound to a device (SO_BINDTODEVICE), without CAP_NET_RAW
    #[arg(long, conflicts_with = "inbound")]
    device_bound: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    target: TargetArgs,
}

/// The explanation in JSON.
#[derive(Debug, Serialize)]
struct Explanation<'a> {
    namespace: &'a str,
    pod: &'a str,
    direction: &'static str,
    destination: &'a str,
    verdict: &'a str,
    /// Null if the connection would be refused.
    new_destination: Option<&'a str>,
    reason: &'a str,
    change: &'a str,
    /// Null for a pod that the agent does not know.
    netns_cookie: Option<u64>,
    generation: Option<u64>,
    /// Null if the proxy would not get the connection, or if it is not known.
    endpoints: Option<&'a [Endpoint]>,
}

pub(crate) async fn execute(args: ExplainArgs) -> Result<()> {
    // Wrong words are reported before anything is asked.
    args.wanted()?;
    let asked = async { args.ask(args.target.target().await?).await };
    let asked = progress::during("the agent of the pod's node, and the control plane", asked).await?;
    match args.output.data() {
        Some(data) => {
            if let Some(Err(error)) = &asked.endpoints {
                output::note(&format!("the endpoints are not known: {error:#}"));
            }
            data.print(&asked.explanation())
        }
        None => {
            let mut text = text(&asked.request, &asked.pod, &asked.response, colour::on_stdout());
            for (tone, line) in asked.endpoints.iter().flat_map(endpoints::lines) {
                text.push('\n');
                text.push_str(&colour::paint(tone, &line));
            }
            Ok(output::styled(&text)?)
        }
    }
}

/// A question of the dashboard.
#[derive(Debug, Deserialize)]
pub(crate) struct Question {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    /// As on the command line.
    destination: String,
    #[serde(default)]
    inbound: bool,
    #[serde(default)]
    from: Option<String>,
}

/// The explanation as `weft explain -o json` prints it.
pub(crate) async fn answer(question: Question, target: Target) -> Result<serde_json::Value> {
    let from = question.from.as_deref().filter(|from| question.inbound && !from.is_empty());
    let from = from.map(|from| from.parse().with_context(|| format!("{from:?} is not an IP address"))).transpose()?;
    let args = ExplainArgs {
        pod: Resource::pod(question.pod),
        destination: vec![question.destination],
        namespace: Some(question.namespace),
        inbound: question.inbound,
        from,
        arrow: false,
        uid: None,
        gid: None,
        as_proxy: false,
        udp: false,
        device_bound: false,
        output: Format::Json,
        target: TargetArgs::default(),
    };
    Ok(serde_json::to_value(args.ask(target).await?.explanation())?)
}

/// An answer, and what it is about.
struct Asked {
    request: ExplainRequest,
    pod: PodRef,
    response: ExplainResponse,
    /// Of a connection that the proxy gets, in a cluster.
    endpoints: Option<Result<Vec<Endpoint>>>,
}

impl Asked {
    fn explanation(&self) -> Explanation<'_> {
        let known = self.endpoints.as_ref().and_then(|known| known.as_deref().ok());
        explanation(&self.request, &self.pod, &self.response, known)
    }
}

impl ExplainArgs {
    async fn ask(&self, target: Target) -> Result<Asked> {
        let destination = self.wanted()?;
        let (named, namespace) = (Some(self.pod.clone()), self.namespace.as_deref());
        let mut in_cluster = None;
        let (channel, pod, destination) = match target {
            Target::Cluster(cluster) => {
                let selection = Selection::in_cluster(named, namespace, &cluster).await?;
                let (pod, node, found) = pod_in_cluster(&cluster, &selection).await?;
                let channel = on_node(&cluster, &node).await?;
                let destination = match destination {
                    Destination::Known(known) => known,
                    Destination::Service(service) => service_in_cluster(&cluster, &service, &pod.namespace).await?,
                };
                in_cluster = Some((cluster, node, endpoints::ips(&found), endpoints::requires_mtls(&found)));
                (channel, pod, destination)
            }
            Target::Sandbox(state) => {
                let pod = Selection::in_sandbox(named, namespace, &state)?.known(&state)?;
                let pod = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone() };
                let socket = state.agent_socket.clone().with_context(|| {
                    format!(
                        "sandbox `{}` has no agent: it runs with --interception {}",
                        state.config.name, state.config.interception
                    )
                })?;
                let destination = match destination {
                    Destination::Known(known) => known,
                    Destination::Service(service) => service_in_sandbox(&state, &service, &pod.namespace)?,
                };
                (agent::on_socket(&socket).await?, pod, destination)
            }
            Target::Socket(socket) => {
                let pod = Selection::on_socket(named, namespace)?.one();
                let pod = pod.context("specify the pod's namespace with --namespace NAME")?;
                let Destination::Known(destination) = destination else {
                    bail!("an agent's socket cannot resolve Services: pass ADDRESS:PORT");
                };
                (agent::on_socket(&socket).await?, pod, destination)
            }
        };
        let request = self.request(pod.clone(), destination);
        let response = match tokio::time::timeout(ANSWER, TraceClient::new(channel).explain(request.clone())).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => bail!("the agent cannot explain it: {}", agent::reason(&status)),
            Err(_) => bail!("the agent did not answer within {}s", ANSWER.as_secs()),
        };
        let goes_to_the_proxy = request.direction() == Direction::Outbound && response.verdict == REDIRECT;
        let endpoints = match &in_cluster {
            Some((cluster, node, ips, requires_mtls)) if goes_to_the_proxy => {
                let (ips, requires_mtls) = (ips.clone(), *requires_mtls);
                let client = endpoints::Client { pod: &pod, node, ips, requires_mtls };
                Some(endpoints::endpoints(cluster, &client, destination).await)
            }
            _ => None,
        };
        Ok(Asked { request, pod, response, endpoints })
    }
}

/// A destination, as given.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Destination {
    Known(SocketAddr),
    Service(ServicePort),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ServicePort {
    name: String,
    /// `None` means the pod's namespace.
    namespace: Option<String>,
    port: u16,
}

impl ExplainArgs {
    fn wanted(&self) -> Result<Destination> {
        let destination = match self.destination.as_slice() {
            [destination] => destination,
            [word, destination] if word == "to" => destination,
            words => bail!("{:?} is not a destination: expected ADDRESS:PORT or SERVICE:PORT", words.join(" ")),
        };
        if self.inbound { inbound_end(destination) } else { outbound_end(destination) }
    }

    fn request(&self, pod: PodRef, destination: SocketAddr) -> ExplainRequest {
        let direction = if self.inbound { Direction::Inbound } else { Direction::Outbound };
        ExplainRequest {
            pod: Some(pod),
            direction: direction.into(),
            destination: destination.to_string(),
            source: self.from.map(|from| from.to_string()).unwrap_or_default(),
            uid: self.uid,
            gid: self.gid,
            as_proxy: self.as_proxy,
            not_tcp: self.udp,
            device_bound: self.device_bound,
        }
    }
}

fn outbound_end(text: &str) -> Result<Destination> {
    if let Ok(known) = text.parse() {
        return Ok(Destination::Known(known));
    }
    let wrong =
        || anyhow!("{text:?} is not a destination: expected ADDRESS:PORT, [ADDRESS]:PORT or SERVICE[.NAMESPACE]:PORT");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
    // A pod may also use SERVICE.NAMESPACE.svc.cluster.local.
    let mut labels = host.split('.');
    let name = labels.next().filter(|name| !name.is_empty()).ok_or_else(wrong)?.to_owned();
    let namespace = labels.next().map(str::to_owned);
    if labels.next().is_some_and(|label| label != "svc") {
        bail!("{host:?} is neither an address nor a Service: resolve it as the pod does, and give the address");
    }
    Ok(Destination::Service(ServicePort { name, namespace, port }))
}

fn inbound_end(text: &str) -> Result<Destination> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(Destination::Known(SocketAddr::from(([0, 0, 0, 0], port))));
    }
    let known = text
        .parse()
        .with_context(|| format!("{text:?} is not an address of the pod: expected PORT or ADDRESS:PORT"))?;
    Ok(Destination::Known(known))
}

/// A pod, its node, and the pod as the API server has it. Of a workload's pods, whose rules are the same, one that runs
/// is preferred.
pub(crate) async fn pod_in_cluster(cluster: &Cluster, selection: &Selection) -> Result<(PodRef, String, Pod)> {
    let namespace = selection.namespace.as_deref().unwrap_or(&cluster.default_namespace);
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let found = if let Some(name) = &selection.pod {
        within(ANSWER, pods.get(name)).await.map_err(|error| anyhow!("pod {namespace}/{name}: {error}"))?
    } else {
        let labels = selection.labels.as_deref().unwrap_or_default();
        let found = list(pods, &ListParams::default().labels(labels)).await;
        let found = found.map_err(|error| anyhow!("pods in namespace {namespace}: {error}"))?;
        let runs = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        let staying = found.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let best = staying.min_by_key(|pod| !runs(pod));
        best.with_context(|| format!("there is no pod in namespace {namespace} with {labels}"))?
    };
    let name = found.name_any();
    let node = found.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let node =
        node.with_context(|| format!("pod {namespace}/{name} has no node yet: `kubectl describe pod` says why"))?;
    Ok((PodRef { namespace: namespace.to_owned(), name }, node, found))
}

pub(crate) async fn on_node(cluster: &Cluster, node: &str) -> Result<Channel> {
    let agents: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let on_node = ListParams::default().labels(agent::SELECTOR).fields(&format!("spec.nodeName={node}"));
    let agents = list(agents, &on_node).await.map_err(|error| anyhow!("the agents' pods: {error}"))?;
    let agent = agents.first().with_context(|| {
        format!("node {node} has no weft-agent: see `kubectl -n {} get ds weft-agent`", cluster.namespace)
    })?;
    let name = agent.name_any();
    let channel = agent::in_pod(cluster, &cluster.namespace, &name).await;
    channel.map_err(|error| anyhow!("the agent {name} on node {node}: {error}"))
}

async fn service_in_cluster(cluster: &Cluster, wanted: &ServicePort, of_pod: &str) -> Result<SocketAddr> {
    let namespace = wanted.namespace.as_deref().unwrap_or(of_pod);
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), namespace);
    let service = within(ANSWER, services.get(&wanted.name)).await;
    let service = service.map_err(|error| anyhow!("Service {namespace}/{}: {error}", wanted.name))?;
    let ip = service.spec.and_then(|spec| spec.cluster_ip).and_then(|ip| ip.parse::<IpAddr>().ok());
    Ok(SocketAddr::new(ip.ok_or_else(|| headless(namespace, &wanted.name))?, wanted.port))
}

fn service_in_sandbox(state: &State, wanted: &ServicePort, of_pod: &str) -> Result<SocketAddr> {
    let namespace = wanted.namespace.as_deref().unwrap_or(of_pod);
    let mut services = state.services.iter();
    let service = services.find(|service| service.namespace == namespace && service.name == wanted.name);
    let service = service.ok_or_else(|| anyhow!("there is no Service {namespace}/{}", wanted.name))?;
    Ok(SocketAddr::new(service.cluster_ip.ok_or_else(|| headless(namespace, &wanted.name))?, wanted.port))
}

fn headless(namespace: &str, name: &str) -> anyhow::Error {
    anyhow!("Service {namespace}/{name} has no address of its own: give that of the pod that you mean")
}

fn explanation<'a>(
    request: &'a ExplainRequest,
    pod: &'a PodRef,
    response: &'a ExplainResponse,
    endpoints: Option<&'a [Endpoint]>,
) -> Explanation<'a> {
    let known = response.pod_status.as_ref();
    Explanation {
        namespace: &pod.namespace,
        pod: &pod.name,
        direction: if request.direction() == Direction::Inbound { "inbound" } else { "outbound" },
        destination: &request.destination,
        verdict: &response.verdict,
        new_destination: (!response.new_destination.is_empty()).then_some(response.new_destination.as_str()),
        reason: &response.reason,
        change: &response.change,
        netns_cookie: known.map(|known| known.netns_cookie),
        generation: known.map(|known| known.generation),
        endpoints,
    }
}

/// The explanation for people, escaped.
fn text(request: &ExplainRequest, pod: &PodRef, response: &ExplainResponse, colours: bool) -> String {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let inbound = request.direction() == Direction::Inbound;
    let verdict = colour::paint_if(colours, colour::verdict(&response.verdict), &response.verdict);
    let arrives = match response.new_destination.as_str() {
        "" => colour::paint_if(colours, Tone::Bad, "refused"),
        new => printable::line(new).into_owned(),
    };
    let ends = if inbound {
        let client = if request.source.is_empty() { "anybody" } else { &request.source };
        let end = request.destination.replacen("0.0.0.0:", "port ", 1);
        format!("{client} to {end} of {name}")
    } else {
        format!("{name} to {}", request.destination)
    };
    let mut lines = vec![format!("{}: {verdict} -> {arrives}", printable::line(&ends))];
    lines.push(format!("because  {}", printable::lines(&response.reason)));
    if !response.change.is_empty() {
        lines.push(format!("change   {}", printable::lines(&response.change)));
    }
    if let Some(known) = &response.pod_status {
        let state = match known.state() {
            PodState::Enrolled => "enrolled",
            PodState::Pending => "pending",
            PodState::Refused => "refused",
            PodState::Leaving => "leaving",
            PodState::Unspecified => "unknown",
        };
        let reason = if known.reason.is_empty() { String::new() } else { format!(" ({})", known.reason) };
        let pod = format!("pod      {state}{reason}, rules {}, netns {}", known.generation, known.netns_cookie);
        lines.push(printable::lines(&pod).into_owned());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        explain: ExplainArgs,
    }

    fn parse(args: &[&str]) -> Result<Destination> {
        let cli = Cli::try_parse_from(std::iter::once("weft").chain(args.iter().copied()))?;
        cli.explain.wanted()
    }

    fn service(name: &str, namespace: Option<&str>, port: u16) -> Destination {
        Destination::Service(ServicePort { name: name.to_owned(), namespace: namespace.map(str::to_owned), port })
    }

    fn known(text: &str) -> Destination {
        Destination::Known(text.parse().unwrap())
    }

    #[test]
    fn destinations_are_addresses_or_services() {
        for (arguments, expected) in [
            (vec!["web-0", "10.0.0.9:80"], known("10.0.0.9:80")),
            (vec!["web-0", "[fd00::9]:80"], known("[fd00::9]:80")),
            (vec!["web-0", "to", "10.0.0.9:80"], known("10.0.0.9:80")),
            (vec!["web-0", "->", "web:80"], service("web", None, 80)),
            (vec!["web-0", "web.shop:80"], service("web", Some("shop"), 80)),
            (vec!["web-0", "web.shop.svc.cluster.local:80"], service("web", Some("shop"), 80)),
            (vec!["web-0", "10.0.0.9:80", "-n", "shop", "-o", "json"], known("10.0.0.9:80")),
            (vec!["web-0", "to", "web:80", "--as-proxy"], service("web", None, 80)),
            (vec!["web-0", "--inbound", "8080"], known("0.0.0.0:8080")),
            (vec!["web-0", "--inbound", "8080", "--from", "10.0.0.1"], known("0.0.0.0:8080")),
            (vec!["web-0", "8080", "--inbound"], known("0.0.0.0:8080")),
            (vec!["web-0", "--inbound", "[fd00::9]:8080"], known("[fd00::9]:8080")),
        ] {
            assert_eq!(parse(&arguments).unwrap(), expected, "{arguments:?}");
        }
    }

    #[test]
    fn what_is_no_destination_is_said() {
        for arguments in [
            vec!["web-0", "10.0.0.9"],
            vec!["web-0", "web:0"],
            vec!["web-0", "web:http"],
            vec!["web-0", "www.example.org:80"],
            vec!["web-0", "via", "10.0.0.9:80"],
            vec!["web-0", "--inbound", "web:80"],
            vec!["web-0", "10.0.0.9:80", "--from", "10.0.0.1"],
            vec!["web-0"],
        ] {
            assert!(parse(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn an_answer_is_readable_and_complete() {
        let cli = Cli::try_parse_from(["weft", "web-0", "--inbound", "8080"]).unwrap().explain;
        let pod = PodRef { namespace: "shop".into(), name: "web-0".into() };
        let request = cli.request(pod.clone(), "0.0.0.0:8080".parse().unwrap());
        let response = ExplainResponse {
            verdict: "deny_no_listener".into(),
            reason: "nobody listens".into(),
            change: "start it".into(),
            ..ExplainResponse::default()
        };
        assert_eq!(
            text(&request, &pod, &response, false),
            "anybody to port 8080 of shop/web-0: deny_no_listener -> refused\nbecause  nobody listens\nchange   start it"
        );
        let object = serde_json::to_value(explanation(&request, &pod, &response, None)).unwrap();
        assert_eq!((&object["new_destination"], &object["direction"]), (&serde_json::Value::Null, &"inbound".into()));
    }
}
