//! Whether other processes of the same user may look into this one.

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Keeps processes of the same user from this one's memory, descriptors and root directory (`PR_SET_DUMPABLE`), as when
/// a pod's containers share a process namespace: these have keys and tokens. Processes with CAP_SYS_PTRACE, such as
/// the node's agent, still may. It also means that no core is dumped.
///
/// A process's own files below /proc/self stay readable, except for the few of mode 0400, such as `environ` and `io`.
///
/// # Errors
/// When the system refuses.
pub fn forbid() -> std::io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _, process::Command};

    use rustix::{
        process::{Uid, getuid},
        thread::set_thread_uid,
    };

    use super::*;
    use crate::metrics::{Format, Metrics};

    /// Set in the process in which the test runs again: it concerns a whole process, and not one of root's.
    const AGAIN: &str = "WEFT_TEST_DUMPABLE";

    #[test]
    fn only_root_may_look_into_the_process_and_its_metrics_stay() {
        if std::env::var_os(AGAIN).is_none() {
            let name = "dumpable::tests::only_root_may_look_into_the_process_and_its_metrics_stay";
            let again = Command::new(std::env::current_exe().unwrap()).args(["--exact", name]).env(AGAIN, "1").output();
            let again = again.unwrap();
            let text = String::from_utf8_lossy(&again.stdout);
            // Without a test of this name it succeeds, too.
            assert!(again.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        if getuid().is_root() {
            set_thread_uid(Uid::from_raw(1000)).unwrap();
            // As after the start of a program: a change of the user changes it, too.
            set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
        }
        let owner = || fs::metadata("/proc/thread-self/environ").unwrap().uid();
        assert_eq!(owner(), getuid().as_raw());
        forbid().unwrap();
        assert_eq!(owner(), 0);
        let metrics = Metrics::new().encode(Format::Text);
        for name in
            ["process_open_fds", "process_max_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"]
        {
            assert!(metrics.contains(&format!("\n{name} ")), "{metrics}");
        }
    }
}
