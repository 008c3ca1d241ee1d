//! `weft-echo`: the example server. Runs until it is told to stop.

use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use weft_examples::{listen, rawtcp, server::EchoApp};

/// An example server: answers with what it saw of the request
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  weft-echo --http 8080\n  weft-echo --banner 9000 --name banner-0\n  weft-echo --raw 9100"
)]
struct Args {
    /// Port for HTTP/1.1, HTTP/2, gRPC and WebSocket (/ws)
    #[arg(long, value_name = "PORT")]
    http: Option<u16>,
    /// Port for a line protocol in which the server speaks first
    #[arg(long, value_name = "PORT")]
    banner: Option<u16>,
    /// Port for `weft-client tcp`
    #[arg(long, value_name = "PORT")]
    raw: Option<u16>,
    /// The name to sign answers with
    #[arg(long, env = "POD_NAME", default_value = "weft-echo")]
    name: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    anyhow::ensure!(
        args.http.or(args.banner).or(args.raw).is_some(),
        "nothing to serve: give at least one of --http, --banner, --raw"
    );
    let app = EchoApp { pod: Arc::from(args.name) };
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(port) = args.http {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(app.clone().serve_http(listener));
    }
    if let Some(port) = args.banner {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(app.clone().serve_banner(listener));
    }
    if let Some(port) = args.raw {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(rawtcp::serve(listener));
    }
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
        _ = tasks.join_next() => anyhow::bail!("a listener ended"),
    }
    Ok(())
}
