//! Informational responses of servers (1xx), which clients get before the response itself.
//!
//! Owns which of them are passed on, and how many of one request. 100 goes to clients of HTTP/2 alone: over HTTP/1,
//! hyper's server answers `Expect` itself. 101 is no informational response here, but the head of a tunnel. hyper's
//! server sends none over HTTP/1, so that its stream does ([`Outbox`]).

use std::{
    io::Write as _,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use ::h2::{Reason, SendStream, server::SendResponse};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header::CONTENT_LENGTH};
use parking_lot::Mutex;

use super::{
    body::Body,
    headers::{remove_mesh_headers, strip_for_http2},
};

/// How many of one request are passed on; the others are dropped. A server may send any number.
const MAX_COUNT: usize = 16;
/// How many bytes of fields they may have together.
const MAX_BYTES: usize = 16 * 1024;

/// Passes the informational responses to one request on to its client. Clones share how many are left.
#[derive(Clone, Debug)]
pub(crate) struct Informational(Option<Client>);

#[derive(Clone, Debug)]
enum Client {
    /// With the number of the request on its connection.
    Http1(Arc<Mutex<Outbox>>, u64),
    Http2(Arc<Mutex<Responder>>),
}

/// What may still be passed on.
#[derive(Debug)]
struct Allowance {
    count: usize,
    bytes: usize,
}

impl Informational {
    /// The client gets none.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    pub(super) fn to_http2(responder: &Arc<Mutex<Responder>>) -> Self {
        Self(Some(Client::Http2(Arc::clone(responder))))
    }

    /// Has a request that is sent over HTTP/1 pass on what its server says.
    pub(crate) fn follow(&self, request: &mut Request<Body>) {
        if self.0.is_some() {
            let to = self.clone();
            hyper::ext::on_informational(request, move |response| to.pass_on(response.status(), response.headers()));
        }
    }

    /// Passes one on, if the client has had few and no response.
    pub(crate) fn pass_on(&self, status: StatusCode, headers: &HeaderMap) {
        let Some(client) = &self.0 else { return };
        if !status.is_informational() || status == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let is_open = match client {
            Client::Http1(outbox, number) => outbox.lock().left(*number).is_some(),
            Client::Http2(responder) => responder.lock().left.as_ref().is_some_and(|left| left.count > 0),
        };
        // A server may send any number of them.
        if !is_open {
            return;
        }
        let mut headers = headers.clone();
        strip_for_http2(&mut headers);
        headers.remove(CONTENT_LENGTH);
        remove_mesh_headers(&mut headers);
        match client {
            Client::Http1(outbox, number) => outbox.lock().put(*number, status, &headers),
            Client::Http2(responder) => responder.lock().inform(status, headers),
        }
    }
}

impl Allowance {
    fn new() -> Self {
        Self { count: MAX_COUNT, bytes: MAX_BYTES }
    }

    fn take(&mut self, headers: &HeaderMap) -> bool {
        let bytes = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        match (self.count.checked_sub(1), self.bytes.checked_sub(bytes)) {
            (Some(count), Some(bytes)) => {
                *self = Self { count, bytes };
                true
            }
            _ => false,
        }
    }
}

/// What the stream of an HTTP/1 connection sends before the next bytes of hyper's.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Heads that were not written, or not to their end.
    heads: Vec<u8>,
    written: usize,
    /// The number of the last request.
    number: u64,
    /// `None` unless that request waits for its response.
    left: Option<Allowance>,
    /// Wakes the connection.
    waker: Option<Waker>,
}

impl Outbox {
    /// A request begins to wait for its response. Where heads for the one before it are still to be written, it gets
    /// none: they would come before the other's response.
    pub(super) fn open(outbox: &Arc<Mutex<Self>>) -> Informational {
        let mut this = outbox.lock();
        this.number += 1;
        this.left = this.heads.is_empty().then(Allowance::new);
        Informational(Some(Client::Http1(Arc::clone(outbox), this.number)))
    }

    /// The response is there.
    pub(super) fn close(&mut self) {
        self.left = None;
    }

    /// Drops what comes too late: the response is being written.
    pub(super) fn drop_late(&mut self) {
        if self.left.is_none() {
            self.heads.clear();
        }
    }

    /// Has `cx` woken when there is something to be written.
    pub(super) fn wake(&mut self, cx: &Context<'_>) {
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
    }

    /// What is to be written.
    pub(super) fn unwritten(&self) -> &[u8] {
        &self.heads[self.written..]
    }

