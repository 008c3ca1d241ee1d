//! Point 5 and the counters: no netfilter state in any pod, the proxies' records of connections and original
//! destinations, and the kernel's own counters.

use std::collections::BTreeSet;

use anyhow::Context as _;
use weft_proto::agent::Direction;
use weft_test_kit::{agent, mesh::Pod, observe};

use super::Stage;

impl Stage<'_> {
    pub(super) async fn inspect(&mut self) -> anyhow::Result<()> {
        println!("\n5. no rule and no tracked connection in any pod; what applications and proxies saw");
        let pods = self.mesh.pods().await?;
        let meshed: BTreeSet<_> = pods.iter().filter(|pod| pod.meshed).flat_map(Pod::addresses).collect();
        for pod in &pods {
            let state = observe::netfilter(&pod.netns).with_context(|| format!("inspect {}", pod.name))?;
            self.summary.iptables_rules += state.rules as u64;
            self.summary.conntrack_entries += state.conntrack as u64;
        }
        println!(
            "  {} pods: {} rules, {} tracked connections",
            pods.len(),
            self.summary.iptables_rules,
            self.summary.conntrack_entries
        );
        let services = self.mesh.service_ips().await?;
        let mut originals = BTreeSet::new();
        for pod in pods.iter().filter(|pod| pod.meshed) {
            let metrics = self.mesh.metrics(&pod.namespace, &pod.name).await?;
            // Connections of a pod to itself stay on its loopback and need no TLS.
            let others = meshed.iter().filter(|ip| !pod.has(ip)).cloned().collect();
            let between = metrics.connections_to(&others);
            self.summary.mtls_connections += between.mtls;
            self.summary.plaintext_connections += between.plaintext;
            originals.extend(metrics.original_destinations().into_iter().filter(|ip| services.contains(ip)));
        }
        self.summary.original_destinations = originals.len() as u64;
        println!(
            "  between meshed pods: {} connections with mutual TLS, {} without",
            self.summary.mtls_connections, self.summary.plaintext_connections
        );
        println!("  proxies saw the original destinations {}", Vec::from_iter(originals).join(", "));
        println!("  applications saw another peer than dialled on {} loads", self.summary.peer_mismatches);

        let status = self.mesh.agent().await?.status().await?;
        self.summary.redirected_outbound = agent::verdicts(&status, Direction::Outbound, agent::REDIRECT);
        self.summary.redirected_inbound = agent::verdicts(&status, Direction::Inbound, agent::REDIRECT);
        self.summary.flow_misses = status.flow_misses;
        println!(
            "  the kernel redirected {} connections outbound and {} inbound; {} without a known destination",
            self.summary.redirected_outbound, self.summary.redirected_inbound, self.summary.flow_misses
        );
        Ok(())
    }
}
