//! The order of matches, by examples and against a naive specification.

use proptest::prelude::*;

use super::*;
use crate::route::{Rule, expression::Expressions};

fn path(path: PathMatch) -> RequestMatch {
    RequestMatch { path: Some(path), ..RequestMatch::default() }
}

fn prefix(prefix: &str) -> RequestMatch {
    path(PathMatch::Prefix(prefix.into()))
}

fn exact(exact: &str) -> RequestMatch {
    path(PathMatch::Exact(exact.into()))
}

fn whole(regex: &str) -> Regex {
    Expressions::new().whole(regex).unwrap()
}

fn regex(regex: &str) -> RequestMatch {
    path(PathMatch::Regex(whole(regex)))
}

fn request(uri: &str) -> Request<()> {
    Request::builder().uri(uri).header("host", "web.demo:80").body(()).unwrap()
}

fn route(hosts: Vec<HostMatch>, rules: Vec<Vec<RequestMatch>>) -> Route<()> {
    Route { hosts, rules: rules.into_iter().map(|matches| Rule { matches, action: () }).collect() }
}

/// Route and rule of a request.
fn taken<B>(routes: &[Route<()>], request: &Request<B>) -> Option<(usize, usize)> {
    find(routes, request).map(|found| (found.route, found.rule))
}

#[test]
fn the_most_specific_match_wins() {
    let routes = [
        route(vec![], vec![vec![], vec![prefix("/a")], vec![prefix("/a/b"), exact("/z")]]),
        route(vec![HostMatch::Exact("web.demo".into())], vec![vec![exact("/only-here")]]),
        route(vec![HostMatch::Suffix(vec!["demo".into()])], vec![vec![prefix("/s")]]),
    ];
    for (uri, expected) in [
        ("/", Some((0, 0))),
        ("/a", Some((0, 1))),
        ("/ab", Some((0, 0))),
        ("/a/b/c", Some((0, 2))),
        ("/z", Some((0, 2))),
        ("/only-here", Some((1, 0))),
        ("/s/x", Some((2, 0))),
    ] {
        assert_eq!(taken(&routes, &request(uri)), expected, "{uri}");
    }
}

#[test]
fn paths_are_ranked_by_how_much_of_them_matched() {
    let by_header = RequestMatch {
        headers: vec![(HOST, ValueMatch::Exact(HeaderValue::from_static("web.demo:80")))],
        ..prefix("/")
    };
    for (name, worse, better, uri) in [
        ("a regular expression counts the whole path", prefix("/"), regex("/admin/.*"), "/admin/x"),
        ("a longer prefix than a short expression's path", prefix("/"), prefix("/admin"), "/admin/x"),
        ("no path is the prefix /", RequestMatch::default(), by_header.clone(), "/"),
        ("exact before a prefix of the same length", prefix("/a"), exact("/a"), "/a"),
        ("path before headers", by_header, prefix("/a"), "/a"),
    ] {
        for (routes, expected) in [([worse.clone(), better.clone()], (1, 0)), ([better, worse], (0, 0))] {
            let routes = routes.map(|one| route(vec![], vec![vec![one]]));
            assert_eq!(taken(&routes, &request(uri)), Some(expected), "{name}");
        }
    }
}

#[test]
fn a_method_counts_before_headers_and_headers_before_query() {
    let header = || (HOST, ValueMatch::Exact(HeaderValue::from_static("web.demo:80")));
    let param = |name: &str| (name.to_owned(), QueryMatch::Exact("1".into()));
    let method = RequestMatch { method: Some(Method::GET), ..RequestMatch::default() };
    let headers = RequestMatch { headers: vec![header()], ..RequestMatch::default() };
    let query = RequestMatch { query: vec![param("a"), param("b")], ..RequestMatch::default() };
    let routes = [query, headers, method].map(|one| route(vec![], vec![vec![one]]));
    let request = request("/?a=1&b=1");
    assert_eq!(taken(&routes, &request), Some((2, 0)));
    assert_eq!(taken(&routes[..2], &request), Some((1, 0)));
}

