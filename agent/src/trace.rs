//! Passes the kernel's events to watchers. The kernel produces them, and this reads them, only while there are
//! watchers. A pod can produce events faster than they are read: they are read in bounded batches, and other tasks run
//! between two batches. Refuses to buffer events for a slow watcher: it misses events and learns how many.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    sync::Arc,
};

use ipnet::IpNet;
use lru::LruCache;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{Notify, broadcast};
use weft_ebpf_abi::{
    address::Address,
    event::{COMMAND_BYTES, Event as KernelEvent, kind},
    verdict::{Direction, Verdict},
};
use weft_proto::agent::{self, Event, EventKind, WatchRequest};

use crate::datapath::{events::EventSource, handle::Handle, names::Snapshot};

/// Events by which a watcher may lag behind. At 300 bytes each, this bounds the memory regardless of the number of
/// watchers.
const BACKLOG: usize = 4096;
/// Connections between verdict and acceptance; a refused one stays until it is the oldest entry.
const PENDING: NonZeroUsize = NonZeroUsize::new(16384).unwrap();

/// Events that are read before other tasks run again: about one millisecond of work.
const BATCH: usize = 512;

/// Distributes events to watchers.
#[derive(Clone)]
pub(crate) struct Broadcaster {
    events: broadcast::Sender<Arc<Event>>,
    watchers: Arc<Notify>,
}

impl Broadcaster {
    pub(crate) fn new() -> Self {
        Self { events: broadcast::Sender::new(BACKLOG), watchers: Arc::new(Notify::new()) }
    }

