//! post_bind4 and post_bind6: two notes about a proxy that binds its ports. Who bound the inbound port, because the
//! program that sees the socket listen cannot ask for the user on every supported kernel. And, where the node's agent
//! switched it on, that a proxy binds its outbound port on loopback: this enrols its network namespace, so that the pod's
//! outbound connections are redirected from then on whether an agent runs or not.
//!
//! Always lets the bind succeed: a proxy without a note is a proxy without inbound traffic, never a way around it.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_uid_gid,
        generated::{bpf_get_current_cgroup_id, bpf_get_netns_cookie},
    },
    macros::cgroup_sock,
    programs::SockContext,
};
use weft_ebpf_abi::{
    address::Address,
    pod::{ADDRESSES, OUTBOUND, Pod, SELF_ENROLLED},
    socket::{DEFAULT_INBOUND_PORT, SocketState, kind},
    switch,
};

use crate::{maps, namespace};

const SOCK_STREAM: u32 = 1;

#[cgroup_sock(post_bind4)]
pub fn weft_post_bind4(ctx: SockContext) -> i32 {
    // SAFETY: the verifier checks every access to the context.
    let address = unsafe { Address::v4(read_volatile(&raw const (*ctx.sock).src_ip4)) };
    note(&ctx, &address);
    1
}

#[cgroup_sock(post_bind6)]
pub fn weft_post_bind6(ctx: SockContext) -> i32 {
    // SAFETY: as above.
    let words = unsafe {
        [
            read_volatile(&raw const (*ctx.sock).src_ip6[0]),
            read_volatile(&raw const (*ctx.sock).src_ip6[1]),
            read_volatile(&raw const (*ctx.sock).src_ip6[2]),
            read_volatile(&raw const (*ctx.sock).src_ip6[3]),
        ]
    };
    note(&ctx, &Address { words });
    1
}

#[inline(always)]
fn note(ctx: &SockContext, address: &Address) {
    let sk = ctx.sock;
    // SAFETY: as above.
    let (socket_type, port) =
        unsafe { (read_volatile(&raw const (*sk).type_), read_volatile(&raw const (*sk).src_port)) };
    if socket_type != SOCK_STREAM {
        return;
    }
    // SAFETY: the helper takes this kind of context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    namespace::carry(sk, netns_cookie);
    let uid = bpf_get_current_uid_gid() as u32;
    let inbound_port = match maps::pod(netns_cookie) {
        Some(pod) => pod.inbound_port,
        None => {
            if address.is_loopback() {
                enrol(netns_cookie, uid, port);
            }
            default_inbound_port()
        }
    };
    if port != u32::from(inbound_port) {
        return;
    }
    // SAFETY: the helper takes no context.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    let state = SocketState { cgroup, port: inbound_port, kind: kind::BOUND, uid, ..SocketState::default() };
    maps::remember(sk, &state);
}

/// A proxy may come before its enrolment; then its port is the node's default one or it is not recognised.
#[inline(always)]
fn default_inbound_port() -> u16 {
    match maps::switch(switch::INBOUND_PORT) as u16 {
        0 => DEFAULT_INBOUND_PORT,
        port => port,
    }
}

/// Enrols the namespace of a proxy that nobody enrolled yet. Its addresses and rules are the agent's to find out: until
/// then everything but loopback goes to the proxy.
#[inline(always)]
fn enrol(netns_cookie: u64, uid: u32, port: u32) {
    if maps::switch(switch::SELF_ENROL) == 0
        || uid != maps::switch(switch::PROXY_UID)
        || port != maps::switch(switch::OUTBOUND_PORT)
    {
        return;
    }
    // SAFETY: without a context the helper gives the cookie of the host's namespace, which is nobody's to enrol.
    if netns_cookie == unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) } {
        return;
    }
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
            outbound_port: port as u16,
            inbound_port: default_inbound_port(),
            pad: 0,
        },
    );
}
