//! Reads and writes the fields of the programs' contexts. Refuses to interpret them.
//!
//! Two rules of the verifier. It accepts single-word accesses only, and LLVM merges neighbouring ones, hence volatile
//! accesses. And a branch between two fields becomes arithmetic on the pointer, which it rejects, so all fields are
//! read before any branch.

use core::{
    hint::black_box,
    ptr::{read_volatile, write_volatile},
};

use aya_ebpf::bindings::{bpf_sk_lookup, bpf_sock, bpf_sock_addr, bpf_sock_ops};
use weft_ebpf_abi::address::Address;

pub(crate) const SOCK_STREAM: u32 = 1;
pub(crate) const IPPROTO_TCP: u32 = 6;
/// Multipath TCP; its subflows are TCP sockets like any other (include/uapi/linux/in.h).
pub(crate) const IPPROTO_MPTCP: u32 = 262;
pub(crate) const AF_INET: u32 = 2;
pub(crate) const AF_INET6: u32 = 10;

/// One end of a connection.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) address: Address,
    pub(crate) port: u16,
}

/// Whether a connect is for TCP.
#[inline(always)]
pub(crate) fn is_tcp(context: *mut bpf_sock_addr) -> bool {
    // SAFETY: the verifier checks every access to a context, here and below.
    let (socket_type, protocol) =
        unsafe { (read_volatile(&raw const (*context).type_), read_volatile(&raw const (*context).protocol)) };
    socket_type == SOCK_STREAM && (protocol == IPPROTO_TCP || protocol == IPPROTO_MPTCP)
}

/// The socket of a connect or of a getpeername.
#[inline(always)]
pub(crate) fn socket(context: *mut bpf_sock_addr) -> *mut bpf_sock {
    // SAFETY: as in `is_tcp`.
    unsafe { read_volatile(&raw const (*context).__bindgen_anon_1.sk) }
}

/// The address of an IPv4 context.
#[inline(always)]
pub(crate) fn user_ip4(context: *mut bpf_sock_addr) -> Address {
    // SAFETY: as in `is_tcp`.
    Address::v4(unsafe { read_volatile(&raw const (*context).user_ip4) })
}

/// The address of an IPv6 context.
#[inline(always)]
pub(crate) fn user_ip6(context: *mut bpf_sock_addr) -> Address {
    // SAFETY: as in `is_tcp`.
    unsafe {
        Address {
            words: [
                read_volatile(&raw const (*context).user_ip6[0]),
                read_volatile(&raw const (*context).user_ip6[1]),
                read_volatile(&raw const (*context).user_ip6[2]),
                read_volatile(&raw const (*context).user_ip6[3]),
            ],
        }
    }
}

/// The port of a context of either family.
#[inline(always)]
pub(crate) fn user_port(context: *mut bpf_sock_addr) -> u16 {
    // SAFETY: as in `is_tcp`.
    u16::from_be(unsafe { read_volatile(&raw const (*context).user_port) } as u16)
}

/// Writes an IPv4 address and a port.
#[inline(always)]
pub(crate) fn set_user_v4(context: *mut bpf_sock_addr, address: &Address, port: u16) {
    // SAFETY: as in `is_tcp`.
    unsafe {
        write_volatile(&raw mut (*context).user_ip4, address.words[3]);
        write_volatile(&raw mut (*context).user_port, u32::from(port.to_be()));
    }
}

/// Writes an IPv6 address and a port.
#[inline(always)]
pub(crate) fn set_user_v6(context: *mut bpf_sock_addr, address: &Address, port: u16) {
    // SAFETY: as in `is_tcp`.
    unsafe {
        write_volatile(&raw mut (*context).user_ip6[0], address.words[0]);
        write_volatile(&raw mut (*context).user_ip6[1], address.words[1]);
        write_volatile(&raw mut (*context).user_ip6[2], address.words[2]);
        write_volatile(&raw mut (*context).user_ip6[3], address.words[3]);
        write_volatile(&raw mut (*context).user_port, u32::from(port.to_be()));
    }
}

/// The device that a socket is bound to; 0 for none.
#[inline(always)]
pub(crate) fn bound_device(sk: *mut bpf_sock) -> u32 {
    // SAFETY: as in `is_tcp`.
    unsafe { read_volatile(&raw const (*sk).bound_dev_if) }
}

/// The port that a socket is bound to.
#[inline(always)]
pub(crate) fn source_port(sk: *mut bpf_sock) -> u16 {
    // SAFETY: as in `is_tcp`.
    unsafe { read_volatile(&raw const (*sk).src_port) as u16 }
}

