//! Endpoints as `Add` and `Remove`.
//!
//! An endpoint is encoded once for all clients to which it has the same locality. The messages around it name it as bytes:
//! a nested message and a field of bytes are the same on the wire.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use prost::Message;
use weft_index::{Endpoints, SharedEndpoint, Snapshot};
use weft_proto::linkerd::destination::{AddrSet, Update, update};

use super::message;
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
pub(super) fn step(sent: Option<&Arc<Snapshot<Endpoints>>>, endpoints: &Arc<Snapshot<Endpoints>>) -> Next {
    Next::Send(match sent {
        None => endpoints.whole(|endpoints| change(&Endpoints::default(), endpoints)),
        Some(sent) => endpoints.since(sent, change),
    })
}

/// The updates from one state to another; an endpoint that changed in any way is added again.
///
/// A Service without endpoints sends nothing at all, and its deletion sends one `Remove`. Linkerd never sends
/// `no_endpoints`; a proxy that receives it fails fast instead of waiting.
pub(super) fn change(old: &Endpoints, new: &Endpoints) -> Bytes {
    let has = |endpoint: &SharedEndpoint| {
        let known = old.by_addr.get(&endpoint.addr);
        known.is_some_and(|known| **known == *endpoint && old.locality(known) == new.locality(endpoint))
    };
    let form = |endpoint: &SharedEndpoint| {
        let locality = new.locality(endpoint);
        endpoint.form(locality, |endpoint| message::weighted_addr(endpoint, Some(locality)).encode_to_vec().into())
    };
    let addrs: Vec<_> = new.by_addr.values().filter(|endpoint| !has(endpoint)).map(|endpoint| form(endpoint)).collect();
    let gone = old.by_addr.keys().filter(|addr| !new.by_addr.contains_key(addr));
    let gone: Vec<_> = gone.map(|addr| (*addr).into()).collect();
    let add = (!addrs.is_empty())
        .then(|| grpc::frame(&AddUpdate { add: Some(Add { addrs, metric_labels: new.labels.clone() }) }));
    let remove = (!gone.is_empty())
        .then(|| grpc::frame(&Update { update: Some(update::Update::Remove(AddrSet { addrs: gone })) }));
    match (add, remove) {
        (Some(add), Some(remove)) => [add, remove].concat().into(),
        (one, other) => one.or(other).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

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

    async fn updates(frames: Bytes) -> Vec<Update> {
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
        for update in updates(change(old, new)).await {
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
    async fn an_endpoint_shared_by_views_is_local_to_some_clients_only() {
        let mut view = state(&[("10.0.0.1:1", false, "a")]);
        for (zone, expected) in [(Some("a"), "local"), (Some("b"), "remote"), (None, "unknown"), (Some("a"), "local")] {
            view.client_zone = zone.map(str::to_owned);
            let updates = updates(change(&Endpoints::default(), &view)).await;
            let Some(update::Update::Add(set)) = &updates[0].update else { panic!("{updates:?}") };
            assert_eq!(set.addrs[0].metric_labels["zone_locality"], expected);
        }
    }
}
