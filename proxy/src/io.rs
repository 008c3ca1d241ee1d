//! Byte streams of the data path: one type for plain and TLS connections, bytes that were read ahead, counters, and
//! the copy in both directions.
//!
//! Owns moving bytes. Refuses to know protocols.

mod batched;
mod buffers;
mod copy;
mod corked;
mod read_on;

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::{in_flight::Permit, metrics::TransportMetrics};

pub(crate) use batched::Batched;
pub(crate) use copy::{copy_bidirectional, copy_connections};
pub(crate) use corked::{Corked, Uncork, cork};
pub(crate) use read_on::ReadOn;

/// A connection of the outbound side: the application's, or one to an endpoint.
#[derive(Debug)]
pub(crate) enum Stream {
    /// No TLS, or TLS that is not ours.
    Plain(TcpStream),
    /// We are the TLS client. Boxed: its session state is far larger than a socket.
    Client(Box<tokio_rustls::client::TlsStream<Batched<TcpStream>>>),
}

/// A connection that can be reset, so that its peer does not take what came of it for the whole.
pub(crate) trait Abort {
    /// Has the connection reset when it is dropped; what is not sent by then is lost.
    fn abort(&self);
}

impl Abort for TcpStream {
    fn abort(&self) {
        // It fails where there is no connection any more.
        let _ = self.set_zero_linger();
    }
}

impl<S: Abort> Abort for tokio_rustls::client::TlsStream<S> {
    fn abort(&self) {
        self.get_ref().0.abort();
    }
}

impl<S: Abort> Abort for tokio_rustls::server::TlsStream<S> {
    fn abort(&self) {
        self.get_ref().0.abort();
    }
}

impl<S: Abort> Abort for Io<S> {
    fn abort(&self) {
        self.inner.abort();
    }
}

impl Abort for Stream {
    fn abort(&self) {
        match self {
            Self::Plain(stream) => stream.abort(),
            Self::Client(stream) => stream.abort(),
        }
    }
}

#[cfg(test)]
impl Abort for tokio::io::DuplexStream {
    fn abort(&self) {}
}

/// A stream with bytes that were read ahead and are returned again first, and with counters of all bytes.
#[derive(Debug)]
pub(crate) struct Io<S> {
    inner: S,
    read_ahead: Bytes,
    /// How many of the bytes that were read ahead are counted already: the first ones.
    counted: usize,
    metrics: Option<Arc<TransportMetrics>>,
    /// What the connection counts by, until it is closed.
    _permit: Option<Permit>,
    /// The first error, by the operating system's number if it has one.
    failed: Option<Option<i32>>,
}

impl<S> Io<S> {
    /// Wraps a stream of which nothing has been read.
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, read_ahead: Bytes::new(), counted: 0, metrics: None, _permit: None, failed: None }
    }

    /// Puts bytes before those that are read next, including earlier read-ahead.
    pub(crate) fn read_again(&mut self, bytes: Bytes) {
        if self.metrics.is_some() {
            self.counted += bytes.len();
        }
        if self.read_ahead.is_empty() {
            self.read_ahead = bytes;
        } else {
            let mut all = BytesMut::with_capacity(bytes.len() + self.read_ahead.len());
            all.extend_from_slice(&bytes);
            all.extend_from_slice(&self.read_ahead);
            self.read_ahead = all.freeze();
        }
    }

    /// Counts bytes in `metrics` from here on. The connection's opening is counted now, its closing when the stream is
    /// dropped.
    #[must_use]
    pub(crate) fn with_metrics(mut self, metrics: Arc<TransportMetrics>) -> Self {
        metrics.opened();
        self.metrics = Some(metrics);
        self
    }

    /// Holds a permit until the stream is dropped.
    #[must_use]
    pub(crate) fn with_permit(mut self, permit: Permit) -> Self {
        self._permit = Some(permit);
        self
    }
}

impl<S: AsyncRead + Unpin> Io<S> {
    /// Waits until there is something to read, or the stream has ended or failed, without a buffer: the first byte is
    /// read ahead.
    pub(crate) async fn readable(&mut self) {
        let mut first = [0];
        if self.read(&mut first).await.is_ok_and(|length| length == 1) {
            self.read_again(Bytes::copy_from_slice(&first));
        }
    }
}

/// Keeps the number of a stream's first error for `tcp_close_total{errno}`: later ones follow from it. Linkerd's rule.
#[cold]
fn record(failed: &mut Option<Option<i32>>, error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::WouldBlock {
        failed.get_or_insert(error.raw_os_error());
    }
    error
}

