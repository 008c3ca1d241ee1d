//! sock_ops: the hand-over of the original destination from the client's socket to the proxy's, and the list of
//! listeners. On failure the proxy gets no original destination and drops the connection, or inbound has no listener
//! and is refused.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock, bpf_sock_ops},
    helpers::generated::bpf_sock_hash_update,
    macros::sock_ops,
    programs::SockOpsContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    address::Address,
    counter,
    pod::Owner,
    socket::{Flow, FlowKey, LISTENER_SLOTS, ListenerKey, SocketState, kind},
    verdict::{Direction, Verdict},
};

use crate::{
    maps, namespace,
    trace::{self, End, Process},
};

// include/uapi/linux/bpf.h
const TCP_CONNECT: u32 = 3;
const PASSIVE_ESTABLISHED: u32 = 5;
const TCP_LISTEN: u32 = 11;

const AF_INET: u32 = 2;
const BPF_NOEXIST: u64 = 1;
const EEXIST: i64 = 17;

#[sock_ops]
pub fn weft_sock_ops(ctx: SockOpsContext) -> u32 {
    // SAFETY: the verifier checks every access to the context.
    let sk = unsafe { read_volatile(&raw const (*ctx.ops).__bindgen_anon_2.sk) };
    if !sk.is_null() {
        match ctx.op() {
            TCP_CONNECT => announce(&ctx, sk),
            PASSIVE_ESTABLISHED => take_over(&ctx, sk),
            TCP_LISTEN => record_listener(&ctx, sk),
            _ => {}
        }
    }
    1
}

/// The SYN is about to leave: the source port is known, so the proxy's end of the connection can be told in advance.
#[inline(always)]
fn announce(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (local, remote) = ends(ctx.ops);
    match maps::socket(sk) {
        Some(client) if client.kind == kind::CLIENT => {
            let original = End { address: client.destination, port: client.port };
            let netns_cookie = hand_over(ctx, sk, local, original);
            if maps::watched() {
                let process = Process { pid: client.pid, uid: client.uid, command: client.command };
                let generation = maps::pod(netns_cookie).map_or(0, |pod| pod.generation);
                let (direction, verdict) = (Direction::Outbound, Verdict::Redirect);
                trace::verdict(netns_cookie, generation, direction, verdict, &process, local, original, remote);
            }
        }
        // Dialling the proxy by hand is announced as what it is, lest it finds what a connection that never came to
        // be left behind under the same port.
        _ if remote.address.is_loopback() => {
            let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
            if maps::pod(netns_cookie).is_some_and(|pod| pod.outbound_port == remote.port) {
                hand_over(ctx, sk, local, remote);
            }
        }
        _ => {}
    }
}

/// Leaves the original destination for the proxy's end of the connection. Returns the namespace's cookie.
#[inline(always)]
fn hand_over(ctx: &SockOpsContext, sk: *mut bpf_sock, local: End, original: End) -> u64 {
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let key = FlowKey { netns_cookie, address: local.address, port: u32::from(local.port), pad: 0 };
    let flow = Flow { destination: original.address, port: u32::from(original.port) };
    // The map evicts the oldest; without an entry the proxy learns its own address and refuses to call itself.
    let _ = maps::FLOWS.insert(key, flow, 0);
    netns_cookie
}

/// A connection came to be in a pod. At the proxy's outbound port, what the client announced becomes the accepted
/// socket's own.
#[inline(always)]
fn take_over(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let Some(pod) = maps::pod(netns_cookie) else { return };
    let (local, remote) = ends(ctx.ops);
    if local.port != pod.outbound_port || !local.address.is_loopback() {
        // From outside; what runs over loopback was told by the connect program or is the proxy's own.
        if maps::watched()
            && !local.address.is_loopback()
            && local.address != remote.address
            && !pod.owns(&remote.address)
        {
            trace::accepted(netns_cookie, pod.generation, Direction::Inbound, remote, local, local);
        }
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

/// A socket bound to a proxy's inbound port listens now. Every member of an SO_REUSEPORT group takes a slot of its own.
#[inline(always)]
fn record_listener(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let Some(bound) = maps::socket(sk) else { return };
    if bound.kind != kind::BOUND {
        return;
    }
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    let family = if ctx.family() == AF_INET { 4 } else { 6 };
    let (user, cgroup, port) = (Owner::user(bound.uid), Owner::cgroup(bound.cgroup), bound.port);
    record(ctx, netns_cookie, user, port, family);
    record(ctx, netns_cookie, cgroup, port, family);
}

/// Records the socket as a listener of one owner.
#[inline(always)]
fn record(ctx: &SockOpsContext, netns_cookie: u64, owner: Owner, port: u16, family: u8) {
    let mut has_listener = false;
    // Counting in the key itself would hide the count from the verifier, which then sees an endless loop.
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
            maps::set_listens(netns_cookie, owner, port, true);
            return;
        }
        // Another member of its SO_REUSEPORT group stands for it.
        has_listener |= result == -EEXIST;
    }
    maps::set_listens(netns_cookie, owner, port, has_listener);
    maps::count_at(counter::LISTENERS_LOST);
}

/// The local and the remote end of a TCP socket. All fields are read before any branch, see `inbound::ends`.
#[inline(always)]
fn ends(ops: *mut bpf_sock_ops) -> (End, End) {
    // SAFETY: the verifier checks every access to the context.
    unsafe {
        // The local port is in host order, the remote one in the upper half of a network-order word.
        let local_port = read_volatile(&raw const (*ops).local_port) as u16;
        let remote_port = u32::from_be(read_volatile(&raw const (*ops).remote_port)) as u16;
        let family = read_volatile(&raw const (*ops).family);
        let local_v4 = Address::v4(read_volatile(&raw const (*ops).local_ip4));
        let remote_v4 = Address::v4(read_volatile(&raw const (*ops).remote_ip4));
        let remote_v6 = [
            read_volatile(&raw const (*ops).remote_ip6[0]),
            read_volatile(&raw const (*ops).remote_ip6[1]),
            read_volatile(&raw const (*ops).remote_ip6[2]),
            read_volatile(&raw const (*ops).remote_ip6[3]),
        ];
        let local_v6 = [
            read_volatile(&raw const (*ops).local_ip6[0]),
            read_volatile(&raw const (*ops).local_ip6[1]),
            read_volatile(&raw const (*ops).local_ip6[2]),
            read_volatile(&raw const (*ops).local_ip6[3]),
        ];
        let remote = if family == AF_INET { remote_v4 } else { Address { words: remote_v6 } };
        // On a v4-mapped connection the IPv4 form is the one that is always filled.
        let local = if remote.is_v4() { local_v4 } else { Address { words: local_v6 } };
        (End { address: local, port: local_port }, End { address: remote, port: remote_port })
    }
}
