//! Enters a network namespace to query its cookie, addresses and listeners. Refuses to let any other part of the agent
//! inside: only threads that scan pods ([`scans`](super::scans)) enter.
//!
//! A pod determines how much there is to say about its namespace. So every visit has a limit of processor time, counts
//! as its pod's, and runs beside those of other pods. The search for namespaces that are gone, which enters all of the
//! node's, has a thread of its own.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use tokio::sync::oneshot;
use weft_runtime::error::chain;

use crate::datapath::{
    addresses,
    cookies::{self, Cookies},
    scans::processor_time,
    sock_diag::{self, Listening},
};

/// Processor time of a visit at most: hundreds of times as much as one of a usual pod takes.
const VISIT: Duration = Duration::from_secs(1);
/// Deadline of a search for namespaces that are gone.
const SEARCH: Duration = Duration::from_secs(30);

/// The agent's own network namespace.
static HOME: LazyLock<io::Result<File>> = LazyLock::new(|| File::open("/proc/self/ns/net"));

/// A pod's network namespace.
#[derive(Debug)]
pub(crate) struct Netns {
    /// Keeps the namespace alive during its enrolment.
    pub(crate) file: File,
    /// The kernel's id of it, never reused until reboot.
    pub(crate) cookie: u64,
    /// The addresses of its interfaces, except loopback's, in the order of interfaces; link-local ones last.
    pub(crate) addresses: Vec<IpAddr>,
    /// The listeners of the proxy's user; `None` if sock_diag did not answer.
    pub(crate) listening: Option<Vec<Listening>>,
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
    pub(crate) fn open(path: &Path, cookies: &Cookies, proxy_uid: u32) -> Result<Self, NetnsError> {
        let file = File::open(path).map_err(|source| NetnsError::Open { path: path.display().to_string(), source })?;
        Self::enter(file, path, cookies, proxy_uid)
    }

    /// Queries an open namespace; the path is for messages.
    ///
    /// # Errors
    /// See [`NetnsError`].
    pub(crate) fn enter(file: File, path: &Path, cookies: &Cookies, proxy_uid: u32) -> Result<Self, NetnsError> {
        let text = || path.display().to_string();
        let visit = |deadline| -> Result<_, NetnsError> {
            let no_addresses = |source| NetnsError::Addresses { path: text(), source };
            let mut connection = addresses::connect().map_err(no_addresses)?;
            let cookie = cookies.here(&connection).map_err(|source| NetnsError::Cookie { path: text(), source })?;
            let addresses = addresses::own(&mut connection, deadline).map_err(no_addresses)?;
            // Every review of a pod visits it: /proc/net/tcp would take too long. If this fails, a search for listeners
            // reads that, where one is needed.
            let listening = sock_diag::asked(deadline, &|one| one.uid == proxy_uid).ok();
            Ok((cookie, addresses, listening))
        };
        let visited = inside(&file, visit);
        let (cookie, addresses, listening) = visited.map_err(|source| NetnsError::Enter { path: text(), source })??;
        Ok(Self { file, cookie, addresses, listening })
    }

    /// The TCP sockets that listen in the namespace and are `wanted`.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or its kernel does not answer in time.
    pub(crate) fn listening(&self, wanted: impl Fn(&Listening) -> bool) -> io::Result<Vec<Listening>> {
        inside(&self.file, |deadline| sock_diag::listening(deadline, wanted))?
    }
}

