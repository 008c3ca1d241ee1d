//! A machine of one cluster while it starts: its mount namespace, the components in it with their settings, and images.
//!
//! In the mount namespace `/run`, `/var/lib` and `/var/log` are the machine's own directories, so that every program
//! uses the same paths as on any node and leaves nothing on the host. There is no network outside. Every pod has its
//! own link (CNI's `ptp`): all traffic is routed, so that replies of a Service's pod on the same node pass connection
//! tracking without br_netfilter, and no iptables rule is needed.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    panic::resume_unwind,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use weft_xtask::command;

use super::{
    cgroup::Cgroup,
    cluster::{Cluster, Machine},
    pki::Pki,
};
use crate::tools::Tools;

/// Directory of the components' settings, as seen from inside.
const CONFIG: &str = "/var/lib/config";
/// The addresses of Services, and those of pods: of both kinds, IPv4 first.
const SERVICES: &str = "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112";
const PODS: &str = "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56";
/// Directories of CNI plugins on distributions.
const PLUGINS: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
/// A plugin of ours, beside which those of the distribution are linked.
const NO_DAD: &str = "cni-plugins/no-dad";
/// Image of the container that holds a pod's namespaces.
pub(crate) const PAUSE_IMAGE: &str = "localhost/pause:1";
/// Longest wait for one component on a small and busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// Enters the control groups, then executes the program. `$0` contains the groups.
const ENTER: &str = r#"for group in $0; do echo $$ >"$group/cgroup.procs" || :; done; exec "$@""#;

/// Creates the mount namespace, then holds it open.
const MOUNTS: &str = include_str!("node/mounts.sh");
/// Settings of the components as (name, text). `CGROUP`, `PAUSE`, `PODS_V4` and `PODS_V6` are filled in.
const SETTINGS: [(&str, &str); 6] = [
    ("audit.yaml", include_str!("node/audit.yaml")),
    ("kubelet.yaml", include_str!("node/kubelet.yaml")),
    ("containerd.toml", include_str!("node/containerd.toml")),
    ("cni/10-weft.conflist", include_str!("node/cni.conflist")),
    (NO_DAD, include_str!("node/no-dad.sh")),
    ("resolv.conf", "nameserver 10.96.0.10\n"),
];

/// A machine while it is being started.
pub(crate) struct Node<'a> {
    cluster: &'a Cluster,
    machine: Machine,
    tools: &'a Tools,
    groups: String,
    path: std::ffi::OsString,
    holder: Option<u32>,
    started: Vec<(&'static str, Child)>,
}

impl<'a> Node<'a> {
    /// Creates control groups, writes settings and prepares the mount namespace.
    ///
    /// # Errors
    /// When a group or a directory cannot be written or a mount is refused.
    pub(crate) fn prepare(cluster: &'a Cluster, machine: Machine, tools: &'a Tools) -> Result<Self> {
        let cgroup = Cgroup::named(&machine.group())?;
        cgroup.create()?;
        for directory in [machine.state().join("log"), machine.state().join("run"), machine.config()] {
            fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        }
        write_settings(&machine)?;
        let groups: Vec<_> = cgroup.components().iter().map(|group| group.display().to_string()).collect();
        let path =
            std::env::join_paths(["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"])?;
        let groups = groups.join(" ");
        let mut node = Self { cluster, machine, tools, groups, path, holder: None, started: Vec::new() };
        let (state, data) = (node.machine.state(), node.machine.data());
        let holder = node.start("mounts", "unshare", |command| {
            command.args(["--mount", "--propagation", "private", "sh", "-c", MOUNTS]).arg(&state).arg(data);
        })?;
        node.wait("mounts", |_| state.join("run/mounted").exists())?;
        node.holder = Some(holder);
        Ok(node)
    }

