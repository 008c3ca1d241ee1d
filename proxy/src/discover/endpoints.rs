//! Follows `Destination.Get`: the set of a service's endpoints.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use tokio::sync::watch;
use tonic::Code;
use weft_proto::linkerd::{
    destination::{GetDestination, Update, destination_client::DestinationClient, update},
    net::TcpAddress,
};

use super::endpoint::EndpointInfo;
use crate::{control::ControlClient, pauses::Pauses};

/// Endpoints by address.
pub(crate) type EndpointSet = BTreeMap<SocketAddr, Arc<EndpointInfo>>;

/// State of a service's endpoints.
#[derive(Clone, Debug)]
pub(crate) enum EndpointsState {
    /// The controller has not answered.
    Pending,
    /// The last set from the controller; it may be empty.
    Known(Arc<EndpointSet>),
}

/// Requests a service's endpoints and follows their changes.
pub(super) async fn watch(
    client: ControlClient,
    path: String,
    context_token: String,
    state: watch::Sender<EndpointsState>,
) {
    let request = GetDestination { scheme: String::new(), path, context_token };
    let mut asking = DestinationClient::new(client.clone());
    let mut pauses = Pauses::new();
    loop {
        // The old set stays until the new stream's first message, which contains all endpoints.
        let mut set = EndpointSet::new();
        let on_message = |message| {
            apply(&mut set, message);
            state.send_replace(EndpointsState::Known(Arc::new(set.clone())));
        };
        let status = client.read(asking.get(request.clone()), &mut pauses, on_message).await;
        if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition) {
            tracing::warn!(
                path = request.path,
                error = status.message(),
                "the destination controller refuses the service"
            );
            state.send_replace(EndpointsState::Known(Arc::default()));
            return state.closed().await;
        }
        tracing::debug!(path = request.path, code = ?status.code(), error = status.message(), "endpoints stream ended, asking again");
        client.pause(&mut pauses).await;
    }
}

pub(crate) fn apply(set: &mut EndpointSet, message: Update) {
    match message.update {
        Some(update::Update::Add(add)) => {
            for weighted in add.addrs {
                let addr = weighted.addr;
                match EndpointInfo::read(weighted, &add.metric_labels) {
                    Ok(endpoint) => {
                        set.insert(endpoint.addr, Arc::new(endpoint));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "endpoint is left out");
                        // What it was before may lack the identity that it has now.
                        remove(set, addr);
                    }
                }
            }
        }
        Some(update::Update::Remove(removed)) => {
            for addr in removed.addrs {
                remove(set, Some(addr));
            }
        }
        Some(update::Update::NoEndpoints(_)) => set.clear(),
        None => {}
    }
}

fn remove(set: &mut EndpointSet, addr: Option<TcpAddress>) {
    if let Some(addr) = addr.and_then(|addr| SocketAddr::try_from(addr).ok()) {
        set.remove(&addr);
    }
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::destination::{AddrSet, NoEndpoints, WeightedAddr, WeightedAddrSet};

    use super::*;

    fn update(update: update::Update) -> Update {
        Update { update: Some(update) }
    }

    fn addrs(addrs: &[&str]) -> Vec<TcpAddress> {
        addrs.iter().map(|addr| addr.parse::<SocketAddr>().unwrap().into()).collect()
    }

    fn add(list: &[&str]) -> Update {
        let addrs =
            addrs(list).into_iter().map(|addr| WeightedAddr { addr: Some(addr), ..Default::default() }).collect();
        update(update::Update::Add(WeightedAddrSet { addrs, ..Default::default() }))
    }

    #[test]
    fn an_endpoint_whose_identity_becomes_unreadable_is_not_left_as_it_was() {
        let mut set = EndpointSet::new();
        apply(&mut set, add(&["10.0.0.1:80", "10.0.0.2:80"]));
        let addr = addrs(&["10.0.0.1:80"]).pop();
        let unnamed = WeightedAddr { addr, tls_identity: Some(Default::default()), ..Default::default() };
        apply(&mut set, update(update::Update::Add(WeightedAddrSet { addrs: vec![unnamed], ..Default::default() })));
        assert_eq!(set.into_keys().collect::<Vec<_>>(), ["10.0.0.2:80".parse().unwrap()]);
    }

    #[test]
    fn updates_add_up() {
        let mut set = EndpointSet::new();
        let keys = |set: &EndpointSet| set.keys().map(ToString::to_string).collect::<Vec<_>>();
        apply(&mut set, add(&["10.0.0.1:80", "10.0.0.2:80"]));
        apply(&mut set, add(&["10.0.0.2:80", "10.0.0.3:80"]));
        assert_eq!(keys(&set), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]);
        apply(&mut set, update(update::Update::Remove(AddrSet { addrs: addrs(&["10.0.0.1:80", "10.9.9.9:1"]) })));
        assert_eq!(keys(&set), ["10.0.0.2:80", "10.0.0.3:80"]);
        for exists in [true, false] {
            apply(&mut set, add(&["10.0.0.1:80"]));
            apply(&mut set, update(update::Update::NoEndpoints(NoEndpoints { exists })));
            assert!(set.is_empty());
        }
    }

    #[test]
    fn an_endpoint_without_an_address_leaves_the_others() {
        let mut set = EndpointSet::new();
        let good =
            WeightedAddr { addr: Some("10.0.0.1:80".parse::<SocketAddr>().unwrap().into()), ..Default::default() };
        let addrs = vec![WeightedAddr::default(), good];
        apply(&mut set, update(update::Update::Add(WeightedAddrSet { addrs, ..Default::default() })));
        assert_eq!(set.len(), 1);
    }
}