#[test]
fn the_first_of_equals_wins() {
    let twice = [prefix("/a"), prefix("/a/")].map(|one| route(vec![], vec![vec![one.clone()], vec![one]]));
    assert_eq!(taken(&twice, &request("/a")), Some((0, 0)));
}

#[test]
fn a_prefix_says_how_much_it_matched() {
    for (one, expected) in [
        (prefix("/a"), Some(2)),
        (prefix("/a/"), Some(2)),
        (prefix("/"), Some(1)),
        (RequestMatch::default(), Some(1)),
        (exact("/a/b"), None),
        (regex("/a/."), None),
    ] {
        let routes = [route(vec![], vec![vec![one.clone()]])];
        assert_eq!(find(&routes, &request("/a/b")).unwrap().prefix, expected, "{one:?}");
    }
}

#[test]
fn no_route_is_no_match() {
    let routes = [route(vec![HostMatch::Exact("other.demo".into())], vec![vec![]])];
    assert_eq!(taken(&routes, &request("/")), None);
    assert_eq!(taken(&[], &request("/")), None);
}

#[test]
fn hosts_match_without_case_and_suffixes_need_a_label_before_them() {
    let suffix = HostMatch::Suffix(vec!["mesh".into(), "Demo".into()]);
    let name = HostMatch::Exact("Web.Demo".into());
    let rooted = HostMatch::Exact("web.demo.".into());
    for (one, host, expected) in [
        (&name, "web.demo", Some(HostRank::Exact(8))),
        (&name, "WEB.demo.", Some(HostRank::Exact(8))),
        (&name, "web.demos", None),
        (&rooted, "web.demo.", Some(HostRank::Exact(9))),
        (&rooted, "web.demo", None),
        (&suffix, "web.demo.mesh", Some(HostRank::Suffix(10))),
        (&suffix, "a.b.DEMO.mesh.", Some(HostRank::Suffix(10))),
        (&suffix, "demo.mesh", None),
        (&suffix, "webdemo.mesh", None),
    ] {
        assert_eq!(one.rank(host), expected, "{one:?} {host}");
    }
    assert!(HostRank::Exact(1) > HostRank::Suffix(9));
}

#[test]
fn query_parameters_compare_decoded() {
    let one = |value| RequestMatch { query: vec![("role".into(), value)], ..RequestMatch::default() };
    let admin = one(QueryMatch::Exact("admin now".into()));
    let path = one(QueryMatch::Regex(whole("bar/.+")));
    let empty = one(QueryMatch::Exact(String::new()));
    for (one, uri, expected) in [
        (&admin, "/?role=%61dmin%20now", true),
        (&admin, "/?role=admin+now", true),
        (&admin, "/?%72ole=admin+now", true),
        (&admin, "/?a&role=admin+now&b", true),
        (&admin, "/?role=admin%2Bnow", false),
        (&admin, "/", false),
        (&path, "/?role=bar%2Fhi", true),
        (&path, "/?role=xbar%2Fhi", false),
        (&empty, "/?role", true),
        (&empty, "/?role=x", false),
    ] {
        let routes = [route(vec![], vec![vec![one.clone()]])];
        assert_eq!(find(&routes, &request(uri)).is_some(), expected, "{one:?} {uri}");
    }
}

