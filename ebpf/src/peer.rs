//! getpeername4 and getpeername6: a redirected application sees the peer that it dialled. When nothing is remembered the
//! kernel's answer stands.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use weft_ebpf_abi::socket::{SocketState, kind};

use crate::{connect::write_user_ip6, maps};

#[cgroup_sock_addr(getpeername4)]
pub fn weft_getpeername4(ctx: SockAddrContext) -> i32 {
    if let Some(client) = client(&ctx) {
        // SAFETY: the verifier checks every access to the context.
        unsafe {
            write_volatile(&raw mut (*ctx.sock_addr).user_ip4, client.destination.words[3]);
            write_volatile(&raw mut (*ctx.sock_addr).user_port, u32::from(client.port.to_be()));
        }
    }
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn weft_getpeername6(ctx: SockAddrContext) -> i32 {
    if let Some(client) = client(&ctx) {
        let destination = client.destination;
        let port = client.port;
        write_user_ip6(ctx.sock_addr, &destination);
        // SAFETY: as above.
        unsafe { write_volatile(&raw mut (*ctx.sock_addr).user_port, u32::from(port.to_be())) };
    }
    1
}

#[inline(always)]
fn client(ctx: &SockAddrContext) -> Option<&'static SocketState> {
    // SAFETY: as above.
    let sk = unsafe { read_volatile(&raw const (*ctx.sock_addr).__bindgen_anon_1.sk) };
    maps::socket(sk).filter(|state| state.kind == kind::CLIENT)
}
