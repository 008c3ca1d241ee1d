//! The machine of the measurements, which are meaningless without it.

use std::fs;

use serde::Serialize;

/// Facts about this host.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The kernel's release.
    pub kernel: String,
    /// Logical processors.
    pub cpus: usize,
    /// The processor's name.
    pub model: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Load average over a minute at the start of the run: other work on the machine.
    pub load_average: String,
}

impl Machine {
    /// This host; unknown facts are empty or zero.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let memory_kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            model: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
            memory_mib: memory_kib / 1024,
            load_average: read("/proc/loadavg").split_whitespace().next().unwrap_or_default().to_owned(),
        }
    }

    /// As one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self { kernel, cpus, model, memory_mib, load_average } = self;
        format!("Linux {kernel}, {cpus} CPUs, {model}, {memory_mib} MiB, load {load_average}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_this_machine() {
        let machine = Machine::here();
        assert!(machine.cpus > 0 && machine.memory_mib > 0 && !machine.kernel.is_empty());
    }
}
