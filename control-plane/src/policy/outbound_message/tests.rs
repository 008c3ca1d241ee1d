//! Objects in, messages out: what proxies get, as Linkerd's control plane writes it.

use serde_json::{Value, json};
use weft_index::{Event, Index};
use weft_k8s_api::manifest;
use weft_proto::linkerd::{
    meta::metadata,
    outbound::{HttpRoute, backend, grpc_route, http_route, tls_route},
};

use super::*;
use crate::args;

const WEB: &str = "10.96.0.1:80";
const OUTSIDE: &str = "93.184.216.34:80";

/// The message for a client in `shop`, after these objects.
fn message(objects: &[Value], target: &str) -> Message {
    let mut index = Index::new(args::default_cluster());
    let batch = objects.iter().map(|object| {
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        assert!(read.errors.is_empty(), "{:?}", read.errors);
        Event::Apply(Box::new(read.objects.into_iter().next().unwrap().object))
    });
    index.apply(batch.collect());
    let target: SocketAddr = target.parse().unwrap();
    let found = index.watch_outbound(target, "shop").unwrap().borrow().clone().unwrap();
    policy(&found, target.port(), true)
}

fn kind(message: Message) -> Kind {
    message.protocol.unwrap().kind.unwrap()
}

fn http(message: Message) -> Vec<HttpRoute> {
    match kind(message) {
        Kind::Detect(detect) => {
            let (http1, http2) = (detect.http1.unwrap(), detect.http2.unwrap());
            assert_eq!(http1.routes, http2.routes);
            http1.routes
        }
        other => panic!("{other:?}"),
    }
}

/// Name of a default, or `kind namespace/name:port` of a resource.
fn named(metadata: Option<&Metadata>) -> String {
    match metadata.unwrap().kind.as_ref().unwrap() {
        metadata::Kind::Default(name) => name.clone(),
        metadata::Kind::Resource(of) => format!("{}/{} {}/{}:{}", of.group, of.kind, of.namespace, of.name, of.port),
    }
}

fn service(annotations: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": "shop", "annotations": annotations},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"name": "http", "port": 80}]}})
}

fn network(policy: &str) -> Value {
    json!({"apiVersion": "policy.linkerd.io/v1alpha1", "kind": "EgressNetwork",
        "metadata": {"name": "all", "namespace": "shop"}, "spec": {"trafficPolicy": policy}})
}

/// A route of the Service, or of the EgressNetwork.
fn route(kind: &str, name: &str, of: &str, rule: Value) -> Value {
    let version = if kind.starts_with('T') { "v1alpha2" } else { "v1" };
    let parent = match of {
        "web" => json!({"group": "core", "kind": "Service", "name": "web"}),
        _ => json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "all", "port": 80}),
    };
    json!({"apiVersion": format!("gateway.networking.k8s.io/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": "shop"}, "spec": {"parentRefs": [parent], "rules": [rule]}})
}

fn random(rule: &http_route::Rule) -> &[http_route::WeightedRouteBackend] {
    match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
        http_route::distribution::Kind::RandomAvailable(random) => &random.backends,
        other => panic!("{other:?}"),
    }
}

