//! `weft stat`, `stat-inbound`, `stat-outbound`, `edges`, `routes`, `top` and `tap`: what proxies count and see. Verbs,
//! flags and columns are those of `linkerd viz`.
//!
//! ```text
//! flags ──> request of weft.viz.v1 ──> Source ──┬─ engine in this process ──> proxies, by port-forward or in namespaces
//!                                               └─ weft-viz, where it is installed
//! answer ──> table, JSON, or a screen that is drawn again
//! ```
//!
//! Refuses to count: the engine (`weft-viz-core`) does.

mod direct;
mod edges;
mod inbound;
mod outbound;
mod render;
mod routes;
mod scope;
mod screen;
mod source;
mod stat;
mod tap;
mod top;

use anyhow::Result;
use clap::Subcommand;

use edges::EdgesArgs;
use inbound::InboundArgs;
use outbound::OutboundArgs;
use routes::RoutesArgs;
pub(crate) use source::{Pace, Source, SourceArgs};
use stat::StatArgs;
use tap::TapArgs;
use top::TopArgs;

/// The commands about metrics: at the root, and hidden below `weft viz`, where Linkerd has them.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Show golden metrics of workloads, Services and namespaces: success rate, requests per second, latency
    Stat(Box<StatArgs>),
    /// Show what workloads accept and refuse, by Server and route
    StatInbound(Box<InboundArgs>),
    /// Show what workloads send, by Service, route and backend
    StatOutbound(Box<OutboundArgs>),
    /// Show which workloads talk to each other, and whether over mutual TLS
    Edges(Box<EdgesArgs>),
    /// Show traffic by the routes of ServiceProfiles
    Routes(Box<RoutesArgs>),
    /// Show live requests, aggregated
    Top(Box<TopArgs>),
    /// Show live requests one by one, optionally with the kernel's verdicts
    Tap(Box<TapArgs>),
}

pub(crate) async fn execute(verb: Verb) -> Result<()> {
    match verb {
        Verb::Stat(args) => stat::execute(*args).await,
        Verb::StatInbound(args) => inbound::execute(*args).await,
        Verb::StatOutbound(args) => outbound::execute(*args).await,
        Verb::Edges(args) => edges::execute(*args).await,
        Verb::Routes(args) => routes::execute(*args).await,
        Verb::Top(args) => top::execute(*args).await,
        Verb::Tap(args) => tap::execute(*args).await,
    }
}
