//! Plain TCP for measuring the cost of interception only: the server's answers are as short as possible.
//!
//! The client's first byte selects the operation:
//!
//! ```text
//! C  connect    the server answers one byte and closes
//! P  ping-pong  everything comes back as it went
//! B  bulk       the server reads to the end, then answers how many bytes it read (8 bytes, big endian)
//! ```

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// Size of a ping-pong message in bytes, as in the issue that asks for the number.
pub const PING_BYTES: usize = 64;
/// Size of one bulk write in bytes: what common servers pass to the kernel at once.
const CHUNK_BYTES: usize = 64 * 1024;
/// The longest time any single operation of a measurement may take.
const OPERATION_LIMIT: Duration = Duration::from_secs(5);
/// Histogram precision: three significant digits.
const DIGITS: u8 = 3;
/// Upper bound of the histograms: twice the operation limit, in nanoseconds.
const LONGEST_NS: u64 = 10_000_000_000;

/// Amount to measure. Each phase ends when its count or the time limit is reached, whichever comes first.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Connections to open one after the other, for their latency.
    pub connects: u64,
    /// Connections to open over `concurrency` tasks, for their rate.
    pub burst: u64,
    /// Tasks that open connections at once in the burst.
    pub concurrency: usize,
    /// Round trips of [`PING_BYTES`] on one connection.
    pub pings: u64,
    /// Bytes to send on one connection.
    pub bulk_bytes: u64,
    /// The longest time for each phase.
    pub limit: Duration,
}

/// Measurements from the client's side.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Connections opened in all phases.
    pub connections: u64,
    /// Time of `connect` alone, microseconds.
    pub connect_us: Quantiles,
    /// Time from `connect` to the first byte of the server, microseconds: the whole path is established.
    pub first_byte_us: Quantiles,
    /// New connections per second in the burst, each with one byte back from the server.
    pub connections_per_second: f64,
    /// Time of one round trip of 64 bytes on an open connection, microseconds.
    pub round_trip_us: Quantiles,
    /// One bulk stream, gigabits of payload per second.
    pub bulk_gbit_per_second: f64,
}

/// Two points of a distribution.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Quantiles {
    /// Half are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
}

/// Serves measurements until the caller drops the future.
pub async fn serve(listener: TcpListener) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(async move {
            // The client disconnected, which is not an error.
            let _ = serve_connection(stream).await;
        });
    }
}

async fn serve_connection(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match stream.read_u8().await? {
        b'C' => stream.write_all(b"c").await,
        b'P' => {
            let mut buffer = [0; 4096];
            loop {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    return Ok(());
                }
                stream.write_all(&buffer[..count]).await?;
            }
        }
        b'B' => {
            let mut buffer = vec![0; CHUNK_BYTES];
            let mut total = 0_u64;
            loop {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    return stream.write_all(&total.to_be_bytes()).await;
                }
                total += count as u64;
            }
        }
        other => Err(io::Error::new(io::ErrorKind::InvalidData, format!("unknown wish {other:#04x}"))),
    }
}

/// Measures everything in the plan against a server of [`serve`], phase by phase.
///
/// # Errors
/// The first connection, read or write that fails or takes longer than five seconds: a measurement with failures in it
/// would compare nothing.
pub async fn measure(target: SocketAddr, plan: Plan) -> io::Result<Measured> {
    let (mut connect, mut first_byte, mut round_trip) = (histogram(), histogram(), histogram());
    let mut measured = Measured::default();

    let phase = Instant::now();
    for _ in 0..plan.connects {
        let (connected, answered) = open_once(target).await?;
        connect.saturating_record(nanoseconds(connected));
        first_byte.saturating_record(nanoseconds(answered));
        measured.connections += 1;
        if phase.elapsed() > plan.limit {
            break;
        }
    }
    measured.connect_us = quantiles(&connect);
    measured.first_byte_us = quantiles(&first_byte);

    let (opened, rate) = burst(target, plan).await?;
    measured.connections += opened;
    measured.connections_per_second = rate;

    if plan.pings > 0 {
        let mut stream = wish(target, b'P').await?;
        measured.connections += 1;
        let phase = Instant::now();
        for _ in 0..plan.pings {
            round_trip.saturating_record(nanoseconds(limited(ping(&mut stream)).await?));
            if phase.elapsed() > plan.limit {
                break;
            }
        }
    }
    measured.round_trip_us = quantiles(&round_trip);

    if plan.bulk_bytes > 0 {
        measured.bulk_gbit_per_second = bulk(target, plan).await?;
        measured.connections += 1;
    }
    Ok(measured)
}

