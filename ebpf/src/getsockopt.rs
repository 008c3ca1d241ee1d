//! getsockopt: answers SO_ORIGINAL_DST in enrolled namespaces, and the private option with which a proxy checks that
//! its pod is intercepted. All other calls, and all failures, keep the kernel's own answer.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock, bpf_sockopt},
    macros::cgroup_sockopt,
    programs::SockoptContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    address::Address,
    counter,
    pod::{INBOUND, OUTBOUND, Pod},
    socket::{FlowKey, SocketState, attest, kind},
};

use crate::{
    context::{AF_INET, AF_INET6, IPPROTO_MPTCP, IPPROTO_TCP, SOCK_STREAM},
    maps, namespace,
};

const SOL_IP: i32 = 0;
const SOL_IPV6: i32 = 41;
/// The same number at both levels (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h).
const SO_ORIGINAL_DST: i32 = 80;

#[cgroup_sockopt(getsockopt)]
pub fn weft_getsockopt(ctx: SockoptContext) -> i32 {
    let context = ctx.sockopt;
    // SAFETY: the verifier checks every access to the context, here and below.
    let (level, option) =
        unsafe { (read_volatile(&raw const (*context).level), read_volatile(&raw const (*context).optname)) };
    let (answered, ours) = match (level, option) {
        (SOL_IP | SOL_IPV6, SO_ORIGINAL_DST) => (original_destination(&ctx, level), true),
        (attest::LEVEL, attest::OPTION) => (attestation(&ctx), true),
        _ => (false, false),
    };
    // SAFETY: as above.
    let retval = unsafe { read_volatile(&raw const (*context).retval) };
    // An existing answer to these options may come from an older layout, whose programs run before these while a node
    // migrates: keep it.
    if !(answered || ours && retval == 0) {
        // Leave the kernel's answer alone. Without this, older kernels fail every answer longer than a page.
        // SAFETY: as above.
        unsafe { write_volatile(&raw mut (*context).optlen, 0) };
    }
    1
}

/// The pod of the socket's namespace.
#[inline(always)]
fn pod(ctx: &SockoptContext) -> Option<(u64, &'static Pod)> {
    // SAFETY: as above.
    let sk = unsafe { read_volatile(&raw const (*ctx.sockopt).__bindgen_anon_1.sk) };
    let netns_cookie = namespace::cookie(ctx.as_ptr(), sk);
    maps::pod(netns_cookie).map(|pod| (netns_cookie, pod))
}

#[inline(always)]
fn original_destination(ctx: &SockoptContext, level: i32) -> bool {
    let context = ctx.sockopt;
    let Some((netns_cookie, pod)) = pod(ctx) else { return false };
    // SAFETY: as above. All fields are read before any branch: a branch between two of them becomes arithmetic on the
    // pointer, which the verifier refuses.
    let (sk, retval, family, protocol, v4, v6, remote_v4, remote_v6, local_port, remote_port) = unsafe {
        let sk = read_volatile(&raw const (*context).__bindgen_anon_1.sk);
        let words = [
            read_volatile(&raw const (*sk).src_ip6[0]),
            read_volatile(&raw const (*sk).src_ip6[1]),
            read_volatile(&raw const (*sk).src_ip6[2]),
            read_volatile(&raw const (*sk).src_ip6[3]),
        ];
        let remote_words = [
            read_volatile(&raw const (*sk).dst_ip6[0]),
            read_volatile(&raw const (*sk).dst_ip6[1]),
            read_volatile(&raw const (*sk).dst_ip6[2]),
            read_volatile(&raw const (*sk).dst_ip6[3]),
        ];
        (
            sk,
            read_volatile(&raw const (*context).retval),
            read_volatile(&raw const (*sk).family),
            read_volatile(&raw const (*sk).protocol),
            read_volatile(&raw const (*sk).src_ip4),
            Address { words },
            read_volatile(&raw const (*sk).dst_ip4),
            Address { words: remote_words },
            read_volatile(&raw const (*sk).src_port) as u16,
            u16::from_be(read_volatile(&raw const (*sk).dst_port)),
        )
    };
    // Connection tracking supports no other protocol here, and no unconnected socket.
    if (protocol != IPPROTO_TCP && protocol != IPPROTO_MPTCP) || remote_port == 0 {
        return false;
    }
    let local = if family == AF_INET { Address::v4(v4) } else { v6 };
    let remote = if family == AF_INET { Address::v4(remote_v4) } else { remote_v6 };
    let client = if remote.is_loopback() { maps::client(sk, local_port) } else { None };
    let known = match (client, maps::socket(sk)) {
        (Some((destination, port)), _) => Some((destination, port, kind::CLIENT)),
        (None, Some(state)) if state.kind != kind::BOUND => Some((state.destination, state.port, state.kind)),
        // A connection through the proxy's outbound port waits for this question.
        _ if protocol == IPPROTO_TCP && local_port == pod.outbound_port && local.is_loopback() => {
            let key = FlowKey { netns_cookie, address: remote, port: u32::from(remote_port), pad: 0 };
            let taken = take(sk, &key).map(|(destination, port)| (destination, port, kind::ACCEPTED));
            if taken.is_none() && retval != 0 {
                maps::count_at(counter::FLOW_MISSES);
                debug!(ctx, "flow miss netns {} port {}", netns_cookie, remote_port);
            }
            taken
        }
        _ => None,
    };
    let (address, port) = match known {
        // Dialled directly: an existing answer, from connection tracking or from programs of another layout, is better.
        Some((destination, _, kind::ACCEPTED)) if destination.is_loopback() && retval == 0 => return false,
        Some((destination, port, _)) => (destination, port),
        // Connection tracking has the right answer when the connection came through iptables.
        None if retval == 0 => return false,
        // The storage is on the first subflow, not on this socket, so nothing is known about it.
        None if protocol == IPPROTO_MPTCP => return false,
        // The local address of a steered socket is the address that the client dialled.
        None => (local, local_port),
    };
    // The level decides the family, not the socket: a dual-stack listener uses SOL_IP for its IPv4 connections.
    match (level, address.as_v4()) {
        (SOL_IP, Some(word_be)) => answer_v4(context, word_be, port),
        (SOL_IPV6, None) => answer_v6(context, &address, port),
        _ => false,
    }
}

