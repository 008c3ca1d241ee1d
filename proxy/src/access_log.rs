//! The access log: a line on standard error about each inbound request, written when its response ends.
//!
//! Owns the two formats, which are Linkerd's (`linkerd/http/access-log`, `linkerd/tracing/src/access_log.rs`). A line
//! never waits for its reader ([`LineWriter`]). What clients choose is escaped, so that a line is always one, and cut
//! to a bound.

use std::{
    borrow::Cow,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use ::http::{
    HeaderName, Request, StatusCode, Version,
    header::{CONTENT_LENGTH, HOST, USER_AGENT},
};
use percent_encoding::{CONTROLS, utf8_percent_encode};
use serde_json::{Map, Value};
use tokio::time::Instant;
use weft_runtime::telemetry::{LineWriter, Lines};
use weft_tls::identity::Identity;

use crate::config::AccessLogFormat;

/// The most bytes of a request's target in a line. With [`MAX_FIELD`], all lines that wait take 30 MiB at most.
const MAX_URI: usize = 8 * 1024;
/// The most bytes of one of a request's header fields in a line.
const MAX_FIELD: usize = 1024;
/// The most bytes of a request's method in a line.
const MAX_METHOD: usize = 64;

/// The headers that may name a trace; the first that is there counts.
const TRACE_IDS: [&str; 3] = ["x-b3-traceid", "x-request-id", "x-amzn-trace-id"];

/// Where lines go, and their format.
#[derive(Clone, Debug)]
pub(crate) struct AccessLog {
    format: AccessLogFormat,
    lines: LineWriter,
}

/// A request until its response ends; dropping it writes the line.
#[derive(Debug)]
pub(crate) struct Entry {
    log: AccessLog,
    client_addr: SocketAddr,
    client_id: Option<String>,
    timestamp: SystemTime,
    arrived: Instant,
    method: String,
    uri: String,
    version: Version,
    trace_id: String,
    request_bytes: String,
    user_agent: String,
    host: String,
    processing: Duration,
    status: Option<StatusCode>,
    response_bytes: u64,
}

impl AccessLog {
    /// Starts the thread that writes to `to`. The lines are written as long as the second value lives.
    pub(crate) fn to(format: AccessLogFormat, to: impl io::Write + Send + 'static) -> (Self, Lines) {
        let (writer, lines) = Lines::writer(to);
        (Self { format, lines: writer }, lines)
    }

    /// Begins the line about a request, which is as it came.
    pub(crate) fn begin<B>(
        &self,
        request: &Request<B>,
        client_addr: SocketAddr,
        client_id: Option<&Identity>,
    ) -> Box<Entry> {
        let field = |name: &HeaderName| header(request, name.as_str());
        let trace_id = TRACE_IDS.iter().find(|name| request.headers().contains_key(**name));
        let uri = request.uri().to_string();
        Box::new(Entry {
            log: self.clone(),
            client_addr,
            client_id: client_id.map(Identity::to_string),
            timestamp: SystemTime::now(),
            arrived: Instant::now(),
            method: cut(request.method().as_str(), MAX_METHOD).to_owned(),
            uri: cut(&printable(cut(&uri, MAX_URI)), MAX_URI).to_owned(),
            version: request.version(),
            trace_id: trace_id.map(|name| header(request, name)).unwrap_or_default(),
            request_bytes: field(&CONTENT_LENGTH),
            user_agent: field(&USER_AGENT),
            host: field(&HOST),
            processing: Duration::ZERO,
            status: None,
            response_bytes: 0,
        })
    }
}

impl Entry {
    /// Polls the work on the request, whose time counts as the proxy's own.
    pub(crate) fn poll<F: Future>(&mut self, work: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let began = Instant::now();
        let polled = work.poll(cx);
        self.processing += began.elapsed();
        polled
    }

    /// The response has this status.
    pub(crate) fn responded(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// A part of the response's body passes.
    pub(crate) fn data(&mut self, bytes: usize) {
        self.response_bytes = self.response_bytes.saturating_add(bytes as u64);
    }

    fn line(&self, total: Duration) -> String {
        let timestamp = humantime::format_rfc3339_nanos(self.timestamp);
        let client_id = self.client_id.as_deref().unwrap_or("-");
        match self.log.format {
            AccessLogFormat::Apache => {
                let status = self.status.map_or_else(|| "-".to_owned(), |status| status.as_u16().to_string());
                let (addr, method, uri, version) = (self.client_addr, &self.method, escape(&self.uri), self.version);
                format!("{addr} {client_id} - [{timestamp}] \"{method} {uri} {version:?}\" {status}\n")
            }
            AccessLogFormat::Json => {
                let mut fields: Map<String, Value> = [
                    ("client.addr", self.client_addr.to_string()),
                    ("client.id", client_id.to_owned()),
                    ("timestamp", timestamp.to_string()),
                    ("method", self.method.clone()),
                    ("uri", self.uri.clone()),
                    ("version", format!("{:?}", self.version)),
                    ("trace_id", self.trace_id.clone()),
                    ("request_bytes", self.request_bytes.clone()),
                    ("response_bytes", self.response_bytes.to_string()),
                    ("total_ns", total.as_nanos().to_string()),
                    ("processing_ns", self.processing.as_nanos().to_string()),
                    ("user_agent", self.user_agent.clone()),
                    ("host", self.host.clone()),
                ]
                .map(|(name, value)| (name.to_owned(), Value::String(value)))
                .into_iter()
                .collect();
                if let Some(status) = self.status {
                    fields.insert("status".to_owned(), status.as_u16().into());
                }
                format!("{}\n", Value::Object(fields))
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.log.lines.write(&self.line(self.arrived.elapsed()));
    }
}

/// A header field, empty if it is missing or not text.
fn header<B>(request: &Request<B>, name: &str) -> String {
    let value = request.headers().get(name).and_then(|value| value.to_str().ok());
    cut(value.unwrap_or_default(), MAX_FIELD).to_owned()
}

/// The beginning of a text, up to `most` bytes.
fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// Encodes what ends lines or controls terminals, as the client should have done. Targets have raw UTF-8, too.
fn printable(uri: &str) -> Cow<'_, str> {
    let is_printable = |character: char| !character.is_control() && !matches!(character, '\u{2028}' | '\u{2029}');
    if uri.chars().all(is_printable) {
        return uri.into();
    }
    let mut printable = String::with_capacity(uri.len());
    for character in uri.chars() {
        if is_printable(character) {
            printable.push(character);
        } else {
            printable.extend(utf8_percent_encode(character.encode_utf8(&mut [0; 4]), CONTROLS));
        }
    }
    printable.into()
}

/// As Apache does: a target with quotation marks cannot end the field.
fn escape(uri: &str) -> Cow<'_, str> {
    if uri.contains(['"', '\\']) { uri.replace('\\', "\\\\").replace('"', "\\\"").into() } else { uri.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(format: AccessLogFormat, uri: &str) -> (Box<Entry>, Lines) {
        let (log, lines) = AccessLog::to(format, io::sink());
        let client = "[fd00::1]:4711".parse().unwrap();
        (log.begin(&Request::get(uri).body(()).unwrap(), client, None), lines)
    }

    #[test]
    fn a_target_cannot_end_its_field() {
        let (entry, _lines) = entry(AccessLogFormat::Apache, r#"/a"_HTTP/1.1"_200\"#);
        let line = entry.line(Duration::ZERO);
        assert!(line.ends_with("\"GET /a\\\"_HTTP/1.1\\\"_200\\\\ HTTP/1.1\" -\n"), "{line}");
        assert!(line.starts_with("[fd00::1]:4711 - - ["), "{line}");
        for format in [AccessLogFormat::Apache, AccessLogFormat::Json] {
            let (entry, _lines) = self::entry(format, "/\u{9b}31m\u{85}\u{2028}\u{2029}é");
            let line = entry.line(Duration::ZERO);
            assert!(line.contains("/%C2%9B31m%C2%85%E2%80%A8%E2%80%A9é"), "{line}");
            assert_eq!(line.find(char::is_control), Some(line.len() - 1), "{line}");
        }
    }

    #[test]
    fn what_a_client_chooses_is_bounded() {
        let (entry, _lines) = entry(AccessLogFormat::Json, &format!("/{}", "a".repeat(60_000)));
        assert_eq!(entry.uri.len(), MAX_URI);
        let request = Request::builder().method("M".repeat(60_000).as_str()).body(()).unwrap();
        let begun = entry.log.begin(&request, entry.client_addr, None);
        assert_eq!(begun.method.len(), MAX_METHOD);
        let request = Request::get("/").header("user-agent", "b".repeat(MAX_FIELD + 1)).body(()).unwrap();
        assert_eq!(header(&request, "user-agent").len(), MAX_FIELD);
        assert_eq!(cut("aé", 2), "a", "no character is cut in two");
    }

    #[test]
    fn the_trace_is_that_of_the_first_header_that_names_one() {
        let (log, _lines) = AccessLog::to(AccessLogFormat::Json, io::sink());
        let (b3, id, amazons) = (("x-b3-traceid", "b3"), ("x-request-id", "id"), ("x-amzn-trace-id", "amazons"));
        for (headers, expected) in [
            (&[amazons, id, b3][..], "b3"),
            (&[amazons, id], "id"),
            (&[amazons], "amazons"),
            (&[("traceparent", "00-1-2-01")], ""),
        ] {
            let add = |request: ::http::request::Builder, (name, value): &(&str, &str)| request.header(*name, *value);
            let request = headers.iter().fold(Request::get("/"), add).body(()).unwrap();
            let entry = log.begin(&request, "10.0.0.1:1".parse().unwrap(), None);
            let line: Value = serde_json::from_str(&entry.line(Duration::ZERO)).unwrap();
            assert_eq!(line["trace_id"], expected, "{headers:?}");
        }
    }

    #[test]
    fn a_request_without_an_answer_has_no_status() {
        let (entry, _lines) = entry(AccessLogFormat::Json, "/");
        let line: Value = serde_json::from_str(&entry.line(Duration::from_micros(1))).unwrap();
        assert_eq!(line.get("status"), None);
        assert_eq!(line["total_ns"], "1000");
    }
}