    /// Starts etcd, the API server and the controllers; returns when the API server is ready.
    ///
    /// # Errors
    /// When one of them ends or is not ready in time; the message ends with its log.
    pub(crate) fn start_control_plane(&mut self) -> Result<Pki> {
        let pki = Pki::create(&self.machine.config(), &self.machine.address())?;
        pki.kubeconfig("admin", &self.cluster.kubeconfig())?;
        for user in ["controller-manager", "scheduler"] {
            pki.kubeconfig(user, &self.machine.config().join(format!("{user}.kubeconfig")))?;
        }
        let address = self.machine.address();
        let file = |name: &str| format!("{CONFIG}/{name}");
        self.start("etcd", &self.program("etcd"), |command| {
            command
                .args(["--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn"])
                .args(["--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379"])
                .arg("--listen-peer-urls=http://127.0.0.1:2380");
        })?;
        self.start("kube-apiserver", &self.program("kube-apiserver"), |command| {
            command
                .args(["--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--allow-privileged=true"])
                .arg(format!("--advertise-address={address}"))
                .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
                .args([SERVICES, "--kubelet-preferred-address-types=InternalIP"])
                .arg("--service-account-issuer=https://kubernetes.default.svc.cluster.local")
                .arg(format!("--service-account-key-file={}", file("service-account.pub")))
                .arg(format!("--service-account-signing-key-file={}", file("service-account.key")))
                .arg(format!("--tls-cert-file={}", file("apiserver.crt")))
                .arg(format!("--tls-private-key-file={}", file("apiserver.key")))
                .arg(format!("--client-ca-file={}", file("ca.crt")))
                .arg(format!("--kubelet-client-certificate={}", file("kubelet-client.crt")))
                .arg(format!("--kubelet-client-key={}", file("kubelet-client.key")))
                .arg(format!("--requestheader-client-ca-file={}", file("front-proxy-ca.crt")))
                .args(["--requestheader-allowed-names=front-proxy-client", "--enable-aggregator-routing=true"])
                .args([
                    "--requestheader-username-headers=X-Remote-User",
                    "--requestheader-group-headers=X-Remote-Group",
                ])
                .arg("--requestheader-extra-headers-prefix=X-Remote-Extra-")
                .arg(format!("--proxy-client-cert-file={}", file("front-proxy.crt")))
                .arg(format!("--proxy-client-key-file={}", file("front-proxy.key")))
                .arg(format!("--audit-policy-file={}", file("audit.yaml")))
                .arg("--audit-log-path=/var/log/audit.log");
        })?;
        let asked = |node: &Self, arguments: &[&str]| node.cluster.kubectl(node.tools, arguments).is_ok();
        self.wait("kube-apiserver", |node| asked(node, &["get", "--raw", "/readyz"]))?;
        self.start("kube-controller-manager", &self.program("kube-controller-manager"), |command| {
            command
                .arg(format!("--kubeconfig={}", file("controller-manager.kubeconfig")))
                .arg(format!("--service-account-private-key-file={}", file("service-account.key")))
                .arg(format!("--root-ca-file={}", file("ca.crt")))
                .arg(format!("--cluster-signing-cert-file={}", file("ca.crt")))
                .arg(format!("--cluster-signing-key-file={}", file("ca.key")))
                .args(["--use-service-account-credentials", "--leader-elect=false"])
                .args(["--allocate-node-cidrs", PODS, SERVICES]);
        })?;
        // The first pod of a namespace needs it.
        self.wait("kube-controller-manager", |node| asked(node, &["get", "serviceaccount", "default"]))?;
        Ok(pki)
    }

