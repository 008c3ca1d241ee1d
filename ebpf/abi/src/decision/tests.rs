//! The truth tables. Rows are named after linkerd-init's behaviour, which they have to match.

extern crate std;

use core::net::IpAddr;

use super::*;
use crate::{
    pod::{ADDRESSES, Owner},
    verdict::Verdict::*,
};

pub(super) const PROXY: u32 = 2102;
pub(super) const APP: u32 = 1000;

pub(super) fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

/// A dual-stack pod with a secondary address.
pub(super) fn pod() -> Pod {
    let mut addresses = [Address::UNSPECIFIED; ADDRESSES];
    addresses[0] = address("10.244.0.5");
    addresses[1] = address("fd00:10:244::5");
    addresses[2] = address("192.168.7.5");
    Pod {
        addresses,
        source_v4: addresses[0],
        source_v6: addresses[1],
        rules: 0,
        generation: 1,
        flags: pod::OUTBOUND | pod::INBOUND,
        proxy_cgroup: 99,
        proxy_uid: PROXY,
        proxy_gid: 0,
        outbound_port: 4140,
        inbound_port: 4143,
        control_port: 4190,
        admin_port: 4191,
    }
}

/// A caller whose group and cgroup match nothing.
fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, cgroup: 17 }
}

/// For a TCP socket that is bound to no device.
fn connect(
    pod: &Pod,
    node_bypassed: bool,
    caller: Caller,
    destination: &str,
    skips: impl FnOnce() -> bool,
) -> Decision {
    let facts = || Connect { node_bypassed, caller, bound_to_device: false };
    decide_connect(true, Some(pod), &address(destination), facts, skips)
}

fn outbound(uid: u32, destination: &str, port: u16) -> Verdict {
    let skipped = [4567, 4568, 25];
    connect(&pod(), false, user(uid), destination, || skipped.contains(&port)).verdict
}

/// The verdict about an incoming connection: `listening` on any port to which it may be steered.
fn inbound(client: &str, local: &str, port: u16, listening: bool) -> Verdict {
    let skipped = [4567, 4568];
    let (client, local) = (address(client), address(local));
    let from_skipped_subnet = client == address("10.9.0.7") || client == address("fd99::7");
    let arrival = Arrival { client: &client, local: &local, port };
    let skips_port = || skipped.contains(&port);
    let decision = decide_inbound(Some(&pod()), &arrival, || false, |_| listening, skips_port, || from_skipped_subnet);
    if decision.steer_to.is_some() && !listening { DenyNoListener } else { decision.verdict }
}

#[test]
fn outbound_truth_table() {
    for (row, uid, destination, port, expected) in [
        ("remote pod", APP, "10.244.0.9", 8080, Redirect),
        ("service address", APP, "10.96.0.40", 80, Redirect),
        ("internet", APP, "93.184.216.34", 443, Redirect),
        ("cloud metadata", APP, "169.254.169.254", 80, Redirect),
        ("dns over tcp", APP, "10.96.0.10", 53, Redirect),
        ("root is an application like any other", 0, "10.244.0.9", 8080, Redirect),
        ("nobody is an application like any other", 65534, "1.1.1.1", 20001, Redirect),
        ("native ipv6", APP, "fd00:10:244::9", 8080, Redirect),
        ("v4-mapped obeys the ipv4 rules", APP, "::ffff:10.244.0.9", 8080, Redirect),
        ("neighbour of the pod's own address", APP, "10.244.0.6", 8080, Redirect),
        ("client in a skipped inbound subnet does not matter outbound", APP, "10.9.0.7", 8080, Redirect),
        ("inbound-only skipped port", APP, "10.244.0.9", 4191, Redirect),
        ("loopback", APP, "127.0.0.1", 8080, PassLoopback),
        ("all of 127/8", APP, "127.9.9.9", 8080, PassLoopback),
        ("the proxy's outbound listener, dialled by hand", APP, "127.0.0.1", 4140, PassLoopback),
        ("v4-mapped loopback", APP, "::ffff:127.0.0.1", 8080, PassLoopback),
        ("ipv6 loopback", APP, "::1", 8080, PassLoopback),
        ("inaddr_any means this host", APP, "0.0.0.0", 8080, PassLoopback),
        ("in6addr_any means this host", APP, "::", 8080, PassLoopback),
        ("v4-mapped inaddr_any", APP, "::ffff:0.0.0.0", 8080, PassLoopback),
        ("own address", APP, "10.244.0.5", 8080, PassOwnAddress),
        ("own address, v4-mapped", APP, "::ffff:10.244.0.5", 8080, PassOwnAddress),
        ("own ipv6 address", APP, "fd00:10:244::5", 8080, PassOwnAddress),
        ("own secondary address", APP, "192.168.7.5", 8080, PassOwnAddress),
        ("own address at the proxy's inbound port", APP, "10.244.0.5", 4143, PassOwnAddress),
        ("skipped port", APP, "10.244.0.9", 4567, PassSkipPort),
        ("skipped port over ipv6", APP, "fd00:10:244::9", 4568, PassSkipPort),
        ("skipped port of an external host", APP, "93.184.216.34", 25, PassSkipPort),
        ("proxy to a remote pod", PROXY, "10.244.0.9", 4143, PassProxy),
        ("proxy to its own application", PROXY, "10.244.0.5", 8080, PassProxy),
        ("proxy over ipv6", PROXY, "fd00:10:244::9", 4143, PassProxy),
        ("proxy to loopback", PROXY, "127.0.0.1", 8080, PassProxy),
    ] {
        assert_eq!(outbound(uid, destination, port), expected, "{row}");
    }
}

