//! Clients' shares of the connections that a worker holds.
//!
//! Owns that one client cannot have all of them: in the upper half of the listener's limit, an address has a sixteenth
//! of it at most, as of the requests in flight. The listener keeps to the limit itself.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use parking_lot::Mutex;

use crate::http::in_flight::has_share;

/// The connections of each client, up to its share.
#[derive(Debug)]
pub(super) struct ConnectionShares {
    /// The most connections of all clients.
    limit: usize,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    /// Addresses with a connection.
    by_client: HashMap<IpAddr, usize>,
}

/// A connection that counts for its client until this is dropped.
#[derive(Debug)]
pub(super) struct CountedConnection {
    open: Arc<Mutex<Open>>,
    client: IpAddr,
}

impl ConnectionShares {
    /// Shares of at most `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    /// Counts a connection of the client at this address; `None` if the client has its share already.
    pub(super) fn admit(&self, client: IpAddr) -> Option<CountedConnection> {
        let mut open = self.open.lock();
        let of_client = open.by_client.get(&client).copied().unwrap_or_default();
        if !has_share(open.all, of_client, self.limit) {
            return None;
        }
        open.all += 1;
        open.by_client.insert(client, of_client + 1);
        Some(CountedConnection { open: Arc::clone(&self.open), client })
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        open.all -= 1;
        if let Entry::Occupied(mut of_client) = open.by_client.entry(self.client) {
            *of_client.get_mut() -= 1;
            if *of_client.get() == 0 {
                of_client.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_cannot_have_all_connections() {
        let shares = ConnectionShares::new(160);
        let (greedy, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let opened = |client| (0..200).filter_map(|_| shares.admit(client)).collect::<Vec<_>>();
        let held = opened(greedy);
        assert_eq!(held.len(), 80, "half of all");
        let of_another = opened(other);
        assert_eq!(of_another.len(), 10, "a sixteenth of all");
        drop(of_another);
        assert!(shares.admit(greedy).is_none());
        drop(held);
        assert_eq!(opened(greedy).len(), 80, "closed connections do not count");
        let open = shares.open.lock();
        assert!(open.all == 0 && open.by_client.is_empty(), "{open:?}");
    }

    #[test]
    fn a_client_may_always_have_a_connection_while_the_listener_has_room() {
        let shares = ConnectionShares::new(3);
        let clients = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let held = clients.map(|client| shares.admit(client));
        assert!(held.iter().all(Option::is_some), "{held:?}");
        assert!(clients.iter().all(|client| shares.admit(*client).is_none()));
    }
}
