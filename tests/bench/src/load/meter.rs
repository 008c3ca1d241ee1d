//! Counts exchanges, failures and latencies of the time that counts.

use std::{
    cell::{Cell, RefCell},
    time::Instant,
};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Three significant digits, up to the longest exchange.
const LONGEST_NS: u64 = 100_000_000_000;
const DIGITS: u8 = 3;

/// What came of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// The time that counted.
    pub(crate) seconds: f64,
    /// Exchanges, or bytes of a stream.
    pub(crate) count: u64,
    /// Exchanges that failed, in the warm-up, too.
    pub(crate) failures: u64,
    /// Why the last of them failed.
    pub(crate) problem: Option<String>,
    /// Latencies in microseconds; zero without exchanges.
    pub(crate) p50_us: f64,
    /// 99 of 100 are at most this.
    pub(crate) p99_us: f64,
    /// 999 of 1000 are at most this.
    pub(crate) p999_us: f64,
    /// CPU time of the processes that were named, nanoseconds.
    pub(crate) cpu_ns: Vec<u64>,
    /// CPU time of the load's own process, nanoseconds.
    pub(crate) own_cpu_ns: u64,
}

/// Counters of one load, for the tasks of one thread.
#[derive(Debug)]
pub(super) struct Meter {
    began: Cell<Option<Instant>>,
    count: Cell<u64>,
    failures: Cell<u64>,
    problem: RefCell<Option<String>>,
    latencies: RefCell<Histogram<u64>>,
}

impl Meter {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            began: Cell::new(None),
            count: Cell::new(0),
            failures: Cell::new(0),
            problem: RefCell::new(None),
            latencies: RefCell::new(Histogram::new_with_max(LONGEST_NS, DIGITS)?),
        })
    }

    /// From now on exchanges count.
    pub(super) fn begin(&self) {
        self.began.set(Some(Instant::now()));
    }

    /// Exchanges no longer count, except those with a time of their own. Returns the seconds in which they did.
    pub(super) fn end(&self) -> f64 {
        self.began.take().map_or(0.0, |began| began.elapsed().as_secs_f64())
    }

    /// An exchange that ends now.
    pub(super) fn done(&self, started: Instant) {
        if self.began.get().is_some() {
            self.record(u64::try_from(started.elapsed().as_nanos()).unwrap_or(LONGEST_NS));
        }
    }

    /// An exchange that counts whenever it ends.
    pub(super) fn record(&self, nanoseconds: u64) {
        self.count.set(self.count.get() + 1);
        self.latencies.borrow_mut().saturating_record(nanoseconds);
    }

    /// Bytes of a stream.
    pub(super) fn received(&self, bytes: usize) {
        if self.began.get().is_some() {
            self.count.set(self.count.get() + bytes as u64);
        }
    }

    pub(super) fn failed(&self, error: &anyhow::Error) {
        self.failures.set(self.failures.get() + 1);
        *self.problem.borrow_mut() = Some(format!("{error:#}"));
    }

    pub(super) fn summary(&self, seconds: f64, cpu_ns: Vec<u64>, own_cpu_ns: u64) -> Measured {
        let latencies = self.latencies.borrow();
        let at = |quantile: f64| latencies.value_at_quantile(quantile) as f64 / 1e3;
        Measured {
            seconds,
            count: self.count.get(),
            failures: self.failures.get(),
            problem: self.problem.borrow().clone(),
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            cpu_ns,
            own_cpu_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exchanges_between_begin_and_end_count() {
        let meter = Meter::new().unwrap();
        meter.done(Instant::now());
        meter.begin();
        meter.done(Instant::now());
        meter.received(9);
        meter.end();
        meter.done(Instant::now());
        meter.failed(&anyhow::anyhow!("refused"));
        let summary = meter.summary(1.0, Vec::new(), 0);
        assert_eq!((summary.count, summary.failures, summary.problem.as_deref()), (10, 1, Some("refused")));
    }

    #[test]
    fn quantiles_are_microseconds() {
        let meter = Meter::new().unwrap();
        for microseconds in 1..=1000_u64 {
            meter.record(microseconds * 1000);
        }
        let summary = meter.summary(1.0, Vec::new(), 0);
        assert!((summary.p50_us - 500.0).abs() < 1.0 && (summary.p99_us - 990.0).abs() < 1.0, "{summary:?}");
        assert!((summary.p999_us - 999.0).abs() < 1.0, "{summary:?}");
    }
}
