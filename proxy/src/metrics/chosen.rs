//! Labels whose values others choose: clients by the ports that they scan, the names in their requests and their
//! identities, and the application by the addresses that it dials. A number of values have labels of their own, and the
//! rest share `other`, so that there are never more series than there is room for.
//!
//! A value keeps its place for as long as a series has it. Series that are no longer used are removed
//! ([`retain`](super::retain)), so that last week's scan takes no place.

use std::{
    borrow::{Borrow, Cow},
    collections::{HashMap, HashSet},
    hash::Hash,
    net::SocketAddr,
    sync::Arc,
};

use parking_lot::Mutex;

use super::{Labels, label, target_labels};

/// The value that the others share.
pub(crate) const OTHER: &str = "other";

/// The values of the label `authority`.
pub(crate) type Authorities = LabelValues<128>;
/// The values of the label `client_id`.
pub(crate) type ClientIds = LabelValues<1024>;
/// The values of the label `target_name`: Services behind a gateway.
pub(crate) type TargetNames = LabelValues<128>;
/// Addresses with ports that the pod does not declare.
pub(super) type UndeclaredPorts = Addresses<128>;
/// Addresses that the application dials: all destinations, and endpoints about which discovery knows nothing. Each has
/// some twenty series, of a kilobyte each.
pub(crate) type DialledAddresses = Addresses<2048>;

/// The keys that have labels of their own, at most `MOST`, and whether each was asked for since the last release: then
/// its series may be about to be created.
#[derive(Debug)]
struct Places<K, const MOST: usize>(Mutex<HashMap<K, bool>>);

impl<K: Eq + Hash, const MOST: usize> Places<K, MOST> {
    /// Whether `key` has a place, which it takes if one is free.
    fn has<Q: Eq + Hash + ?Sized>(&self, key: &Q, owned: impl FnOnce(&Q) -> K) -> bool
    where
        K: Borrow<Q>,
    {
        let mut places = self.0.lock();
        if let Some(asked) = places.get_mut(key) {
            *asked = true;
            return true;
        }
        let is_free = places.len() < MOST;
        if is_free {
            places.insert(owned(key), true);
        }
        is_free
    }

    /// Frees the places of what no series has and nothing asked for since the last call.
    fn release(&self, is_in_use: impl Fn(&K) -> bool) {
        self.0.lock().retain(|key, asked| std::mem::take(asked) || is_in_use(key));
    }
}

impl<K, const MOST: usize> Default for Places<K, MOST> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// The values of a label that clients choose as text.
#[derive(Debug, Default)]
pub(crate) struct LabelValues<const MOST: usize>(Places<Box<str>, MOST>);

impl<const MOST: usize> LabelValues<MOST> {
    /// The longest of them, in bytes.
    const LONGEST: usize = 256;

    /// The label's value for what a client chose.
    pub(crate) fn value<'c>(&self, chosen: &'c str) -> &'c str {
        let has_own = chosen.len() <= Self::LONGEST && self.0.has(chosen, |chosen| chosen.into());
        if has_own { chosen } else { OTHER }
    }

    /// Frees the places of values that are not `in_use`.
    pub(super) fn release(&self, in_use: &HashSet<&str>) {
        self.0.release(|value| in_use.contains(&**value));
    }
}

/// The addresses that have labels of their own.
#[derive(Debug, Default)]
pub(crate) struct Addresses<const MOST: usize>(Places<SocketAddr, MOST>);

impl<const MOST: usize> Addresses<MOST> {
    /// Like [`target_labels`], with `other` in each label for an address beyond the limit.
    pub(crate) fn labels(&self, addr: SocketAddr) -> Labels {
        labels(self.have(addr), addr)
    }

    fn have(&self, addr: SocketAddr) -> bool {
        self.0.has(&addr, |addr| *addr)
    }

    /// Frees the places of those that are not in use.
    pub(super) fn release(&self, is_in_use: impl Fn(&SocketAddr) -> bool) {
        self.0.release(is_in_use);
    }
}

fn labels(has_own: bool, addr: SocketAddr) -> Labels {
    match has_own {
        true => target_labels(addr),
        false => ["target_addr", "target_ip", "target_port"].map(|key| label(key, OTHER)).into(),
    }
}

/// The target labels of inbound connections. Clients choose ports; of the ports that the pod does not declare, only a
/// limited number get their own labels, and the rest share one set, so that a scan of all ports leaves few series.
pub(crate) struct InboundTargets {
    declared: Vec<u16>,
    undeclared: Arc<UndeclaredPorts>,
}

impl InboundTargets {
    pub(super) fn new(declared: &[u16], undeclared: Arc<UndeclaredPorts>) -> Self {
        Self { declared: declared.to_vec(), undeclared }
    }

