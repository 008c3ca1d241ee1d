//! Streams of endpoints that are in other clusters: of a Service of one linked cluster, or of a federated Service,
//! whose members are in several.
//!
//! What a stream follows is decided from the Service and from the clusters that are known; every change of either, and
//! of a member's endpoints, goes through [`Stream::advance`].

use bytes::Bytes;
use futures::{FutureExt, future, stream::unfold};
use tokio::sync::watch;
use tonic::Status;
use weft_index::{Discovery, Endpoints, EndpointsQuery, Index, Key, LinkedService, View};

use super::{Destination, federated::Union, too_many_ports};
use crate::{
    clusters::Known,
    stream::{self, Answering},
};

/// What a client asked for.
pub(super) struct Asked {
    pub(super) service: Key,
    pub(super) query: EndpointsQuery,
    /// The name as the client wrote it.
    pub(super) path: String,
}

/// A Service whose endpoints are part of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Here(String),
    There(LinkedService),
}

/// A part that is followed.
struct Member {
    wanted: Wanted,
    /// The index that it is followed in; 0 is this cluster's.
    number: u64,
    endpoints: View<Endpoints>,
}

struct Stream {
    answering: Answering,
    asked: Asked,
    /// What the client was promised: while it stays so, the stream goes on.
    promised: Discovery,
    discovery: watch::Receiver<Option<Discovery>>,
    known: watch::Receiver<Known>,
    members: Vec<Member>,
    union: Union,
    first: bool,
}

/// The answer to a request for a Service whose endpoints are elsewhere. The stream ends when the Service is deleted or
/// its endpoints are found in another way, when the one cluster of a linked Service is no longer linked, and when an
/// index does not answer.
///
/// # Errors
/// Linkerd's, if the Service does not say what it is called there, if the cluster is not linked, or if the Service
/// there is an ExternalName; those of [`Answering::ask`]; and when clients ask for too many ports of the Service there.
pub(super) async fn frames(
    destination: &Destination,
    asked: Asked,
    mut discovery: watch::Receiver<Option<Discovery>>,
) -> Result<impl futures::Stream<Item = Bytes> + Send + use<>, Status> {
    let promised = discovery.borrow_and_update().clone().unwrap_or(Discovery::Local);
    let known = destination.clusters.watch();
    let now = known.borrow().clone();
    check(&promised, &now, &asked).await?;
    let state = Stream {
        answering: destination.answering.clone(),
        asked,
        promised,
        discovery,
        known,
        members: Vec::new(),
        union: Union::new(destination.settings.clone()),
        first: true,
    };
    Ok(unfold(state, |mut state| async move { Some((state.next().await?, state)) }))
}

/// Whether a linked Service can be found.
async fn check(discovery: &Discovery, known: &Known, asked: &Asked) -> Result<(), Status> {
    let Discovery::Linked { cluster, service } = discovery else { return Ok(()) };
    let Some(service) = service else {
        let message = format!("Remote discovery service missing remote service name {}", asked.path);
        return Err(Status::failed_precondition(message));
    };
    let Some(linked) = known.clusters.get(cluster) else {
        // Clients ask again, instead of believing that there is no such cluster.
        return Err(match known.complete {
            true => Status::not_found(format!("Remote cluster not found: {cluster}")),
            false => Status::unavailable("linked clusters are not known yet"),
        });
    };
    let (there, port) = (Key::new(&asked.service.namespace, service), asked.query.port);
    let invalid = Status::invalid_argument(format!("Invalid authority: {}", asked.path));
    let question = move |index: &mut Index| match index.service(&there) {
        Some(record) if record.external => Err(invalid),
        _ if !index.has_room_for(&there, port) => Err(too_many_ports(&there)),
        _ => Ok(()),
    };
    stream::ask(&linked.index, question).await?
}

/// The Services whose endpoints make up the answer, in the order of their precedence. `None` ends the stream.
fn wanted(promised: &Discovery, now: Option<&Discovery>) -> Option<Vec<Wanted>> {
    match (promised, now?) {
        (Discovery::Federated { .. }, Discovery::Federated { local, linked }) => {
            Some(local.iter().cloned().map(Wanted::Here).chain(linked.iter().cloned().map(Wanted::There)).collect())
        }
        (_, Discovery::Linked { cluster, service: Some(service) }) if now == Some(promised) => {
            Some(vec![Wanted::There(LinkedService { cluster: cluster.clone(), service: service.clone() })])
        }
        _ => None,
    }
}

