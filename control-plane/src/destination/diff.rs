//! From endpoint snapshots to `Add` and `Remove`.

use std::sync::Arc;

use weft_proto::linkerd::destination::{AddrSet, Update, WeightedAddrSet, update};

use super::message;
use weft_index::Endpoints;

/// The snapshot that the client has.
///
/// A Service without endpoints sends nothing at all, and its deletion sends one `Remove`. Linkerd never sends
/// `no_endpoints`; a proxy that receives it fails fast instead of waiting.
#[derive(Default)]
pub(super) struct Diff(Arc<Endpoints>);

impl Diff {
    /// The updates from the last snapshot to this one; an endpoint that changed in any way is added again.
    pub(super) fn advance(&mut self, new: &Arc<Endpoints>) -> Vec<Update> {
        let old = std::mem::replace(&mut self.0, new.clone());
        let changed = new.by_addr.values().filter(|endpoint| old.by_addr.get(&endpoint.addr) != Some(endpoint));
        let add: Vec<_> = changed.map(message::weighted_addr).collect();
        let gone = old.by_addr.keys().filter(|addr| !new.by_addr.contains_key(addr));
        let remove: Vec<_> = gone.map(|addr| (*addr).into()).collect();
        let mut updates = Vec::new();
        if !add.is_empty() {
            let set = WeightedAddrSet { addrs: add, metric_labels: message::map(&new.labels) };
            updates.push(Update { update: Some(update::Update::Add(set)) });
        }
        if !remove.is_empty() {
            updates.push(Update { update: Some(update::Update::Remove(AddrSet { addrs: remove })) });
        }
        updates
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use weft_index::Endpoint;

    fn snapshot(endpoints: &[(&str, bool)]) -> Arc<Endpoints> {
        let by_addr = endpoints.iter().map(|(addr, opaque)| {
            let addr: SocketAddr = addr.parse().unwrap();
            (addr, Endpoint { opaque: *opaque, ..Endpoint::plain(addr) })
        });
        Arc::new(Endpoints { by_addr: by_addr.collect(), ..Endpoints::default() })
    }

    /// `+` for added and `-` for removed ports, in the order of messages.
    fn check(diff: &mut Diff, endpoints: &[(&str, bool)], expected: &str) {
        let mut got = String::new();
        for update in diff.advance(&snapshot(endpoints)) {
            match update.update.unwrap() {
                update::Update::Add(set) => set.addrs.iter().for_each(|a| got += &format!("+{}", a.addr.unwrap().port)),
                update::Update::Remove(set) => set.addrs.iter().for_each(|a| got += &format!("-{}", a.port)),
                update::Update::NoEndpoints(_) => got += "none",
            }
        }
        assert_eq!(got, expected);
    }

    #[test]
    fn sends_only_differences() {
        let mut diff = Diff::default();
        check(&mut diff, &[], "");
        check(&mut diff, &[("10.0.0.1:1", false), ("10.0.0.1:2", false)], "+1+2");
        check(&mut diff, &[("10.0.0.1:1", false), ("10.0.0.1:2", false)], "");
        check(&mut diff, &[("10.0.0.1:1", true), ("10.0.0.1:3", false)], "+1+3-2");
        check(&mut diff, &[], "-1-3");
    }
}
