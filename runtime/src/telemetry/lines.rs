//! Lines on their way to standard output or error: a thread writes them, so that a reader that has stopped reading
//! stops nobody else. The buffer is bounded; lines that find it full are dropped and counted.

use std::{
    fmt,
    io::{self, Write as _},
    sync::mpsc,
    thread,
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

use crate::metrics::Metrics;

/// Lines that may wait. The buffer itself takes 80 KiB; a line is rarely above 1 KiB.
const BUFFERED: usize = 2048;

/// How long the end of the process waits for the lines that are left.
const FLUSH: Duration = Duration::from_millis(1500);

/// Writes the lines that are left when it is dropped, for at most 1.5 s. Keep it until the process ends.
#[must_use = "no line is written once it is dropped"]
pub struct Lines {
    worker: Option<WorkerGuard>,
    dropped: ErrorCounter,
}

/// Writes whole lines without waiting for their reader. Clones write to the same place.
#[derive(Clone, Debug)]
pub struct LineWriter(NonBlocking);

impl LineWriter {
    /// Writes a line, which ends with a line break; it is dropped and counted if the buffer is full.
    pub fn write(&self, line: &str) {
        // One write is one message to the thread, so that lines do not mix. A full buffer is no error.
        let _ = self.0.clone().write_all(line.as_bytes());
    }
}

impl Lines {
    /// Starts the thread that writes to `to`.
    pub fn writer(to: impl io::Write + Send + 'static) -> (LineWriter, Self) {
        let (writer, lines) = Self::to(to);
        (LineWriter(writer), lines)
    }

    /// Starts the thread that writes to `to`. Returns what a layer writes to.
    pub(super) fn to(to: impl io::Write + Send + 'static) -> (NonBlocking, Self) {
        let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(BUFFERED).thread_name("log");
        let (writer, worker) = builder.finish(to);
        let dropped = writer.error_counter();
        (writer, Self { worker: Some(worker), dropped })
    }

    /// Registers `weft_log_lines_dropped_total`.
    pub fn register(&self, metrics: &Metrics) {
        let help = "Log lines that were dropped because standard output was not read fast enough";
        self.register_as(metrics, "weft_log_lines_dropped", help);
    }

    /// Registers the counter of dropped lines under another name, to which `_total` is appended.
    pub fn register_as(&self, metrics: &Metrics, name: &'static str, help: &'static str) {
        let dropped = Dropped { name, help, lines: self.dropped.clone() };
        metrics.register(|registry| registry.register_collector(Box::new(dropped)));
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        let (written_tx, written_rx) = mpsc::channel();
        // The library's guard prints if it cannot finish, and would wait for the very reader that does not read.
        let flush = move || {
            drop(worker);
            let _ = written_tx.send(());
        };
        if thread::Builder::new().name("log-flush".to_owned()).spawn(flush).is_ok() {
            // An error means that the time is over.
            let _ = written_rx.recv_timeout(FLUSH);
        }
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("dropped", &self.dropped.dropped_lines()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Dropped {
    name: &'static str,
    help: &'static str,
    lines: ErrorCounter,
}

impl Collector for Dropped {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let dropped = ConstCounter::new(u64::try_from(self.lines.dropped_lines()).unwrap_or(u64::MAX));
        dropped.encode(encoder.encode_descriptor(self.name, self.help, None, MetricType::Counter)?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, MutexGuard};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::metrics::Format;

    /// A reader that does not read while the test holds the lock.
    #[derive(Clone, Default)]
    struct Reader(Arc<Mutex<Vec<u8>>>);

    impl Reader {
        fn stalled(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap()
        }
    }

    impl io::Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.stalled().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stops_reading_stops_nobody_and_lines_beyond_the_buffer_are_counted() {
        let reader = Reader::default();
        let (writer, lines) = Lines::to(reader.clone());
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(writer);
        let metrics = Metrics::new();
        lines.register(&metrics);
        let stalled = reader.stalled();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            // Writing to the reader itself would never return. The thread has taken at most one line.
            for number in 0..BUFFERED + 102 {
                tracing::warn!(number, "line");
            }
        });
        let dropped = lines.dropped.dropped_lines();
        assert!((101..=102).contains(&dropped), "{dropped}");
        let text = metrics.encode(Format::Text);
        assert!(text.contains(&format!("\nweft_log_lines_dropped_total {dropped}\n")), "{text}");
        drop(stalled);
        drop(lines);
        let written = String::from_utf8(reader.stalled().clone()).unwrap();
        assert_eq!(written.lines().count(), BUFFERED + 102 - dropped, "what was buffered is written at the end");
        assert!(written.lines().next().is_some_and(|line| line.ends_with("line number=0")), "{written}");
    }

    #[test]
    fn a_reader_that_stops_reading_does_not_keep_the_process_from_ending() {
        let reader = Reader::default();
        let (mut writer, lines) = Lines::to(reader.clone());
        let stalled = reader.stalled();
        for _ in 0..BUFFERED + 2 {
            writer.write_all(b"line\n").unwrap();
        }
        drop(lines);
        drop(stalled);
    }
}