#[test]
fn grpc_calls_are_posts_to_a_service_and_a_method() {
    let rpc = |service: &str, method: &str| {
        let some = |name: &str| Some(name.to_owned()).filter(|name| !name.is_empty());
        path(PathMatch::Rpc { service: some(service), method: some(method) })
    };
    let call = |method: Method, uri: &str| Request::builder().method(method).uri(uri).body(()).unwrap();
    for (service, method, expected) in [
        ("echo.Echo", "Say", true),
        ("echo.Echo", "", true),
        ("", "Say", true),
        ("", "", true),
        ("echo", "Say", false),
        ("echo.Echo", "Sing", false),
    ] {
        let routes = [route(vec![], vec![vec![rpc(service, method)]])];
        assert_eq!(find(&routes, &call(Method::POST, "/echo.Echo/Say")).is_some(), expected, "{service}/{method}");
        assert_eq!(find(&routes, &call(Method::GET, "/echo.Echo/Say")), None);
        assert_eq!(find(&routes, &call(Method::POST, "/echo.Echo")), None);
    }
    // The service counts before the method, and a rule without matches comes last.
    let rules = [path(PathMatch::Any), rpc("", "Say"), rpc("echo.Echo", ""), rpc("echo.Echo", "Say")];
    let routes = rules.map(|one| route(vec![], vec![vec![one]]));
    for count in 1..=4 {
        assert_eq!(taken(&routes[..count], &call(Method::POST, "/echo.Echo/Say")), Some((count - 1, 0)));
    }
    assert_eq!(taken(&routes, &call(Method::GET, "/other")), Some((0, 0)));
}

/// One match of the specification, as plain data.
#[derive(Clone, Debug)]
struct Spec {
    path: Option<(Kind, &'static str)>,
    /// How many headers, and how many parameters of the query, it wants.
    headers: usize,
    params: usize,
    method: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Exact,
    Prefix,
    Regex,
}

/// What a request has.
#[derive(Clone, Copy, Debug)]
struct Sent {
    host: &'static str,
    path: &'static str,
    headers: usize,
    params: usize,
    method: &'static str,
}

/// With path segments of length 1, every expression `/.../...` has a plain meaning: a dot matches any segment.
const PATHS: [&str; 6] = ["/", "/a", "/a/b", "/b", "/./b", "/a/."];
const HEADERS: [&str; 2] = ["x-a", "x-b"];
const PARAMS: [&str; 2] = ["p", "q"];
/// Hosts of routes, in which `*` stands for one label or more.
const HOSTS: [&str; 4] = ["web.demo", "api.web.demo", "*.demo", "*.web.demo"];

impl Spec {
    fn to_match(&self) -> RequestMatch {
        let header =
            |name: &&'static str| (HeaderName::from_static(name), ValueMatch::Exact(HeaderValue::from_static("1")));
        RequestMatch {
            path: self.path.map(|(kind, path)| match kind {
                Kind::Exact => PathMatch::Exact(path.into()),
                Kind::Prefix => PathMatch::Prefix(path.into()),
                Kind::Regex => PathMatch::Regex(whole(path)),
            }),
            headers: HEADERS[..self.headers].iter().map(header).collect(),
            query: PARAMS[..self.params]
                .iter()
                .map(|name| ((*name).to_owned(), QueryMatch::Exact("1".into())))
                .collect(),
            method: self.method.map(|method| method.parse().unwrap()),
        }
    }

