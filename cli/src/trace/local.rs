//! The trace of one agent on this host, over its unix socket.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, anyhow, bail};
use tokio::time::Instant;
use tonic::{Code, transport::Channel};
use weft_proto::agent::{WatchRequest, trace_client::TraceClient};
use weft_sandbox::state::State;

use super::printer::{Next, Printer};
use crate::{
    agent,
    output::{note, progress},
};

/// Deadline for an agent to come back. The sandbox restarts it at once.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// How often a new agent is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The socket of a sandbox's agent.
pub(super) fn socket_of(state: &State) -> Result<PathBuf> {
    state.agent_socket.clone().ok_or_else(|| {
        anyhow!(
            "sandbox `{}` has no agent to trace: it runs with --interception {}; run it with ebpf",
            state.config.name,
            state.config.interception
        )
    })
}

/// Prints the events of the agent and its successors, until there are enough or its directory is removed.
pub(super) async fn trace(socket: &Path, request: &WatchRequest, printer: &mut Printer) -> Result<()> {
    let mut channel = agent::on_socket(socket).await?;
    loop {
        let Some(error) = watch(channel, request, printer).await? else { return Ok(()) };
        note(&format!("the agent on {} went away ({error}); waiting for the next", socket.display()));
        let Some(successor) = reconnect(socket).await? else {
            note("its directory is gone, and so is what was traced");
            return Ok(());
        };
        channel = successor;
        note("an agent answers again; what happened between is not shown");
    }
}

/// The next agent, or `None` if a sandbox has removed the socket's directory.
async fn reconnect(socket: &Path) -> Result<Option<Channel>> {
    let give_up = Instant::now() + BACK_WITHIN;
    loop {
        match agent::on_socket(socket).await {
            Err(_) if socket.parent().is_some_and(|dir| !dir.exists()) => return Ok(None),
            Err(_) if Instant::now() < give_up => tokio::time::sleep(LOOK_EVERY).await,
            result => return result.map(Some),
        }
    }
}

/// Prints events until there are enough, or until the agent goes away; returns the reason. Anything else is an error.
async fn watch(channel: Channel, request: &WatchRequest, printer: &mut Printer) -> Result<Option<String>> {
    let mut client = TraceClient::new(channel);
    let mut events = match progress::during("the agent", client.watch(request.clone())).await {
        Ok(response) => response.into_inner(),
        Err(status) if is_gone(status.code()) => return Ok(Some(status.message().to_owned())),
        Err(status) => bail!("the agent refused: {}", status.message()),
    };
    printer.header()?;
    loop {
        match events.message().await {
            Ok(Some(event)) => {
                if printer.event("", &event)? == Next::Enough {
                    return Ok(None);
                }
            }
            Ok(None) => return Ok(Some("it ended the stream".to_owned())),
            Err(status) if is_gone(status.code()) => return Ok(Some(status.message().to_owned())),
            Err(status) => bail!("the agent ended the trace: {}", status.message()),
        }
    }
}

/// Whether the status means that the agent is gone and may have a successor.
pub(super) fn is_gone(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
}
