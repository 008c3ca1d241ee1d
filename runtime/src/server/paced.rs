//! A connection's stream, which is read from when there is room for what it brings, and which notes when its peer is
//! waited for.
//!
//! ```text
//! turn: one read ──> requests begin ──> their tasks have their turns ──> turn
//! ```
//!
//! h2 otherwise reads until the socket is empty before it hands over the first of the requests that it has read:
//! nothing counts them, and it keeps the place of every frame that it ever had to keep at a time, for as long as the
//! connection lives.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{clock::SocketArrival, connections::Handle};

/// See above.
pub(super) struct Paced<IO> {
    io: IO,
    handle: Arc<Handle>,
    arrival: Arc<SocketArrival>,
    /// That of `arrival`.
    waker: Waker,
}

impl<IO> Paced<IO> {
    pub(super) fn new(io: IO, handle: Arc<Handle>) -> Self {
        let arrival = SocketArrival::new(handle.clock().clone());
        let waker = Waker::from(arrival.clone());
        Self { io, handle, arrival, waker }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Paced<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { io, handle, arrival, waker } = &mut *self;
        if handle.has_read_in_turn() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let clock = handle.clock();
        if handle.poll_turn(cx).is_pending() {
            clock.paused();
            return Poll::Pending;
        }
        ready!(clock.poll_read(cx));
        arrival.note(cx.waker());
        let read = Pin::new(io).poll_read(&mut Context::from_waker(waker), buffer);
        clock.read(read.is_pending());
        handle.has_read(read.is_ready());
        read
    }
}

/// The future that reads from a connection: each of its turns begins here.
pub(super) struct InTurns<'a, C> {
    pub(super) http: Pin<&'a mut C>,
    pub(super) reader: Arc<Handle>,
}

impl<C: Future> Future for InTurns<'_, C> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        self.reader.begin_turn();
        self.http.as_mut().poll(cx)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Paced<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
