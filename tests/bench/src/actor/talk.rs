//! Clients and servers in threads, with counts of which server was reached: every server answers with its own byte.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

/// Data of clients: long enough to be detected, short enough for one segment.
const MESSAGE: &[u8; 64] = b"these bytes must not arrive anywhere but at the pod's own proxy.";
/// Timeout of one attempt.
const PATIENCE: Duration = Duration::from_millis(500);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// Counts of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// Connections accepted.
    pub connections: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// Counts of a client's answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    /// Attempts that have ended.
    pub attempts: u64,
    /// Answers by the server's byte.
    pub by: BTreeMap<char, u64>,
    /// Attempts that failed, by the error's kind.
    pub failed: BTreeMap<String, u64>,
}

/// Servers in threads, which share one count.
#[derive(Clone, Debug, Default)]
pub struct CountingServer(Arc<Mutex<Received>>);

/// A client in a thread; it runs until the process ends.
#[derive(Debug)]
pub(super) struct Dialling(Arc<Mutex<Answered>>);

impl CountingServer {
    pub(super) fn serve(&self, listener: TcpListener, byte: u8) -> io::Result<()> {
        let received = Arc::clone(&self.0);
        // Measuring processes accept by themselves.
        listener.set_nonblocking(false)?;
        thread::Builder::new().spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                let mut buffer = [0; MESSAGE.len()];
                // A silent client must not delay the others.
                let _ = stream.set_read_timeout(Some(PATIENCE));
                let count = stream.read(&mut buffer).unwrap_or(0);
                {
                    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
                    received.connections += 1;
                    received.bytes += count as u64;
                }
                let _ = stream.write_all(&[byte]);
            }
        })?;
        Ok(())
    }

    pub(super) fn received(&self) -> Received {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dialling {
    pub(super) fn start(target: SocketAddr) -> io::Result<Self> {
        let answered = Arc::new(Mutex::new(Answered::default()));
        let shared = Arc::clone(&answered);
        thread::Builder::new().spawn(move || {
            loop {
                let outcome = dial(target);
                {
                    let mut answered = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    answered.attempts += 1;
                    match outcome {
                        Ok(byte) => *answered.by.entry(char::from(byte)).or_default() += 1,
                        Err(error) => *answered.failed.entry(format!("{:?}", error.kind())).or_default() += 1,
                    }
                }
                thread::sleep(PAUSE);
            }
        })?;
        Ok(Self(answered))
    }

    pub(super) fn answered(&self) -> Answered {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn dial(target: SocketAddr) -> io::Result<u8> {
    let mut socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    // Thousands of connections must not leave thousands of TIME_WAIT sockets.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.connect_timeout(&target.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.write_all(MESSAGE)?;
    let mut answer = [0];
    socket.read_exact(&mut answer)?;
    Ok(answer[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_counts_what_it_hears_and_says_who_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let server = CountingServer::default();
        server.serve(listener, b'P').unwrap();
        assert_eq!(dial(target).unwrap(), b'P');
        assert_eq!(server.received(), Received { connections: 1, bytes: MESSAGE.len() as u64 });
    }
}
