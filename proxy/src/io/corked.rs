//! One write for all that a connection's task writes at a time, and a bound of what it reads at a time.
//!
//! h2 writes and flushes each DATA frame by itself, so that every response of an HTTP/2 connection costs a TLS record
//! and a system call even where sixty of them are ready. [`Corked`] gathers what is written, whatever is flushed, and
//! [`Uncork::drive`] sends it when the connection has done all it could. Owns what is gathered: a large buffer, while
//! there is something in it.
//!
//! h2 also reads as long as there is something to read, and queues what it has read for the tasks of the streams. In
//! that queue a head takes up to a hundred times its bytes, and the number of informational heads has no bound. So a
//! connection's task gives way after [`MAX_READ`], and the streams' tasks take what it has read before it reads on.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::buffers::{give_buffer, take_large};

/// The bytes after which a connection reads no more until its task is polled again: a stream's window by default. The
/// last read may exceed it by a TLS record.
const MAX_READ: usize = 64 * 1024;

/// A stream whose writes are gathered. Nothing is sent but by its [`Uncork`], or when the buffer is full.
#[derive(Debug)]
pub(crate) struct Corked<S>(Arc<Mutex<Cork<S>>>);

/// Sends what was gathered.
#[derive(Debug)]
pub(crate) struct Uncork<S>(Arc<Mutex<Cork<S>>>);

#[derive(Debug)]
struct Cork<S> {
    stream: S,
    buffer: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    /// Whether the stream may hold bytes that it has not sent.
    is_unflushed: bool,
    /// Why nothing can be sent any more; returned by the connection's next write.
    failed: Option<io::Error>,
    /// The bytes that were read since the connection was polled.
    read: usize,
    /// All bytes that were read before.
    read_before: u64,
}

/// Gathers the writes of a stream.
pub(crate) fn cork<S>(stream: S) -> (Corked<S>, Uncork<S>) {
    let cork =
        Cork { stream, buffer: None, start: 0, end: 0, is_unflushed: false, failed: None, read: 0, read_before: 0 };
    let shared = Arc::new(Mutex::new(cork));
    (Corked(Arc::clone(&shared)), Uncork(shared))
}

impl<S: AsyncWrite + Unpin> Uncork<S> {
    /// Polls a connection to its end, and sends after each poll what it wrote.
    pub(crate) async fn drive<F: Future + Unpin>(&self, mut connection: F) -> F::Output {
        poll_fn(|cx| self.poll(Pin::new(&mut connection), cx)).await
    }

    /// How many bytes were read.
    pub(crate) fn received(&self) -> u64 {
        let cork = self.0.lock();
        cork.read_before + cork.read as u64
    }

    /// Polls a connection, and sends what it wrote.
    fn poll<F: Future>(&self, mut connection: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        {
            let mut cork = self.0.lock();
            cork.read_before += std::mem::take(&mut cork.read) as u64;
        }
        let polled = connection.as_mut().poll(cx);
        let Poll::Ready(Err(error)) = self.0.lock().poll_drain(cx) else { return polled };
        if polled.is_ready() {
            return polled;
        }
        self.0.lock().failed = Some(error);
        connection.poll(cx)
    }
}

impl<S: AsyncWrite + Unpin> Cork<S> {
    /// Gathers bytes; without room, sends what there is first.
    fn poll_gather(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        if self.buffer.as_ref().is_some_and(|buffer| self.end == buffer.len()) {
            ready!(self.poll_drain(cx))?;
        }
        if self.buffer.is_none() {
            (self.start, self.end, self.buffer) = (0, 0, take_large());
        }
        let Some(buffer) = &mut self.buffer else {
            // All large buffers of the thread are in use.
            self.is_unflushed = true;
            return Pin::new(&mut self.stream).poll_write(cx, bytes);
        };
        let length = bytes.len().min(buffer.len() - self.end);
        buffer[self.end..self.end + length].copy_from_slice(&bytes[..length]);
        self.end += length;
        Poll::Ready(Ok(length))
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(buffer) = &self.buffer {
            while self.start < self.end {
                let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &buffer[self.start..self.end]))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.start += written;
                self.is_unflushed = true;
            }
        }
        self.release();
        if self.is_unflushed {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.is_unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S> Cork<S> {
    fn release(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            give_buffer(buffer);
        }
    }
}

