//! What the system knows about this process, read at each scrape: the families that every Prometheus client library
//! has, under their common names.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use rustix::process::{Resource, getrlimit};

/// The process, for a registry. What the system does not tell is left out.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Ok(process) = procfs::process::Process::myself() else { return Ok(()) };
        let mut gauge = |name: &str, help: &str, value: u64| {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
        };
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            gauge("process_max_fds", "Maximum number of open file descriptors", limit)?;
        }
        if let Ok(open) = process.fd_count() {
            gauge("process_open_fds", "Number of open file descriptors", u64::try_from(open).unwrap_or(u64::MAX))?;
        }
        let Ok(stat) = process.stat() else { return Ok(()) };
        gauge("process_virtual_memory_bytes", "Virtual memory size in bytes", stat.vsize)?;
        let resident = stat.rss.saturating_mul(procfs::page_size());
        gauge("process_resident_memory_bytes", "Resident memory size in bytes", resident)?;
        gauge("process_threads", "Number of OS threads in the process", stat.num_threads.unsigned_abs())?;
        let seconds = (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64;
        let seconds = ConstCounter::new(seconds);
        let help = "Total user and system CPU time spent in seconds";
        seconds.encode(encoder.encode_descriptor("process_cpu_seconds", help, None, MetricType::Counter)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::{Format, Metrics};

    fn value(text: &str, name: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    #[test]
    fn the_process_is_measured() {
        let metrics = Metrics::new();
        let before = metrics.encode(Format::Text);
        for name in ["process_virtual_memory_bytes", "process_resident_memory_bytes", "process_start_time_seconds"] {
            assert!(value(&before, name) > 1e6, "{name}");
        }
        assert!(value(&before, "process_threads") >= 1.0);
        assert!(value(&before, "process_cpu_seconds_total") >= 0.0);
        assert!(value(&before, "process_max_fds") >= value(&before, "process_open_fds"));
        let files: Vec<_> = (0..100).map(|_| std::fs::File::open("/proc/self/stat").unwrap()).collect();
        let after = metrics.encode(Format::Text);
        // Other tests of this process open and close some at the same time.
        assert!(value(&after, "process_open_fds") > value(&before, "process_open_fds") + 50.0);
        drop(files);
        assert!(before.contains("# TYPE process_cpu_seconds_total counter\n"), "{before}");
    }
}
