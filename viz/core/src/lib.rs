//! What a mesh's proxies count and see, and the answers that people get from it ([decision
//! 29](../../../docs/adr/0029-one-engine-for-metrics.md)).
//!
//! Refuses to know how pods are found and reached, and who may ask: [`fleet::Fleet`] is the first, callers do the
//! second.

mod answer;
mod collect;
mod engine;
mod error;
mod exposition;
mod family;
pub mod fleet;
pub mod fuzz;
mod history;
mod intern;
pub mod page;
mod quantile;
pub mod relay;
pub mod rpc;
mod scrape;
mod selector;
mod tap;
mod target;

pub use collect::Config;
pub use engine::Engine;
pub use error::RequestError;
pub use tap::TapEvents;