    /// Starts what decides which node a pod gets.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start_scheduler(&mut self) -> Result<()> {
        self.start("kube-scheduler", &self.program("kube-scheduler"), |command| {
            command.arg(format!("--kubeconfig={CONFIG}/scheduler.kubeconfig")).arg("--leader-elect=false");
        })?;
        Ok(())
    }

    /// Starts the components that run pods; [`Self::wait_until_ready`] returns when they do.
    ///
    /// # Errors
    /// As [`Self::start_control_plane`].
    pub(crate) fn start_kubelet(&mut self, pki: &Pki) -> Result<()> {
        let config = |name: &str| format!("--kubeconfig={CONFIG}/{name}.kubeconfig");
        let (name, addresses) =
            (self.machine.name(), format!("{},{}", self.machine.address(), self.machine.address_v6()));
        pki.join(&name, &self.machine.address(), &self.machine.config())?;
        self.start("containerd", "containerd", |command| {
            command.arg("--config").arg(format!("{CONFIG}/containerd.toml"));
        })?;
        self.wait("containerd", |node| node.machine.containerd().exists())?;
        self.start("kubelet", &self.program("kubelet"), |command| {
            command
                .arg(config("kubelet"))
                .arg(format!("--config={CONFIG}/kubelet.yaml"))
                .arg(format!("--node-ip={addresses}"))
                .arg(format!("--hostname-override={name}"));
        })?;
        self.start("kube-proxy", &self.program("kube-proxy"), |command| {
            command
                .arg(config("proxy"))
                .arg(format!("--hostname-override={name}"))
                .args(["--proxy-mode=nftables", PODS, "--oom-score-adj=0"])
                .args(["--conntrack-max-per-core=0", "--conntrack-min=0"]);
        })?;
        Ok(())
    }

    /// Waits until pods can run here.
    ///
    /// # Errors
    /// As [`Self::start_control_plane`].
    pub(crate) fn wait_until_ready(&mut self) -> Result<()> {
        self.wait("kubelet", |node| node.cluster.is_node_ready(node.tools, &node.machine))
    }

    fn program(&self, name: &str) -> String {
        self.tools.program(name).display().to_string()
    }

    /// Starts a program of the node that outlives this process; its output is its log.
    fn start(&mut self, name: &'static str, program: &str, arguments: impl FnOnce(&mut Command)) -> Result<u32> {
        let log = File::create(self.machine.log(name)).with_context(|| format!("create the log of {name}"))?;
        // `setsid`, so that it survives our terminal.
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", ENTER, &self.groups, "nsenter"]);
        command.arg(format!("--net={}", self.machine.netns().display()));
        command.args(self.holder.map(|pid| format!("--mount=/proc/{pid}/ns/mnt")));
        command.arg("--").arg(program);
        arguments(&mut command);
        command.env("PATH", &self.path).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        let pid = child.id();
        self.started.push((name, child));
        Ok(pid)
    }

    /// Waits for a component; an early exit of any of them ends the wait.
    fn wait(&mut self, name: &str, is_ready: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_ready(self) {
            for (name, child) in &mut self.started {
                if let Some(status) = child.try_wait().with_context(|| format!("look after {name}"))? {
                    bail!("{name} ended ({status}); {}", self.machine.tail(name));
                }
            }
            if Instant::now() > deadline {
                bail!("{name} is not ready after {} s; {}", PATIENCE.as_secs(), self.machine.tail(name));
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

/// Imports an image archive into all nodes, side by side.
///
/// # Errors
/// When containerd refuses it.
pub(crate) fn import(cluster: &Cluster, archive: &Path) -> Result<()> {
    let import = |machine: &Machine| {
        let mut import = Command::new("ctr");
        import.arg("--address").arg(machine.containerd()).args(["--namespace", "k8s.io", "images", "import"]);
        command::output(import.arg(archive)).map(drop)
    };
    let machines: Vec<_> = cluster.machines().collect();
    thread::scope(|scope| {
        let imports: Vec<_> = machines.iter().map(|machine| scope.spawn(|| import(machine))).collect();
        imports.into_iter().try_for_each(|import| import.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn write_settings(machine: &Machine) -> Result<()> {
    let [pods, pods_v6] = machine.pods();
    for (name, text) in SETTINGS {
        let path = machine.config().join(name);
        let text = text.replace("CGROUP", &machine.group()).replace("PAUSE", PAUSE_IMAGE);
        let text = text.replace("PODS_V4", &pods).replace("PODS_V6", &pods_v6);
        fs::create_dir_all(path.parent().unwrap_or(&path)).with_context(|| format!("create for {}", path.display()))?;
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    let own = machine.config().join(NO_DAD);
    fs::set_permissions(&own, Permissions::from_mode(0o755)).context("make a CNI plugin executable")?;
    for plugin in ["host-local", "loopback", "portmap", "ptp"] {
        let link = own.with_file_name(plugin);
        symlink(Path::new(plugins()?).join(plugin), &link).with_context(|| format!("link {}", link.display()))?;
    }
    Ok(())
}

/// Where this distribution keeps CNI's plugins.
fn plugins() -> Result<&'static str> {
    let found = PLUGINS.into_iter().find(|directory| Path::new(directory).join("ptp").exists());
    found.with_context(|| format!("no CNI plugins in {}: install containernetworking-plugins", PLUGINS.join(" or ")))
}
