//! The decision about a connection: pure, one function per direction, called by the kernel programs and by whoever
//! wants to know what they would say. The words of [`Verdict`] are those of traces, metrics and documentation.
//!
//! The rules and their order are linkerd-init's iptables rules (linkerd2-proxy-init, pkg/iptables), except that what a
//! rule matches on `-o lo` is told by addresses, because the decision falls before routing. Lookups are passed as
//! closures so that they only happen when an earlier rule has not decided.

use crate::{address::Address, pod::Pod};

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
    /// The proxy itself is calling.
    PassProxy = 1,
    /// To or from loopback.
    PassLoopback = 2,
    /// To or from one of the pod's own addresses, which the kernel routes over loopback.
    PassOwnAddress = 3,
    /// To a skipped port.
    PassSkipPort = 4,
    /// From a skipped subnet.
    PassSkipSubnet = 5,
    /// Refused: the proxy does not listen.
    DenyNoListener = 6,
    /// Refused: the kernel had no memory for the original destination.
    DenyNoMemory = 7,
    /// Refused: steering is attached, but the pod's entry is gone.
    DenyUnknownPod = 8,
}

impl Verdict {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Redirect,
        Self::PassProxy,
        Self::PassLoopback,
        Self::PassOwnAddress,
        Self::PassSkipPort,
        Self::PassSkipSubnet,
        Self::DenyNoListener,
        Self::DenyNoMemory,
        Self::DenyUnknownPod,
    ];

    /// The word for metrics and traces.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::PassProxy => "pass_proxy",
            Self::PassLoopback => "pass_loopback",
            Self::PassOwnAddress => "pass_own_address",
            Self::PassSkipPort => "pass_skip_port",
            Self::PassSkipSubnet => "pass_skip_subnet",
            Self::DenyNoListener => "deny_no_listener",
            Self::DenyNoMemory => "deny_no_memory",
            Self::DenyUnknownPod => "deny_unknown_pod",
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

/// Decides about a TCP connect by a process in a meshed pod.
///
/// `uid` is the caller as the host sees it; `destination` is what it passed to connect(2), before any translation.
/// `skips_port` says whether the destination's port is among the pod's skipped outbound ports.
#[inline(always)]
#[must_use]
pub fn verdict_outbound(pod: &Pod, uid: u32, destination: &Address, skips_port: impl FnOnce() -> bool) -> Verdict {
    if uid == pod.proxy_uid {
        return Verdict::PassProxy;
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
    if skips_port() {
        return Verdict::PassSkipPort;
    }
    if skips_subnet() {
        return Verdict::PassSkipSubnet;
    }
    if steer() { Verdict::Redirect } else { Verdict::DenyNoListener }
}

#[cfg(test)]
mod tests;
