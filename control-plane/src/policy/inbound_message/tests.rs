//! From manifests to messages, field by field as Linkerd's controller answers.

use weft_index::{Cluster, Event, Index, Key};
use weft_k8s_api::{manifest, policy::DefaultPolicy};
use weft_proto::linkerd::{
    grpc_route::GrpcRpcMatch,
    http_route::{
        HeaderMatch, HostMatch, PathModifier, QueryParamMatch, RequestHeaderModifier, RequestRedirect, header_match,
        host_match, path_modifier, query_param_match,
    },
    http_types::{Headers, Scheme, headers::Header, scheme},
    meta::metadata,
};

use super::*;
use crate::args;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web, linkerd.io/control-plane-ns: linkerd}}
spec: {containers: [{name: app, livenessProbe: {httpGet: {path: /live, port: 8080}}}]}
";

/// The message about port 8080 of a pod whose Server `s` has this protocol.
fn answer(protocol: &str, probe_networks: &[&str], objects: &str) -> Server {
    let mut index = Index::new(Cluster {
        networks: Vec::new(),
        probe_networks: probe_networks.iter().map(|network| network.parse().unwrap()).collect(),
        default_policy: DefaultPolicy::Deny,
        ..args::default_cluster()
    });
    let manifests = format!(
        "{POD}---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: s, namespace: shop}}
spec: {{podSelector: {{}}, port: 8080, proxyProtocol: {protocol}}}
{objects}"
    );
    let read = manifest::parse("test.yaml".as_ref(), &manifests);
    // What is unreadable is applied as the sources do.
    let unreadable = read.errors.into_iter().map(|error| Event::Apply(error.restrictive.unwrap()));
    let objects = read.objects.into_iter().map(|located| Event::Apply(Box::new(located.object)));
    index.apply(objects.chain(unreadable).collect());
    let snapshot = index.watch_inbound(&Key::new("shop", "web-1"), 8080).unwrap();
    let message = server(snapshot.borrow().as_ref().unwrap());
    for authz in message.authorizations.iter().chain(http(&message).iter().flat_map(|route| &route.authorizations)) {
        assert!(!authz.networks.is_empty(), "stock proxies refuse an authorization without networks");
    }
    message
}

fn kind(message: &Server) -> &Kind {
    message.protocol.as_ref().unwrap().kind.as_ref().unwrap()
}

fn http(message: &Server) -> &[HttpRoute] {
    match kind(message) {
        Kind::Detect(detect) => &detect.http_routes,
        Kind::Http1(http1) => &http1.routes,
        Kind::Http2(http2) => &http2.routes,
        Kind::Grpc(_) | Kind::Opaque(_) | Kind::Tls(_) => &[],
    }
}

fn grpc(message: &Server) -> &[GrpcRoute] {
    match kind(message) {
        Kind::Grpc(grpc) => &grpc.routes,
        other => panic!("{other:?}"),
    }
}

/// `kind/name` of a route.
fn name(metadata: Option<&Metadata>) -> String {
    match metadata.and_then(|metadata| metadata.kind.as_ref()) {
        Some(metadata::Kind::Default(name)) => format!("default/{name}"),
        Some(metadata::Kind::Resource(resource)) => {
            assert_eq!((&*resource.namespace, &*resource.section, resource.port), ("", "", 0), "as Linkerd's");
            format!("{}/{}/{}", resource.group, resource.kind, resource.name)
        }
        None => panic!("stock proxies refuse a route without metadata"),
    }
}

fn names(routes: &[HttpRoute]) -> Vec<String> {
    routes.iter().map(|route| name(route.metadata.as_ref())).collect()
}

/// A route to Server `s` with a spec; `api` is its group and version.
fn route(api: &str, kind: &str, name: &str, spec: &str) -> String {
    format!(
        "---
apiVersion: {api}
kind: {kind}
metadata: {{name: {name}, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: Server, name: s}}]
{spec}
"
    )
}

const POLICY: &str = "policy.linkerd.io/v1beta3";
const GATEWAY: &str = "gateway.networking.k8s.io/v1";

#[test]
fn probes_are_admitted_from_probe_networks_where_there_are_any() {
    let message = answer("HTTP/1", &["0.0.0.0/0"], "");
    assert_eq!(names(http(&message)), ["default/default", "default/probe"]);
    assert!(http(&message)[0].authorizations.is_empty(), "proxies add the Server's");
    let [probe] = &http(&message)[1].authorizations[..] else { panic!("one authorization") };
    assert_eq!(name(probe.metadata.as_ref()), "default/probe");
    assert_eq!(names(http(&answer("HTTP/1", &[], ""))), ["default/default"]);
}

