//! The open loop: requests at fixed times, whatever became of the ones before. Each connection has every n-th of them,
//! and a request that has to wait for its turn is as late as it is answered: that is the correction for coordinated
//! omission. Timers are the kernel's, because tokio's have a resolution of a millisecond.

use std::{net::SocketAddr, os::fd::OwnedFd, rc::Rc, time::Duration};

use anyhow::Context as _;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use tokio::{io::unix::AsyncFd, time::sleep};

use super::{Meter, PAUSE, http1::Connection};

/// Time for the connections to be opened.
const LEAD: Duration = Duration::from_millis(100);
const SECOND_NS: u64 = 1_000_000_000;

/// When which connection sends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// When the first request is due, on the monotonic clock.
    start_ns: u64,
    /// Between two requests of one connection.
    interval_ns: u64,
    /// Between two requests of all.
    step_ns: u64,
    warm_up_ns: u64,
    time_ns: u64,
}

impl Plan {
    pub(super) fn new(rate: u32, connections: u32, warm_up: Duration, time: Duration) -> anyhow::Result<Self> {
        let step_ns = SECOND_NS.checked_div(u64::from(rate)).context("a rate above zero")?;
        Ok(Self {
            start_ns: now_ns() + u64::try_from(LEAD.as_nanos())?,
            interval_ns: step_ns * u64::from(connections),
            step_ns,
            warm_up_ns: u64::try_from(warm_up.as_nanos())?,
            // What the connections' opening took is at the end, after the time that counts.
            time_ns: u64::try_from(time.as_nanos())?,
        })
    }

    /// When a connection's n-th request is due; none after the end.
    fn due(&self, connection: u32, nth: u64) -> Option<u64> {
        let after = u64::from(connection) * self.step_ns + nth * self.interval_ns;
        (after < self.warm_up_ns + self.time_ns).then_some(self.start_ns + after)
    }

    fn counts(&self, due: u64) -> bool {
        due >= self.start_ns + self.warm_up_ns
    }
}

/// The requests of one connection.
pub(super) async fn keep_to(plan: Plan, number: u32, target: SocketAddr, meter: Rc<Meter>) {
    if let Err(error) = follow(plan, number, target, &meter).await {
        meter.failed(&error);
    }
}

async fn follow(plan: Plan, number: u32, target: SocketAddr, meter: &Meter) -> anyhow::Result<()> {
    let mut connection = Some(Connection::open(target).await?);
    let timer = timer(plan.due(number, 0).context("a plan without requests")?, plan.interval_ns)?;
    let (mut nth, mut allowed) = (0, 0);
    while let Some(due) = plan.due(number, nth) {
        while allowed <= nth {
            allowed += expirations(&timer).await?;
        }
        nth += 1;
        let exchanged = async {
            let mut open = match connection.take() {
                Some(open) => open,
                None => Connection::open(target).await?,
            };
            open.exchange().await?;
            anyhow::Ok(open)
        };
        match exchanged.await {
            Ok(open) => {
                connection = Some(open);
                if plan.counts(due) {
                    meter.record(now_ns().saturating_sub(due));
                }
            }
            Err(error) => {
                meter.failed(&error);
                sleep(PAUSE).await;
            }
        }
    }
    Ok(())
}

fn timer(first_ns: u64, interval_ns: u64) -> anyhow::Result<AsyncFd<OwnedFd>> {
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
    let times = Itimerspec { it_interval: timespec(interval_ns)?, it_value: timespec(first_ns)? };
    timerfd_settime(&timer, TimerfdTimerFlags::ABSTIME, &times)?;
    #[expect(deprecated, reason = "its replacement is unsafe; an OwnedFd always returns the descriptor that it owns")]
    let timer = AsyncFd::new(timer)?;
    Ok(timer)
}

/// How often the timer went off since it was last asked.
async fn expirations(timer: &AsyncFd<OwnedFd>) -> anyhow::Result<u64> {
    loop {
        let mut ready = timer.readable().await?;
        let mut count = [0; 8];
        if let Ok(read) = ready.try_io(|timer| Ok(rustix::io::read(timer, &mut count)?)) {
            read.context("read a timer")?;
            return Ok(u64::from_ne_bytes(count));
        }
    }
}

fn timespec(nanoseconds: u64) -> anyhow::Result<Timespec> {
    let seconds = i64::try_from(nanoseconds / SECOND_NS)?;
    Ok(Timespec { tv_sec: seconds, tv_nsec: i64::try_from(nanoseconds % SECOND_NS)? })
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative.
    now.tv_sec.unsigned_abs() * SECOND_NS + now.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_as_many_requests_as_its_rate_says_evenly_spread() {
        let plan = Plan::new(1000, 16, Duration::from_secs(1), Duration::from_secs(2)).unwrap();
        let mut due: Vec<_> = (0..16).flat_map(|number| (0..).map_while(move |nth| plan.due(number, nth))).collect();
        due.sort_unstable();
        assert_eq!(due.len(), 3000);
        assert!(due.windows(2).all(|pair| pair[1] - pair[0] == 1_000_000));
        assert_eq!(due.iter().filter(|due| plan.counts(**due)).count(), 2000);
    }
}
