//! The process's metrics registry, in OpenMetrics and in Prometheus' older text format.

pub mod exemplar;
mod family;
mod process;

use std::{
    fmt::Write as _,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

pub use family::Family;
use parking_lot::Mutex;
use prometheus_client::{encoding::text::encode, metrics::gauge::Gauge, registry::Registry};

/// Text formats of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The format that Prometheus requests.
    OpenMetrics,
    /// The text format 0.0.4: for people with curl, and for `promtool check metrics`, which knows no other.
    Text,
}

impl Format {
    /// The format that a scraper's `Accept` header requests.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Text }
    }

    /// Its content type.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The registry. Clones share it.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// Creates a registry with the start time of the process and what the system knows about it.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let started: Gauge = Gauge::default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        started.set(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        registry.register(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds",
            started,
        );
        registry.register_collector(Box::new(process::Process));
        Self { registry: Arc::new(Mutex::new(registry)) }
    }

    /// Registers families. Counters are given without `_total`: the encoder appends it.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock())
    }

    /// All metrics as text.
    #[must_use]
    pub fn encode(&self, format: Format) -> String {
        // The older format has no exemplars.
        let mut writer = exemplar::Writer::new(format == Format::OpenMetrics);
        let registry = self.registry.lock();
        encode(&mut writer, &registry).expect("writing to a string does not fail");
        match format {
            Format::OpenMetrics => writer.text,
            Format::Text => older(&writer.text),
        }
    }
}

/// Converts OpenMetrics to the older format: there a family has the name of its series, `_total` and `_info` included,
/// and there are neither units nor an end marker.
fn older(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(_), text) => help = Some(text.unwrap_or_default()),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                if let Some(help) = help.take() {
                    writeln!(out, "# HELP {name}{suffix} {help}").expect("writing to a string does not fail");
                }
                writeln!(out, "# TYPE {name}{suffix} {kind}").expect("writing to a string does not fail");
            }
            (Some("#"), ..) => {}
            _ => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;

    use super::*;

    #[test]
    fn prometheus_gets_what_it_asks_for_and_others_the_older_format() {
        let asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::accepted(asked), Format::OpenMetrics);
        assert_eq!(Format::accepted("*/*"), Format::Text);
        assert_eq!(Format::accepted(""), Format::Text);
    }

    #[test]
    fn families_have_the_names_of_their_series() {
        let metrics = Metrics::new();
        metrics.register(|registry| registry.register("requests", "Requests so far", Counter::<u64>::default()));
        let text = metrics.encode(Format::Text);
        assert!(
            text.contains("# HELP requests_total Requests so far.\n# TYPE requests_total counter\nrequests_total 0\n")
        );
        assert!(text.contains("# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds "), "{text}");
        assert!(!text.contains("EOF"), "{text}");
        let text = metrics.encode(Format::OpenMetrics);
        assert!(text.contains("# TYPE requests counter\nrequests_total 0\n") && text.ends_with("# EOF\n"), "{text}");
    }
}
