//! Every shape of load against the server, without a proxy.

use tokio::net::TcpListener;

use super::*;

const SHORT: Duration = Duration::from_millis(100);

/// The server speaks the protocol of `port`, on a port that the system chose.
fn measured(shape: Shape, port: u16, time: Duration) -> Measured {
    let measured = on_this_thread(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let target = listener.local_addr()?;
        tokio::spawn(server::accept(listener, port));
        let warm_up = Duration::from_millis(20);
        measure(Load { shape, target, warm_up, time, processes: vec![std::process::id()] }).await
    });
    measured.unwrap()
}

#[test]
fn every_shape_is_answered_without_a_failure() {
    for (shape, port) in [
        (Shape::Http1 { connections: 2 }, server::HTTP1),
        (Shape::Http1New { connections: 2 }, server::HTTP1),
        (Shape::Http2 { connections: 2, streams: 3 }, server::HTTP2),
        (Shape::GrpcUnary { connections: 1, streams: 3 }, server::HTTP2),
        (Shape::GrpcStream { connections: 2, streams: 2 }, server::HTTP2),
        (Shape::Bulk, server::TCP),
        (Shape::RoundTrip, server::TCP),
    ] {
        // A longer time where the machine is busy with something else.
        let mut tries = [SHORT, 10 * SHORT, 100 * SHORT].into_iter().map(|time| measured(shape, port, time));
        let measured = tries.find(|measured| measured.count > 0).unwrap_or_default();
        assert!(measured.count > 0 && measured.failures == 0, "{shape:?}: {measured:?}");
        assert!(measured.cpu_ns[0] > 0, "{shape:?}: {measured:?}");
    }
}

#[test]
fn an_open_loop_has_exactly_the_requests_that_were_due() {
    let measured = measured(Shape::Open { rate: 500, connections: 4 }, server::HTTP1, SHORT);
    assert_eq!((measured.count, measured.failures), (50, 0), "{measured:?}");
}

#[test]
fn a_server_that_speaks_something_else_is_a_failure_with_its_reason() {
    let measured = measured(Shape::Http1 { connections: 1 }, server::TCP, SHORT);
    assert!(measured.count == 0 && measured.failures > 0 && measured.problem.is_some(), "{measured:?}");
}

#[test]
fn held_connections_stay_open() {
    let held = on_this_thread(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let target = listener.local_addr()?;
        tokio::spawn(server::accept(listener, server::HTTP1));
        hold(target, true, 40).await
    });
    assert_eq!(held.unwrap().len(), 40);
}
