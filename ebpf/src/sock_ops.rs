//! sock_ops: hands over the original destination from the client's socket to the proxy's, and records listeners. On
//! failure the proxy gets no original destination and drops the connection, or there is no inbound listener and the
//! connection is refused.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock,
    helpers::generated::{bpf_sock_hash_update, bpf_sock_ops_cb_flags_set},
    macros::sock_ops,
    programs::SockOpsContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    counter,
    pod::Owner,
    socket::{Flow, FlowKey, LISTENER_SLOTS, ListenerKey, SocketState, kind},
    verdict::{Direction, Verdict},
};

use crate::{
    context::{AF_INET, End, ends},
    maps, namespace,
    trace::{self, Process},
};

// include/uapi/linux/bpf.h
const TCP_CONNECT: u32 = 3;
const PASSIVE_ESTABLISHED: u32 = 5;
const RETRANSMISSION_TIMEOUT: u32 = 8;
const TCP_LISTEN: u32 = 11;
/// Requests calls at `RETRANSMISSION_TIMEOUT`.
const RTO_CB_FLAG: u32 = 1;

const BPF_NOEXIST: u64 = 1;
const EEXIST: i64 = 17;

#[sock_ops]
pub fn weft_sock_ops(ctx: SockOpsContext) -> u32 {
    // Most calls, of any socket of any pod, are irrelevant: they return before any lookup.
    match ctx.op() {
        TCP_CONNECT => with_socket(&ctx, announce),
        PASSIVE_ESTABLISHED => with_socket(&ctx, take_over),
        RETRANSMISSION_TIMEOUT => with_socket(&ctx, announce_again),
        TCP_LISTEN => with_socket(&ctx, record_listener),
        _ => {}
    }
    1
}

#[inline(always)]
fn with_socket(ctx: &SockOpsContext, handle: impl FnOnce(&SockOpsContext, *mut bpf_sock)) {
    // SAFETY: the verifier checks every access to the context.
    let sk = unsafe { read_volatile(&raw const (*ctx.ops).__bindgen_anon_2.sk) };
    if !sk.is_null() {
        handle(ctx, sk);
    }
}

/// The SYN is about to be sent: the source port is known, so the destination can be announced to the proxy's end.
#[inline(always)]
fn announce(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    match maps::socket(sk) {
        Some(client) if client.kind == kind::CLIENT => {
            let (local, remote) = ends(ctx.ops);
            let original = End { address: client.destination, port: client.port };
            let netns_cookie = hand_over(ctx, sk, local, original);
            call_again(ctx);
            if maps::watched() {
                let process = Process { pid: client.pid, uid: client.uid, command: client.command };
                let generation = maps::pod(netns_cookie).map_or(0, |pod| pod.generation);
                let (direction, verdict) = (Direction::Outbound, Verdict::Redirect);
                trace::verdict(netns_cookie, generation, direction, verdict, &process, local, original, remote);
            }
        }
        // A direct connection to the proxy is announced as such. Otherwise it would find the entry of an aborted
        // connection from the same port.
        _ => {
            let (local, remote) = ends(ctx.ops);
            if remote.address.is_loopback() {
                let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
                if maps::pod(netns_cookie).is_some_and(|pod| pod.outbound_port == remote.port) {
                    hand_over(ctx, sk, local, remote);
                }
            }
        }
    }
}

/// Requests a call at every retransmission, too: an announcement that waits that long may have been evicted.
#[inline(always)]
fn call_again(ctx: &SockOpsContext) {
    // SAFETY: the verifier checks every access to the context. Flags of programs before this one stay.
    let flags = unsafe { read_volatile(&raw const (*ctx.ops).bpf_sock_ops_cb_flags) };
    // SAFETY: the helper takes this kind of context. It refuses flags that it does not know, and these it does.
    unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, (flags | RTO_CB_FLAG) as i32) };
}

/// The SYN, or data after a handshake that the proxy's end has not completed, is about to be sent again. Announcements
/// share one map, so those of other pods may have evicted this one.
#[inline(always)]
fn announce_again(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (local, _) = ends(ctx.ops);
    if let Some(client) = maps::socket(sk).filter(|state| state.kind == kind::CLIENT) {
        hand_over(ctx, sk, local, End { address: client.destination, port: client.port });
    }
}

