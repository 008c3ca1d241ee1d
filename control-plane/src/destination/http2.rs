//! Parameters of HTTP/2 connections to meshed endpoints, as `--meshed-http2-client-params` has them: the JSON form of
//! Linkerd's `Http2ClientParams`, which its chart renders from `destinationController.meshedHttp2ClientProtobuf`.

use std::{str::FromStr, sync::Arc, time::Duration};

use serde::Deserialize;
use weft_proto::linkerd::destination::{
    Http2ClientParams,
    http2_client_params::{FlowControl, Internals, KeepAlive},
};

/// How often proxies ping idle and busy connections, and how long they wait for the answer: the chart's default.
pub(crate) const DEFAULT: &str =
    r#"{"keep_alive":{"interval":{"seconds":10},"timeout":{"seconds":3},"while_idle":true}}"#;

/// The parameters; `None` sends none, and each proxy has its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MeshedHttp2(Option<Arc<Http2ClientParams>>);

impl MeshedHttp2 {
    /// The parameters as a message.
    pub(crate) fn message(&self) -> Option<Http2ClientParams> {
        self.0.as_deref().copied()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    flow_control: Option<Flow>,
    keep_alive: Option<Alive>,
    internals: Option<Inner>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Flow {
    initial_connection_window_size: u32,
    initial_stream_window_size: u32,
    adaptive_flow_control: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Alive {
    interval: Option<Span>,
    timeout: Option<Span>,
    #[serde(default)]
    while_idle: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Inner {
    max_concurrent_reset_streams: u32,
    max_frame_size: u32,
    max_send_buf_size: u32,
}

/// A duration of protobuf in Go's JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Span {
    seconds: u32,
    nanos: u32,
}

impl FromStr for MeshedHttp2 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let params: Params = serde_path_to_error::deserialize(&mut deserializer)
            .map_err(|error| format!("{}: {}; expected {DEFAULT}", error.path(), error.inner()))?;
        deserializer.end().map_err(|error| error.to_string())?;
        let span = |field: &str, span: Option<Span>| match span {
            None => Ok(None),
            Some(Span { seconds: 0, nanos: 0 }) => Err(format!("keep_alive.{field}: zero, leave it out for no limit")),
            Some(Span { nanos: 1_000_000_000.., .. }) => Err(format!("keep_alive.{field}.nanos: a second or more")),
            Some(Span { seconds, nanos }) => Ok(Duration::new(seconds.into(), nanos).try_into().ok()),
        };
        let keep_alive = match params.keep_alive {
            None => None,
            Some(alive) => Some(KeepAlive {
                interval: span("interval", alive.interval)?,
                timeout: span("timeout", alive.timeout)?,
                while_idle: alive.while_idle,
            }),
        };
        Ok(Self(Some(Arc::new(Http2ClientParams {
            flow_control: params.flow_control.map(|flow| FlowControl {
                initial_connection_window_size: flow.initial_connection_window_size,
                initial_stream_window_size: flow.initial_stream_window_size,
                adaptive_flow_control: flow.adaptive_flow_control,
            }),
            keep_alive,
            internals: params.internals.map(|inner| Internals {
                max_concurrent_reset_streams: inner.max_concurrent_reset_streams,
                max_frame_size: inner.max_frame_size,
                max_send_buf_size: inner.max_send_buf_size,
            }),
        }))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Http2ClientParams, String> {
        text.parse::<MeshedHttp2>().map(|params| params.message().unwrap())
    }

    #[test]
    fn the_default_is_linkerds() {
        let keep_alive = parse(DEFAULT).unwrap().keep_alive.unwrap();
        let interval = Duration::try_from(keep_alive.interval.unwrap()).unwrap();
        let timeout = Duration::try_from(keep_alive.timeout.unwrap()).unwrap();
        assert_eq!((interval, timeout), (Duration::from_secs(10), Duration::from_secs(3)));
        assert!(keep_alive.while_idle);
        assert_eq!("".parse(), Ok(MeshedHttp2(None)));
    }

    #[test]
    fn every_part_is_read() {
        let params = parse(
            r#"{"flow_control":{"initial_stream_window_size":65535,"adaptive_flow_control":true},
            "internals":{"max_frame_size":16384},"keep_alive":{"interval":{"nanos":500}}}"#,
        )
        .unwrap();
        let (flow, internals) = (params.flow_control.unwrap(), params.internals.unwrap());
        assert_eq!((flow.initial_stream_window_size, flow.adaptive_flow_control), (65535, true));
        assert_eq!((internals.max_frame_size, internals.max_send_buf_size), (16384, 0));
        let keep_alive = params.keep_alive.unwrap();
        assert_eq!((keep_alive.interval.unwrap().nanos, keep_alive.timeout), (500, None));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, part) in [
            ("nonsense", "expected"),
            (r#"{"keepAlive":{}}"#, "keepAlive"),
            (r#"{"keep_alive":{"interval":{"seconds":-1}}}"#, "keep_alive.interval.seconds"),
            (r#"{"keep_alive":{"interval":{"seconds":"10"}}}"#, "keep_alive.interval.seconds"),
            (r#"{"keep_alive":{"timeout":{"nanos":1000000000}}}"#, "keep_alive.timeout.nanos"),
            (r#"{"keep_alive":{"timeout":{}}}"#, "keep_alive.timeout"),
            ("{} {}", "trailing"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
