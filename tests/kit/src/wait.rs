//! Waits for a condition with a deadline, instead of sleeping.
//!
//! [`eventually`] and [`until`] are for asynchronous callers, [`blocking`] has the same for the others. The first polls
//! are milliseconds apart, later ones further: early results are seen early, and waiting costs little. Where a poll
//! itself costs much, as one that starts a program does, [`Polling`] has the pauses begin longer.

use std::{
    fmt::Display,
    sync::LazyLock,
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;

/// Pause after the first poll.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// Short for a person, long compared with the cost of a poll.
const LONGEST_PAUSE: Duration = Duration::from_millis(25);
/// What [`patience`] is without a setting: a machine that runs several suites at once stalls a process for seconds.
const PATIENCE_SECONDS: u64 = 30;

static PATIENCE: LazyLock<Duration> = LazyLock::new(|| {
    let seconds = std::env::var("WEFT_TEST_PATIENCE_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(PATIENCE_SECONDS))
});

/// How long something is polled for, and how often. A [`Duration`] alone is a time limit with pauses from 1 to 25 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    within: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Polling {
    /// As long as this, with pauses of this length. For polls that cost more than the default's pauses.
    #[must_use]
    pub fn every(pause: Duration, within: Duration) -> Self {
        Self { within, shortest: pause, longest: pause }
    }
}

impl From<Duration> for Polling {
    fn from(within: Duration) -> Self {
        Self { within, shortest: SHORTEST_PAUSE, longest: LONGEST_PAUSE }
    }
}

/// For callers without their own runtime. Lives as long as the process, so that no task on it ends early.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Runtime::new().unwrap_or_else(|error| panic!("no runtime for the tests: {error}")));

/// Waits for a future on a thread that may block.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.block_on(future)
}

/// The timeout for anything that should happen at once: half a minute, or `WEFT_TEST_PATIENCE_SECONDS` on an emulated
/// machine, where the kernel's verifier alone may take a minute.
pub fn patience() -> Duration {
    *PATIENCE
}

/// Polls until the answer is `Ok` and returns it. The last poll starts after the deadline, so that a slow poll is not
/// cut short.
///
/// # Panics
/// After the deadline, with `what` and the last `Err`: this is the assertion of a test.
pub async fn eventually<T, E: Display>(
    what: &str,
    polling: impl Into<Polling>,
    mut ask: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let polling = polling.into();
    let answer = until(polling, &mut ask).await;
    answer.unwrap_or_else(|error| panic!("{what}: not within {:?}: {error}", polling.within))
}

/// As [`eventually`], for programs: the last `Err` is returned.
///
/// # Errors
/// The last error, after the deadline.
pub async fn until<T, E>(polling: impl Into<Polling>, mut ask: impl AsyncFnMut() -> Result<T, E>) -> Result<T, E> {
    let mut pauses = Pauses::new(polling.into());
    loop {
        let pause = pauses.next();
        match (ask().await, pause) {
            (Ok(answer), _) => return Ok(answer),
            (Err(error), None) => return Err(error),
            (Err(_), Some(pause)) => tokio::time::sleep(pause).await,
        }
    }
}

/// The same for callers that may block.
pub mod blocking {
    use super::{Display, Pauses, Polling};

    /// As [`super::eventually`].
    ///
    /// # Panics
    /// As there.
    pub fn eventually<T, E: Display>(what: &str, polling: impl Into<Polling>, ask: impl FnMut() -> Result<T, E>) -> T {
        let polling = polling.into();
        until(polling, ask).unwrap_or_else(|error| panic!("{what}: not within {:?}: {error}", polling.within))
    }

    /// As [`super::until`].
    ///
    /// # Errors
    /// As there.
    pub fn until<T, E>(polling: impl Into<Polling>, mut ask: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        let mut pauses = Pauses::new(polling.into());
        loop {
            let pause = pauses.next();
            match (ask(), pause) {
                (Ok(answer), _) => return Ok(answer),
                (Err(error), None) => return Err(error),
                (Err(_), Some(pause)) => std::thread::sleep(pause),
            }
        }
    }
}

/// The pauses between polls, each twice as long as the one before, up to a limit; none after the deadline.
struct Pauses {
    started: Instant,
    polling: Polling,
    pause: Duration,
}

impl Pauses {
    fn new(polling: Polling) -> Self {
        Self { started: Instant::now(), polling, pause: polling.shortest }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.pause;
        self.pause = (2 * pause).min(self.polling.longest);
        (self.started.elapsed() < self.polling.within).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn returns_the_first_good_answer() {
        let mut asked = 0;
        let answer = eventually("the third answer", Duration::from_secs(5), async || {
            asked += 1;
            if asked == 3 { Ok(asked) } else { Err("not yet") }
        })
        .await;
        assert_eq!(answer, 3);
    }

    #[tokio::test]
    async fn returns_the_last_refusal_when_time_is_up() {
        let answer: Result<(), _> = until(Duration::from_millis(60), async || Err("never")).await;
        assert_eq!(answer, Err("never"));
        assert_eq!(blocking::until(Duration::from_millis(60), || Err::<(), _>("never")), Err("never"));
    }

    #[test]
    fn asks_once_more_after_the_deadline() {
        let mut asked = 0;
        let answer = blocking::until(Duration::ZERO, || {
            asked += 1;
            Ok::<_, ()>(asked)
        });
        assert_eq!(answer, Ok(1));
    }

    #[test]
    fn pauses_grow_to_a_limit_unless_the_caller_chooses_one() {
        let pauses = |polling| Pauses::new(polling).take(7).map(|pause| pause.as_millis()).collect::<Vec<_>>();
        assert_eq!(pauses(patience().into()), [1, 2, 4, 8, 16, 25, 25]);
        assert_eq!(pauses(Polling::every(Duration::from_millis(250), patience())), [250; 7]);
        assert_eq!(Pauses::new(Polling::every(Duration::from_millis(250), Duration::ZERO)).next(), None);
    }
}
