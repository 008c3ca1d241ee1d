//! How long one request or connection looks for an endpoint that takes it. Refuses to connect: the caller does, and
//! says how it went.

use std::time::Duration;

use tokio::time::Instant;

/// The search of one attempt. It begins with the attempt: what came before, such as discovery or other attempts, takes
/// no time from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search {
    /// Until when it waits for an endpoint.
    deadline: Instant,
    /// Whether the endpoint that it has found is its last.
    is_last: bool,
}

impl Search {
    /// A search that may wait for this long.
    pub(crate) fn begin(timeout: Duration) -> Self {
        Self { deadline: Instant::now() + timeout, is_last: false }
    }

    /// Until when it waits for an endpoint.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether it goes on after an endpoint that cannot be reached. One attempt to connect may take all of the time, so
    /// another endpoint is tried afterwards if it is available at once.
    pub(crate) fn goes_on(&mut self, is_available: impl FnOnce() -> bool) -> bool {
        if Instant::now() < self.deadline {
            return true;
        }
        !std::mem::replace(&mut self.is_last, true) && is_available()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_search_goes_on_until_its_time_is_over_and_to_one_more_endpoint() {
        let mut search = Search::begin(Duration::from_secs(3));
        advance(Duration::from_millis(2999)).await;
        for is_available in [false, true, false] {
            assert!(search.goes_on(|| is_available), "it may wait");
        }
        advance(Duration::from_millis(1)).await;
        let mut without = search;
        assert!(!without.goes_on(|| false));
        assert!(search.goes_on(|| true));
        assert!(!search.goes_on(|| true), "one endpoint more");
    }
}
