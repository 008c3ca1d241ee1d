//! getpeername4 and getpeername6: return the peer that a redirected application dialled. Without a recorded destination
//! the kernel's answer stays.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use weft_ebpf_abi::socket::{SocketState, kind};

use crate::{context, maps};

#[cgroup_sock_addr(getpeername4)]
pub fn weft_getpeername4(ctx: SockAddrContext) -> i32 {
    if let Some(client) = client(&ctx) {
        context::set_user_v4(ctx.sock_addr, &client.destination, client.port);
    }
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn weft_getpeername6(ctx: SockAddrContext) -> i32 {
    if let Some(client) = client(&ctx) {
        let (destination, port) = (client.destination, client.port);
        context::set_user_v6(ctx.sock_addr, &destination, port);
    }
    1
}

#[inline(always)]
fn client(ctx: &SockAddrContext) -> Option<&'static SocketState> {
    maps::socket(context::socket(ctx.sock_addr)).filter(|state| state.kind == kind::CLIENT)
}
