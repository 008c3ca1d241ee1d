//! Copies bytes between two streams until both directions have ended.
//!
//! Owns half-close. A connection without traffic holds no buffer: each is taken from the thread's pool when bytes can
//! be read and returned once they are written. Only a direction whose receiver does not read holds one for longer.

use std::{
    future::poll_fn,
    io::{self, ErrorKind},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    Abort,
    buffers::{SMALL, give_buffer, take_large, take_small},
};

/// Copies both ways, passes each side's end on as a half-close, and returns when both have ended.
///
/// When one side accepts no more bytes, the bytes that it has sent still arrive: a server may answer "too large" and
/// close while its client is sending.
///
/// # Errors
/// The first read or write that failed.
pub(crate) async fn copy_bidirectional<A, B>(a: &mut A, b: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    copy(a, b).await.map_err(io::Error::from)
}

/// As [`copy_bidirectional`]; where a read fails, both connections are reset, so that neither peer takes what was cut
/// off for the end of what the other one sends.
///
/// # Errors
/// The first read or write that failed.
pub(crate) async fn copy_connections<A, B>(a: &mut A, b: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Abort + Unpin,
    B: AsyncRead + AsyncWrite + Abort + Unpin,
{
    let copied = copy(a, b).await;
    if matches!(copied, Err(CopyError::Read(_))) {
        a.abort();
        b.abort();
    }
    copied.map_err(io::Error::from)
}

async fn copy<A, B>(a: &mut A, b: &mut B) -> Result<(), CopyError>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (mut forth, mut back) = (Direction::new(), Direction::new());
    poll_fn(|cx| {
        let is_forth_done = forth.poll(cx, a, b, back.is_reset())?;
        let is_back_done = back.poll(cx, b, a, forth.is_reset())?;
        if is_forth_done && is_back_done { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
    .map_err(CopyError::Read)?;
    match forth.refused.take().or(back.refused.take()) {
        Some(error) => Err(CopyError::Write(error)),
        None => Ok(()),
    }
}

struct Direction {
    buffer: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    unflushed: bool,
    /// Whether the last read filled its buffer, as those of bulk transfers do.
    is_bulk: bool,
    state: State,
    /// Why the receiving side accepted no more.
    refused: Option<io::Error>,
}

/// What failed.
#[derive(Debug)]
enum CopyError {
    /// There may have been more to read.
    Read(io::Error),
    /// A side took no more, and sent all that it had.
    Write(io::Error),
}

impl From<CopyError> for io::Error {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Read(error) | CopyError::Write(error) => error,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Copying,
    ShuttingDown,
    Done,
}

impl Direction {
    fn new() -> Self {
        Self { buffer: None, start: 0, end: 0, unflushed: false, is_bulk: false, state: State::Copying, refused: None }
    }

    /// Whether the receiving side has reset the connection.
    fn is_reset(&self) -> bool {
        self.refused.as_ref().is_some_and(|error| error.kind() == ErrorKind::ConnectionReset)
    }

    /// Copies all that can be copied now; returns whether this direction is done. A receiver that fails ends only this
    /// direction: its own bytes may still be readable, and after them its failure is.
    /// The sender has reset the connection if a write to it `was_reset`: the kernel says so only once, and what is read
    /// then ends like any other.
    fn poll<R, W>(&mut self, cx: &mut Context<'_>, from: &mut R, to: &mut W, was_reset: bool) -> io::Result<bool>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        match self.poll_copy(cx, from, to, was_reset) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(())) => Ok(true),
            Poll::Ready(Err(CopyError::Read(error))) => Err(error),
            Poll::Ready(Err(CopyError::Write(error))) => {
                self.refused = Some(error);
                self.state = State::Done;
                self.release();
                Ok(true)
            }
        }
    }

    fn poll_copy<R, W>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut R,
        to: &mut W,
        was_reset: bool,
    ) -> Poll<Result<(), CopyError>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        while self.state == State::Copying {
            if self.start == self.end {
                match self.poll_fill(cx, from).map_err(CopyError::Read)? {
                    Poll::Ready(0) if was_reset => {
                        return Poll::Ready(Err(CopyError::Read(ErrorKind::ConnectionReset.into())));
                    }
                    Poll::Ready(0) => self.state = State::ShuttingDown,
                    Poll::Ready(_) => {}
                    Poll::Pending => {
                        if self.unflushed {
                            ready!(Pin::new(&mut *to).poll_flush(cx)).map_err(CopyError::Write)?;
                            self.unflushed = false;
                        }
                        return Poll::Pending;
                    }
                }
            } else {
                ready!(self.poll_drain(cx, to)).map_err(CopyError::Write)?;
            }
        }
        if self.state == State::ShuttingDown {
            match ready!(Pin::new(to).poll_shutdown(cx)) {
                // The other side may have gone already; then the end need not be passed on.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                result => result.map_err(CopyError::Write)?,
            }
            self.state = State::Done;
        }
        Poll::Ready(Ok(()))
    }

    /// Reads into the buffer; returns the number of bytes, 0 at the end.
    fn poll_fill<R: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, from: &mut R) -> Poll<io::Result<usize>> {
        // The next buffer may have the other size.
        self.release();
        let large = if self.is_bulk { take_large() } else { None };
        let mut buffer = large.unwrap_or_else(take_small);
        let mut read = ReadBuf::new(&mut buffer);
        let polled = Pin::new(from).poll_read(cx, &mut read);
        let length = read.filled().len();
        match polled {
            Poll::Ready(Ok(())) if length > 0 => {
                self.is_bulk = length >= SMALL;
                (self.start, self.end) = (0, length);
                self.buffer = Some(buffer);
                Poll::Ready(Ok(length))
            }
            ended => {
                give_buffer(buffer);
                ended.map_ok(|()| 0)
            }
        }
    }

    /// Writes the whole buffer.
    fn poll_drain<W: AsyncWrite + Unpin>(&mut self, cx: &mut Context<'_>, to: &mut W) -> Poll<io::Result<()>> {
        let buffer = self.buffer.as_deref().unwrap_or_default();
        while self.start < self.end {
            let written = ready!(Pin::new(&mut *to).poll_write(cx, &buffer[self.start..self.end]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.start += written;
            self.unflushed = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl Direction {
    fn release(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            give_buffer(buffer);
        }
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;
    use crate::{
        io::buffers::{LARGE, MAX_LARGE, in_use},
        testing::tcp_pair,
    };

    #[tokio::test]
    async fn a_reset_that_a_write_reports_is_not_an_end_for_the_reader() {
        let (mut client, mut near) = tcp_pair().await;
        let (mut far, mut server) = tcp_pair().await;
        server.write_all(b"part").await.unwrap();
        far.readable().await.unwrap();
        server.set_zero_linger().unwrap();
        drop(server);
        // What the client sends is copied before the server's end is read.
        client.write_all(b"more").await.unwrap();
        near.readable().await.unwrap();
        let copied = copy(&mut near, &mut far).await.unwrap_err();
        assert!(matches!(&copied, CopyError::Read(error) if error.kind() == ErrorKind::ConnectionReset), "{copied:?}");
        drop(near);
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "part");
    }

    #[tokio::test]
    async fn each_end_is_passed_on_while_the_other_direction_lives() {
        let (mut client, mut near) = duplex(16);
        let (mut far, mut server) = duplex(16);
        let copy = tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut question = Vec::new();
        server.read_to_end(&mut question).await.unwrap();
        assert_eq!(question, b"question");
        server.write_all(b"a longer answer than the pipe holds").await.unwrap();
        drop(server);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"a longer answer than the pipe holds");
        copy.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn large_transfers_arrive_whole() {
        let (mut client, mut near) = duplex(1000);
        let (mut far, mut server) = duplex(777);
        tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        let sent: Vec<u8> = (0..300_000_u32).map(|i| i as u8).collect();
        let expected = sent.clone();
        tokio::spawn(async move {
            client.write_all(&sent).await.unwrap();
            client.shutdown().await.unwrap();
            std::future::pending::<()>().await;
            drop(client);
        });
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == expected);
    }
    #[tokio::test]
    async fn bytes_that_had_arrived_are_passed_on_when_the_other_direction_fails() {
        let (mut client, mut near) = tcp_pair().await;
        let (mut far, mut server) = tcp_pair().await;
        // The server answers without reading the request and closes, which resets the connection.
        client.write_all(b"the beginning of a request").await.unwrap();
        far.write_all(b"unread").await.unwrap();
        server.readable().await.unwrap();
        server.write_all(&[7; 1024]).await.unwrap();
        drop(server);
        let copied = copy_bidirectional(&mut near, &mut far).await;
        assert!(copied.is_err());
        drop(near);
        let mut answer = Vec::new();
        let _reset = client.read_to_end(&mut answer).await;
        assert!(answer == [7; 1024], "{} bytes", answer.len());
    }

    #[tokio::test]
    async fn stalled_readers_hold_small_buffers_beyond_a_number_and_others_go_on() {
        const STALLED: usize = MAX_LARGE + 100;
        let mut readers = Vec::new();
        let mut copies = tokio::task::JoinSet::new();
        for _ in 0..STALLED {
            let mut endless = tokio::io::join(tokio::io::repeat(7), tokio::io::sink());
            let (mut writer, reader) = duplex(2 * LARGE);
            readers.push(reader);
            copies.spawn(async move { copy_bidirectional(&mut endless, &mut writer).await });
        }
        tokio::time::timeout(Duration::from_secs(10), async {
            while in_use().0 + in_use().1 < STALLED {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("{:?} buffers are in use", in_use()));
        assert_eq!(in_use(), (MAX_LARGE, STALLED - MAX_LARGE));

        let (client, mut near) = tcp_pair().await;
        let (mut far, mut server) = tcp_pair().await;
        copies.spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        let sent = vec![9; 1_000_000];
        let (mut received, mut client) = (vec![0; sent.len()], client);
        let (wrote, read) = tokio::join!(client.write_all(&sent), server.read_exact(&mut received));
        assert!(wrote.is_ok() && read.is_ok() && received == sent);

        drop((readers, client, server));
        while copies.join_next().await.is_some() {}
        assert_eq!(in_use(), (0, 0));
    }

    #[tokio::test]
    async fn messages_use_small_buffers_and_bulk_transfers_large_ones() {
        for (length, expected) in [(64, SMALL), (SMALL - 1, SMALL), (10 * LARGE, LARGE)] {
            let (mut near, _stalled) = duplex(1);
            let source = std::io::Cursor::new(vec![7; length]);
            let mut source = tokio::io::join(source, tokio::io::sink());
            let mut direction = Direction::new();
            // The first byte is accepted, and a whole small buffer before a large one.
            let mut open =
                tokio::io::join(tokio::io::empty(), OpenFor(&mut near, if expected == LARGE { SMALL } else { 0 }));
            let polled = poll_fn(|cx| Poll::Ready(direction.poll(cx, &mut source, &mut open, false))).await;
            assert!(!polled.unwrap());
            assert_eq!(direction.buffer.as_ref().map(|buffer| buffer.len()), Some(expected), "{length} bytes");
        }
    }

    /// Accepts this many bytes before the writer does.
    struct OpenFor<'a>(&'a mut tokio::io::DuplexStream, usize);

    impl AsyncWrite for OpenFor<'_> {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            if self.1 > 0 {
                let accepted = self.1.min(buf.len());
                self.1 -= accepted;
                return Poll::Ready(Ok(accepted));
            }
            Pin::new(&mut *self.0).poll_write(cx, buf)
        }

        fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }
}
