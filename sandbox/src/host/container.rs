//! A container: a process with its own network, volumes and environment.
//!
//! [`spawn`] starts `weft sandbox-init SPEC`, which calls [`init`]: that process applies the specification and then
//! executes the container's command. There are no images: files are the host's, except for mounts.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{
            fs::{MetadataExt as _, OpenOptionsExt as _},
            process::CommandExt as _,
        },
    },
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, chdir, setgroups, setresgid, setresuid, setsid},
};
use serde::{Deserialize, Serialize};

use super::{HostError, Result, netns};

/// Directories that are replaced with empty ones if a volume is mounted below them.
const FRESH: [&str; 2] = ["/run", "/var/run"];

/// A container's specification. Only standard input, output and error are inherited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The file of its network namespace; `None` means the caller's own.
    pub netns: Option<PathBuf>,
    /// Its cgroup2 directory, absolute. Must exist.
    pub cgroup: PathBuf,
    /// Its user; `None` means root.
    pub uid: Option<u32>,
    /// Its only group; `None` means root's, as in Kubernetes.
    pub gid: Option<u32>,
    /// Its working directory; `None` means `/`.
    pub working_dir: Option<PathBuf>,
    /// Its volumes; all other files are the host's.
    pub mounts: Vec<Mount>,
    /// Its whole environment. Its command is looked up in this `PATH`.
    pub env: Vec<(String, String)>,
    /// Its command and arguments.
    pub argv: Vec<String>,
}

/// A volume: a file or directory of the host, mounted elsewhere for one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// The file or directory of the host.
    pub source: PathBuf,
    /// The mount point in the container. Below /run and /var/run it is created; elsewhere it must exist.
    pub target: PathBuf,
    /// Whether the container may not write to it.
    pub read_only: bool,
}

/// Starts a container through the `weft` binary. The new process removes the specification's file after reading it.
///
/// # Errors
/// When the file cannot be written, or the binary cannot be started. Later failures appear on `stderr` and as exit
/// status 126 or 127.
pub fn spawn(
    weft: &Path,
    spec_file: &Path,
    spec: &Spec,
    stdin: Stdio,
    stdout: Stdio,
    stderr: Stdio,
) -> Result<tokio::process::Child> {
    write_spec(spec_file, spec).map_err(|source| HostError::WriteSpec { path: spec_file.to_owned(), source })?;
    tokio::process::Command::new(weft)
        .arg("sandbox-init")
        .arg(spec_file)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .map_err(|source| HostError::Start { path: weft.to_owned(), source })
}

/// Turns this process into the container: the body of `weft sandbox-init`. Must be called while the process has one
/// thread. Returns only on failure; the process must then exit with [`HostError::exit_code`].
#[must_use]
pub fn init(spec_file: &Path) -> HostError {
    match become_container(spec_file) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn write_spec(path: &Path, spec: &Spec) -> io::Result<()> {
    // Environments contain secrets: only the owner may read the file, even if it existed before.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(&serde_json::to_vec(spec)?)
}

fn read_spec(path: &Path) -> io::Result<Spec> {
    let spec = serde_json::from_slice(&fs::read(path)?)?;
    fs::remove_file(path)?;
    Ok(spec)
}

fn become_container(spec_file: &Path) -> Result<std::convert::Infallible> {
    let spec = read_spec(spec_file).map_err(|source| HostError::ReadSpec { path: spec_file.to_owned(), source })?;
    let (program, arguments) = spec.argv.split_first().ok_or(HostError::NoCommand)?;
    leave_terminal();
    fs::write(spec.cgroup.join("cgroup.procs"), "0")
        .map_err(|source| HostError::JoinCgroup { path: spec.cgroup.clone(), source })?;
    if let Some(netns) = &spec.netns {
        netns::enter(netns)?;
    }
    mount_volumes(&spec.mounts)?;
    let (uid, gid) = (spec.uid.unwrap_or(0), spec.gid.unwrap_or(0));
    become_user(uid, gid).map_err(|errno| HostError::DropPrivileges { uid, gid, source: errno.into() })?;
    let directory = spec.working_dir.unwrap_or_else(|| "/".into());
    chdir(&directory).map_err(|errno| HostError::ChangeDirectory { path: directory, source: errno.into() })?;
    // Unlike execve(2), this also restores the default of SIGPIPE, which Rust programs ignore.
    let source = Command::new(program).args(arguments).env_clear().envs(spec.env).exec();
    Err(HostError::Exec { program: program.clone(), source })
}

/// Keeps Ctrl-C at the daemon's terminal from its containers, which the daemon stops itself and in order. Containers
/// get /dev/null as standard input; a command executed in a pod keeps its terminal.
fn leave_terminal() {
    let null = fs::metadata("/dev/null").map(|null| null.rdev());
    let stdin = fs::metadata("/proc/self/fd/0").map(|stdin| stdin.rdev());
    if let (Ok(null), Ok(stdin)) = (null, stdin)
        && null == stdin
    {
        // Fails for the leader of a process group, which does not get the terminal's signals anyway.
        let _ = setsid();
    }
}

fn become_user(uid: u32, gid: u32) -> nix::Result<()> {
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, user)
}

