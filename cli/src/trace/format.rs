//! One event as a line for people or as an object for programs.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use weft_k8s_api::printable;
use weft_proto::agent::{Direction, Event, EventKind};

use super::names::Names;
use crate::output::colour::{self, paint_if};

const NS_PER_US: u64 = 1000;

/// Width of the column of pods, until there is a longer name.
pub(super) const POD_WIDTH: usize = 32;

/// An event in JSON. Names are those of the agent's API.
#[derive(Debug, Serialize)]
pub(super) struct JsonEvent<'a> {
    time_unix_ns: u64,
    /// Absent outside a cluster.
    #[serde(skip_serializing_if = "str::is_empty")]
    node: &'a str,
    namespace: &'a str,
    pod: &'a str,
    netns_cookie: u64,
    direction: &'static str,
    pid: u32,
    command: &'a str,
    uid: u32,
    source: &'a str,
    /// Absent if the address has no known name.
    #[serde(skip_serializing_if = "Option::is_none")]
    source_name: Option<&'a str>,
    original_destination: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_destination_name: Option<&'a str>,
    new_destination: &'a str,
    /// "verdict" or "accepted".
    kind: &'static str,
    verdict: &'a str,
    /// Absent in a verdict, and for a connection whose verdict was not seen.
    #[serde(skip_serializing_if = "is_zero")]
    accepted_after_ns: u64,
    generation: u64,
    dropped_before: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub(super) fn json<'a>(node: &'a str, names: &'a Names, event: &'a Event) -> JsonEvent<'a> {
    let (namespace, pod) = event.pod.as_ref().map_or(("", ""), |pod| (pod.namespace.as_str(), pod.name.as_str()));
    JsonEvent {
        time_unix_ns: event.time_unix_ns,
        node,
        namespace,
        pod,
        netns_cookie: event.netns_cookie,
        direction: direction(event),
        pid: event.pid,
        command: &event.command,
        uid: event.uid,
        source: &event.source,
        source_name: names.of(&event.source),
        original_destination: &event.original_destination,
        original_destination_name: names.of(&event.original_destination),
        new_destination: &event.new_destination,
        kind: match event.kind() {
            EventKind::Verdict => "verdict",
            EventKind::Accepted => "accepted",
        },
        verdict: &event.verdict,
        accepted_after_ns: event.accepted_after_ns,
        generation: event.generation,
        dropped_before: event.dropped_before,
    }
}

pub(super) fn header(wide: bool) -> String {
    let columns = columns(
        POD_WIDTH,
        &Columns {
            time: "TIME (UTC)".to_owned(),
            pod: "POD".to_owned(),
            process: "PROCESS".to_owned(),
            uid: "UID".to_owned(),
            direction: "DIRECTION",
            verdict: verdict("VERDICT"),
            way: "SOURCE, DESTINATION -> NEW DESTINATION".to_owned(),
        },
    );
    if wide { widen("NODE", "NETNS", &columns) } else { columns }
}

/// How events become lines, escaped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    /// Width of the column of pods, so that lines after a long name stay aligned with it.
    pub(super) pod_width: usize,
    pub(super) colours: bool,
}

impl Line {
    pub(super) fn wide(self, node: &str, names: &Names, event: &Event) -> String {
        let node = if node.is_empty() { "-" } else { node };
        let line = widen(&printable::line(node), &event.netns_cookie.to_string(), &self.narrow(event));
        match (names.of(&event.source), names.of(&event.original_destination)) {
            (None, None) => line,
            (source, destination) => {
                let known = |name: Option<&str>| printable::line(name.unwrap_or("?")).into_owned();
                format!("{line}  [{} to {}]", known(source), known(destination))
            }
        }
    }

