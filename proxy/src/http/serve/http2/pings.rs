//! Pings on a client's connection: whether it is alive while it is silent, and how much it sends in a round trip.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use ::h2::{Ping, PingPong, server};
use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep},
};

use crate::config::{Http2ServerConfig, Keepalive};

/// The largest window that follows the bandwidth, as in gRPC.
const MAX_WINDOW: u32 = 16 << 20;
/// The shortest and the longest time between two measurements.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// What a connection is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pong {
    /// Allow clients this many bytes.
    Window(u32),
    /// End: the client does not answer.
    Missing,
}

/// The pings of one connection.
pub(super) struct Pings {
    sender: PingPong,
    /// When the ping was sent whose answer is missing.
    sent: Option<Instant>,
    silence: Option<Silence>,
    bandwidth: Option<Bandwidth>,
}

/// The deadlines of a client that sends nothing.
struct Silence {
    keepalive: Keepalive,
    /// The bytes that had come when this was polled last, and when there were new ones.
    received: u64,
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

/// Sizes windows by what comes in a round trip: twice as much as came, if that nearly filled them and nothing was
/// faster. gRPC's algorithm.
struct Bandwidth {
    window: u32,
    /// The bytes that had come when the last measurement began, or ended.
    received: u64,
    /// Bytes per second.
    best: f64,
    /// Seconds, smoothed.
    round_trip: Option<f64>,
    pause: Duration,
    next: Instant,
}

impl Pings {
    /// `None` if the settings want none.
    pub(super) fn new<S: AsyncRead + AsyncWrite + Unpin>(
        config: &Http2ServerConfig,
        connection: &mut server::Connection<S, Bytes>,
    ) -> Option<Self> {
        let now = Instant::now();
        let silence = config.keepalive.map(|keepalive| Silence::new(keepalive, now));
        let bandwidth = config.adaptive_window.then(|| Bandwidth::new(config.stream_window, now));
        if silence.is_none() && bandwidth.is_none() {
            return None;
        }
        Some(Self { sender: connection.ping_pong()?, sent: None, silence, bandwidth })
    }

    /// `received` are the bytes that have come so far.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, received: u64) -> Poll<Pong> {
        let now = Instant::now();
        let mut window = None;
        if let Some(sent) = self.sent
            && let Poll::Ready(answer) = self.sender.poll_pong(cx)
        {
            self.sent = None;
            if let (Some(bandwidth), Ok(_)) = (&mut self.bandwidth, answer) {
                window = bandwidth.measured(received, now - sent, now);
            }
        }
        let is_silent = self.silence.as_mut().map(|silence| silence.poll(cx, received, now, self.sent));
        if is_silent == Some(Poll::Ready(())) && self.sent.is_some() {
            return Poll::Ready(Pong::Missing);
        }
        let is_due = self.bandwidth.as_ref().is_some_and(|bandwidth| bandwidth.is_due(received, now));
        if self.sent.is_none() && (is_due || is_silent == Some(Poll::Ready(()))) {
            // An error means that the connection has ended, which it says itself.
            if self.sender.send_ping(Ping::opaque()).is_ok() {
                self.sent = Some(now);
                if let Some(bandwidth) = &mut self.bandwidth {
                    bandwidth.received = received;
                }
                // Both ask to be polled again.
                let _ = self.sender.poll_pong(cx);
                if let Some(silence) = &mut self.silence {
                    let _ = silence.poll(cx, received, now, self.sent);
                }
            }
        }
        window.map_or(Poll::Pending, |bytes| Poll::Ready(Pong::Window(bytes)))
    }
}

impl Silence {
    fn new(keepalive: Keepalive, now: Instant) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(now + keepalive.interval));
        Self { keepalive, received: 0, since: now, timer }
    }

    /// Ready when a ping is due or, if one was `sent`, its answer.
    fn poll(&mut self, cx: &mut Context<'_>, received: u64, now: Instant, sent: Option<Instant>) -> Poll<()> {
        if received != self.received {
            (self.received, self.since) = (received, now);
        }
        let due = match sent {
            // Whatever comes after a ping is a sign of life, too.
            Some(sent) => sent.max(self.since) + self.keepalive.timeout,
            None => self.since + self.keepalive.interval,
        };
        if self.timer.deadline() != due {
            self.timer.as_mut().reset(due);
        }
        self.timer.as_mut().poll(cx)
    }
}

