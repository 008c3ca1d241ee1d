//! Waiting for something to become true, with a deadline, in place of sleeping and hoping.

use std::time::{Duration, Instant};

/// How often a condition is asked again: short against anything a person would notice, long against the cost of asking.
const INTERVAL: Duration = Duration::from_millis(25);

/// Asks until the answer is `Ok` and returns it, or panics with the last `Err` when the deadline has passed. The last
/// question is asked after the deadline, so that a slow question is not cut short.
///
/// # Panics
/// When the deadline passes: this is the assertion of a test.
pub async fn eventually<T, E: std::fmt::Display>(within: Duration, mut ask: impl AsyncFnMut() -> Result<T, E>) -> T {
    match until(within, &mut ask).await {
        Ok(answer) => answer,
        Err(error) => panic!("not within {within:?}: {error}"),
    }
}

/// As [`eventually`], for programs: the last `Err` is returned.
///
/// # Errors
/// The last answer, when the deadline has passed.
pub async fn until<T, E>(within: Duration, mut ask: impl AsyncFnMut() -> Result<T, E>) -> Result<T, E> {
    let started = Instant::now();
    loop {
        let late = started.elapsed() >= within;
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) if late => return Err(error),
            Err(_) => tokio::time::sleep(INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn returns_the_first_good_answer() {
        let mut asked = 0;
        let answer = eventually(Duration::from_secs(5), async || {
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
    }
}
