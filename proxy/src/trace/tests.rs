//! Spans from the headers of a request to a collector over gRPC.

use std::time::Duration;

use http::Request;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::TlsAcceptor;
use tonic::Code;
use weft_proto::otlp::span::SpanKind;
use weft_runtime::drain::Drain;

use super::{
    queue::{BATCH, CAPACITY},
    testing::{Answer, Collector, QUICK, start, start_with},
    *,
};
use crate::{
    config::{ControlAddr, DnsConfig, TraceConfig},
    dns::{Dns, testing::DnsServer},
    faults::{Fault, FaultyHop},
    inbound::testing::Mesh,
    metrics::Counters,
    testing::eventually,
};

const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: [u8; 16] = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();
const COLLECTOR: &str = "otel.obs.serviceaccount.identity.linkerd.cluster.local";

/// Longer than all attempts at one batch.
const PATIENCE: Duration = Duration::from_secs(20);

fn request(traceparent: &str) -> Request<()> {
    let request = Request::builder().uri("http://web/path?query").header("traceparent", traceparent);
    request.header("tracestate", "vendor=1").body(()).unwrap()
}

/// Ends this number of spans.
fn end(tracing: &Tracing, spans: usize) {
    for _ in 0..spans {
        tracing.begin(&mut request(SAMPLED), Kind::Server, Direction::Inbound).responded(StatusCode::OK);
    }
}

/// A proxy's spans, exported to this collector in its own pod, which has time to answer.
async fn exported_to(collector: &Collector) -> (Tracing, Drain) {
    let (drain, watch) = Drain::new();
    let config = TraceConfig::to("127.0.0.1", collector.serve().await.port());
    let (_, credentials) = watch::channel(None);
    let patient = export::Pace { timeout: PATIENCE, ..QUICK };
    (start_with(patient, &config, credentials, watch, Dns::new(Counters::default()).unwrap()), drain)
}

#[test]
fn without_a_collector_or_a_sampled_trace_a_request_passes_as_it_is() {
    let (tracing, mut spans) = channel(&TraceMetrics::default());
    let unsampled = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    for (tracing, traceparent) in [(&Tracing::default(), SAMPLED), (&tracing, unsampled), (&tracing, "malformed")] {
        let mut request = request(traceparent);
        tracing.begin(&mut request, Kind::Server, Direction::Inbound).responded(StatusCode::OK);
        assert_eq!(request.headers()["traceparent"], traceparent);
    }
    let mut plain = Request::new(());
    tracing.begin(&mut plain, Kind::Server, Direction::Inbound).responded(StatusCode::OK);
    assert!(plain.headers().is_empty() && spans.take().is_none());
}

#[test]
fn a_sampled_request_gets_a_span_and_the_next_hop_its_id() {
    let (tracing, mut spans) = channel(&TraceMetrics::default());
    let mut request = request(SAMPLED);
    let server = tracing.begin(&mut request, Kind::Server, Direction::Outbound);
    let client = tracing.begin(&mut request, Kind::Client, Direction::Outbound);
    client.responded(StatusCode::NOT_FOUND);
    // Nothing was answered: the client has gone.
    drop(server);
    let (client, server) = (spans.take().unwrap(), spans.take().unwrap());
    assert_eq!((server.parent_id, client.parent_id), (0x00f0_67aa_0ba9_02b7, server.span_id));
    let next = Context::read(request.headers()).unwrap();
    assert_eq!((next.trace_id.to_be_bytes(), next.span_id, next.is_sampled()), (TRACE, client.span_id, true));
    assert_eq!(request.headers()["tracestate"], "vendor=1");
    assert_eq!((&*client.name, client.trace_state.as_deref()), ("/path", Some("vendor=1")));
    assert!(client.attributes.contains(&(STATUS, "404".into())));
    assert!(server.attributes.iter().all(|(name, _)| *name != STATUS));
    assert!(server.ended >= server.began);
}