    /// Like [`target_labels`], with `other` in each label for an address beyond the limit.
    pub(crate) fn labels(&self, addr: SocketAddr) -> Labels {
        labels(self.has_own(addr), addr)
    }

    /// The port as a label's value.
    pub(crate) fn port(&self, addr: SocketAddr) -> Cow<'static, str> {
        if self.has_own(addr) { addr.port().to_string().into() } else { OTHER.into() }
    }

    fn has_own(&self, addr: SocketAddr) -> bool {
        self.declared.contains(&addr.port()) || self.undeclared.have(addr)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;

    use super::*;
    use crate::metrics::{Direction, Peer, ProxyMetrics};

    const IDLE: Duration = Duration::from_secs(600);

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    #[test]
    fn undeclared_ports_beyond_a_number_share_labels() {
        let targets = ProxyMetrics::default().inbound_targets(&[80]);
        let mut seen = HashSet::new();
        for port in 1000..=u16::MAX {
            seen.insert(targets.labels(address(port)));
            seen.insert(vec![label("port", targets.port(address(port)))]);
        }
        assert_eq!(seen.len(), 2 * (128 + 1));
        assert_eq!(targets.labels(address(1000)), target_labels(address(1000)), "the first ones keep their own");
        assert_eq!(targets.labels(address(80)), target_labels(address(80)));
        assert_eq!(targets.port(address(80)), "80");
    }

    #[test]
    fn values_beyond_a_number_share_a_label() {
        let authorities = Authorities::default();
        let hosts: Vec<String> = (0..1000).map(|number| format!("host-{number}:80")).collect();
        let values: HashSet<_> = hosts.iter().map(|host| authorities.value(host)).collect();
        assert_eq!(values.len(), 128 + 1);
        assert_eq!(authorities.value("host-0:80"), "host-0:80");
        assert_eq!(authorities.value("host-999:80"), "other");
        assert_eq!(Authorities::default().value(&"a".repeat(1000)), "other");
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_keeps_its_place_as_long_as_a_series_has_it() {
        let metrics = ProxyMetrics::register(&mut Registry::default());
        let targets = metrics.inbound_targets(&[]);
        let use_once = |port: u16, client: &str| {
            let mut labels = targets.labels(address(port));
            labels.push(label("client_id", metrics.client_ids.value(client).to_owned()));
            metrics.transport(Direction::Inbound, Peer::Src, &labels)
        };
        let own = |port: u16, client: &str| {
            (targets.port(address(port)) == port.to_string(), metrics.client_ids.value(client) == client)
        };
        let held = use_once(1, "client-1");
        // A scan of all ports, by clients that each use another name.
        for number in 2..3000 {
            drop(use_once(number, &format!("client-{number}")));
        }
        metrics.evict(IDLE);
        metrics.evict(IDLE);
        assert_eq!(own(2999, "client-2999"), (false, false), "the series of the first ones are still there");
        tokio::time::advance(IDLE).await;
        // Once because they were asked for just now, and once more because nothing has them.
        metrics.evict(IDLE);
        metrics.evict(IDLE);
        for number in 2000..2127 {
            assert_eq!(own(number, &format!("client-{number}")), (true, true), "{number}");
        }
        assert_eq!(targets.port(address(2127)), "other", "the connection that is still open has its place");
        assert_eq!(own(1, "client-1"), (true, true));
        drop(held);
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_that_the_application_dials_beyond_a_number_share_labels() {
        let metrics = ProxyMetrics::register(&mut Registry::default());
        let dial = |port: u16| {
            let labels = metrics.dialled.labels(address(port));
            drop(metrics.transport(Direction::Outbound, Peer::Src, &labels));
            labels
        };
        let seen: HashSet<_> = (1..10_000).map(dial).collect();
        assert_eq!(seen.len(), 2048 + 1);
        assert_eq!(dial(1), target_labels(address(1)), "the first ones keep their own");
        assert_eq!(dial(9_999), labels(false, address(9_999)));
        tokio::time::advance(IDLE).await;
        metrics.evict(IDLE);
        metrics.evict(IDLE);
        assert_eq!(dial(9_999), target_labels(address(9_999)), "no series has the first ones any more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_port_that_only_a_route_is_counted_for_keeps_its_place() {
        let metrics = ProxyMetrics::register(&mut Registry::default());
        let targets = metrics.inbound_targets(&[]);
        let route = metrics.inbound_route(false, &vec![label("parent_port", targets.port(address(1)))]);
        for port in 2..129 {
            assert_ne!(targets.port(address(port)), "other");
        }
        metrics.evict(IDLE);
        metrics.evict(IDLE);
        for port in 1001..1128 {
            assert_ne!(targets.port(address(port)), "other", "{port}");
        }
        assert_eq!(targets.port(address(1128)), "other");
        drop(route);
    }
}