    /// How specific the match is, as a list of numbers, or `None` if it does not match; segment by segment.
    fn rank(&self, sent: &Sent) -> Option<[usize; 5]> {
        let segments = |path: &str| -> Vec<String> {
            path.split('/').filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
        };
        let (path, mut length, mut is_exact) = (segments(sent.path), 1, 0);
        if let Some((kind, wanted)) = self.path {
            let of = segments(wanted);
            let same = |dots: bool| of.iter().zip(&path).all(|(of, sent)| of == sent || (dots && of == "."));
            let fits = match kind {
                Kind::Exact => wanted == sent.path,
                Kind::Prefix => of.len() <= path.len() && same(false),
                Kind::Regex => of.len() == path.len() && same(true),
            };
            if !fits {
                return None;
            }
            is_exact = usize::from(kind == Kind::Exact);
            length = if kind == Kind::Prefix { wanted.len() } else { sent.path.len() };
        }
        let has_method = self.method.is_none_or(|of| of == sent.method);
        let fits = self.headers <= sent.headers && self.params <= sent.params && has_method;
        fits.then_some([length, is_exact, self.method.is_some().into(), self.headers, self.params])
    }
}

/// How specific a route's best host is: an exact one before a suffix, a longer one before a shorter, any before none.
fn rank_of_hosts(hosts: &[&str], sent: &str) -> Option<(usize, usize)> {
    let one = |host: &&str| match host.strip_prefix('*') {
        None => (*host == sent).then_some((2, host.len())),
        Some(suffix) => sent.ends_with(suffix).then_some((1, suffix.len())),
    };
    if hosts.is_empty() { Some((0, 0)) } else { hosts.iter().filter_map(one).max() }
}

fn to_host(host: &&'static str) -> HostMatch {
    match host.strip_prefix("*.") {
        None => HostMatch::Exact((*host).into()),
        Some(suffix) => HostMatch::Suffix(suffix.rsplit('.').map(Into::into).collect()),
    }
}

fn specs() -> impl Strategy<Value = Spec> {
    let kind = prop_oneof![Just(Kind::Exact), Just(Kind::Prefix), Just(Kind::Regex)];
    let path = (kind, proptest::sample::select(&PATHS[..]));
    let method = proptest::sample::select(&["GET", "POST"][..]);
    (proptest::option::of(path), 0..=HEADERS.len(), 0..=PARAMS.len(), proptest::option::of(method))
        .prop_map(|(path, headers, params, method)| Spec { path, headers, params, method })
}

/// A route's hosts, and its list of rules, each a list of matches.
fn routes() -> impl Strategy<Value = (Vec<&'static str>, Vec<Vec<Spec>>)> {
    let hosts = proptest::collection::vec(proptest::sample::select(&HOSTS[..]), 0..3);
    (hosts, proptest::collection::vec(proptest::collection::vec(specs(), 0..3), 0..3))
}

fn requests() -> impl Strategy<Value = Sent> {
    (
        proptest::sample::select(&["web.demo", "api.web.demo", "demo", "x.api.web.demo"][..]),
        proptest::sample::select(&PATHS[..]),
        0..=HEADERS.len(),
        0..=PARAMS.len(),
        proptest::sample::select(&["GET", "POST", "PUT"][..]),
    )
        .prop_map(|(host, path, headers, params, method)| Sent { host, path, headers, params, method })
}

proptest! {
    /// The result is the first of the rules that the specification ranks highest, of the routes with the best host.
    #[test]
    fn finds_what_the_specification_finds(policy in proptest::collection::vec(routes(), 0..4), sent in requests()) {
        type Rank = ((usize, usize), [usize; 5]);
        let mut expected: Option<(Rank, (usize, usize))> = None;
        for (at_route, (hosts, rules)) in policy.iter().enumerate() {
            let Some(of_hosts) = rank_of_hosts(hosts, sent.host) else { continue };
            for (at_rule, matches) in rules.iter().enumerate() {
                let of_rule = if matches.is_empty() {
                    Some([1, 0, 0, 0, 0])
                } else {
                    matches.iter().filter_map(|spec| spec.rank(&sent)).max()
                };
                if let Some(of_rule) = of_rule && expected.is_none_or(|(best, _)| (of_hosts, of_rule) > best) {
                    expected = Some(((of_hosts, of_rule), (at_route, at_rule)));
                }
            }
        }
        let routes: Vec<Route<()>> = policy
            .iter()
            .map(|(hosts, rules)| {
                let rules = rules.iter().map(|specs| specs.iter().map(Spec::to_match).collect()).collect();
                route(hosts.iter().map(to_host).collect(), rules)
            })
            .collect();
        let query: Vec<_> = PARAMS[..sent.params].iter().map(|name| format!("{name}=%31")).collect();
        let mut request = Request::builder().method(sent.method).uri(format!("{}?{}", sent.path, query.join("&")));
        for header in &HEADERS[..sent.headers] {
            request = request.header(*header, "1");
        }
        let request = request.header("host", sent.host).body(()).unwrap();
        prop_assert_eq!(taken(&routes, &request), expected.map(|(_, place)| place));
    }
}
