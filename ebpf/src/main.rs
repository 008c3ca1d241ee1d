//! Weft's kernel programs.
//!
//! ```text
//!            application                                     proxy
//! outbound   connect4/6 ── rewrite to 127.0.0.1:4140 ──────> listener 4140
//!            sock_ops TCP_CONNECT ──> FLOWS ──> sock_ops PASSIVE_ESTABLISHED ──> getsockopt(SO_ORIGINAL_DST)
//!            getpeername4/6: what was dialled
//! inbound    sk_lookup (per pod) ── steer to LISTENERS ────> listener 4143; getsockopt: the local address
//!                                        ^── post_bind4/6, sock_ops TCP_LISTEN
//! Linux 5.10 sock_create: the cookie of the namespace into the socket's storage, for sock_ops and getsockopt
//! ```
//!
//! Owns the mechanics: contexts, maps, helpers; each program is in the file of its hook. Refuses to decide: decisions
//! are in `weft_ebpf_abi::decision`. Each program documents what it does on failure. The rule: a pod's connection is
//! refused rather than sent around the proxy, and a process that is not enrolled is unaffected.
#![no_std]
#![no_main]

mod connect;
mod context;
mod getpeername;
mod getsockopt;
mod maps;
mod namespace;
mod post_bind;
mod sk_lookup;
mod sock_create;
mod sock_ops;
mod trace;

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Code that the verifier accepts cannot panic; this satisfies the compiler.
    loop {}
}

/// Some helpers, such as the address-rewriting ones, are open to any license; `bpf_sk_storage_get` and others only to
/// GPL-compatible programs. Hence the dual license of the object.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
