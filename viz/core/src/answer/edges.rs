//! Edges: which workloads call which, with the identities of both.
//!
//! Clients' proxies name the pods that they reach and their identities; servers' proxies name the identities of their
//! clients. What both say is one edge. A client whose proxy is not read, because it is in another namespace or has
//! none, is known from the server alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use weft_proto::viz::{Edge, EdgesResponse, Resource};

use super::{Connections, Reading, Requests, is_inbound, is_outbound};
use crate::{
    collect::View,
    family::{Family, Name, Series},
    intern::Interner,
    target::{Key, Kind, Pods, Target},
};

#[derive(Default)]
struct Found {
    client: String,
    server: String,
    reason: String,
    http: Requests,
    tcp: Connections,
    denied: u64,
}

/// What servers say about a client: the destination, the client's identity, and why there is none.
type Accepted = (Key, String, String);

pub(crate) fn edges(
    view: &View,
    target: &Target,
    known: &Pods,
    window: Duration,
    interner: &Mutex<Interner>,
) -> EdgesResponse {
    let mut edges: BTreeMap<(Key, Key), Found> = BTreeMap::new();
    let mut accepted: BTreeMap<Accepted, Found> = BTreeMap::new();
    let accounts = accounts(target.kind, view);
    let mut reading = Reading::new(view, window);
    reading.proxies(
        |state| target.row_of(&state.pod),
        |own, state, span| {
            state.history.counted(span, |series: &Arc<Series>, counted| {
                let edge = match series.family {
                    Family::DeniedRequests | Family::DeniedConnections => {
                        let edge = accepted.entry(client_of(series, &own)).or_default();
                        edge.denied += counted.total;
                        edge
                    }
                    Family::Responses | Family::Latency | Family::Open | Family::Read | Family::Written => {
                        if is_outbound(series) {
                            let Some(destination) = target.kind.row_of_destination(series, known) else { return };
                            edges.entry((own.clone(), destination)).or_default()
                        } else if is_inbound(series) {
                            accepted.entry(client_of(series, &own)).or_default()
                        } else {
                            return;
                        }
                    }
                    _ => return,
                };
                edge.http.asked(span);
                edge.tcp.asked(span);
                match series.family {
                    Family::Responses => edge.http.add(series, &counted),
                    Family::Latency => edge.http.add_latency(series, &counted),
                    Family::DeniedRequests | Family::DeniedConnections => return,
                    _ => edge.tcp.add(series, &counted),
                }
                // One connection in plaintext among others is what somebody looks for.
                let reason = series.label(Name::NoTlsReason);
                if !reason.is_empty() {
                    reason.clone_into(&mut edge.reason);
                }
                let server = series.label(Name::ServerId);
                if !server.is_empty() {
                    server.clone_into(&mut edge.server);
                }
            });
        },
    );
    let coverage = reading.end();
    let rest = join(&mut edges, accepted, &accounts);
    let interner = interner.lock();
    let message = |source: Option<Resource>, destination: &Key, edge: &Found| Edge {
        source,
        destination: Some(destination.resource()),
        client_identity: edge.client.clone(),
        server_identity: edge.server.clone(),
        no_identity_reason: edge.reason.clone(),
        http: edge.http.golden(&interner),
        tcp: edge.tcp.tcp(),
        denied: edge.denied,
    };
    let is_seen = |edge: &Found| !edge.http.is_empty() || !edge.tcp.is_empty() || edge.denied > 0;
    let both = edges.iter().filter(|((source, destination), edge)| {
        // A namespace has traffic with itself; a pod with itself is its own loopback.
        is_seen(edge) && (source != destination || !edge.server.is_empty() || target.kind == Kind::Namespace)
    });
    let mut messages: Vec<Edge> =
        both.map(|((source, destination), edge)| message(Some(source.resource()), destination, edge)).collect();
    let servers = rest.iter().filter(|(_, edge)| is_seen(edge));
    messages.extend(servers.map(|((destination, client, _), edge)| message(account(client), destination, edge)));
    EdgesResponse { edges: messages, coverage: Some(coverage) }
}

fn client_of(series: &Series, own: &Key) -> Accepted {
    let label = |name| series.label(name).to_owned();
    (own.clone(), label(Name::ClientId), label(Name::NoTlsReason))
}

/// The rows that have pods of a ServiceAccount, by the beginning of its identity: `web.shop`. Also rows that the
/// request is not about.
type Accounts = BTreeMap<String, BTreeSet<Key>>;

fn accounts(kind: Kind, view: &View) -> Accounts {
    let mut accounts = Accounts::new();
    let counted = view.proxies.iter().map(|proxy| Arc::clone(&proxy.state().pod));
    for pod in view.pods.iter().filter(|pod| pod.proxy.is_some()).cloned().chain(counted) {
        let Some(row) = kind.row_of(&pod).or_else(|| Kind::Pod.row_of(&pod)) else { continue };
        accounts.entry(format!("{}.{}", pod.service_account, pod.namespace)).or_default().insert(row);
    }
    accounts
}

/// Adds to edges what their servers say, and returns what no edge is about.
fn join(
    edges: &mut BTreeMap<(Key, Key), Found>,
    accepted: BTreeMap<Accepted, Found>,
    accounts: &Accounts,
) -> BTreeMap<Accepted, Found> {
    let mut rest = BTreeMap::new();
    for (key, found) in accepted {
        let (destination, client, _) = &key;
        let rows = client.split_once(".serviceaccount.").and_then(|(account, _)| accounts.get(account));
        let mut is_known = false;
        for ((source, reached), edge) in edges.iter_mut() {
            let Some(rows) = rows.filter(|rows| reached == destination && rows.contains(source)) else { continue };
            client.clone_into(&mut edge.client);
            if rows.len() == 1 {
                edge.denied += found.denied;
            }
            is_known = true;
        }
        let (client, reason) = (key.1.clone(), key.2.clone());
        if !is_known {
            rest.insert(key, Found { client, reason, ..found });
        } else if found.denied > 0 && rows.is_some_and(|rows| rows.len() > 1) {
            // To a policy, all pods of a ServiceAccount are one client. Which of them it refused, nobody counts.
            rest.insert(key, Found { client, reason, denied: found.denied, ..Found::default() });
        }
    }
    rest
}

/// The ServiceAccount in an identity: `web.shop.serviceaccount.identity...`.
fn account(identity: &str) -> Option<Resource> {
    let (account, _) = identity.split_once(".serviceaccount.identity.")?;
    let (name, namespace) = account.rsplit_once('.')?;
    Some(Resource { namespace: namespace.to_owned(), kind: "serviceaccount".to_owned(), name: name.to_owned() })
}
