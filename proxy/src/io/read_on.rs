//! Reads what a server has sent before it closed its connection, although the rest of a request cannot be written.
//!
//! A server that wants no more of an upload answers, 413 for example, and closes: the next write fails, and hyper would
//! end the connection with what it has not read yet, which is the answer. So what cannot be written is discarded until
//! the answer has been read.

use std::{
    io::{self, ErrorKind, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream to a server, whose reader learns of its end.
#[derive(Debug)]
pub(crate) struct ReadOn<S> {
    inner: S,
    /// Why the server takes no more bytes.
    closed: Option<ErrorKind>,
    /// Whether everything that it sent was read.
    is_read: bool,
}

impl<S> ReadOn<S> {
    /// Reads and writes `inner`.
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, closed: None, is_read: false }
    }

    /// What becomes of a write of this length.
    fn written(&mut self, length: usize, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Err(error)) if is_closed(&error) && !self.is_read => {
                self.closed = Some(error.kind());
                Poll::Ready(Ok(length))
            }
            polled => polled,
        }
    }

    /// What becomes of writes without asking the server; `None` if it is to be asked.
    fn discarded(&self, length: usize) -> Option<Poll<io::Result<usize>>> {
        let result = || if self.is_read { Err(ErrorKind::BrokenPipe.into()) } else { Ok(length) };
        self.closed.is_some().then(|| Poll::Ready(result()))
    }

    /// Flushes and shutdowns have nothing left to do.
    fn ended(&mut self, polled: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        self.written(0, polled.map_ok(|()| 0)).map_ok(|_| ())
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadOn<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.remaining();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        let has_ended = polled.is_ready() && before > 0 && buf.remaining() == before;
        this.is_read |= has_ended;
        // The kernel reports a reset once, and a write got it.
        if has_ended && this.closed == Some(ErrorKind::ConnectionReset) {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadOn<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Some(discarded) = this.discarded(buf.len()) {
            return discarded;
        }
        let polled = Pin::new(&mut this.inner).poll_write(cx, buf);
        this.written(buf.len(), polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let length = bufs.iter().map(|buf| buf.len()).sum();
        if let Some(discarded) = this.discarded(length) {
            return discarded;
        }
        let polled = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.written(length, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_flush(cx);
        this.ended(polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_shutdown(cx);
        this.ended(polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;
    use crate::testing::tcp_pair;

    #[tokio::test]
    async fn writes_to_a_server_that_closed_fail_when_its_answer_was_read() {
        let (client, mut server) = tcp_pair().await;
        let mut client: ReadOn<TcpStream> = ReadOn::new(client);
        client.write_all(b"request").await.unwrap();
        server.write_all(b"answer").await.unwrap();
        // With unread bytes, it resets the connection.
        drop(server);
        for _ in 0..100 {
            client.write_all(b"more").await.unwrap();
            client.flush().await.unwrap();
        }
        let mut answer = [0; 6];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"answer");
        client.write_all(b"more").await.unwrap();
        let end = client.read(&mut answer).await.unwrap_err();
        assert_eq!(end.kind(), ErrorKind::ConnectionReset, "not an end like any other");
        assert_eq!(client.write_all(b"more").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
