//! The log of a process: the ports that it says it serves at, its requests to the API server, its last lines.
//!
//! The requests are counted here, because one process cannot be told from another in the API server's own counters.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};

/// Lines that an error message shows.
const KEPT_LINES: usize = 20;

/// Requests of a process to the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// All that were answered.
    pub total: u64,
    /// The part of them that began a watch.
    pub watches: u64,
    /// By method.
    pub methods: BTreeMap<String, u64>,
    /// Requests without an answer.
    pub failed: u64,
}

/// What was read of a log so far.
#[derive(Default)]
pub(super) struct Log {
    last: VecDeque<String>,
    started: Option<Value>,
    requests: Requests,
}

impl Requests {
    /// Those since an earlier time.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let methods = self.methods.iter().map(|(method, count)| {
            (method.clone(), count.saturating_sub(before.methods.get(method).copied().unwrap_or_default()))
        });
        Self {
            total: self.total.saturating_sub(before.total),
            watches: self.watches.saturating_sub(before.watches),
            methods: methods.filter(|(_, count)| *count > 0).collect(),
            failed: self.failed.saturating_sub(before.failed),
        }
    }
}

impl Log {
    /// The address at which the process says that it serves this.
    ///
    /// # Errors
    /// It has not said so, or not as expected.
    pub(super) fn address(&self, service: &str) -> anyhow::Result<SocketAddr> {
        let line = self.started.as_ref().context("it has not said where it serves")?;
        let text = field(line, service);
        let address = text.trim_start_matches("Some(").trim_end_matches(')').parse();
        address.with_context(|| format!("the line of the start names no address of {service}: {line}"))
    }

    /// The last lines.
    pub(super) fn tail(&self) -> String {
        self.last.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    /// The requests so far; `None` if there are none, because every process must have made some.
    pub(super) fn requests(&self) -> Option<Requests> {
        (self.requests.total > 0).then(|| self.requests.clone())
    }

    fn take(&mut self, line: String) {
        if line.contains("\"API request") {
            self.requests.count(&line);
            return;
        }
        if self.started.is_none() && line.contains("\"started\"") {
            self.started = serde_json::from_str(&line).ok();
        }
        if self.last.len() == KEPT_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }
}

impl Requests {
    fn count(&mut self, line: &str) {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        match field(&line, "message") {
            "API request" => self.total += 1,
            "API request failed" => {
                self.failed += 1;
                return;
            }
            _ => return,
        }
        *self.methods.entry(field(&line, "method").to_owned()).or_default() += 1;
        if field(&line, "uri").contains("watch=true") {
            self.watches += 1;
        }
    }
}

/// Reads a process' output to its end.
pub(super) async fn read(stream: Option<impl AsyncRead + Unpin>, log: Arc<Mutex<Log>>) {
    let Some(stream) = stream else { return };
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        log.lock().unwrap_or_else(PoisonError::into_inner).take(line);
    }
}

/// A field of a log line, flat or nested.
fn field<'a>(line: &'a Value, name: &str) -> &'a str {
    line.get(name).or_else(|| line["fields"].get(name)).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_what_the_log_says() {
        let mut log = Log::default();
        for line in [
            r#"{"level":"INFO","message":"started","policy":"Some(127.0.0.1:8090)","admin":"Some(127.0.0.1:9990)"}"#,
            r#"{"message":"API request","method":"GET","uri":"https://h/api/v1/pods?watch=true&x=1","status":200}"#,
            r#"{"message":"API request","method":"PUT","uri":"https://h/leases","status":200}"#,
            r#"{"message":"API request failed","method":"GET","uri":"https://h/api"}"#,
            r#"{"message":"other"}"#,
        ] {
            log.take(line.to_owned());
        }
        let requests = log.requests().unwrap();
        assert!(Log::default().requests().is_none());
        assert_eq!((requests.total, requests.watches, requests.failed), (2, 1, 1));
        assert_eq!(requests.since(&requests), Requests::default());
        assert_eq!(log.address("admin").unwrap().port(), 9990);
        assert!(log.address("destination").is_err() && Log::default().address("admin").is_err());
        assert_eq!(log.tail().lines().count(), 2);
    }
}