#[test]
fn inbound_truth_table() {
    for (row, client, local, port, listening, expected) in [
        ("remote pod", "10.244.0.9", "10.244.0.5", 8080, true, Redirect),
        ("kubelet probe", "10.244.0.1", "10.244.0.5", 8080, true, Redirect),
        ("the proxy's own port", "10.244.0.9", "10.244.0.5", 4143, true, Redirect),
        ("the proxy's outbound port from outside", "10.244.0.9", "10.244.0.5", 4140, true, Redirect),
        ("ipv6", "fd00:10:244::9", "fd00:10:244::5", 8080, true, Redirect),
        ("secondary address", "192.168.7.9", "192.168.7.5", 8080, true, Redirect),
        ("address that nobody enrolled", "10.244.0.9", "172.16.0.5", 8080, true, Redirect),
        ("proxy down", "10.244.0.9", "10.244.0.5", 8080, false, DenyNoListener),
        ("proxy down, ipv6", "fd00:10:244::9", "fd00:10:244::5", 8080, false, DenyNoListener),
        ("proxy down, its own port", "10.244.0.9", "10.244.0.5", 4143, false, DenyNoListener),
        ("admin port", "10.244.0.9", "10.244.0.5", 4191, true, PassSkipPort),
        ("admin port where no proxy listens", "10.244.0.9", "10.244.0.5", 4191, false, DenyNoListener),
        ("control port of a proxy with tap", "10.244.0.9", "10.244.0.5", 4190, true, PassSkipPort),
        ("control port where no proxy listens", "10.244.0.9", "10.244.0.5", 4190, false, DenyNoListener),
        ("skipped port while the proxy is down", "10.244.0.9", "10.244.0.5", 4567, false, PassSkipPort),
        ("skipped subnet", "10.9.0.7", "10.244.0.5", 8080, true, PassSkipSubnet),
        ("skipped ipv6 subnet", "fd99::7", "fd00:10:244::5", 8080, true, PassSkipSubnet),
        ("skipped subnet while the proxy is down", "10.9.0.7", "10.244.0.5", 8080, false, PassSkipSubnet),
        ("over loopback", "127.0.0.1", "127.0.0.1", 8080, true, PassLoopback),
        ("over ipv6 loopback", "::1", "::1", 8080, true, PassLoopback),
        ("redirected client of this pod", "10.244.0.5", "127.0.0.1", 4140, true, PassLoopback),
        ("proxy to a redirected client that is gone", "127.0.0.1", "10.244.0.5", 50000, true, PassLoopback),
        ("own address to itself", "10.244.0.5", "10.244.0.5", 8080, true, PassOwnAddress),
        ("own address to another own address", "192.168.7.5", "10.244.0.5", 8080, true, PassOwnAddress),
        ("own ipv6 address to itself", "fd00:10:244::5", "fd00:10:244::5", 8080, false, PassOwnAddress),
        ("own address that nobody enrolled", "172.16.0.5", "172.16.0.5", 8080, true, PassOwnAddress),
    ] {
        assert_eq!(inbound(client, local, port, listening), expected, "{row}");
    }
}

#[test]
fn a_pod_without_ipv6_owns_no_unspecified_address() {
    let mut pod = pod();
    pod.addresses = [Address::UNSPECIFIED; ADDRESSES];
    assert!(!pod.owns(&Address::UNSPECIFIED));
    assert!(!pod.owns(&address("0.0.0.0")));
}

