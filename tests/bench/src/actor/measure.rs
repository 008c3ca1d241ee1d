//! The measurements: the time of one system call, with client and server in one thread.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockRef, Socket, Type};

/// Timeout of one connect: a longer one counts as lost.
const CONNECTS_WITHIN: Duration = Duration::from_secs(5);
/// System calls that are timed together, because one takes little longer than reading the clock.
const BLOCK: u32 = 64;

/// Two points of a distribution, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nanoseconds {
    /// Half are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
}

/// Times of connections.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Connected {
    /// The client's `connect`.
    pub connect: Nanoseconds,
    /// `SO_ORIGINAL_DST` of the accepted socket, if requested.
    pub original: Nanoseconds,
}

/// Result of a flood.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Flooded {
    /// Connections accepted.
    pub connections: u64,
    /// Those whose original destination was not the dialled address.
    pub wrong: u64,
    /// Duration, seconds.
    pub seconds: f64,
}

impl Nanoseconds {
    /// Of these durations.
    pub fn of(mut nanoseconds: Vec<f64>) -> Self {
        nanoseconds.sort_unstable_by(f64::total_cmp);
        let at = |quantile: f64| {
            let index = (nanoseconds.len() as f64 * quantile) as usize;
            nanoseconds.get(index.min(nanoseconds.len().saturating_sub(1))).copied().unwrap_or_default()
        };
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

pub(super) fn connect(
    listener: &TcpListener,
    target: SocketAddr,
    count: u32,
    original: bool,
) -> anyhow::Result<Connected> {
    let (mut connects, mut originals) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let client = client(target)?;
        let started = Instant::now();
        client.connect(&target.into())?;
        connects.push(started.elapsed().as_nanos() as f64);
        let (accepted, _) = listener.accept()?;
        if original {
            let started = Instant::now();
            let answer = original_destination(&accepted, target);
            originals.push(started.elapsed().as_nanos() as f64);
            let answer = answer?;
            ensure!(answer == Some(target), "dialled {target}, the accepted socket says {answer:?}");
        }
    }
    Ok(Connected { connect: Nanoseconds::of(connects), original: Nanoseconds::of(originals) })
}

pub(super) fn flood(listener: &TcpListener, target: SocketAddr, time: Duration) -> anyhow::Result<Flooded> {
    let mut flooded = Flooded::default();
    let started = Instant::now();
    while started.elapsed() < time {
        let client = client(target)?;
        client.connect(&target.into())?;
        let (accepted, _) = listener.accept()?;
        flooded.connections += 1;
        flooded.wrong += u64::from(!matches!(original_destination(&accepted, target), Ok(Some(it)) if it == target));
    }
    flooded.seconds = started.elapsed().as_secs_f64();
    Ok(flooded)
}

pub(super) fn options(blocks: u32) -> anyhow::Result<Nanoseconds> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let mut times = Vec::new();
    for _ in 0..blocks {
        let started = Instant::now();
        for _ in 0..BLOCK {
            socket.r#type()?;
        }
        times.push(started.elapsed().as_nanos() as f64 / f64::from(BLOCK));
    }
    Ok(Nanoseconds::of(times))
}

/// A socket that is reset when it is closed, so that no state remains that would slow down the next ones.
fn client(target: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    socket.set_linger(Some(Duration::ZERO))?;
    // Limits `connect` without the system calls of a non-blocking one.
    socket.set_write_timeout(Some(CONNECTS_WITHIN))?;
    Ok(socket)
}

fn original_destination(accepted: &TcpStream, target: SocketAddr) -> io::Result<Option<SocketAddr>> {
    let socket = SockRef::from(accepted);
    let address = if target.is_ipv4() { socket.original_dst_v4()? } else { socket.original_dst_v6()? };
    Ok(address.as_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_to_itself_is_measured() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let connected = connect(&listener, target, 20, false).unwrap();
        assert!(connected.connect.p50 > 0.0 && connected.connect.p50 <= connected.connect.p99);
        assert!(options(10).unwrap().p50 > 0.0);
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let values = (1..=100).rev().map(f64::from).collect();
        assert_eq!(Nanoseconds::of(values), Nanoseconds { p50: 51.0, p99: 100.0 });
        assert_eq!(Nanoseconds::of(Vec::new()), Nanoseconds::default());
    }
}
