//! Taps of made-up proxies: which requests, how many, and what ends.

use weft_proto::{
    linkerd::{
        net::TcpAddress,
        tap::{
            Eos, eos,
            observe_request::r#match::{self, http, http::string_match},
            tap_event::{
                self as message,
                http::{Event, RequestInit, ResponseEnd, ResponseInit, StreamId},
            },
        },
    },
    viz::{Resource, TapEnd, tap_end},
};

use super::*;
use crate::collect::tests::{FakeFleet, pod};

fn request(change: impl FnOnce(&mut TapRequest)) -> TapRequest {
    let resource = Resource { namespace: "shop".to_owned(), kind: "deployment".to_owned(), name: "web".to_owned() };
    let mut request = TapRequest { resource: Some(resource), ..TapRequest::default() };
    change(&mut request);
    request
}

fn event(stream: u64, event: Event) -> proxy::TapEvent {
    proxy::TapEvent {
        source: Some(TcpAddress::from(std::net::SocketAddr::from(([10, 0, 0, 1], 4000)))),
        destination: Some(TcpAddress::from(std::net::SocketAddr::from(([10, 0, 0, 2], 8080)))),
        proxy_direction: message::ProxyDirection::Inbound.into(),
        event: Some(message::Event::Http(message::Http { event: Some(with_id(stream, event)) })),
        ..proxy::TapEvent::default()
    }
}

fn with_id(stream: u64, event: Event) -> Event {
    let id = Some(StreamId { base: 0, stream });
    match event {
        Event::RequestInit(init) => Event::RequestInit(RequestInit { id, ..init }),
        Event::ResponseInit(init) => Event::ResponseInit(ResponseInit { id, ..init }),
        Event::ResponseEnd(end) => Event::ResponseEnd(ResponseEnd { id, ..end }),
    }
}

fn begin(stream: u64) -> proxy::TapEvent {
    let method = Some(::http::Method::GET.into());
    event(stream, Event::RequestInit(RequestInit { method, path: "/".to_owned(), ..RequestInit::default() }))
}

fn end(stream: u64) -> proxy::TapEvent {
    let eos = Some(Eos { end: Some(eos::End::GrpcStatusCode(5)) });
    let since = |ms| std::time::Duration::from_millis(ms).try_into().ok();
    event(
        stream,
        Event::ResponseEnd(ResponseEnd {
            since_request_init: since(7),
            response_bytes: 12,
            eos,
            ..ResponseEnd::default()
        }),
    )
}

