//! post_bind4 and post_bind6: two records about a proxy that binds its ports. First, which proxy bound the socket,
//! because the program that sees it listen cannot get the user on every supported kernel. Second, if the node's agent
//! enabled it, that a proxy binds its outbound port on loopback: this enrols its network namespace, so that the pod's
//! outbound connections are redirected from then on, with or without a running agent.
//!
//! Processes that are no proxy, and namespaces that may not have one, leave no record: the maps are shared by the node
//! and could be filled. Always lets the bind succeed: a proxy without a record has no inbound traffic, but there is
//! never a way around it.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_uid_gid,
        generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_netns_cookie},
    },
    macros::cgroup_sock,
    programs::SockContext,
};
use weft_ebpf_abi::{
    address::Address,
    pod::{ADDRESSES, EXEMPTS_CGROUP, OUTBOUND, Owner, Pod, SELF_ENROLLED},
    socket::{DEFAULT_ADMIN_PORT, DEFAULT_CONTROL_PORT, DEFAULT_INBOUND_PORT, SocketState, kind},
    switch,
};

use crate::{
    context::{self, SOCK_STREAM},
    maps, namespace,
};

#[cgroup_sock(post_bind4)]
pub fn weft_post_bind4(ctx: SockContext) -> i32 {
    note(&ctx, &Address::v4(context::source_v4(ctx.sock)));
    1
}

#[cgroup_sock(post_bind6)]
pub fn weft_post_bind6(ctx: SockContext) -> i32 {
    note(&ctx, &context::source_v6(ctx.sock));
    1
}

#[inline(always)]
fn note(ctx: &SockContext, address: &Address) {
    let sk = ctx.sock;
    // SAFETY: the verifier checks every access to the context.
    let (socket_type, port) =
        unsafe { (read_volatile(&raw const (*sk).type_), read_volatile(&raw const (*sk).src_port)) };
    if socket_type != SOCK_STREAM {
        return;
    }
    // SAFETY: the helper takes this kind of context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    namespace::carry(sk, netns_cookie);
    let port = port as u16;
    let owner = match maps::pod(netns_cookie) {
        Some(pod) => proxy(pod).filter(|_| is_proxys(pod, address, port)),
        None => unenrolled_proxy(netns_cookie, address, port),
    };
    if let Some(owner) = owner {
        maps::remember(sk, &SocketState { owner, port, kind: kind::BOUND, ..SocketState::default() });
    }
}

/// The calling process in the form that identifies pods' proxies, if it is the proxy.
#[inline(always)]
fn proxy(pod: &Pod) -> Option<Owner> {
    let caller = if pod.has(EXEMPTS_CGROUP) {
        // SAFETY: the helper takes no context.
        Owner::cgroup(unsafe { bpf_get_current_cgroup_id() })
    } else {
        Owner::user(bpf_get_current_uid_gid() as u32)
    };
    (caller == pod.proxy()).then_some(caller)
}

/// Whether connections are steered to a listener with this address.
#[inline(always)]
fn is_proxys(pod: &Pod, address: &Address, port: u16) -> bool {
    port == pod.inbound_port
        || port == pod.outbound_port && pod.has(EXEMPTS_CGROUP)
        // A socket that listens on a single address does not accept connections to others.
        || pod.is_proxys_own(port) && address.is_unspecified()
}

/// A proxy that binds before its enrolment: it has the node's proxy user and ports. The rules of its pod are not known
/// yet.
#[inline(always)]
fn unenrolled_proxy(netns_cookie: u64, address: &Address, port: u16) -> Option<Owner> {
    let uid = bpf_get_current_uid_gid() as u32;
    if maps::switch(switch::SELF_ENROL) == 0 || uid != maps::switch(switch::PROXY_UID) {
        return None;
    }
    let inbound_port = inbound_port();
    // The agent looks for a listener on another port of its own.
    let is_own = port == DEFAULT_CONTROL_PORT || port == DEFAULT_ADMIN_PORT;
    let is_inbound = port == inbound_port || is_own && address.is_unspecified();
    let is_outbound = u32::from(port) == maps::switch(switch::OUTBOUND_PORT) && address.is_loopback();
    if !is_inbound && !is_outbound {
        return None;
    }
    // SAFETY: without a context the helper gives the cookie of the host's namespace, which no pod owns.
    if netns_cookie == unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) } {
        return None;
    }
    // SAFETY: the helpers take no context.
    let (cgroup, root) = unsafe { (bpf_get_current_cgroup_id(), bpf_get_current_ancestor_cgroup_id(0)) };
    if !maps::admit(netns_cookie, cgroup, cgroup == root) {
        return None;
    }
    if is_outbound {
        enrol(netns_cookie, uid, port, inbound_port);
    }
    is_inbound.then_some(Owner::user(uid))
}

#[inline(always)]
fn inbound_port() -> u16 {
    match maps::switch(switch::INBOUND_PORT) as u16 {
        0 => DEFAULT_INBOUND_PORT,
        port => port,
    }
}

/// Enrols the namespace of a proxy. The agent adds its addresses and rules later: until then everything but loopback
/// goes to the proxy.
#[inline(always)]
fn enrol(netns_cookie: u64, uid: u32, outbound_port: u16, inbound_port: u16) {
    maps::enrol(
        netns_cookie,
        &Pod {
            addresses: [Address::UNSPECIFIED; ADDRESSES],
            source_v4: Address::UNSPECIFIED,
            source_v6: Address::UNSPECIFIED,
            rules: 0,
            generation: 0,
            flags: OUTBOUND | SELF_ENROLLED,
            proxy_cgroup: 0,
            proxy_uid: uid,
            proxy_gid: 0,
            outbound_port,
            inbound_port,
            control_port: DEFAULT_CONTROL_PORT,
            admin_port: DEFAULT_ADMIN_PORT,
        },
    );
}
