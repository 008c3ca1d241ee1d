//! Serves one client's HTTP/1 connection.
//!
//! hyper reserves room for the next head before it reads, 8 KiB or more, and keeps it with all that it knows of a
//! connection while the client is silent. Most connections of an application are. So one that is idle for
//! [`IDLE_AFTER`] is taken apart, which leaves its stream, and put together again when the client's next byte has
//! arrived.

use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use http::{Request, Response, StatusCode, Version, header::CONTENT_LENGTH};
use http_body::Body as _;
use hyper::{body::Incoming, server::conn::http1::Builder, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout_at,
};
use weft_runtime::drain;

use super::{MAX_BUFFER_BYTES, MAX_HEAD_BYTES, Reset, timer::HeadTimer};
use crate::{
    http::{
        body::{Body, Observed, Observer},
        informational::{Informational, Outbox},
    },
    io::{Abort, Io},
};

/// How long a connection waits for a head before its buffers are freed. To put it together again costs about a
/// microsecond.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// Bytes that are read ahead while a request waits for its answer; further ones stay in the kernel.
const AHEAD: usize = 4096;

/// Serves a connection until the client ends it, or until the proxy drains and its request is answered. From the end of
/// one exchange to the end of the next request's head the client has `timeout`.
///
/// # Errors
/// When the connection failed; its request has its answer or cannot get any.
pub(super) async fn serve<S, A, F, O>(
    stream: Io<S>,
    timeout: Duration,
    drain: &drain::Watch,
    answer: A,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
    A: Fn(Box<Request<Body>>, Informational) -> F,
    F: Future<Output = Result<Response<Observed<O>>, Reset>> + Send + 'static,
    O: Observer + Unpin + Send + 'static,
{
    let shared = Arc::<Shared>::default();
    let of_answers = Arc::clone(&shared);
    let mut service = service_fn(move |request: Request<Incoming>| {
        let (is_old, shared) = (request.version() == Version::HTTP_10, Arc::clone(&of_answers));
        // HTTP/1.0 knows no informational responses (RFC 9110 section 15.2).
        let informational = if is_old { Informational::none() } else { Outbox::open(&shared.outbox) };
        // With a body, hyper reads on until it is whole; what comes after it is not looked at.
        shared.is_awaited.store(request.body().is_end_stream(), Ordering::Relaxed);
        // Boxed, because hyper moves what it gets several times, and this is some KiB large.
        let answer = Box::pin(answer(Box::new(request.map(Body::Incoming)), informational));
        async move {
            let response = answer.await.unwrap_or_else(bad_gateway);
            shared.outbox.lock().close();
            shared.is_awaited.store(false, Ordering::Relaxed);
            shared.is_open_ended.store(is_ended_by_connection(is_old, &response), Ordering::Relaxed);
            Ok::<_, Infallible>(response)
        }
    });
    let timer = HeadTimer::new(timeout, IDLE_AFTER);
    let mut stream = Sending::new(stream, Arc::clone(&shared));
    loop {
        // Boxed, so that an idle connection does not keep room for it.
        let mut server = Box::new(
            Builder::new()
                .auto_date_header(false)
                // Copied into one buffer: in a queue each piece would keep the whole buffer that it was read into. And
                // without `pipeline_flush`, for which hyper ignores the bound of that buffer, and may hold back the end
                // of an answer.
                .writev(false)
                .max_header_size(MAX_HEAD_BYTES)
                .max_buf_size(MAX_BUFFER_BYTES)
                .timer(timer.clone())
                .header_read_timeout(timeout)
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades(),
        );
        // hyper waits for a head when it has answered the request before, so that an answer is on its way only while
        // the stream takes no more of it.
        let idle = poll_fn(|_| match timer.take_idle() {
            Some(until) if !shared.is_blocked.load(Ordering::Relaxed) => Poll::Ready(until),
            _ => Poll::Pending,
        });
        let until = tokio::select! {
            // The connection first, which notices that it is idle.
            biased;
            served = server.as_mut() => Err(served),
            () = drain.signaled() => {
                Pin::new(server.as_mut()).graceful_shutdown();
                Err(server.as_mut().await)
            }
            until = idle => Ok(until),
        };
        let until = match until {
            Ok(until) => until,
            Err(served) => {
                // The client must not take what is cut off for the whole.
                if served.as_ref().is_err_and(hyper::Error::is_user)
                    && shared.is_open_ended.load(Ordering::Relaxed)
                    && let Some(parts) = server.into_parts()
                {
                    parts.io.into_inner().stream.abort();
                }
                return served;
            }
        };
        let Some(parts) = server.into_parts() else { return Ok(()) };
        let read = parts.read_buf;
        (stream, service) = (parts.io.into_inner(), parts.service);
        timer.resume(until);
        if read.is_empty() {
            // Empty, it keeps hyper's buffer.
            drop(read);
            // Whatever ends this, hyper does what follows: it reads on, or ends the connection.
            tokio::select! {
                _ = timeout_at(until, stream.stream.readable()) => {}
                () = drain.signaled() => {}
            }
        } else {
            stream.stream.read_again(read);
        }
    }
}

/// What a connection's stream and what answers its requests know of each other.
#[derive(Debug, Default)]
struct Shared {
    /// Informational responses, which hyper does not send.
    outbox: Arc<Mutex<Outbox>>,
    /// Whether the stream takes no more at the moment.
    is_blocked: AtomicBool,
    /// Whether the end of the last response is that of the connection.
    is_open_ended: AtomicBool,
    /// Whether a request that is whole waits for its answer.
    is_awaited: AtomicBool,
}

/// A stream that says whether it took all that was written, sends informational responses between hyper's writes, and
/// notices that a client leaves.
#[derive(Debug)]
struct Sending<S> {
    stream: Io<S>,
    shared: Arc<Shared>,
    /// What the client has sent while hyper read nothing.
    ahead: BytesMut,
    /// Whether hyper waits for bytes, and so for the client's end.
    is_reading: bool,
    /// Whether hyper has nothing left to write. While a request waits for its response, the next byte then begins a
    /// message, and only then does the outbox take heads.
    is_at_boundary: bool,
}

impl<S> Sending<S> {
    fn new(stream: Io<S>, shared: Arc<Shared>) -> Self {
        Self { stream, shared, ahead: BytesMut::new(), is_reading: false, is_at_boundary: true }
    }
}

impl<S: AsyncRead + Unpin> Sending<S> {
    /// Reads ahead while a request waits for its answer and hyper, which has bytes of the next one already, does not
    /// read: else a client that leaves would not be noticed before the answer.
    ///
    /// # Errors
    /// When the client has left.
    fn notice_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while !self.is_reading && self.ahead.len() < AHEAD && self.shared.is_awaited.load(Ordering::Relaxed) {
            let mut bytes = [MaybeUninit::uninit(); 512];
            let mut bytes = ReadBuf::uninit(&mut bytes);
            match Pin::new(&mut self.stream).poll_read(cx, &mut bytes) {
                Poll::Ready(read) => read?,
                Poll::Pending => break,
            }
            if bytes.filled().is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.ahead.extend_from_slice(bytes.filled());
        }
        Ok(())
    }
}

