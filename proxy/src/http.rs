//! HTTP that both directions share: bodies, headers between proxies, upgrades, errors as responses.
//!
//! Refuses to know routes, policies and endpoints.

pub(crate) mod body;
pub(crate) mod headers;
pub(crate) mod orig_proto;
pub(crate) mod respond;
pub(crate) mod upgrade;
