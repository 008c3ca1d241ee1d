//! Mesh TLS of accepted connections: which clients there are, what is negotiated, and what ends a connection before it
//! is served.

use std::io;

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use weft_proto::linkerd::inbound::authn::{Permit, PermitMeshTls, PermitUnauthenticated, permit_mesh_tls::Clients};
use weft_tls::credentials::bootstrap_client_config;

use super::{metrics::eventually, *};
use crate::testing::{INJECTORS_FILTER, Lines};

/// TLS with the proxy, as if the original destination were `target`.
async fn connect(world: &World, config: &Arc<ClientConfig>, target: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
    let stream = world.raw(Some(ELSEWHERE), target).await;
    TlsConnector::from(Arc::clone(config)).connect(ServerName::try_from(OWN).unwrap(), stream).await
}

/// The proxy's own port.
fn own(world: &World) -> SocketAddr {
    SocketAddr::new(world.app.ip(), world.registry.config.inbound.listen.port())
}

fn member(world: &World, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    world.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), alpn)
}

/// Waits until `expected` connections to `target` have failed like this.
async fn expect_failed(world: &World, error: &str, target: SocketAddr, expected: u64) {
    let (error, target) = (format!(r#"error="{error}""#), format!(r#"target_addr="{target}""#));
    eventually(world, |text| world.counted(text, "inbound_tcp_errors_total", &[&error, &target]) == expected).await;
}

#[tokio::test]
async fn clients_are_of_the_mesh_or_anonymous_and_the_own_port_is_for_those_of_the_mesh() {
    let world = World::new(http_app().await).await;
    let server = OWN.parse().unwrap();
    let member = member(&world, &[ALPN]);
    let anonymous = bootstrap_client_config(world.mesh.anchors(), &server, &[ALPN]);
    let stranger = Mesh::trusting(&world.mesh).credentials(CLIENT).client_config(&server, &[ALPN]);

    let any_mesh_tls = PermitMeshTls { clients: Some(Clients::Unauthenticated(PermitUnauthenticated {})) };
    let permits = [(anybody(), 200), (Permit::MeshTls(any_mesh_tls), 200), (only(&[CLIENT]), 403)];
    for (permit, of_anonymous) in permits {
        world.policies.publish(world.app.port(), detecting(vec![authz("web", permit.clone())]));
        for (config, id, expected) in [(&member, CLIENT, 200), (&anonymous, "", of_anonymous)] {
            let stream = connect(&world, config, world.app).await.unwrap();
            let (status, _, body) = get_over(stream, "/").await;
            assert_eq!(status, expected, "{permit:?} {id}");
            assert_eq!(body.contains(&format!(" id={id} ")), expected == 200, "{body}");
        }
        // Whatever the policy says, and although it trusts this server.
        expect_refused(connect(&world, &stranger, world.app).await).await;
    }

    let header = TransportHeader { port: NonZeroU16::new(world.app.port()).unwrap(), name: None, protocol: None };
    world.policies.publish(world.app.port(), detecting(vec![authz("web", anybody())]));
    for config in [&anonymous, &stranger] {
        let mut connected = connect(&world, config, own(&world)).await;
        if let Ok(stream) = &mut connected {
            // It may be closed already.
            let _ = stream.write_all(&header.encode()).await;
        }
        expect_refused(connected).await;
    }
    expect_failed(&world, "not meshed", own(&world), 1).await;
    expect_failed(&world, "i/o", own(&world), 1).await;
    let http1 = TransportHeader { protocol: Some(SessionProtocol::Http1), ..header };
    let mut stream = connect(&world, &member, own(&world)).await.unwrap();
    stream.write_all(&http1.encode()).await.unwrap();
    assert_eq!(get_over(stream, "/").await.0, 200);
}

#[tokio::test]
async fn a_client_of_another_mesh_is_an_error_of_its_connection() {
    let world = World::new(http_app().await).await;
    let stranger = Mesh::trusting(&world.mesh).credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[]);
    expect_refused(connect(&world, &stranger, world.app).await).await;
    expect_failed(&world, "i/o", world.app, 1).await;
}

/// In TLS 1.3 a client has finished before its certificate is judged.
async fn expect_refused(connected: io::Result<TlsStream<TcpStream>>) {
    if let Ok(stream) = connected {
        expect_closed(&mut (Box::new(stream) as Box<dyn Duplex>)).await;
    }
}

#[tokio::test]
async fn an_application_protocol_is_negotiated_on_the_own_port_alone() {
    let world = World::new(http_app().await).await;
    let config = member(&world, &[b"h2", ALPN, b"http/1.1"]);
    for (target, expected) in [(world.app, None), (own(&world), Some(ALPN))] {
        let stream = connect(&world, &config, target).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), expected, "{target}");
    }
}

#[tokio::test]
async fn there_is_no_tls_before_the_first_certificate() {
    let (certified, credentials) = watch::channel(None);
    let world = World::built(http_app().await, |_| {}, |shared| shared.credentials = credentials).await;
    let config = member(&world, &[ALPN]);
    for target in [world.app, own(&world)] {
        assert!(connect(&world, &config, target).await.is_err(), "{target}");
        expect_failed(&world, "no certificate", target, 1).await;
    }
    certified.send_replace(Some(world.mesh.credentials(OWN)));
    let stream = connect(&world, &config, world.app).await.unwrap();
    assert_eq!(get_over(stream, "/").await.0, 200);
}

#[tokio::test]
async fn a_server_whose_certificate_has_expired_says_so() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let (certified, credentials) = watch::channel(None);
    let world = World::built(http_app().await, |_| {}, |shared| shared.credentials = credentials).await;
    certified.send_replace(Some(world.mesh.expired(OWN).await));
    let config = member(&world, &[ALPN]);
    for target in [world.app, own(&world)] {
        let error = connect(&world, &config, target).await.unwrap_err().to_string();
        assert!(error.to_lowercase().contains("expired"), "the client knows why: {error}");
        expect_failed(&world, "certificate expired", target, 1).await;
    }
    let text = lines.text();
    let named = format!("the proxy's certificate for {OWN} expired at 20");
    let closed = |line: &&str| line.contains(" INFO ") && line.contains("Connection closed") && line.contains(&named);
    assert_eq!(text.lines().filter(closed).count(), 2, "{text}");

    certified.send_replace(Some(world.mesh.credentials(OWN)));
    let stream = connect(&world, &config, world.app).await.unwrap();
    assert_eq!(get_over(stream, "/").await.0, 200);
}

#[tokio::test]
async fn a_client_that_does_not_finish_what_it_begins_is_closed() {
    // Long enough for a handshake on a busy machine, after which the header is missing.
    let world = World::with(http_app().await, |config| config.inbound.detect_timeout = Duration::from_secs(1)).await;
    let hello = world.hello(OWN);
    let mut clients: Vec<Box<dyn Duplex>> = Vec::new();
    for (target, sent) in [(world.app, &hello[..40]), (own(&world), &hello[..40]), (own(&world), &hello[..0])] {
        let mut stream = world.raw(Some(ELSEWHERE), target).await;
        stream.write_all(sent).await.unwrap();
        clients.push(Box::new(stream));
    }
    clients.push(Box::new(connect(&world, &member(&world, &[ALPN]), own(&world)).await.unwrap()));
    for client in &mut clients {
        expect_closed(client).await;
    }
    expect_failed(&world, "tls detection timeout", world.app, 1).await;
    expect_failed(&world, "tls detection timeout", own(&world), 2).await;
    expect_failed(&world, "i/o", own(&world), 1).await;
}
