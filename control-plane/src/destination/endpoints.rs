//! Endpoints as `Add` and `Remove`.
//!
//! An endpoint is encoded once for all clients to which it has the same locality. The messages around it name it as
//! bytes: a nested message and a field of bytes are the same on the wire.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use prost::Message;
use weft_index::{Endpoints, SharedEndpoint, Snapshot};
use weft_proto::linkerd::destination::{AddrSet, Update, update};

use super::message::{self, EndpointSettings};
use crate::{grpc, stream::Next};

/// `Update` with an `Add`.
#[derive(Clone, PartialEq, Message)]
struct AddUpdate {
    #[prost(message, optional, tag = "1")]
    add: Option<Add>,
}

/// `WeightedAddrSet`, whose addresses are encoded already.
#[derive(Clone, PartialEq, Message)]
struct Add {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    addrs: Vec<Bytes>,
    #[prost(btree_map = "string, string", tag = "2")]
    metric_labels: BTreeMap<String, String>,
}

/// What a client gets that has `sent`.
pub(super) fn step(
    sent: Option<&Arc<Snapshot<Endpoints>>>,
    endpoints: &Arc<Snapshot<Endpoints>>,
    settings: &EndpointSettings,
) -> Next {
    Next::Send(match sent {
        None => endpoints.whole(|endpoints| whole(endpoints, settings)),
        Some(sent) => endpoints.since(sent, |old, new| change(old, new, settings)),
    })
}

/// An `Add` of all endpoints, also if there are none: a client that comes back drops those of its last stream. Linkerd
/// sends nothing then, and its proxy ignores an empty `Add`. Neither control plane sends `no_endpoints`; a proxy that
/// receives it fails fast instead of waiting.
fn whole(endpoints: &Endpoints, settings: &EndpointSettings) -> Bytes {
    let all = endpoints.by_addr.values().map(|endpoint| &**endpoint);
    grpc::frame(&AddUpdate { add: Some(added(endpoints, all, settings)) })
}

/// The updates from one state to another; an endpoint that changed in any way is added again. The deletion of a Service
/// sends one `Remove`.
fn change(old: &Endpoints, new: &Endpoints, settings: &EndpointSettings) -> Bytes {
    let changed = new.by_addr.values().map(|endpoint| &**endpoint).filter(|endpoint| !has(old, new, endpoint));
    let gone = old.by_addr.keys().filter(|addr| !new.by_addr.contains_key(addr));
    let updates: Vec<_> = add(new, changed, settings).into_iter().chain(remove(gone)).collect();
    together(&updates)
}

/// Whether a client that has `old` has an endpoint of `new` as it is.
pub(super) fn has(old: &Endpoints, new: &Endpoints, endpoint: &SharedEndpoint) -> bool {
    let known = old.by_addr.get(&endpoint.addr);
    known.is_some_and(|known| **known == *endpoint && old.locality(known) == new.locality(endpoint))
}

/// An `Add` of some of the endpoints, unless there are none.
pub(super) fn add<'a>(
    endpoints: &Endpoints,
    some: impl IntoIterator<Item = &'a SharedEndpoint>,
    settings: &EndpointSettings,
) -> Option<Bytes> {
    let add = added(endpoints, some, settings);
    (!add.addrs.is_empty()).then(|| grpc::frame(&AddUpdate { add: Some(add) }))
}

fn added<'a>(
    endpoints: &Endpoints,
    some: impl IntoIterator<Item = &'a SharedEndpoint>,
    settings: &EndpointSettings,
) -> Add {
    let form = |endpoint: &SharedEndpoint| {
        let locality = endpoints.locality(endpoint);
        endpoint.form(locality, |endpoint| {
            message::weighted_addr(endpoint, Some(locality), settings).encode_to_vec().into()
        })
    };
    Add { addrs: some.into_iter().map(form).collect(), metric_labels: endpoints.labels.clone() }
}

/// A `Remove`, unless nothing is gone.
pub(super) fn remove<'a>(gone: impl Iterator<Item = &'a SocketAddr>) -> Option<Bytes> {
    let addrs: Vec<_> = gone.map(|addr| (*addr).into()).collect();
    (!addrs.is_empty()).then(|| grpc::frame(&Update { update: Some(update::Update::Remove(AddrSet { addrs })) }))
}

