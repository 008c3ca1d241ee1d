//! A client's socket, which can be slow: it then takes a few bytes a second, as a link does that is nearly full. What
//! it does not take fills the buffers of both kernels, and then waits in the control plane.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::watch,
    time::{Interval, MissedTickBehavior, interval},
};

/// How many bytes a slow client reads in a second. A change of an endpoint is a message of several hundred.
pub(super) const TRICKLE: usize = 64;
const TICK: Duration = Duration::from_secs(1);
/// Receive buffer of a client that may become slow, as small as Linux allows: its own buffer would otherwise take more
/// than the changes of a run.
const RECEIVE_BUFFER: usize = 2304;

/// How fast a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// Whatever there is.
    Full,
    /// No data of streams; its windows are 0.
    Stalled,
    /// [`TRICKLE`] bytes a second of everything.
    Trickle,
}

pub(super) struct Link {
    stream: TcpStream,
    slow: Option<Slow>,
}

struct Slow {
    pace: watch::Receiver<Pace>,
    ticks: Interval,
    /// Bytes that may be read until the next tick.
    left: usize,
}

impl Link {
    /// A socket that follows the pace; always fast without one.
    pub(super) fn new(stream: TcpStream, pace: Option<watch::Receiver<Pace>>) -> Self {
        let slow = pace.map(|pace| {
            // A larger buffer only hides a part of what waits.
            let _ = SockRef::from(&stream).set_recv_buffer_size(RECEIVE_BUFFER);
            let mut ticks = interval(TICK);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            Slow { pace, ticks, left: 0 }
        });
        Self { stream, slow }
    }
}

impl AsyncRead for Link {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { stream, slow } = &mut *self;
        let Some(slow) = slow.as_mut().filter(|slow| *slow.pace.borrow() == Pace::Trickle) else {
            return Pin::new(stream).poll_read(cx, buffer);
        };
        if slow.left == 0 {
            ready!(slow.ticks.poll_tick(cx));
            slow.left = TRICKLE;
        }
        let most = slow.left.min(buffer.remaining());
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(most));
        ready!(Pin::new(stream).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        slow.left -= read;
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn a_slow_link_takes_a_trickle_and_a_fast_one_everything() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let pace = watch::Sender::new(Pace::Trickle);
        let mut link = Link::new(stream, Some(pace.subscribe()));
        server.write_all(&[7; 4 * TRICKLE]).await.unwrap();
        // h2 reads into uninitialised memory.
        let mut bytes = Vec::with_capacity(8 * TRICKLE);
        assert_eq!(link.read_buf(&mut bytes).await.unwrap(), TRICKLE, "no more in the first second");
        pace.send_replace(Pace::Full);
        while bytes.len() < 4 * TRICKLE {
            link.read_buf(&mut bytes).await.unwrap();
        }
        assert_eq!(bytes, [7; 4 * TRICKLE]);
    }
}
