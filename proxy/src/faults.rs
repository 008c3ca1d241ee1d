//! A TCP relay for tests that does to each connection what a script says: delays, cuts, resets, silence.
//!
//! Owns the faults of a hop, and counts those that have happened. Refuses to know what passes through it.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
    task::JoinSet,
};

/// What happens to one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Each piece waits before it is passed on.
    Delay(Duration),
    /// Something ends it after this number of bytes in one direction.
    After(Toward, usize, Cut),
}

impl Fault {
    /// Every cut, after none of the bytes and after this number, in both directions.
    pub(crate) fn at(to_server: usize, to_client: usize) -> impl Iterator<Item = Self> {
        let places =
            [(Toward::Server, 0), (Toward::Server, to_server), (Toward::Client, 0), (Toward::Client, to_client)];
        let cuts = [Cut::Reset, Cut::Close, Cut::HalfClose, Cut::Silence];
        places.into_iter().flat_map(move |(toward, bytes)| cuts.map(|cut| Self::After(toward, bytes, cut)))
    }
}

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toward {
    /// What the client sends.
    Server,
    /// What the server sends.
    Client,
}

/// How a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both sides get a reset.
    Reset,
    /// Both sides get an end, as if the other had closed.
    Close,
    /// The receiver gets an end, and may still answer.
    HalfClose,
    /// Nothing more passes, and nobody is told before the hop heals.
    Silence,
}

/// A hop with faults. Dropping it closes its listener and its connections.
pub(crate) struct FaultyHop {
    /// Where it listens.
    pub(crate) addr: SocketAddr,
    cuts: Arc<AtomicUsize>,
    healed: watch::Sender<bool>,
    _accepting: JoinSet<()>,
}

impl FaultyHop {
    /// Listens on loopback in front of `server`. `script` says what happens to the next connection.
    pub(crate) fn start(server: SocketAddr, mut script: impl FnMut() -> Fault + Send + 'static) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let (addr, cuts) = (listener.local_addr().unwrap(), Arc::<AtomicUsize>::default());
        let mut accepting = JoinSet::new();
        let counted = Arc::clone(&cuts);
        let (healed, is_healed) = watch::channel(false);
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let fault = if *is_healed.borrow() { Fault::None } else { script() };
                connections.spawn(relay(client, server, fault, Arc::clone(&counted), is_healed.clone()));
            }
        });
        Self { addr, cuts, healed, _accepting: accepting }
    }

    /// Ends all faults: silent connections are reset, and new ones have none.
    pub(crate) fn heal(&self) {
        self.healed.send_replace(true);
    }

    /// How many connections were cut.
    pub(crate) fn cuts(&self) -> usize {
        self.cuts.load(Ordering::Relaxed)
    }
}

async fn relay(
    mut client: TcpStream,
    server: SocketAddr,
    fault: Fault,
    cuts: Arc<AtomicUsize>,
    mut healed: watch::Receiver<bool>,
) {
    let Ok(mut server) = TcpStream::connect(server).await else { return };
    let cut = copy(&mut client, &mut server, fault, &cuts).await;
    if cut == Some(Cut::Silence) {
        // An error means that the hop is gone, and this connection with it.
        let _ = healed.wait_for(|healed| *healed).await;
    }
    if matches!(cut, Some(Cut::Silence | Cut::Reset)) {
        for stream in [&client, &server] {
            // The peer may have gone already.
            let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
        }
    }
}

/// Copies until both directions have ended, or until something else is to happen.
async fn copy(client: &mut TcpStream, server: &mut TcpStream, fault: Fault, cuts: &AtomicUsize) -> Option<Cut> {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let of = |toward| match fault {
        Fault::After(cut_toward, bytes, cut) if cut_toward == toward => Some((bytes, cut)),
        _ => None,
    };
    let delay = if let Fault::Delay(delay) = fault { delay } else { Duration::ZERO };
    let mut forth = std::pin::pin!(pump(from_client, to_server, delay, of(Toward::Server), cuts));
    let mut back = std::pin::pin!(pump(from_server, to_client, delay, of(Toward::Client), cuts));
    let first = tokio::select! {
        cut = &mut forth => (true, cut),
        cut = &mut back => (false, cut),
    };
    match first {
        (_, Some(cut)) => Some(cut),
        (true, None) => back.await,
        (false, None) => forth.await,
    }
}

/// Copies one direction. A connection that fails is passed on as a reset.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    delay: Duration,
    cut: Option<(usize, Cut)>,
    cuts: &AtomicUsize,
) -> Option<Cut> {
    let mut left = cut.map(|(bytes, _)| bytes);
    let mut buffer = [0; 4096];
    loop {
        if let (Some(0), Some((_, cut))) = (left, cut) {
            cuts.fetch_add(1, Ordering::Relaxed);
            if cut != Cut::HalfClose {
                return Some(cut);
            }
            let _ = to.shutdown().await;
            return match tokio::io::copy(&mut from, &mut tokio::io::sink()).await {
                Ok(_) => None,
                Err(_) => Some(Cut::Reset),
            };
        }
        let room = left.unwrap_or(buffer.len()).min(buffer.len());
        let Ok(length) = from.read(&mut buffer[..room]).await else { return Some(Cut::Reset) };
        if length == 0 {
            let _ = to.shutdown().await;
            return None;
        }
        tokio::time::sleep(delay).await;
        if to.write_all(&buffer[..length]).await.is_err() {
            return Some(Cut::Reset);
        }
        left = left.map(|left| left - length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends ten bytes through a hop to a server that echoes them; returns what arrived and how it ended.
    async fn echoed(fault: Fault) -> (usize, std::io::Result<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let hop = FaultyHop::start(listener.local_addr().unwrap(), move || fault);
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        });
        let mut client = TcpStream::connect(hop.addr).await.unwrap();
        client.write_all(b"0123456789").await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        let limit = if matches!(fault, Fault::After(_, _, Cut::Silence)) { 100 } else { 10_000 };
        let ended = tokio::time::timeout(Duration::from_millis(limit), client.read_to_end(&mut received)).await;
        (received.len(), ended.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())))
    }

    #[tokio::test]
    async fn a_connection_ends_as_its_script_says() {
        use std::io::ErrorKind::{ConnectionReset, TimedOut};
        for (fault, expected, error) in [
            (Fault::None, 10, None),
            (Fault::Delay(Duration::from_millis(1)), 10, None),
            (Fault::After(Toward::Client, 4, Cut::Close), 4, None),
            (Fault::After(Toward::Server, 4, Cut::HalfClose), 4, None),
            (Fault::After(Toward::Client, 0, Cut::Reset), 0, Some(ConnectionReset)),
            (Fault::After(Toward::Client, 3, Cut::Silence), 3, Some(TimedOut)),
        ] {
            let (received, ended) = echoed(fault).await;
            assert_eq!((received, ended.err().map(|error| error.kind())), (expected, error), "{fault:?}");
        }
    }
}