fn first(rule: &http_route::Rule) -> &outbound::Backend {
    match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
        http_route::distribution::Kind::FirstAvailable(first) => first.backends[0].backend.as_ref().unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Status and message of the only filter, a failure.
fn failure(filters: &[http_route::Filter]) -> (u32, &str) {
    match filters {
        [http_route::Filter { kind: Some(http_route::filter::Kind::FailureInjector(failure)) }] => {
            (failure.status, failure.message.as_str())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_service_without_routes_has_a_default_one_to_itself() {
    let found = message(&[service(json!({}))], WEB);
    assert_eq!(named(found.metadata.as_ref()), "core/Service shop/web:80");
    let Kind::Detect(detect) = kind(found.clone()) else { panic!("not detected") };
    assert_eq!(named(detect.opaque.unwrap().routes[0].metadata.as_ref()), "opaq");
    let [route] = &http(found)[..] else { panic!("not one route") };
    assert_eq!(named(route.metadata.as_ref()), "http");
    let rule = &route.rules[0];
    assert_eq!((rule.timeouts, rule.retry.is_none()), (Some(http_route_timeouts(None)), true));
    assert!(!rule.allow_l5d_request_headers, "as in Linkerd, only routes have them");
    let backend = first(rule);
    assert_eq!(named(backend.metadata.as_ref()), "core/Service shop/web:80");
    assert_eq!(backend.queue.as_ref().unwrap().capacity, 100);
    let Some(backend::Kind::Balancer(balancer)) = &backend.kind else { panic!("not a balancer") };
    assert!(matches!(balancer.load, Some(Load::PeakEwma(_))));
}

fn http_route_timeouts(request: Option<Duration>) -> weft_proto::linkerd::http_route::Timeouts {
    timeouts(&Timeouts { request, ..Timeouts::default() })
}

#[test]
fn an_undeclared_port_is_refused_in_the_services_name() {
    let found = message(&[service(json!({}))], "10.96.0.1:9");
    assert_eq!(named(found.metadata.as_ref()), "core/Service shop/web:9");
    let Kind::Opaque(opaque) = kind(found) else { panic!("not opaque") };
    assert_eq!(named(opaque.routes[0].metadata.as_ref()), "undefined-port");
    let rule = &opaque.routes[0].rules[0];
    assert!(matches!(rule.filters[0].kind, Some(opaque_route::filter::Kind::Forbidden(_))));
}

#[test]
fn requests_outside_the_cluster_go_to_their_original_destination() {
    let found = message(&[], OUTSIDE);
    assert_eq!(named(found.metadata.as_ref()), "egress-fallback");
    let routes = http(found);
    let backend = first(&routes[0].rules[0]);
    let Some(backend::Kind::Forward(forward)) = &backend.kind else { panic!("not forwarded") };
    assert_eq!(SocketAddr::try_from(forward.addr.unwrap()).unwrap().to_string(), OUTSIDE);
}

#[test]
fn backends_of_a_rule_have_weights_and_those_that_do_not_exist_fail() {
    let rule = json!({"matches": [{"path": {"type": "Exact", "value": "/a"}, "method": "GET"}], "backendRefs": [
        {"name": "web", "port": 80, "weight": 90,
            "filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": "x", "value": "1"}]}}]},
        {"name": "gone", "port": 81, "weight": 10}, {"kind": "Thing", "group": "example.org", "name": "x"}]});
    let routes = http(message(&[service(json!({})), route("HTTPRoute", "a", "web", rule)], WEB));
    assert_eq!(named(routes[0].metadata.as_ref()), "gateway.networking.k8s.io/HTTPRoute shop/a:0");
    let rule = &routes[0].rules[0];
    assert!(rule.allow_l5d_request_headers);
    assert_eq!(rule.matches.len(), 1);
    let [web, gone, thing] = random(rule) else { panic!("not three backends") };
    let parts = |weighted: &http_route::WeightedRouteBackend| {
        let of_route = weighted.backend.clone().unwrap();
        (weighted.weight, named(of_route.backend.as_ref().unwrap().metadata.as_ref()), of_route)
    };
    let (weight, name, of_route) = parts(web);
    assert_eq!((weight, name.as_str()), (90, "core/Service shop/web:80"));
    assert!(matches!(of_route.backend.unwrap().kind, Some(backend::Kind::Balancer(_))));
    assert!(matches!(of_route.filters[0].kind, Some(http_route::filter::Kind::RequestHeaderModifier(_))));
    let (weight, name, of_route) = parts(gone);
    assert_eq!((weight, name.as_str()), (10, "core/Service shop/gone:81"));
    assert_eq!(failure(&of_route.filters), (500, "Service not found gone"));
    assert!(of_route.backend.unwrap().kind.is_none());
    let (_, name, of_route) = parts(thing);
    assert_eq!(name, "invalid");
    assert_eq!(failure(&of_route.filters), (500, "unsupported backend type example.org Thing"));
}

