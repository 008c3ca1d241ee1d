//! The demo's measurements, as one JSON object and as a table, and whether the mesh kept its promises.

use std::collections::BTreeMap;

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

/// The protocols that the demo speaks, as keys of the object's `protocols`.
pub const PROTOCOLS: [&str; 5] = ["http1", "http2", "grpc", "websocket", "tcp_server_first"];

/// All measurements of the demo. Each field is counted while the demo runs; none is assumed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Requests that policy allows.
    pub requests: u64,
    /// Those of them that the application did not answer.
    pub failures: u64,
    /// Connections between meshed pods with mutual TLS, as the clients' proxies counted them.
    pub mtls_connections: u64,
    /// Connections between meshed pods without.
    pub plaintext_connections: u64,
    /// Requests that policy refused, as their clients observed it.
    pub denied: u64,
    /// Requests that policy should have refused and did not.
    pub wrongly_allowed: u64,
    /// Connections that the kernel redirected to a proxy's outbound listener.
    pub redirected_outbound: u64,
    /// Connections that the kernel steered to a proxy's inbound listener.
    pub redirected_inbound: u64,
    /// Netfilter rules in all pods.
    pub iptables_rules: u64,
    /// Tracked connections in all pods.
    pub conntrack_entries: u64,
    /// Requests that failed while the agent was killed and restarted.
    pub agent_restart_failures: u64,
    /// Requests sent during that time, each on a new connection.
    pub agent_restart_requests: u64,
    /// Connections that were not redirected during that time.
    pub agent_restart_unredirected: u64,
    /// Connections on a proxy's outbound listener without a known original destination.
    pub flow_misses: u64,
    /// Kernel verdicts seen on the trace while requests ran.
    pub trace_events: u64,
    /// Connections on which the application's peer address was not the one that it dialled.
    pub peer_mismatches: u64,
    /// Original destinations (Service addresses) that client proxies reported.
    pub original_destinations: u64,
    /// From a meshed pod's start to its proxy being ready, milliseconds.
    pub pods_ready_ms: ReadyMs,
    /// Successful requests by protocol.
    pub protocols: BTreeMap<&'static str, u64>,
    /// Pods that answered, by Service.
    pub backends: BTreeMap<String, usize>,
    /// Leftovers after the clean-up.
    pub left_behind: Vec<String>,
    /// Broken promises, in words; empty if all were kept.
    pub broken_promises: Vec<String>,
}

/// Two points of a distribution, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ReadyMs {
    /// The median; of an even number, the upper one.
    pub p50: u64,
    /// All were ready by then.
    pub max: u64,
}

impl ReadyMs {
    /// Of any number of pods; zero for none.
    pub fn of(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        Self { p50: times.get(times.len() / 2).copied().unwrap_or(0), max: times.last().copied().unwrap_or(0) }
    }
}

impl Summary {
    /// Compares the numbers with the mesh's promises and records the broken ones.
    pub fn judge(&mut self) {
        let zero = [
            ("requests failed", self.failures),
            ("connections between meshed pods were plaintext", self.plaintext_connections),
            ("requests were allowed against policy", self.wrongly_allowed),
            ("netfilter rules are in pods", self.iptables_rules),
            ("connections are tracked in pods", self.conntrack_entries),
            ("requests failed while the agent restarted", self.agent_restart_failures),
            ("connections were not redirected while the agent restarted", self.agent_restart_unredirected),
            ("connections had no original destination", self.flow_misses),
            ("connections showed another peer than the one dialled", self.peer_mismatches),
        ];
        let some = [
            ("no request was sent", self.requests),
            ("no connection had mutual TLS", self.mtls_connections),
            ("nothing was refused", self.denied),
            ("nothing was redirected outbound", self.redirected_outbound),
            ("nothing was redirected inbound", self.redirected_inbound),
            ("the trace showed nothing", self.trace_events),
            ("no request was sent while the agent restarted", self.agent_restart_requests),
            ("no proxy reported a Service's address as original destination", self.original_destinations),
            ("no pod reported when it was ready", self.pods_ready_ms.max),
        ];
        let mut broken = std::mem::take(&mut self.broken_promises);
        broken.extend(zero.iter().filter(|(_, count)| *count != 0).map(|(what, count)| format!("{count} {what}")));
        broken.extend(some.iter().filter(|(_, count)| *count == 0).map(|(what, _)| (*what).to_owned()));
        for protocol in PROTOCOLS {
            if self.protocols.get(protocol).is_none_or(|count| *count == 0) {
                broken.push(format!("no {protocol} request was answered"));
            }
        }
        for (service, backends) in &self.backends {
            if *backends < 2 {
                broken.push(format!("{service} was answered by {backends} pod: not balanced"));
            }
        }
        broken.extend(self.left_behind.iter().map(|thing| format!("left behind: {thing}")));
        self.broken_promises = broken;
    }

    /// The numbers as a table for people.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        let protocols: Vec<_> = self.protocols.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let rows = [
            ("requests / failures", format!("{} / {}", self.requests, self.failures)),
            ("by protocol", protocols.join(", ")),
            (
                "connections with mutual TLS / plaintext",
                format!("{} / {}", self.mtls_connections, self.plaintext_connections),
            ),
            ("refused by policy", self.denied.to_string()),
            ("redirected outbound / inbound", format!("{} / {}", self.redirected_outbound, self.redirected_inbound)),
            ("kernel verdicts traced", self.trace_events.to_string()),
            (
                "agent killed: requests / failures / unredirected",
                format!(
                    "{} / {} / {}",
                    self.agent_restart_requests, self.agent_restart_failures, self.agent_restart_unredirected
                ),
            ),
            (
                "iptables rules / conntrack entries in pods",
                format!("{} / {}", self.iptables_rules, self.conntrack_entries),
            ),
            ("pods ready, p50 / max", format!("{} / {} ms", self.pods_ready_ms.p50, self.pods_ready_ms.max)),
        ];
        for (name, value) in rows {
            table.add_row([name, value.as_str()]);
        }
        table.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Summary {
        Summary {
            requests: 10,
            mtls_connections: 3,
            denied: 2,
            redirected_outbound: 5,
            redirected_inbound: 5,
            agent_restart_requests: 100,
            trace_events: 9,
            original_destinations: 2,
            pods_ready_ms: ReadyMs { p50: 10, max: 20 },
            protocols: PROTOCOLS.iter().map(|name| (*name, 2)).collect(),
            backends: [("web".to_owned(), 3)].into(),
            ..Summary::default()
        }
    }

    #[test]
    fn kept_promises_are_not_broken() {
        let mut summary = kept();
        summary.judge();
        assert_eq!(summary.broken_promises, Vec::<String>::new());
    }

    #[test]
    fn each_broken_promise_is_named() {
        let mut summary = Summary { failures: 1, iptables_rules: 4, mtls_connections: 0, ..kept() };
        summary.protocols.remove("grpc");
        summary.backends.insert("web".to_owned(), 1);
        summary.left_behind.push("cgroup x".to_owned());
        summary.judge();
        assert_eq!(
            summary.broken_promises,
            [
                "1 requests failed",
                "4 netfilter rules are in pods",
                "no connection had mutual TLS",
                "no grpc request was answered",
                "web was answered by 1 pod: not balanced",
                "left behind: cgroup x"
            ]
        );
    }

    #[test]
    fn readiness_is_summarised_by_median_and_maximum() {
        let ready = ReadyMs::of(vec![30, 10, 20]);
        assert_eq!((ready.p50, ready.max), (20, 30));
        assert_eq!(ReadyMs::of(Vec::new()).max, 0);
    }
}
