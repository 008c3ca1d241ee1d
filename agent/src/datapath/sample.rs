//! Values of the datapath for status and metrics: plain values, read in one call.

use std::net::IpAddr;

use weft_ebpf_abi::verdict::{Direction, Verdict};

use crate::datapath::rules::PodName;

/// Pods and counters at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// The pods in the kernel, by name.
    pub(crate) pods: Vec<Enrolled>,
    /// Count of each verdict since the maps were created.
    pub(crate) verdicts: Vec<(Direction, Verdict, u64)>,
    /// Trace events that were lost because the ring buffer was full.
    pub(crate) events_dropped: u64,
    /// Connections to a proxy without a recorded original destination.
    pub(crate) flow_misses: u64,
    /// Redirected connections without the pod's source address.
    pub(crate) bind_failures: u64,
    /// Listeners of proxies that could not be recorded.
    pub(crate) listeners_lost: u64,
    /// Binds of proxies whose network namespace the kernel had no room to admit by itself.
    pub(crate) admissions_refused: u64,
    /// Whether all redirection of the node is switched off.
    pub(crate) bypassed: bool,
}

/// Counts of what the programs had no room for since the maps were created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Losses {
    /// Listeners of proxies that could not be recorded.
    pub(crate) listeners: u64,
    /// Binds of proxies whose network namespaces could not be admitted.
    pub(crate) admissions: u64,
}

/// A pod in the kernel's maps.
#[derive(Clone, Debug)]
pub(crate) struct Enrolled {
    pub(crate) name: Option<PodName>,
    pub(crate) cookie: u64,
    pub(crate) generation: u32,
    pub(crate) outbound: bool,
    pub(crate) inbound: bool,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) bypassed: bool,
    pub(crate) self_enrolled: bool,
    pub(crate) strict: bool,
    /// Whether the proxy has a listener for inbound connections.
    pub(crate) listening: bool,
}
