//! An agent whose every step in the kernel can be observed, made to fail, or be its last. Built on ptrace and a seccomp
//! filter that stops the process only at the relevant system calls, before they are executed.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::{fs::FileExt as _, process::CommandExt as _},
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace,
        signal::{Signal, kill, raise},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The first argument of a process that becomes a traced one.
pub(crate) const SUBCOMMAND: &str = "traced";

/// System calls by which an agent changes state that outlives it.
const INTERESTING: &[libc::c_long] = &[
    libc::SYS_bpf,
    libc::SYS_mkdirat,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    libc::SYS_renameat,
];

// enum bpf_cmd in include/uapi/linux/bpf.h
const MAP_UPDATE: u64 = 2;
const MAP_DELETE: u64 = 3;
const PROG_LOAD: u64 = 5;
const OBJ_PIN: u64 = 6;
const LINK_CREATE: u64 = 28;
const LINK_UPDATE: u64 = 29;
const LINK_DETACH: u64 = 34;

/// A system call that is about to be executed.
pub(crate) struct Call {
    thread: Pid,
    number: libc::c_long,
    arguments: Vec<u64>,
}

/// What to do with the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Goes,
    Dies,
}

/// A process that is being traced; killed on drop.
pub(crate) struct Traced {
    pid: Pid,
    tracer: Option<JoinHandle<WaitStatus>>,
}

impl Call {
    fn of(thread: Pid) -> Option<Self> {
        // NUMBER ARGUMENT.. SP PC, see proc_pid_syscall(5).
        let text = fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
        let mut fields = text.split_whitespace();
        let number = fields.next()?.parse().ok()?;
        let arguments = fields.map_while(|field| u64::from_str_radix(field.strip_prefix("0x")?, 16).ok()).collect();
        Some(Self { thread, number, arguments })
    }

    fn bpf(&self) -> Option<u64> {
        (self.number == libc::SYS_bpf).then(|| self.arguments[0])
    }

    /// Whether it changes state that outlives the process.
    pub(crate) fn is_step(&self) -> bool {
        self.bpf().is_none_or(|command| {
            [MAP_UPDATE, MAP_DELETE, OBJ_PIN, LINK_CREATE, LINK_UPDATE, LINK_DETACH].contains(&command)
        })
    }

    /// The name of the program that it loads.
    pub(crate) fn loads(&self) -> Option<String> {
        (self.bpf()? == PROG_LOAD).then_some(())?;
        let mut name = [0; 16];
        self.memory().read_exact_at(&mut name, self.arguments[1] + 48).ok()?;
        Some(name.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect())
    }

    /// Replaces the program's first instruction by one that no kernel knows.
    pub(crate) fn spoil(&self) {
        let mut instructions = [0; 8];
        self.memory().read_exact_at(&mut instructions, self.arguments[1] + 8).unwrap();
        self.memory().write_all_at(&[0xff; 1], u64::from_ne_bytes(instructions)).unwrap();
    }

    fn memory(&self) -> File {
        File::options().read(true).write(true).open(format!("/proc/{}/mem", self.thread)).unwrap()
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.bpf() {
            Some(command) => write!(f, "bpf({command})"),
            None => write!(f, "system call {}", self.number),
        }
    }
}

impl Traced {
    /// Starts a program that stops before each relevant call.
    pub(crate) fn start(
        program: &str,
        arguments: Vec<OsString>,
        log: File,
        decide: impl FnMut(&Call) -> Then + Send + 'static,
    ) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(SUBCOMMAND).arg(program).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let (started, pid) = mpsc::channel();
        // Only the thread that started a process may trace it.
        let tracer = thread::spawn(move || trace(&mut command, &started, decide));
        Self { pid: pid.recv().unwrap(), tracer: Some(tracer) }
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.tracer.as_ref().unwrap().is_finished()
    }

    /// Kills it, or waits if it has ended by itself.
    pub(crate) fn end(mut self) -> WaitStatus {
        let _ = kill(self.pid, Signal::SIGKILL);
        self.tracer.take().unwrap().join().unwrap()
    }

    /// Waits for the process to end by itself.
    pub(crate) fn ended(mut self) -> WaitStatus {
        self.tracer.take().unwrap().join().unwrap()
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if let Some(tracer) = self.tracer.take() {
            let _ = kill(self.pid, Signal::SIGKILL);
            let _ = tracer.join();
        }
    }
}

fn trace(command: &mut Command, started: &mpsc::Sender<Pid>, mut decide: impl FnMut(&Call) -> Then) -> WaitStatus {
    let process = Pid::from_raw(command.spawn().unwrap().id().cast_signed());
    let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
    assert_eq!(waitpid(process, Some(flags)), Ok(WaitStatus::Stopped(process, Signal::SIGSTOP)));
    let options = ptrace::Options::PTRACE_O_TRACESECCOMP
        | ptrace::Options::PTRACE_O_TRACECLONE
        | ptrace::Options::PTRACE_O_EXITKILL;
    ptrace::setoptions(process, options).unwrap();
    started.send(process).unwrap();
    let go = |thread, signal: Option<Signal>| match ptrace::cont(thread, signal) {
        // It was killed in between.
        Err(Errno::ESRCH) => {}
        result => result.unwrap(),
    };
    go(process, None);
    loop {
        match waitpid(None, Some(flags)).unwrap() {
            WaitStatus::PtraceEvent(thread, _, event) => {
                if event == ptrace::Event::PTRACE_EVENT_SECCOMP as i32
                    && Call::of(thread).is_some_and(|call| decide(&call) == Then::Dies)
                {
                    kill(process, Signal::SIGKILL).unwrap();
                } else {
                    go(thread, None);
                }
            }
            // A thread or the program starts.
            WaitStatus::Stopped(thread, Signal::SIGSTOP | Signal::SIGTRAP) => go(thread, None),
            WaitStatus::Stopped(thread, signal) => go(thread, Some(signal)),
            status @ (WaitStatus::Exited(who, _) | WaitStatus::Signaled(who, _, _)) if who == process => return status,
            _ => {}
        }
    }
}

/// Becomes the traced program.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    ptrace::traceme().unwrap();
    raise(Signal::SIGSTOP).unwrap();
    let rules = INTERESTING.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Trace(0),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
    panic!("{}", Command::new(&arguments[0]).args(&arguments[1..]).exec());
}
