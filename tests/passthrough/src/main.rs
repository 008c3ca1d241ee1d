//! `weft-passthrough`: a proxy that copies bytes, for measuring interception by itself. Runs until it is stopped.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Context as _;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use weft_examples::listen;
use weft_passthrough::{Direction, Passthrough, validate};

/// A proxy that copies bytes and decides nothing
///
/// Takes its listeners from the environment that a Linkerd injector sets.
#[derive(Parser)]
#[command(version, after_help = "Example:\n  weft sandbox run examples/mesh --proxy ./weft-passthrough")]
struct Args {
    /// Where redirected connections of the application arrive; IPv6 is left out where the host has none
    #[arg(
        long,
        env = "LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS",
        value_delimiter = ',',
        default_value = "127.0.0.1:4140,[::1]:4140"
    )]
    outbound: Vec<SocketAddr>,
    /// Where redirected connections to the application arrive
    #[arg(long, env = "LINKERD2_PROXY_INBOUND_LISTEN_ADDR", default_value = "0.0.0.0:4143")]
    inbound: SocketAddr,
    /// Where /ready, /live and /connections are served
    #[arg(long, env = "LINKERD2_PROXY_ADMIN_LISTEN_ADDR", default_value = "0.0.0.0:4191")]
    admin: SocketAddr,
    /// Serve nothing: exit with success if a connection to this address arrives at the port of --outbound within 10 s,
    /// as Linkerd's network validator does
    #[arg(long, value_name = "ADDRESS:PORT")]
    validate: Option<SocketAddr>,
}

/// As Linkerd's `--timeout`.
const VALIDATE_WITHIN: Duration = Duration::from_secs(10);

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(target) = args.validate {
        let port = args.outbound.first().context("--outbound is empty")?.port();
        let listener =
            listen::listen((Ipv4Addr::UNSPECIFIED, port).into()).with_context(|| format!("listen on {port}"))?;
        let validation = tokio::time::timeout(VALIDATE_WITHIN, validate(listener, target)).await;
        return validation.context("no connection in time")?.with_context(|| format!("connect to {target}"));
    }
    let proxy = Passthrough::default();
    let mut tasks = tokio::task::JoinSet::new();
    for address in args.outbound {
        match listen::listen(address) {
            Ok(listener) => drop(tasks.spawn(proxy.clone().serve(listener, Direction::Outbound))),
            // A host without IPv6 has no [::1], and no connection arrives there.
            Err(_) if address.is_ipv6() => {}
            Err(error) => return Err(error).with_context(|| format!("listen on {address}")),
        }
    }
    let inbound = listen::listen(args.inbound).with_context(|| format!("listen on {}", args.inbound))?;
    tasks.spawn(proxy.clone().serve(inbound, Direction::Inbound));
    let admin = listen::listen(args.admin).with_context(|| format!("listen on {}", args.admin))?;
    tasks.spawn(proxy.serve_admin(admin));
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
        _ = tasks.join_next() => anyhow::bail!("a listener ended"),
    }
    Ok(())
}