    pub(super) fn narrow(self, event: &Event) -> String {
        // Inbound, the kernel does not act for a process.
        let caller = event.pid != 0;
        let shown = match event.kind() {
            EventKind::Verdict => &event.verdict,
            EventKind::Accepted => "accepted",
        };
        let columns_of = Columns {
            time: time_of_day(event.time_unix_ns),
            pod: printable::line(&pod(event)).into_owned(),
            process: if caller {
                format!("{}[{}]", printable::line(&event.command), event.pid)
            } else {
                "-".to_owned()
            },
            uid: if caller { event.uid.to_string() } else { "-".to_owned() },
            direction: direction(event),
            verdict: paint_if(self.colours, colour::verdict(shown), &verdict(shown)),
            way: printable::line(&way(event)).into_owned(),
        };
        columns(self.pod_width, &columns_of)
    }
}

/// Prepended, because the last column has no fixed width.
fn widen(node: &str, netns: &str, columns: &str) -> String {
    format!("{node:<20}  {netns:>8}  {columns}")
}

/// The text in the column of pods.
pub(super) fn pod(event: &Event) -> String {
    let named = event.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
    named.unwrap_or_else(|| format!("netns:{}", event.netns_cookie))
}

/// A verdict in the width of its column: colours would count as characters.
fn verdict(text: &str) -> String {
    format!("{text:<18}")
}

struct Columns {
    time: String,
    pod: String,
    process: String,
    uid: String,
    direction: &'static str,
    verdict: String,
    way: String,
}

/// Aligned for common lengths: longer commands shift the rest to the right and are never cut.
fn columns(pod_width: usize, columns: &Columns) -> String {
    let Columns { time, pod, process, uid, direction, verdict, way } = columns;
    format!("{time:<15}  {pod:<pod_width$}  {process:<22}  {uid:>5}  {direction:<9}  {verdict}  {way}")
}

fn way(event: &Event) -> String {
    let Event { source, original_destination: from, new_destination: to, .. } = event;
    let way = if from == to { format!("{source}  {from}") } else { format!("{source}  {from} -> {to}") };
    match event.accepted_after_ns {
        0 => way,
        after => format!("{way}  after {} us", after / NS_PER_US),
    }
}

fn direction(event: &Event) -> &'static str {
    match event.direction() {
        Direction::Outbound => "outbound",
        Direction::Inbound => "inbound",
        Direction::Unspecified => "unknown",
    }
}

/// `HH:MM:SS.µs`, in UTC as in the mesh's logs.
fn time_of_day(unix_ns: u64) -> String {
    // Always within jiff's range: 64 bits of nanoseconds end in 2554.
    let time = Timestamp::from_nanosecond(unix_ns.into()).unwrap_or_default();
    time.strftime("%H:%M:%S%.6f").to_string()
}

#[cfg(test)]
mod tests {
    use weft_proto::agent::PodRef;

    use super::*;

    fn redirect() -> Event {
        Event {
            time_unix_ns: 1_700_000_000_123_456_789,
            pod: Some(PodRef { namespace: "shop".into(), name: "web-0".into() }),
            netns_cookie: 7,
            direction: Direction::Outbound.into(),
            pid: 42,
            command: "curl".into(),
            uid: 1000,
            source: "10.244.0.10:0".into(),
            original_destination: "10.96.0.20:80".into(),
            new_destination: "127.0.0.1:4140".into(),
            verdict: "redirect".into(),
            ..Event::default()
        }
    }

    const PLAIN: Line = Line { pod_width: POD_WIDTH, colours: false };

    #[test]
    fn the_verdict_has_a_colour_and_everything_stays_aligned() {
        let coloured = Line { colours: true, ..PLAIN }.narrow(&redirect());
        assert!(coloured.contains("  \x1b[32mredirect          \x1b[0m  "), "{coloured:?}");
        assert_eq!(coloured.replace("\x1b[32m", "").replace("\x1b[0m", ""), PLAIN.narrow(&redirect()));
        let denied = Event { verdict: "deny_no_listener".into(), ..redirect() };
        assert!(Line { colours: true, ..PLAIN }.narrow(&denied).contains("\x1b[31mdeny_no_listener"));
        assert!(!PLAIN.narrow(&denied).contains('\x1b'));
    }

