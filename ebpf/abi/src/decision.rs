//! The decision about a connection: pure, one function per direction, called by the kernel programs and by `weft
//! explain`. A [`Decision`] is complete: the verdict and all actions of the program. When one of these actions fails,
//! [`Decision::of`] the refusal replaces the decision.
//!
//! The rules and their order are linkerd-init's iptables rules (linkerd2-proxy-init, pkg/iptables), except that matches
//! on `-o lo` are derived from addresses and the socket's device, because the decision precedes routing. Lookups are
//! passed as closures, so that they only happen when no earlier rule has decided. Refuses side effects.

use crate::{
    address::Address,
    pod::{self, Pod},
    socket::kind,
    verdict::Verdict,
};

/// The process that calls connect(2), as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The real user.
    pub uid: u32,
    /// The real group.
    pub gid: u32,
    /// The cgroup's id in the cgroup2 tree; used with [`pod::EXEMPTS_CGROUP`] only.
    pub cgroup: u64,
}

/// Inputs of a decision about connect(2), besides the pod and the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Redirection is switched off on the whole node.
    pub node_bypassed: bool,
    /// The calling process.
    pub caller: Caller,
    /// The socket is bound to a device other than `lo` (SO_BINDTODEVICE), so that it cannot reach a loopback address.
    pub bound_to_device: bool,
}

/// Inputs of a decision about a connection that arrives in a pod, besides the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival<'a> {
    /// The client's address.
    pub client: &'a Address,
    /// The address that the client dialled.
    pub local: &'a Address,
    /// The port that the client dialled.
    pub port: u16,
}

/// What is to be kept of a connecting socket, in the map of clients or in its storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remember {
    /// Unchanged.
    Unchanged,
    /// Empty: the socket may have been redirected before, and disconnected since (connect to AF_UNSPEC). A proxy has
    /// many sockets, and their original destination is never requested.
    Nothing,
    /// [`remembered`] of the destination, as one of [`kind`]. A redirect that cannot keep it is refused.
    Destination(u8),
}

/// The verdict about a connection, and the actions that follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Outcome and reason, as events and metrics report them.
    pub verdict: Verdict,
    /// State to store in the connecting socket.
    pub remember: Remember,
    /// The connecting socket has to be released from its device; otherwise [`Verdict::DenyDevice`].
    pub release: bool,
    /// The connection has to be given to the proxy's listener on this port; otherwise [`Verdict::DenyNoListener`].
    pub steer_to: Option<u16>,
}

impl Decision {
    /// A verdict and the actions that follow from it alone.
    #[inline(always)]
    #[must_use]
    pub const fn of(verdict: Verdict) -> Self {
        let remember = match verdict {
            Verdict::PassNotTcp | Verdict::PassNotMeshed => Remember::Unchanged,
            Verdict::PassProxy | Verdict::PassProxyGroup | Verdict::PassProxyCgroup => Remember::Nothing,
            Verdict::Redirect => Remember::Destination(kind::CLIENT),
            _ => Remember::Destination(kind::PASSED),
        };
        Self { verdict, remember, release: false, steer_to: None }
    }
}

/// The address that SO_ORIGINAL_DST returns for a destination: the kernel treats an unspecified one as loopback.
#[inline(always)]
#[must_use]
pub const fn remembered(destination: &Address) -> Address {
    match destination.is_unspecified() {
        true if destination.is_v4() => Address::LOCALHOST_V4,
        true => Address::LOCALHOST_V6,
        false => *destination,
    }
}

