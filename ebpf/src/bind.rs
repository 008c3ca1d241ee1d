//! post_bind4 and post_bind6: notes which user bound a proxy's inbound port, because the program that sees the socket
//! listen cannot ask for the user on every supported kernel. Always lets the bind succeed: a proxy without a note is a
//! proxy without inbound traffic, never a way around it.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_uid_gid, generated::bpf_get_netns_cookie},
    macros::cgroup_sock,
    programs::SockContext,
};
use weft_ebpf_abi::{
    address::Address,
    event::COMMAND_BYTES,
    socket::{DEFAULT_INBOUND_PORT, SocketState, kind},
};

use crate::maps;

const SOCK_STREAM: u32 = 1;

#[cgroup_sock(post_bind4)]
pub fn weft_post_bind4(ctx: SockContext) -> i32 {
    note(&ctx);
    1
}

#[cgroup_sock(post_bind6)]
pub fn weft_post_bind6(ctx: SockContext) -> i32 {
    note(&ctx);
    1
}

#[inline(always)]
fn note(ctx: &SockContext) {
    let sk = ctx.sock;
    // SAFETY: the verifier checks every access to the context.
    let (socket_type, port) =
        unsafe { (read_volatile(&raw const (*sk).type_), read_volatile(&raw const (*sk).src_port)) };
    if socket_type != SOCK_STREAM {
        return;
    }
    // SAFETY: the helper takes this kind of context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // A proxy may come before its enrolment; then its port is the default one or it is not recognised.
    let inbound_port = maps::pod(netns_cookie).map_or(DEFAULT_INBOUND_PORT, |pod| pod.inbound_port);
    if port != u32::from(inbound_port) {
        return;
    }
    let state = SocketState {
        destination: Address::UNSPECIFIED,
        port: inbound_port,
        kind: kind::BOUND,
        pad: 0,
        uid: bpf_get_current_uid_gid() as u32,
        pid: 0,
        command: [0; COMMAND_BYTES],
    };
    maps::remember(sk, &state);
}
