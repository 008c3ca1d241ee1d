//! Routes of a server: which request takes which, with whose authorizations, and how many.

use weft_proto::linkerd::{
    http_route::{
        HeaderMatch, HostMatch, HttpRouteMatch, PathMatch, RequestRedirect, header_match, host_match, path_match,
    },
    http_types::{Headers, headers::Header},
    inbound::{
        Authz, HttpLocalRateLimit, HttpRoute, Server,
        http_local_rate_limit::Limit,
        http_route,
        proxy_protocol::{Detect, Kind},
    },
    meta::{Metadata, Resource, metadata},
};

use super::*;

/// A server of its own authorizations with these routes.
pub(super) fn routed(authorizations: Vec<Authz>, change: impl FnOnce(&mut Detect)) -> Server {
    let mut server = detecting(authorizations);
    let kind = server.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
    let Some(Kind::Detect(detect)) = kind else { panic!("not detecting") };
    detect.http_routes.clear();
    change(detect);
    server
}

pub(super) fn route(name: &str, authorizations: Vec<Authz>, rule: http_route::Rule) -> HttpRoute {
    let resource = Resource {
        group: "policy.linkerd.io".to_owned(),
        kind: "HTTPRoute".to_owned(),
        name: name.to_owned(),
        ..Resource::default()
    };
    let metadata = Some(Metadata { kind: Some(metadata::Kind::Resource(resource)) });
    HttpRoute { metadata, hosts: Vec::new(), authorizations, rules: vec![rule] }
}

pub(super) fn prefix(path: &str) -> HttpRouteMatch {
    let kind = Some(path_match::Kind::Prefix(path.to_owned()));
    HttpRouteMatch { path: Some(PathMatch { kind }), ..HttpRouteMatch::default() }
}

fn regex(path: &str) -> HttpRouteMatch {
    let kind = Some(path_match::Kind::Regex(path.to_owned()));
    HttpRouteMatch { path: Some(PathMatch { kind }), ..HttpRouteMatch::default() }
}

fn exact(path: &str) -> HttpRouteMatch {
    let kind = Some(path_match::Kind::Exact(path.to_owned()));
    HttpRouteMatch { path: Some(PathMatch { kind }), ..HttpRouteMatch::default() }
}

pub(super) fn rule(found: HttpRouteMatch) -> http_route::Rule {
    http_route::Rule { matches: vec![found], filters: Vec::new() }
}

/// A server with a route for anybody, and one for the clients of the server.
fn open_and_closed() -> Server {
    routed(vec![authz("server", only(&[CLIENT]))], |detect| {
        detect.http_routes.push(route("open", vec![authz("anybody", anybody())], rule(prefix("/open"))));
        detect.http_routes.push(route("closed", Vec::new(), rule(prefix("/closed"))));
    })
}

#[tokio::test]
async fn authorizations_of_a_route_admit_to_that_route_alone() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), open_and_closed());
    for (via, path, expected) in [
        (Via::Plain, "/open/x", 200),
        (Via::Plain, "/closed/x", 403),
        (Via::Plain, "/other", 404),
        (Via::Tls, "/open/x", 200),
        (Via::Tls, "/closed/x", 200),
        (Via::Tls, "/other", 404),
    ] {
        assert_eq!(world.get(via, Some(ELSEWHERE), path).await.0, expected, "{path}");
    }
}

/// A server with a route of everything for anybody, and these for the clients of the server alone.
fn closed_in_open(closed: &[HttpRouteMatch]) -> Server {
    routed(vec![authz("server", only(&[CLIENT]))], |detect| {
        detect.http_routes.push(route("all", vec![authz("anybody", anybody())], rule(prefix("/"))));
        detect.http_routes.extend(closed.iter().map(|found| route("closed", Vec::new(), rule(found.clone()))));
    })
}

/// A server with routes of these for anybody.
fn open(found: &[HttpRouteMatch]) -> Server {
    routed(Vec::new(), |detect| {
        let open = |found: &HttpRouteMatch| route("open", vec![authz("anybody", anybody())], rule(found.clone()));
        detect.http_routes.extend(found.iter().map(open));
    })
}

/// Statuses of plaintext requests for paths.
async fn expect_plain(world: &World, expected: &[(&str, u16)]) {
    for (path, status) in expected {
        assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), path).await.0, *status, "{path}");
    }
}

