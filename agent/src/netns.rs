//! Entering a network namespace to ask for its cookie. Refuses to stay inside: the entering thread is thrown away.

use std::{fs::File, io, os::fd::OwnedFd, path::Path, thread};

use nix::{
    getsockopt_impl,
    sched::{CloneFlags, setns},
    sockopt_impl,
    sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket},
};

sockopt_impl!(
    /// The identity of a socket's network namespace, eight bytes.
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// A pod's network namespace.
#[derive(Debug)]
pub(crate) struct Netns {
    /// Keeps the namespace alive while it is being enrolled.
    pub(crate) file: File,
    /// The kernel's identity of it, never reused until reboot. Linux 5.14.
    pub(crate) cookie: u64,
}

/// Why a namespace could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetnsError {
    #[error("no network namespace at {path}")]
    Open { path: String, source: io::Error },
    #[error("{path} is not a network namespace, or the agent may not enter it (needs CAP_SYS_ADMIN)")]
    Enter { path: String, source: io::Error },
    #[error("cannot ask the network namespace {path} for its cookie (needs Linux 5.14)")]
    Cookie { path: String, source: io::Error },
}

impl Netns {
    /// Opens a namespace by a path that refers to it, such as /run/netns/NAME or /proc/PID/ns/net.
    ///
    /// # Errors
    /// See [`NetnsError`]; `Open` with `NotFound` when the namespace does not exist.
    pub(crate) fn open(path: &Path) -> Result<Self, NetnsError> {
        let text = path.display().to_string();
        let file = File::open(path).map_err(|source| NetnsError::Open { path: text.clone(), source })?;
        // setns changes the calling thread for good, so the question gets a thread of its own.
        let socket = thread::scope(|scope| {
            let enter = || -> Result<OwnedFd, NetnsError> {
                setns(&file, CloneFlags::CLONE_NEWNET)
                    .map_err(|errno| NetnsError::Enter { path: text.clone(), source: errno.into() })?;
                socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
                    .map_err(|errno| NetnsError::Cookie { path: text.clone(), source: errno.into() })
            };
            scope.spawn(enter).join()
        });
        let socket = match socket {
            Ok(socket) => socket?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let cookie = getsockopt(&socket, NetnsCookie)
            .map_err(|errno| NetnsError::Cookie { path: text, source: errno.into() })?;
        Ok(Self { file, cookie })
    }
}
