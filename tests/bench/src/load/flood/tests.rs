//! Floods of listeners without a proxy, and the bytes that they send.

use std::io::ErrorKind;

use bytes::Bytes;
use h2::Reason;
use tokio::net::TcpListener;

use super::*;

/// Runs `check` with a listener and its address.
fn with_listener<F: Future<Output = anyhow::Result<()>>>(check: impl FnOnce(TcpListener, SocketAddr) -> F) {
    let checked = on_this_thread(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let target = listener.local_addr()?;
        check(listener, target).await
    });
    checked.unwrap();
}

async fn started(flood: Flood, target: SocketAddr) -> anyhow::Result<Running> {
    tokio::task::spawn_blocking(move || Running::start(flood, target, BEGINS_WITHIN)).await?
}

async fn ended(running: Running) -> anyhow::Result<FloodCounts> {
    tokio::task::spawn_blocking(move || running.end()).await?
}

#[test]
fn half_a_hello_is_a_record_that_says_it_is_longer() {
    let bytes = half_hello();
    let record = 5 + usize::from(u16::from_be_bytes([bytes[3], bytes[4]]));
    let handshake = 9 + usize::from(u16::from_be_bytes([bytes[7], bytes[8]]));
    assert_eq!((bytes[0], bytes[5], record, handshake), (22, 1, 517, 517));
    assert_eq!(bytes.len(), 261);
    assert!(!HALF_HEAD.ends_with(b"\r\n\r\n") && HALF_HEAD.ends_with(b"\r\n"));
}

#[test]
fn a_rate_is_shared_by_the_connections() {
    assert_eq!(shares(20_000, 4).unwrap(), [5; 4]);
    assert_eq!(shares(2000, 1).unwrap(), [2]);
    assert_eq!(shares(100, 2).unwrap(), [1; 2], "nobody sends nothing");
    assert!(shares(1000, 0).is_err());
}

#[test]
fn a_stream_is_a_request_that_its_client_cancels() {
    with_listener(|listener, target| async move {
        let mut client = TcpStream::connect(target).await?;
        client.write_all(&[PREFACE, &canceled(1), &canceled(3)].concat()).await?;
        let mut server = h2::server::handshake(listener.accept().await?.0).await?;
        for _ in 0..2 {
            let (request, mut respond) = server.accept().await.context("no request")??;
            assert_eq!(request.uri().to_string(), "http://server.bench/");
            let reason = std::future::poll_fn(|context| respond.poll_reset(context)).await?;
            assert_eq!(reason, Reason::CANCEL);
        }
        Ok(())
    });
}

#[test]
fn held_connections_are_all_open_when_the_flood_is_in_force_and_reset_at_its_end() {
    for (flood, bytes) in
        [(Flood::Heads { connections: 40 }, HALF_HEAD.to_vec()), (Flood::Hellos { connections: 40 }, half_hello())]
    {
        with_listener(|listener, target| async move {
            let accepting = tokio::spawn(async move {
                let mut accepted = Vec::new();
                for _ in 0..40 {
                    accepted.push(listener.accept().await?.0);
                }
                anyhow::Ok(accepted)
            });
            let running = started(flood, target).await?;
            let mut accepted = accepting.await??;
            for stream in &mut accepted {
                let mut received = vec![0; bytes.len()];
                stream.read_exact(&mut received).await?;
                assert_eq!(received, bytes);
            }
            assert_eq!(ended(running).await?.open, 40);
            for stream in &mut accepted {
                assert!(stream.read_u8().await.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
            }
            Ok(())
        });
    }
}

#[test]
fn a_held_connection_that_the_proxy_closes_is_opened_again() {
    with_listener(|listener, target| async move {
        let accepting = tokio::spawn(async move {
            drop(listener.accept().await?);
            anyhow::Ok(listener.accept().await?.0)
        });
        let running = started(Flood::Heads { connections: 1 }, target).await?;
        let mut second = accepting.await??;
        let counts = ended(running).await?;
        assert!(counts.problem.is_some(), "{counts:?}");
        let mut received = Vec::new();
        second.read_to_end(&mut received).await.unwrap_err();
        Ok(())
    });
}

#[test]
fn streams_are_reset_on_every_connection_and_go_on_after_the_proxy_closed_one() {
    with_listener(|listener, target| async move {
        let serving = tokio::spawn(async move {
            // The third takes the place of one of the first two.
            for _ in 0..3 {
                let (stream, _) = listener.accept().await?;
                // The others go on while one is served.
                let mut server = h2::server::Builder::new();
                server.max_pending_accept_reset_streams(usize::MAX);
                let mut server = server.handshake::<_, Bytes>(stream).await?;
                for _ in 0..20 {
                    server.accept().await.context("no request")??;
                }
            }
            anyhow::Ok(())
        });
        let running = started(Flood::Resets { connections: 2, per_second: 4000 }, target).await?;
        serving.await??;
        let counts = ended(running).await?;
        assert!(counts.resets >= 40 && counts.problem.is_some(), "{counts:?}");
        Ok(())
    });
}

#[test]
fn connections_are_closed_at_once() {
    with_listener(|listener, target| async move {
        let accepting = tokio::spawn(async move {
            for _ in 0..100 {
                let (mut stream, _) = listener.accept().await?;
                assert!(stream.read_u8().await.is_err(), "a byte");
            }
            anyhow::Ok(())
        });
        let running = started(Flood::Connections { per_second: 2000 }, target).await?;
        accepting.await??;
        let counts = ended(running).await?;
        assert!(counts.opened > 50 && counts.open == 0, "{counts:?}");
        Ok(())
    });
}

#[test]
fn a_flood_that_nobody_accepts_is_an_error_that_says_why() {
    let target = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let within = Duration::from_millis(100);
    let failed = Running::start(Flood::Connections { per_second: 1000 }, target, within).unwrap_err();
    let failed = format!("{failed:#}");
    assert!(failed.contains("not in force") && failed.contains("connect to"), "{failed}");
}
