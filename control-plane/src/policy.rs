//! The policy services: which clients a pod's port admits, and how to connect to a destination.
//!
//! They parse requests and turn snapshots into messages; the index decides.

mod inbound;
mod inbound_message;
mod outbound;
mod outbound_message;
mod workload;

pub(crate) use inbound::InboundPolicies;
pub(crate) use outbound::OutboundPolicies;

use std::{collections::HashMap, time::Duration};

use weft_proto::linkerd::meta::{Metadata, Resource, metadata};

/// How long proxies try to detect a protocol before they treat a connection as opaque, Linkerd's constant.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Metadata of a default, which no resource defines.
fn default_metadata(name: &str) -> Metadata {
    Metadata { kind: Some(metadata::Kind::Default(name.to_owned())) }
}

/// Metadata of a resource.
fn resource_metadata(resource: Resource) -> Metadata {
    Metadata { kind: Some(metadata::Kind::Resource(resource)) }
}

fn labels<const N: usize>(pairs: [(&str, &str); N]) -> HashMap<String, String> {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
