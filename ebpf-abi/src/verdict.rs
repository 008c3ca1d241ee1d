//! The decision about a connection: pure, one function per direction, called by the kernel programs and by whoever
//! wants to know what they would say. The words of [`Verdict`] are those of traces, metrics and documentation.
//!
//! The rules and their order are linkerd-init's iptables rules (linkerd2-proxy-init, pkg/iptables), except that what a
//! rule matches on `-o lo` is told by addresses, because the decision falls before routing. Lookups are passed as
//! closures so that they only happen when an earlier rule has not decided.

use crate::{
    address::Address,
    pod::{self, Pod},
};

/// Which way a connection goes, seen from the pod.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the pod.
    Outbound = 0,
    /// To the pod.
    Inbound = 1,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Outbound, Self::Inbound];

    /// The word for metrics and traces.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
        }
    }

    /// The direction with this number, if there is one.
    #[must_use]
    pub fn from_index(index: u8) -> Option<Self> {
        Self::ALL.get(usize::from(index)).copied()
    }
}

/// What happens to a connection of a meshed pod, and why.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// It goes to the proxy.
    Redirect = 0,
    /// The proxy's user is calling.
    PassProxy = 1,
    /// The proxy's group is calling.
    PassProxyGroup = 2,
    /// A process in the proxy's cgroup is calling, in a pod that exempts nobody else.
    PassProxyCgroup = 3,
    /// To or from loopback.
    PassLoopback = 4,
    /// To or from one of the pod's own addresses, which the kernel routes over loopback.
    PassOwnAddress = 5,
    /// To a skipped port.
    PassSkipPort = 6,
    /// From a skipped subnet.
    PassSkipSubnet = 7,
    /// The pod is bypassed: somebody switched its redirection off.
    PassPodBypassed = 8,
    /// The node is bypassed: somebody switched all redirection off.
    PassNodeBypassed = 9,
    /// Refused: the proxy does not listen.
    DenyNoListener = 10,
    /// Refused: the kernel had no memory for the original destination.
    DenyNoMemory = 11,
    /// Refused: steering is attached, but the pod's entry is gone.
    DenyUnknownPod = 12,
    /// Refused: the socket is bound to a device (SO_BINDTODEVICE) from which the kernel would not free it, and the proxy
    /// cannot be reached through that.
    DenyDevice = 13,
    /// No meshed pod. Only said when asked: the programs neither count nor trace who is not enrolled.
    PassNotMeshed = 14,
    /// Not TCP. Only said when asked.
    PassNotTcp = 15,
}

impl Verdict {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::Redirect,
        Self::PassProxy,
        Self::PassProxyGroup,
        Self::PassProxyCgroup,
        Self::PassLoopback,
        Self::PassOwnAddress,
        Self::PassSkipPort,
        Self::PassSkipSubnet,
        Self::PassPodBypassed,
        Self::PassNodeBypassed,
        Self::DenyNoListener,
        Self::DenyNoMemory,
        Self::DenyUnknownPod,
        Self::DenyDevice,
        Self::PassNotMeshed,
        Self::PassNotTcp,
    ];

    /// Whether the programs ever give it, and count it.
    #[must_use]
    pub const fn is_counted(self) -> bool {
        !matches!(self, Self::PassNotMeshed | Self::PassNotTcp)
    }

    /// Whether it refuses the connection.
    #[inline(always)]
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::DenyNoListener | Self::DenyNoMemory | Self::DenyUnknownPod | Self::DenyDevice)
    }

    /// The word for metrics and traces.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::PassProxy => "pass_proxy",
            Self::PassProxyGroup => "pass_proxy_group",
            Self::PassProxyCgroup => "pass_proxy_cgroup",
            Self::PassLoopback => "pass_loopback",
            Self::PassOwnAddress => "pass_own_address",
            Self::PassSkipPort => "pass_skip_port",
            Self::PassSkipSubnet => "pass_skip_subnet",
            Self::PassPodBypassed => "pass_pod_bypassed",
            Self::PassNodeBypassed => "pass_node_bypassed",
            Self::DenyNoListener => "deny_no_listener",
            Self::DenyNoMemory => "deny_no_memory",
            Self::DenyUnknownPod => "deny_unknown_pod",
            Self::DenyDevice => "deny_device",
            Self::PassNotMeshed => "pass_not_meshed",
            Self::PassNotTcp => "pass_not_tcp",
        }
    }

    /// The verdict with this number, if there is one.
    #[must_use]
    pub fn from_index(index: u8) -> Option<Self> {
        Self::ALL.get(usize::from(index)).copied()
    }

    /// The verdict with this label, if there is one.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verdict| verdict.label() == label)
    }
}