    /// Events from now on.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        let receiver = self.events.subscribe();
        self.watchers.notify_one();
        receiver
    }

    /// Reads the kernel's events while there are watchers, forever.
    ///
    /// # Errors
    /// When the kernel's events cannot be switched or read.
    pub(crate) async fn run(self, datapath: Handle) -> anyhow::Result<()> {
        loop {
            self.watchers.notified().await;
            if self.events.receiver_count() == 0 {
                continue;
            }
            let events = datapath.call(|kernel| kernel.start_events()).await?;
            tracing::debug!("trace begins");
            let ended = self.pump(events.readable()?, || datapath.names()).await;
            datapath.call(|kernel| kernel.stop_events()).await?;
            tracing::debug!("trace ends");
            ended?;
        }
    }

    /// Passes events on until the last watcher has left.
    async fn pump(&self, mut events: impl EventSource, names: impl Fn() -> Snapshot) -> anyhow::Result<()> {
        let mut verdicts = Verdicts::new();
        let mut dropped = events.dropped()?;
        loop {
            tokio::select! {
                () = self.events.closed() => return Ok(()),
                ready = events.ready() => ready?,
            }
            // Reads all events before it waits again: the ring buffer signals waiting events only once.
            loop {
                let (names, offset_ns) = (names(), wall_clock_offset_ns());
                let total = events.dropped()?;
                let mut lost = total.saturating_sub(std::mem::replace(&mut dropped, total));
                let mut taken = 0;
                while taken < BATCH
                    && let Some(event) = events.next()
                {
                    taken += 1;
                    let given = verdicts.take_in(&event);
                    if let Some(mut event) = describe(&event, given, &names, offset_ns) {
                        event.dropped_before = std::mem::take(&mut lost);
                        // Fails if there are no receivers.
                        let _ = self.events.send(Arc::new(event));
                    }
                }
                dropped -= lost;
                if taken < BATCH {
                    break;
                }
                if self.events.receiver_count() == 0 {
                    return Ok(());
                }
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Verdicts of connections that have not been accepted yet, to find the verdict of an accepted connection.
struct Verdicts(LruCache<Client, Given>);

/// The client's end of a connection; both of its events contain it.
type Client = (u64, u8, Address, u16);

/// A verdict that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Given {
    time_ns: u64,
    verdict: u8,
    pid: u32,
    uid: u32,
    command: [u8; COMMAND_BYTES],
}

impl From<&KernelEvent> for Given {
    fn from(event: &KernelEvent) -> Self {
        let KernelEvent { time_ns, verdict, pid, uid, command, .. } = *event;
        Self { time_ns, verdict, pid, uid, command }
    }
}

impl Verdicts {
    fn new() -> Self {
        Self(LruCache::new(PENDING))
    }

    /// Records a verdict, or finds the verdict of an accepted connection.
    fn take_in(&mut self, event: &KernelEvent) -> Option<Given> {
        let client = (event.netns_cookie, event.direction, event.source, event.source_port);
        if event.kind == kind::ACCEPTED {
            return self.0.pop(&client);
        }
        // Without a source port there is no key. Connections that passed outbound have none, and no proxy accepts them.
        if event.source_port != 0 {
            self.0.put(client, Given::from(event));
        }
        None
    }
}

/// Offset from CLOCK_MONOTONIC to the time of day. Computed for each batch, because the time of day may be set.
fn wall_clock_offset_ns() -> i128 {
    let ns = |id| {
        let time = clock_gettime(id);
        i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
    };
    ns(ClockId::Realtime) - ns(ClockId::Monotonic)
}

/// Converts a kernel event to the API's form; `None` when a newer kernel side uses an unknown value.
///
/// `given` is the verdict of an accepted connection, if it was seen.
fn describe(event: &KernelEvent, given: Option<Given>, names: &Snapshot, offset_ns: i128) -> Option<Event> {
    let (kind, by) = match event.kind {
        kind::VERDICT => (EventKind::Verdict, Some(Given::from(event))),
        kind::ACCEPTED => (EventKind::Accepted, given),
        _ => return None,
    };
    let verdict = match by {
        Some(by) => Verdict::from_index(by.verdict)?.label(),
        None => "",
    };
    let (pid, uid, command) = by.map_or((0, 0, [0; COMMAND_BYTES]), |by| (by.pid, by.uid, by.command));
    let direction = Direction::from_index(event.direction)?;
    let command: Vec<u8> = command.iter().copied().take_while(|byte| *byte != 0).collect();
    Some(Event {
        time_unix_ns: u64::try_from(i128::from(event.time_ns) + offset_ns).unwrap_or_default(),
        pod: names.get(&event.netns_cookie).map(|name| (&**name).into()),
        netns_cookie: event.netns_cookie,
        direction: api_direction(direction).into(),
        pid,
        command: String::from_utf8_lossy(&command).into_owned(),
        uid,
        source: end(event.source, event.source_port),
        original_destination: end(event.original, event.original_port),
        new_destination: end(event.new, event.new_port),
        verdict: verdict.to_owned(),
        dropped_before: 0,
        kind: kind.into(),
        accepted_after_ns: given.map_or(0, |given| event.time_ns.saturating_sub(given.time_ns)),
        generation: event.generation.into(),
    })
}

fn end(address: Address, port: u16) -> String {
    SocketAddr::new(IpAddr::from(address), port).to_string()
}

/// The API's value for a direction.
pub(crate) fn api_direction(direction: Direction) -> agent::Direction {
    match direction {
        Direction::Outbound => agent::Direction::Outbound,
        Direction::Inbound => agent::Direction::Inbound,
    }
}

/// Filter of a watcher.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    request: WatchRequest,
    destination: Option<IpNet>,
}

impl Filter {
    /// Validates a request.
    ///
    /// # Errors
    /// A sentence about the field that cannot match anything.
    pub(crate) fn parse(request: WatchRequest) -> Result<Self, String> {
        if !request.verdict.is_empty() && Verdict::from_label(&request.verdict).is_none() {
            let known: Vec<_> = Verdict::ALL.into_iter().map(Verdict::label).collect();
            return Err(format!("verdict: {:?} is not one of {}", request.verdict, known.join(", ")));
        }
        if request.port > u32::from(u16::MAX) {
            return Err(format!("port: {} is not a port", request.port));
        }
        if agent::Direction::try_from(request.direction).is_err() {
            return Err(format!("direction: {} is neither 1 (outbound) nor 2 (inbound)", request.direction));
        }
        let destination = match request.destination.as_str() {
            "" => None,
            text => Some(text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).map_err(|_| {
                format!("destination: {text:?} is neither an IP address nor a CIDR such as 10.0.0.0/8")
            })?),
        };
        Ok(Self { request, destination })
    }

    /// Whether every field that is set matches.
    pub(crate) fn matches(&self, event: &Event) -> bool {
        let wanted = &self.request;
        let pod = event.pod.clone().unwrap_or_default();
        (wanted.namespace.is_empty() || wanted.namespace == pod.namespace)
            && (wanted.pod.is_empty() || wanted.pod == pod.name)
            && (wanted.direction == 0 || wanted.direction == event.direction)
            && (wanted.verdict.is_empty() || wanted.verdict == event.verdict)
            && (wanted.command.is_empty() || wanted.command == event.command)
            && (wanted.accepted || event.kind() == EventKind::Verdict)
            && self.destination.is_none_or(|wanted| {
                let destination = event.original_destination.parse::<SocketAddr>();
                destination.is_ok_and(|destination| wanted.contains(&destination.ip()))
            })
            && (wanted.port == 0
                || [&event.original_destination, &event.new_destination]
                    .into_iter()
                    .any(|end| end.rsplit_once(':').is_some_and(|(_, port)| *port == wanted.port.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use weft_proto::agent::PodRef;

    use super::*;
    use crate::datapath::DatapathError;

    fn event() -> Event {
        Event {
            pod: Some(PodRef { namespace: "shop".into(), name: "web-0".into() }),
            direction: agent::Direction::Outbound.into(),
            original_destination: "[fd00::9]:8080".into(),
            new_destination: "[::1]:4140".into(),
            verdict: "redirect".into(),
            command: "curl".into(),
            ..Event::default()
        }
    }

    #[test]
    fn an_accepted_connection_finds_its_verdict_once() {
        let asked = KernelEvent { time_ns: 1000, netns_cookie: 7, source_port: 40000, verdict: 6, ..kernel_event() };
        let accepted = KernelEvent { time_ns: 1400, kind: kind::ACCEPTED, ..asked };
        let mut verdicts = Verdicts::new();
        assert_eq!(verdicts.take_in(&asked), None);
        let elsewhere = KernelEvent { netns_cookie: 8, ..accepted };
        assert_eq!(verdicts.take_in(&elsewhere), None);
        let given = verdicts.take_in(&accepted).unwrap();
        assert_eq!((given.time_ns, given.verdict), (1000, 6));
        assert_eq!(verdicts.take_in(&accepted), None);
    }

    fn kernel_event() -> KernelEvent {
        KernelEvent::from_bytes(&[0u8; size_of::<KernelEvent>()]).unwrap()
    }

    /// A pod that produces events faster than they can be read, until it stops.
    struct Flood {
        produced: Arc<AtomicU64>,
    }

    impl EventSource for Flood {
        async fn ready(&mut self) -> std::io::Result<()> {
            Ok(())
        }

        fn next(&mut self) -> Option<KernelEvent> {
            self.produced.fetch_add(1, Ordering::Relaxed);
            Some(KernelEvent { kind: kind::VERDICT, direction: Direction::ALL[0] as u8, ..kernel_event() })
        }

        fn dropped(&self) -> Result<u64, DatapathError> {
            Ok(0)
        }
    }

    #[tokio::test]
    async fn other_tasks_run_during_a_flood_and_it_ends_with_the_last_watcher() {
        let broadcaster = Broadcaster::new();
        let mut watcher = broadcaster.subscribe();
        let produced = Arc::new(AtomicU64::new(0));
        let flood = Flood { produced: Arc::clone(&produced) };
        let pump = tokio::spawn(async move { broadcaster.pump(flood, Snapshot::default).await });
        // Both tasks run on one thread: these lines are reached only if the flood yields.
        for _ in 0..3 {
            watcher.recv().await.unwrap();
            tokio::task::yield_now().await;
        }
        assert!(produced.load(Ordering::Relaxed) <= 16 * BATCH as u64);
        drop(watcher);
        pump.await.unwrap().unwrap();
    }

    /// A process may set its own name to any fifteen bytes.
    #[test]
    fn a_command_that_is_not_text_is_traced() {
        let mut event = kernel_event();
        event.command[..6].copy_from_slice(b"\xff\x1b[2J\0");
        let described = describe(&event, None, &Snapshot::default(), 0).unwrap();
        assert_eq!(described.command, "\u{fffd}\x1b[2J");
    }

    #[test]
    fn everything_that_is_set_must_match() {
        let rows: [(&str, WatchRequest, bool); 13] = [
            ("nothing set", WatchRequest::default(), true),
            ("namespace", WatchRequest { namespace: "shop".into(), ..Default::default() }, true),
            ("other namespace", WatchRequest { namespace: "sho".into(), ..Default::default() }, false),
            ("pod", WatchRequest { pod: "web-0".into(), ..Default::default() }, true),
            ("original port", WatchRequest { port: 8080, ..Default::default() }, true),
            ("new port", WatchRequest { port: 4140, ..Default::default() }, true),
            ("part of a port", WatchRequest { port: 80, ..Default::default() }, false),
            ("other direction", WatchRequest { direction: 2, ..Default::default() }, false),
            ("command", WatchRequest { command: "curl".into(), ..Default::default() }, true),
            ("other command", WatchRequest { command: "wget".into(), ..Default::default() }, false),
            ("destination", WatchRequest { destination: "fd00::/8".into(), ..Default::default() }, true),
            ("other destination", WatchRequest { destination: "fd00::8".into(), ..Default::default() }, false),
            ("other verdict", WatchRequest { verdict: "pass_proxy".into(), ..Default::default() }, false),
        ];
        for (row, request, expected) in rows {
            assert_eq!(Filter::parse(request).unwrap().matches(&event()), expected, "{row}");
        }
    }

    #[test]
    fn accepted_connections_are_told_to_those_who_ask() {
        let accepted = Event { kind: EventKind::Accepted.into(), ..event() };
        for wanted in [true, false] {
            let filter = Filter::parse(WatchRequest { accepted: wanted, ..Default::default() }).unwrap();
            assert_eq!(filter.matches(&accepted), wanted);
            assert!(filter.matches(&event()));
        }
    }

    #[test]
    fn a_filter_that_can_match_nothing_is_refused() {
        for request in [
            WatchRequest { verdict: "redirected".into(), ..Default::default() },
            WatchRequest { port: 70000, ..Default::default() },
            WatchRequest { direction: 3, ..Default::default() },
            WatchRequest { destination: "web.shop".into(), ..Default::default() },
        ] {
            assert!(Filter::parse(request.clone()).is_err(), "{request:?}");
        }
    }
}