#[test]
fn a_rule_without_backends_goes_to_the_parent_and_an_unsupported_filter_fails_it() {
    let object = route("HTTPRoute", "a", "web", json!({"filters": [{"type": "URLRewrite", "urlRewrite": {}}]}));
    let routes = http(message(&[service(json!({})), object], WEB));
    assert_eq!(routes.len(), 1, "there is no default route beside it");
    assert_eq!(named(first(&routes[0].rules[0]).metadata.as_ref()), "core/Service shop/web:80");
    assert_eq!(failure(&routes[0].rules[0].filters), (500, "URLRewrite filter is not supported"));
    let redirect = json!({"filters": [{"type": "RequestRedirect",
        "requestRedirect": {"hostname": "example.org", "statusCode": 301}}]});
    let routes = http(message(&[service(json!({})), route("HTTPRoute", "a", "web", redirect)], WEB));
    let filter = routes[0].rules[0].filters[0].kind.clone().unwrap();
    let http_route::filter::Kind::Redirect(redirect) = filter else { panic!("{filter:?}") };
    assert_eq!((redirect.host.as_str(), redirect.status), ("example.org", 301));
}

#[test]
fn annotations_become_timeouts_retries_accrual_and_load() {
    let annotations = json!({"timeout.linkerd.io/request": "3s", "retry.linkerd.io/http": "503,gateway-error",
        "retry.linkerd.io/grpc": "internal,unavailable", "retry.linkerd.io/limit": "2",
        "balancer.linkerd.io/failure-accrual": "consecutive",
        "balancer.linkerd.io/failure-accrual-consecutive-max-failures": "3",
        "balancer.alpha.linkerd.io/failure-accrual-honor-retry-after": "true",
        "balancer.alpha.linkerd.io/penalize-failures": "true"});
    let found = message(&[service(annotations.clone())], WEB);
    let Kind::Detect(detect) = kind(found.clone()) else { panic!("not detected") };
    let accrual = detect.http1.unwrap().failure_accrual.unwrap();
    let Some(failure_accrual::Kind::ConsecutiveFailures(consecutive)) = accrual.kind else { panic!("not consecutive") };
    let backoff = consecutive.backoff.unwrap();
    assert_eq!((consecutive.max_failures, backoff.jitter_ratio, backoff.respect_retry_after_hint), (3, 0.5, true));
    let routes = http(found);
    let rule = &routes[0].rules[0];
    assert_eq!(rule.timeouts, Some(http_route_timeouts(Some(Duration::from_secs(3)))));
    let retry = rule.retry.as_ref().unwrap();
    assert_eq!((retry.max_retries, retry.max_request_bytes), (2, 65536));
    let ranges = &retry.conditions.as_ref().unwrap().status_ranges;
    let ranges: Vec<_> = ranges.iter().map(|range| (range.start, range.end)).collect();
    assert_eq!(ranges, [(503, 503), (502, 504)]);
    let Some(backend::Kind::Balancer(balancer)) = &first(rule).kind else { panic!("not a balancer") };
    assert!(matches!(balancer.load, Some(Load::PenaltyPeakEwma(_))));

    let grpc = route("GRPCRoute", "a", "web", json!({"matches": [{"method": {"service": "s"}}]}));
    let Kind::Grpc(grpc) = kind(message(&[service(annotations), grpc], WEB)) else { panic!("not gRPC") };
    assert!(grpc.failure_accrual.is_some());
    let retry = grpc.routes[0].rules[0].retry.as_ref().unwrap();
    let conditions = retry.conditions.unwrap();
    assert!(conditions.internal && conditions.unavailable && !conditions.cancelled);

    let unified = json!({"balancer.linkerd.io/failure-accrual": "unified"});
    let Kind::Detect(detect) = kind(message(&[service(unified)], WEB)) else { panic!("not detected") };
    let kind = detect.http2.unwrap().failure_accrual.unwrap().kind;
    let Some(failure_accrual::Kind::Unified(unified)) = kind else { panic!("{kind:?}") };
    assert_eq!((unified.min_requests, unified.max_consecutive_failures), (5, 7));
}

