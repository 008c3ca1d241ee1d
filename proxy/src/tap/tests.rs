//! Taps without sockets: what they see, their limits, and that they delay nothing.

use weft_proto::linkerd::tap::tap_event::{self, ProxyDirection, http::Event};

use super::*;
use crate::metrics::{Direction, label};

/// A request of the application to a meshed endpoint.
pub(super) fn subject() -> Subject {
    Subject {
        direction: Direction::Outbound,
        source: "10.1.2.3:50000".parse().unwrap(),
        source_labels: vec![label("tls", "loopback")],
        destination: "10.2.0.1:8080".parse().unwrap(),
        destination_labels: vec![label("deployment", "web"), label("tls", "true")],
        route_labels: vec![label("route", "books")],
    }
}

fn everything() -> Match {
    Match::All(Vec::new())
}

fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

fn http(event: TapEvent) -> Event {
    let Some(tap_event::Event::Http(http)) = event.event else { panic!("{event:?}") };
    http.event.unwrap()
}

/// The events that wait, in short.
fn seen(events: &mut mpsc::Receiver<TapEvent>) -> Vec<String> {
    let mut seen = Vec::new();
    while let Ok(event) = events.try_recv() {
        seen.push(match http(event) {
            Event::RequestInit(init) => format!("{} {}", init.id.unwrap().stream, init.path),
            Event::ResponseInit(init) => format!("{} {}", init.id.unwrap().stream, init.http_status),
            Event::ResponseEnd(end) => {
                format!("{} {} bytes {:?}", end.id.unwrap().stream, end.response_bytes, end.eos.unwrap().end)
            }
        });
    }
    seen
}

#[test]
fn nothing_is_made_while_nobody_taps() {
    let taps = Taps::default();
    let tapped = taps.begin(&get("/"), || panic!("the subject of a request that nobody taps"));
    assert!(tapped.0.is_none());
    let (base, _events) = taps.open(everything(), 1, false).unwrap();
    taps.close(base);
    assert!(taps.begin(&get("/"), || panic!("the tap is closed")).0.is_none());
}

#[test]
fn a_request_is_seen_from_its_beginning_to_its_end() {
    let taps = Taps::default();
    let (_, mut events) = taps.open(everything(), 10, false).unwrap();
    let mut tapped = taps.begin(&get("/a"), subject);
    let response = Response::builder().status(503).header("grpc-status", "14").body(()).unwrap();
    tapped.responded(&response);
    tapped.data(3);
    tapped.data(4);
    tapped.ended(End::Whole(None));
    assert_eq!(seen(&mut events), ["0 /a", "0 503", "0 7 bytes Some(GrpcStatusCode(14))"]);

    let mut tapped = taps.begin(&get("/b"), subject);
    tapped.responded(&Response::new(()));
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    tapped.ended(End::Whole(Some(&trailers)));
    assert_eq!(seen(&mut events), ["1 /b", "1 200", "1 0 bytes Some(GrpcStatusCode(0))"]);

    taps.begin(&get("/c"), subject).reset(Reason::REFUSED_STREAM);
    drop(taps.begin(&get("/d"), subject));
    taps.begin(&get("/e"), subject).ended(End::Whole(None));
    let ends = ["2 /c", "2 0 bytes Some(ResetErrorCode(7))", "3 /d", "3 0 bytes Some(ResetErrorCode(8))"];
    assert_eq!(seen(&mut events), [&ends[..], &["4 /e", "4 0 bytes None"]].concat());
}

#[test]
fn events_name_both_ends_and_the_route() {
    let taps = Taps::default();
    let (_, mut events) = taps.open(everything(), 1, false).unwrap();
    drop(taps.begin(&get("/"), subject));
    for _ in 0..2 {
        let event = events.try_recv().unwrap();
        assert_eq!(event.proxy_direction, i32::from(ProxyDirection::Outbound));
        let addr = |addr: Option<weft_proto::linkerd::net::TcpAddress>| std::net::SocketAddr::try_from(addr.unwrap());
        assert_eq!(addr(event.source).unwrap(), subject().source);
        assert_eq!(addr(event.destination).unwrap(), subject().destination);
        assert_eq!(event.source_meta.unwrap().labels, [("tls".to_owned(), "loopback".to_owned())].into());
        assert_eq!(event.destination_meta.unwrap().labels["deployment"], "web");
        assert_eq!(event.route_meta.unwrap().labels["route"], "books");
    }
}

#[tokio::test]
async fn a_tap_ends_after_its_limit_when_the_requests_that_it_saw_have_ended() {
    let taps = Taps::default();
    let (_, mut events) = taps.open(everything(), 2, false).unwrap();
    let first = taps.begin(&get("/1"), subject);
    assert!(taps.is_tapped.load(Ordering::Relaxed));
    drop(taps.begin(&get("/2"), subject));
    assert!(!taps.is_tapped.load(Ordering::Relaxed), "the limit is reached, so that requests cost nothing again");
    assert!(taps.begin(&get("/3"), || panic!("beyond the limit")).0.is_none());
    assert_eq!(seen(&mut events).len(), 3);
    assert!(matches!(events.try_recv(), Err(mpsc::error::TryRecvError::Empty)), "the first request goes on");
    first.ended(End::Whole(None));
    assert!(matches!(http(events.recv().await.unwrap()), Event::ResponseEnd(_)));
    assert!(events.recv().await.is_none());
}

#[test]
fn a_client_that_does_not_read_loses_events() {
    let taps = Taps::default();
    let (base, mut events) = taps.open(everything(), u32::MAX, false).unwrap();
    let mut waiting = Vec::new();
    for _ in 0..BUFFERED_EVENTS + 5 {
        waiting.push(taps.begin(&get("/"), subject));
    }
    let observed = waiting.iter().filter(|tapped| tapped.0.is_some()).count();
    assert_eq!(observed, BUFFERED_EVENTS, "a request whose beginning was lost is not observed");
    drop(waiting);
    assert_eq!(seen(&mut events).len(), BUFFERED_EVENTS, "the ends found no room");
    drop(taps.begin(&get("/"), subject));
    assert_eq!(seen(&mut events).len(), 2, "and there is room again");
    drop(events);
    assert!(taps.begin(&get("/"), subject).0.is_none(), "a client that is gone sees nothing");
    taps.close(base);
}

#[test]
fn taps_are_bounded_and_see_what_they_match() {
    let taps = Taps::default();
    let read = |path: &str| Match::Path(matching::StringMatch::Exact(path.to_owned()));
    let mut open: Vec<_> = (0..MAX_TAPS).map(|i| taps.open(read(&format!("/{i}")), 9, i == 1).unwrap()).collect();
    assert!(taps.open(everything(), 1, false).is_none());
    let bases: std::collections::BTreeSet<u32> = open.iter().map(|(base, _)| *base).collect();
    assert_eq!(bases.len(), MAX_TAPS);
    drop(taps.begin(&Request::get("/1").header("a", "b").body(()).unwrap(), subject));
    let counts: Vec<usize> = open.iter().map(|(_, events)| events.len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 2, "{counts:?}");
    let Event::RequestInit(init) = http(open[1].1.try_recv().unwrap()) else { panic!() };
    assert_eq!(init.headers.unwrap().headers[0].name, "a");
    taps.close(open.remove(0).0);
    assert!(taps.open(everything(), 1, false).is_some());
}