/// Opens a connection, waits for the server's byte and its end: (time of connect, time to the byte).
async fn open_once(target: SocketAddr) -> io::Result<(Duration, Duration)> {
    limited(async {
        let started = Instant::now();
        let mut stream = TcpStream::connect(target).await?;
        let connected = started.elapsed();
        stream.set_nodelay(true)?;
        stream.write_all(b"C").await?;
        stream.read_u8().await?;
        Ok((connected, started.elapsed()))
    })
    .await
}

async fn burst(target: SocketAddr, plan: Plan) -> io::Result<(u64, f64)> {
    if plan.burst == 0 {
        return Ok((0, 0.0));
    }
    let tickets = Arc::new(AtomicU64::new(plan.burst));
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..plan.concurrency.max(1) {
        let tickets = Arc::clone(&tickets);
        tasks.spawn(async move {
            let mut opened = 0_u64;
            while started.elapsed() < plan.limit
                && tickets.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            {
                open_once(target).await?;
                opened += 1;
            }
            io::Result::Ok(opened)
        });
    }
    let mut opened = 0;
    while let Some(task) = tasks.join_next().await {
        opened += task.map_err(io::Error::other)??;
    }
    Ok((opened, opened as f64 / started.elapsed().as_secs_f64()))
}

async fn ping(stream: &mut TcpStream) -> io::Result<Duration> {
    let mut message = [7; PING_BYTES];
    let started = Instant::now();
    stream.write_all(&message).await?;
    stream.read_exact(&mut message).await?;
    Ok(started.elapsed())
}

async fn bulk(target: SocketAddr, plan: Plan) -> io::Result<f64> {
    let mut stream = wish(target, b'B').await?;
    let chunk = vec![7; CHUNK_BYTES];
    let started = Instant::now();
    let mut sent = 0_u64;
    while sent < plan.bulk_bytes && started.elapsed() < plan.limit {
        limited(stream.write_all(&chunk)).await?;
        sent += chunk.len() as u64;
    }
    stream.shutdown().await?;
    let received = limited(stream.read_u64()).await?;
    if received != sent {
        return Err(io::Error::other(format!("the server read {received} of {sent} bytes")));
    }
    Ok(sent as f64 * 8.0 / started.elapsed().as_secs_f64() / 1e9)
}

async fn wish(target: SocketAddr, what: u8) -> io::Result<TcpStream> {
    limited(async {
        let mut stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        stream.write_u8(what).await?;
        Ok(stream)
    })
    .await
}

async fn limited<T>(operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(OPERATION_LIMIT, operation)
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 5 s")))
}

fn histogram() -> Histogram<u64> {
    // Fails only for more than five digits or an upper bound below two.
    Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).unwrap_or_else(|_| unreachable!("the bounds are in order"))
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn quantiles(histogram: &Histogram<u64>) -> Quantiles {
    let at = |quantile| (histogram.value_at_quantile(quantile) as f64 / 100.0).round() / 10.0;
    Quantiles { p50: at(0.5), p99: at(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn measures_every_phase_against_its_own_server() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        let server = tokio::spawn(serve(listener));
        let plan = Plan {
            connects: 20,
            burst: 20,
            concurrency: 4,
            pings: 50,
            bulk_bytes: 1 << 20,
            limit: Duration::from_secs(5),
        };
        let measured = measure(target, plan).await.unwrap();
        assert_eq!(measured.connections, 42);
        assert!(measured.connect_us.p50 > 0.0 && measured.connect_us.p50 <= measured.first_byte_us.p99);
        assert!(measured.connections_per_second > 0.0);
        assert!(measured.round_trip_us.p50 > 0.0);
        assert!(measured.bulk_gbit_per_second > 0.0);
        server.abort();
    }

    #[tokio::test]
    async fn reports_a_refused_connection_as_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        drop(listener);
        let plan =
            Plan { connects: 1, burst: 0, concurrency: 1, pings: 0, bulk_bytes: 0, limit: Duration::from_secs(5) };
        assert!(measure(target, plan).await.is_err());
    }
}