/// Moves the original destination of a connection that waits for its proxy to the socket that the proxy accepted: it
/// may ask again.
#[inline(always)]
fn take(sk: *mut bpf_sock, key: &FlowKey) -> Option<(Address, u16)> {
    let (destination, port) = maps::waiting(key)
        .map(|waiting| (waiting.destination, waiting.port))
        .or_else(|| maps::flow(key).map(|flow| (flow.destination, flow.port)))?;
    let port = port as u16;
    // Without memory it goes on waiting.
    if maps::remember(sk, &SocketState::accepted(destination, port)) {
        maps::stop_waiting(key);
        maps::remove_flow(key);
    }
    Some((destination, port))
}

/// Writes a `sockaddr_in`.
#[inline(always)]
fn answer_v4(context: *mut bpf_sockopt, word_be: u32, port: u16) -> bool {
    const BYTES: usize = 16;
    let Some(value) = buffer::<BYTES>(context) else { return false };
    // SAFETY: the buffer has these bytes; the compiler cannot prove its alignment, hence 16-bit words.
    unsafe {
        write_volatile(value.cast::<u16>(), AF_INET as u16);
        write_volatile(value.add(2).cast::<u16>(), port.to_be());
        write_volatile(value.add(4).cast::<u32>(), word_be);
        write_volatile(value.add(8).cast::<u32>(), 0);
        write_volatile(value.add(12).cast::<u32>(), 0);
    }
    succeed(context, BYTES);
    true
}

/// Writes a `sockaddr_in6`.
#[inline(always)]
fn answer_v6(context: *mut bpf_sockopt, address: &Address, port: u16) -> bool {
    const BYTES: usize = 28;
    let Some(value) = buffer::<BYTES>(context) else { return false };
    // SAFETY: the buffer has these bytes.
    unsafe {
        write_volatile(value.cast::<u16>(), AF_INET6 as u16);
        write_volatile(value.add(2).cast::<u16>(), port.to_be());
        write_volatile(value.add(4).cast::<u32>(), 0);
        write_volatile(value.add(8).cast::<u32>(), address.words[0]);
        write_volatile(value.add(12).cast::<u32>(), address.words[1]);
        write_volatile(value.add(16).cast::<u32>(), address.words[2]);
        write_volatile(value.add(20).cast::<u32>(), address.words[3]);
        write_volatile(value.add(24).cast::<u32>(), 0);
    }
    succeed(context, BYTES);
    true
}

/// Returns to a proxy what is in force for its pod.
#[inline(always)]
fn attestation(ctx: &SockoptContext) -> bool {
    let context = ctx.sockopt;
    let Some((netns_cookie, pod)) = pod(ctx) else { return false };
    // SAFETY: as above.
    let socket_type = unsafe { read_volatile(&raw const (*(*context).__bindgen_anon_1.sk).type_) };
    if socket_type != SOCK_STREAM {
        return false;
    }
    let Some(value) = buffer::<{ attest::BYTES }>(context) else { return false };
    let mut flags = pod.flags & (OUTBOUND | INBOUND);
    // Without a listener, steering refuses connections.
    if !maps::listens(netns_cookie, pod, pod.inbound_port) {
        flags &= !INBOUND;
    }
    if !maps::is_current(netns_cookie, pod) {
        return false;
    }
    // SAFETY: the buffer has these bytes.
    unsafe {
        write_volatile(value.cast::<u32>(), flags);
        write_volatile(value.add(4).cast::<u32>(), pod.generation);
        write_volatile(value.add(8).cast::<u64>(), netns_cookie);
    }
    succeed(context, attest::BYTES);
    true
}

/// The option buffer, if the caller made it large enough.
#[inline(always)]
fn buffer<const BYTES: usize>(context: *mut bpf_sockopt) -> Option<*mut u8> {
    // SAFETY: as above; the comparison is what the verifier needs to see.
    unsafe {
        let value = read_volatile(&raw const (*context).__bindgen_anon_2.optval).cast::<u8>();
        let end = read_volatile(&raw const (*context).__bindgen_anon_3.optval_end).cast::<u8>();
        (value.add(BYTES) <= end).then_some(value)
    }
}

/// Replaces the kernel's result by success. Two separate stores: the verifier rejects merged ones.
#[inline(always)]
fn succeed(context: *mut bpf_sockopt, bytes: usize) {
    // SAFETY: as above.
    unsafe {
        write_volatile(&raw mut (*context).optlen, bytes as i32);
        write_volatile(&raw mut (*context).retval, 0);
    }
}