#[test]
fn a_decided_connection_costs_no_lookup() {
    let never = || unreachable!("the rules before have decided");
    let _ = connect(&pod(), false, user(PROXY), "10.244.0.9", never);
    let _ = connect(&pod(), false, user(APP), "127.0.0.1", || unreachable!("loopback has decided"));
    let facts = || unreachable!("no pod is concerned");
    let _ = decide_connect(false, Some(&pod()), &address("10.244.0.9"), facts, never);
    let _ = decide_connect(true, None, &address("10.244.0.9"), facts, never);
}

#[test]
fn a_pod_says_who_its_proxy_is() {
    let decide = |flags: u32, caller: Caller| {
        let pod = Pod { flags: pod::OUTBOUND | flags, proxy_gid: 2103, ..pod() };
        connect(&pod, false, caller, "10.244.0.9", || false).verdict
    };
    let group = Caller { uid: APP, gid: 2103, cgroup: 17 };
    let cgroup = Caller { uid: APP, gid: APP, cgroup: 99 };
    for (row, flags, caller, expected) in [
        ("the user", 0, user(PROXY), PassProxy),
        ("a group that nobody exempts", 0, group, Redirect),
        ("the group", pod::EXEMPTS_GROUP, group, PassProxyGroup),
        ("the user beside a group", pod::EXEMPTS_GROUP, user(PROXY), PassProxy),
        ("a cgroup that nobody exempts", 0, cgroup, Redirect),
        ("the cgroup", pod::EXEMPTS_CGROUP, cgroup, PassProxyCgroup),
        ("an application with the proxy's user, strict", pod::EXEMPTS_CGROUP, user(PROXY), Redirect),
        ("an application with the proxy's group, strict", pod::EXEMPTS_CGROUP | pod::EXEMPTS_GROUP, group, Redirect),
    ] {
        assert_eq!(decide(flags, caller), expected, "{row}");
    }
}

#[test]
fn bypass_is_told_apart_and_leaves_loopback_its_word_inbound() {
    let bypassed = Pod { flags: pod::OUTBOUND | pod::BYPASSED, ..pod() };
    let out = |pod: &Pod, node: bool| connect(pod, node, user(APP), "10.244.0.9", || false).verdict;
    assert_eq!(out(&pod(), false), Redirect);
    assert_eq!(out(&bypassed, false), PassPodBypassed);
    assert_eq!(out(&pod(), true), PassNodeBypassed);
    assert_eq!(out(&bypassed, true), PassNodeBypassed);
    let arriving = |pod: &Pod, node: bool, client: &str| {
        let (client, local) = (address(client), address("10.244.0.5"));
        let arrival = Arrival { client: &client, local: &local, port: 8080 };
        decide_inbound(Some(pod), &arrival, || node, |_| false, || false, || false).verdict
    };
    assert_eq!(arriving(&pod(), false, "10.244.0.9"), Redirect);
    assert_eq!(arriving(&bypassed, false, "10.244.0.9"), PassPodBypassed);
    assert_eq!(arriving(&pod(), true, "10.244.0.9"), PassNodeBypassed);
    assert_eq!(arriving(&bypassed, false, "10.244.0.5"), PassOwnAddress);
}

#[test]
fn what_is_remembered_follows_from_the_verdict() {
    for (verdict, expected) in [
        (Redirect, Remember::Destination(kind::CLIENT)),
        (PassSkipPort, Remember::Destination(kind::PASSED)),
        (DenyDevice, Remember::Destination(kind::PASSED)),
        (PassProxy, Remember::Nothing),
        (PassNotMeshed, Remember::Unchanged),
        (PassNotTcp, Remember::Unchanged),
    ] {
        assert_eq!(Decision::of(verdict).remember, expected, "{verdict:?}");
    }
    for (dialled, expected) in [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.244.0.9", "10.244.0.9")] {
        assert_eq!(remembered(&address(dialled)), address(expected));
    }
}

#[test]
fn users_and_cgroups_are_different_owners() {
    assert_ne!(Owner::user(7), Owner::cgroup(7));
    assert_eq!(pod().proxy(), Owner::user(PROXY));
    assert_eq!(Pod { flags: pod::EXEMPTS_CGROUP, proxy_cgroup: 7, ..pod() }.proxy(), Owner::cgroup(7));
}
