//! Listeners: binding them, one per worker, and accepting from them.
//!
//! Owns socket options of listeners and accepted connections, and the limit on open ones. Refuses to know the purpose
//! of a connection.

use std::{
    io,
    net::{SocketAddr, TcpListener as StdListener},
    num::NonZeroUsize,
    sync::Arc,
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::config::{Backlog, SocketConfig};

/// The most connections of one worker's listener at a time; further ones stay in the kernel's backlog.
pub(crate) const MAX_CONNECTIONS: usize = 100_000;
/// What a listener may have at least, however few files the process may open.
const MIN_CONNECTIONS: usize = 64;
/// A listener's connections, those of all workers together, are at most one in this many of the process's open files.
/// With a connection to the application for each, the inbound side leaves half of the files to the outbound side, the
/// control plane and the admin server, which the kubelet probes.
const PART_OF_FILES: usize = 4;

/// Pause of accepting when the process has run out of file descriptors.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// One worker's listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: TcpListener,
    options: SocketConfig,
    /// The most connections at a time.
    limit: usize,
    permits: Arc<Semaphore>,
}

/// An accepted connection. Dropping it frees its permit.
#[derive(Debug)]
pub(crate) struct Accepted {
    /// The socket, with its options set.
    pub(crate) stream: TcpStream,
    /// Address and port of the client.
    pub(crate) peer: SocketAddr,
    /// Held as long as the connection lives.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// Binds `count` sockets to one address, so that the kernel spreads connections over workers.
///
/// # Errors
/// When the address is in use or not of this host.
pub(crate) fn bind(addr: SocketAddr, count: usize) -> io::Result<Vec<StdListener>> {
    bind_with(addr, count, Backlog::default())
}

/// The same with another backlog, which the kernel limits to `net.core.somaxconn`.
///
/// # Errors
/// As of [`bind`].
pub(crate) fn bind_with(addr: SocketAddr, count: usize, backlog: Backlog) -> io::Result<Vec<StdListener>> {
    let first = bind_one(addr, count > 1, backlog)?;
    let bound = first.local_addr()?;
    let mut listeners = vec![first];
    for _ in 1..count {
        listeners.push(bind_one(bound, true, backlog)?);
    }
    Ok(listeners)
}

/// The most connections of a listener, where the process may open `open_files` (`None`: any number of them) and there
/// are `workers` with a listener each.
pub(crate) fn connection_limit(open_files: Option<u64>, workers: NonZeroUsize) -> usize {
    let files = open_files.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    (files / PART_OF_FILES / workers).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}

fn bind_one(addr: SocketAddr, shared: bool, backlog: Backlog) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if shared {
        socket.set_reuse_port(true)?;
    }
    if addr.is_ipv6() {
        // [::] serves both families; a specific address serves its own.
        socket.set_only_v6(!addr.ip().is_unspecified())?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(backlog.0)?;
    Ok(socket.into())
}

impl Listener {
    /// Registers a bound socket with the current runtime.
    pub(crate) fn new(listener: StdListener, options: SocketConfig) -> io::Result<Self> {
        Ok(Self {
            listener: TcpListener::from_std(listener)?,
            options,
            limit: MAX_CONNECTIONS,
            permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        })
    }

    /// The same with at most `limit` connections at a time.
    pub(crate) fn limited(self, limit: usize) -> Self {
        Self { limit, permits: Arc::new(Semaphore::new(limit)), ..self }
    }

    /// The most connections at a time.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// The next connection. Failures of single connections are logged and skipped.
    pub(crate) async fn accept(&self) -> Accepted {
        loop {
            // The semaphore is never closed, so this cannot happen.
            let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
                return std::future::pending().await;
            };
            match self.listener.accept().await {
                Ok((stream, peer)) => match set_options(&stream, self.options) {
                    Ok(()) => return Accepted { stream, peer, permit },
                    Err(error) => {
                        tracing::debug!(%error, src.addr = %peer, "connection was gone before its options were set");
                    }
                },
                Err(error) if is_of_connection(&error) => {
                    tracing::debug!(%error, "connection was gone before it was accepted");
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections, pausing: are file descriptors exhausted?");
                    tokio::time::sleep(EXHAUSTED_PAUSE).await;
                }
            }
        }
    }
}

fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

/// Disables Nagle's algorithm and sets keepalive and user timeout.
pub(crate) fn set_options(stream: &TcpStream, options: SocketConfig) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    if let Some(idle) = options.keepalive {
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(idle))?;
    }
    if options.user_timeout.is_some() {
        socket.set_tcp_user_timeout(options.user_timeout)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::pin, task::Poll};

    use super::*;
    use crate::testing::{SOCKET_OPTIONS, socket_options};

    #[tokio::test]
    async fn workers_share_one_address() {
        let listeners = bind("127.0.0.1:0".parse().unwrap(), 2).unwrap();
        assert_eq!(listeners[0].local_addr().unwrap(), listeners[1].local_addr().unwrap());
    }

    #[tokio::test]
    async fn accepted_connections_have_their_options() {
        let bound = bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
        let addr = bound.local_addr().unwrap();
        let listener = Listener::new(bound, SOCKET_OPTIONS).unwrap();
        let client = TcpStream::connect(addr).await.unwrap();
        let accepted = listener.accept().await;
        assert_eq!(accepted.peer, client.local_addr().unwrap());
        assert!(accepted.stream.nodelay().unwrap());
        assert_eq!(socket_options(&accepted.stream), SOCKET_OPTIONS);
    }

    #[test]
    fn a_listener_has_a_part_of_the_files_that_the_process_may_open() {
        for (open_files, workers, expected) in [
            (None, 1, MAX_CONNECTIONS),
            (Some(u64::MAX), 1, MAX_CONNECTIONS),
            (Some(1 << 20), 1, MAX_CONNECTIONS),
            (Some(1 << 20), 4, 65_536),
            (Some(65_536), 1, 16_384),
            (Some(65_536), 2, 8192),
            (Some(1024), 1, 256),
            (Some(1024), 64, MIN_CONNECTIONS),
            (Some(0), 1, MIN_CONNECTIONS),
        ] {
            let limit = connection_limit(open_files, NonZeroUsize::new(workers).unwrap());
            assert_eq!(limit, expected, "{open_files:?} files, {workers} workers");
        }
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_wait_until_another_one_ends() {
        let bound = bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
        let addr = bound.local_addr().unwrap();
        let listener = Listener::new(bound, SocketConfig::default()).unwrap().limited(1);
        let _first = TcpStream::connect(addr).await.unwrap();
        let second = TcpStream::connect(addr).await.unwrap();
        let accepted = listener.accept().await;
        let mut accepting = pin!(listener.accept());
        for _ in 0..100 {
            let waits = poll_fn(|cx| Poll::Ready(accepting.as_mut().poll(cx).is_pending())).await;
            assert!(waits);
            tokio::task::yield_now().await;
        }
        drop(accepted);
        assert_eq!(accepting.await.peer, second.local_addr().unwrap());
    }

    #[test]
    fn the_backlog_is_that_of_the_settings() {
        let listener = bind_with("127.0.0.1:0".parse().unwrap(), 1, Backlog(1)).unwrap().remove(0);
        let addr = listener.local_addr().unwrap();
        // The kernel lets one more wait than the backlog says, and drops the handshakes of others.
        let connect = |_| std::net::TcpStream::connect_timeout(&addr, Duration::from_millis(300)).ok();
        let waiting: Vec<_> = (0..4).filter_map(connect).collect();
        assert!((1..=2).contains(&waiting.len()), "{waiting:?}");
    }

    #[test]
    fn a_taken_address_is_an_error() {
        let first = bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
        assert!(bind(first.local_addr().unwrap(), 1).is_err());
    }
}
