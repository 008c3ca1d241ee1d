//! Probes single features on the running kernel. Everything created for a probe is removed afterwards.

use std::{
    fs,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd as _},
    path::Path,
    thread,
};

use aya::sys::{is_helper_supported, is_map_supported, is_program_supported};
use nix::sched::{CloneFlags, unshare};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use weft_runtime::error::chain;

use super::{Found, Probe};
use crate::{
    cgroup,
    datapath::{
        bpf::{self, AttachType, Link},
        cookies::{self, Cookies},
    },
    host,
};

const JIT: &str = "/proc/sys/net/core/bpf_jit_enable";
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";
const UNPRIVILEGED: &str = "/proc/sys/kernel/unprivileged_bpf_disabled";

/// Probes a feature.
pub(super) fn probe(probe: Probe) -> Found {
    match probe {
        Probe::Btf => present(host::has_btf()),
        Probe::Cgroup2 => present(cgroup::is_mounted()),
        Probe::Bpffs => present(host::is_bpffs(Path::new(host::BPFFS))),
        Probe::Program(program) => judged(is_program_supported(program)),
        Probe::Hook(hook) => errno(bpf::load_trivial(hook).map(drop), &[libc::EINVAL]),
        Probe::Map(map) => judged(is_map_supported(map)),
        Probe::Helper(program, helper) => judged(is_helper_supported(program, helper)),
        Probe::CgroupLink => cgroup_link(),
        Probe::NetnsLink => netns_link(),
        Probe::NetnsCookie => netns_cookie(),
        Probe::PidfdGetfd => pidfd(),
        Probe::Jit => setting(JIT).map_or_else(
            || Found::Unknown("only the host's network namespace has the setting".to_owned()),
            |value| present(value != "0"),
        ),
        Probe::Lockdown => setting(LOCKDOWN).map_or_else(
            || Found::Unknown("no securityfs is mounted, or the kernel has no lockdown".to_owned()),
            |levels| Found::State(chosen(&levels)),
        ),
        Probe::UnprivilegedBpf => Found::State(setting(UNPRIVILEGED).unwrap_or_else(|| "no such setting".to_owned())),
    }
}

fn present(there: bool) -> Found {
    if there { Found::Yes } else { Found::No }
}

fn judged<E: std::error::Error + 'static>(answer: Result<bool, E>) -> Found {
    answer.map_or_else(|error| Found::Unknown(chain(&error)), present)
}

/// Classifies errors of system calls: those of older kernels, and those that are inconclusive.
fn errno(result: io::Result<()>, of_older_kernels: &[i32]) -> Found {
    match result {
        Ok(()) => Found::Yes,
        Err(error) if error.raw_os_error().is_some_and(|errno| of_older_kernels.contains(&errno)) => Found::No,
        Err(error) => Found::Unknown(error.to_string()),
    }
}

/// A device is not a cgroup: a kernel with such links reports that (EBADF), another one does not know the command
/// (EINVAL).
fn cgroup_link() -> Found {
    let attempt = || -> io::Result<()> {
        let program = bpf::load_trivial(AttachType::SockOps)?;
        let device = File::open("/dev/null")?;
        match Link::create(program.as_fd(), device.as_fd(), AttachType::SockOps) {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(()),
            other => other.map(drop),
        }
    };
    errno(attempt(), &[libc::EINVAL])
}

/// Runs in a new namespace, whose only process is a thread that ends with it.
fn netns_link() -> Found {
    let attempt = || -> io::Result<()> {
        let program = bpf::load_trivial(AttachType::SkLookup)?;
        unshare(CloneFlags::CLONE_NEWNET)?;
        let namespace = File::open("/proc/thread-self/ns/net")?;
        Link::create(program.as_fd(), namespace.as_fd(), AttachType::SkLookup).map(drop)
    };
    match thread::scope(|scope| scope.spawn(attempt).join()) {
        Ok(result) => errno(result, &[libc::EINVAL]),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn netns_cookie() -> Found {
    let asked = cookies::inside().and_then(|socket| Cookies::Kernel.of(&socket));
    errno(asked.map(drop), &[libc::ENOPROTOOPT])
}

fn pidfd() -> Found {
    let attempt = || -> io::Result<()> {
        let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        pidfd_getfd(&own, own.as_raw_fd(), PidfdGetfdFlags::empty()).map(drop).map_err(io::Error::from)
    };
    errno(attempt(), &[libc::ENOSYS])
}

fn setting(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The selected value in brackets, as in `none [integrity] confidentiality`.
fn chosen(text: &str) -> String {
    let inner = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inner.map_or(text, |(choice, _)| choice).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_errors_of_older_kernels_from_others() {
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        assert_eq!(errno(Ok(()), &[libc::EINVAL]), Found::Yes);
        assert_eq!(errno(error(libc::EINVAL), &[libc::EINVAL]), Found::No);
        assert!(matches!(errno(error(libc::EPERM), &[libc::EINVAL]), Found::Unknown(_)));
    }

    #[test]
    fn reads_the_chosen_level() {
        assert_eq!(chosen("none [integrity] confidentiality"), "integrity");
        assert_eq!(chosen("something else"), "something else");
    }

    #[test]
    fn what_needs_no_privilege_is_seen_on_this_kernel() {
        let read = |path: &str| fs::metadata(path).is_ok();
        assert_eq!(probe(Probe::Btf), present(read("/sys/kernel/btf/vmlinux")));
        assert_eq!(probe(Probe::NetnsCookie), Found::Yes, "the tests need Linux 5.14 themselves");
        assert_eq!(probe(Probe::PidfdGetfd), Found::Yes);
        assert!(matches!(probe(Probe::UnprivilegedBpf), Found::State(_)));
    }
}
