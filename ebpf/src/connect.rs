//! connect4 and connect6: where a meshed pod's connections go. On any failure the connection is refused (EPERM) or goes
//! to the proxy, never around it; a caller whose namespace is not enrolled passes after one failed lookup.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock, bpf_sock_addr, sockaddr},
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::{bpf_bind, bpf_get_current_cgroup_id, bpf_get_netns_cookie, bpf_setsockopt},
    },
    macros::cgroup_sock_addr,
    programs::SockAddrContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    address::Address,
    counter,
    event::COMMAND_BYTES,
    pod::{EXEMPTS_CGROUP, OUTBOUND, Pod},
    socket::{SocketState, kind},
    switch,
    verdict::{Caller, Direction, Verdict, verdict_outbound},
};

use crate::{
    maps, namespace,
    trace::{self, End, Process},
};

const REFUSE: i32 = 0;
const PROCEED: i32 = 1;

const SOCK_STREAM: u32 = 1;
const IPPROTO_TCP: u32 = 6;
/// Multipath TCP; its subflows are TCP sockets like any other (include/uapi/linux/in.h).
const IPPROTO_MPTCP: u32 = 262;
const SOL_SOCKET: i32 = 1;
const SO_BINDTODEVICE: i32 = 25;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// The same in every network namespace (include/net/flow.h).
const LOOPBACK_IFINDEX: u32 = 1;

/// What a connect program has to do.
enum Outcome {
    Proceed,
    Refuse,
    /// Rewrite to the proxy on this port.
    Redirect(u16),
}

#[cgroup_sock_addr(connect4)]
pub fn weft_connect4(ctx: SockAddrContext) -> i32 {
    let context = ctx.sock_addr;
    // SAFETY: the verifier checks every access to the context. It accepts single words only and LLVM likes to merge
    // neighbours, hence volatile here and everywhere else.
    let destination = Address::v4(unsafe { read_volatile(&raw const (*context).user_ip4) });
    match connect(&ctx, &destination) {
        Outcome::Proceed => PROCEED,
        Outcome::Refuse => REFUSE,
        Outcome::Redirect(port) => {
            // SAFETY: as above.
            unsafe {
                write_volatile(&raw mut (*context).user_ip4, Address::LOCALHOST_V4.words[3]);
                write_volatile(&raw mut (*context).user_port, u32::from(port.to_be()));
            }
            PROCEED
        }
    }
}

#[cgroup_sock_addr(connect6)]
pub fn weft_connect6(ctx: SockAddrContext) -> i32 {
    let context = ctx.sock_addr;
    let destination = read_user_ip6(context);
    match connect(&ctx, &destination) {
        Outcome::Proceed => PROCEED,
        Outcome::Refuse => REFUSE,
        Outcome::Redirect(port) => {
            // A v4-mapped destination stays IPv4: the proxy's [::1] may not exist, and the answer's family must match.
            let proxy = if destination.is_v4() { Address::LOCALHOST_V4 } else { Address::LOCALHOST_V6 };
            write_user_ip6(context, &proxy);
            // SAFETY: as in `weft_connect4`.
            unsafe { write_volatile(&raw mut (*context).user_port, u32::from(port.to_be())) };
            PROCEED
        }
    }
}

/// Reads the four words of an IPv6 context's address.
#[inline(always)]
pub(crate) fn read_user_ip6(context: *mut bpf_sock_addr) -> Address {
    // SAFETY: as in `weft_connect4`.
    unsafe {
        Address {
            words: [
                read_volatile(&raw const (*context).user_ip6[0]),
                read_volatile(&raw const (*context).user_ip6[1]),
                read_volatile(&raw const (*context).user_ip6[2]),
                read_volatile(&raw const (*context).user_ip6[3]),
            ],
        }
    }
}

