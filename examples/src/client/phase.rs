//! What happens around a load while it runs, and which of its requests failed then: a load that outlives several
//! changes tells which of them cost a request.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use serde::{Deserialize, Serialize};

/// Maximum number of entries in a report; failures beyond are only counted.
const ENTRIES: usize = 128;

/// The name of the current phase, set by the caller that started the load and shared with its workers.
#[derive(Clone, Debug)]
pub struct Phase(Arc<Mutex<(String, Instant)>>);

impl Default for Phase {
    /// A load of which nothing is known.
    fn default() -> Self {
        Self(Arc::new(Mutex::new((String::new(), Instant::now()))))
    }
}

impl Phase {
    /// Begins the next phase.
    pub fn begin(&self, name: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (name.to_owned(), Instant::now());
    }

    /// The name of the phase, and the milliseconds since it began.
    pub(super) fn now(&self) -> (String, u64) {
        let phase = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (phase.0.clone(), u64::try_from(phase.1.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

/// Requests that failed alike in one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The phase in which they were sent; empty if none was named.
    pub phase: String,
    /// The error's text.
    pub error: String,
    /// The number of requests.
    pub count: u64,
    /// When the first of them was sent, from the beginning of the phase.
    pub first_ms: u64,
    /// When the last of them was sent, from the beginning of the phase.
    pub last_ms: u64,
}

impl fmt::Display for Failed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, error, count, first_ms, last_ms } = self;
        write!(formatter, "{count} failed, {first_ms} to {last_ms} ms after {phase:?}: {error}")
    }
}

/// Adds one failure to a report's list.
pub(super) fn add(list: &mut Vec<Failed>, (phase, at_ms): (String, u64), error: &str) {
    if let Some(known) = list.iter_mut().find(|known| known.phase == phase && known.error == error) {
        known.count += 1;
        // Workers report in the order in which their requests end.
        known.first_ms = known.first_ms.min(at_ms);
        known.last_ms = known.last_ms.max(at_ms);
    } else if list.len() < ENTRIES {
        list.push(Failed { phase, error: error.to_owned(), count: 1, first_ms: at_ms, last_ms: at_ms });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_apart_by_phase_and_error() {
        let mut list = Vec::new();
        for (phase, at_ms, error) in
            [("", 5, "reset"), ("roll", 30, "reset"), ("roll", 20, "reset"), ("roll", 1, "refused")]
        {
            add(&mut list, (phase.to_owned(), at_ms), error);
        }
        let texts: Vec<_> = list.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                r#"1 failed, 5 to 5 ms after "": reset"#,
                r#"2 failed, 20 to 30 ms after "roll": reset"#,
                r#"1 failed, 1 to 1 ms after "roll": refused"#,
            ]
        );
        (0..1000).for_each(|number| add(&mut list, (number.to_string(), 0), "reset"));
        assert_eq!(list.len(), ENTRIES);
    }
}