#[tokio::test]
async fn spans_that_find_no_room_are_dropped_and_counted() {
    let metrics = TraceMetrics::default();
    let (tracing, mut spans) = channel(&metrics);
    end(&tracing, CAPACITY + 3);
    assert_eq!(metrics.dropped_full.get(), 3);
    spans.filled().await;
    while spans.take().is_some() {
        spans.finished(1);
    }
    tracing.flush().await;
    end(&tracing, 1);
    assert_eq!(metrics.dropped_full.get(), 3);
}

#[tokio::test]
async fn a_collector_gets_spans_over_mesh_tls() {
    let (mesh, dns, collector) = (Mesh::new(), DnsServer::start().await, Collector::new(Answer::Accept));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    dns.set_srv("otel.test.", 60, &[listener.local_addr().unwrap().port()]);
    let acceptor = TlsAcceptor::from(mesh.credentials(COLLECTOR).server_config(&[]));
    // As the collector's own proxy does.
    let behind = collector.serve().await;
    tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(tcp).await else { return };
                assert!(stream.get_ref().1.peer_certificates().is_some(), "the proxy shows its certificate");
                let mut plain = TcpStream::connect(behind).await.unwrap();
                // An error means that the client is gone.
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
            });
        }
    });
    let (_, credentials) = watch::channel(Some(mesh.credentials(crate::inbound::testing::OWN)));
    let (_drain, watch) = Drain::new();
    let dns = dns.resolver(Counters::default(), DnsConfig::default());
    let addr = |identity: &str| {
        let identity = Some(identity.parse().unwrap());
        let collector = ControlAddr { host: "otel.test.".to_owned(), port: 4317, identity };
        TraceConfig { collector, service_name: "web".to_owned(), ..TraceConfig::to("", 0) }
    };
    let tracing = start_with(QUICK, &addr(COLLECTOR), credentials.clone(), watch.clone(), dns.clone());
    end(&tracing, 2);
    tracing.flush().await;
    let seen = collector.spans();
    assert_eq!((seen.len(), tracing.counted()), (2, [1, 1, 2, 0, 0, 0]));
    let first = &seen[0];
    assert_eq!((&*first.service, &*first.span.trace_id, first.span.kind()), ("web", &TRACE[..], SpanKind::Server));
    assert_eq!((&*first.span.trace_state, first.span.flags), ("vendor=1", 0x301));
    assert_eq!(first.attribute("direction"), "inbound");
    assert!(first.span.start_time_unix_nano <= first.span.end_time_unix_nano);
    // A server without the collector's identity receives nothing.
    let tracing = start_with(QUICK, &addr("other.obs"), credentials, watch, dns);
    end(&tracing, 2);
    tracing.flush().await;
    assert_eq!((collector.spans().len(), tracing.counted()), (2, [5, 0, 0, 0, 2, 0]));
}

#[tokio::test]
async fn what_a_collector_could_not_take_is_sent_again() {
    let collector = Collector::new(Answer::Refuse(Code::Unavailable));
    let (tracing, _drain) = exported_to(&collector).await;
    end(&tracing, 3);
    eventually("the collector is asked again", || collector.asked() >= 2).await;
    collector.answer(Answer::Accept);
    tracing.flush().await;
    let [attempts, answers, exported, dropped @ ..] = tracing.counted();
    assert_eq!((attempts, answers, exported, dropped), (collector.asked() as u64, 1, 3, [0; 3]));
}

