//! `weft trace`: the kernel's verdicts, live from the agent. Refuses to store or to sum up: metrics do that.
//!
//! Waits for a successor when the agent goes away, because redirection goes on without it.

mod format;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::Instant};
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{self, WatchRequest, trace_client::TraceClient};
use weft_sandbox::{client::Sandbox, config::DEFAULT_NAME};

use crate::{
    output::{self, Format},
    sandbox::sandbox_name,
};

/// How long an agent may take to come back. The sandbox starts it again at once.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// How often a new agent is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft trace                                       every decision in the sandbox `default`
  weft trace --sandbox other --pod web-0 --port 80
  weft trace --verdict deny_no_listener            connections refused because no proxy listened
  weft trace --agent-socket /run/weft/agent.sock -o json | jq -r .original_destination

Verdicts: redirect, pass_proxy, pass_loopback, pass_own_address, pass_skip_port, pass_skip_subnet, deny_no_listener,
deny_no_memory, deny_unknown_pod.")]
pub(crate) struct TraceArgs {
    /// The sandbox whose agent is asked
    #[arg(long, value_name = "NAME", default_value = DEFAULT_NAME, value_parser = sandbox_name)]
    sandbox: String,
    /// The socket of an agent outside a sandbox
    #[arg(long, value_name = "PATH", conflicts_with = "sandbox")]
    agent_socket: Option<PathBuf>,
    /// Only pods of this namespace
    #[arg(long)]
    namespace: Option<String>,
    /// Only the pod of this name
    #[arg(long)]
    pod: Option<String>,
    /// Only connections that pods make, or that they get
    #[arg(long, value_enum)]
    direction: Option<Direction>,
    /// Only connections to this port, before or after the decision
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Only this decision
    #[arg(long)]
    verdict: Option<String>,
    /// Output format: json is one object a line
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Direction {
    Outbound,
    Inbound,
}

pub(crate) async fn execute(args: TraceArgs) -> Result<()> {
    let socket = socket(&args)?;
    let request = request(&args);
    let mut client = connect(&socket).await?;
    let mut printer = Printer { format: args.output, introduced: false, lost: 0 };
    loop {
        let error = watch(&mut client, &request, &mut printer).await?;
        note(&format!("the agent on {} went away ({error}); waiting for the next", socket.display()));
        let Some(successor) = reconnect(&socket).await? else {
            note("its directory is gone, and so is what was traced");
            return Ok(());
        };
        client = successor;
        note("an agent answers again; what happened between is not shown");
    }
}

fn socket(args: &TraceArgs) -> Result<PathBuf> {
    if let Some(socket) = &args.agent_socket {
        return Ok(socket.clone());
    }
    let state = Sandbox::open(&args.sandbox)?.state()?;
    state.agent_socket.ok_or_else(|| {
        anyhow!(
            "sandbox `{}` has no agent to trace: it runs with --interception {}; run it with ebpf",
            args.sandbox,
            state.config.interception
        )
    })
}

fn request(args: &TraceArgs) -> WatchRequest {
    let direction = match args.direction {
        None => agent::Direction::Unspecified,
        Some(Direction::Outbound) => agent::Direction::Outbound,
        Some(Direction::Inbound) => agent::Direction::Inbound,
    };
    WatchRequest {
        namespace: args.namespace.clone().unwrap_or_default(),
        pod: args.pod.clone().unwrap_or_default(),
        direction: direction.into(),
        port: args.port.map(u32::from).unwrap_or_default(),
        verdict: args.verdict.clone().unwrap_or_default(),
    }
}

async fn connect(socket: &Path) -> Result<TraceClient<Channel>> {
    let path = socket.to_owned();
    // The address is not used: the connector knows where to go.
    let channel = Endpoint::from_static("http://agent")
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|error| {
            // The layers between say nothing, or the same again.
            let cause = anyhow::Error::from(error);
            anyhow!(
                "no agent answers on {}: {}; is it running, and are you root?",
                socket.display(),
                cause.root_cause()
            )
        })?;
    Ok(TraceClient::new(channel))
}

/// The next agent, or none when a sandbox has removed the socket's directory.
async fn reconnect(socket: &Path) -> Result<Option<TraceClient<Channel>>> {
    let give_up = Instant::now() + BACK_WITHIN;
    loop {
        match connect(socket).await {
            Err(_) if socket.parent().is_some_and(|dir| !dir.exists()) => return Ok(None),
            Err(_) if Instant::now() < give_up => tokio::time::sleep(LOOK_EVERY).await,
            result => return result.map(Some),
        }
    }
}

/// Prints events until the agent goes away: then why. Everything else is an error.
async fn watch(client: &mut TraceClient<Channel>, request: &WatchRequest, printer: &mut Printer) -> Result<String> {
    let gone = |code: Code| matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal);
    let mut events = match client.watch(request.clone()).await {
        Ok(response) => response.into_inner(),
        Err(status) if gone(status.code()) => return Ok(status.message().to_owned()),
        Err(status) => bail!("the agent refused: {}", status.message()),
    };
    printer.header()?;
    loop {
        match events.message().await {
            Ok(Some(event)) => printer.event(&event)?,
            Ok(None) => return Ok("it ended the stream".to_owned()),
            Err(status) if gone(status.code()) => return Ok(status.message().to_owned()),
            Err(status) => bail!("the agent ended the trace: {}", status.message()),
        }
    }
}

struct Printer {
    format: Format,
    /// Whether the columns are named already.
    introduced: bool,
    /// Events that were lost in all.
    lost: u64,
}

impl Printer {
    fn header(&mut self) -> Result<()> {
        if self.format == Format::Table && !self.introduced {
            self.introduced = true;
            output::line(&format::header())?;
        }
        Ok(())
    }

    fn event(&mut self, event: &agent::Event) -> Result<()> {
        if event.dropped_before > 0 {
            self.lost += event.dropped_before;
            note(&format!("{} events were dropped here, {} in all: filter more", event.dropped_before, self.lost));
        }
        match self.format {
            Format::Json => output::json(&format::json(event)),
            Format::Table => Ok(output::line(&format::line(event))?),
        }
    }
}

/// Beside the events, so that standard output is events alone.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "weft: {text}");
}