/// Applications decode paths before they route them, merge slashes, drop parameters, and resolve dots.
#[tokio::test]
async fn a_path_that_an_application_may_read_otherwise_needs_the_rights_for_each_reading() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), closed_in_open(&[prefix("/admin"), exact("/one")]));
    for (path, plain, meshed) in [
        ("/other", 200, 200),
        ("/other%2Fadmin", 200, 200),
        ("/admin", 403, 200),
        ("/%61dmin", 403, 200),
        ("/admin%2Fusers", 403, 200),
        ("//admin/users", 403, 200),
        ("//x/admin", 403, 200),
        ("///x/admin", 403, 200),
        (r"/\x/admin", 403, 200),
        ("//x%2Fy/%61dmin", 403, 200),
        ("/admin;v=1/users", 403, 200),
        ("/admin/", 403, 200),
        ("/one/x", 200, 200),
        // Known: an application that ignores the last slash reads this as `/one`.
        ("/one/", 200, 200),
        ("/one;v=1", 403, 200),
        ("/one;%2Fx", 403, 200),
        (r"/one;\x", 403, 200),
        ("/%2561dmin", 200, 200),
        ("/x/../admin", 400, 400),
        ("/x/%2e%2e/admin", 400, 400),
    ] {
        assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), path).await.0, plain, "{path}");
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), path).await.0, meshed, "{path}");
    }
    // A reading without a route is refused as any path without one.
    world.policies.publish(world.app.port(), open(&[prefix("/files")]));
    let expected = [("/files/a%20b", 200), ("/%66iles", 404), (r"/files\x", 404), ("/files/..%2Fadmin", 400)];
    expect_plain(&world, &expected).await;
    // Where no route is a resource there is nothing to get around, with a rate limit or without.
    let mut limited = detecting(vec![authz("a", anybody())]);
    let kind = limited.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
    let Some(Kind::Detect(detect)) = kind else { panic!("not detecting") };
    detect.http_local_rate_limit = Some(HttpLocalRateLimit::default());
    for server in [detecting(vec![authz("a", anybody())]), limited] {
        world.policies.publish(world.app.port(), server);
        expect_plain(&world, &[("/x/../%61", 200), ("//healthz", 200)]).await;
    }
}

/// The Gateway API allows encoded characters and parameters in a route's path.
#[tokio::test]
async fn a_route_whose_own_path_is_encoded_takes_its_requests_in_every_reading() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), open(&[prefix("/my%20docs"), exact("/a;v=1")]));
    let expected = [("/my%20docs", 200), ("/my%20docs/a%20b", 200), ("/a;v=1", 200), ("/other", 404), ("/a;v=2", 404)];
    expect_plain(&world, &expected).await;
    // What an expression matches cannot be read: it has to match all readings.
    for (expression, expected) in [("/my%20docs/.*", 404), ("/my( |%20)docs/.*", 200)] {
        world.policies.publish(world.app.port(), open(&[regex(expression)]));
        expect_plain(&world, &[("/my%20docs/a", expected)]).await;
    }
    let closed = [prefix("/my%20docs"), exact("/a%2Bb"), exact("/%61dmin"), exact("/b;v=1")];
    world.policies.publish(world.app.port(), closed_in_open(&closed));
    let expected =
        ["/my%20docs", "/my%20docs/a", "/m%79%20docs", "//my%20docs", "/my%20docs;v/a", "/a+b", "/admin", "/b;v=2"]
            .map(|path| (path, 403));
    expect_plain(&world, &expected).await;
    expect_plain(&world, &[("/my", 200), ("/b", 200), ("/x%20y", 200)]).await;
    // What others may not, the clients of the server may.
    for path in ["/my%20docs/a", "/m%79%20docs", "/a+b", "/b;v=1"] {
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), path).await.0, 200, "{path}");
    }
}

/// A port with detection takes bytes as long as no resource says anything about its requests.
#[tokio::test]
async fn bytes_do_not_pass_a_port_with_routes_or_limits() {
    let world = World::new(banner_app().await).await;
    let with_route = || {
        routed(vec![authz("all", anybody())], |detect| {
            detect.http_routes.push(route("all", Vec::new(), rule(prefix("/"))));
        })
    };
    let with_limit = || {
        let default = Some(Metadata { kind: Some(metadata::Kind::Default("default".to_owned())) });
        routed(vec![authz("all", anybody())], |detect| {
            detect.http_routes.push(HttpRoute { metadata: default, ..route("all", Vec::new(), rule(prefix("/"))) });
            let total = Some(Limit { requests_per_second: 100 });
            detect.http_local_rate_limit = Some(HttpLocalRateLimit { total, ..HttpLocalRateLimit::default() });
        })
    };
    for server in [with_route(), with_limit()] {
        world.policies.publish(world.app.port(), server);
        for via in [Via::Plain, Via::Tls, Via::Direct(None)] {
            let mut stream = world.connect(via, Some(ELSEWHERE)).await;
            stream.write_all(b"GET /\r\n and long enough to tell").await.unwrap();
            expect_closed(&mut stream).await;
        }
    }
    // A connection that is open when the route comes ends.
    world.policies.publish(world.app.port(), detecting(vec![authz("all", anybody())]));
    let mut stream = world.connect(Via::Direct(None), Some(ELSEWHERE)).await;
    expect_banner(&mut stream).await;
    world.policies.publish(world.app.port(), with_route());
    expect_closed(&mut stream).await;
}