#[test]
fn an_egress_network_ends_with_what_its_traffic_policy_says() {
    let to_network = json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "all"});
    let rule = json!({"backendRefs": [to_network]});
    let found = message(&[network("Deny"), route("HTTPRoute", "a", "all", rule.clone())], OUTSIDE);
    assert_eq!(named(found.metadata.as_ref()), "policy.linkerd.io/EgressNetwork shop/all:80");
    let Kind::Detect(detect) = kind(found.clone()) else { panic!("not detected") };
    let opaque = &detect.opaque.unwrap().routes[0];
    assert_eq!(named(opaque.metadata.as_ref()), "tcp-egress-deny");
    assert!(matches!(opaque.rules[0].filters[0].kind, Some(opaque_route::filter::Kind::Forbidden(_))));
    let [own, rest] = &http(found)[..] else { panic!("not two routes") };
    let of_route = random(&own.rules[0])[0].backend.as_ref().unwrap().backend.as_ref().unwrap();
    assert_eq!(named(of_route.metadata.as_ref()), "policy.linkerd.io/EgressNetwork shop/all:80");
    assert!(matches!(of_route.kind, Some(backend::Kind::Forward(_))));
    assert_eq!(named(rest.metadata.as_ref()), "http-egress-deny");
    assert_eq!(failure(&rest.rules[0].filters), (403, "traffic not allowed"));
    let routes = http(message(&[network("Allow")], OUTSIDE));
    assert_eq!(named(routes[0].metadata.as_ref()), "http-egress-allow");
    assert!(routes[0].rules[0].filters.is_empty());

    let found = message(&[network("Deny"), route("GRPCRoute", "a", "all", rule.clone())], OUTSIDE);
    let Kind::Grpc(grpc) = kind(found) else { panic!("not gRPC") };
    assert_eq!(named(grpc.routes[1].metadata.as_ref()), "grpc-egress-deny");
    let filter = grpc.routes[1].rules[0].filters[0].kind.clone();
    assert!(matches!(filter, Some(grpc_route::filter::Kind::FailureInjector(failure)) if failure.code == 7));

    let mut tls = route("TLSRoute", "a", "all", rule);
    tls["spec"]["hostnames"] = json!(["*.example.org"]);
    let Kind::Tls(tls) = kind(message(&[network("Deny"), tls], OUTSIDE)) else { panic!("not TLS") };
    assert_eq!(tls.routes[0].snis.len(), 1);
    assert_eq!(named(tls.routes[1].metadata.as_ref()), "tls-egress-deny");
    assert!(matches!(tls.routes[1].rules[0].filters[0].kind, Some(tls_route::filter::Kind::Forbidden(_))));
}

#[test]
fn of_several_tcp_routes_the_first_counts() {
    let rule = || json!({"backendRefs": [{"name": "gone", "port": 80}]});
    let objects = [service(json!({})), route("TCPRoute", "b", "web", rule()), route("TCPRoute", "a", "web", rule())];
    let Kind::Opaque(opaque) = kind(message(&objects, WEB)) else { panic!("not opaque") };
    let [route] = &opaque.routes[..] else { panic!("not one route") };
    assert_eq!(named(route.metadata.as_ref()), "gateway.networking.k8s.io/TCPRoute shop/a:0");
    let backends = route.rules[0].backends.as_ref().unwrap().kind.as_ref().unwrap();
    let opaque_route::distribution::Kind::RandomAvailable(random) = backends else { panic!("{backends:?}") };
    let of_route = random.backends[0].backend.as_ref().unwrap();
    let Some(opaque_route::filter::Kind::Invalid(invalid)) = &of_route.filters[0].kind else { panic!("not invalid") };
    assert_eq!(invalid.message, "Service not found gone");
}