/// Several updates, in order.
pub(super) fn together(updates: &[Bytes]) -> Bytes {
    match updates {
        [only] => only.clone(),
        all => all.concat().into(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use http_body_util::Full;
    use tonic::codec::Streaming;
    use tonic_prost::ProstDecoder;
    use weft_index::Endpoint;

    use super::*;

    /// Endpoints by address, each with its opaqueness and zone, for clients of zone `a`.
    fn state(endpoints: &[(&str, bool, &str)]) -> Endpoints {
        let by_addr = endpoints.iter().map(|(addr, opaque, zone)| {
            let addr: SocketAddr = addr.parse().unwrap();
            let endpoint = Endpoint { opaque: *opaque, zone: Some((*zone).to_owned()), ..Endpoint::plain(addr) };
            (addr, Arc::new(SharedEndpoint::new(endpoint)))
        });
        let labels = BTreeMap::from([("service".to_owned(), "web".to_owned())]);
        Endpoints { by_addr: by_addr.collect(), labels, client_zone: Some("a".to_owned()) }
    }

    pub(crate) async fn updates(frames: Bytes) -> Vec<Update> {
        let mut messages = Streaming::new_request(ProstDecoder::<Update>::default(), Full::new(frames), None, None);
        let mut all = Vec::new();
        while let Some(message) = messages.message().await.unwrap() {
            all.push(message);
        }
        all
    }

    /// `+` for added and `-` for removed ports, in the order of messages.
    async fn check(old: &Endpoints, new: &Endpoints, expected: &str) {
        let mut got = String::new();
        for update in updates(change(old, new, &EndpointSettings::default())).await {
            match update.update.unwrap() {
                update::Update::Add(set) => {
                    assert_eq!(set.metric_labels["service"], "web");
                    set.addrs.iter().for_each(|a| got += &format!("+{}", a.addr.unwrap().port));
                }
                update::Update::Remove(set) => set.addrs.iter().for_each(|a| got += &format!("-{}", a.port)),
                update::Update::NoEndpoints(_) => got += "none",
            }
        }
        assert_eq!(got, expected);
    }

    #[tokio::test]
    async fn sends_only_differences() {
        let (one, two, three) = ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3");
        let (none, both) = (Endpoints::default(), state(&[(one, false, "a"), (two, false, "b")]));
        check(&none, &none, "").await;
        check(&none, &both, "+1+2").await;
        check(&both, &state(&[(one, false, "a"), (two, false, "b")]), "").await;
        check(&both, &state(&[(one, true, "a"), (three, false, "b")]), "+1+3-2").await;
        check(&both, &Endpoints { by_addr: BTreeMap::new(), ..both.clone() }, "-1-2").await;
        // The client's zone became known, or another.
        check(&both, &Endpoints { client_zone: None, ..both.clone() }, "+1+2").await;
        check(&both, &Endpoints { client_zone: Some("c".to_owned()), ..both.clone() }, "+1").await;
    }

    #[tokio::test]
    async fn the_first_message_has_every_endpoint_and_is_sent_without_any() {
        let one: &[(&str, bool, &str)] = &[("10.0.0.1:1", false, "a")];
        for endpoints in [&[][..], one] {
            let first = Arc::new(Snapshot::first(state(endpoints)));
            let Next::Send(frames) = step(None, &first, &EndpointSettings::default()) else { panic!("an end") };
            let updates = updates(frames).await;
            let [Update { update: Some(update::Update::Add(set)) }] = &updates[..] else { panic!("{updates:?}") };
            assert_eq!((set.addrs.len(), set.metric_labels["service"].as_str()), (endpoints.len(), "web"));
        }
    }

    #[tokio::test]
    async fn an_endpoint_shared_by_views_is_local_to_some_clients_only() {
        let mut view = state(&[("10.0.0.1:1", false, "a")]);
        for (zone, expected) in [(Some("a"), "local"), (Some("b"), "remote"), (None, "unknown"), (Some("a"), "local")] {
            view.client_zone = zone.map(str::to_owned);
            let updates = updates(change(&Endpoints::default(), &view, &EndpointSettings::default())).await;
            let Some(update::Update::Add(set)) = &updates[0].update else { panic!("{updates:?}") };
            assert_eq!(set.addrs[0].metric_labels["zone_locality"], expected);
        }
    }
}
