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
//! Owns the mechanics: contexts, maps, helpers; a program is in the file of its hook. Refuses to decide: the decisions are
//! `weft_ebpf_abi::decision`'s. Each
//! program says what it does when something fails; the rule is that a pod's connection is refused rather than let
//! around the proxy, and that whoever is not enrolled never notices.
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
    // Nothing that the verifier accepts can panic; this satisfies the compiler.
    loop {}
}

/// Helpers such as the address-rewriting ones are open to any license, `bpf_sk_storage_get` and others to GPL
/// compatible programs only, hence the dual license of the object.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
