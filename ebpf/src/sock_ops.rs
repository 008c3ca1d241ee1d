//! sock_ops: hands over the original destination from the client's socket to the proxy's, and records listeners. On
//! failure the proxy gets no original destination and drops the connection, or there is no inbound listener and the
//! connection is refused.
//!
//! ```text
//! connect(2): destination ─> CLIENTS, until the socket closes, or socket's storage, if there is no room
//! SYN:                   └─> WAITING ──────────────────> the proxy asks: socket's storage (getsockopt)
//!                        └─> FLOWS, if there is no room ─> handshake: socket's storage
//! ```
//!
//! Making socket storage takes longer than any other step of a redirect, so it is not done while the application
//! connects.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock,
    helpers::generated::{bpf_ktime_get_ns, bpf_sock_hash_update, bpf_sock_ops_cb_flags_set},
    macros::sock_ops,
    programs::SockOpsContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    counter,
    pod::Owner,
    socket::{Flow, FlowKey, LISTENER_SLOTS, ListenerKey, SocketState, Waiting, kind},
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
const TCP_STATE: u32 = 10;
const TCP_LISTEN: u32 = 11;
/// Requests calls at `RETRANSMISSION_TIMEOUT`.
const RTO_CB_FLAG: u32 = 1;
/// Requests calls at `TCP_STATE`.
const STATE_CB_FLAG: u32 = 4;
// include/net/tcp_states.h
const TCP_SYN_SENT: u32 = 2;
const TCP_CLOSE: u32 = 7;

const BPF_NOEXIST: u64 = 1;
const EEXIST: i64 = 17;

#[sock_ops]
pub fn weft_sock_ops(ctx: SockOpsContext) -> u32 {
    // Most calls, of any socket of any pod, are irrelevant: they return before any lookup.
    match ctx.op() {
        TCP_CONNECT => with_socket(&ctx, announce),
        PASSIVE_ESTABLISHED => with_socket(&ctx, take_over),
        RETRANSMISSION_TIMEOUT => with_socket(&ctx, announce_again),
        TCP_STATE => with_socket(&ctx, forget_closed),
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
    let (local, remote) = ends(ctx.ops);
    // Of the connections of a node, few are to loopback: most return here.
    if !remote.address.is_loopback() {
        return;
    }
    let key = flow_key(ctx, sk, local);
    let netns_cookie = key.netns_cookie;
    match maps::connecting(sk, netns_cookie, local.port) {
        Some((client, since_ns)) => {
            let original = End { address: client.destination, port: client.port };
            hand_over(&key, original, since_ns);
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
        None => {
            if maps::pod(netns_cookie).is_some_and(|pod| pod.outbound_port == remote.port) {
                hand_over(&key, remote, 0);
            }
        }
    }
}

/// The socket of a client is closed: what it dialled is not needed any more. And no proxy will ask about a connection
/// that was refused.
#[inline(always)]
fn forget_closed(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (before, after) = (ctx.arg(0), ctx.arg(1));
    if after != TCP_CLOSE {
        return;
    }
    maps::remove_client(sk);
    if before == TCP_SYN_SENT {
        let (local, _) = ends(ctx.ops);
        maps::stop_waiting(&flow_key(ctx, sk, local));
    }
}

/// Requests a call at every retransmission, too: an announcement that waits that long may have been evicted. And at
/// every change of the state, of which the last removes the client's entry.
#[inline(always)]
fn call_again(ctx: &SockOpsContext) {
    // SAFETY: the verifier checks every access to the context. Flags of programs before this one stay.
    let flags = unsafe { read_volatile(&raw const (*ctx.ops).bpf_sock_ops_cb_flags) };
    // SAFETY: the helper takes this kind of context. It refuses flags that it does not know, and these it does.
    unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, (flags | RTO_CB_FLAG | STATE_CB_FLAG) as i32) };
}

/// The SYN, or data after a handshake that the proxy's end has not completed, is about to be sent again. Announcements
/// share one map, so those of other pods may have evicted this one.
#[inline(always)]
fn announce_again(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (local, _) = ends(ctx.ops);
    let key = flow_key(ctx, sk, local);
    if let Some((client, _)) = maps::connecting(sk, key.netns_cookie, local.port) {
        // What waits cannot have been evicted; and the proxy may have asked by now.
        if maps::waiting(&key).is_none() {
            announce_flow(&key, End { address: client.destination, port: client.port });
        }
    }
}

/// The key of a connection, by its client's end.
#[inline(always)]
fn flow_key(ctx: &SockOpsContext, sk: *mut bpf_sock, client: End) -> FlowKey {
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    FlowKey { netns_cookie, address: client.address, port: u32::from(client.port), pad: 0 }
}

/// Announces the original destination to the proxy's end of the connection. `since_ns` spares reading the clock; 0 if
/// it is not known.
#[inline(always)]
fn hand_over(key: &FlowKey, original: End, since_ns: u64) {
    // SAFETY: reads a clock.
    let since_ns = if since_ns == 0 { unsafe { bpf_ktime_get_ns() } } else { since_ns };
    let waiting = Waiting { destination: original.address, port: u32::from(original.port), pad: 0, since_ns };
    if !maps::wait(key, &waiting) {
        announce_flow(key, original);
    }
}

/// The same, until the end of the handshake.
#[inline(always)]
fn announce_flow(key: &FlowKey, original: End) {
    let flow = Flow { destination: original.address, port: u32::from(original.port) };
    // The map evicts the oldest entry; without an entry the proxy gets its own address and refuses to call itself.
    maps::set_overflow();
    maps::add_flow(key, &flow);
}

/// A connection was established in a pod. At the proxy's outbound port, a client's announcement that others may evict
/// becomes the state of the accepted socket.
#[inline(always)]
fn take_over(ctx: &SockOpsContext, sk: *mut bpf_sock) {
    let (is_watched, may_be_in_flows) = (maps::watched(), maps::overflow());
    // Nearly always, the proxy's question is all that is left to do.
    if !is_watched && !may_be_in_flows {
        return;
    }
    let (local, remote) = ends(ctx.ops);
    // Connections from outside have no announcement.
    let is_from_outside = !local.address.is_loopback();
    if is_from_outside && !is_watched {
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
    let original = match maps::waiting(&key) {
        Some(waiting) => End { address: waiting.destination, port: waiting.port as u16 },
        None => match keep_flow(sk, &key) {
            Some(original) => original,
            None => return,
        },
    };
    if is_watched {
        trace::accepted(netns_cookie, pod.generation, Direction::Outbound, remote, original, local);
    }
}

/// Moves an announcement that others may evict to the accepted socket.
#[inline(always)]
fn keep_flow(sk: *mut bpf_sock, key: &FlowKey) -> Option<End> {
    let flow = maps::flow(key)?;
    maps::remember(sk, &SocketState::accepted(flow.destination, flow.port as u16));
    maps::remove_flow(key);
    Some(End { address: flow.destination, port: flow.port as u16 })
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
