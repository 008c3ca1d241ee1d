//! kube-router on the nodes of a cluster on this host, as the network plugin that enforces NetworkPolicies: one process
//! in the network namespace of each node, and the iptables rules and sets of addresses that it makes there. The nodes
//! route between pods, so every packet between two pods passes these rules. Connections that exist are left alone.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use weft_test_kit::{
    process::Process,
    wait::{Polling, blocking},
};
use weft_tests::cluster::Cluster;

use crate::{kernel, requirement::NODES_ELSEWHERE};

/// The firewall of kube-router alone: routes are the lab's, and Services are kube-proxy's. IPv4 alone: the IPv6
/// rules of version 2.1.0 name sets that do not exist (github.com/cloudnativelabs/kube-router/issues/1653).
const SETTINGS: [&str; 4] =
    ["--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--health-port=0"];
/// Removes what kube-router made in a network namespace. Nothing else on these nodes uses iptables' filter table.
const REMOVE: &str = "iptables -F; iptables -X; ipset destroy";
/// Time limit for rules to come and to go, on a busy machine.
const RULES: Duration = Duration::from_secs(60);
const BETWEEN_POLLS: Duration = Duration::from_millis(250);

/// Enforces NetworkPolicies until it is dropped.
pub(super) struct KubeRouter<'a> {
    cluster: &'a Cluster,
    kubelets: Vec<PathBuf>,
    processes: Vec<Process>,
}

impl<'a> KubeRouter<'a> {
    /// Starts kube-router on all nodes. Requires nodes on this host.
    pub(super) fn start(cluster: &'a Cluster) -> Self {
        let mut running = Self { cluster, kubelets: kernel::kubelets(), processes: Vec::new() };
        assert!(!running.kubelets.is_empty(), "{NODES_ELSEWHERE}");
        let kubeconfig = env::var("KUBECONFIG").unwrap();
        for kubelet in &running.kubelets {
            // It ends with the test, however that ends.
            let mut command = kernel::in_network_of(cluster, kubelet);
            command.args(["setpriv", "--pdeathsig", "KILL", "kube-router"]);
            command.args(SETTINGS).arg(format!("--kubeconfig={kubeconfig}")).env("NODE_NAME", node_of(kubelet));
            running.processes.push(Process::start(&mut command, RULES));
        }
        running
    }

    /// Waits until a policy is in force for a pod.
    pub(super) fn wait_until_enforced(&self, policy: &str, namespace: &str, pod: &str) {
        let of_pod = format!("POD name:{pod} namespace: {namespace} to chain ");
        let of_policy = format!("\"run through nw policy {policy}\"");
        let is_in_force = |rules: &str| {
            let chain = rules.lines().find_map(|rule| rule.split_once(&of_pod)?.1.split('"').next());
            let start = chain.map(|chain| format!("-A {chain} "));
            start.is_some_and(|start| rules.lines().any(|rule| rule.starts_with(&start) && rule.contains(&of_policy)))
        };
        let enforced = self.cluster.until(RULES, |_| {
            let rules = self.kubelets.iter().map(|kubelet| self.rules(kubelet)).collect::<anyhow::Result<Vec<_>>>()?;
            ensure!(rules.iter().any(|rules| is_in_force(rules)), "{policy} is not in force for {namespace}/{pod}");
            Ok(())
        });
        enforced.unwrap();
    }

    /// The rules of a node, as iptables-save prints them.
    fn rules(&self, kubelet: &Path) -> anyhow::Result<String> {
        let mut save = kernel::in_network_of(self.cluster, kubelet);
        let output = save.args(["iptables-save", "-t", "filter"]).output().context("start nsenter")?;
        ensure!(output.status.success(), "iptables-save: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for KubeRouter<'_> {
    fn drop(&mut self) {
        // A running process would make the rules again.
        self.processes.clear();
        for kubelet in &self.kubelets {
            // The kernel keeps a set in use for a moment after its last rule is gone.
            let removed = blocking::until(Polling::every(BETWEEN_POLLS, RULES), || {
                let mut remove = kernel::in_network_of(self.cluster, kubelet);
                remove.args(["sh", "-ec", REMOVE]).stdout(Stdio::null()).stderr(Stdio::null());
                let status = remove.status().map_err(|_| ())?;
                if status.success() { Ok(()) } else { Err(()) }
            });
            if removed.is_err() {
                eprintln!("rules of kube-router remain on node {}, and refuse connections", node_of(kubelet));
            }
        }
    }
}

/// The name of a kubelet's node.
fn node_of(kubelet: &Path) -> String {
    let arguments = fs::read_to_string(kubelet.join("cmdline")).unwrap();
    let name = arguments.split('\0').find_map(|argument| argument.strip_prefix("--hostname-override="));
    name.expect("the lab names the nodes").to_owned()
}
