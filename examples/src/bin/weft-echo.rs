//! `weft-echo`: the example server. Runs until it is stopped, and finishes requests in flight.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::Parser;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use weft_examples::{
    listen, rawtcp,
    server::{EchoApp, Upstream},
};

/// Time limit for requests in flight at shutdown: less than the 30 s that Kubernetes gives a pod.
const DRAIN: Duration = Duration::from_secs(10);

/// An example server: answers with what it saw of the request
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  weft-echo --http 8080\n  weft-echo --http 8080 --upstream store.shop:80\n  \
                  weft-echo --banner 9000 --name banner-0\n  weft-echo --raw 9100"
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
    /// HOST:PORT of another weft-echo to ask before answering an HTTP request; /healthz is answered without
    #[arg(long, value_name = "HOST:PORT", requires = "http")]
    upstream: Option<String>,
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
    let app = EchoApp { pod: Arc::from(args.name), upstream: args.upstream.as_deref().map(Upstream::new) };
    let (running, stop) = watch::channel(());
    let stopped = || {
        let mut stop = stop.clone();
        // Nothing is ever sent: the sender is dropped.
        async move { drop(stop.changed().await) }
    };
    let mut tasks = JoinSet::new();
    if let Some(port) = args.http {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(app.clone().serve_http(listener, stopped()));
    }
    if let Some(port) = args.banner {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(until(app.clone().serve_banner(listener), stopped()));
    }
    if let Some(port) = args.raw {
        let listener = listen::on_all_addresses(port).with_context(|| format!("listen on port {port}"))?;
        tasks.spawn(until(rawtcp::serve(listener), stopped()));
    }
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
        _ = tasks.join_next() => anyhow::bail!("a listener ended"),
    }
    drop(running);
    // Requests that take longer are aborted.
    let _ = timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
    Ok(())
}

async fn until(serve: impl Future, stopped: impl Future<Output = ()>) {
    tokio::select! {
        _ = serve => {}
        () = stopped => {}
    }
}
