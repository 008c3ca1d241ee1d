//! The forms of log lines: Weft's own, and that of Linkerd's proxy, which log pipelines read.

use std::{fmt, time::Duration};

use tokio::time::Instant;
use tracing::Subscriber;
use tracing_subscriber::{
    Layer,
    fmt::{MakeWriter, format::Writer, layer, time::FormatTime},
    registry::LookupSpan,
};

use super::LogFormat;

/// A layer that writes lines.
pub(super) type Lines<S> = Box<dyn Layer<S> + Send + Sync>;

/// The time since the log began, as linkerd2-proxy writes it (`linkerd/tracing/src/uptime.rs`).
struct Uptime(Instant);

impl Uptime {
    fn write(uptime: Duration, line: &mut Writer<'_>) -> fmt::Result {
        write!(line, "[{:>6}.{:06}s]", uptime.as_secs(), uptime.subsec_micros())
    }
}

impl FormatTime for Uptime {
    fn format_time(&self, line: &mut Writer<'_>) -> fmt::Result {
        Self::write(self.0.elapsed(), line)
    }
}

/// Weft's lines: the time of day, and in JSON the fields of an event beside its message.
pub(super) fn own<S, W>(format: LogFormat, to: W) -> Lines<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    W: for<'line> MakeWriter<'line> + Send + Sync + 'static,
{
    let lines = layer().with_writer(to);
    match format {
        LogFormat::Plain => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

/// Lines of Linkerd's proxy: `[ 0.001234s] INFO ThreadId(01) span{field=1}: target: message field=2`, or in JSON
/// `timestamp`, `level`, `fields`, `target`, `spans` and `threadId`, of which the first is the time of day.
pub(super) fn linkerds_proxy<S, W>(format: LogFormat, to: W) -> Lines<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    W: for<'line> MakeWriter<'line> + Send + Sync + 'static,
{
    let lines = layer().with_writer(to).with_thread_ids(true);
    match format {
        LogFormat::Plain => lines.with_ansi(false).with_timer(Uptime(Instant::now())).boxed(),
        LogFormat::Json => lines.json().with_current_span(false).boxed(),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use tracing_subscriber::{Registry, layer::SubscriberExt as _};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    type Make = fn(LogFormat, Mutex<Written>) -> Lines<Registry>;

    /// What is written of two events, the second within spans.
    fn written(make: Make, format: LogFormat) -> [String; 2] {
        let written = Written::default();
        // A mutex of a writer makes writers.
        let lines = make(format, Mutex::new(written.clone()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::warn!(target: "weft_proxy::dns", "no \"answer\"");
            let _outer = tracing::info_span!("outbound", port = 4140).entered();
            let _inner = tracing::info_span!("request").entered();
            tracing::info!(target: "weft_proxy::identity", server = "web.demo", times = 2, "certified identity");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.try_into().expect("an event is a line")
    }

    #[test]
    fn plain_lines_of_the_proxy_are_linkerds() {
        let thread = format!("{:0>2?}", std::thread::current().id());
        for (line, rest) in written(linkerds_proxy, LogFormat::Plain).iter().zip([
            format!("  WARN {thread} weft_proxy::dns: no \"answer\""),
            format!(
                "  INFO {thread} outbound{{port=4140}}:request: weft_proxy::identity: certified identity server=\"web.demo\" times=2"
            ),
        ]) {
            let (uptime, told) = line.split_at(line.find(']').unwrap() + 1);
            assert_eq!(told, rest);
            let digits: String = uptime.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
            assert_eq!(digits, "[     0.000000s]", "{uptime}");
        }
    }

    #[test]
    fn an_uptime_is_in_seconds_and_microseconds() {
        for (nanos, expected) in [
            (1_000_000_100_u64, "[     1.000000s]"),
            (1_000_002_000, "[     1.000002s]"),
            (999_999_999, "[     0.999999s]"),
            (1_234_567_000_000_000, "[1234567.000000s]"),
        ] {
            let mut line = String::new();
            Uptime::write(Duration::from_nanos(nanos), &mut Writer::new(&mut line)).unwrap();
            assert_eq!(line, expected);
        }
    }

    #[test]
    fn json_lines_of_the_proxy_are_linkerds() {
        let thread = format!(r#""threadId":"{:?}"}}"#, std::thread::current().id());
        for (line, rest) in written(linkerds_proxy, LogFormat::Json).iter().zip([
            format!(
                r#","level":"WARN","fields":{{"message":"no \"answer\""}},"target":"weft_proxy::dns",{thread}"#
            ),
            format!(
                r#","level":"INFO","fields":{{"message":"certified identity","server":"web.demo","times":2}},"target":"weft_proxy::identity","spans":[{{"port":4140,"name":"outbound"}},{{"name":"request"}}],{thread}"#
            ),
        ]) {
            let timestamp = line.strip_prefix(r#"{"timestamp":""#).unwrap();
            let (timestamp, told) = timestamp.split_once('"').unwrap();
            assert_eq!(told, rest);
            // The time of day, in UTC.
            assert!(timestamp.starts_with("20") && timestamp.ends_with('Z') && timestamp.contains('T'), "{timestamp}");
        }
    }

    #[test]
    fn lines_of_other_processes_are_wefts() {
        let [plain, _] = written(own, LogFormat::Plain);
        assert!(plain.ends_with("Z  WARN weft_proxy::dns: no \"answer\""), "{plain}");
        let [json, _] = written(own, LogFormat::Json);
        assert!(json.ends_with(r#","level":"WARN","message":"no \"answer\"","target":"weft_proxy::dns"}"#), "{json}");
    }
}