impl Stream {
    /// The next updates, or `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !std::mem::take(&mut self.first) && !self.changed().await {
                return None;
            }
            let updates = self.advance().await?;
            if !updates.is_empty() {
                return Some(updates);
            }
        }
    }

    /// Waits for a change; false if there will be none.
    async fn changed(&mut self) -> bool {
        let Self { discovery, known, members, answering, .. } = self;
        let any_member = async {
            let changes = members.iter_mut().map(|member| member.endpoints.changed().map(drop).boxed());
            let changes: Vec<_> = changes.collect();
            if changes.is_empty() { future::pending().await } else { future::select_all(changes).await.0 }
        };
        tokio::select! {
            () = answering.drain.signaled() => false,
            changed = discovery.changed() => changed.is_ok(),
            changed = known.changed() => changed.is_ok(),
            () = any_member => true,
        }
    }

    /// Follows what is wanted now. The result is what that changes for the client; `None` ends the stream.
    async fn advance(&mut self) -> Option<Bytes> {
        let now = self.discovery.borrow_and_update().clone();
        let wanted = wanted(&self.promised, now.as_ref())?;
        let known = self.known.borrow_and_update().clone();
        let only = matches!(self.promised, Discovery::Linked { .. });
        let mut old = std::mem::take(&mut self.members);
        let mut members = Vec::new();
        for wanted in wanted {
            let number = match &wanted {
                Wanted::Here(_) => 0,
                Wanted::There(there) => match known.clusters.get(&there.cluster) {
                    Some(linked) if linked.synced => linked.number,
                    Some(_) => continue,
                    None if only => return None,
                    None => continue,
                },
            };
            let is_same = |member: &Member| {
                // An index ends a subscription that its clients are to start anew.
                member.wanted == wanted && member.number == number && member.endpoints.has_changed().is_ok()
            };
            let endpoints = old.iter().position(is_same).map(|at| old.swap_remove(at).endpoints);
            members.push((wanted, number, endpoints));
        }
        // New ones are asked side by side: one that is slow holds up the answer once, however many there are.
        let new = members.iter().filter(|(_, _, endpoints)| endpoints.is_none());
        let new = new.map(|(wanted, ..)| self.follow(wanted, &known));
        let mut new = future::try_join_all(new).await.ok()?.into_iter();
        for (wanted, number, endpoints) in members {
            match endpoints.or_else(|| new.next().flatten()) {
                Some(endpoints) => self.members.push(Member { wanted, number, endpoints }),
                None if only => return None,
                None => {}
            }
        }
        let snapshots: Vec<_> =
            self.members.iter_mut().map(|member| member.endpoints.borrow_and_update().clone()).collect();
        Some(self.union.advance(&snapshots))
    }

    /// Subscribes to a member's endpoints. `None` if its cluster is not linked, or has too many views of the member.
    async fn follow(&self, wanted: &Wanted, known: &Known) -> Result<Option<View<Endpoints>>, Status> {
        let (query, namespace) = (self.asked.query.clone(), &self.asked.service.namespace);
        match wanted {
            Wanted::Here(name) => {
                let service = Key::new(namespace, name);
                let question = move |index: &mut Index| {
                    index.has_room_for(&service, query.port).then(|| index.watch_endpoints(&service, query))
                };
                self.answering.ask(question).await
            }
            Wanted::There(there) => {
                let Some(linked) = known.clusters.get(&there.cluster) else { return Ok(None) };
                let EndpointsQuery { port, node, hostname } = query;
                let zone = match node {
                    Some(node) => self.answering.ask(move |index| index.zone_of(&node)).await?,
                    None => None,
                };
                let service = Key::new(namespace, &there.service);
                let question = move |index: &mut Index| {
                    let has_room = index.has_room_for(&service, port);
                    has_room.then(|| index.watch_endpoints_from_afar(&service, port, hostname, zone))
                };
                stream::ask(&linked.index, question).await
            }
        }
    }
}

#[cfg(test)]
mod tests;
