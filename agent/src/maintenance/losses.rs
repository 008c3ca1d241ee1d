//! Reports full maps, with log lines and Events. The kernel programs only count what they had no room for, and the pod
//! that does not become ready is often not the one that filled the map. Refuses to make room.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    datapath::{handle::Handle, sample::Losses},
    kubernetes::Publisher,
};

/// Polling interval.
const PERIOD: Duration = Duration::from_secs(5);
/// Interval of reports while there are more losses.
const PAUSE: Duration = Duration::from_secs(60);

/// Reports losses at once and then once a minute while there are more, forever.
///
/// # Errors
/// When the counters can no longer be read.
pub(crate) async fn watch(datapath: Handle, publisher: Option<Publisher>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    let mut reported = Reported::default();
    loop {
        ticks.tick().await;
        let counted = datapath.call(|kernel| kernel.losses()).await?;
        let Some(new) = reported.new_losses(counted, Instant::now()) else { continue };
        tracing::warn!(
            listeners = new.listeners,
            admissions = new.admissions,
            "the kernel had no room for proxies' listeners or network namespaces: maps are full"
        );
        if let Some(publisher) = &publisher {
            publisher.no_room(new).await;
        }
    }
}

/// The losses that were reported already.
#[derive(Debug, Default)]
struct Reported {
    /// The counters at that time. None before the first poll: an earlier agent reported what was counted before.
    counted: Option<Losses>,
    at: Option<Instant>,
}

impl Reported {
    fn new_losses(&mut self, counted: Losses, now: Instant) -> Option<Losses> {
        let before = *self.counted.get_or_insert(counted);
        let new = Losses {
            listeners: counted.listeners.saturating_sub(before.listeners),
            admissions: counted.admissions.saturating_sub(before.admissions),
        };
        if new == Losses::default() || self.at.is_some_and(|at| now - at < PAUSE) {
            return None;
        }
        (self.counted, self.at) = (Some(counted), Some(now));
        Some(new)
    }
}

#[cfg(test)]
mod tests {
    use kube::{Client, client::Body};
    use serde_json::Value;
    use tokio::sync::mpsc;

    use super::*;
    use crate::{datapath::fake::FakeKernel, kubernetes::Identity};

    fn losses(listeners: u64, admissions: u64) -> Losses {
        Losses { listeners, admissions }
    }

    #[test]
    fn losses_are_reported_at_once_and_each_minute_while_there_are_more() {
        let (begin, mut reported) = (Instant::now(), Reported::default());
        let rows = [
            ("a predecessor's", 0, losses(7, 1), None),
            ("no more", 5, losses(7, 1), None),
            ("more", 10, losses(9, 1), Some(losses(2, 0))),
            ("too soon", 15, losses(10, 3), None),
            ("a minute later, together", 70, losses(11, 3), Some(losses(2, 2))),
            ("over", 140, losses(11, 3), None),
        ];
        for (row, second, counted, expected) in rows {
            assert_eq!(reported.new_losses(counted, begin + Duration::from_secs(second)), expected, "{row}");
        }
    }

    /// An API server that takes everything, and the Events that it was given.
    fn api_server() -> (Client, mpsc::UnboundedReceiver<Value>) {
        let (events_tx, events) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let events_tx = events_tx.clone();
            async move {
                let body = request.into_body().collect_bytes().await?;
                events_tx.send(serde_json::from_slice(&body).unwrap()).unwrap();
                Ok::<_, kube::Error>(http::Response::new(Body::from(body)))
            }
        });
        (Client::new(service, "default"), events)
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_map_is_an_event_of_the_node() {
        let kernel = FakeKernel::default();
        let (client, mut events) = api_server();
        let publisher = Publisher::new(client, Identity { node: "node-a".into(), pod: None });
        let watching = tokio::spawn(watch(kernel.spawn(), Some(publisher)));
        tokio::time::sleep(2 * PERIOD).await;
        assert!(events.try_recv().is_err(), "nothing was lost");
        // The owner is a thread, which paused time does not wait for: the first look may come after any of these.
        let event = loop {
            kernel.state().losses.listeners += 1;
            if let Ok(event) = tokio::time::timeout(PERIOD, events.recv()).await {
                break event.unwrap();
            }
        };
        assert_eq!((&event["regarding"]["kind"], &event["regarding"]["name"]), (&"Node".into(), &"node-a".into()));
        assert_eq!((&event["type"], &event["reason"]), (&"Warning".into(), &"NoRoomForProxies".into()));
        assert!(event["note"].as_str().unwrap().contains("listeners of proxies"), "{event:#}");
        watching.abort();
    }
}
