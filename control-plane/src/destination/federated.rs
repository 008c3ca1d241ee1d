//! The endpoints of several Services as those of one.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use weft_index::{Endpoints, Snapshot};

use super::{endpoints, message::EndpointSettings};

/// The endpoints that the client has, each with the snapshot that it is from: members differ in labels.
///
/// Where several members have an address, the first of them counts; when it leaves, the address becomes the next one's.
pub(super) struct Union {
    sent: BTreeMap<SocketAddr, Arc<Snapshot<Endpoints>>>,
    settings: EndpointSettings,
}

impl Union {
    /// For a client that has nothing.
    pub(super) fn new(settings: EndpointSettings) -> Self {
        Self { sent: BTreeMap::new(), settings }
    }

    /// The updates that turn what the client has into the members' endpoints: an `Add` for each member with new or
    /// changed ones, then a `Remove`.
    pub(super) fn advance(&mut self, members: &[Arc<Snapshot<Endpoints>>]) -> Bytes {
        let mut now: BTreeMap<SocketAddr, Arc<Snapshot<Endpoints>>> = BTreeMap::new();
        let mut updates = Vec::new();
        for member in members {
            let mut changed = Vec::new();
            for (addr, endpoint) in &member.by_addr {
                if now.contains_key(addr) {
                    continue;
                }
                now.insert(*addr, member.clone());
                let same = |sent: &Arc<Snapshot<Endpoints>>| {
                    Arc::ptr_eq(sent, member)
                        || (sent.labels == member.labels && endpoints::has(sent, member, endpoint))
                };
                if !self.sent.get(addr).is_some_and(same) {
                    changed.push(&**endpoint);
                }
            }
            updates.extend(endpoints::add(member, changed, &self.settings));
        }
        updates.extend(endpoints::remove(self.sent.keys().filter(|addr| !now.contains_key(addr))));
        self.sent = now;
        endpoints::together(&updates)
    }
}

#[cfg(test)]
mod tests {
    use weft_index::{Endpoint, SharedEndpoint};
    use weft_proto::linkerd::destination::update;

    use super::*;
    use crate::destination::endpoints::tests::updates;

    fn endpoint(port: u16, opaque: bool) -> (SocketAddr, Arc<SharedEndpoint>) {
        let addr = SocketAddr::from(([10, 0, 0, 1], port));
        let endpoint = Endpoint { opaque, zone: Some("a".to_owned()), ..Endpoint::plain(addr) };
        (addr, Arc::new(SharedEndpoint::new(endpoint)))
    }

    fn endpoints(service: &str, ports: &[u16]) -> Endpoints {
        let labels = [("service".to_owned(), service.to_owned())].into();
        let by_addr = ports.iter().map(|port| endpoint(*port, false)).collect();
        Endpoints { by_addr, labels, client_zone: Some("a".to_owned()) }
    }

    fn member(service: &str, ports: &[u16]) -> Arc<Snapshot<Endpoints>> {
        Arc::new(Snapshot::first(endpoints(service, ports)))
    }

    /// `+` for added ports with the set's label, `-` for removed ones, in the order of messages.
    async fn check(union: &mut Union, members: &[Arc<Snapshot<Endpoints>>], expected: &str) {
        let mut got = Vec::new();
        for update in updates(union.advance(members)).await {
            match update.update.unwrap() {
                update::Update::Add(set) => {
                    let ports: Vec<_> = set.addrs.iter().map(|one| one.addr.unwrap().port.to_string()).collect();
                    got.push(format!("{}+{}", set.metric_labels["service"], ports.join("+")));
                }
                update::Update::Remove(set) => {
                    got.extend(set.addrs.iter().map(|addr| format!("-{}", addr.port)));
                }
                update::Update::NoEndpoints(_) => got.push("none".to_owned()),
            }
        }
        assert_eq!(got.join(" "), expected);
    }

    fn union() -> Union {
        Union::new(EndpointSettings::default())
    }

    #[tokio::test]
    async fn members_are_added_each_with_its_labels_and_removed_when_they_leave() {
        let mut union = union();
        check(&mut union, &[], "").await;
        check(&mut union, &[member("here", &[1, 2])], "here+1+2").await;
        check(&mut union, &[member("here", &[1, 2]), member("east", &[3])], "east+3").await;
        check(&mut union, &[member("here", &[1, 2]), member("east", &[3])], "").await;
        check(&mut union, &[member("here", &[1]), member("east", &[3, 4])], "east+4 -2").await;
        check(&mut union, &[member("east", &[3, 4])], "-1").await;
        check(&mut union, &[], "-3 -4").await;
    }

    #[tokio::test]
    async fn a_member_without_endpoints_is_no_message() {
        check(&mut union(), &[member("here", &[]), member("east", &[])], "").await;
    }

    #[tokio::test]
    async fn an_address_of_several_members_is_the_first_ones_and_stays_when_it_leaves() {
        let mut union = union();
        check(&mut union, &[member("here", &[1]), member("east", &[1, 2])], "here+1 east+2").await;
        check(&mut union, &[member("east", &[1, 2])], "east+1").await;
        check(&mut union, &[member("here", &[1]), member("east", &[1, 2])], "here+1").await;
        check(&mut union, &[member("here", &[1])], "-2").await;
    }

    #[tokio::test]
    async fn a_changed_endpoint_and_changed_labels_are_added_again() {
        let mut union = union();
        check(&mut union, &[member("here", &[1, 2])], "here+1+2").await;
        let mut changed = endpoints("here", &[1, 2]);
        changed.by_addr.extend([endpoint(1, true)]);
        check(&mut union, &[Arc::new(Snapshot::first(changed.clone()))], "here+1").await;
        let elsewhere = Endpoints { client_zone: Some("b".to_owned()), ..changed };
        check(&mut union, &[Arc::new(Snapshot::first(elsewhere))], "here+1+2").await;
        check(&mut union, &[member("there", &[1])], "there+1 -2").await;
    }
}
