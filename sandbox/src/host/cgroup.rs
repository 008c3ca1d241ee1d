//! cgroup2 directories: finding, creating, emptying, removing them. Version 1 hierarchies are never touched.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{sys::signal, unistd::Pid};

use super::{HostError, Result, mounts};

/// How long killed processes may take to exit: they only free their memory.
const EMPTY_WITHIN: Duration = Duration::from_secs(5);
/// Interval between checks for that.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The mount point of cgroup2.
///
/// # Errors
/// When it is not mounted.
pub fn mount_point() -> Result<PathBuf> {
    mounts()?.into_iter().find_map(|(target, kind)| (kind == "cgroup2").then_some(target)).ok_or(HostError::NoCgroup2)
}

/// Creates a cgroup and its parents. An existing one is not an error.
///
/// # Errors
/// When the kernel refuses.
pub fn create(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|source| HostError::CreateCgroup { path: dir.to_owned(), source })
}

/// Kills all processes in a cgroup and below it. A missing cgroup is not an error.
///
/// # Errors
/// When the kernel refuses.
pub fn kill(dir: &Path) -> Result<()> {
    // Before Linux 5.14 there is no such file. Where it might be created, opening fails with EACCES instead.
    let file = fs::OpenOptions::new().write(true).open(dir.join("cgroup.kill"));
    match file.and_then(|mut file| file.write_all(b"1")) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => kill_one_by_one(dir),
        Err(source) => Err(HostError::KillCgroup { path: dir.to_owned(), source }),
    }
}

/// Removes a cgroup and all below it as soon as they are empty. A missing one is not an error. Blocks for up to 5 s.
///
/// # Errors
/// When processes stay in it: [`kill`] them first.
pub fn remove(dir: &Path) -> Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    loop {
        match remove_tree(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                thread::sleep(LOOK_EVERY);
            }
            Err(source) => {
                let processes = processes(dir).unwrap_or_default();
                return Err(HostError::RemoveCgroup { path: dir.to_owned(), processes, source });
            }
        }
    }
}

/// The processes in a cgroup and below it. A missing cgroup has none.
///
/// # Errors
/// When the list is not readable.
pub fn processes(dir: &Path) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    collect(dir, &mut found).map_err(|source| HostError::ReadCgroup { path: dir.to_owned(), source })?;
    Ok(found)
}

fn collect(dir: &Path, found: &mut Vec<u32>) -> io::Result<()> {
    match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(text) => found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    }
    for child in children(dir)? {
        collect(&child, found)?;
    }
    Ok(())
}

fn remove_tree(dir: &Path) -> io::Result<()> {
    for child in children(dir)? {
        remove_tree(&child)?;
    }
    match fs::remove_dir(dir) {
        Err(error) if !is_gone(&error) => Err(error),
        _ => Ok(()),
    }
}

fn children(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Linux before 5.14 has no `cgroup.kill`. Processes that fork in between are killed in the next round.
fn kill_one_by_one(dir: &Path) -> Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    loop {
        let left = processes(dir)?;
        if left.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        for process in left.into_iter().filter_map(|process| i32::try_from(process).ok()) {
            // A process that has exited needs no signal.
            let _ = signal::kill(Pid::from_raw(process), signal::Signal::SIGKILL);
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Files of a cgroup that is being removed fail with ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}
