//! getpeername4 and getpeername6: return the peer that a redirected application dialled. Without a recorded destination
//! the kernel's answer stays.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use weft_ebpf_abi::address::Address;

use crate::{context, maps};

#[cgroup_sock_addr(getpeername4)]
pub fn weft_getpeername4(ctx: SockAddrContext) -> i32 {
    if let Some((destination, port)) = dialled(&ctx, &context::user_ip4(ctx.sock_addr)) {
        context::set_user_v4(ctx.sock_addr, &destination, port);
    }
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn weft_getpeername6(ctx: SockAddrContext) -> i32 {
    if let Some((destination, port)) = dialled(&ctx, &context::user_ip6(ctx.sock_addr)) {
        context::set_user_v6(ctx.sock_addr, &destination, port);
    }
    1
}

#[inline(always)]
fn dialled(ctx: &SockAddrContext, peer: &Address) -> Option<(Address, u16)> {
    let sk = context::socket(ctx.sock_addr);
    // The proxy of a redirected connection is on loopback.
    if peer.is_loopback() { maps::dialled(sk, context::source_port(sk)) } else { None }
}