/// Decides about a connect(2) by a process whose network namespace has the entry `pod`, if any.
///
/// `destination` is what the caller passed, before any translation. `skips_port` says whether its port is among the
/// pod's skipped outbound ports.
#[inline(always)]
#[must_use]
pub fn decide_connect(
    is_tcp: bool,
    pod: Option<&Pod>,
    destination: &Address,
    connect: impl FnOnce() -> Connect,
    skips_port: impl FnOnce() -> bool,
) -> Decision {
    if !is_tcp {
        return Decision::of(Verdict::PassNotTcp);
    }
    let Some(pod) = pod.filter(|pod| pod.has(pod::OUTBOUND)) else {
        return Decision::of(Verdict::PassNotMeshed);
    };
    let connect = connect();
    if let Some(verdict) = bypass(pod, connect.node_bypassed) {
        return Decision::of(verdict);
    }
    if let Some(verdict) = exemption(pod, &connect.caller) {
        return Decision::of(verdict);
    }
    // The kernel routes these over loopback, unless the socket is bound to another device: then they leave the pod.
    if !connect.bound_to_device {
        if destination.is_loopback() || destination.is_unspecified() {
            return Decision::of(Verdict::PassLoopback);
        }
        if pod.owns(destination) {
            return Decision::of(Verdict::PassOwnAddress);
        }
    }
    if skips_port() {
        return Decision::of(Verdict::PassSkipPort);
    }
    Decision { release: connect.bound_to_device, ..Decision::of(Verdict::Redirect) }
}

/// Decides about a new TCP connection that arrives in the network namespace of a pod, whose entry may be gone.
///
/// `node_bypassed` says whether redirection is switched off on the whole node, `listens` whether the proxy has a
/// listener on a port, of either family, `skips_port` whether the port is skipped, `skips_subnet` whether the client
/// is.
#[inline(always)]
#[must_use]
pub fn decide_inbound(
    pod: Option<&Pod>,
    arrival: &Arrival<'_>,
    node_bypassed: impl FnOnce() -> bool,
    listens: impl FnOnce(u16) -> bool,
    skips_port: impl FnOnce() -> bool,
    skips_subnet: impl FnOnce() -> bool,
) -> Decision {
    let Arrival { client, local, port } = *arrival;
    let Some(pod) = pod else { return Decision::of(Verdict::DenyUnknownPod) };
    // A loopback client with another local address: a late segment of a connection between a redirected application and
    // its proxy, after the application's end is gone.
    if local.is_loopback() || client.is_loopback() {
        // Where the proxy's user is not trusted, another socket of that user may share the port.
        let is_own = pod.has(pod::EXEMPTS_CGROUP) && local.is_loopback() && port == pod.outbound_port;
        return Decision { steer_to: is_own.then_some(port), ..Decision::of(Verdict::PassLoopback) };
    }
    // No other host can complete a handshake with one of the pod's own addresses as source: the answer stays in the
    // pod.
    if client == local || pod.owns(client) {
        return Decision::of(Verdict::PassOwnAddress);
    }
    if let Some(verdict) = bypass(pod, node_bypassed()) {
        return Decision::of(verdict);
    }
    // Only for the proxy: an application could otherwise serve on these ports around the proxy, also in the family in
    // which the proxy does not listen.
    if pod.is_proxys_own(port) && listens(port) {
        return Decision { steer_to: Some(port), ..Decision::of(Verdict::PassSkipPort) };
    }
    if skips_port() {
        return Decision::of(Verdict::PassSkipPort);
    }
    if skips_subnet() {
        return Decision::of(Verdict::PassSkipSubnet);
    }
    Decision { steer_to: Some(pod.inbound_port), ..Decision::of(Verdict::Redirect) }
}

/// Whether redirection is switched off. The node's switch comes first, because it is the wider one.
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

/// Whether the caller is the pod's proxy.
#[inline(always)]
fn exemption(pod: &Pod, caller: &Caller) -> Option<Verdict> {
    if pod.has(pod::EXEMPTS_CGROUP) {
        (caller.cgroup == pod.proxy_cgroup).then_some(Verdict::PassProxyCgroup)
    } else if caller.uid == pod.proxy_uid {
        Some(Verdict::PassProxy)
    } else if pod.has(pod::EXEMPTS_GROUP) && caller.gid == pod.proxy_gid {
        Some(Verdict::PassProxyGroup)
    } else {
        None
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
