//! Log lines about requests and connections that failed, with linkerd2-proxy's levels and words
//! (`linkerd/app/core/src/errors/respond.rs`, `linkerd/app/core/src/serve.rs`).
//!
//! Bounded: each line is formatted by the worker that serves traffic, and lines that find the log's buffer full are
//! lost, whatever they are about. Failures beyond a number a second are left to DEBUG and to the metrics; the next line
//! says how many there were. Refuses to log answers of policy, which are not failures: lines about what is denied, and
//! about what is allowed for an audit alone, are written where policy decides, each kind within a [`LineLimit`] of its
//! own.

use std::{error::Error, fmt, io, net::SocketAddr, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::respond::{Failure, RequestKind};

/// The most lines of one kind in [`WINDOW`].
const LINES: u32 = 20;
const WINDOW: Duration = Duration::from_secs(1);

/// The lines of one side of a worker.
#[derive(Debug, Default)]
pub(crate) struct FailureLog {
    requests: LineLimit,
    connections: LineLimit,
    /// Of lines about what policy denies.
    pub(crate) denials: LineLimit,
    /// Of lines about what policy allows for an audit alone.
    pub(crate) audits: LineLimit,
}

/// Limits lines to [`LINES`] in a [`WINDOW`].
#[derive(Debug, Default)]
pub(crate) struct LineLimit(Mutex<Written>);

#[derive(Debug, Default)]
struct Written {
    /// When the window began.
    since: Option<Instant>,
    lines: u32,
    /// What had no line since the last line.
    suppressed: u64,
}

impl FailureLog {
    /// A request of `client` to `dst` was answered with `failure` because of `error`, which may be the failure itself.
    pub(crate) fn request(
        &self,
        kind: RequestKind,
        failure: &Failure,
        error: &(dyn Error + 'static),
        client: SocketAddr,
        dst: &dyn fmt::Display,
    ) {
        if !failure.is_policy() {
            self.failed_request(kind, error, client, dst);
        }
    }

    /// A request of `client` to `dst` had no response at all.
    pub(crate) fn failed_request(
        &self,
        kind: RequestKind,
        error: &(dyn Error + 'static),
        client: SocketAddr,
        dst: &dyn fmt::Display,
    ) {
        let version = kind.version;
        let is_written = self.requests.write(|suppressed| {
            if kind.grpc {
                tracing::info!(error, client.addr = %client, orig_dst.addr = %dst, suppressed, "gRPC request failed");
            } else {
                tracing::info!(error, client.addr = %client, orig_dst.addr = %dst, suppressed, "{version:?} request failed");
            }
        });
        if !is_written {
            tracing::debug!(error, client.addr = %client, orig_dst.addr = %dst, "{version:?} request failed");
        }
    }

    /// A connection of `client` to `dst` ended because of `error`. What a peer may always do, such as a reset, and what
    /// policy decides (`is_expected`) is left to DEBUG.
    pub(crate) fn connection(
        &self,
        error: &(dyn Error + 'static),
        is_expected: bool,
        client: SocketAddr,
        dst: &dyn fmt::Display,
    ) {
        let write = |suppressed: Option<u64>| {
            tracing::info!(error, client.addr = %client, orig_dst.addr = %dst, suppressed, "Connection closed");
        };
        if is_expected || is_io(error) || !self.connections.write(write) {
            tracing::debug!(error, client.addr = %client, orig_dst.addr = %dst, "Connection closed");
        }
    }
}

/// A request of `client` that `dst` had from `since` on was given up before its response, by its client as a rule. It
/// has no other line and no `response_total`.
pub(crate) fn log_given_up(client: SocketAddr, dst: SocketAddr, since: Instant) {
    let elapsed = since.elapsed().as_secs_f64();
    tracing::debug!(dst.addr = %dst, client.addr = %client, elapsed, "request given up before its response");
}

impl LineLimit {
    /// Calls `write` if a line may be written now, with how many were not since the last one, if there are any. Returns
    /// whether it may.
    pub(crate) fn write(&self, write: impl FnOnce(Option<u64>)) -> bool {
        let admitted = self.admit(Instant::now());
        if let Some(suppressed) = admitted {
            write(Some(suppressed).filter(|suppressed| *suppressed > 0));
        }
        admitted.is_some()
    }

    /// Whether a line may be written at `now`; if so, how many were not since the last one.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut written = self.0.lock();
        if written.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            written.since = Some(now);
            written.lines = 0;
        }
        if written.lines == LINES {
            written.suppressed += 1;
            return None;
        }
        written.lines += 1;
        Some(std::mem::take(&mut written.suppressed))
    }
}

/// Whether an error of the system led to this one.
fn is_io(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<io::Error>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_second_are_bounded_and_the_next_one_says_how_many_are_missing() {
        let (limit, begun) = (LineLimit::default(), Instant::now());
        let admitted: Vec<_> = (0..50).filter_map(|number| limit.admit(begun + number * WINDOW / 100)).collect();
        assert_eq!(admitted, [0; 20]);
        assert_eq!(limit.admit(begun + WINDOW), Some(30));
        assert_eq!(limit.admit(begun + WINDOW), Some(0));
    }

    #[test]
    fn errors_of_the_system_are_known_whatever_they_led_to() {
        let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
        assert!(is_io(&reset()));
        assert!(is_io(&crate::detect::DetectError::Read(reset())));
        assert!(!is_io(&Failure::FailFast));
    }
}
