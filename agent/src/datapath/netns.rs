//! Enters a network namespace to query its cookie, addresses and listeners. Refuses to let any other part of the agent
//! inside: one thread enters, and does nothing else.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        mpsc::{self, RecvError},
    },
    thread,
};

use nix::{
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    sched::{CloneFlags, setns},
};
use weft_runtime::error::chain;

use crate::datapath::{
    cookies::{self, Cookies},
    sock_diag::{self, Listening},
};

/// A function to run inside.
type Visit = Box<dyn FnOnce() + Send>;

/// The thread that enters namespaces, because setns changes the calling thread. A new thread for each query would take
/// longer than the query.
static VISITOR: LazyLock<io::Result<mpsc::Sender<Visit>>> = LazyLock::new(|| {
    let (visits, next) = mpsc::channel::<Visit>();
    let visit_all = move || next.into_iter().for_each(|visit| drop(catch_unwind(AssertUnwindSafe(visit))));
    thread::Builder::new().name("netns".into()).spawn(visit_all)?;
    Ok(visits)
});

/// A pod's network namespace.
#[derive(Debug)]
pub(crate) struct Netns {
    /// Keeps the namespace alive during its enrolment.
    pub(crate) file: File,
    /// The kernel's id of it, never reused until reboot.
    pub(crate) cookie: u64,
    /// The addresses of its interfaces, except loopback's, in the order of interfaces; link-local ones last.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Why a namespace could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetnsError {
    #[error("no network namespace at {path}")]
    Open { path: String, source: io::Error },
    #[error("{path} is not a network namespace, or the agent may not enter it (needs CAP_SYS_ADMIN)")]
    Enter { path: String, source: io::Error },
    #[error("cannot learn the cookie of the network namespace {path}")]
    Cookie { path: String, source: io::Error },
    #[error("cannot ask the network namespace {path} for its addresses")]
    Addresses { path: String, source: io::Error },
}

impl Netns {
    /// Opens a namespace by a path that refers to it, such as /run/netns/NAME or /proc/PID/ns/net.
    ///
    /// # Errors
    /// See [`NetnsError`]; `Open` with `NotFound` when the namespace does not exist.
    pub(crate) fn open(path: &Path, cookies: &Cookies) -> Result<Self, NetnsError> {
        let file = File::open(path).map_err(|source| NetnsError::Open { path: path.display().to_string(), source })?;
        Self::enter(file, path, cookies)
    }

    /// Queries an open namespace; the path is for messages.
    ///
    /// # Errors
    /// See [`NetnsError`].
    pub(crate) fn enter(file: File, path: &Path, cookies: &Cookies) -> Result<Self, NetnsError> {
        let text = path.display().to_string();
        let questions = || (cookies::inside(), addresses().map_err(io::Error::from));
        let answers = inside(&file, questions);
        let (socket, addresses) = answers.map_err(|source| NetnsError::Enter { path: text.clone(), source })?;
        let socket = socket.map_err(|source| NetnsError::Cookie { path: text.clone(), source })?;
        let addresses = addresses.map_err(|source| NetnsError::Addresses { path: text.clone(), source })?;
        let cookie = cookies.of(&socket).map_err(|source| NetnsError::Cookie { path: text, source })?;
        Ok(Self { file, cookie, addresses })
    }

    /// The TCP sockets that listen in the namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or its kernel cannot answer.
    pub(crate) fn listening(&self) -> io::Result<Vec<Listening>> {
        inside(&self.file, sock_diag::listening)?
    }
}

/// The addresses of the interfaces in this thread's namespace, except loopback's; link-local ones last.
fn addresses() -> nix::Result<Vec<IpAddr>> {
    let interfaces = getifaddrs()?.filter(|interface| !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())));
        Some((interface.interface_name, interface.flags.contains(InterfaceFlags::IFF_UP), ip))
    });
    Ok(own_addresses(addresses.collect()))
}

/// The addresses that are the namespace's own on every interface. The input is, for each interface, whether it is up,
/// and an address if it has one. An IPv6 link-local address is the pod's own on one interface only, and another host's
/// on the others.
fn own_addresses(addresses: Vec<(String, bool, Option<IpAddr>)>) -> Vec<IpAddr> {
    let links: BTreeSet<&str> =
        addresses.iter().filter(|(_, is_up, _)| *is_up).map(|(name, _, _)| name.as_str()).collect();
    let is_own = |ip: &IpAddr| is_unicast(ip) && (links.len() < 2 || ip.is_ipv4() || !is_link_local(ip));
    let mut ips: Vec<IpAddr> = addresses.iter().filter_map(|(_, _, ip)| *ip).filter(is_own).collect();
    ips.sort_by_key(is_link_local);
    ips
}

