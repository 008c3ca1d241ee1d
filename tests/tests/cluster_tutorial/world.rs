//! The cluster, the tutorial in its shell, and queries that several checks share.

use std::{
    cell::Cell,
    collections::BTreeSet,
    io::Write as _,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use weft_test_kit::{check::catch, metrics::Metrics, wait::blocking::eventually};
use weft_tests::{
    cluster::Cluster,
    tutorial::{self, Block, Shell},
};

use crate::{
    kernel,
    requirement::{NODES_ELSEWHERE, Requirement, leave_out},
    workloads,
};

/// The control plane's namespace.
pub(super) const MESH: &str = "linkerd";
/// The chart of the control plane, from the repository's root.
pub(super) const CHART: &str = "charts/weft-control-plane";
/// The values for production, from the repository's root.
const HIGHLY_AVAILABLE: &str = "charts/weft-control-plane/values-ha.yaml";
/// The replicas that they give each component, each on a node of its own.
pub(super) const REPLICAS: usize = 3;
/// The application's namespace.
pub(super) const SHOP: &str = "shop";
/// The identity of [`World::client`] there.
pub(super) const CLIENT_ID: &str = "client.shop.serviceaccount.identity.linkerd.cluster.local";
/// The lease whose holder writes EndpointSlices.
pub(super) const LEASE: &str = weft_k8s_api::labels::ENDPOINT_WRITE_LEASE;
/// The components that are Deployments.
pub(super) const COMPONENTS: [&str; 3] = ["destination", "identity", "proxy-injector"];
/// Selects the pods of agents.
pub(super) const AGENTS: &str = "linkerd.io/control-plane-component=agent";
/// The document whose commands are executed, from the repository's root.
const TUTORIAL: &str = "docs/getting-started.md";
/// The section in which the tutorial removes its installation.
const END: &str = "Uninstall";

pub(super) struct World {
    pub(super) cluster: Cluster,
    shell: Shell,
    blocks: Vec<Block>,
    /// The time at which the mesh was installed, and the length of the audit log then.
    pub(super) since_install: Option<(Instant, usize)>,
    /// Whether workloads of other kinds were started.
    has_workloads: bool,
    /// Whether the tutorial ran up to its last section, or its error.
    installed: Option<Result<(), String>>,
    is_removed: bool,
    /// The replicas of each component since [`World::upgrade_once`].
    replicas: Option<usize>,
    /// The agents' maps, where agents run on this host.
    maps: BTreeSet<u32>,
    are_agents_stopped: Cell<bool>,
}

impl World {
    pub(super) fn new() -> anyhow::Result<Self> {
        let cluster = Cluster::from_env()?;
        if cluster.get(&["namespace", MESH]).is_ok() {
            bail!("the cluster has a namespace {MESH}: a mesh that is in use is no place for tests");
        }
        let text = std::fs::read_to_string(Cluster::repository().join(TUTORIAL)).context(TUTORIAL)?;
        let blocks = tutorial::blocks(&text);
        if !blocks.iter().any(|block| Self::is_end(&block.section)) {
            bail!("{TUTORIAL} has no section {END:?} with a block to run");
        }
        let shell = Shell::start(Cluster::repository(), &[("PATH", cluster.path())])?;
        Ok(Self {
            cluster,
            shell,
            blocks,
            since_install: None,
            has_workloads: false,
            installed: None,
            is_removed: false,
            replicas: None,
            maps: BTreeSet::new(),
            are_agents_stopped: Cell::new(false),
        })
    }

    fn is_end(section: &str) -> bool {
        section == END
    }

    /// Runs the tutorial up to its last section, unless that is done. The error of the first run is kept.
    pub(super) fn install(&mut self) -> Result<(), String> {
        if self.installed.is_none() {
            let outcome = catch(|| self.follow_tutorial(|section| !Self::is_end(section)));
            let log = self.cluster.audit().map_err(|error| format!("{error:#}"))?;
            self.since_install = log.map(|entries| (Instant::now(), entries.len()));
            self.installed = Some(outcome.clone().map_err(|_| "there is no mesh: the tutorial failed".into()));
            return outcome;
        }
        self.installed.clone().unwrap_or(Ok(()))
    }

    /// Starts the workloads of other kinds, once.
    pub(super) fn start_workloads(&mut self) -> Result<(), String> {
        if !self.has_workloads {
            self.has_workloads = true;
            catch(|| workloads::start(self))?;
        }
        Ok(())
    }

    /// Runs the last section of the tutorial, if there is a mesh.
    pub(super) fn remove(&mut self) {
        if self.installed.is_some() && !self.is_removed {
            self.remember_agents();
            self.is_removed = true;
            self.follow_tutorial(Self::is_end);
        }
    }

    /// Runs the blocks of these sections.
    fn follow_tutorial(&mut self, wanted: impl Fn(&str) -> bool) {
        for block in self.blocks.iter().filter(|block| wanted(&block.section)) {
            if let Err(error) = self.shell.run(block) {
                panic!("{TUTORIAL}: {error:#}");
            }
        }
    }

    /// Information for a person after a failure.
    pub(super) fn explain(&self) {
        for arguments in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
            &["-n", MESH, "logs", "-l", "linkerd.io/control-plane-ns", "--all-containers", "--prefix", "--tail=30"],
            &["-n", MESH, "logs", "ds/weft-agent", "--tail=50"],
            &["-n", SHOP, "logs", "-l", "linkerd.io/control-plane-ns", "--all-containers", "--prefix", "--tail=30"],
        ] {
            println!("kubectl {}", arguments.join(" "));
            println!("{}", self.cluster.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}")));
        }
        let pods = self.cluster.get(&["pods", "-A"]).unwrap_or_default();
        let pods = || pods["items"].as_array().into_iter().flatten();
        for pod in pods().filter(|pod| has_failed(pod)) {
            let (namespace, name) = (&pod["metadata"]["namespace"], &pod["metadata"]["name"]);
            let (namespace, name) = (namespace.as_str().unwrap_or_default(), name.as_str().unwrap_or_default());
            println!("{namespace}/{name} failed: {:#}", pod["status"]);
            let logs = ["-n", namespace, "logs", name, "--all-containers", "--prefix", "--timestamps", "--tail=30"];
            println!("{}", self.cluster.kubectl(&logs).unwrap_or_else(|error| format!("{error:#}")));
        }
        let of_shop = pods().filter(|pod| pod["metadata"]["namespace"] == SHOP);
        let uids = of_shop.filter_map(|pod| pod["metadata"]["uid"].as_str());
        kernel::waits_of(&uids.collect::<Vec<_>>()).iter().for_each(|line| println!("{line}"));
    }

    /// The output of `weft`.
    pub(super) fn weft(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.cluster.command("weft").args(arguments).output().context("start weft")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("weft {}: {}\n{text}{}", arguments.join(" "), output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(text)
    }

    /// The output of helm, standard error included, and whether it succeeded.
    pub(super) fn helm(&self, arguments: &[&str]) -> (bool, String) {
        let output = self.cluster.command("helm").args(arguments).current_dir(Cluster::repository()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    /// Upgrades the control plane with settings beside those that it has, and returns the name of its release.
    pub(super) fn upgrade(&self, settings: &[&str]) -> String {
        self.upgrade_to(CHART, settings)
    }

    /// The same, to the control plane of a chart that may be another version's.
    fn upgrade_to(&self, chart: &str, settings: &[&str]) -> String {
        let (listed, releases) = self.helm(&["list", "-n", MESH, "-o", "json"]);
        assert!(listed, "{releases}");
        let releases: Value = serde_json::from_str(&releases).unwrap();
        let of_chart =
            |release: &&Value| release["chart"].as_str().is_some_and(|c| c.starts_with("weft-control-plane"));
        let release = releases.as_array().unwrap().iter().find(of_chart).unwrap()["name"].as_str().unwrap().to_owned();
        let upgrade = ["upgrade", &release, chart, "--namespace", MESH, "--reset-then-reuse-values"];
        let (upgraded, said) = self.helm(&[&upgrade[..], settings].concat());
        assert!(upgraded, "{said}");
        release
    }

    /// The same, and waits until the new pods of every component have taken over.
    pub(super) fn upgrade_and_wait(&self, settings: &[&str]) -> String {
        let release = self.upgrade(settings);
        self.wait_for_components();
        release
    }

    /// Moves the control plane and the agents to a chart that may be another version's, with the settings that they
    /// have, and waits until the new pods have taken over. `replicas` are those of each component.
    pub(super) fn move_to(&self, chart: &str, replicas: usize) {
        self.upgrade_to(chart, &[]);
        self.wait_for_components();
        self.cluster.rolled_out(MESH, "ds/weft-agent").unwrap();
        // The API server may still ask an injector that is about to end.
        self.wait_for_pods("proxy-injector", replicas);
    }

    /// Upgrades the control plane, once, to addresses of both families and, on enough nodes, to the values for
    /// production, in one rollout. Returns the replicas of each component.
    pub(super) fn upgrade_once(&mut self) -> usize {
        if let Some(replicas) = self.replicas {
            return replicas;
        }
        let has_nodes = Requirement::Nodes(REPLICAS).missing(&self.cluster).unwrap().is_none();
        let production = if has_nodes { &["--values", HIGHLY_AVAILABLE][..] } else { &[] };
        self.upgrade_and_wait(&[production, &["--set", "disableIPv6=false"]].concat());
        *self.replicas.insert(if has_nodes { REPLICAS } else { 1 })
    }

    /// Goes back to what the release was before its last upgrade, and waits in the same way.
    pub(super) fn roll_back_and_wait(&self, release: &str) {
        let (rolled_back, said) = self.helm(&["rollback", release, "--namespace", MESH]);
        assert!(rolled_back, "{said}");
        self.wait_for_components();
    }

    fn wait_for_components(&self) {
        for component in COMPONENTS {
            self.cluster.rolled_out(MESH, &format!("deploy/linkerd-{component}")).unwrap();
        }
    }

    /// Waits until a component has this number of pods, terminating ones included. A rollout does not wait for these,
    /// which may still answer, and take a lease and release it.
    pub(super) fn wait_for_pods(&self, component: &str, replicas: usize) {
        let selector = format!("linkerd.io/control-plane-component={component}");
        let settled = self.cluster.until(workloads::POD, |cluster| {
            let names = cluster.kubectl(&["-n", MESH, "get", "pods", "-l", &selector, "-o", "name"])?;
            ensure!(names.lines().count() == replicas, "{replicas} wanted, there are:\n{names}");
            Ok(())
        });
        settled.unwrap();
    }

    /// The findings of `promtool check metrics` about an exposition.
    pub(super) fn promtool(&self, exposition: &str) -> Vec<String> {
        let mut check = self.cluster.command("promtool");
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut check = check.spawn().expect("promtool in PATH");
        check.stdin.take().unwrap().write_all(exposition.as_bytes()).unwrap();
        let output = check.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let complaints: Vec<String> = said.lines().map(str::to_owned).collect();
        assert!(output.status.success() || !complaints.is_empty(), "promtool failed without a word: {}", output.status);
        complaints
    }

    pub(super) fn lease(&self) -> anyhow::Result<Value> {
        self.cluster.get(&["-n", MESH, "lease", LEASE])
    }

    /// The pod that holds the lease.
    pub(super) fn lease_holder(&self) -> anyhow::Result<String> {
        let lease = self.lease()?;
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty());
        holder.map(str::to_owned).with_context(|| format!("nobody holds the lease: {lease:#}"))
    }

    /// The pod that sends the requests.
    pub(super) fn client(&self, namespace: &str) -> String {
        self.cluster.pod(namespace, "app=client").unwrap()
    }

    /// The metrics of a pod's proxy.
    pub(super) fn proxy_metrics(&self, namespace: &str, pod: &str) -> Metrics {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:4191/proxy/metrics");
        Metrics::parse(&self.cluster.kubectl(&["get", "--raw", &path]).unwrap())
    }

    /// Waits until the events about an object contain a message.
    pub(super) fn event(&self, namespace: &str, object: &str, words: &[&str]) {
        // A kubelet updates a changed Secret in a running pod within its sync period and cache TTL, some two minutes.
        let found = self.cluster.until(Duration::from_secs(180), |cluster| {
            let list = cluster.get(&["-n", namespace, "events"])?;
            let events: Vec<_> = list["items"].as_array().into_iter().flatten().map(event_text).collect();
            let about = events.iter().filter(|event| event.starts_with(object));
            let found = about.clone().any(|event| words.iter().all(|word| event.contains(word)));
            if found { Ok(()) } else { bail!("no event of {object} says {words:?}: {:#?}", about.collect::<Vec<_>>()) }
        });
        found.unwrap();
    }

    /// Ends the agents of all nodes; their programs stay.
    pub(super) fn stop_agents(&self) {
        self.are_agents_stopped.set(true);
        self.select_nodes(r#""true""#);
        let gone = self.cluster.until(Duration::from_secs(60), |cluster| {
            let pods = cluster.pods(MESH, AGENTS)?;
            if pods.is_empty() { Ok(()) } else { bail!("still there: {pods:?}") }
        });
        gone.unwrap();
    }

    /// Starts them again.
    pub(super) fn start_agents(&self) {
        self.select_nodes("null");
        self.cluster.rolled_out(MESH, "ds/weft-agent").unwrap();
        self.are_agents_stopped.set(false);
    }

    /// Starts them again where a check has failed in between: without them all later checks would wait, and fail.
    pub(super) fn start_stopped_agents(&self) {
        if self.are_agents_stopped.get() {
            self.start_agents();
        }
    }

    /// Sets a label that no node has and the agents' nodes must have.
    fn select_nodes(&self, value: &str) {
        let patch = format!(r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"weft.io/none":{value}}}}}}}}}}}"#);
        self.cluster.kubectl(&["-n", MESH, "patch", "ds/weft-agent", "-p", &patch]).unwrap();
    }

    /// Notes what the kernel holds for the agents, where they run on this host.
    pub(super) fn remember_agents(&mut self) {
        let agents = self.cluster.get(&["-n", MESH, "pods", "-l", AGENTS]).unwrap();
        let uids = agents["items"].as_array().unwrap().iter().filter_map(|pod| pod["metadata"]["uid"].as_str());
        self.maps = kernel::maps_of(&uids.collect::<Vec<_>>());
        // What is looked for in the end must be seen now, or finding nothing would mean nothing.
        if self.maps.is_empty() {
            leave_out("what the kernels of the nodes hold", NODES_ELSEWHERE);
        } else {
            let held = kernel::users_of(&self.maps);
            // The kernel keeps 15 characters of a name. The last one does not use the map of pods.
            for program in ["weft_connect4", "weft_sk_lookup", "weft_getpeernam"] {
                assert!(held.iter().any(|name| name.starts_with(program)), "no {program} among {held:?}");
            }
        }
    }

    /// Nothing of the agents is in the kernel any more: neither their maps nor a program that uses them, attached or
    /// not.
    pub(super) fn assert_kernel_is_clean(&self) {
        // The kernel frees a map some time after its last user has gone.
        eventually("programs and maps of the agents are gone", Duration::from_secs(60), || {
            let left = kernel::users_of(&self.maps);
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
    }
}

fn event_text(event: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &event["involvedObject"];
    format!(
        "{}/{} {}: {}",
        text(&object["kind"]),
        text(&object["name"]),
        text(&event["reason"]),
        text(&event["message"])
    )
}

/// Whether a container of the pod ended with an error.
fn has_failed(pod: &Value) -> bool {
    let kinds = ["initContainerStatuses", "containerStatuses"];
    let statuses = kinds.iter().filter_map(|kind| pod["status"][kind].as_array()).flatten();
    statuses.filter_map(|status| status["state"]["terminated"]["exitCode"].as_i64()).any(|code| code != 0)
}