/// Announces the original destination to the proxy's end of the connection. Returns the namespace's cookie.
#[inline(always)]
fn hand_over(ctx: &SockOpsContext, sk: *mut bpf_sock, local: End, original: End) -> u64 {
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let key = FlowKey { netns_cookie, address: local.address, port: u32::from(local.port), pad: 0 };
    let flow = Flow { destination: original.address, port: u32::from(original.port) };
    // The map evicts the oldest entry; without an entry the proxy gets its own address and refuses to call itself.
    let _ = maps::FLOWS.insert(key, flow, 0);
    netns_cookie
}

/// A connection was established in a pod. At the proxy's outbound port, the client's announcement becomes the state of
/// the accepted socket.
#[inline(always)]
fn take_over(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (local, remote) = ends(ctx.ops);
    // Connections from outside have no announcement: most connections of a node return here.
    let is_from_outside = !local.address.is_loopback();
    if is_from_outside && !maps::watched() {
        return;
    }
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let Some(pod) = maps::pod(netns_cookie) else { return };
    if is_from_outside {
        if local.address != remote.address && !pod.owns(&remote.address) {
            trace::accepted(netns_cookie, pod.generation, Direction::Inbound, remote, local, local);
        }
        return;
    }
    // Other connections over loopback belong to the application or the proxy itself.
    if local.port != pod.outbound_port {
        return;
    }
    let key = FlowKey { netns_cookie, address: remote.address, port: u32::from(remote.port), pad: 0 };
    let Some(flow) = maps::FLOWS.get_ptr(key) else {
        maps::count_at(counter::FLOW_MISSES);
        debug!(ctx, "flow miss netns {} port {}", netns_cookie, remote.port);
        return;
    };
    // SAFETY: an LRU entry may be reused while it is read; it lives for microseconds in a map of thousands.
    let flow = unsafe { *flow };
    let port = flow.port as u16;
    maps::remember(
        sk,
        &SocketState { destination: flow.destination, port, kind: kind::ACCEPTED, ..SocketState::default() },
    );
    let _ = maps::FLOWS.remove(key);
    if maps::watched() {
        let original = End { address: flow.destination, port };
        trace::accepted(netns_cookie, pod.generation, Direction::Outbound, remote, original, local);
    }
}

/// A socket that a proxy bound to one of its ports begins to listen. Every member of an SO_REUSEPORT group takes its
/// own slot.
#[inline(always)]
fn record_listener(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let Some(bound) = maps::socket(sk).filter(|state| state.kind == kind::BOUND) else { return };
    let (owner, port) = (bound.owner, bound.port);
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let family = if ctx.family() == AF_INET { 4 } else { 6 };
    record(ctx, netns_cookie, owner, port, family);
}

/// Records the socket as a listener of its owner. If no slot is free, other members of its SO_REUSEPORT group stand in
/// for it; without room in the map the proxy is not added to PROXIES, and so never attested.
#[inline(always)]
fn record(ctx: &SockOpsContext, netns_cookie: u64, owner: Owner, port: u16, family: u8) {
    // A counter in the key itself would be hidden from the verifier, which would then see an endless loop.
    for slot in 0..LISTENER_SLOTS {
        let mut key = ListenerKey { netns_cookie, owner, port, family, slot, pad: 0 };
        // SAFETY: the key outlives the call; the operation allows this helper (sock_map_op_okay).
        let result = unsafe {
            bpf_sock_hash_update(
                ctx.ops,
                (&raw const maps::LISTENERS).cast_mut().cast(),
                (&raw mut key).cast(),
                BPF_NOEXIST,
            )
        };
        if result == 0 {
            debug!(ctx, "listener netns {} port {} family {} slot {}", netns_cookie, port, family, slot);
            maps::set_listens(netns_cookie, owner, port, slot);
            return;
        }
        // Any error other than a taken slot means that the map is full: no other slot would fit either.
        if result != -EEXIST {
            break;
        }
    }
    maps::count_at(counter::LISTENERS_LOST);
}
