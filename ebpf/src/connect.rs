//! connect4 and connect6: redirect a meshed pod's connections. On any failure the connection is refused (EPERM) or goes
//! to the proxy, never around it; a caller whose namespace is not enrolled passes after one failed lookup.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock, sockaddr},
    helpers::{
        bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::{bpf_bind, bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie, bpf_setsockopt},
    },
    macros::cgroup_sock_addr,
    programs::SockAddrContext,
};
use aya_log_ebpf::debug;
use weft_ebpf_abi::{
    address::Address,
    counter,
    decision::{Caller, Connect, Decision, Remember, decide_connect, remembered},
    event::COMMAND_BYTES,
    pod::{EXEMPTS_CGROUP, Pod},
    socket::{SocketState, kind},
    switch,
    verdict::{Direction, Verdict},
};

use crate::{
    context::{self, AF_INET, AF_INET6, End},
    maps, namespace,
    trace::{self, Process},
};

const REFUSE: i32 = 0;
const PROCEED: i32 = 1;

const SOL_SOCKET: i32 = 1;
const SO_BINDTODEVICE: i32 = 25;
/// The same in every network namespace (include/net/flow.h).
const LOOPBACK_IFINDEX: u32 = 1;

/// Action of a connect program.
enum Outcome {
    Proceed,
    Refuse,
    /// Rewrite to the proxy on this port.
    Redirect(u16),
}

#[cgroup_sock_addr(connect4)]
pub fn weft_connect4(ctx: SockAddrContext) -> i32 {
    match connect(&ctx, &context::user_ip4(ctx.sock_addr)) {
        Outcome::Proceed => PROCEED,
        Outcome::Refuse => REFUSE,
        Outcome::Redirect(port) => {
            context::set_user_v4(ctx.sock_addr, &Address::LOCALHOST_V4, port);
            PROCEED
        }
    }
}

#[cgroup_sock_addr(connect6)]
pub fn weft_connect6(ctx: SockAddrContext) -> i32 {
    let destination = context::user_ip6(ctx.sock_addr);
    match connect(&ctx, &destination) {
        Outcome::Proceed => PROCEED,
        Outcome::Refuse => REFUSE,
        Outcome::Redirect(port) => {
            // A v4-mapped destination stays IPv4: the proxy's [::1] may not exist, and the answer's family must match.
            let proxy = if destination.is_v4() { Address::LOCALHOST_V4 } else { Address::LOCALHOST_V6 };
            context::set_user_v6(ctx.sock_addr, &proxy, port);
            PROCEED
        }
    }
}

