//! A sandbox's settings and file layout.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// Directory of the sandboxes' state, with one directory each. It is a temporary file system on every modern Linux.
pub const RUN_DIR: &str = "/run/weft";
/// Name of a sandbox that is started without one.
pub const DEFAULT_NAME: &str = "default";
/// The longest name: `weft-NAME-` and a pod's name have to fit into a file name.
pub const MAX_NAME_BYTES: usize = 40;

/// The namespace of the control plane, Linkerd's default.
pub const CONTROL_NAMESPACE: &str = "linkerd";
/// The trust domain and the cluster domain, Linkerd's and Kubernetes' default.
pub const CLUSTER_DOMAIN: &str = "cluster.local";
/// The node's name, as pods see it.
pub const NODE_NAME: &str = "sandbox";

/// Pod addresses, from .10 on; the rest is the sandbox's own.
pub const POD_CIDR_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 244, 0, 0), 16);
/// Pod addresses of the other family.
pub const POD_CIDR_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 0), 64);
/// Addresses of cluster IPs.
pub const SERVICE_CIDR_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 96, 0, 0), 16);
/// The name server, on the node: kubeadm's choice for the service CIDR.
pub const DNS_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));
/// Every pod's gateway: link local, answered by the node's end of the pod's veth.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The same for IPv6.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// How traffic is redirected to the proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interception {
    /// Weft's agent and its eBPF programs.
    #[default]
    Ebpf,
    /// linkerd-init's iptables rules in every meshed pod.
    Iptables,
    /// Traffic is not redirected.
    None,
}

/// The control plane of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlPlane {
    /// `weft-control-plane all` in a meshed pod.
    #[default]
    Weft,
    /// None: for sidecars that need neither identity nor discovery.
    None,
}

/// A sandbox's settings. Parsed once, never changed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    /// Identifies the sandbox on its host: 1 to [`MAX_NAME_BYTES`] of `a-z`, `0-9` and `-`.
    pub name: String,
    /// The directory of manifests, read recursively and watched.
    pub manifests: PathBuf,
    /// How traffic is redirected to the proxies.
    pub interception: Interception,
    /// The sidecar's program in place of `weft-proxy`.
    pub proxy: Option<PathBuf>,
    /// Whether there is a control plane.
    pub control_plane: ControlPlane,
    /// Directory of `weft`, `weft-agent`, `weft-proxy` and `weft-control-plane`; also first in every container's PATH.
    pub bin_dir: PathBuf,
    /// The log filter of proxies, agent and control plane.
    pub log_level: String,
}

/// A name that cannot be part of file, namespace and cgroup names.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is not a sandbox name: expected 1 to {MAX_NAME_BYTES} characters of a-z, 0-9 and single hyphens, starting with a letter"
)]
pub struct NameError(String);

/// An unknown kind of interception.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a way of interception: expected ebpf, iptables or none")]
pub struct ParseInterceptionError(String);

impl Config {
    /// Settings with defaults.
    ///
    /// # Errors
    /// When the name is invalid.
    pub fn new(name: &str, manifests: impl Into<PathBuf>, bin_dir: impl Into<PathBuf>) -> Result<Self, NameError> {
        check_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            manifests: manifests.into(),
            interception: Interception::default(),
            proxy: None,
            control_plane: ControlPlane::default(),
            bin_dir: bin_dir.into(),
            log_level: "warn,weft=info".to_owned(),
        })
    }

    /// The paths of the sandbox's files.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout::of(&self.name)
    }
}

/// Checks a sandbox's name.
///
/// # Errors
/// When it cannot be part of the names of files, namespaces and cgroups.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let fits = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        // A name must not be another's followed by the separator: see `Layout::netns_prefix`.
        && !name.ends_with('-')
        && !name.contains("--");
    if fits { Ok(()) } else { Err(NameError(name.to_owned())) }
}

impl FromStr for Interception {
    type Err = ParseInterceptionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "ebpf" => Ok(Self::Ebpf),
            "iptables" => Ok(Self::Iptables),
            "none" => Ok(Self::None),
            _ => Err(ParseInterceptionError(text.to_owned())),
        }
    }
}

impl fmt::Display for Interception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ebpf => "ebpf",
            Self::Iptables => "iptables",
            Self::None => "none",
        })
    }
}

/// Paths and names of one sandbox. Everything that it leaves on the host is under one of them.
#[derive(Clone, Debug)]
pub struct Layout {
    name: String,
}

impl Layout {
    /// The paths and names for the sandbox with this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// `/run/weft/NAME`.
    #[must_use]
    pub fn run_dir(&self) -> PathBuf {
        Path::new(RUN_DIR).join(&self.name)
    }

    /// The state file that clients read.
    #[must_use]
    pub fn state_file(&self) -> PathBuf {
        self.run_dir().join("state.json")
    }

    /// Locked by the daemon while it lives, and removed last.
    #[must_use]
    pub fn lock_file(&self) -> PathBuf {
        Path::new(RUN_DIR).join(format!("{}.lock", self.name))
    }

    /// The log of a daemon in the background. It is outside the directory, which the daemon clears when it starts.
    #[must_use]
    pub fn daemon_log(&self) -> PathBuf {
        Path::new(RUN_DIR).join(format!("{}.log", self.name))
    }

    /// The agent's log.
    #[must_use]
    pub fn agent_log(&self) -> PathBuf {
        self.run_dir().join("agent.log")
    }

    /// The agent's gRPC socket.
    #[must_use]
    pub fn agent_socket(&self) -> PathBuf {
        self.run_dir().join("agent.sock")
    }

    /// Mount point of this sandbox's own BPF file system.
    #[must_use]
    pub fn bpffs(&self) -> PathBuf {
        self.run_dir().join("bpffs")
    }

    /// Directory in which the agent pins its maps and links.
    #[must_use]
    pub fn pin_dir(&self) -> PathBuf {
        self.bpffs().join("weft")
    }

    /// The directory that the control plane reads.
    #[must_use]
    pub fn published_dir(&self) -> PathBuf {
        self.run_dir().join("published")
    }

    /// Issuer, trust anchors, token key.
    #[must_use]
    pub fn pki_dir(&self) -> PathBuf {
        self.run_dir().join("pki")
    }

    /// A pod's files: volumes, logs, resolv.conf.
    #[must_use]
    pub fn pod_dir(&self, namespace: &str, pod: &str) -> PathBuf {
        self.run_dir().join("pods").join(namespace).join(pod)
    }

    /// The common prefix of this sandbox's network namespaces.
    #[must_use]
    pub fn netns_prefix(&self) -> String {
        // No name contains a double hyphen, so sandbox `a` cannot match resources of `a-b`.
        format!("weft-{}--", self.name)
    }

    /// The node's network namespace.
    #[must_use]
    pub fn node_netns(&self) -> String {
        format!("{}node", self.netns_prefix())
    }

    /// A pod's network namespace; `number` is the pod's, unique within the sandbox.
    #[must_use]
    pub fn pod_netns(&self, number: u32) -> String {
        format!("{}pod{number}", self.netns_prefix())
    }

    /// This sandbox's cgroup, relative to the cgroup2 mount.
    #[must_use]
    pub fn cgroup(&self) -> PathBuf {
        PathBuf::from(format!("weft-{}", self.name))
    }

    /// The parent of all pods' cgroups, relative to the cgroup2 mount: where the agent attaches.
    #[must_use]
    pub fn kubepods(&self) -> PathBuf {
        self.cgroup().join("kubepods")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for name in ["a", "default", "demo-1234"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", "Upper", "1st", "with/slash", "..", "a b", "a-", "a--b", &"x".repeat(41)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