/// Writes the four words of an IPv6 context's address.
#[inline(always)]
pub(crate) fn write_user_ip6(context: *mut bpf_sock_addr, address: &Address) {
    // SAFETY: as in `weft_connect4`.
    unsafe {
        write_volatile(&raw mut (*context).user_ip6[0], address.words[0]);
        write_volatile(&raw mut (*context).user_ip6[1], address.words[1]);
        write_volatile(&raw mut (*context).user_ip6[2], address.words[2]);
        write_volatile(&raw mut (*context).user_ip6[3], address.words[3]);
    }
}

#[inline(always)]
fn connect(ctx: &SockAddrContext, destination: &Address) -> Outcome {
    let context = ctx.sock_addr;
    // SAFETY: as in `weft_connect4`.
    let (socket_type, protocol) =
        unsafe { (read_volatile(&raw const (*context).type_), read_volatile(&raw const (*context).protocol)) };
    if socket_type != SOCK_STREAM || (protocol != IPPROTO_TCP && protocol != IPPROTO_MPTCP) {
        return Outcome::Proceed;
    }
    // SAFETY: the helper takes this kind of context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    let Some(pod) = maps::pod(netns_cookie) else { return Outcome::Proceed };
    if !pod.has(OUTBOUND) {
        return Outcome::Proceed;
    }
    // SAFETY: as in `weft_connect4`.
    let (port, sk) = unsafe {
        let port = u16::from_be(read_volatile(&raw const (*context).user_port) as u16);
        (port, read_volatile(&raw const (*context).__bindgen_anon_1.sk))
    };
    namespace::carry(sk, netns_cookie);
    let uid_gid = bpf_get_current_uid_gid();
    let uid = uid_gid as u32;
    // SAFETY: the helper takes no context.
    let cgroup = if pod.has(EXEMPTS_CGROUP) { unsafe { bpf_get_current_cgroup_id() } } else { 0 };
    let caller = Caller { uid, gid: (uid_gid >> 32) as u32, cgroup };
    let mut verdict = verdict_outbound(pod, maps::switch(switch::BYPASS) != 0, &caller, destination, || {
        maps::skips_port(pod, netns_cookie, Direction::Outbound, port)
    });
    let watched = maps::watched();
    let mut process = Process { uid, ..Process::NONE };
    if watched {
        process.pid = (bpf_get_current_pid_tgid() >> 32) as u32;
        process.command = bpf_get_current_comm().unwrap_or([0; COMMAND_BYTES]);
    }
    if verdict == Verdict::Redirect && !release_from_device(ctx, sk) {
        verdict = Verdict::DenyDevice;
    }
    let state = SocketState {
        destination: *destination,
        port,
        uid,
        pid: process.pid,
        command: process.command,
        ..SocketState::default()
    };
    match verdict {
        Verdict::Redirect => {
            if !maps::remember(sk, &SocketState { kind: kind::CLIENT, ..state }) {
                verdict = Verdict::DenyNoMemory;
            }
        }
        // The socket may have been redirected before and disconnected since (connect to AF_UNSPEC). A proxy's sockets
        // are many, and nobody asks them where they were going.
        Verdict::PassProxy | Verdict::PassProxyGroup | Verdict::PassProxyCgroup => maps::forget(sk),
        // What connection tracking would answer. Without memory the socket has at least no wrong answer left.
        _ => {
            let destination = match destination.is_unspecified() {
                true if destination.is_v4() => Address::LOCALHOST_V4,
                true => Address::LOCALHOST_V6,
                false => *destination,
            };
            if !maps::remember(sk, &SocketState { destination, kind: kind::PASSED, ..state }) {
                maps::forget(sk);
            }
        }
    }
    maps::count(Direction::Outbound, verdict);
    debug!(ctx, "connect netns {} uid {} port {} verdict {}", netns_cookie, uid, port, verdict as u32);
    if verdict == Verdict::Redirect {
        // The event follows when the source port is known (sockops).
        bind_source(ctx, sk, pod, destination);
        return Outcome::Redirect(pod.outbound_port);
    }
    if watched {
        let end = End { address: *destination, port };
        let source = End { address: if destination.is_v4() { pod.source_v4 } else { pod.source_v6 }, port: 0 };
        trace::verdict(netns_cookie, pod.generation, Direction::Outbound, verdict, &process, source, end, end);
    }
    if verdict.is_refusal() { Outcome::Refuse } else { Outcome::Proceed }
}

