//! Tests every combination of the inputs of a decision against an independent model: linkerd-init's chains as tables of
//! rules (linkerd2-proxy-init, pkg/iptables), evaluated as netfilter does, with the differences that
//! docs/interception.md lists.

extern crate std;

use std::{vec, vec::Vec};

use super::{
    tests::{APP, PROXY, address, pod as plain_pod},
    *,
};
use crate::{
    pod::{BYPASSED, EXEMPTS_CGROUP, EXEMPTS_GROUP, INBOUND, OUTBOUND},
    verdict::Verdict::*,
};

/// A rule of a chain: what it matches, and the verdict that names its target.
type Rule<P> = (fn(&P) -> bool, Verdict);

/// The first matching rule decides.
fn traverse<P>(chain: &[Rule<P>], packet: &P) -> Verdict {
    chain.iter().find(|(matches, _)| matches(packet)).map(|(_, verdict)| *verdict).expect("a chain ends in a policy")
}

/// The values of a row of independent bits.
fn bits<const N: usize>() -> impl Iterator<Item = [bool; N]> {
    (0..1_u32 << N).map(|row| core::array::from_fn(|bit| row >> bit & 1 == 1))
}

fn flags(of: &[(bool, u32)]) -> u32 {
    of.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum()
}

/// Inputs of netfilter in its chain OUTPUT, and Weft's further inputs.
struct Outgoing {
    is_tcp: bool,
    is_meshed: bool,
    node_bypassed: bool,
    pod_bypassed: bool,
    is_strict: bool,
    has_group: bool,
    uid_is_proxys: bool,
    gid_is_proxys: bool,
    cgroup_is_proxys: bool,
    to: To,
    skips_port: bool,
    bound_to_device: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum To {
    Loopback,
    Own,
    Other,
}

impl Outgoing {
    /// `-o lo`: the kernel routes loopback and own addresses over it, unless the socket is bound to another device.
    fn leaves_over_lo(&self) -> bool {
        self.to != To::Other && !self.bound_to_device
    }
}

/// `-A PROXY_INIT_OUTPUT`, with Weft's own rules first.
const OUTPUT: &[Rule<Outgoing>] = &[
    // Weft: not in the chain.
    (|p| !p.is_tcp, PassNotTcp),
    (|p| !p.is_meshed, PassNotMeshed),
    // Weft: the switches, the wider one first.
    (|p| p.node_bypassed, PassNodeBypassed),
    (|p| p.pod_bypassed, PassPodBypassed),
    // Weft: a strict pod trusts the cgroup in place of `-m owner`.
    (|p| p.is_strict && p.cgroup_is_proxys, PassProxyCgroup),
    // -m owner --uid-owner 2102 -j RETURN
    (|p| !p.is_strict && p.uid_is_proxys, PassProxy),
    // -m owner --gid-owner 2103 -j RETURN
    (|p| !p.is_strict && p.has_group && p.gid_is_proxys, PassProxyGroup),
    // -o lo -j RETURN, which Weft counts by the reason for that route.
    (|p| p.leaves_over_lo() && p.to == To::Loopback, PassLoopback),
    (|p| p.leaves_over_lo(), PassOwnAddress),
    // -p tcp -m multiport --dports .. -j RETURN
    (|p| p.skips_port, PassSkipPort),
    // -p tcp -j REDIRECT --to-port 4140
    (|_| true, Redirect),
];

#[test]
fn every_connect_is_decided_as_in_linkerds_chain() {
    let destinations = [
        ("127.0.0.1", To::Loopback),
        ("127.9.9.9", To::Loopback),
        ("::1", To::Loopback),
        ("0.0.0.0", To::Loopback),
        ("::", To::Loopback),
        ("10.244.0.5", To::Own),
        ("::ffff:10.244.0.5", To::Own),
        ("fd00:10:244::5", To::Own),
        ("10.244.0.9", To::Other),
        ("fd00:10:244::9", To::Other),
        ("::ffff:10.244.0.9", To::Other),
    ]
    .map(|(text, to)| (address(text), to));
    let mut rows = 0;
    for [is_tcp, has_entry, is_in_force, node_bypassed, pod_bypassed, is_strict, has_group] in bits() {
        for [uid_is_proxys, gid_is_proxys, cgroup_is_proxys, skips_port, bound_to_device] in bits() {
            for (destination, to) in destinations {
                let flags = flags(&[
                    (is_in_force, OUTBOUND),
                    (pod_bypassed, BYPASSED),
                    (is_strict, EXEMPTS_CGROUP),
                    (has_group, EXEMPTS_GROUP),
                ]);
                let pod = Pod { flags, proxy_gid: 2103, ..plain_pod() };
                let caller = Caller {
                    uid: if uid_is_proxys { PROXY } else { APP },
                    gid: if gid_is_proxys { 2103 } else { APP },
                    cgroup: if cgroup_is_proxys { pod.proxy_cgroup } else { 17 },
                };
                let decision = decide_connect(
                    is_tcp,
                    has_entry.then_some(&pod),
                    &destination,
                    || Connect { node_bypassed, caller, bound_to_device },
                    || skips_port,
                );
                let packet = Outgoing {
                    is_tcp,
                    is_meshed: has_entry && is_in_force,
                    node_bypassed,
                    pod_bypassed,
                    is_strict,
                    has_group,
                    uid_is_proxys,
                    gid_is_proxys,
                    cgroup_is_proxys,
                    to,
                    skips_port,
                    bound_to_device,
                };
                let expected = traverse(OUTPUT, &packet);
                // A device-bound socket reaches the proxy on loopback only after its release; only inbound connections
                // are steered.
                let release = expected == Redirect && bound_to_device;
                let expected = Decision { release, steer_to: None, ..Decision::of(expected) };
                assert_eq!(decision, expected, "{destination:?} {caller:?} {flags:b}");
                rows += 1;
            }
        }
    }
    assert_eq!(rows, (1 << 12) * destinations.len());
}

/// Inputs of netfilter in its chain PREROUTING, and Weft's further inputs.
struct Incoming {
    has_entry: bool,
    over_lo: bool,
    is_loopback: bool,
    node_bypassed: bool,
    pod_bypassed: bool,
    own_listens: bool,
    port: u16,
    skips_port: bool,
    skips_subnet: bool,
}

/// `-A PROXY_INIT_REDIRECT`, with Weft's own rules first.
const PREROUTING: &[Rule<Incoming>] = &[
    // Weft: a crash or another program removed the entry.
    (|p| !p.has_entry, DenyUnknownPod),
    // Traffic over lo passed OUTPUT, and is not translated again: Weft counts it by the reason for that route.
    (|p| p.over_lo && p.is_loopback, PassLoopback),
    (|p| p.over_lo, PassOwnAddress),
    // Weft: the switches, the wider one first.
    (|p| p.node_bypassed, PassNodeBypassed),
    (|p| p.pod_bypassed, PassPodBypassed),
    // -p tcp -m multiport --dports 4190,4191,.. -j RETURN; Weft: these two only for the proxy itself.
    (|p| [4190, 4191].contains(&p.port) && p.own_listens, PassSkipPort),
    (|p| p.skips_port, PassSkipPort),
    // -s 10.9.0.0/24 -j RETURN
    (|p| p.skips_subnet, PassSkipSubnet),
    // -p tcp -j REDIRECT --to-port 4143
    (|_| true, Redirect),
];

#[test]
fn every_arrival_is_decided_as_in_linkerds_chain() {
    // The client, the address that it dialled, whether the packet came over lo, whether from a loopback address.
    let routes = [
        ("127.0.0.1", "127.0.0.1", true, true),
        ("::1", "::1", true, true),
        ("10.244.0.5", "127.0.0.1", true, true),
        ("127.0.0.1", "10.244.0.5", true, true),
        ("fd00:10:244::5", "::1", true, true),
        ("10.244.0.5", "10.244.0.5", true, false),
        ("192.168.7.5", "10.244.0.5", true, false),
        ("fd00:10:244::5", "fd00:10:244::5", true, false),
        ("172.16.0.5", "172.16.0.5", true, false),
        ("10.244.0.9", "10.244.0.5", false, false),
        ("10.244.0.9", "172.16.0.5", false, false),
        ("fd00:10:244::9", "fd00:10:244::5", false, false),
    ];
    let ports: Vec<u16> = vec![8080, 4140, 4143, 4190, 4191];
    let mut rows = 0;
    for [has_entry, node_bypassed, pod_bypassed, is_strict, own_listens, skips_port, skips_subnet] in bits() {
        for (client, local, over_lo, is_loopback) in routes {
            for port in ports.iter().copied() {
                let flags = flags(&[(true, OUTBOUND | INBOUND), (pod_bypassed, BYPASSED), (is_strict, EXEMPTS_CGROUP)]);
                let pod = Pod { flags, ..plain_pod() };
                let (client, local) = (address(client), address(local));
                let arrival = Arrival { client: &client, local: &local, port };
                let listens = |asked: u16| asked == port && own_listens;
                let entry = has_entry.then_some(&pod);
                let decision =
                    decide_inbound(entry, &arrival, || node_bypassed, listens, || skips_port, || skips_subnet);
                let packet = Incoming {
                    has_entry,
                    over_lo,
                    is_loopback,
                    node_bypassed,
                    pod_bypassed,
                    own_listens,
                    port,
                    skips_port,
                    skips_subnet,
                };
                let verdict = traverse(PREROUTING, &packet);
                let steer_to = match verdict {
                    Redirect => Some(4143),
                    PassSkipPort if [4190, 4191].contains(&port) && own_listens => Some(port),
                    // A strict pod's proxy shares its outbound port with no one.
                    PassLoopback if is_strict && port == 4140 && local.is_loopback() => Some(4140),
                    _ => None,
                };
                let expected = Decision { steer_to, ..Decision::of(verdict) };
                assert_eq!(decision, expected, "{client:?} to {local:?}:{port} {flags:b}");
                rows += 1;
            }
        }
    }
    assert_eq!(rows, (1 << 7) * routes.len() * ports.len());
    // A pod without such ports has no port 0 to skip.
    let pod = Pod { control_port: 0, admin_port: 0, ..plain_pod() };
    let (client, local) = (address("10.244.0.9"), address("10.244.0.5"));
    let arrival = Arrival { client: &client, local: &local, port: 0 };
    assert_eq!(decide_inbound(Some(&pod), &arrival, || false, |_| true, || false, || false).verdict, Redirect);
}
