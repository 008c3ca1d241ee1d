//! The node's kill switch, said loudly: the switch itself is a word in the kernel that anybody with the pins can turn, so
//! this looks at it. Refuses to turn it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{kubernetes::Publisher, shared::Shared};

/// How often the switch is looked at.
const PERIOD: Duration = Duration::from_secs(2);
/// How often it is said again while it is on.
const REMINDER: Duration = Duration::from_secs(60);

/// Says when redirection is switched off, and again while it stays so, forever.
///
/// # Errors
/// When the switch cannot be read any more.
pub(crate) async fn watch(datapath: Shared, publisher: Option<Publisher>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    let mut since: Option<Instant> = None;
    loop {
        ticks.tick().await;
        let bypassed = datapath.lock().bypassed()?;
        match (bypassed, since) {
            (true, Some(said)) if said.elapsed() < REMINDER => continue,
            (true, _) => {
                tracing::warn!("all redirection on this node is switched off; `weft-agent bypass off` ends it");
                since = Some(Instant::now());
            }
            (false, Some(_)) => {
                tracing::info!("redirection on this node is in force again");
                since = None;
            }
            (false, None) => continue,
        }
        if let Some(publisher) = &publisher {
            publisher.node_bypassed(bypassed).await;
        }
    }
}
