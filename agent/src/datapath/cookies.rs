//! Where the agent learns the cookie of a network namespace: the kernel tells it of any socket inside (Linux 5.14), or,
//! where it does not, the socket itself carries it, put there by a program of ours when it was made.
//!
//! That program sees the sockets of the pods' cgroup. An agent that runs elsewhere has it attached to its own cgroup too,
//! for as long as it runs. Refuses to enter namespaces: that is [`crate::datapath::netns`]'s.

use std::{io, os::fd::OwnedFd, sync::Arc};

use aya::maps::{MapData, MapError, SkStorage};
use nix::{
    getsockopt_impl, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

use crate::datapath::bpf::Link;

sockopt_impl!(
    /// The identity of a socket's network namespace, eight bytes.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// Who knows the cookie of a socket's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CookieSource {
    /// The kernel, when it is asked.
    Kernel,
    /// The socket, since it was made: on Linux 5.10.
    Sockets,
}

/// What sockets carry: [`weft_ebpf_abi::map::NAMESPACES`].
pub(crate) type Namespaces = SkStorage<MapData, u64>;

/// How to learn cookies.
#[derive(Clone, Debug)]
pub(crate) enum Cookies {
    Kernel,
    Sockets(Arc<Carried>),
}

/// The map, and what fills it for this process's sockets if nothing else does.
#[derive(Debug)]
pub(crate) struct Carried {
    namespaces: Namespaces,
    _link: Option<Link>,
}

impl Cookies {
    /// Learns cookies from the sockets of this process. `attach` has a program see them, if none does yet.
    ///
    /// # Errors
    /// When they carry nothing even so.
    pub(crate) fn in_sockets(namespaces: Namespaces, attach: impl FnOnce() -> io::Result<Link>) -> io::Result<Self> {
        let mut carried = Carried { namespaces, _link: None };
        if carried.of(&inside()?).is_err() {
            carried._link = Some(attach()?);
            carried.of(&inside()?)?;
        }
        Ok(Self::Sockets(Arc::new(carried)))
    }

    /// The cookie of the namespace that a socket of [`inside`] was made in.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn of(&self, socket: &OwnedFd) -> io::Result<u64> {
        match self {
            Self::Kernel => Ok(getsockopt(socket, NetnsCookie)?),
            Self::Sockets(carried) => carried.of(socket),
        }
    }
}

impl Carried {
    fn of(&self, socket: &OwnedFd) -> io::Result<u64> {
        self.namespaces.get(socket, 0).map_err(|error| match error {
            MapError::KeyNotFound => io::Error::other(
                "a socket of the agent's carries no cookie: no program of its cgroup sees its sockets (are net_cls or \
                 net_prio of cgroup version 1 in use?)",
            ),
            MapError::SyscallError(error) => error.io_error,
            error => io::Error::other(error),
        })
    }
}

/// A socket of this thread's namespace, for asking.
///
/// # Errors
/// The kernel's.
pub(crate) fn inside() -> io::Result<OwnedFd> {
    socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(io::Error::from)
}
