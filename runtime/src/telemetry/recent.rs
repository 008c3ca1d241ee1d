//! The latest warnings and errors that this process logged, for its status. Bounded; repeats are counted.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use parking_lot::Mutex;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    Layer,
    fmt::{
        FormatFields as _,
        format::{DefaultFields, Writer},
    },
    layer::Context,
};

/// Number of distinct lines that are kept.
const KEPT: usize = 16;

/// A logged line.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it was last logged.
    pub at: SystemTime,
    /// `WARN` or `ERROR`.
    pub level: Level,
    /// The message and its fields, as in the log.
    pub text: String,
    /// How often it was logged while it has been kept.
    pub times: u64,
}

/// The latest lines, which clones share. Lines that the log's filter excludes are missing here too.
#[derive(Clone, Debug, Default)]
pub struct Recent(Arc<Mutex<VecDeque<Line>>>);

impl Recent {
    /// At most 16, the oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        self.0.lock().iter().cloned().collect()
    }

    fn keep(&self, level: Level, text: String) {
        let mut lines = self.0.lock();
        let before = lines.iter().position(|line| line.text == text && line.level == level);
        let times = before.and_then(|at| lines.remove(at)).map_or(0, |line| line.times);
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(Line { at: SystemTime::now(), level, text, times: times + 1 });
    }
}

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        if level > Level::WARN {
            return;
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = DefaultFields::new().format_fields(Writer::new(&mut text), event);
        self.keep(level, text);
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn keeps_what_went_wrong_last_and_counts_repeats() {
        let recent = Recent::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(recent.clone()), || {
            tracing::info!("all is well");
            tracing::warn!(pod = "shop/web-0", "no rules");
            for number in 0..KEPT - 1 {
                tracing::error!(number, "broken");
            }
            tracing::warn!(pod = "shop/web-0", "no rules");
        });
        let lines = recent.lines();
        assert_eq!(lines.len(), KEPT);
        assert_eq!((lines[0].level, lines[0].text.as_str(), lines[0].times), (Level::ERROR, "broken number=0", 1));
        let last = lines.last().unwrap();
        assert_eq!((last.level, last.text.as_str(), last.times), (Level::WARN, "no rules pod=\"shop/web-0\"", 2));

        recent.keep(Level::ERROR, "one more".to_owned());
        let lines = recent.lines();
        assert_eq!((lines.len(), lines[0].text.as_str()), (KEPT, "broken number=1"));
    }
}
