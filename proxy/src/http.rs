//! HTTP that both directions share: serving clients, bodies, headers between proxies, upgrades, errors as responses.
//!
//! Refuses to know routes, policies and endpoints.

pub(crate) mod body;
pub(crate) mod form;
#[cfg(test)]
pub(crate) mod frames;
pub(crate) mod headers;
pub(crate) mod informational;
pub(crate) mod orig_proto;
pub(crate) mod pool;
pub(crate) mod pump;
pub(crate) mod respond;
pub(crate) mod serve;
pub(crate) mod shared_connections;
pub(crate) mod upgrade;