/// Runs a function in a namespace.
///
/// # Errors
/// When it cannot be entered.
fn inside<T: Send + 'static>(namespace: &File, ask: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (answer, answered) = mpsc::sync_channel(1);
    let (home, namespace) = (File::open("/proc/self/ns/net")?, namespace.try_clone()?);
    let visit: Visit = Box::new(move || {
        let entered = setns(&namespace, CloneFlags::CLONE_NEWNET);
        let answers = entered.map(|()| ask());
        // A namespace lives as long as a thread is inside.
        let left = setns(&home, CloneFlags::CLONE_NEWNET);
        // The caller waits for it.
        let _ = answer.send(left.and(answers).map_err(io::Error::from));
    });
    let ended = |_| io::Error::other("the thread that enters network namespaces ended");
    let visitor = VISITOR.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    visitor.send(visit).map_err(|_| ended(RecvError))?;
    answered.recv().map_err(ended)?
}

/// The cookies of all network namespaces in which a process lives; `None` if the scan is incomplete because a
/// namespace could not be queried. A process that exits during the scan is not an error.
///
/// # Errors
/// When the table of processes cannot be read.
pub(crate) fn living(source: &Cookies) -> io::Result<Option<BTreeSet<u64>>> {
    let ask = |path: &Path| Netns::open(path, source).map(|netns| netns.cookie);
    let exists = |path: &Path| fs::metadata(path).map(|metadata| metadata.ino());
    let processes: io::Result<Vec<PathBuf>> = fs::read_dir("/proc")?.map(|entry| Ok(entry?.path())).collect();
    Ok(living_among(processes?.into_iter().map(|process| process.join("ns/net")), exists, ask))
}

/// Queries each namespace once, through the first process that lives long enough.
fn living_among(
    paths: impl Iterator<Item = PathBuf>,
    inode: impl Fn(&Path) -> io::Result<u64>,
    ask: impl Fn(&Path) -> Result<u64, NetnsError>,
) -> Option<BTreeSet<u64>> {
    let (mut known, mut unknown, mut cookies) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for path in paths {
        let Ok(inode) = inode(&path) else { continue };
        if known.contains(&inode) {
            continue;
        }
        // Another process of the namespace may answer if this one did not.
        match ask(&path) {
            Ok(cookie) => {
                known.insert(inode);
                unknown.remove(&inode);
                cookies.insert(cookie);
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), "a process's network namespace cannot be asked");
                unknown.insert(inode);
            }
        }
    }
    unknown.is_empty().then_some(cookies)
}

fn is_unicast(ip: &IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}

/// Whether an address is valid on its link only: the pod's own like any other, but not a source for other links.
pub(crate) fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_local_address_is_own_where_there_is_one_link() {
        let row = |name: &str, is_up, ip: &str| (name.to_owned(), is_up, ip.parse().ok());
        let eth0 = [row("eth0", true, ""), row("eth0", true, "fe80::5"), row("eth0", true, "10.0.0.5")];
        for (what, more, expected) in [
            ("one link", vec![], "10.0.0.5 fe80::5"),
            ("another that is down", vec![row("tunl0", false, "")], "10.0.0.5 fe80::5"),
            ("another without addresses", vec![row("net1", true, "")], "10.0.0.5"),
            (
                "another with addresses, IPv4's link-local ones among them",
                vec![row("net1", true, "fe80::6"), row("net1", true, "169.254.1.6"), row("net1", true, "fd00::6")],
                "10.0.0.5 fd00::6 169.254.1.6",
            ),
        ] {
            let own = own_addresses(eth0.iter().cloned().chain(more).collect());
            let own: Vec<String> = own.iter().map(ToString::to_string).collect();
            assert_eq!(own.join(" "), expected, "{what}");
        }
    }

    /// Processes by number, each with its namespace's inode (`None` if it has exited) and the cookie (`None` if the
    /// query fails).
    fn living_of(processes: &[(Option<u64>, Option<u64>)]) -> Option<BTreeSet<u64>> {
        let of = |path: &Path| processes[path.to_str().unwrap().parse::<usize>().unwrap()];
        let exited = || io::Error::from_raw_os_error(libc::ESRCH);
        living_among(
            (0..processes.len()).map(|number| PathBuf::from(number.to_string())),
            |path| of(path).0.ok_or_else(exited),
            |path| of(path).1.ok_or_else(|| NetnsError::Open { path: String::new(), source: exited() }),
        )
    }

    #[test]
    fn a_namespace_lives_though_its_first_process_exits_during_the_scan() {
        assert_eq!(living_of(&[(Some(1), None), (Some(1), Some(71)), (Some(2), Some(72))]), Some([71, 72].into()));
    }

    #[test]
    fn a_namespace_that_cannot_be_asked_makes_the_scan_inconclusive() {
        assert_eq!(living_of(&[(Some(1), Some(71)), (Some(2), None)]), None);
    }

    #[test]
    fn a_process_that_exited_before_the_scan_counts_for_nothing() {
        assert_eq!(living_of(&[(None, None), (Some(1), Some(71))]), Some([71].into()));
    }
}
