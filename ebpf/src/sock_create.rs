//! sock_create: stores the cookie of its network namespace in each new TCP socket, for kernels where other programs
//! cannot get it ([`crate::namespace`]). Attached only there. Always lets the socket be created.

use aya_ebpf::{
    EbpfContext as _, helpers::generated::bpf_get_netns_cookie, macros::cgroup_sock, programs::SockContext,
};

use crate::{context::SOCK_STREAM, maps};

#[cgroup_sock(sock_create)]
pub fn weft_sock_create(ctx: SockContext) -> i32 {
    // SAFETY: the verifier checks every access to the context.
    if unsafe { core::ptr::read_volatile(&raw const (*ctx.sock).type_) } == SOCK_STREAM {
        // SAFETY: the helper takes this kind of context on every kernel.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
        maps::set_namespace(ctx.sock, netns_cookie);
    }
    1
}
