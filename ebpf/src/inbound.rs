//! sk_lookup: steers new connections of one pod to its proxy. One instance per pod, because the program cannot ask
//! which namespace it runs in. Without a listener, and without the pod's entry, connections are refused.

use core::ptr::read_volatile;

use aya_ebpf::{
    Global,
    bindings::{bpf_sk_lookup, sk_action},
    macros::sk_lookup,
    programs::SkLookupContext,
};
use weft_ebpf_abi::{
    address::Address,
    pod::Pod,
    socket::{LISTENER_SLOTS, ListenerKey},
    switch,
    verdict::{Direction, Verdict, verdict_inbound},
};

use crate::{
    maps,
    trace::{self, End, Process},
};

const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;
/// The last word is ours, also while an older layout's program, which runs before this one, has chosen already.
const BPF_SK_LOOKUP_F_REPLACE: u64 = 1;

/// The pod of this instance; the loader sets it.
#[unsafe(no_mangle)]
static NETNS_COOKIE: Global<u64> = Global::new(0);

#[sk_lookup]
pub fn weft_sk_lookup(ctx: SkLookupContext) -> u32 {
    let context = ctx.lookup;
    // SAFETY: the verifier checks every access to the context, here and below.
    if unsafe { read_volatile(&raw const (*context).protocol) } != IPPROTO_TCP {
        return sk_action::SK_PASS;
    }
    let netns_cookie = NETNS_COOKIE.load();
    let (client, local) = ends(context);
    let pod = maps::pod(netns_cookie);
    let verdict = match pod {
        Some(pod) => verdict_inbound(
            pod,
            maps::switch(switch::BYPASS) != 0,
            &client.address,
            &local.address,
            || maps::skips_port(pod, netns_cookie, Direction::Inbound, local.port),
            || maps::skips_subnet(pod, netns_cookie, &client.address),
            || steer(&ctx, netns_cookie, pod, local.address.is_v4()),
        ),
        None => Verdict::DenyUnknownPod,
    };
    if verdict == Verdict::PassLoopback || verdict == Verdict::PassOwnAddress {
        // The other end has been told already, by the connect program.
        return sk_action::SK_PASS;
    }
    maps::count(Direction::Inbound, verdict);
    if maps::watched() {
        let port = match pod {
            Some(pod) if verdict == Verdict::Redirect => pod.inbound_port,
            _ => local.port,
        };
        let new = End { address: local.address, port };
        let generation = pod.map_or(0, |pod| pod.generation);
        trace::verdict(netns_cookie, generation, Direction::Inbound, verdict, &Process::NONE, client, local, new);
    }
    if verdict.is_refusal() { sk_action::SK_DROP } else { sk_action::SK_PASS }
}

/// Gives the connection to a listener of the proxy. The kernel then spreads over the listener's SO_REUSEPORT group.
#[inline(always)]
fn steer(ctx: &SkLookupContext, netns_cookie: u64, pod: &Pod, v4: bool) -> bool {
    // A dual-stack listener serves IPv4 as well; the kernel refuses it if it is IPv6 only.
    (v4 && assign(ctx, netns_cookie, pod, 4)) || assign(ctx, netns_cookie, pod, 6)
}

#[inline(always)]
fn assign(ctx: &SkLookupContext, netns_cookie: u64, pod: &Pod, family: u8) -> bool {
    for slot in 0..LISTENER_SLOTS {
        let key = ListenerKey { netns_cookie, owner: pod.proxy(), port: pod.inbound_port, family, slot, pad: 0 };
        if maps::LISTENERS.redirect_sk_lookup(SkLookupContext::new(ctx.lookup), key, BPF_SK_LOOKUP_F_REPLACE).is_ok() {
            return true;
        }
    }
    false
}

/// The client and the local end.
///
/// All fields are read before any branch: a branch between two of them becomes arithmetic on the pointer, which the
/// verifier refuses.
#[inline(always)]
fn ends(context: *mut bpf_sk_lookup) -> (End, End) {
    // SAFETY: as above.
    unsafe {
        let client_port = u16::from_be(read_volatile(&raw const (*context).remote_port));
        let local_port = read_volatile(&raw const (*context).local_port) as u16;
        let family = read_volatile(&raw const (*context).family);
        let client_v4 = Address::v4(read_volatile(&raw const (*context).remote_ip4));
        let local_v4 = Address::v4(read_volatile(&raw const (*context).local_ip4));
        let client_v6 = [
            read_volatile(&raw const (*context).remote_ip6[0]),
            read_volatile(&raw const (*context).remote_ip6[1]),
            read_volatile(&raw const (*context).remote_ip6[2]),
            read_volatile(&raw const (*context).remote_ip6[3]),
        ];
        let local_v6 = [
            read_volatile(&raw const (*context).local_ip6[0]),
            read_volatile(&raw const (*context).local_ip6[1]),
            read_volatile(&raw const (*context).local_ip6[2]),
            read_volatile(&raw const (*context).local_ip6[3]),
        ];
        let (client, local) = if family == AF_INET {
            (client_v4, local_v4)
        } else {
            (Address { words: client_v6 }, Address { words: local_v6 })
        };
        (End { address: client, port: client_port }, End { address: local, port: local_port })
    }
}