/// The IPv4 address that a socket is bound to, as one word. Only for a bind of this family.
#[inline(always)]
pub(crate) fn source_v4(sk: *mut bpf_sock) -> u32 {
    // SAFETY: as in `is_tcp`.
    unsafe { read_volatile(&raw const (*sk).src_ip4) }
}

/// The IPv6 address that a socket is bound to. Only for a bind of this family.
#[inline(always)]
pub(crate) fn source_v6(sk: *mut bpf_sock) -> Address {
    // SAFETY: as in `is_tcp`.
    unsafe {
        Address {
            words: [
                read_volatile(&raw const (*sk).src_ip6[0]),
                read_volatile(&raw const (*sk).src_ip6[1]),
                read_volatile(&raw const (*sk).src_ip6[2]),
                read_volatile(&raw const (*sk).src_ip6[3]),
            ],
        }
    }
}

/// The local and the remote end of a TCP socket.
#[inline(always)]
pub(crate) fn ends(ops: *mut bpf_sock_ops) -> (End, End) {
    // SAFETY: as in `is_tcp`.
    unsafe {
        // The local port is in host order, the remote one in the upper half of a network-order word.
        let local_port = read_volatile(&raw const (*ops).local_port) as u16;
        let remote_port = u32::from_be(read_volatile(&raw const (*ops).remote_port)) as u16;
        let family = read_volatile(&raw const (*ops).family);
        let local_v4 = Address::v4(read_volatile(&raw const (*ops).local_ip4));
        let remote_v4 = Address::v4(read_volatile(&raw const (*ops).remote_ip4));
        let remote_v6 = [
            read_volatile(&raw const (*ops).remote_ip6[0]),
            read_volatile(&raw const (*ops).remote_ip6[1]),
            read_volatile(&raw const (*ops).remote_ip6[2]),
            read_volatile(&raw const (*ops).remote_ip6[3]),
        ];
        let local_v6 = [
            read_volatile(&raw const (*ops).local_ip6[0]),
            read_volatile(&raw const (*ops).local_ip6[1]),
            read_volatile(&raw const (*ops).local_ip6[2]),
            read_volatile(&raw const (*ops).local_ip6[3]),
        ];
        let remote = if family == AF_INET { remote_v4 } else { Address { words: remote_v6 } };
        // On a v4-mapped connection the IPv4 form is the one that is always filled.
        let local = if remote.is_v4() { local_v4 } else { Address { words: local_v6 } };
        (End { address: local, port: local_port }, End { address: remote, port: remote_port })
    }
}

/// The client's and the local end of an incoming connection. Without a branch: the verifier follows each branch through
/// all that comes after it, loops included.
#[inline(always)]
pub(crate) fn arrival(context: *mut bpf_sk_lookup) -> (End, End) {
    // SAFETY: as in `is_tcp`. The kernel gives zeros for addresses of the other family.
    unsafe {
        let client_port = u16::from_be(read_volatile(&raw const (*context).remote_port));
        let local_port = read_volatile(&raw const (*context).local_port) as u16;
        let family = read_volatile(&raw const (*context).family);
        let client_v4 = read_volatile(&raw const (*context).remote_ip4);
        let local_v4 = read_volatile(&raw const (*context).local_ip4);
        let client_v6 = [
            read_volatile(&raw const (*context).remote_ip6[0]),
            read_volatile(&raw const (*context).remote_ip6[1]),
            read_volatile(&raw const (*context).remote_ip6[2]),
            read_volatile(&raw const (*context).remote_ip6[3]),
        ];
        let local_v6 = [
            read_volatile(&raw const (*context).local_ip6[0]),
            read_volatile(&raw const (*context).local_ip6[1]),
            read_volatile(&raw const (*context).local_ip6[2]),
            read_volatile(&raw const (*context).local_ip6[3]),
        ];
        // All ones for AF_INET (2), zero for AF_INET6 (10).
        let is_v4 = black_box(family >> 3 & 1).wrapping_sub(1);
        let address = |v4: u32, [a, b, c, d]: [u32; 4]| Address {
            words: [a, b, c | is_v4 & Address::UNSPECIFIED_V4.words[2], d | v4],
        };
        (
            End { address: address(client_v4, client_v6), port: client_port },
            End { address: address(local_v4, local_v6), port: local_port },
        )
    }
}
