//! What the node forwards between pods, counted by its kernel: connections to an application's own port go around a proxy, if
//! all of its clients are meshed. First packets count, because those of connections that ended come late.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use weft_tests::cluster::Cluster;

use crate::kernel;

const TABLE: &str = "weft_test";

/// Counts first packets of connections to a port until it is dropped.
pub(super) struct Wire<'a> {
    cluster: &'a Cluster,
    kubelet: PathBuf,
}

impl<'a> Wire<'a> {
    /// None where the node is not on this host.
    pub(super) fn to_port(cluster: &'a Cluster, port: u16) -> Option<Self> {
        let Some(kubelet) = kernel::kubelet() else {
            println!("  not counted: the node of this cluster is not on this host");
            return None;
        };
        let wire = Self { cluster, kubelet };
        wire.nft(&format!(
            "table inet {TABLE} {{}}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\nchain forward {{\n\
             type filter hook forward priority 0;\ntcp dport {port} tcp flags & (syn | ack) == syn counter\n}}\n}}\n"
        ));
        Some(wire)
    }

    /// The node's kubelet, as a directory in /proc.
    pub(super) fn kubelet(&self) -> &Path {
        &self.kubelet
    }

    /// The packets so far.
    pub(super) fn packets(&self) -> u64 {
        let listed = self.command(&["-j", "list", "table", "inet", TABLE]).output().unwrap();
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        let rule = listed["nftables"].as_array().unwrap().iter().find_map(|entry| entry["rule"]["expr"].as_array());
        let counter = rule.unwrap().iter().find_map(|expression| expression["counter"]["packets"].as_u64());
        counter.unwrap_or_else(|| panic!("no counter in {listed:#}"))
    }

    fn nft(&self, commands: &str) {
        let mut nft = self.command(&["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        nft.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
        assert!(nft.wait().unwrap().success(), "nft refused: {commands}");
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.cluster.command("nsenter");
        command.arg(format!("--net={}", self.kubelet.join("ns/net").display())).arg("nft").args(arguments);
        command
    }
}

impl Drop for Wire<'_> {
    fn drop(&mut self) {
        let _ = self.command(&["delete", "table", "inet", TABLE]).status();
    }
}
