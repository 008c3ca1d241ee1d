//! The namespace of a socket: the cookie of its network namespace. Since Linux 5.15 every program here can get it from
//! the kernel. On older kernels sock_ops and getsockopt cannot: there each socket stores the cookie from its creation,
//! and at the latest from its bind or connect, and an accepted socket inherits its listener's.
//!
//! On failure a socket stores none and belongs to no pod: connections that it accepts have no original destination, and
//! its proxy is not attested. Redirection does not depend on it.

use core::ffi::c_void;

use aya_ebpf::{Global, bindings::bpf_sock, helpers::generated::bpf_get_netns_cookie};

use crate::maps;

/// Whether sockets store the cookie; set by the loader. It is a constant to the verifier, so that it skips code that a
/// kernel without the helper would reject.
#[unsafe(no_mangle)]
static COOKIES_IN_SOCKETS: Global<u8> = Global::new(0);

/// Stores the cookie from the kernel in a socket, if sockets store it. The socket may be older than the programs.
#[inline(always)]
pub(crate) fn carry(sk: *mut bpf_sock, netns_cookie: u64) {
    if COOKIES_IN_SOCKETS.load() != 0 {
        maps::set_namespace(sk, netns_cookie);
    }
}

/// The cookie, for programs that cannot get it on every kernel; 0, which no namespace has, if it is unknown.
#[inline(always)]
pub(crate) fn cookie(ctx: *mut c_void, sk: *mut bpf_sock) -> u64 {
    if COOKIES_IN_SOCKETS.load() != 0 {
        return maps::namespace(sk);
    }
    // SAFETY: where this code is live, the helper accepts the caller's kind of context.
    unsafe { bpf_get_netns_cookie(ctx) }
}
