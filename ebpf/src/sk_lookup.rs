//! sk_lookup: steers new connections of pods to their proxies. The program cannot get the namespace in which it runs:
//! so every pod has a stub of a few instructions, attached to its namespace, that leaves the pod's cookie and calls
//! this one (the agent's `steering`). Without a listener, and without the pod's entry, connections are refused.

use core::{hint::black_box, ptr::read_volatile};

use aya_ebpf::{bindings::sk_action, macros::sk_lookup, programs::SkLookupContext};
use weft_ebpf_abi::{
    decision::{Arrival, Decision, decide_inbound},
    pod::{EXEMPTS_CGROUP, Pod},
    socket::{LISTENER_SLOTS, ListenerKey, Slots},
    switch,
    verdict::{Direction, Verdict},
};

use crate::{
    context::{self, AF_INET, End},
    maps,
    trace::{self, Process},
};

/// Overrides the selection of an older layout's program, which runs first.
const BPF_SK_LOOKUP_F_REPLACE: u64 = 1 << 0;
/// Selects the assigned listener itself, not another socket of its SO_REUSEPORT group.
const BPF_SK_LOOKUP_F_NO_REUSEPORT: u64 = 1 << 1;

#[sk_lookup]
pub fn weft_sk_lookup(ctx: SkLookupContext) -> u32 {
    let context = ctx.lookup;
    let netns_cookie = maps::lookup(context);
    let (client, local) = context::arrival(context);
    let pod = maps::pod(netns_cookie);
    let arrival = Arrival { client: &client.address, local: &local.address, port: local.port };
    let decision = decide_inbound(
        pod,
        &arrival,
        || maps::switch(switch::BYPASS) != 0,
        |port| pod.is_some_and(|pod| maps::listens(netns_cookie, pod, port)),
        || pod.is_some_and(|pod| maps::skips_port(pod, netns_cookie, Direction::Inbound, local.port)),
        || pod.is_some_and(|pod| maps::skips_subnet(pod, netns_cookie, &client.address)),
    );
    let is_current = pod.is_none_or(|pod| maps::is_current(netns_cookie, pod));
    let decision = if is_current { decision } else { Decision::of(Verdict::DenyUnknownPod) };
    let verdict = steer(&ctx, netns_cookie, pod, decision, &client);
    if verdict == Verdict::PassLoopback || verdict == Verdict::PassOwnAddress {
        // The connect program has reported the other end.
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

/// Assigns the connection to a listener of the proxy if the decision requires it. Returns the final decision.
#[inline(always)]
fn steer(ctx: &SkLookupContext, netns_cookie: u64, pod: Option<&Pod>, decision: Decision, client: &End) -> Verdict {
    let (Some(pod), Some(port)) = (pod, decision.steer_to) else { return decision.verdict };
    // In a strict pod the proxy's user is not trusted, and the kernel lets any socket of the same user join an
    // SO_REUSEPORT group: so this program chooses among the recorded listeners.
    let (first, flags) = if pod.has(EXEMPTS_CGROUP) {
        let spread = u32::from(client.port) ^ client.address.words[3] ^ client.address.words[1];
        let slots = maps::slots(netns_cookie, pod, port);
        (choose(slots, spread), BPF_SK_LOOKUP_F_REPLACE | BPF_SK_LOOKUP_F_NO_REUSEPORT)
    } else {
        (0, BPF_SK_LOOKUP_F_REPLACE)
    };
    let key = ListenerKey { netns_cookie, owner: pod.proxy(), port, family: 6, slot: 0, pad: 0 };
    // SAFETY: the verifier checks every access to the context.
    let is_v4 = unsafe { read_volatile(&raw const (*ctx.lookup).family) } == AF_INET;
    if assign(ctx, key, is_v4, first, flags) { decision.verdict } else { Verdict::DenyNoListener }
}

/// One of the taken slots, by a number that differs between clients. The lowest slots are taken first; where one in
/// between is empty, the next one is used.
#[inline(always)]
fn choose(slots: Slots, spread: u32) -> u8 {
    let taken = slots.count_ones();
    // Multiplication by a large odd constant moves every bit into the upper half (Knuth, TAOCP 3, 6.4).
    let hash = spread.wrapping_mul(0x9e37_79b1) >> 16;
    if taken == 0 { 0 } else { (hash % taken) as u8 }
}

/// Tries all slots, starting at one: slots of closed listeners are empty. A dual-stack listener serves IPv4 too, so its
/// slots come after those of IPv4; the kernel refuses it if it is IPv6 only.
#[inline(always)]
fn assign(ctx: &SkLookupContext, key: ListenerKey, is_v4: bool, first: u8, flags: u64) -> bool {
    // Not unrolled, which keeps the program small.
    let (mut step, end) = (if is_v4 { 0 } else { LISTENER_SLOTS }, black_box(2 * LISTENER_SLOTS));
    while step < 2 * LISTENER_SLOTS && step < end {
        let family = if step < LISTENER_SLOTS { 4 } else { 6 };
        let key = ListenerKey { family, slot: (first + step) % LISTENER_SLOTS, ..key };
        if maps::LISTENERS.redirect_sk_lookup(SkLookupContext::new(ctx.lookup), key, flags).is_ok() {
            return true;
        }
        step += 1;
    }
    false
}
