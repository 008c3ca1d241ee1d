//! The Services to which the routes of a destination send what is for it, by the outbound policy that a proxy gets.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::{Result, anyhow};
use prost_reflect::{DynamicMessage, ReflectMessage as _, Value};
use serde_json::json;
use tonic::{Code, transport::Channel};
use weft_proto::{
    agent::PodRef,
    linkerd::{
        net::TcpAddress,
        outbound::{TrafficSpec, outbound_policies_client::OutboundPoliciesClient, traffic_spec::Target},
    },
};

use crate::{agent, diagnostics::message};

/// The Services, as names that the destination controller is asked for; `None` if the address has no policy.
///
/// # Errors
/// Those of the policy controller.
pub(super) async fn services(channel: Channel, pod: &PodRef, address: SocketAddr) -> Result<Option<BTreeSet<String>>> {
    let source_workload = json!({"ns": pod.namespace, "pod": pod.name}).to_string();
    let request = TrafficSpec { source_workload, target: Some(Target::Addr(TcpAddress::from(address))) };
    let policy = match OutboundPoliciesClient::new(channel).get(request).await {
        Ok(policy) => policy.into_inner(),
        Err(status) if status.code() == Code::NotFound => return Ok(None),
        Err(status) => return Err(anyhow!("the policy controller: {}", agent::reason(&status))),
    };
    let mut services = BTreeSet::new();
    add(&message::dynamic("outbound.OutboundPolicy", &policy)?, &mut services);
    Ok(Some(services))
}

/// Adds the Services below a message, whatever the kinds of its routes, which have their backends in the same messages.
fn add(message: &DynamicMessage, services: &mut BTreeSet<String>) {
    let field = |name: &str| message.get_field_by_name(name);
    match message.descriptor().name() {
        // One without a weight gets nothing.
        "WeightedRouteBackend" if field("weight").and_then(|weight| weight.as_u32()) == Some(0) => return,
        "DestinationGet" => services.extend(field("path").and_then(|path| path.as_str().map(str::to_owned))),
        _ => {}
    }
    for (_, value) in message.fields() {
        match value {
            Value::Message(inner) => add(inner, services),
            Value::List(list) => list.iter().filter_map(Value::as_message).for_each(|inner| add(inner, services)),
            _ => {}
        }
    }
}