impl Bandwidth {
    fn new(window: u32, now: Instant) -> Self {
        Self { window, received: 0, best: 0.0, round_trip: None, pause: PAUSE.0, next: now }
    }

    fn is_due(&self, received: u64, now: Instant) -> bool {
        received > self.received && now >= self.next && self.window < MAX_WINDOW
    }

    /// A ping was answered; returns a new window.
    fn measured(&mut self, received: u64, round_trip: Duration, now: Instant) -> Option<u32> {
        let bytes = received - self.received;
        self.received = received;
        if self.window >= MAX_WINDOW {
            return None;
        }
        let round_trip = round_trip.as_secs_f64().max(1e-6);
        let smoothed = self.round_trip.map_or(round_trip, |known| known + (round_trip - known) / 8.0);
        self.round_trip = Some(smoothed);
        let speed = bytes as f64 / (1.5 * smoothed);
        let is_full = bytes >= u64::from(self.window) * 2 / 3;
        let grows = is_full && speed >= self.best;
        self.best = self.best.max(speed);
        if grows {
            self.window = u32::try_from(bytes * 2).map_or(MAX_WINDOW, |bytes| bytes.clamp(self.window, MAX_WINDOW));
        }
        self.pause = if grows { PAUSE.0 } else { (2 * self.pause).min(PAUSE.1) };
        self.next = now + self.pause;
        grows.then_some(self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(20);

    #[test]
    fn a_window_doubles_what_came_in_a_round_trip_while_that_fills_it_and_no_further_than_its_bound() {
        let mut now = Instant::now();
        let mut bandwidth = Bandwidth::new(65_535, now);
        let mut received = 0;
        let mut windows = Vec::new();
        while windows.last() != Some(&MAX_WINDOW) {
            assert!(bandwidth.is_due(received + 1, now));
            received += u64::from(bandwidth.window);
            windows.push(bandwidth.measured(received, ROUND_TRIP, now).unwrap());
            now = bandwidth.next;
        }
        assert_eq!(windows[..3], [131_070, 262_140, 524_280]);
        assert!(!bandwidth.is_due(received + 1, now), "there is nothing to find out any more");
    }

    #[test]
    fn a_window_that_is_not_filled_stays_and_is_measured_ever_less_often() {
        let mut now = Instant::now();
        let mut bandwidth = Bandwidth::new(65_535, now);
        let mut pauses = Vec::new();
        for part in 1..=9 {
            assert_eq!(bandwidth.measured(part * 1000, ROUND_TRIP, now), None);
            pauses.push(bandwidth.next - now);
            assert!(!bandwidth.is_due(u64::MAX, now));
            now = bandwidth.next;
            assert!(bandwidth.is_due(u64::MAX, now) && !bandwidth.is_due(part * 1000, now), "without bytes, no ping");
        }
        assert_eq!((pauses[0], pauses[8]), (Duration::from_millis(200), PAUSE.1));
    }

    #[test]
    fn a_window_that_the_settings_make_larger_than_the_bound_stays() {
        let now = Instant::now();
        let mut bandwidth = Bandwidth::new(2 * MAX_WINDOW, now);
        // The answer to a ping that was sent because the client was silent.
        assert_eq!(bandwidth.measured(2 * u64::from(MAX_WINDOW), ROUND_TRIP, now), None);
    }

    #[test]
    fn a_slower_connection_gets_no_larger_window() {
        let now = Instant::now();
        let mut bandwidth = Bandwidth::new(65_535, now);
        assert_eq!(bandwidth.measured(65_535, ROUND_TRIP, now), Some(131_070));
        assert_eq!(bandwidth.measured(65_535 + 131_070, 20 * ROUND_TRIP, now), None);
    }
}
