//! `weft dashboard`: the mesh in a browser, on a port of this machine, with the rights of the person who started it.
//!
//! ```text
//! browser ──> [server] ──┬─ stat, edges, tap..  ──> weft-viz, else an engine in this process, which reads the proxies
//!                        ├─ pods                ──> API server or sandbox
//!                        └─ kernel, explain     ──> agents, as `weft trace` and `weft explain` reach them
//! ```

mod kernel;
mod server;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use http::{Response, StatusCode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{net::TcpListener, sync::Semaphore};
use weft_sandbox::client::Sandbox;
use weft_viz_core::{
    fleet::{Phase, Pod},
    page::{self, Body, Guard},
};

use crate::{
    explain, output,
    pod_network::PodNetwork,
    target::Target,
    viz::{Pace, Source, SourceArgs},
};

/// How often proxies are read where there is no component: a person looks.
const PACE: Pace = Pace { first: Duration::from_secs(1), every: Duration::from_secs(5) };
/// Linkerd's port of its dashboard.
const PORT: u16 = 50750;
/// Streams of verdicts at a time: each is a connection to an agent.
const WATCHES: usize = 16;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft dashboard                       opens a browser
  weft dashboard --show url            prints the address alone
  weft dashboard --port 0              at a free port
  weft dashboard --address 10.0.0.5    for other machines, too
  weft dashboard --sandbox other       of a sandbox of this host

It listens on 127.0.0.1, or on --address, until Ctrl-C. The address contains a key, without which nothing is answered. What the page shows of
requests comes from weft-viz, if the cluster has it, else from the proxies by port-forward; verdicts and explanations come from the agents, with your rights. On another machine: ssh -L 50750:127.0.0.1:50750 HOST.")]
pub(crate) struct DashboardArgs {
    /// The port to listen on; 0: a free one
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// The address to listen on. From another one than 127.0.0.1, others can ask with the key, over plain HTTP
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", value_parser = address)]
    address: IpAddr,
    /// Open a browser, or print the address alone
    #[arg(long, value_enum, default_value_t = Show::Browser)]
    show: Show,
    /// Linkerd's: accepted with a note, there is no component to wait for.
    #[arg(long, value_name = "TIME", hide = true, value_parser = output::duration)]
    wait: Option<Duration>,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Show {
    /// Open it, and print the address
    #[value(alias = "dashboard")]
    Browser,
    /// Print the address
    Url,
}

pub(crate) async fn execute(args: DashboardArgs) -> Result<()> {
    if args.wait.is_some() {
        output::note("--wait has no effect: the dashboard is this program, and needs no component to become ready");
    }
    let network = args.source.mesh.network().await?;
    let place = Place::from(network.clone());
    let source = args.source.open(network, PACE).await?;
    let wanted = SocketAddr::from((args.address, args.port));
    let listener = TcpListener::bind(wanted)
        .await
        .with_context(|| format!("listen on {wanted}; is another dashboard running? `--port 0` takes a free port"))?;
    let port = listener.local_addr().context("read the port")?.port();
    let key = page::new_key();
    let url = format!("http://{}/#key={key}", SocketAddr::from((reached_at(args.address), port)));
    output::line(&url)?;
    if !args.address.is_loopback() {
        output::note(&format!(
            "every client that reaches {wanted} and has the key sees what you may see; what is sent is not encrypted"
        ));
    }
    if args.show == Show::Browser {
        match open_browser(&url) {
            Ok(()) => output::note("the dashboard is open in a browser; Ctrl-C ends it"),
            Err(error) => output::note(&format!("open this address in a browser ({error:#}); Ctrl-C ends it")),
        }
    }
    let dashboard = Arc::new(Dashboard { place, source, watches: Arc::new(Semaphore::new(WATCHES)) });
    tokio::select! {
        result = server::serve(listener, Guard::new(port, key), Arc::clone(&dashboard)) => result,
        () = dashboard.source.run() => bail!("the collection of metrics ended"),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// Linkerd's default is a name.
fn address(text: &str) -> Result<IpAddr, String> {
    let text = if text == "localhost" { "127.0.0.1" } else { text };
    text.parse().map_err(|_| format!("`{text}` is not an IP address: expected e.g. 127.0.0.1, 0.0.0.0 or ::1"))
}

/// Where this machine reaches what listens on an address.
fn reached_at(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}

/// The program that opens addresses on a system, and its arguments before the address.
fn opener(system: &str) -> (&'static str, &'static [&'static str]) {
    match system {
        "macos" => ("open", &[]),
        // The first argument in quotes would be a window's title.
        "windows" => ("cmd", &["/C", "start", ""]),
        _ => ("xdg-open", &[]),
    }
}

fn open_browser(url: &str) -> Result<()> {
    let (program, arguments) = opener(std::env::consts::OS);
    let mut command = Command::new(program);
    command.args(arguments).arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().with_context(|| format!("run {program}")).map(drop)
}

/// Where the mesh is.
enum Place {
    /// A sandbox of this name: its state changes, so it is read for each question.
    Sandbox(String),
    Cluster(crate::cluster::Cluster),
}

impl From<PodNetwork> for Place {
    fn from(network: PodNetwork) -> Self {
        match network {
            PodNetwork::Cluster(cluster) => Self::Cluster(cluster),
            PodNetwork::Sandbox(state) => Self::Sandbox(state.config.name.clone()),
        }
    }
}

impl Place {
    fn network(&self) -> Result<PodNetwork> {
        Ok(match self {
            Self::Sandbox(name) => PodNetwork::Sandbox(Arc::new(Sandbox::open(name)?.state()?)),
            Self::Cluster(cluster) => PodNetwork::Cluster(cluster.clone()),
        })
    }

    fn target(&self) -> Result<Target> {
        Ok(match self.network()? {
            PodNetwork::Sandbox(state) => Target::Sandbox(state),
            PodNetwork::Cluster(cluster) => Target::Cluster(cluster),
        })
    }

    /// For the page's head.
    fn name(&self) -> String {
        match self {
            Self::Sandbox(name) => format!("sandbox {name}"),
            Self::Cluster(cluster) => cluster.server.trim_start_matches("https://").trim_end_matches('/').to_owned(),
        }
    }
}

/// Everything that questions need.
struct Dashboard {
    place: Place,
    source: Source,
    watches: Arc<Semaphore>,
}

impl server::Answers for Dashboard {
    async fn answer(&self, name: &str, content: &[u8]) -> Option<Response<Body>> {
        Some(match name {
            "about" => page::json(&About { target: self.place.name(), source: self.source.name(), version: VERSION }),
            "pods" => self.pods(content).await,
            "kernel" => self.kernel(content),
            "explain" => self.explain(content).await,
            _ => return self.source.question(name, content).await,
        })
    }
}

impl Dashboard {
    async fn pods(&self, content: &[u8]) -> Response<Body> {
        let question: PodsQuestion = match parse(content) {
            Ok(question) => question,
            Err(refused) => return refused,
        };
        match self.source.pods(&question.namespace).await {
            Ok(pods) => page::json(&Pods { pods: pods.iter().map(|pod| PodRow::from(&**pod)).collect() }),
            Err(error) => page::failure(StatusCode::SERVICE_UNAVAILABLE, &error),
        }
    }

    fn kernel(&self, content: &[u8]) -> Response<Body> {
        let question = match parse(content) {
            Ok(question) => question,
            Err(refused) => return refused,
        };
        let Ok(place) = Arc::clone(&self.watches).try_acquire_owned() else {
            let message = format!("{WATCHES} pages watch verdicts already: close some of them");
            return page::failure(StatusCode::TOO_MANY_REQUESTS, &message);
        };
        match self.place.target() {
            Ok(target) => page::events(kernel::watch(question, target, place)),
            Err(error) => page::failure(StatusCode::SERVICE_UNAVAILABLE, &format!("{error:#}")),
        }
    }

    async fn explain(&self, content: &[u8]) -> Response<Body> {
        let question = match parse(content) {
            Ok(question) => question,
            Err(refused) => return refused,
        };
        let answer = async { explain::answer(question, self.place.target()?).await };
        match answer.await {
            Ok(answer) => page::json(&answer),
            Err(error) => page::failure(StatusCode::UNPROCESSABLE_ENTITY, &format!("{error:#}")),
        }
    }
}

#[expect(clippy::result_large_err, reason = "it is sent as it is")]
fn parse<Q: DeserializeOwned>(content: &[u8]) -> Result<Q, Response<Body>> {
    serde_json::from_slice(content)
        .map_err(|error| page::failure(StatusCode::BAD_REQUEST, &format!("the question: {error}")))
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Serialize)]
struct About {
    target: String,
    source: &'static str,
    version: &'static str,
}

#[derive(Deserialize)]
struct PodsQuestion {
    /// Empty: all.
    #[serde(default)]
    namespace: String,
}

#[derive(Serialize)]
struct Pods<'a> {
    pods: Vec<PodRow<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow<'a> {
    namespace: &'a str,
    name: &'a str,
    owners: &'a [(String, String)],
    phase: &'static str,
    meshed: bool,
    node: &'a str,
    addresses: &'a [std::net::IpAddr],
    service_account: &'a str,
}

impl<'a> From<&'a Pod> for PodRow<'a> {
    fn from(pod: &'a Pod) -> Self {
        let phase = match pod.phase {
            Phase::Pending => "pending",
            Phase::Running => "running",
            Phase::Succeeded => "succeeded",
            Phase::Failed => "failed",
        };
        Self {
            namespace: &pod.namespace,
            name: &pod.name,
            owners: &pod.owners,
            phase,
            meshed: pod.proxy.is_some(),
            node: &pod.node,
            addresses: &pod.addresses,
            service_account: &pod.service_account,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_names_no_machine_is_reached_at_its_own() {
        for (given, reached) in [("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::2", "::2")] {
            assert_eq!(reached_at(address(given).unwrap()).to_string(), reached);
        }
        assert!(address("devbox").unwrap_err().contains("not an IP address"));
    }

    #[test]
    fn every_system_has_a_program_that_opens_addresses() {
        assert_eq!(opener("linux"), ("xdg-open", &[][..]));
        assert_eq!(opener("macos"), ("open", &[][..]));
        // Without the empty title `start` would take a quoted address for one.
        assert_eq!(opener("windows"), ("cmd", &["/C", "start", ""][..]));
    }
}