#[test]
fn what_is_asked_of_a_proxy_is_all_of_the_conditions() {
    let to = Resource { namespace: "shop".to_owned(), kind: "job".to_owned(), name: "report".to_owned() };
    let asked = request(|request| {
        request.method = "post".to_owned();
        request.path = "/api".to_owned();
        request.scheme = "https".to_owned();
        request.to = Some(to);
        request.headers = true;
    });
    let observe = observe_request(&asked, 7).unwrap();
    assert_eq!(observe.limit, 7);
    assert!(observe.extract.is_some());
    let Some(r#match::Match::All(all)) = observe.r#match.unwrap().r#match else { panic!("not all") };
    let all: Vec<_> = all.matches.into_iter().map(|matched| matched.r#match.unwrap()).collect();
    assert_eq!(all.len(), 5);
    let path = http::Match::Path(http::StringMatch { r#match: Some(string_match::Match::Prefix("/api".to_owned())) });
    assert!(all.contains(&r#match::Match::Http(r#match::Http { r#match: Some(path) })));
    let label = |key: &str, value: &str| {
        r#match::Match::DestinationLabel(r#match::Label { key: key.to_owned(), value: value.to_owned() })
    };
    assert!(all.contains(&label("k8s_job", "report")) && all.contains(&label("namespace", "shop")));
}

#[tokio::test]
async fn malformed_requests_name_their_field() {
    let collector = Arc::new(Collector::new(FakeFleet::of([]), crate::Config::default()));
    type Change = fn(&mut TapRequest);
    let wrong: [(&str, Change); 6] = [
        ("resource", |request| request.resource = None),
        ("resource", |request| request.resource.as_mut().unwrap().kind = "service".to_owned()),
        ("selector", |request| request.selector = "=".to_owned()),
        ("max_rps", |request| request.max_rps = 1001),
        ("method", |request| request.method = "G T".to_owned()),
        ("scheme", |request| request.scheme = "ftp".to_owned()),
    ];
    for (field, change) in wrong {
        let Err(error) = open(Arc::clone(&collector), request(change)).await else { panic!("{field}: opened") };
        assert!(matches!(error, RequestError::Invalid { field: found, .. } if found == field), "{error}");
    }
}

#[test]
fn a_request_beyond_the_rate_is_left_out_as_a_whole_and_counted() {
    let (events_tx, mut events) = mpsc::channel(8);
    let rate = Mutex::new(Rate::new(1));
    let shared = Tapping { observe: ObserveRequest::default(), rate, skipped: AtomicU64::new(0), events: events_tx };
    let pod = pod("shop", "web-0");
    let mut proxy = OfProxy::new(&pod);
    for event in [begin(0), begin(1), begin(2), end(1), end(0)] {
        proxy.event(event, &shared);
    }
    let first = events.try_recv().unwrap();
    assert_eq!((first.id.as_str(), first.source.as_str(), first.pod.as_str()), ("0:0", "10.0.0.1:4000", "web-0"));
    let last = events.try_recv().unwrap();
    assert_eq!((last.id.as_str(), last.skipped), ("0:0", 2));
    let expected = TapEnd {
        since_request_us: 7000,
        response_bytes: 12,
        outcome: Some(tap_end::Outcome::GrpcStatus(5)),
        ..TapEnd::default()
    };
    assert_eq!(last.event, Some(tap_event::Event::End(expected)));
    assert!(events.try_recv().is_err() && proxy.open.is_empty());
}

#[test]
fn a_reader_that_does_not_read_loses_requests_and_learns_how_many() {
    let (events_tx, mut events) = mpsc::channel(1);
    let rate = Mutex::new(Rate::new(1000));
    let shared = Tapping { observe: ObserveRequest::default(), rate, skipped: AtomicU64::new(0), events: events_tx };
    let pod = pod("shop", "web-0");
    let mut proxy = OfProxy::new(&pod);
    for stream in 0..5 {
        proxy.event(begin(stream), &shared);
    }
    assert_eq!(events.try_recv().unwrap().id, "0:0");
    proxy.event(begin(9), &shared);
    let next = events.try_recv().unwrap();
    assert_eq!((next.id.as_str(), next.skipped), ("0:9", 4));
}

#[test]
fn a_rate_is_a_second_of_requests_at_once_and_no_more() {
    let (mut rate, start) = (Rate::new(10), Instant::now());
    let taken = |rate: &mut Rate, now: Instant| (0..100).filter(|_| rate.take(now)).count();
    assert_eq!(taken(&mut rate, start), 10);
    assert_eq!(taken(&mut rate, start + Duration::from_millis(500)), 5);
    assert_eq!(taken(&mut rate, start + Duration::from_secs(60)), 10);
}

#[tokio::test(start_paused = true)]
async fn pods_that_cannot_be_tapped_say_why_and_those_that_come_later_are_tried() {
    let mut without = (*pod("shop", "a")).clone();
    without.proxy = None;
    let mut off = (*pod("shop", "b")).clone();
    off.proxy = Some(crate::fleet::ProxyPorts { admin: 4191, tap: None });
    let collector =
        Arc::new(Collector::new(FakeFleet::of([Arc::new(without), Arc::new(off)]), crate::Config::default()));
    let mut events = open(Arc::clone(&collector), request(|_| {})).await.unwrap();
    let mut problem = async || {
        let event = events.next().await.unwrap();
        let Some(tap_event::Event::Problem(why)) = event.event else { panic!("{event:?}") };
        (event.pod, why)
    };
    let (a, why) = problem().await;
    assert!(a == "a" && why.contains("linkerd.io/inject"), "{a}: {why}");
    let (b, why) = problem().await;
    assert!(b == "b" && why.contains("disable-tap"), "{b}: {why}");
    collector.fleet.pods.lock().push(pod("shop", "c"));
    assert_eq!(problem().await, ("c".to_owned(), "no tap here".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_tap_without_pods_says_so_and_waits_for_them() {
    let collector = Arc::new(Collector::new(FakeFleet::of([pod("other", "a")]), crate::Config::default()));
    let mut events = open(Arc::clone(&collector), request(|_| {})).await.unwrap();
    let mut problem = async || {
        let event = events.next().await.unwrap();
        let Some(tap_event::Event::Problem(why)) = event.event else { panic!("{event:?}") };
        (event.pod, why)
    };
    assert_eq!(problem().await, (String::new(), NONE.to_owned()));
    collector.fleet.pods.lock().push(pod("shop", "b"));
    assert_eq!(problem().await, ("b".to_owned(), "no tap here".to_owned()));
}
