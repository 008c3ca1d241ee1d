//! Entering a network namespace to ask for its cookie and addresses. Refuses to stay inside: the entering thread is
//! thrown away.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    net::IpAddr,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::Path,
    thread,
};

use nix::{
    getsockopt_impl,
    ifaddrs::getifaddrs,
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
    /// The addresses of its interfaces but loopback's, in the interfaces' order; link-local ones last.
    pub(crate) addresses: Vec<IpAddr>,
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
    #[error("cannot ask the network namespace {path} for its addresses")]
    Addresses { path: String, source: io::Error },
}

impl Netns {
    /// Opens a namespace by a path that refers to it, such as /run/netns/NAME or /proc/PID/ns/net.
    ///
    /// # Errors
    /// See [`NetnsError`]; `Open` with `NotFound` when the namespace does not exist.
    pub(crate) fn open(path: &Path) -> Result<Self, NetnsError> {
        let file = File::open(path).map_err(|source| NetnsError::Open { path: path.display().to_string(), source })?;
        Self::enter(file, path)
    }

    /// Asks a namespace that is open; the path is for messages.
    ///
    /// # Errors
    /// See [`NetnsError`].
    pub(crate) fn enter(file: File, path: &Path) -> Result<Self, NetnsError> {
        let text = path.display().to_string();
        // setns changes the calling thread for good, so the questions get a thread of their own.
        let answers = thread::scope(|scope| {
            let enter = || -> Result<(OwnedFd, Vec<IpAddr>), NetnsError> {
                setns(&file, CloneFlags::CLONE_NEWNET)
                    .map_err(|errno| NetnsError::Enter { path: text.clone(), source: errno.into() })?;
                let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
                    .map_err(|errno| NetnsError::Cookie { path: text.clone(), source: errno.into() })?;
                let interfaces =
                    getifaddrs().map_err(|errno| NetnsError::Addresses { path: text.clone(), source: errno.into() })?;
                let ips = interfaces.filter_map(|interface| {
                    let address = interface.address?;
                    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
                    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))
                });
                let mut ips: Vec<IpAddr> = ips.filter(is_unicast).collect();
                ips.sort_by_key(is_link_local);
                Ok((socket, ips))
            };
            scope.spawn(enter).join()
        });
        let (socket, addresses) = match answers {
            Ok(answers) => answers?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let cookie = getsockopt(&socket, NetnsCookie)
            .map_err(|errno| NetnsError::Cookie { path: text, source: errno.into() })?;
        Ok(Self { file, cookie, addresses })
    }

    /// The kernel's tables of the TCP sockets in the namespace (proc(5)), IPv4's and IPv6's; one that is not there is empty.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub(crate) fn tcp_tables(&self) -> io::Result<[String; 2]> {
        let read = || {
            setns(&self.file, CloneFlags::CLONE_NEWNET)?;
            Ok(["tcp", "tcp6"]
                .map(|name| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default()))
        };
        thread::scope(|scope| scope.spawn(read).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// The cookies of all network namespaces in which a process lives.
///
/// # Errors
/// When the table of processes cannot be read. A process that ends meanwhile, or may not be looked at, is left out.
pub(crate) fn living() -> io::Result<BTreeSet<u64>> {
    let (mut inodes, mut cookies) = (BTreeSet::new(), BTreeSet::new());
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path().join("ns/net");
        let Ok(inode) = fs::metadata(&path).map(|metadata| metadata.ino()) else { continue };
        if inodes.insert(inode)
            && let Ok(netns) = Netns::open(&path)
        {
            cookies.insert(netns.cookie);
        }
    }
    Ok(cookies)
}

fn is_unicast(ip: &IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}

/// Whether an address means something on its link only: a pod's own like any other, but no source for other links.
pub(crate) fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}