impl<S> Drop for Cork<S> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Corked<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut cork = self.0.lock();
        if cork.read >= MAX_READ {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut cork.stream).poll_read(cx, buf);
        cork.read += buf.filled().len() - before;
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Corked<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().poll_gather(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.0.lock().failed.take() {
            Some(error) => Poll::Ready(Err(error)),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut cork = self.0.lock();
        ready!(cork.poll_drain(cx))?;
        Pin::new(&mut cork.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;
    use crate::io::buffers::LARGE;

    /// Remembers the lengths of writes.
    #[derive(Default)]
    struct Writes {
        lengths: Vec<usize>,
        flushes: usize,
        is_broken: bool,
    }

    impl AsyncWrite for Writes {
        fn poll_write(mut self: Pin<&mut Self>, _cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            if self.is_broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            self.lengths.push(buf.len());
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_is_written_and_flushed_in_one_poll_is_one_write() {
        let (mut corked, uncork) = cork(Writes::default());
        let connection = async {
            for _ in 0..10 {
                corked.write_all(&[7; 1000]).await.unwrap();
                corked.flush().await.unwrap();
            }
            tokio::task::yield_now().await;
            corked.write_all(&[7; 5]).await.unwrap();
            corked.flush().await.unwrap();
        };
        uncork.drive(Box::pin(connection)).await;
        let cork = uncork.0.lock();
        assert_eq!((&cork.stream.lengths[..], cork.stream.flushes), (&[10_000, 5][..], 2));
        assert!(cork.buffer.is_none(), "nothing is held by a connection that waits");
    }

    #[tokio::test]
    async fn a_full_buffer_is_sent_before_more_is_gathered() {
        let (mut corked, uncork) = cork(Writes::default());
        uncork.drive(Box::pin(async { corked.write_all(&vec![7; 2 * LARGE + 1]).await })).await.unwrap();
        assert_eq!(uncork.0.lock().stream.lengths, [LARGE, LARGE, 1]);
    }

    #[tokio::test]
    async fn a_connection_learns_at_once_that_nothing_can_be_sent() {
        let (mut corked, uncork) = cork(Writes { is_broken: true, ..Writes::default() });
        let connection = async {
            corked.write_all(b"lost").await.unwrap();
            let mut flushed = Ok(());
            let learned = poll_fn(|cx| match Pin::new(&mut corked).poll_flush(cx) {
                Poll::Ready(Ok(())) => Poll::Pending,
                polled => {
                    flushed = ready!(polled);
                    Poll::Ready(())
                }
            });
            learned.await;
            flushed
        };
        let error = uncork.drive(Box::pin(connection)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn a_connection_gives_way_after_what_it_may_read_at_a_time() {
        const SENT: usize = 4 * MAX_READ;
        let (near, mut far) = duplex(SENT);
        far.write_all(&[7; SENT]).await.unwrap();
        let (mut corked, uncork) = cork(near);
        let (mut buffer, mut received, mut polls) = ([0; 16 * 1024], 0, 0);
        let connection = poll_fn(|cx| {
            polls += 1;
            loop {
                let mut buf = ReadBuf::new(&mut buffer);
                ready!(Pin::new(&mut corked).poll_read(cx, &mut buf)).unwrap();
                received += buf.filled().len();
                if received == SENT {
                    return Poll::Ready(());
                }
            }
        });
        uncork.drive(connection).await;
        assert_eq!(polls, 4);
    }

    #[tokio::test]
    async fn a_slow_peer_gets_everything_and_the_end() {
        let (near, mut far) = duplex(100);
        let (mut corked, uncork) = cork(near);
        let sent: Vec<u8> = (0..200_000_u32).map(|i| i as u8).collect();
        let expected = sent.clone();
        tokio::spawn(async move {
            let connection = async {
                corked.write_all(&sent).await.unwrap();
                corked.flush().await.unwrap();
                corked.shutdown().await.unwrap();
            };
            uncork.drive(Box::pin(connection)).await;
        });
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        assert!(received == expected);
    }
}