/// A volume to be mounted: opened before a fresh directory hides its source.
struct Volume {
    source: PathBuf,
    file: File,
    is_dir: bool,
    target: PathBuf,
    read_only: bool,
}

fn mount_volumes(mounts: &[Mount]) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| HostError::UnshareMounts(errno.into()))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(|errno| HostError::UnshareMounts(errno.into()))?;
    let fresh: BTreeSet<PathBuf> = FRESH.iter().filter_map(|dir| fs::canonicalize(dir).ok()).collect();
    let mut volumes = Vec::new();
    for wanted in mounts {
        let target = resolve(&wanted.target);
        let failed = |source| HostError::Mount { what: wanted.source.clone(), target: target.clone(), source };
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(&wanted.source).map_err(failed)?;
        let is_dir = file.metadata().map_err(failed)?.is_dir();
        volumes.push(Volume { source: wanted.source.clone(), file, is_dir, target, read_only: wanted.read_only });
    }
    for dir in &fresh {
        if volumes.iter().any(|volume| volume.target.starts_with(dir)) {
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755"))
                .map_err(|errno| HostError::Mount {
                    what: "tmpfs".into(),
                    target: dir.clone(),
                    source: errno.into(),
                })?;
        }
    }
    // Parents first: a volume may be mounted inside another.
    volumes.sort_by_key(|volume| volume.target.components().count());
    for volume in &volumes {
        let makes = fresh.iter().any(|dir| volume.target.starts_with(dir));
        bind(volume, makes)?;
    }
    Ok(())
}

fn bind(volume: &Volume, makes_target: bool) -> Result<()> {
    let failed = |source| HostError::Mount { what: volume.source.clone(), target: volume.target.clone(), source };
    if !volume.target.exists() {
        if !makes_target {
            return Err(HostError::MissingMountTarget { target: volume.target.clone() });
        }
        make_target(volume).map_err(failed)?;
    }
    let source = format!("/proc/self/fd/{}", volume.file.as_raw_fd());
    let bind = MsFlags::MS_BIND;
    mount(Some(source.as_str()), &volume.target, None::<&str>, bind | MsFlags::MS_REC, None::<&str>)
        .map_err(|errno| failed(errno.into()))?;
    if volume.read_only {
        let flags = bind | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, &volume.target, None::<&str>, flags, None::<&str>).map_err(|errno| failed(errno.into()))?;
    }
    Ok(())
}

fn make_target(volume: &Volume) -> io::Result<()> {
    if volume.is_dir {
        return fs::create_dir_all(&volume.target);
    }
    if let Some(parent) = volume.target.parent() {
        fs::create_dir_all(parent)?;
    }
    File::create(&volume.target).map(drop)
}

/// Resolves a path on this host through links (/var/run is one, /etc/resolv.conf often), as far as it exists.
fn resolve(path: &Path) -> PathBuf {
    let mut missing = Vec::new();
    let mut existing = path;
    loop {
        if let Ok(mut real) = fs::canonicalize(existing) {
            real.extend(missing.into_iter().rev());
            return real;
        }
        match (existing.parent(), existing.components().next_back()) {
            (Some(parent), Some(last @ Component::Normal(_))) => {
                missing.push(last);
                existing = parent;
            }
            _ => return path.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_as_far_as_they_exist() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(real.join("there")).unwrap();
        std::os::unix::fs::symlink(real.join("there"), real.join("link")).unwrap();
        assert_eq!(resolve(&real.join("link/a/b")), real.join("there/a/b"));
        assert_eq!(resolve(&real.join("there")), real.join("there"));
    }

    #[test]
    fn specifications_are_private_and_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spec.json");
        let spec = Spec {
            netns: None,
            cgroup: "/c".into(),
            uid: Some(2102),
            gid: None,
            working_dir: None,
            mounts: vec![Mount { source: "/a".into(), target: "/run/b".into(), read_only: true }],
            env: vec![("A".into(), "1".into())],
            argv: vec!["true".into()],
        };
        write_spec(&path, &spec).unwrap();
        write_spec(&path, &spec).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_spec(&path).unwrap(), spec);
        assert!(!path.exists());
    }
}