#[inline(always)]
fn connect(ctx: &SockAddrContext, destination: &Address) -> Outcome {
    let is_tcp = context::is_tcp(ctx.sock_addr);
    let (netns_cookie, pod) = if is_tcp {
        // SAFETY: the helper takes this kind of context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
        (netns_cookie, maps::pod(netns_cookie))
    } else {
        (0, None)
    };
    let (port, sk) = (context::user_port(ctx.sock_addr), context::socket(ctx.sock_addr));
    let decision = decide_connect(
        is_tcp,
        pod,
        destination,
        || facts(pod, sk),
        || pod.is_some_and(|pod| maps::skips_port(pod, netns_cookie, Direction::Outbound, port)),
    );
    let is_current = pod.is_none_or(|pod| maps::is_current(netns_cookie, pod));
    let decision = if is_current { decision } else { Decision::of(Verdict::DenyUnknownPod) };
    let Some(pod) = pod.filter(|_| decision.verdict.is_counted()) else { return Outcome::Proceed };
    namespace::carry(sk, netns_cookie);
    let watched = maps::watched();
    let process = process(watched);
    let decision = act(ctx, sk, netns_cookie, decision, destination, port, &process);
    let verdict = decision.verdict;
    maps::count(Direction::Outbound, verdict);
    debug!(ctx, "connect netns {} uid {} port {} verdict {}", netns_cookie, process.uid, port, verdict as u32);
    if verdict == Verdict::Redirect {
        // The event follows when the source port is known (sock_ops).
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

/// The facts for the decision, except the destination.
#[inline(always)]
fn facts(pod: Option<&Pod>, sk: *mut bpf_sock) -> Connect {
    let uid_gid = bpf_get_current_uid_gid();
    let is_strict = pod.is_some_and(|pod| pod.has(EXEMPTS_CGROUP));
    // SAFETY: the helper takes no context.
    let cgroup = if is_strict { unsafe { bpf_get_current_cgroup_id() } } else { 0 };
    let device = context::bound_device(sk);
    Connect {
        node_bypassed: maps::switch(switch::BYPASS) != 0,
        caller: Caller { uid: uid_gid as u32, gid: (uid_gid >> 32) as u32, cgroup },
        bound_to_device: device != 0 && device != LOOPBACK_IFINDEX,
    }
}

/// The calling process; its id and name only if events are watched.
#[inline(always)]
fn process(watched: bool) -> Process {
    let mut process = Process { uid: bpf_get_current_uid_gid() as u32, ..Process::NONE };
    if watched {
        process.pid = (bpf_get_current_pid_tgid() >> 32) as u32;
        // Called without aya's wrapper: verifiers before 6.1 lose track of its result and see the buffer read
        // unwritten.
        // SAFETY: the buffer has these bytes; the kernel fills it with zeros when it has no name.
        unsafe { bpf_get_current_comm((&raw mut process.command).cast(), COMMAND_BYTES as u32) };
    }
    process
}

/// Carries out a decision. If a redirect cannot be carried out, the connection is refused.
#[inline(always)]
fn act(
    ctx: &SockAddrContext,
    sk: *mut bpf_sock,
    netns_cookie: u64,
    mut decision: Decision,
    destination: &Address,
    port: u16,
    process: &Process,
) -> Decision {
    if decision.release && !release_from_device(ctx) {
        decision = Decision::of(Verdict::DenyDevice);
    }
    match decision.remember {
        Remember::Unchanged => {}
        Remember::Nothing => {
            maps::remove_client(sk);
            maps::forget(sk);
        }
        Remember::Destination(kind) => {
            let state = SocketState {
                destination: remembered(destination),
                port,
                kind,
                uid: process.uid,
                pid: process.pid,
                command: process.command,
                ..SocketState::default()
            };
            let is_kept = if kind == kind::CLIENT {
                maps::add_client(sk, netns_cookie, &state) || maps::remember(sk, &state)
            } else {
                maps::remove_client(sk);
                maps::remember(sk, &state)
            };
            if !is_kept {
                // Without memory, at least remove the wrong answer from the socket.
                maps::forget(sk);
                if decision.verdict == Verdict::Redirect {
                    decision = Decision::of(Verdict::DenyNoMemory);
                }
            }
        }
    }
    decision
}

/// A socket bound to a device (SO_BINDTODEVICE) could not reach the proxy, which is on loopback. The kernel frees it
/// from the device only for a caller with CAP_NET_RAW (sock_bindtoindex). False for any other: such a connection would
/// time out, as it does under iptables, so it is better refused at once.
#[inline(always)]
fn release_from_device(ctx: &SockAddrContext) -> bool {
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
    // SAFETY: the verifier checks the access.
    let family = unsafe { core::ptr::read_volatile(&raw const (*sk).family) };
    let (bound_v4, bound_v6) = (context::source_v4(sk), context::source_v6(sk));
    let source = if destination.is_v4() { pod.source_v4 } else { pod.source_v6 };
    if source.is_unspecified() {
        return;
    }
    let result = if family == AF_INET {
        if bound_v4 != 0 {
            return;
        }
        let mut address = SockaddrIn { family: AF_INET as u16, port: 0, address: source.words[3], zero: [0; 8] };
        // SAFETY: the address outlives the call.
        unsafe { bpf_bind(ctx.sock_addr, (&raw mut address).cast::<sockaddr>(), size_of::<SockaddrIn>() as i32) }
    } else {
        if bound_v6 != Address::UNSPECIFIED {
            return;
        }
        // A mapped source for a mapped destination: the kernel keeps both forms in step.
        let mut address = SockaddrIn6 { family: AF_INET6 as u16, port: 0, flow_info: 0, address: source, scope: 0 };
        // SAFETY: the address outlives the call.
        unsafe { bpf_bind(ctx.sock_addr, (&raw mut address).cast::<sockaddr>(), size_of::<SockaddrIn6>() as i32) }
    };
    if result != 0 {
        maps::count_at(counter::BIND_FAILURES);
    }
}
