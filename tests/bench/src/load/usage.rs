//! CPU time of other processes, to the nanosecond: the ticks of /proc/PID/stat are 10 ms, which is several microseconds
//! for each request of a slow row.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::Context as _;

/// CPU time of a process by thread, user and kernel together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cpu(BTreeMap<u32, u64>);

impl Cpu {
    /// The time so far.
    ///
    /// # Errors
    /// There is no such process, or the kernel does not count (`CONFIG_SCHED_INFO`).
    pub(super) fn of(pid: u32) -> anyhow::Result<Self> {
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(&tasks).with_context(|| format!("process {pid} ended"))? {
            let entry = entry?;
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // A thread may end meanwhile.
            let Ok(text) = fs::read_to_string(entry.path().join("schedstat")) else { continue };
            let time = on_cpu(&text).with_context(|| format!("{} is empty", entry.path().display()))?;
            threads.insert(id, time);
        }
        anyhow::ensure!(!threads.is_empty(), "no thread of process {pid} has a schedstat");
        Ok(Self(threads))
    }

    /// Nanoseconds since an earlier time. What a thread used that has ended since is not in it.
    pub(super) fn since(&self, before: &Self) -> u64 {
        let used = |(id, time): (&u32, &u64)| time.saturating_sub(before.0.get(id).copied().unwrap_or_default());
        self.0.iter().map(used).sum()
    }
}

/// The first field of a schedstat: nanoseconds on a processor.
fn on_cpu(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_on_the_cpu_is_the_first_field() {
        assert_eq!(on_cpu("3504348 17 1\n"), Some(3_504_348));
        assert_eq!(on_cpu(""), None);
    }

    #[test]
    fn new_threads_count_whole_and_ended_ones_not_at_all() {
        let (before, after) = (Cpu([(1, 10), (2, 50)].into()), Cpu([(1, 25), (3, 4)].into()));
        assert_eq!(after.since(&before), 19);
    }

    #[test]
    fn work_of_this_process_takes_time() {
        let now = || Cpu::of(std::process::id()).unwrap();
        let before = now();
        // Looking is work, too; nothing else has to be done. Threads of other tests only add to it.
        while now().since(&before) < 1_000_000 {}
    }
}
