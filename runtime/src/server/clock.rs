//! How long a connection has waited for its peer, which is what the deadlines for a peer count.
//!
//! The clock runs while everything that has arrived is taken: the socket is empty, and every request has had its turn.
//! When this process is late, because all clients come at once or the processors are busy with other work, the clock
//! stands. Otherwise the server would close connections of clients that did everything right, and their retries would
//! delay the process further. A client that sends little by little gains nothing, because what was counted stays.

use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Requests of a connection that have not had their turn, above which nothing more is read from it: HTTP/2 keeps the
/// place of every frame that it ever had to keep at a time.
const UNTAKEN: usize = 64;

/// See above. It stands until [`PeerClock::start`].
#[derive(Debug, Default)]
pub(super) struct PeerClock(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Counted until the clock last stopped.
    total: Duration,
    /// Since when it runs.
    since: Option<Instant>,
    /// Whether a read is in progress, and nothing has arrived since it began.
    reading: bool,
    /// Whether the last read found nothing, and nothing has arrived since.
    drained: bool,
    /// Requests with something that has arrived and that they have not looked at.
    untaken: usize,
    /// The reader, while it waits for requests to be taken.
    reader: Option<Waker>,
}

impl PeerClock {
    /// Starts the clock before the first read: the peer begins.
    pub(super) fn start(&self) {
        self.change(|state| state.drained = true);
    }

    /// The time that was counted.
    pub(super) fn elapsed(&self) -> Duration {
        let state = self.0.lock();
        state.total + state.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// A read begins, unless too many requests have not had their turn: then the reader is woken later.
    pub(super) fn poll_read(&self, cx: &Context<'_>) -> Poll<()> {
        self.change(|state| {
            state.reading = state.untaken < UNTAKEN;
            if state.reading {
                return Poll::Ready(());
            }
            state.drained = false;
            state.reader = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    /// The read has ended; `empty` if it found nothing.
    pub(super) fn read(&self, empty: bool) {
        // What arrived while it was looked for came too late to be found.
        self.change(|state| state.drained = empty && std::mem::take(&mut state.reading));
    }

    /// The reader cannot read now.
    pub(super) fn paused(&self) {
        self.change(|state| state.drained = false);
    }

    fn arrived(&self) {
        self.change(|state| (state.reading, state.drained) = (false, false));
    }

    /// A request begins, or more of it has arrived.
    pub(super) fn request_arrived(&self) {
        self.change(|state| state.untaken += 1);
    }

    /// A request has taken what had arrived.
    pub(super) fn request_taken(&self) {
        let reader = self.change(|state| {
            state.untaken = state.untaken.saturating_sub(1);
            if state.untaken < UNTAKEN / 2 { state.reader.take() } else { None }
        });
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.0.lock();
        let result = change(&mut state);
        match (state.drained && state.untaken == 0, state.since) {
            (true, None) => state.since = Some(Instant::now()),
            (false, Some(since)) => {
                state.total += since.elapsed();
                state.since = None;
            }
            _ => {}
        }
        result
    }
}

/// Wakes the reader of a connection, and stops its clock at once: the reader's turn may be far.
#[derive(Debug)]
pub(super) struct SocketArrival {
    clock: Arc<PeerClock>,
    reader: Mutex<Option<Waker>>,
}

impl SocketArrival {
    pub(super) fn new(clock: Arc<PeerClock>) -> Arc<Self> {
        Arc::new(Self { clock, reader: Mutex::default() })
    }

    /// Notes who reads.
    pub(super) fn note(&self, reader: &Waker) {
        let mut noted = self.reader.lock();
        if !noted.as_ref().is_some_and(|noted| noted.will_wake(reader)) {
            *noted = Some(reader.clone());
        }
    }
}

impl Wake for SocketArrival {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.clock.arrived();
        let reader = self.reader.lock().clone();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn counted(clock: &PeerClock) -> u64 {
        let before = clock.elapsed();
        tokio::time::advance(SECOND).await;
        (clock.elapsed() - before).as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn it_runs_while_the_peer_has_everything_to_do() {
        let clock = Arc::new(PeerClock::default());
        let noop = Context::from_waker(Waker::noop());
        assert_eq!(counted(&clock).await, 0, "nothing has begun");
        clock.start();
        assert_eq!(counted(&clock).await, 1);
        // Read to the end, until something arrives.
        assert!(clock.poll_read(&noop).is_ready());
        clock.read(true);
        assert_eq!(counted(&clock).await, 1);
        let arrival = SocketArrival::new(clock.clone());
        arrival.wake_by_ref();
        assert_eq!(counted(&clock).await, 0, "it has arrived and was not read");
        // A wake in the middle of a read.
        assert!(clock.poll_read(&noop).is_ready());
        arrival.wake_by_ref();
        clock.read(true);
        assert_eq!(counted(&clock).await, 0, "it arrived too late to be found");
        assert!(clock.poll_read(&noop).is_ready());
        clock.read(false);
        assert_eq!(counted(&clock).await, 0, "there may be more");
        assert!(clock.poll_read(&noop).is_ready());
        clock.read(true);
        clock.request_arrived();
        assert_eq!(counted(&clock).await, 0, "a request has not had its turn");
        clock.request_taken();
        assert_eq!(counted(&clock).await, 1);
        assert_eq!(clock.elapsed(), 3 * SECOND, "what was counted stays");
    }

    #[test]
    fn nothing_is_read_while_many_requests_wait_for_their_turn() {
        struct Woken(std::sync::atomic::AtomicBool);
        impl Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let (clock, woken) = (PeerClock::default(), Arc::new(Woken(false.into())));
        let waker = Waker::from(woken.clone());
        let cx = Context::from_waker(&waker);
        (1..UNTAKEN).for_each(|_| clock.request_arrived());
        assert!(clock.poll_read(&cx).is_ready());
        clock.request_arrived();
        assert!(clock.poll_read(&cx).is_pending());
        while !woken.0.load(std::sync::atomic::Ordering::Relaxed) {
            assert!(clock.0.lock().untaken > 0, "the reader is woken");
            clock.request_taken();
        }
        assert!(clock.poll_read(&cx).is_ready());
    }
}