#[test]
fn an_attached_route_is_sent_instead_of_the_default_and_the_probe_route() {
    let routes = route(POLICY, "HTTPRoute", "b", "") + &route(GATEWAY, "HTTPRoute", "a", "");
    for protocol in ["unknown", "HTTP/1", "HTTP/2"] {
        let message = answer(protocol, &["0.0.0.0/0"], &routes);
        let expected = ["gateway.networking.k8s.io/HTTPRoute/a", "policy.linkerd.io/HTTPRoute/b"];
        assert_eq!(names(http(&message)), expected, "{protocol}");
    }
    assert_eq!(name(grpc(&answer("gRPC", &[], &routes))[0].metadata.as_ref()), "default/default");
    assert!(matches!(kind(&answer("opaque", &[], &routes)), Kind::Opaque(_)));
}

#[test]
fn an_unreadable_route_is_sent_without_rules() {
    let spec = "
  rules:
  - {}
  - matches: [{path: {value: /}, sourceAddress: 10.0.0.1}]";
    let message = answer("unknown", &["0.0.0.0/0"], &route(GATEWAY, "HTTPRoute", "r", spec));
    assert_eq!(names(http(&message)), ["gateway.networking.k8s.io/HTTPRoute/r"]);
    assert!(http(&message)[0].rules.is_empty(), "proxies answer 404");
}