impl<S> Drop for Io<S> {
    fn drop(&mut self) {
        if let Some(metrics) = self.metrics.take() {
            metrics.closed(self.failed.flatten());
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Io<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let mut counted = 0;
        if this.read_ahead.is_empty() {
            let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
            ready!(polled.map_err(|error| record(&mut this.failed, error)))?;
        } else {
            let length = this.read_ahead.len().min(buf.remaining());
            buf.put_slice(&this.read_ahead[..length]);
            this.read_ahead.advance(length);
            if this.read_ahead.is_empty() {
                this.read_ahead = Bytes::new();
            }
            counted = this.counted.min(length);
            this.counted -= counted;
        }
        if let Some(metrics) = &this.metrics {
            metrics.read((buf.filled().len() - before - counted) as u64);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Io<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write(cx, buf);
        let written = ready!(polled.map_err(|error| record(&mut this.failed, error)))?;
        if let Some(metrics) = &this.metrics {
            metrics.written(written as u64);
        }
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        let written = ready!(polled.map_err(|error| record(&mut this.failed, error)))?;
        if let Some(metrics) = &this.metrics {
            metrics.written(written as u64);
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        Pin::new(&mut this.inner).poll_flush(cx).map_err(|error| record(&mut this.failed, error))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        Pin::new(&mut this.inner).poll_shutdown(cx).map_err(|error| record(&mut this.failed, error))
    }
}

macro_rules! each {
    ($self:expr, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => $call,
            Stream::Client($stream) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Client(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt as _, duplex};

    use super::*;
    use crate::metrics::{Direction, Labels, Peer, ProxyMetrics};

    /// A stream whose operations fail, one after the other, with these.
    struct Failing(std::vec::IntoIter<io::Error>);

    impl AsyncWrite for Failing {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(self.0.next().unwrap()))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(self.0.next().unwrap()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(self.0.next().unwrap()))
        }
    }

    #[tokio::test]
    async fn the_first_error_closes_a_connection_and_has_a_name_if_it_is_the_systems() {
        let system = io::Error::from_raw_os_error;
        for (errors, expected) in [
            ([system(libc::EPIPE), system(libc::ENOTCONN), system(libc::EIO)], "EPIPE"),
            ([io::ErrorKind::UnexpectedEof.into(), system(libc::EPIPE), system(libc::EPIPE)], ""),
            ([io::ErrorKind::WouldBlock.into(), system(libc::EHOSTUNREACH), system(libc::EPIPE)], "EHOSTUNREACH"),
            ([system(libc::EAGAIN), system(libc::EAGAIN), system(libc::ETIMEDOUT)], "ETIMEDOUT"),
        ] {
            let mut registry = prometheus_client::registry::Registry::default();
            let metrics = ProxyMetrics::register(&mut registry);
            let transport = Arc::new(metrics.transport(Direction::Inbound, Peer::Src, &Labels::new()));
            let mut stream = Io::new(Failing(Vec::from(errors).into_iter())).with_metrics(transport);
            let operations = [stream.write_all(b"x").await, stream.flush().await, stream.shutdown().await];
            assert!(operations.iter().all(Result::is_err), "errors are passed on: {operations:?}");
            drop(stream);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let closed: Vec<_> =
                text.lines().filter(|line| line.starts_with("tcp_close_total{") && line.ends_with(" 1")).collect();
            assert_eq!(closed, [format!(r#"tcp_close_total{{direction="inbound",peer="src",errno="{expected}"}} 1"#)]);
        }
    }

    #[tokio::test]
    async fn bytes_that_are_read_again_are_counted_once() {
        let mut registry = prometheus_client::registry::Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let transport = Arc::new(metrics.transport(Direction::Outbound, Peer::Src, &Labels::new()));
        let (mut client, server) = duplex(64);
        client.write_all(b"0123456789").await.unwrap();
        let mut stream = Io::new(server);
        // Read before the connection is counted.
        let mut first = [0; 4];
        stream.read_exact(&mut first).await.unwrap();
        stream.read_again(Bytes::copy_from_slice(&first));
        let mut stream = stream.with_metrics(transport);
        let mut piece = [0; 3];
        for _ in 0..3 {
            stream.read_exact(&mut piece).await.unwrap();
            stream.read_again(Bytes::copy_from_slice(&piece));
        }
        drop(client);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"0123456789");
        let mut scraped = String::new();
        prometheus_client::encoding::text::encode(&mut scraped, &registry).unwrap();
        let counted = scraped.lines().find(|line| line.starts_with("tcp_read_bytes_total")).unwrap();
        assert!(counted.ends_with(" 10"), "{counted}");
    }
}
