//! What a mesh's proxies count and see, and the answers that people get from it ([decision 29](../../../docs/adr/0029-one-engine-for-metrics.md)).
//!
//! Refuses to know how pods are found and reached, and who may ask: [`fleet::Fleet`] is the first, callers do the second.

mod engine;
pub mod fleet;

pub use engine::{Config, Engine, RequestError, TapEvents};
