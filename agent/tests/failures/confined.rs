//! An agent with only the rights that the chart's DaemonSet gives it: capabilities, a seccomp filter, no new
//! privileges, and a file system that is writable only at its pins and its socket.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitCode},
};

use nix::{
    libc,
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use weft_sandbox::host::mounts;

/// The first argument of a process that becomes a confined one.
pub(crate) const SUBCOMMAND: &str = "confined";
/// The first argument of a process that tries what a confined one must not do.
pub(crate) const PROBE: &str = "confined-probe";
/// The first argument of a process that tries what requires capabilities.
pub(crate) const RIGHTS: &str = "confined-rights";

/// System calls that runtimes' default profiles deny to a container with our capabilities (moby's
/// profiles/seccomp/default_linux.go: calls that it allows to none, or only to holders of other capabilities), and
/// those that it allows with CAP_SYS_ADMIN and CAP_SYS_PTRACE and that the agent does not use.
const DENIED: &[libc::c_long] = &[
    // Allowed to no container.
    libc::SYS_add_key,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_pivot_root,
    libc::SYS_request_key,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_userfaultfd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ustat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_sysfs,
    // Allowed with other capabilities.
    libc::SYS_acct,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_get_mempolicy,
    libc::SYS_init_module,
    libc::SYS_mbind,
    libc::SYS_open_by_handle_at,
    libc::SYS_reboot,
    libc::SYS_set_mempolicy,
    libc::SYS_settimeofday,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    // Allowed to the agent, which needs none of these on a node that has a bpffs.
    libc::SYS_chroot,
    libc::SYS_fanotify_init,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_umount2,
];

/// Names a system call, by its number, that a confined process is denied besides.
pub(crate) const ALSO_DENIED: &str = "WEFT_TEST_ALSO_DENIED";

/// A command that becomes `program`, which may write only below `writable`.
pub(crate) fn command(capabilities: CapabilitySet, writable: &Path, program: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(SUBCOMMAND).arg(capabilities.bits().to_string()).arg(writable).arg(program);
    command
}

/// Becomes the program.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let capabilities = CapabilitySet::from_bits_retain(arguments[0].parse().unwrap());
    read_only_but(&arguments[1]);
    // A program of root gets the capabilities that are left in this set.
    for bit in 0..=last_capability() {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if !capabilities.contains(capability) {
            remove_capability_from_bounding_set(capability).unwrap();
        }
    }
    let also = std::env::var(ALSO_DENIED).ok().map(|call| call.parse().unwrap());
    let rules = DENIED.iter().copied().chain(also).map(|call| (call, Vec::new())).collect();
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, std::env::consts::ARCH.try_into().unwrap());
    // Sets no_new_privs, too.
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
    panic!("{}", Command::new(&arguments[2]).args(&arguments[3..]).exec());
}

fn last_capability() -> u32 {
    fs::read_to_string("/proc/sys/kernel/cap_last_cap").unwrap().trim().parse().unwrap()
}

/// Makes every mount of this process's own mount namespace read-only, except below one directory.
fn read_only_but(directory: &str) {
    let nothing = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).unwrap();
    mount(Some(directory), directory, nothing, MsFlags::MS_BIND | MsFlags::MS_REC, nothing).unwrap();
    for (point, _) in mounts().unwrap() {
        if !point.starts_with(directory) {
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
            // A mount that is hidden by another cannot be named, nor written to.
            let _ = mount(nothing, &point, nothing, flags, nothing);
        }
    }
}

/// Tries what must fail; prints what succeeded.
pub(crate) fn probe(arguments: &[String]) -> ExitCode {
    let writes = |path: &Path| {
        let file = path.join(format!("weft-probe-{}", std::process::id()));
        fs::write(&file, "").is_ok() && fs::remove_file(&file).is_ok()
    };
    let nothing = None::<&str>;
    let tries: [(&str, bool); 6] = [
        ("root", writes(Path::new("/"))),
        ("tmp", writes(Path::new("/tmp"))),
        ("cgroup", fs::create_dir(Path::new(&arguments[1]).join("weft-probe")).is_ok()),
        ("mount", mount(Some("none"), arguments[0].as_str(), Some("tmpfs"), MsFlags::empty(), nothing).is_ok()),
        ("ptrace", nix::sys::ptrace::traceme().is_ok()),
        ("run", writes(Path::new(&arguments[0]))),
    ];
    let worked: Vec<_> = tries.iter().filter(|(_, worked)| *worked).map(|(name, _)| *name).collect();
    println!("{}", worked.join(" "));
    ExitCode::SUCCESS
}

/// Tries what the agent has capabilities for; prints what succeeded.
pub(crate) fn rights(arguments: &[String]) -> ExitCode {
    let enters = fs::File::open(&arguments[0]).is_ok_and(|netns| setns(netns, CloneFlags::CLONE_NEWNET).is_ok());
    let looks = fs::metadata(format!("/proc/{}/ns/net", arguments[1])).is_ok();
    let tries = [("enter", enters), ("look", looks)];
    let worked: Vec<_> = tries.iter().filter(|(_, worked)| *worked).map(|(name, _)| *name).collect();
    println!("{}", worked.join(" "));
    ExitCode::SUCCESS
}
