//! The rate limit of a Server.

use weft_k8s_api::policy::{NamespacedTargetRef, RateLimit};

use super::{InboundRateLimit, InboundRateLimitOverride};
use crate::{acceptance, cluster::Cluster, records::Key, store::Store};

/// The limits that are in force at a Server.
pub(super) fn of_server(store: &Store, cluster: &Cluster, server: &Key) -> Option<InboundRateLimit> {
    let (name, record) = acceptance::rate_limit(store, server)?;
    let rate = |limit: Option<RateLimit>| limit.map(|limit| limit.requests_per_second);
    // Admission refuses clients of other kinds; here they have the limit of each identity.
    let accounts = |refs: &[NamespacedTargetRef]| {
        let accounts = refs.iter().filter(|client| client.is("", "ServiceAccount"));
        let identity = |client: &NamespacedTargetRef| {
            cluster.identity(&client.name, client.namespace.as_deref().unwrap_or(&server.namespace))
        };
        accounts.map(identity).collect()
    };
    let overrides = record.spec.overrides.iter().flatten().map(|limit| InboundRateLimitOverride {
        requests_per_second: limit.requests_per_second,
        identities: accounts(&limit.client_refs),
    });
    Some(InboundRateLimit {
        name: name.clone(),
        total: rate(record.spec.total),
        identity: rate(record.spec.identity),
        overrides: overrides.collect(),
    })
}