    /// This much of it was written.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written += bytes;
        if self.written == self.heads.len() {
            self.written = 0;
            // Few connections ever need it.
            self.heads = Vec::new();
        }
    }

    /// What may still be passed on to a request, if it is the last.
    fn left(&mut self, number: u64) -> Option<&mut Allowance> {
        self.left.as_mut().filter(|left| number == self.number && left.count > 0)
    }

    fn put(&mut self, number: u64, status: StatusCode, headers: &HeaderMap) {
        let is_taken = status != StatusCode::CONTINUE && self.left(number).is_some_and(|left| left.take(headers));
        if !is_taken {
            return;
        }
        // Writing to memory does not fail.
        let reason = status.canonical_reason().unwrap_or_default();
        let _ = write!(self.heads, "HTTP/1.1 {} {reason}\r\n", status.as_str());
        for (name, value) in headers {
            self.heads.extend_from_slice(name.as_str().as_bytes());
            self.heads.extend_from_slice(b": ");
            self.heads.extend_from_slice(value.as_bytes());
            self.heads.extend_from_slice(b"\r\n");
        }
        self.heads.extend_from_slice(b"\r\n");
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

/// Answers a request of HTTP/2.
#[derive(Debug)]
pub(super) struct Responder {
    stream: SendResponse<Bytes>,
    /// `None` when the response was sent.
    left: Option<Allowance>,
}

impl Responder {
    pub(super) fn new(stream: SendResponse<Bytes>) -> Self {
        Self { stream, left: Some(Allowance::new()) }
    }

    /// Ready when the client has reset the stream, or is gone.
    pub(super) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let reset = self.stream.poll_reset(cx);
        if reset.is_ready() {
            // h2 would send informational responses nevertheless.
            self.left = None;
        }
        reset.map(|_| ())
    }

    /// Sends the response's head.
    ///
    /// # Errors
    /// When the stream has ended, or HTTP/2 forbids the head.
    pub(super) fn respond(&mut self, head: Response<()>, is_end: bool) -> Result<SendStream<Bytes>, ::h2::Error> {
        self.left = None;
        self.stream.send_response(head, is_end)
    }

    /// Resets the stream instead.
    pub(super) fn reset(&mut self, reason: Reason) {
        self.left = None;
        self.stream.send_reset(reason);
    }

    fn inform(&mut self, status: StatusCode, headers: HeaderMap) {
        if !self.left.as_mut().is_some_and(|left| left.take(&headers)) {
            return;
        }
        let mut response = Response::new(());
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if let Err(error) = self.stream.send_informational(response) {
            tracing::debug!(%error, %status, "cannot pass on an informational response");
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn hint(length: usize) -> HeaderMap {
        let link = HeaderValue::from_str(&"x".repeat(length)).unwrap();
        HeaderMap::from_iter([(http::header::LINK, link)])
    }

    #[test]
    fn a_head_is_written_as_http1_without_what_concerns_a_connection_or_the_mesh() {
        let outbox = Arc::<Mutex<Outbox>>::default();
        let informational = Outbox::open(&outbox);
        let mut headers = hint(3);
        for (name, value) in [("connection", "close"), ("content-length", "3"), ("l5d-client-id", "web.demo")] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        informational.pass_on(StatusCode::EARLY_HINTS, &headers);
        let mut outbox = outbox.lock();
        assert_eq!(
            outbox.unwritten().escape_ascii().to_string(),
            "HTTP/1.1 103 Early Hints\\r\\nlink: xxx\\r\\n\\r\\n"
        );
        outbox.wrote(9);
        assert!(outbox.unwritten().starts_with(b"103"));
        let left = outbox.unwritten().len();
        outbox.wrote(left);
        assert!(outbox.unwritten().is_empty());
    }

    #[test]
    fn few_are_passed_on_and_none_after_the_response_or_to_another_request() {
        let outbox = Arc::<Mutex<Outbox>>::default();
        let written = || std::mem::take(&mut outbox.lock().heads).split(|byte| *byte == b'1').count();
        let informational = Outbox::open(&outbox);
        for status in [StatusCode::CONTINUE, StatusCode::SWITCHING_PROTOCOLS, StatusCode::OK] {
            informational.pass_on(status, &HeaderMap::new());
        }
        assert!(outbox.lock().unwritten().is_empty());
        for _ in 0..100 {
            informational.pass_on(StatusCode::PROCESSING, &HeaderMap::new());
        }
        // "HTTP/1.1 102": three each.
        assert_eq!(written(), 3 * MAX_COUNT + 1);

        let informational = Outbox::open(&outbox);
        for _ in 0..100 {
            informational.pass_on(StatusCode::PROCESSING, &hint(MAX_BYTES / 4));
        }
        assert_eq!(written(), 3 * 3 + 1, "the names count, too");

        let next = Outbox::open(&outbox);
        informational.pass_on(StatusCode::PROCESSING, &HeaderMap::new());
        assert!(outbox.lock().unwritten().is_empty(), "the request before has its response");
        next.pass_on(StatusCode::PROCESSING, &HeaderMap::new());
        outbox.lock().close();
        next.pass_on(StatusCode::PROCESSING, &HeaderMap::new());
        assert_eq!(outbox.lock().heads.len(), "HTTP/1.1 102 Processing\r\n\r\n".len());

        let late = Outbox::open(&outbox);
        late.pass_on(StatusCode::PROCESSING, &HeaderMap::new());
        assert_eq!(written(), 3 + 1, "it waits for what is to be written before the response before it");
    }
}
