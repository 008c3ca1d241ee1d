//! The dashboard: a page without a build step, and the answers of `weft.viz.v1` as JSON.
//!
//! ```text
//! browser ──GET──> asset                     the page: HTML, CSS, ES modules
//!         ──POST /api/v1/..──> Guard ──> question ──> Viz (an engine, or a component that is relayed to)
//!                                     └> events       server-sent events, as fast as they are read
//! ```
//!
//! Owns the page, its headers and its protection on a loopback port. Refuses to listen: `weft dashboard` does that, and
//! answers what only a person's rights reach.

mod asset;
mod guard;
mod question;

use std::{convert::Infallible, fmt::Write as _, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::{HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use serde::Serialize;

pub use asset::asset;
pub use guard::{Guard, new_key};
pub use question::question;

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The most bytes of a question. The longest is a tap with its filters.
pub const QUESTION_BYTES: usize = 16 << 10;
/// The prefix of the paths of questions.
pub const API: &str = "/api/v1/";

/// How often a stream without events says that it lives, so that a browser that went away is noticed.
const BEAT: Duration = Duration::from_secs(10);

/// Nothing but our own modules and style, no markup from strings (Trusted Types), no frames, no forms that leave.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// An object as an answer.
pub fn json(value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(text) => respond(StatusCode::OK, "application/json", text.into()),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, &format!("the answer is no JSON: {error}")),
    }
}

/// A failure, with a sentence for people.
pub fn failure(status: StatusCode, message: &str) -> Response<Body> {
    let text = serde_json::json!({ "error": message }).to_string();
    respond(status, "application/json", text.into())
}

/// Objects as server-sent events, until the stream ends or the browser goes. The stream is read as fast as the browser
/// reads.
pub fn events<T: Serialize + Send + 'static>(source: impl Stream<Item = T> + Send + 'static) -> Response<Body> {
    // The first bytes show the browser that the stream is open.
    let begin = stream::once(async { Bytes::from_static(b": open\n\n") });
    let rest = stream::unfold(Box::pin(source), |mut source| async move {
        let text = match tokio::time::timeout(BEAT, source.next()).await {
            Err(_) => ": beat\n\n".to_owned(),
            Ok(Some(event)) => event_text(&event),
            Ok(None) => return None,
        };
        Some((Bytes::from(text), source))
    });
    let frames = begin.chain(rest).map(|bytes| Ok(Frame::data(bytes)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    dress(&mut response, "text/event-stream");
    response
}

fn event_text(event: &impl Serialize) -> String {
    // JSON has no line breaks outside strings, and escapes those inside.
    match serde_json::to_string(event) {
        Ok(json) => format!("data: {json}\n\n"),
        Err(error) => {
            let mut text = ": not sent: ".to_owned();
            let _ = write!(text, "{}\n\n", error.to_string().replace(['\r', '\n'], " "));
            text
        }
    }
}

fn respond(status: StatusCode, kind: &'static str, content: Bytes) -> Response<Body> {
    let mut response = Response::new(Full::new(content).boxed_unsync());
    *response.status_mut() = status;
    dress(&mut response, kind);
    response
}

/// The headers of every answer.
fn dress(response: &mut Response<Body>, kind: &'static str) {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The content of an answer.
    pub(super) async fn text(response: Response<Body>) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn an_event_is_one_line_whatever_is_in_it() {
        let response = events(stream::iter(["a\nb\r\n\ndata: forged", "<img src=x>"]));
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        assert_eq!(text(response).await, ": open\n\ndata: \"a\\nb\\r\\n\\ndata: forged\"\n\ndata: \"<img src=x>\"\n\n");
    }

    #[tokio::test]
    async fn every_answer_forbids_foreign_scripts_and_frames() {
        let answers = [
            json(&1),
            failure(StatusCode::NOT_FOUND, "no"),
            events(stream::empty::<u8>()),
            asset("/").expect("the page"),
        ];
        for answer in answers {
            let policy = answer.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
            for part in ["default-src 'none'", "frame-ancestors 'none'", "trusted-types 'none'"] {
                assert!(policy.contains(part), "{policy}");
            }
            assert!(!policy.contains("unsafe"), "{policy}");
            assert!(answer.headers().get("access-control-allow-origin").is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_says_that_it_lives() {
        let mut body = events(stream::pending::<u8>()).into_body();
        for expected in [": open\n\n", ": beat\n\n", ": beat\n\n"] {
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), expected.as_bytes());
        }
    }
}