#[tokio::test]
async fn faults_to_the_collector_cost_counted_spans_alone() {
    let tried = Fault::at(100, 60).map(async |fault| {
        let collector = Collector::new(Answer::Accept);
        let faulty = FaultyHop::start(collector.serve().await, move || fault);
        let (drain, watch) = Drain::new();
        let (_, credentials) = watch::channel(None);
        let tracing = start(&TraceConfig::to("127.0.0.1", faulty.addr.port()), credentials, watch);
        end(&tracing, 3);
        let flushed = tokio::time::timeout(PATIENCE, tracing.flush()).await;
        assert!(flushed.is_ok() && faulty.cuts() > 0, "{fault:?} hangs");
        let [.., exported, full, failed, rejected] = tracing.counted();
        assert_eq!((exported + failed, full, rejected), (3, 0, 0), "{fault:?}");
        faulty.heal();
        let seen = collector.spans().len();
        end(&tracing, 1);
        tokio::time::timeout(PATIENCE, tracing.flush()).await.unwrap_or_else(|_| panic!("{fault:?} stays"));
        assert!(collector.spans().len() > seen, "after {fault:?}: {:?}", tracing.counted());
        drop(drain);
    });
    futures::future::join_all(tried).await;
}

#[tokio::test]
async fn what_a_collector_refuses_for_good_is_dropped_and_counted() {
    let collector = Collector::new(Answer::Refuse(Code::InvalidArgument));
    let (tracing, _drain) = exported_to(&collector).await;
    end(&tracing, 3);
    tracing.flush().await;
    assert_eq!(tracing.counted(), [1, 0, 0, 0, 3, 0]);
    collector.answer(Answer::Partly(1));
    end(&tracing, 3);
    tracing.flush().await;
    assert_eq!(tracing.counted(), [2, 1, 2, 0, 3, 1]);
    // It cannot have rejected more than there were.
    collector.answer(Answer::Partly(i64::MAX));
    end(&tracing, 1);
    tracing.flush().await;
    assert_eq!(tracing.counted(), [3, 2, 2, 0, 3, 2]);
}

#[tokio::test]
async fn batches_are_bounded_in_spans_and_bytes() {
    let collector = Collector::new(Answer::Accept);
    let (tracing, _drain) = exported_to(&collector).await;
    end(&tracing, CAPACITY);
    tracing.flush().await;
    assert_eq!(tracing.counted(), [3, 3, CAPACITY as u64, 0, 0, 0]);
    assert_eq!(collector.spans().len(), CAPACITY);
    let long = "l".repeat(5000);
    for _ in 0..BATCH {
        let mut request = request(SAMPLED);
        *request.uri_mut() = format!("http://web/{long}?{long}").parse().unwrap();
        for name in ["user-agent", "content-type", "content-length"] {
            request.headers_mut().insert(name, long.parse().unwrap());
        }
        drop(tracing.begin(&mut request, Kind::Client, Direction::Outbound));
    }
    tracing.flush().await;
    let [attempts, _, exported, ..] = tracing.counted();
    assert!(attempts > 4 && exported == (CAPACITY + BATCH) as u64, "{attempts} {exported}");
    // What a gRPC server takes by default.
    assert!((1 << 20..4 << 20).contains(&collector.largest()), "{}", collector.largest());
}

#[tokio::test]
async fn the_last_spans_are_exported_when_the_proxy_ends() {
    let collector = Collector::new(Answer::Accept);
    let addr = collector.serve().await;
    let (drain, watch) = Drain::new();
    let (_, credentials) = watch::channel(None);
    let config = TraceConfig::to("127.0.0.1", addr.port());
    let (tracing, spans) = channel(&TraceMetrics::default());
    let client = crate::control::ControlClient::new(
        config.collector.clone(),
        crate::control::Trust::Credentials(credentials),
        Dns::new(Counters::default()).unwrap(),
        Default::default(),
    );
    let slow = export::Pace { interval: std::time::Duration::from_secs(3600), ..QUICK };
    tokio::spawn(Exporter::paced(slow, client, resource(&config), spans).run(watch));
    end(&tracing, 1);
    assert!(drain.drain(std::time::Duration::from_secs(1)).await);
    tokio::time::timeout(std::time::Duration::from_secs(30), tracing.flush()).await.expect("nothing waits any more");
    assert_eq!(collector.spans().len(), 1);
}
