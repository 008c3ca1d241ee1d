//! Logs: to standard output, plain or JSON, with a level that can change while the process runs, and the latest
//! warnings and errors ([`Recent`]).

mod form;
mod lines;
mod recent;

use std::{fmt, io, str::FromStr};

pub use lines::{LineWriter, Lines};
pub use recent::{Line, Recent};
use tracing_appender::non_blocking::NonBlocking;
use tracing_subscriber::{
    EnvFilter, Registry,
    layer::{Layered, SubscriberExt},
    reload,
    util::SubscriberInitExt,
};

/// Prefix of the targets of our own crates.
const OURS: &str = "weft";
/// Targets of Linkerd's own crates in the filters that its injector and its users write. Weft's crates take their
/// place.
const LINKERDS: [&str; 2] = ["linkerd", "linkerd2_proxy"];
/// Levels of other crates if the filter is one bare level. The Kubernetes client warns about errors that its callers
/// get anyway, and quotes whole answers of the API server, which may contain tokens.
const LIBRARIES: &str = "warn,kube_client=error";

/// Formats of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text, for people.
    #[default]
    Plain,
    /// One JSON object a line.
    Json,
}

/// Why logging could not be set up or changed.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter has a syntax error.
    #[error("`{filter}` is not a log filter: {source}; expected e.g. `info` or `warn,weft=debug`")]
    Filter {
        /// The filter as it was given.
        filter: String,
        /// The syntax error.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The process has a subscriber already.
    #[error("logging is set up already")]
    Initialized,
    /// The subscriber is gone.
    #[error("logging has ended")]
    Ended,
}

/// A log format that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a log format: expected `plain` or `json`")]
pub struct ParseLogFormatError(String);

/// The log of this process.
#[derive(Debug)]
pub struct Log {
    /// The log level, which can be changed.
    pub level: LogLevel,
    /// The latest warnings and errors.
    pub recent: Recent,
    /// The lines on their way to standard output; to be kept until the process ends.
    pub lines: Lines,
}

/// The log level in force. Clones are the same level.
#[derive(Clone)]
pub struct LogLevel(reload::Handle<EnvFilter, Registry>);

/// Starts logging for the whole process. A bare level such as `debug` applies to our own crates; libraries then keep
/// `warn`.
///
/// # Errors
/// When the filter does not parse or logging was started before.
pub fn init(filter: &str, format: LogFormat) -> Result<Log, TelemetryError> {
    start(filter, |stdout| form::own(format, stdout))
}

/// The same with the lines of Linkerd's proxy.
///
/// # Errors
/// See [`init`].
pub fn init_proxy(filter: &str, format: LogFormat) -> Result<Log, TelemetryError> {
    start(filter, |stdout| form::linkerds_proxy(format, stdout))
}

/// What a layer of lines is added to.
type Beneath = Layered<Recent, Layered<reload::Layer<EnvFilter, Registry>, Registry>>;

fn start(filter: &str, lines: impl FnOnce(NonBlocking) -> form::Lines<Beneath>) -> Result<Log, TelemetryError> {
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let (stdout, waiting) = Lines::to(io::stdout());
    let recent = Recent::default();
    let registry = tracing_subscriber::registry().with(filter).with(recent.clone()).with(lines(stdout));
    registry.try_init().map_err(|_| TelemetryError::Initialized)?;
    Ok(Log { level: LogLevel(handle), recent, lines: waiting })
}

impl LogLevel {
    /// Replaces the filter.
    ///
    /// # Errors
    /// When it does not parse; the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), TelemetryError> {
        self.0.reload(parse(filter)?).map_err(|_| TelemetryError::Ended)
    }

    /// The filter in force.
    #[must_use]
    pub fn current(&self) -> String {
        self.0.with_current(ToString::to_string).unwrap_or_default()
    }
}

impl fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LogLevel").field(&self.current()).finish()
    }
}

impl FromStr for LogFormat {
    type Err = ParseLogFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "plain" => Ok(Self::Plain),
            "json" => Ok(Self::Json),
            _ => Err(ParseLogFormatError(text.to_owned())),
        }
    }
}

fn parse(filter: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::try_new(expand(filter)).map_err(|source| TelemetryError::Filter { filter: filter.to_owned(), source })
}

/// A bare level above `warn` applies to Weft's own crates only: libraries log every frame and every request, which
/// would bury the rest. A filter can name a library. Levels of Linkerd's crates apply to ours, unless the filter names
/// ours, too.
fn expand(filter: &str) -> String {
    if let level @ ("info" | "debug" | "trace") = filter.trim().to_ascii_lowercase().as_str() {
        return format!("{LIBRARIES},{OURS}={level}");
    }
    let directives = || filter.split(',').filter_map(|directive| directive.trim().split_once('='));
    if directives().any(|(target, _)| target.starts_with(OURS)) {
        return filter.to_owned();
    }
    match directives().find(|(target, _)| LINKERDS.contains(target)) {
        Some((_, level)) => format!("{filter},{OURS}={level}"),
        None => filter.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_level_is_for_our_own_crates() {
        for (filter, expected) in [
            ("info", "warn,kube_client=error,weft=info"),
            (" DEBUG ", "warn,kube_client=error,weft=debug"),
            ("warn", "warn"),
            ("off", "off"),
            ("info,kube=debug", "info,kube=debug"),
            ("weft_proxy=trace", "weft_proxy=trace"),
            (
                "warn,linkerd=info,hickory=error,[{headers}]=off,[{request}]=off",
                "warn,linkerd=info,hickory=error,[{headers}]=off,[{request}]=off,weft=info",
            ),
            ("linkerd2_proxy=debug", "linkerd2_proxy=debug,weft=debug"),
            ("linkerd=debug,weft_proxy=warn", "linkerd=debug,weft_proxy=warn"),
            ("warn,linkerd_app=debug", "warn,linkerd_app=debug"),
        ] {
            assert_eq!(expand(filter), expected, "{filter:?}");
            assert!(parse(filter).is_ok(), "{filter:?}");
        }
        assert!(parse("weft=loud").is_err());
    }

    #[test]
    fn the_filter_of_a_stock_injector_shows_what_the_proxy_says_at_info() {
        let seen = |filter: &str| {
            let recorded = Recorded::default();
            let subscriber = tracing_subscriber::registry().with(parse(filter).unwrap()).with(recorded.clone());
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!(target: "weft_proxy::identity", "certified identity");
                tracing::debug!(target: "weft_proxy::identity", "detail");
                tracing::info!(target: "hickory_resolver", "lookup");
                tracing::warn!(target: "rustls", "library");
            });
            recorded.0.lock().unwrap().clone()
        };
        let stock = "warn,linkerd=info,hickory=error,[{headers}]=off,[{request}]=off";
        assert_eq!(seen(stock), ["weft_proxy::identity", "rustls"]);
        assert_eq!(seen("warn,hickory=error"), ["rustls"]);
    }

    /// The targets of events that passed the filter.
    #[derive(Clone, Default)]
    struct Recorded(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Recorded {
        fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            self.0.lock().unwrap().push(event.metadata().target().to_owned());
        }
    }
}