/// A socket bound to a device (SO_BINDTODEVICE) could not reach the proxy, which is on loopback. The kernel frees it from
/// the device only for a caller with CAP_NET_RAW (sock_bindtoindex). False for any other: such a connection would time
/// out, as it does under iptables, so it is better refused at once.
#[inline(always)]
fn release_from_device(ctx: &SockAddrContext, sk: *mut bpf_sock) -> bool {
    // SAFETY: as in `weft_connect4`.
    match unsafe { read_volatile(&raw const (*sk).bound_dev_if) } {
        0 | LOOPBACK_IFINDEX => return true,
        _ => {}
    }
    let mut name = [0u8; 4];
    // SAFETY: the buffer outlives the call; an empty name unbinds.
    let result = unsafe {
        bpf_setsockopt(ctx.as_ptr(), SOL_SOCKET, SO_BINDTODEVICE, name.as_mut_ptr().cast(), name.len() as i32)
    };
    result == 0
}

#[repr(C)]
struct SockaddrIn {
    family: u16,
    port: u16,
    address: u32,
    zero: [u8; 8],
}

#[repr(C)]
struct SockaddrIn6 {
    family: u16,
    port: u16,
    flow_info: u32,
    address: Address,
    scope: u32,
}

/// Gives the connection the pod's address as source, so that both the application and the proxy see what they would see
/// without us. Port 0 leaves the choice to the kernel at connect, by the four-tuple (BIND_FORCE_ADDRESS_NO_PORT).
/// A source that the application chose stays. A failure leaves a loopback source, which works too.
#[inline(always)]
fn bind_source(ctx: &SockAddrContext, sk: *mut bpf_sock, pod: &Pod, destination: &Address) {
    // SAFETY: as in `weft_connect4`.
    let (family, bound_v4, bound_v6) = unsafe {
        let words = [
            read_volatile(&raw const (*sk).src_ip6[0]),
            read_volatile(&raw const (*sk).src_ip6[1]),
            read_volatile(&raw const (*sk).src_ip6[2]),
            read_volatile(&raw const (*sk).src_ip6[3]),
        ];
        (
            read_volatile(&raw const (*sk).family),
            read_volatile(&raw const (*sk).src_ip4),
            words[0] | words[1] | words[2] | words[3],
        )
    };
    let source = if destination.is_v4() { pod.source_v4 } else { pod.source_v6 };
    if source.is_unspecified() {
        return;
    }
    let result = if family == u32::from(AF_INET) {
        if bound_v4 != 0 {
            return;
        }
        let mut address = SockaddrIn { family: AF_INET, port: 0, address: source.words[3], zero: [0; 8] };
        // SAFETY: the address outlives the call.
        unsafe { bpf_bind(ctx.sock_addr, (&raw mut address).cast::<sockaddr>(), size_of::<SockaddrIn>() as i32) }
    } else {
        if bound_v6 != 0 {
            return;
        }
        // A mapped source for a mapped destination: the kernel keeps both forms in step.
        let mut address = SockaddrIn6 { family: AF_INET6, port: 0, flow_info: 0, address: source, scope: 0 };
        // SAFETY: the address outlives the call.
        unsafe { bpf_bind(ctx.sock_addr, (&raw mut address).cast::<sockaddr>(), size_of::<SockaddrIn6>() as i32) }
    };
    if result != 0 {
        maps::count_at(counter::BIND_FAILURES);
    }
}
