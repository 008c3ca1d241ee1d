//! Reports the node's bypass switch, with log lines and Events. Any process with access to the pins can change the
//! switch, which is a word in the kernel, so this task polls it. Refuses to change it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{datapath::handle::Handle, kubernetes::Publisher};

/// Polling interval.
const PERIOD: Duration = Duration::from_secs(2);
/// Interval of reminders while it is on.
const REMINDER: Duration = Duration::from_secs(60);

/// Reports when redirection is switched off, and again while it stays off, forever.
///
/// # Errors
/// When the switch can no longer be read.
pub(crate) async fn watch(datapath: Handle, publisher: Option<Publisher>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    let mut reminder = Reminder::default();
    loop {
        ticks.tick().await;
        let bypassed = datapath.call(|kernel| kernel.bypassed()).await?;
        if !reminder.is_due(bypassed, Instant::now()) {
            continue;
        }
        if bypassed {
            tracing::warn!("all redirection on this node is switched off; `weft-agent bypass off` ends it");
        } else {
            tracing::info!("redirection on this node is in force again");
        }
        if let Some(publisher) = &publisher {
            publisher.node_bypassed(bypassed).await;
        }
    }
}

/// Decides when to report the state of the switch.
#[derive(Debug, Default)]
struct Reminder {
    /// When it was last reported that the switch is on.
    said: Option<Instant>,
}

impl Reminder {
    fn is_due(&mut self, bypassed: bool, now: Instant) -> bool {
        match (bypassed, self.said) {
            (true, Some(said)) if now - said < REMINDER => false,
            (true, _) => {
                self.said = Some(now);
                true
            }
            (false, said) => {
                self.said = None;
                said.is_some()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bypass_is_said_at_once_each_minute_and_when_it_ends() {
        let (begin, mut reminder) = (Instant::now(), Reminder::default());
        let rows = [
            (0, false, false),
            (2, true, true),
            (4, true, false),
            (62, true, true),
            (64, false, true),
            (66, false, false),
        ];
        for (second, bypassed, is_due) in rows {
            assert_eq!(reminder.is_due(bypassed, begin + Duration::from_secs(second)), is_due, "second {second}");
        }
    }
}
