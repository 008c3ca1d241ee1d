//! What the nodes forward between pods, as their kernel sees it: connections to an application's own port go around a
//! proxy, if all of its clients are meshed. They are seen by their first packets, because others of connections that
//! ended come late.

use std::{
    collections::BTreeSet,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use weft_tests::cluster::Cluster;

use crate::{kernel, requirement::NODES_ELSEWHERE};

const TABLE: &str = "weft_test";

/// Looks for connections to a port until it is dropped.
pub(super) struct Wire<'a> {
    cluster: &'a Cluster,
    kubelets: Vec<PathBuf>,
}

impl<'a> Wire<'a> {
    /// Begins to look. Requires nodes on this host.
    pub(super) fn to_port(cluster: &'a Cluster, port: u16) -> Self {
        let wire = Self { cluster, kubelets: kernel::kubelets() };
        assert!(!wire.kubelets.is_empty(), "{NODES_ELSEWHERE}");
        let families = [("ip", "ipv4_addr"), ("ip6", "ipv6_addr")];
        let sets = families.map(|(family, address)| {
            format!("set seen_{family} {{ type {address} . inet_service . {address}; flags dynamic; size 65535; }}\n")
        });
        let rules = families.map(|(family, _)| {
            let seen = format!("{family} saddr . tcp sport . {family} daddr");
            format!("tcp dport {port} tcp flags & (syn | ack) == syn add @seen_{family} {{ {seen} }}\n")
        });
        let (sets, rules) = (sets.concat(), rules.concat());
        let table = format!(
            "table inet {TABLE} {{}}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n{sets}\
             chain forward {{\ntype filter hook forward priority 0;\n{rules}}}\n}}\n"
        );
        wire.kubelets.iter().for_each(|kubelet| wire.nft(kubelet, &table));
        wire
    }

    /// The nodes' kubelets, as directories in /proc.
    pub(super) fn kubelets(&self) -> &[PathBuf] {
        &self.kubelets
    }

    /// The connections so far, as "client to server".
    pub(super) fn connections(&self) -> BTreeSet<String> {
        self.kubelets.iter().flat_map(|kubelet| self.seen(kubelet)).collect()
    }

    fn seen(&self, kubelet: &Path) -> Vec<String> {
        let listed = self.command(kubelet, &["-j", "list", "table", "inet", TABLE]).output().unwrap();
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        let sets: Vec<_> = listed["nftables"].as_array().unwrap().iter().filter(|e| !e["set"].is_null()).collect();
        assert_eq!(sets.len(), 2, "{listed:#}");
        let elements = sets.iter().filter_map(|entry| entry["set"]["elem"].as_array()).flatten();
        let [client, port, server] = [0, 1, 2];
        elements
            .map(|element| &element["concat"])
            .map(|of| format!("{} {} to {}", of[client], of[port], of[server]).replace('"', ""))
            .collect()
    }

    fn nft(&self, kubelet: &Path, commands: &str) {
        let mut nft = self.command(kubelet, &["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        nft.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
        assert!(nft.wait().unwrap().success(), "nft refused: {commands}");
    }

    fn command(&self, kubelet: &Path, arguments: &[&str]) -> Command {
        let mut command = kernel::in_network_of(self.cluster, kubelet);
        command.arg("nft").args(arguments);
        command
    }
}

impl Drop for Wire<'_> {
    fn drop(&mut self) {
        for kubelet in &self.kubelets {
            let _ = self.command(kubelet, &["delete", "table", "inet", TABLE]).status();
        }
    }
}
