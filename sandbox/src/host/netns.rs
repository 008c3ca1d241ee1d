//! Named network namespaces: created, removed and entered as by `ip netns`, so that its users see them.
//!
//! A bind mount of its file on /run/netns/NAME keeps a namespace alive. Only threads created for that purpose change
//! their namespace: such a thread ends in it.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

use super::{
    HostError, Result, mounts,
    netlink::{on_netlink, up},
};

/// Directory in which `ip netns` keeps namespaces.
pub(super) const NETNS_DIR: &str = "/run/netns";

/// Settings of every namespace of a sandbox, below /proc/sys/net. Without duplicate address detection an IPv6 address
/// is usable at once, and no other process can have it. Ports below 1024 are open to all users, as with container
/// runtimes.
const SETTINGS: [(&str, &str); 9] = [
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/all/accept_ra", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/ip_unprivileged_port_start", "0"),
];

/// Creates a namespace with loopback up, and returns its file. The name must not be in use.
///
/// # Errors
/// When the name is in use, or the process may not create namespaces.
pub fn create(name: &str) -> Result<PathBuf> {
    let path = Path::new(NETNS_DIR).join(name);
    let failed = |source| HostError::CreateNetns { name: name.to_owned(), source };
    fs::create_dir_all(NETNS_DIR).map_err(failed)?;
    File::options().write(true).create_new(true).open(&path).map_err(failed)?;
    let made = bind_new(&path).map_err(failed).and_then(|()| prepare(&path));
    if made.is_err() {
        // Report the first error; the cleanup finds the rest by name.
        let _ = delete(name);
    }
    made.map(|()| path)
}

/// Removes a namespace's name; the namespace ends with its last process. A missing one is not an error.
///
/// # Errors
/// When the name cannot be unmounted or unlinked.
pub fn delete(name: &str) -> Result<()> {
    let path = Path::new(NETNS_DIR).join(name);
    let failed = |source| HostError::DeleteNetns { name: name.to_owned(), source };
    match umount2(&path, MntFlags::MNT_DETACH) {
        // EINVAL: nothing is mounted on the file.
        Ok(()) | Err(nix::Error::ENOENT | nix::Error::EINVAL) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// Runs a function inside a namespace and waits for it. Sockets created there stay in it, wherever they are used; so
/// do processes started there.
///
/// # Errors
/// When the namespace cannot be entered, or the function panics.
pub fn within<T: Send + 'static>(netns: &Path, f: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let path = netns.to_owned();
    let entered = move || {
        enter(&path)?;
        Ok(f())
    };
    let early = || HostError::RunInNetns { path: netns.to_owned() };
    thread::Builder::new().name("netns".into()).spawn(entered).map_err(|_| early())?.join().map_err(|_| early())?
}

/// [`within`] for callers that must not block.
pub(super) async fn within_blocking<T: Send + 'static>(
    netns: &Path,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let path = netns.to_owned();
    let early = HostError::RunInNetns { path: netns.to_owned() };
    tokio::task::spawn_blocking(move || within(&path, f)).await.map_err(|_| early)?
}

/// Moves the calling thread into a namespace permanently.
pub(super) fn enter(netns: &Path) -> Result<()> {
    let failed = |source| HostError::EnterNetns { path: netns.to_owned(), source };
    let file = File::open(netns).map_err(failed)?;
    setns(file, CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))
}

fn bind_new(path: &Path) -> io::Result<()> {
    share_directory()?;
    let path = path.to_owned();
    let on_thread = move || -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        mount(Some("/proc/thread-self/ns/net"), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        Ok(())
    };
    thread::Builder::new()
        .name("netns".into())
        .spawn(on_thread)?
        .join()
        .map_err(|_| io::Error::other("the thread that creates it ended early"))?
}

/// Makes /run/netns a shared mount, once: otherwise a name that is removed here would stay in other mount namespaces.
fn share_directory() -> io::Result<()> {
    let mounted = mounts().map_err(io::Error::other)?.iter().any(|(target, _)| target == Path::new(NETNS_DIR));
    if !mounted {
        let none = None::<&str>;
        mount(Some(NETNS_DIR), NETNS_DIR, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
        mount(none, NETNS_DIR, none, MsFlags::MS_SHARED | MsFlags::MS_REC, none)?;
    }
    Ok(())
}

fn prepare(netns: &Path) -> Result<()> {
    within(netns, || {
        for (setting, value) in SETTINGS {
            set_sysctl(setting, value)?;
        }
        on_netlink(async |handle| up(&handle, "lo").await)
    })?
}

/// Writes a setting below /proc/sys/net of the calling thread's namespace. A kernel without IPv6 has no settings for
/// it.
pub(super) fn set_sysctl(setting: &str, value: &'static str) -> Result<()> {
    let path = Path::new("/proc/sys/net").join(setting);
    match fs::write(&path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && setting.starts_with("ipv6/") => Ok(()),
        Err(source) => Err(HostError::SetSysctl { path, value, source }),
        Ok(()) => Ok(()),
    }
}