#[tokio::test]
async fn a_request_in_pieces_is_a_request_where_bytes_do_not_pass() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), open_and_closed());
    for (path, expected) in [("/open", "HTTP/1.1 200"), ("/closed", "HTTP/1.1 403")] {
        let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
        for piece in ["GET ", path, " HTTP/1.1\r\nhost: web\r\nl5d-client-id: forged\r\n\r\n"] {
            stream.write_all(piece.as_bytes()).await.unwrap();
            // The proxy reads each piece by itself: the runtime looks for readable sockets every 61 turns.
            for _ in 0..200 {
                tokio::task::yield_now().await;
            }
        }
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        assert_eq!(std::str::from_utf8(&status).unwrap(), expected, "{path}");
    }
}

#[tokio::test]
async fn a_route_without_rules_takes_no_request() {
    let world = World::new(http_app().await).await;
    let server = routed(vec![authz("server", anybody())], |detect| {
        let unreadable = HttpRoute { rules: Vec::new(), ..route("r", Vec::new(), rule(prefix("/"))) };
        detect.http_routes.push(unreadable);
    });
    world.policies.publish(world.app.port(), server);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 404);
}

#[tokio::test]
async fn hosts_and_headers_choose_the_route_and_its_filters_change_the_request() {
    let world = World::new(http_app().await).await;
    let canary = HeaderMatch { name: "x-canary".to_owned(), value: Some(header_match::Value::Exact(b"1".to_vec())) };
    let found = HttpRouteMatch { headers: vec![canary], ..prefix("/") };
    let set = Headers { headers: vec![Header { name: "x-added".to_owned(), value: b"by-route".to_vec() }] };
    let modifier = weft_proto::linkerd::http_route::RequestHeaderModifier {
        set: Some(set),
        ..weft_proto::linkerd::http_route::RequestHeaderModifier::default()
    };
    let filter = http_route::Filter { kind: Some(http_route::filter::Kind::RequestHeaderModifier(modifier)) };
    let changed = http_route::Rule { matches: vec![found], filters: vec![filter] };
    let host = HostMatch { r#match: Some(host_match::Match::Exact("a".to_owned())) };
    let server = routed(vec![authz("server", anybody())], |detect| {
        detect.http_routes.push(HttpRoute { hosts: vec![host], ..route("r", Vec::new(), changed) });
    });
    world.policies.publish(world.app.port(), server);
    for (host, canary, expected) in [("a", "1", 200), ("a", "2", 404), ("b", "1", 404)] {
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nx-canary: {canary}\r\nconnection: close\r\n\r\n");
        let answer = requests::exchange(&world, &request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected} ")), "{host} {canary}: {answer}");
        assert_eq!(answer.contains("added=by-route "), expected == 200, "{answer}");
    }
}

#[tokio::test]
async fn requests_beyond_the_rate_are_refused() {
    let world = World::new(http_app().await).await;
    let server = routed(vec![authz("server", anybody())], |detect| {
        detect.http_routes.push(route("r", Vec::new(), rule(prefix("/"))));
        let total = Some(Limit { requests_per_second: 1 });
        detect.http_local_rate_limit = Some(HttpLocalRateLimit { total, ..HttpLocalRateLimit::default() });
    });
    world.policies.publish(world.app.port(), server);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 200);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn redirects_and_refusals_are_answers_without_a_body() {
    let world = World::new(http_app().await).await;
    let redirect = RequestRedirect { host: "elsewhere.demo".to_owned(), status: 301, ..RequestRedirect::default() };
    let filter = http_route::Filter { kind: Some(http_route::filter::Kind::Redirect(redirect)) };
    let moved = http_route::Rule { matches: vec![prefix("/moved")], filters: vec![filter] };
    let server = routed(vec![authz("server", only(&[CLIENT]))], |detect| {
        detect.http_routes.push(route("moved", vec![authz("anybody", anybody())], moved));
        detect.http_routes.push(route("closed", Vec::new(), rule(prefix("/closed"))));
    });
    world.policies.publish(world.app.port(), server);
    for (path, status, code, location) in [
        ("/moved/x?y", 301, "5", Some("http://elsewhere.demo/moved/x?y")),
        ("/closed", 403, "7", None),
        ("/nothing", 404, "5", None),
    ] {
        let (answered, headers, body) = world.get(Via::Plain, Some(ELSEWHERE), path).await;
        assert_eq!((answered.as_u16(), body.as_str(), &headers["content-length"]), (status, "", &"0".parse().unwrap()));
        assert_eq!(headers.get("location").map(|location| location.to_str().unwrap()), location, "{path}");
        assert!(!headers.contains_key("connection"), "{path}: {headers:?}");
        let call = Request::post(format!("http://web.demo{path}")).header("content-type", "application/grpc");
        let (answered, headers, body) = world.get_http2(Via::Plain, Some(ELSEWHERE), call.body(()).unwrap()).await;
        assert_eq!((answered.as_u16(), body.as_str(), &headers["grpc-status"]), (200, "", &code.parse().unwrap()));
        assert!(!headers.contains_key("location"), "{path}: {headers:?}");
    }
}
