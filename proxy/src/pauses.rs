//! Pauses between attempts of the control plane's clients, and of those of other services: they double up to a limit.
//! Each of them is between half of that and the whole, so that proxies that failed together do not return together.
//!
//! Requests of applications have the pauses of their policy instead ([`crate::request::backoff`]).

use std::time::Duration;

use rand::RngExt as _;

/// First and longest pause between attempts: Linkerd's for control-plane clients.
const CONTROL_PLANE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// The pauses of one client.
#[derive(Debug)]
pub(crate) struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    /// From 100 ms to 10 s.
    pub(crate) fn new() -> Self {
        Self::between(CONTROL_PLANE.0, CONTROL_PLANE.1)
    }

    /// Starts with the pause `first`.
    pub(crate) fn between(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// Starts anew after a success.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.next.mul_f64(rand::rng().random_range(0.5..=1.0));
        self.next = (self.next * 2).min(self.longest);
        pause
    }

    /// Waits for the next pause.
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = CONTROL_PLANE.0;
    const LONGEST: Duration = CONTROL_PLANE.1;

    #[test]
    fn pauses_grow_to_their_limit_and_begin_anew() {
        let mut pauses = Pauses::new();
        for _ in 0..20 {
            pauses.next();
        }
        assert_eq!(pauses.next, LONGEST);
        pauses.reset();
        assert_eq!(pauses.next, FIRST);
    }

    #[test]
    fn clients_that_fail_together_do_not_return_together() {
        let pauses: Vec<Duration> = (0..1000).map(|_| Pauses::new().next()).collect();
        let early = pauses.iter().filter(|pause| **pause < FIRST * 3 / 4).count();
        assert!((300..700).contains(&early), "{early}");
        assert!(pauses.iter().all(|pause| FIRST / 2 <= *pause && *pause <= FIRST));
    }
}
