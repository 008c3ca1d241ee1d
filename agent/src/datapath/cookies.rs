//! How the agent learns the cookie of a network namespace. The kernel returns it for any socket inside (Linux 5.14).
//! On older kernels the socket itself carries it, put there by one of our programs when the socket was created.
//!
//! That program runs for sockets of the pods' cgroup. If the agent runs elsewhere, it also attaches the program to its
//! own cgroup while it runs. Refuses to enter namespaces: [`crate::datapath::netns`] does that.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use aya::maps::{MapData, MapError, SkStorage};
use nix::{
    getsockopt_impl, sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

use crate::datapath::bpf::Link;

sockopt_impl!(
    /// The cookie of a socket's network namespace, eight bytes.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// Source of the cookie of a socket's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CookieSource {
    /// The kernel returns it.
    Kernel,
    /// The socket carries it since its creation: on Linux 5.10.
    Sockets,
}

/// The storage of cookies in sockets: [`weft_ebpf_abi::map::NAMESPACES`].
pub(crate) type Namespaces = SkStorage<MapData, u64>;

/// The way to learn cookies.
#[derive(Clone, Debug)]
pub(crate) enum Cookies {
    Kernel,
    Sockets(Arc<Carried>),
}

/// The storage, and the link that fills it for this process's sockets, if it is needed.
#[derive(Debug)]
pub(crate) struct Carried {
    namespaces: Namespaces,
    _link: Option<Link>,
}

impl Cookies {
    /// Learns cookies from the sockets of this process. `attach` attaches the program for them, if needed.
    ///
    /// # Errors
    /// When they carry no cookie even then.
    pub(crate) fn in_sockets(namespaces: Namespaces, attach: impl FnOnce() -> io::Result<Link>) -> io::Result<Self> {
        let mut carried = Carried { namespaces, _link: None };
        if carried.of(&inside()?).is_err() {
            carried._link = Some(attach()?);
            carried.of(&inside()?)?;
        }
        Ok(Self::Sockets(Arc::new(carried)))
    }

    /// The cookie of the namespace in which a socket of [`inside`] was created.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub(crate) fn of(&self, socket: &OwnedFd) -> io::Result<u64> {
        match self {
            Self::Kernel => Ok(getsockopt(socket, NetnsCookie)?),
            Self::Sockets(carried) => carried.of(socket),
        }
    }

    /// The cookie of this thread's namespace, in which `socket` was created, of whatever protocol.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub(crate) fn here(&self, socket: &impl AsFd) -> io::Result<u64> {
        match self {
            Self::Kernel => Ok(getsockopt(socket, NetnsCookie)?),
            // TCP sockets alone carry one.
            Self::Sockets(carried) => carried.of(&inside()?),
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

/// A socket in this thread's namespace, for queries.
///
/// # Errors
/// Errors of the kernel.
pub(crate) fn inside() -> io::Result<OwnedFd> {
    socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(io::Error::from)
}