#[test]
fn matches_keep_their_order_and_every_condition() {
    let spec = "
  hostnames: [web.shop, '*.example.org']
  rules:
  - matches:
    - path: {type: RegularExpression, value: '/a.*'}
      method: POST
      headers:
      - {name: x-b, value: '1'}
      - {type: RegularExpression, name: x-a, value: '[0-9]'}
      queryParams:
      - {name: q, value: 'v w'}
      - {type: RegularExpression, name: p, value: '.+'}
    - path: {type: Exact, value: /z}
    - path: {value: /y}
  - {}";
    let message = answer("unknown", &[], &route(POLICY, "HTTPRoute", "r", spec));
    let [route] = http(&message) else { panic!("one route") };
    let suffix = host_match::Suffix { reverse_labels: vec!["org".to_owned(), "example".to_owned()] };
    assert_eq!(
        route.hosts,
        [host_match::Match::Exact("web.shop".to_owned()), host_match::Match::Suffix(suffix)]
            .map(|found| HostMatch { r#match: Some(found) })
    );
    let [rule, every] = &route.rules[..] else { panic!("two rules") };
    assert_eq!((every.matches.len(), every.filters.len()), (0, 0), "proxies match every request");
    let [all, exact, prefix] = &rule.matches[..] else { panic!("three matches") };
    let header = |name: &str, value| HeaderMatch { name: name.to_owned(), value: Some(value) };
    let query = |name: &str, value| QueryParamMatch { name: name.to_owned(), value: Some(value) };
    let expected = HttpRouteMatch {
        headers: vec![
            header("x-b", header_match::Value::Exact(b"1".to_vec())),
            header("x-a", header_match::Value::Regex("[0-9]".to_owned())),
        ],
        query_params: vec![
            query("q", query_param_match::Value::Exact("v w".to_owned())),
            query("p", query_param_match::Value::Regex(".+".to_owned())),
        ],
        method: Some(HttpMethod { r#type: Some(http_method::Type::Registered(http_method::Registered::Post.into())) }),
        ..path(path_match::Kind::Regex("/a.*".to_owned()))
    };
    assert_eq!(*all, expected);
    assert_eq!(*exact, path(path_match::Kind::Exact("/z".to_owned())));
    assert_eq!(*prefix, path(path_match::Kind::Prefix("/y".to_owned())));
}

#[test]
fn filters_that_proxies_have_inbound_are_sent() {
    use http_route::filter::Kind;
    let spec = "
  rules:
  - filters:
    - type: RequestHeaderModifier
      requestHeaderModifier: {set: [{name: x-a, value: '1'}], add: [{name: x-b, value: '2'}], remove: [x-c]}
    - type: ResponseHeaderModifier
      responseHeaderModifier: {set: [{name: x-d, value: '3'}]}
    - type: RequestRedirect
      requestRedirect: {scheme: https, hostname: example.org, port: 8443, statusCode: 301,
        path: {type: ReplacePrefixMatch, replacePrefixMatch: /b}}
  - filters: [{type: RequestRedirect, requestRedirect: {path: {type: ReplaceFullPath, replaceFullPath: /c}}}]";
    let message = answer("unknown", &[], &route(POLICY, "HTTPRoute", "r", spec));
    let rules = &http(&message)[0].rules;
    let headers = |name: &str, value: &str| {
        Some(Headers { headers: vec![Header { name: name.to_owned(), value: value.as_bytes().to_vec() }] })
    };
    let modifier =
        RequestHeaderModifier { add: headers("x-b", "2"), set: headers("x-a", "1"), remove: vec!["x-c".to_owned()] };
    let https = Scheme { r#type: Some(scheme::Type::Registered(scheme::Registered::Https.into())) };
    let replaced = |replace| Some(PathModifier { replace: Some(replace) });
    let redirect = RequestRedirect {
        scheme: Some(https),
        host: "example.org".to_owned(),
        path: replaced(path_modifier::Replace::Prefix("/b".to_owned())),
        port: 8443,
        status: 301,
    };
    let filters = |rule: &http_route::Rule| -> Vec<_> {
        rule.filters.iter().map(|filter| filter.kind.clone().unwrap()).collect()
    };
    assert_eq!(filters(&rules[0]), [Kind::RequestHeaderModifier(modifier), Kind::Redirect(redirect)]);
    let path = replaced(path_modifier::Replace::Full("/c".to_owned()));
    let redirect = RequestRedirect { path, status: 302, ..RequestRedirect::default() };
    assert_eq!(filters(&rules[1]), [Kind::Redirect(redirect)]);
}

#[test]
fn requests_of_a_rule_with_an_unsupported_filter_fail() {
    let mirror = "
  rules:
  - filters:
    - {type: RequestHeaderModifier, requestHeaderModifier: {remove: [x]}}
    - {type: RequestMirror, requestMirror: {backendRef: {name: b, port: 80}}}";
    let message = "the route has a filter RequestMirror, which is not supported".to_owned();
    let found = answer("unknown", &[], &route(GATEWAY, "HTTPRoute", "r", mirror));
    let [http] = &http(&found)[0].rules[0].filters[..] else { panic!("one filter") };
    let failure = HttpFailureInjector { status: 500, message: message.clone(), ratio: None };
    assert_eq!(http.kind, Some(http_route::filter::Kind::FailureInjector(failure)));
    let found = answer("gRPC", &[], &route(GATEWAY, "GRPCRoute", "r", mirror));
    let [grpc] = &grpc(&found)[0].rules[0].filters[..] else { panic!("one filter") };
    let failure = GrpcFailureInjector { code: 13, message, ratio: None };
    assert_eq!(grpc.kind, Some(grpc_route::filter::Kind::FailureInjector(failure)));
}

#[test]
fn grpc_routes_are_sent_to_grpc_servers_alone() {
    let spec = "
  hostnames: [web.shop]
  rules:
  - matches:
    - method: {service: shop.Cart, method: Add}
      headers: [{name: x-a, value: '1'}]
    - method: {service: shop.Cart}
    - headers: []
    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {remove: [x-c]}}]";
    let objects = route(GATEWAY, "GRPCRoute", "g", spec);
    let message = answer("gRPC", &[], &objects);
    let [route] = grpc(&message) else { panic!("one route") };
    assert_eq!(name(route.metadata.as_ref()), "gateway.networking.k8s.io/GRPCRoute/g");
    assert_eq!(route.hosts.len(), 1);
    let rpc =
        |service: &str, method: &str| Some(GrpcRpcMatch { service: service.to_owned(), method: method.to_owned() });
    let found: Vec<_> = route.rules[0].matches.iter().map(|found| (found.rpc.clone(), found.headers.len())).collect();
    assert_eq!(found, [(rpc("shop.Cart", "Add"), 1), (rpc("shop.Cart", ""), 0), (None, 0)]);
    assert_eq!(route.rules[0].filters.len(), 1);
    assert_eq!(names(http(&answer("HTTP/2", &[], &objects))), ["default/default"]);
}

#[test]
fn authorizations_of_a_route_are_its_own() {
    let objects = route(POLICY, "HTTPRoute", "r", "")
        + "---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: p, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: HTTPRoute, name: r}
  requiredAuthenticationRefs: [{kind: ServiceAccount, name: a}]
";
    let message = answer("unknown", &[], &objects);
    assert!(message.authorizations.is_empty());
    let [authz] = &http(&message)[0].authorizations[..] else { panic!("one authorization") };
    assert_eq!(name(authz.metadata.as_ref()), "policy.linkerd.io/authorizationpolicy/p");
    assert_eq!(authz.labels["kind"], "authorizationpolicy");
    assert_eq!(authz.networks.len(), 2, "every address of both families");
    let identity = Identity { name: "a.shop.serviceaccount.identity.linkerd.cluster.local".to_owned() };
    let clients = permit_mesh_tls::PermitClientIdentities { identities: vec![identity], suffixes: Vec::new() };
    assert_eq!(authz.authentication, Some(mesh_tls(permit_mesh_tls::Clients::Identities(clients))));
}

#[test]
fn rate_limits_are_sent_to_http_servers() {
    let objects = "---
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {name: l, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: s}
  total: {requestsPerSecond: 100}
  overrides:
  - {requestsPerSecond: 50, clientRefs: [{kind: ServiceAccount, name: a}, {kind: ServiceAccount, name: b, namespace: ops}]}
";
    let limit = |message: &Server| match kind(message) {
        Kind::Detect(detect) => detect.http_local_rate_limit.clone(),
        Kind::Http1(http1) => http1.local_rate_limit.clone(),
        Kind::Http2(http2) => http2.local_rate_limit.clone(),
        Kind::Grpc(_) | Kind::Opaque(_) | Kind::Tls(_) => None,
    };
    for protocol in ["unknown", "HTTP/1", "HTTP/2"] {
        let found = limit(&answer(protocol, &[], objects)).unwrap();
        assert_eq!(name(found.metadata.as_ref()), "policy.linkerd.io/HTTPLocalRateLimitPolicy/l", "{protocol}");
        assert_eq!((found.total, found.identity), (Some(Limit { requests_per_second: 100 }), None));
        let [own] = &found.overrides[..] else { panic!("one override") };
        assert_eq!(own.limit, Some(Limit { requests_per_second: 50 }));
        let names: Vec<_> = own.clients.iter().flat_map(|clients| &clients.identities).map(|one| &*one.name).collect();
        let suffix = "serviceaccount.identity.linkerd.cluster.local";
        assert_eq!(names, [format!("a.shop.{suffix}"), format!("b.ops.{suffix}")]);
        assert_eq!(limit(&answer(protocol, &[], "")), None);
    }
}

#[test]
fn a_policy_that_is_too_large_for_proxies_denies() {
    let own = "policy.linkerd.io/HTTPRoute/r";
    for (number, target, of_server, of_routes) in [
        (100, "kind: Server, name: s", 1, &[("default/default", 0), ("default/probe", 1)][..]),
        (30_000, "kind: Server, name: s", 0, &[("default/default", 0), ("default/probe", 1)]),
        // Where a route is attached, there is none for probes.
        (100, "kind: HTTPRoute, name: r", 0, &[(own, 1)]),
        (30_000, "kind: HTTPRoute, name: r", 0, &[("default/default", 0)]),
    ] {
        let identities: Vec<_> = (0..number).map(|number| format!("a{number:0>62}.{0}.{0}", "b".repeat(63))).collect();
        let attached = if target.contains("Route") { route(POLICY, "HTTPRoute", "r", "") } else { String::new() };
        let message = answer(
            "HTTP/2",
            &["0.0.0.0/0"],
            &format!(
                "{attached}---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {{name: many, namespace: shop}}
spec: {{identities: [{}]}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: many, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, {target}}}
  requiredAuthenticationRefs: [{{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: many}}]
",
                identities.join(", ")
            ),
        );
        assert!(matches!(kind(&message), Kind::Http2(_)), "{target}: {number}");
        assert_eq!(message.authorizations.len(), of_server, "{target}: {number}");
        let names = names(http(&message));
        let found: Vec<_> = names
            .iter()
            .map(String::as_str)
            .zip(http(&message).iter().map(|route| route.authorizations.len()))
            .collect();
        assert_eq!(found, of_routes, "{target}: {number}");
        assert_eq!(message.labels["name"], "s");
        assert!(message.encoded_len() <= LARGEST_MESSAGE);
    }
}
