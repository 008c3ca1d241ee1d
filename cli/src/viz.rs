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

pub(crate) use edges::EdgesArgs;
pub(crate) use inbound::InboundArgs;
pub(crate) use outbound::OutboundArgs;
pub(crate) use routes::RoutesArgs;
pub(crate) use source::{Pace, Source, SourceArgs};
pub(crate) use stat::StatArgs;
pub(crate) use tap::TapArgs;
pub(crate) use top::TopArgs;

/// A verb with its arguments.
pub(crate) enum Verb {
    Stat(Box<StatArgs>),
    Inbound(Box<InboundArgs>),
    Outbound(Box<OutboundArgs>),
    Edges(Box<EdgesArgs>),
    Routes(Box<RoutesArgs>),
    Top(Box<TopArgs>),
    Tap(Box<TapArgs>),
}

pub(crate) async fn execute(verb: Verb) -> Result<()> {
    match verb {
        Verb::Stat(args) => stat::execute(*args).await,
        Verb::Inbound(args) => inbound::execute(*args).await,
        Verb::Outbound(args) => outbound::execute(*args).await,
        Verb::Edges(args) => edges::execute(*args).await,
        Verb::Routes(args) => routes::execute(*args).await,
        Verb::Top(args) => top::execute(*args).await,
        Verb::Tap(args) => tap::execute(*args).await,
    }
}