/// Who calls connect(2), as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The effective user.
    pub uid: u32,
    /// The effective group.
    pub gid: u32,
    /// The cgroup's id in the cgroup2 tree; looked at with [`pod::EXEMPTS_CGROUP`] only.
    pub cgroup: u64,
}

/// Decides about a TCP connect by a process in a meshed pod.
///
/// `destination` is what the caller passed to connect(2), before any translation. `skips_port` says whether the
/// destination's port is among the pod's skipped outbound ports.
#[inline(always)]
#[must_use]
pub fn verdict_outbound(
    pod: &Pod,
    node_bypassed: bool,
    caller: &Caller,
    destination: &Address,
    skips_port: impl FnOnce() -> bool,
) -> Verdict {
    if let Some(verdict) = bypass(pod, node_bypassed) {
        return verdict;
    }
    if pod.has(pod::EXEMPTS_CGROUP) {
        if caller.cgroup == pod.proxy_cgroup {
            return Verdict::PassProxyCgroup;
        }
    } else if caller.uid == pod.proxy_uid {
        return Verdict::PassProxy;
    } else if pod.has(pod::EXEMPTS_GROUP) && caller.gid == pod.proxy_gid {
        return Verdict::PassProxyGroup;
    }
    // Connecting to 0.0.0.0 or :: means connecting to this host.
    if destination.is_loopback() || destination.is_unspecified() {
        return Verdict::PassLoopback;
    }
    if pod.owns(destination) {
        return Verdict::PassOwnAddress;
    }
    if skips_port() {
        return Verdict::PassSkipPort;
    }
    Verdict::Redirect
}

/// Decides about a new TCP connection that arrives in a meshed pod's network namespace.
///
/// `skips_port` says whether the local port is skipped, `skips_subnet` whether the client is, `steer` gives the
/// connection to the proxy's listener and says whether there was one.
#[inline(always)]
#[must_use]
pub fn verdict_inbound(
    pod: &Pod,
    node_bypassed: bool,
    client: &Address,
    local: &Address,
    skips_port: impl FnOnce() -> bool,
    skips_subnet: impl FnOnce() -> bool,
    steer: impl FnOnce() -> bool,
) -> Verdict {
    // A loopback client with another local address: a late segment of a connection between a redirected application and
    // its proxy, after the application's end is gone.
    if local.is_loopback() || client.is_loopback() {
        return Verdict::PassLoopback;
    }
    // Nobody else can complete a handshake with one of the pod's own addresses as source.
    if client == local || pod.owns(client) {
        return Verdict::PassOwnAddress;
    }
    if let Some(verdict) = bypass(pod, node_bypassed) {
        return verdict;
    }
    if skips_port() {
        return Verdict::PassSkipPort;
    }
    if skips_subnet() {
        return Verdict::PassSkipSubnet;
    }
    if steer() { Verdict::Redirect } else { Verdict::DenyNoListener }
}

/// Whether somebody switched redirection off. The node's switch comes first: it is the wider one.
#[inline(always)]
fn bypass(pod: &Pod, node_bypassed: bool) -> Option<Verdict> {
    if node_bypassed {
        Some(Verdict::PassNodeBypassed)
    } else if pod.has(pod::BYPASSED) {
        Some(Verdict::PassPodBypassed)
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
