//! The limits of what a worker has at once: requests in flight, connections of clients and to the application. What is
//! beyond them is shed.
//!
//! Owns that one client cannot have all of it: in the upper half of a limit, a client has a sixteenth of it at most.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

/// Counts requests, or connections, up to a limit. Clones share the count.
#[derive(Clone, Debug)]
pub(crate) struct SharedLimit {
    count: Arc<AtomicUsize>,
    limit: usize,
    /// The limit of one client, where there is one.
    of_a_client: usize,
    clients: Arc<Mutex<HashMap<IpAddr, Weak<AtomicUsize>>>>,
}

/// Those of one client, over all of its connections.
#[derive(Clone, Debug)]
pub(crate) struct ClientShare(Arc<AtomicUsize>);

/// The permit of a request in flight, held until the end of the response, or of the tunnel that it opens; or of a
/// connection, held until it is closed.
#[derive(Debug)]
pub(crate) struct Permit {
    _all: Counted,
    _client: Option<Counted>,
}

/// One more, until it is dropped.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl SharedLimit {
    /// Admits at most `limit` at once.
    pub(crate) fn new(limit: usize) -> Self {
        Self { count: Arc::default(), limit, of_a_client: usize::MAX, clients: Arc::default() }
    }

    /// The same with a limit for each client.
    pub(crate) fn of_a_client(self, limit: Option<usize>) -> Self {
        Self { of_a_client: limit.unwrap_or(usize::MAX), ..self }
    }

    /// Those of the client at this address, of IPv4 also where a socket of IPv6 names it.
    pub(crate) fn client(&self, addr: IpAddr) -> ClientShare {
        let mut clients = self.clients.lock();
        let known = clients.entry(addr.to_canonical()).or_default();
        let requests = known.upgrade().unwrap_or_default();
        *known = Arc::downgrade(&requests);
        ClientShare(requests)
    }

    /// How many there are.
    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Forgets clients that have nothing.
    pub(crate) fn sweep(&self) {
        self.clients.lock().retain(|_, requests| requests.strong_count() > 0);
    }

    /// Admits one; `None` if there are too many.
    pub(crate) fn admit(&self) -> Option<Permit> {
        let (before, all) = Counted::begin(&self.count);
        (before < self.limit).then_some(Permit { _all: all, _client: None })
    }

    /// Admits one that a client's request needs, and that does not count as the client's; `None` if there are too many,
    /// or many while more of the client's `requests` are in flight than its share.
    pub(crate) fn admit_for(&self, requests: &ClientShare) -> Option<Permit> {
        let (before, all) = Counted::begin(&self.count);
        let has_share = before < self.limit / 2 || requests.0.load(Ordering::Relaxed) <= self.share();
        (before < self.limit && has_share).then_some(Permit { _all: all, _client: None })
    }

    /// Admits one of a client's; `None` if there are too many, or too many of this client's while there are many.
    pub(crate) fn admit_from(&self, client: &ClientShare) -> Option<Permit> {
        let (before, all) = Counted::begin(&self.count);
        let (of_client, client) = Counted::begin(&client.0);
        let has_share = before < self.limit / 2 || of_client < self.share();
        (before < self.limit && has_share && of_client < self.of_a_client)
            .then_some(Permit { _all: all, _client: Some(client) })
    }

    /// What one client may have where there are many.
    fn share(&self) -> usize {
        (self.limit / 16).max(1)
    }
}

impl Counted {
    /// How many there were before.
    fn begin(count: &Arc<AtomicUsize>) -> (usize, Self) {
        (count.fetch_add(1, Ordering::Relaxed), Self(Arc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_in_flight_than_allowed() {
        let limit = SharedLimit::new(1);
        let first = limit.admit();
        assert!(first.is_some());
        assert!(limit.clone().admit().is_none());
        drop(first);
        assert!(limit.admit().is_some());
        assert_eq!(limit.taken(), 0);
    }

    #[test]
    fn each_client_may_have_one_while_there_is_room() {
        let limit = SharedLimit::new(3);
        let clients = [1, 2, 3].map(|last| limit.client(IpAddr::from([10, 0, 0, last])));
        let held = clients.each_ref().map(|client| limit.admit_from(client));
        assert!(held.iter().all(Option::is_some), "{held:?}");
        assert!(clients.iter().all(|client| limit.admit_from(client).is_none()));
    }

    #[test]
    fn what_requests_need_is_for_clients_with_few_of_them_where_there_is_much() {
        let (requests, connections) = (SharedLimit::new(1000), SharedLimit::new(32));
        let [many, few] = [1, 2].map(|last| requests.client(IpAddr::from([10, 0, 0, last])));
        let _in_flight: Vec<_> = (0..32).map(|_| requests.admit_from(&many)).collect();
        let _one = requests.admit_from(&few);
        let mut open: Vec<_> = (0..32).filter_map(|_| connections.admit_for(&many)).collect();
        assert_eq!(open.len(), 16, "half of all");
        open.extend((0..32).filter_map(|_| connections.admit_for(&few)));
        assert_eq!(open.len(), 32, "it has one request in flight, and others opened the rest");
        open.pop();
        assert!(connections.admit_for(&many).is_none() && connections.admit_for(&few).is_some());
    }

    #[test]
    fn one_client_cannot_have_all_requests_in_flight() {
        let limit = SharedLimit::new(160);
        let addr = |last| IpAddr::from([10, 0, 0, last]);
        let greedy = [limit.client(addr(1)), limit.client(addr(1))];
        let held: Vec<_> = greedy.iter().cycle().take(200).filter_map(|client| limit.admit_from(client)).collect();
        assert_eq!(held.len(), 80, "half of all, over its connections");
        let others: Vec<_> = (2..=10).map(|last| limit.client(addr(last))).collect();
        let served: Vec<_> = others.iter().cycle().take(200).filter_map(|client| limit.admit_from(client)).collect();
        assert_eq!(served.len(), 80, "all that is left, and none has more than a sixteenth");
        drop((held, served));
        assert_eq!(limit.taken(), 0);
        let bounded = limit.clone().of_a_client(Some(3));
        let held: Vec<_> = (0..10).filter_map(|_| bounded.admit_from(&others[0])).collect();
        assert_eq!(held.len(), 3);
        drop((held, greedy, others));
        limit.sweep();
        assert!(limit.clients.lock().is_empty());
    }
}