    #[test]
    fn an_accepted_connection_says_after_how_long() {
        let accepted = Event { kind: EventKind::Accepted.into(), accepted_after_ns: 38_499, ..redirect() };
        let line = PLAIN.narrow(&accepted);
        assert!(
            line.contains("  accepted  ") && line.ends_with("10.96.0.20:80 -> 127.0.0.1:4140  after 38 us"),
            "{line}"
        );
        let object = serde_json::to_value(json("", &Names::default(), &accepted)).unwrap();
        assert_eq!((&object["kind"], &object["accepted_after_ns"]), (&"accepted".into(), &38_499.into()));
        let unmatched = Event { verdict: String::new(), accepted_after_ns: 0, ..accepted };
        assert!(PLAIN.narrow(&unmatched).ends_with("127.0.0.1:4140"));
    }

    #[test]
    fn a_redirect_shows_both_destinations() {
        let line = PLAIN.narrow(&redirect());
        assert!(line.starts_with("22:13:20.123456  shop/web-0 "), "{line}");
        assert!(line.contains("curl[42]") && line.contains(" 1000 "), "{line}");
        assert!(line.ends_with("redirect            10.244.0.10:0  10.96.0.20:80 -> 127.0.0.1:4140"), "{line}");
    }

    /// A process chooses its name (PR_SET_NAME).
    #[test]
    fn a_command_can_neither_move_the_cursor_nor_forge_a_line() {
        let event = Event { command: "\x1b[2J\n12:00 ok\u{9b}m".into(), ..redirect() };
        let line = PLAIN.narrow(&event);
        assert!(line.contains("  \\u{1b}[2J\\n12:00 ok\\u{9b}m[42]  "), "{line:?}");
        assert!(!line.contains(char::is_control), "{line:?}");
    }

    #[test]
    fn an_unchanged_destination_is_shown_once() {
        let event = Event { new_destination: "10.96.0.20:80".into(), verdict: "pass_proxy".into(), ..redirect() };
        assert!(PLAIN.narrow(&event).ends_with("10.244.0.10:0  10.96.0.20:80"));
    }

    #[test]
    fn inbound_has_no_process() {
        let event = Event { pid: 0, command: String::new(), direction: Direction::Inbound.into(), ..redirect() };
        assert!(PLAIN.narrow(&event).contains("  -  "), "{}", PLAIN.narrow(&event));
    }

    #[test]
    fn columns_are_below_their_headings() {
        let (header, line) = (header(false), PLAIN.narrow(&redirect()));
        assert_eq!(header.find("POD"), line.find("shop/"));
        assert_eq!(header.find("PROCESS"), line.find("curl"));
        assert_eq!(header.find("VERDICT"), line.find("redirect"));
        assert_eq!(header.find("SOURCE"), line.find("10.244"));
    }

    #[test]
    fn wide_names_node_and_network_namespace() {
        let (header, line) = (header(true), PLAIN.wide("node-a", &Names::default(), &redirect()));
        assert!(line.starts_with("node-a "), "{line}");
        assert_eq!(header.find("POD"), line.find("shop/"));
        assert!(PLAIN.wide("", &Names::default(), &redirect()).starts_with("- "));
    }

    #[test]
    fn lines_below_a_long_name_are_aligned_with_it() {
        let long = Event { pod: Some(PodRef { namespace: "linkerd".into(), name: "x".repeat(40) }), ..redirect() };
        let width = pod(&long).len();
        let line = Line { pod_width: width, colours: false };
        assert_eq!(line.narrow(&long).find("curl"), line.narrow(&redirect()).find("curl"));
    }

    #[test]
    fn objects_are_flat() {
        let object = serde_json::to_value(json("", &Names::default(), &redirect())).unwrap();
        assert_eq!(object.get("node"), None);
        assert_eq!(object["pod"], "web-0");
        assert_eq!(object["direction"], "outbound");
        assert_eq!(object["time_unix_ns"], 1_700_000_000_123_456_789_u64);
        assert_eq!(serde_json::to_value(json("node-a", &Names::default(), &redirect())).unwrap()["node"], "node-a");
    }
}
