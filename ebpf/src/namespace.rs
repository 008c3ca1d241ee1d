//! Whose a socket is: the cookie of its network namespace. Since Linux 5.15 every program of ours can ask the kernel for
//! it. Before, sock_ops and getsockopt cannot: there each socket carries the cookie from when it is made, and at the
//! latest from when it is bound or connected, and an accepted one has its listener's.
//!
//! On failure a socket carries none and belongs to nobody: what it accepts has no original destination and its proxy
//! attests nothing. What is redirected does not depend on it.

use core::ffi::c_void;

use aya_ebpf::{Global, bindings::bpf_sock, helpers::generated::bpf_get_netns_cookie};

use crate::maps;

/// Whether sockets carry the cookie; the loader sets it. To the verifier it is a constant: it does not see what a kernel
/// without the helper would refuse.
#[unsafe(no_mangle)]
static COOKIES_IN_SOCKETS: Global<u8> = Global::new(0);

/// Has a socket carry the cookie that the kernel told, if sockets do. It may be older than the programs.
#[inline(always)]
pub(crate) fn carry(sk: *mut bpf_sock, netns_cookie: u64) {
    if COOKIES_IN_SOCKETS.load() != 0 {
        maps::set_namespace(sk, netns_cookie);
    }
}

/// The cookie for programs that cannot ask on every kernel; 0, which is no namespace's, if nobody knows.
#[inline(always)]
pub(crate) fn cookie(ctx: *mut c_void, sk: *mut bpf_sock) -> u64 {
    if COOKIES_IN_SOCKETS.load() != 0 {
        return maps::namespace(sk);
    }
    // SAFETY: the caller's is a kind of context that the helper takes where this code is alive.
    unsafe { bpf_get_netns_cookie(ctx) }
}
