//! Reads a socket in large pieces for a reader that asks for small ones.
//!
//! rustls asks for 4 KiB at a time, a quarter of the largest record; a system call for each would be most of what
//! receiving costs. Owns what was read and not yet asked for. A connection that waits holds no buffer.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    Abort,
    buffers::{LARGE, give_buffer, take_large},
};

/// A stream that is read in large pieces. Beyond the number of large buffers that a thread may use, in pieces of the
/// reader's size.
#[derive(Debug)]
pub(crate) struct Batched<S> {
    inner: S,
    buffer: Option<Box<[u8]>>,
    start: usize,
    end: usize,
}

impl<S> Batched<S> {
    /// Reads from `inner`.
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, buffer: None, start: 0, end: 0 }
    }

    /// Moves bytes that were read already; the buffer is returned with the last of them.
    fn hand_over(&mut self, buf: &mut ReadBuf<'_>) {
        let Some(buffer) = &self.buffer else { return };
        let length = buf.remaining().min(self.end - self.start);
        buf.put_slice(&buffer[self.start..self.start + length]);
        self.start += length;
        if self.start == self.end {
            self.release();
        }
    }

    fn release(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            give_buffer(buffer);
        }
    }
}

impl<S: Abort> Abort for Batched<S> {
    fn abort(&self) {
        self.inner.abort();
    }
}

impl<S> Drop for Batched<S> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Batched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.buffer.is_none() {
            let large = if buf.remaining() < LARGE { take_large() } else { None };
            let Some(mut buffer) = large else {
                return Pin::new(&mut this.inner).poll_read(cx, buf);
            };
            let mut read = ReadBuf::new(&mut buffer);
            let polled = Pin::new(&mut this.inner).poll_read(cx, &mut read);
            (this.start, this.end) = (0, read.filled().len());
            this.buffer = Some(buffer);
            if this.end == 0 || !matches!(polled, Poll::Ready(Ok(()))) {
                this.release();
                return polled;
            }
        }
        this.hand_over(buf);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Batched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::ready;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Counts how often it is read.
    struct Counting<S>(S, usize);

    impl<S: AsyncRead + Unpin> AsyncRead for Counting<S> {
        fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let this = self.get_mut();
            ready!(Pin::new(&mut this.0).poll_read(cx, buf))?;
            this.1 += 1;
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn small_reads_cost_one_read_of_the_socket_and_nothing_is_held_after_the_last() {
        let (mut writer, reader) = duplex(64 * 1024);
        let sent: Vec<u8> = (0..20_000_u32).map(|i| i as u8).collect();
        writer.write_all(&sent).await.unwrap();
        let mut reader = Batched::new(Counting(reader, 0));
        let mut received = Vec::new();
        let mut piece = [0; 4096];
        while received.len() < sent.len() {
            let length = reader.read(&mut piece).await.unwrap();
            received.extend_from_slice(&piece[..length]);
            assert_eq!(reader.buffer.is_some(), received.len() < sent.len());
        }
        assert!(received == sent);
        assert_eq!(reader.inner.1, 1);

        let waiting = std::future::poll_fn(|cx| {
            let mut piece = [0; 16];
            Poll::Ready(Pin::new(&mut reader).poll_read(cx, &mut ReadBuf::new(&mut piece)).is_pending())
        });
        assert!(waiting.await && reader.buffer.is_none());
        drop(writer);
        assert_eq!(reader.read(&mut piece).await.unwrap(), 0, "the end is passed on");
        assert!(reader.buffer.is_none());
    }

    #[tokio::test]
    async fn a_reader_with_more_room_reads_the_socket_itself() {
        let (mut writer, reader) = duplex(1024);
        writer.write_all(&[7; 1000]).await.unwrap();
        let mut reader = Batched::new(Counting(reader, 0));
        let mut large = vec![0; 128 * 1024];
        assert_eq!(reader.read(&mut large).await.unwrap(), 1000);
        assert!(reader.buffer.is_none() && reader.inner.1 == 1);
    }
}
