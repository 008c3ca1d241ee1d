//! Rates of requests: what counts, and whose it is.

use weft_proto::linkerd::{
    http_route::RequestRedirect,
    inbound::{
        HttpLocalRateLimit, Identity,
        http_local_rate_limit::{Limit, Override, r#override::ClientIdentities},
        http_route,
    },
    meta::{Metadata, Resource, metadata},
};

use super::{
    metrics::{PLAIN, SERVER, expect, target},
    routes::{prefix, route, routed, rule},
    *,
};

/// One request a second.
const ONE: Option<Limit> = Some(Limit { requests_per_second: 1 });

fn named() -> Option<Metadata> {
    let resource = Resource {
        group: "policy.linkerd.io".to_owned(),
        kind: "HTTPLocalRateLimitPolicy".to_owned(),
        name: "rates".to_owned(),
        ..Resource::default()
    };
    Some(Metadata { kind: Some(metadata::Kind::Resource(resource)) })
}

/// The labels of what exceeds the limit of this scope, by the client's `tls` and what belongs to it.
fn exceeded(world: &World, scope: &str, client: &str) -> String {
    let (target, port) = (target(world.app), world.app.port());
    let limit =
        r#"ratelimit_group="policy.linkerd.io",ratelimit_kind="HTTPLocalRateLimitPolicy",ratelimit_name="rates""#;
    format!(r#"{target},{SERVER},srv_port="{port}",{limit},ratelimit_scope="{scope}",{client}"#)
}

fn established(name: &str) -> String {
    format!(r#"tls="true",client_id="{name}""#)
}

/// The statuses of requests for these paths, one after the other on one connection.
async fn statuses(stream: Box<dyn Duplex>, paths: &[&str]) -> Vec<u16> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut statuses = Vec::new();
    for path in paths {
        sender.ready().await.unwrap();
        let request = Request::get(*path).header("host", "web.demo").body(Full::<Bytes>::default()).unwrap();
        let response = sender.send_request(request).await.unwrap();
        statuses.push(response.status().as_u16());
        response.into_body().collect().await.unwrap();
    }
    statuses
}

#[tokio::test]
async fn what_policy_or_a_filter_answers_takes_nothing_from_the_rate() {
    let world = World::new(http_app().await).await;
    let redirect = RequestRedirect { host: "elsewhere.demo".to_owned(), status: 301, ..RequestRedirect::default() };
    let filter = http_route::Filter { kind: Some(http_route::filter::Kind::Redirect(redirect)) };
    let moved = http_route::Rule { matches: vec![prefix("/moved")], filters: vec![filter] };
    let server = routed(vec![authz("server", only(&[CLIENT]))], |detect| {
        detect.http_routes.push(route("moved", Vec::new(), moved));
        detect.http_routes.push(route("r", Vec::new(), rule(prefix("/open"))));
        let limit = HttpLocalRateLimit { metadata: named(), total: ONE, ..HttpLocalRateLimit::default() };
        detect.http_local_rate_limit = Some(limit);
    });
    world.policies.publish(world.app.port(), server);
    let plain = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    assert_eq!(statuses(plain, &["/open", "/open", "/moved"]).await, [403, 403, 403]);
    let meshed = world.connect(Via::Tls, Some(ELSEWHERE)).await;
    assert_eq!(statuses(meshed, &["/none", "/moved", "/moved", "/open", "/open"]).await, [404, 301, 301, 200, 429]);
    expect(&world, "inbound_http_local_ratelimit_total", &[(&exceeded(&world, "total", &established(CLIENT)), 1)])
        .await;
}

#[tokio::test]
async fn each_client_has_its_own_rate_and_those_of_an_override_share_theirs() {
    let world = World::new(http_app().await).await;
    let server = routed(vec![authz("server", anybody())], |detect| {
        detect.http_routes.push(route("r", Vec::new(), rule(prefix("/"))));
        let identities = ["a.demo", "b.demo"].map(|name| Identity { name: name.to_owned() }).into();
        let overrides = vec![Override { limit: ONE, clients: Some(ClientIdentities { identities }) }];
        let limit = HttpLocalRateLimit { metadata: named(), identity: ONE, overrides, ..HttpLocalRateLimit::default() };
        detect.http_local_rate_limit = Some(limit);
    });
    world.policies.publish(world.app.port(), server);
    // Handshakes take none of the second.
    let mut clients = Vec::new();
    for name in ["c.demo", "d.demo", "a.demo", "b.demo"] {
        let config = world.mesh.credentials(name).client_config(&OWN.parse().unwrap(), &[]);
        let stream = world.raw(Some(ELSEWHERE), world.app).await;
        let server = rustls::pki_types::ServerName::try_from(OWN).unwrap();
        clients.push(TlsConnector::from(config).connect(server, stream).await.unwrap());
    }
    let [c, d, a, b]: [_; 4] = clients.try_into().map_err(|_| ()).unwrap();
    for (name, client, paths, expected) in [
        ("c", c, &["/", "/"][..], &[200, 429][..]),
        ("d", d, &["/"], &[200]),
        ("a", a, &["/"], &[200]),
        ("b", b, &["/"], &[429]),
    ] {
        assert_eq!(statuses(Box::new(client), paths).await, expected, "{name}");
    }
    // Clients without an identity share one rate.
    for expected in [200, 429] {
        let stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
        assert_eq!(statuses(stream, &["/"]).await, [expected]);
    }
    let clients = [established("c.demo"), established("b.demo"), PLAIN.to_owned()];
    let labels = clients.each_ref().map(|client| exceeded(&world, "identity", client));
    let expected = labels.each_ref().map(|labels| (labels.as_str(), 1));
    expect(&world, "inbound_http_local_ratelimit_total", &expected).await;
}