impl<S: AsyncWrite + Unpin> Sending<S> {
    fn noted<T>(&self, polled: Poll<T>) -> Poll<T> {
        self.shared.is_blocked.store(polled.is_pending(), Ordering::Relaxed);
        polled
    }

    /// Writes the informational responses that wait.
    fn poll_outbox(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut outbox = self.shared.outbox.lock();
        outbox.wake(cx);
        while !outbox.unwritten().is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, outbox.unwritten()))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            outbox.wrote(written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_after_outbox(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_at_boundary {
            ready!(self.poll_outbox(cx))?;
            self.is_at_boundary = false;
        } else {
            self.shared.outbox.lock().drop_late();
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush_with_outbox(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes when it has written all that it has.
        self.is_at_boundary = true;
        ready!(self.poll_outbox(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Sending<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.ahead.is_empty() {
            let length = this.ahead.len().min(buf.remaining());
            buf.put_slice(&this.ahead[..length]);
            this.ahead.advance(length);
            if this.ahead.is_empty() {
                this.ahead = BytesMut::new();
            }
            return Poll::Ready(Ok(()));
        }
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.is_reading = polled.is_pending();
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Sending<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = self.poll_write_after_outbox(cx, buf);
        self.noted(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.notice_end(cx)?;
        let polled = self.poll_flush_with_outbox(cx);
        self.noted(polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Whether the end of a response is that of its connection: HTTP/1.0 has no chunks.
fn is_ended_by_connection<O: Observer + Unpin>(is_old: bool, response: &Response<Observed<O>>) -> bool {
    (is_old || response.version() == Version::HTTP_10)
        && response.body().size_hint().exact().is_none()
        && !response.headers().contains_key(CONTENT_LENGTH)
}

/// HTTP/1 has no resets to pass on.
fn bad_gateway<O: Observer>(_reset: Reset) -> Response<Observed<O>> {
    let mut response = Response::new(Observed::unwatched(Body::Empty));
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::atomic::AtomicUsize};

    use bytes::Bytes;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        sync::Semaphore,
        task::JoinHandle,
        time::{Instant, sleep},
    };
    use weft_runtime::drain::Drain;

    use super::*;
    use crate::http::body::End;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: web.demo\r\n\r\n";

    struct NoObserver;

    impl Observer for NoObserver {
        fn first_frame(&mut self, _: bool) {}
        fn data(&mut self, _: usize) {}
        fn ended(self, _: End<'_>) {}
    }

    /// A stream that keeps how much its reader had room for.
    struct Asked(DuplexStream, Arc<AtomicUsize>);

    impl Abort for Asked {
        fn abort(&self) {}
    }

    impl AsyncRead for Asked {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            self.1.store(buf.remaining(), Ordering::Relaxed);
            Pin::new(&mut self.0).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Asked {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    /// A client of a connection whose requests are answered with `answer`.
    struct World {
        client: DuplexStream,
        served: JoinHandle<Result<(), hyper::Error>>,
        room: Arc<AtomicUsize>,
        drain: Drain,
        gate: Arc<Semaphore>,
    }

    impl World {
        fn new(answer: &'static [u8]) -> Self {
            Self::gated(answer, Semaphore::MAX_PERMITS)
        }

        /// With this number of answers, until the gate gets more permits.
        fn gated(answer: &'static [u8], permits: usize) -> Self {
            let gate = Arc::new(Semaphore::new(permits));
            let of_answers = Arc::clone(&gate);
            let (client, stream) = duplex(256);
            let room = Arc::<AtomicUsize>::default();
            let (drain, watch) = Drain::new();
            let stream = Io::new(Asked(stream, Arc::clone(&room)));
            let served = tokio::spawn(async move {
                let answer = |_, _| {
                    let gate = Arc::clone(&of_answers);
                    async move {
                        gate.acquire().await.unwrap().forget();
                        let body = Body::Full(Bytes::from_static(answer));
                        Ok::<_, Reset>(Response::new(Observed::<NoObserver>::unwatched(body)))
                    }
                };
                serve(stream, TIMEOUT, &watch, answer).await
            });
            Self { client, served, room, drain, gate }
        }

        /// Reads an answer to its end.
        async fn answer(&mut self, expected: &[u8]) {
            let mut read = Vec::new();
            while !read.ends_with(expected) {
                assert_ne!(self.client.read_buf(&mut read).await.unwrap(), 0, "{}", read.escape_ascii());
            }
            assert!(read.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", read.escape_ascii());
        }

        fn room(&self) -> usize {
            self.room.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_has_no_buffer_and_answers_the_next_request() {
        let mut world = World::new(b"found");
        for pause in [Duration::ZERO, IDLE_AFTER / 2, 3 * IDLE_AFTER, 3 * IDLE_AFTER] {
            sleep(pause).await;
            let is_idle = pause > IDLE_AFTER;
            assert_eq!(world.room() == 1, is_idle, "room for {} bytes after {pause:?}", world.room());
            world.client.write_all(REQUEST).await.unwrap();
            world.answer(b"found").await;
            assert!(world.room() >= 8192);
        }
        sleep(3 * IDLE_AFTER).await;
        drop(world.client);
        world.served.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_time_from_the_answer_before_it_whether_the_connection_was_idle_or_not() {
        let pauses: [&[u64]; 4] = [&[], &[500], &[3000, 3000], &[500, 700, 3000]];
        for pauses in pauses {
            let mut world = World::new(b"found");
            world.client.write_all(REQUEST).await.unwrap();
            world.answer(b"found").await;
            let began = Instant::now();
            let mut pieces = REQUEST.chunks(5).take(pauses.len()).collect::<VecDeque<_>>();
            for pause in pauses {
                sleep(Duration::from_millis(*pause)).await;
                world.client.write_all(pieces.pop_front().unwrap()).await.unwrap();
            }
            let error = world.served.await.unwrap().unwrap_err();
            assert!(error.is_timeout(), "{error:?}");
            let waited = began.elapsed();
            assert!(waited >= TIMEOUT && waited < TIMEOUT + Duration::from_millis(10), "{pauses:?}: {waited:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_in_use_stays_however_often_it_was_idle() {
        let mut world = World::new(b"found");
        let began = Instant::now();
        while began.elapsed() < 2 * TIMEOUT {
            sleep(3 * IDLE_AFTER).await;
            world.client.write_all(REQUEST).await.unwrap();
            world.answer(b"found").await;
        }
        sleep(TIMEOUT - IDLE_AFTER).await;
        assert!(!world.served.is_finished());
        assert!(world.served.await.unwrap().unwrap_err().is_timeout());
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_in_pieces_is_read_whole_after_any_pauses() {
        for pause in [100, 800, 1500, 2900] {
            let mut world = World::new(b"found");
            for piece in REQUEST.chunks(REQUEST.len().div_ceil(3)) {
                sleep(Duration::from_millis(pause)).await;
                world.client.write_all(piece).await.unwrap();
            }
            world.answer(b"found").await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_while_an_answer_is_awaited_belongs_to_the_next_requests() {
        let mut world = World::gated(b"found", 0);
        let next: Vec<u8> = REQUEST.repeat(3);
        world.client.write_all(&[REQUEST, &next[..10]].concat()).await.unwrap();
        for piece in next[10..].chunks(7) {
            world.client.write_all(piece).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(world.room(), 512, "hyper does not read");
        for _ in 0..4 {
            world.gate.add_permits(1);
            world.answer(b"found").await;
        }
        sleep(3 * IDLE_AFTER).await;
        assert_eq!(world.room(), 1, "nothing is left");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_ahead_is_bounded() {
        let mut world = World::gated(b"found", 0);
        let mut sent = 0;
        while let Ok(written) = tokio::time::timeout(TIMEOUT, world.client.write(REQUEST)).await {
            sent += written.unwrap();
        }
        // With hyper's own buffer, and that of the pipe.
        assert!(sent > AHEAD && sent < AHEAD + 512 + 8192 + 256, "{sent} bytes");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_the_client_does_not_read_yet_is_kept() {
        static LONG: [u8; 4096] = [b'x'; 4096];
        let mut world = World::new(&LONG);
        world.client.write_all(REQUEST).await.unwrap();
        sleep(5 * IDLE_AFTER).await;
        assert!(world.room() >= 8192, "the connection is not idle");
        world.answer(&LONG).await;
        world.client.write_all(REQUEST).await.unwrap();
        world.answer(&LONG).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_ends_when_the_proxy_drains() {
        let mut world = World::new(b"found");
        sleep(2 * IDLE_AFTER).await;
        assert_eq!(world.room(), 1);
        let began = Instant::now();
        assert!(world.drain.drain(TIMEOUT).await);
        world.served.await.unwrap().unwrap();
        assert_eq!(world.client.read(&mut [0]).await.unwrap(), 0);
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
