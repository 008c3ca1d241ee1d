//! Load bias: endpoints with failures appear slower to the balancer than they are.

use std::time::Duration;

use super::{Annotations, Reader, boolean, duration};
use crate::field::Invalid;

const ENABLED: &str = "balancer.alpha.linkerd.io/penalize-failures";
const PENALTY: &str = "balancer.alpha.linkerd.io/load-biaser-penalty";
const MAX_RETRY_AFTER: &str = "balancer.alpha.linkerd.io/load-biaser-max-retry-after";

const DEFAULT_PENALTY: Duration = Duration::from_secs(5);
const DEFAULT_MAX_RETRY_AFTER: Duration = Duration::from_secs(300);
/// The longest penalty that Linkerd's proxy can express: 49.7 days.
const LONGEST_PENALTY: Duration = Duration::from_millis(u32::MAX as u64);

/// How much slower an endpoint appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadBias {
    /// The latency that a failure counts as.
    pub penalty: Duration,
    /// The longest `Retry-After` that is taken into account.
    pub max_retry_after: Duration,
}

impl LoadBias {
    /// Time after which a penalty has decayed, Linkerd's and not configurable.
    pub const DECAY: Duration = Duration::from_secs(10);
}

/// The load bias of a Service; `None` where it is not enabled.
///
/// # Errors
/// Lists every invalid annotation.
pub fn load_bias(annotations: &Annotations) -> Result<Option<LoadBias>, Vec<Invalid>> {
    let mut reader = Reader::new(annotations);
    if !reader.read(ENABLED, boolean).unwrap_or_default() {
        return reader.finish(None);
    }
    let penalty = reader.read(PENALTY, duration).unwrap_or(DEFAULT_PENALTY);
    if penalty > LONGEST_PENALTY {
        reader.refuse(PENALTY, format!("{penalty:?}, expected at most {LONGEST_PENALTY:?}"));
    }
    let max_retry_after = reader.read(MAX_RETRY_AFTER, duration).unwrap_or(DEFAULT_MAX_RETRY_AFTER);
    reader.finish(Some(LoadBias { penalty, max_retry_after }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::traffic::of;

    #[test]
    fn it_is_off_unless_enabled() {
        assert_eq!(load_bias(&of(&[(PENALTY, "x")])), Ok(None));
        assert_eq!(load_bias(&of(&[(ENABLED, "false"), (PENALTY, "x")])), Ok(None));
        let defaults = LoadBias { penalty: Duration::from_secs(5), max_retry_after: Duration::from_secs(300) };
        assert_eq!(load_bias(&of(&[(ENABLED, "true")])), Ok(Some(defaults)));
    }

    #[test]
    fn bad_values_are_named() {
        for (name, value, valid) in [
            (ENABLED, "maybe", false),
            (PENALTY, "1s", true),
            (PENALTY, "50d", false),
            (PENALTY, "1.5s", false),
            (MAX_RETRY_AFTER, "1h", true),
            (MAX_RETRY_AFTER, "-1s", false),
        ] {
            let mut annotations = of(&[(ENABLED, "true")]);
            annotations.insert(name.to_owned(), value.to_owned());
            let read = load_bias(&annotations);
            assert_eq!(read.is_ok(), valid, "{name} {value}: {read:?}");
        }
    }
}
