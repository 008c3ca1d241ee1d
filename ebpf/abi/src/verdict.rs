//! The outcomes of a decision about a connection ([`crate::decision`]). The words of [`Verdict`] are those of traces,
//! metrics and documentation.

/// The direction of a connection, seen from the pod.
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

/// The decision about a connection of a meshed pod, with its reason.
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
    /// The pod is bypassed: its redirection is switched off.
    PassPodBypassed = 8,
    /// The node is bypassed: all redirection is switched off.
    PassNodeBypassed = 9,
    /// Refused: the proxy does not listen.
    DenyNoListener = 10,
    /// Refused: the kernel had no memory for the original destination.
    DenyNoMemory = 11,
    /// Refused: steering is attached, but the pod's entry is gone, or was replaced during the decision.
    DenyUnknownPod = 12,
    /// Refused: the socket is bound to a device (SO_BINDTODEVICE) from which the kernel does not release it, and the
    /// proxy cannot be reached through that device.
    DenyDevice = 13,
    /// No meshed pod. Only for `weft explain`: the programs neither count nor trace processes that are not enrolled.
    PassNotMeshed = 14,
    /// Not TCP. Only for `weft explain`.
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

    /// Whether the programs ever give and count it.
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

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn refusals_are_those_called_so() {
        for verdict in Verdict::ALL {
            assert_eq!(verdict.is_refusal(), verdict.label().starts_with("deny_"), "{verdict:?}");
        }
    }

    #[test]
    fn numbers_and_labels_name_exactly_one_verdict() {
        let labels: BTreeSet<_> = Verdict::ALL.into_iter().map(Verdict::label).collect();
        assert_eq!(labels.len(), Verdict::ALL.len());
        for (index, verdict) in Verdict::ALL.into_iter().enumerate() {
            assert_eq!(verdict as usize, index);
            assert_eq!(Verdict::from_index(index as u8), Some(verdict));
            assert_eq!(Verdict::from_label(verdict.label()), Some(verdict));
        }
        assert_eq!(Verdict::from_index(Verdict::ALL.len() as u8), None);
        assert_eq!(Verdict::from_label("nonsense"), None);
    }
}