/// Runs a function in a namespace, with its deadline: a processor time of this thread.
///
/// # Errors
/// When it cannot be entered or left.
fn inside<T>(namespace: &File, ask: impl FnOnce(Duration) -> T) -> io::Result<T> {
    let home = HOME.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    let answers = catch_unwind(AssertUnwindSafe(|| ask(processor_time() + VISIT)));
    // A namespace lives as long as a thread is inside.
    setns(home, CloneFlags::CLONE_NEWNET)?;
    Ok(answers.unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Those of these namespaces in which no process lives; none of them if the search is incomplete, because a namespace
/// could not be queried or the deadline has passed. A process that exits during the search is not an error.
///
/// # Errors
/// When the table of processes cannot be read.
pub(crate) async fn without_processes(suspects: BTreeSet<u64>, source: Cookies) -> io::Result<BTreeSet<u64>> {
    let (answer, answered) = oneshot::channel();
    // It ends inside of the namespace that it entered last.
    thread::Builder::new().name("netns-search".into()).spawn(move || answer.send(search(&suspects, &source)))?;
    answered.await.map_err(|_| io::Error::other("the search for network namespaces panicked"))?
}

fn search(suspects: &BTreeSet<u64>, source: &Cookies) -> io::Result<BTreeSet<u64>> {
    let deadline = Instant::now() + SEARCH;
    let ask = |path: &Path| {
        let text = || path.display().to_string();
        let file = File::open(path).map_err(|source| NetnsError::Open { path: text(), source })?;
        setns(&file, CloneFlags::CLONE_NEWNET)
            .map_err(|error| NetnsError::Enter { path: text(), source: error.into() })?;
        let cookie = cookies::inside().and_then(|socket| source.of(&socket));
        cookie.map_err(|source| NetnsError::Cookie { path: text(), source })
    };
    let inode = |path: &Path| fs::metadata(path).map(|metadata| metadata.ino());
    let is_late = || Instant::now() > deadline;
    // A directory that ends early must not make a namespace look empty.
    let processes: io::Result<Vec<PathBuf>> =
        fs::read_dir("/proc")?.map(|entry| Ok(entry?.path().join("ns/net"))).collect();
    Ok(absent_among(suspects, processes?.into_iter(), inode, ask, is_late))
}

/// Queries each namespace once, through the first process that lives long enough, until all suspects are found.
fn absent_among(
    suspects: &BTreeSet<u64>,
    paths: impl Iterator<Item = PathBuf>,
    inode: impl Fn(&Path) -> io::Result<u64>,
    ask: impl Fn(&Path) -> Result<u64, NetnsError>,
    is_late: impl Fn() -> bool,
) -> BTreeSet<u64> {
    let (mut known, mut unknown, mut absent) = (BTreeSet::new(), BTreeSet::new(), suspects.clone());
    for path in paths {
        if absent.is_empty() || is_late() {
            return BTreeSet::new();
        }
        let Ok(inode) = inode(&path) else { continue };
        if known.contains(&inode) {
            continue;
        }
        // Another process of the namespace may answer if this one did not.
        match ask(&path) {
            Ok(cookie) => {
                known.insert(inode);
                unknown.remove(&inode);
                absent.remove(&cookie);
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), "a process's network namespace cannot be asked");
                unknown.insert(inode);
            }
        }
    }
    if unknown.is_empty() { absent } else { BTreeSet::new() }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use nix::sched::unshare;

    use super::*;
    use crate::datapath::scans::{
        CpuMeter,
        tests::{is_long, work_for_long},
    };

    /// Which of 71 and 72 is absent, and the number of queries, given processes by number, each with its namespace's
    /// inode (`None` if it has exited) and the cookie (`None` if the query fails), and the number of queries before it
    /// is late.
    fn absent_of(processes: &[(Option<u64>, Option<u64>)], late: usize) -> (Vec<u64>, usize) {
        let of = |path: &Path| processes[path.to_str().unwrap().parse::<usize>().unwrap()];
        let exited = || io::Error::from_raw_os_error(libc::ESRCH);
        let asked = std::cell::Cell::new(0);
        let absent = absent_among(
            &[71, 72].into(),
            (0..processes.len()).map(|number| PathBuf::from(number.to_string())),
            |path| of(path).0.ok_or_else(exited),
            |path| {
                asked.set(asked.get() + 1);
                of(path).1.ok_or_else(|| NetnsError::Open { path: String::new(), source: exited() })
            },
            || asked.get() >= late,
        );
        (absent.into_iter().collect(), asked.get())
    }

    #[test]
    fn a_namespace_lives_though_its_first_process_exits_during_the_search() {
        assert_eq!(absent_of(&[(Some(1), None), (Some(1), Some(71)), (Some(2), Some(73))], 9).0, [72]);
    }

    #[test]
    fn a_namespace_that_cannot_be_asked_makes_the_search_inconclusive() {
        assert_eq!(absent_of(&[(Some(1), Some(71)), (Some(2), None)], 9).0, [0; 0]);
    }

    #[test]
    fn a_search_that_is_late_is_inconclusive() {
        let processes = [(Some(1), Some(71)), (Some(2), Some(73)), (Some(3), Some(74))];
        assert_eq!(absent_of(&processes, 9), (vec![72], 3));
        assert_eq!(absent_of(&processes, 2), (vec![], 2));
    }

    #[test]
    fn each_namespace_is_entered_once_and_no_more_than_it_takes() {
        let processes = [(Some(1), Some(71)), (Some(1), Some(71)), (Some(2), Some(72)), (Some(3), None)];
        assert_eq!(absent_of(&processes, 9), (vec![], 2));
    }

    #[test]
    fn a_process_that_exited_before_the_search_counts_for_nothing() {
        assert_eq!(absent_of(&[(None, None), (Some(1), Some(71))], 9).0, [72]);
    }

    #[test]
    fn the_time_of_a_visit_counts_as_its_pods() {
        let own = File::open("/proc/self/ns/net").unwrap();
        let meter = CpuMeter::start();
        inside(&own, |_| ()).unwrap();
        assert!(!is_long(&meter), "{meter:?}");
        inside(&own, |_| work_for_long()).unwrap();
        assert!(is_long(&meter), "{meter:?}");
    }

    #[test]
    fn a_visit_finds_the_listeners_of_the_proxys_user() {
        let (uid, listener) = (rustix::process::getuid().as_raw(), TcpListener::bind("127.0.0.1:0").unwrap());
        let port = listener.local_addr().unwrap().port();
        for (proxy_uid, expected) in [(uid, true), (uid + 1, false)] {
            let own = Netns::open(Path::new("/proc/self/ns/net"), &Cookies::Kernel, proxy_uid).unwrap();
            assert_eq!(own.listening.unwrap().iter().any(|one| one.port == port), expected, "{proxy_uid}");
        }
    }

    #[test]
    fn a_visit_leaves_the_namespace_even_if_it_panics() {
        let path = Path::new("/proc/thread-self/ns/net");
        let inode = || fs::metadata(path).unwrap().ino();
        let made = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open(path).unwrap()
        });
        let (other, home) = (made.join().unwrap(), inode());
        assert_ne!(inside(&other, |_| inode()).unwrap(), home);
        assert_eq!(inode(), home);
        let visit = || inside::<()>(&other, |_| panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(visit)).is_err());
        assert_eq!(inode(), home);
    }
}
