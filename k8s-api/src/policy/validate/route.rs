//! HTTPRoute, GRPCRoute, TLSRoute and TCPRoute.
//!
//! A route of the Gateway API may belong to another controller. It is checked only if one of its parents is of a kind
//! that Weft acts on, and filters that Weft does not have are no problem of the object: the index must not apply such a
//! rule. A route of `policy.linkerd.io` has no other reader, so everything in it must be understood.

use crate::{
    field::{FieldPath, Invalid},
    policy::{
        route::{
            BackendKind, BackendReference, Filter, GatewayHttpRoute, GrpcRoute, HttpRoute, HttpRouteSpec, OpaqueRule,
            ParentKind, RouteView, TcpRoute, TlsRoute,
        },
        traffic::{self, Annotations, Retry},
    },
};

/// The problems of an HTTPRoute of `policy.linkerd.io`.
pub fn http_route(route: &HttpRoute) -> Vec<Invalid> {
    let mut found = attachment(&route.view(), traffic::http_retry);
    found.extend(http_spec(&route.spec, true));
    found
}

/// The problems of an HTTPRoute of the Gateway API.
pub fn gateway_http_route(route: &GatewayHttpRoute) -> Vec<Invalid> {
    let view = route.view();
    if is_foreign(&view) {
        return Vec::new();
    }
    let mut found = attachment(&view, traffic::http_retry);
    found.extend(http_spec(&route.spec.route, false));
    for (index, rule) in route.spec.route.rules.iter().flatten().enumerate() {
        let backends = rule.backend_refs.iter().flatten().map(|reference| &reference.backend);
        found.extend(service_ports(backends, &rule_at(index), view.namespace()));
    }
    found
}

/// The problems of a GRPCRoute.
pub fn grpc_route(route: &GrpcRoute) -> Vec<Invalid> {
    let view = route.view();
    if is_foreign(&view) {
        return Vec::new();
    }
    let mut found = attachment(&view, traffic::grpc_retry);
    found.extend(under(&FieldPath::of("spec"), route.spec.read_hostnames().err()));
    for (index, rule) in route.spec.rules.iter().flatten().enumerate() {
        let at = rule_at(index);
        found.extend(under(&at, rule.read_matches().err()));
        found.extend(filters(&at, rule.read_filters(), false));
        for (number, backend) in rule.backend_refs.iter().flatten().enumerate() {
            let at = at.clone().key("backendRefs").index(number);
            found.extend(filters(&at, backend.read_filters(), false));
        }
        found.extend(service_ports(rule.backends(), &at, view.namespace()));
    }
    found
}

/// The problems of a TLSRoute.
pub fn tls_route(route: &TlsRoute) -> Vec<Invalid> {
    let mut found = connections(&route.view(), &route.spec.rules);
    if !is_foreign(&route.view()) {
        found.extend(under(&FieldPath::of("spec"), route.spec.read_hostnames().err()));
    }
    found
}

/// The problems of a TCPRoute.
pub fn tcp_route(route: &TcpRoute) -> Vec<Invalid> {
    connections(&route.view(), &route.spec.rules)
}

fn is_foreign(view: &RouteView<'_>) -> bool {
    view.parents().next().is_none()
}

/// Rules of connections.
fn connections(view: &RouteView<'_>, rules: &[OpaqueRule]) -> Vec<Invalid> {
    if is_foreign(view) {
        return Vec::new();
    }
    let mut found = egress_ports(view);
    if rules.len() != 1 {
        found.push(FieldPath::of("spec.rules").invalid(format!("{} rules, expected exactly one", rules.len())));
    }
    for (index, rule) in rules.iter().enumerate() {
        found.extend(service_ports(rule.backend_refs.iter().flatten(), &rule_at(index), view.namespace()));
    }
    found
}

/// Rules about parents, and about annotations that the parents make effective.
fn attachment<C>(
    view: &RouteView<'_>,
    retry: impl Fn(&Annotations) -> Result<Option<Retry<C>>, Vec<Invalid>>,
) -> Vec<Invalid> {
    let mut found = egress_ports(view);
    let outbound = view.parents().any(|(_, parent)| parent.kind != ParentKind::Server);
    if let Some(annotations) = view.metadata.annotations.as_ref().filter(|_| outbound) {
        found.extend(retry(annotations).err().into_iter().flatten());
        found.extend(traffic::timeouts(annotations).err().into_iter().flatten());
        found.extend(traffic::failure_accrual(annotations).err().into_iter().flatten());
    }
    found
}

fn egress_ports(view: &RouteView<'_>) -> Vec<Invalid> {
    let lacking =
        view.parents().filter(|(_, parent)| parent.kind == ParentKind::EgressNetwork && parent.port.is_none());
    let at = |index| FieldPath::of("spec.parentRefs").index(index).key("port");
    lacking.map(|(index, _)| at(index).invalid("absent, expected the port of an EgressNetwork's traffic")).collect()
}

/// The rules of an HTTPRoute. `strict` refuses filters that Weft does not have.
fn http_spec(spec: &HttpRouteSpec, strict: bool) -> Vec<Invalid> {
    let mut found: Vec<_> = under(&FieldPath::of("spec"), spec.read_hostnames().err()).collect();
    for (index, rule) in spec.rules.iter().flatten().enumerate() {
        let at = rule_at(index);
        found.extend(under(&at, rule.read_matches().err()));
        found.extend(filters(&at, rule.read_filters(), strict));
        found.extend(under(&at, rule.read_timeouts().err()));
        for (number, backend) in rule.backend_refs.iter().flatten().enumerate() {
            let at = at.clone().key("backendRefs").index(number);
            found.extend(filters(&at, backend.read_filters(), strict));
        }
    }
    found
}

fn filters(at: &FieldPath, read: Result<Vec<Filter>, Vec<Invalid>>, strict: bool) -> Vec<Invalid> {
    let filters = match read {
        Ok(filters) => filters,
        Err(found) => return under(at, Some(found)).collect(),
    };
    let unsupported = filters.into_iter().enumerate().filter_map(|(index, filter)| match filter {
        Filter::Unsupported(name) if strict => {
            let at = at.clone().key("filters").index(index).key("type");
            let expected = "expected RequestHeaderModifier, ResponseHeaderModifier or RequestRedirect";
            Some(at.invalid(format!("unsupported filter {name:?}, {expected}")))
        }
        _ => None,
    });
    unsupported.collect()
}

fn service_ports<'a>(
    backends: impl Iterator<Item = &'a BackendReference>,
    rule: &FieldPath,
    namespace: &str,
) -> Vec<Invalid> {
    let lacks_port = |reference: &BackendReference| {
        let backend = reference.resolve(namespace);
        backend.kind == BackendKind::Service && backend.port.is_none()
    };
    let lacking = backends.enumerate().filter(|(_, reference)| lacks_port(reference));
    let at = |index| rule.clone().key("backendRefs").index(index).key("port");
    lacking.map(|(index, _)| at(index).invalid("absent, expected a port of the Service")).collect()
}

fn rule_at(index: usize) -> FieldPath {
    FieldPath::of("spec.rules").index(index)
}

fn under(at: &FieldPath, found: Option<Vec<Invalid>>) -> impl Iterator<Item = Invalid> {
    let nested = move |invalid: Invalid| Invalid { field: invalid.field.under(at.clone()), problem: invalid.problem };
    found.into_iter().flatten().map(nested)
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::GROUP;

    fn fields<K: DeserializeOwned>(
        validate: fn(&K) -> Vec<Invalid>,
        annotations: Value,
        parent: &Value,
        mut spec: Value,
    ) -> Vec<String> {
        spec["parentRefs"] = json!([parent]);
        let metadata = json!({"name": "r", "namespace": "shop", "annotations": annotations});
        let route: K = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        validate(&route).iter().map(|invalid| invalid.field.to_string()).collect()
    }

    fn server() -> Value {
        json!({"group": GROUP, "kind": "Server", "name": "web"})
    }

    fn service() -> Value {
        json!({"group": "", "kind": "Service", "name": "web", "port": 80})
    }

    fn gateway() -> Value {
        json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "front"})
    }

    /// Specs of an HTTPRoute with the problems that both groups have.
    fn http_specs() -> Vec<(Value, Vec<&'static str>)> {
        let matching = |value| json!({"rules": [{"matches": [value]}]});
        let filtering = |value| json!({"rules": [{"filters": [value]}]});
        vec![
            (json!({}), vec![]),
            (json!({"hostnames": ["a.example", "*.b.example"]}), vec![]),
            (json!({"hostnames": ["a_b"]}), vec!["spec.hostnames[0]"]),
            (matching(json!({"path": {"value": "/a"}, "method": "GET"})), vec![]),
            (matching(json!({"path": {"value": "a"}})), vec!["spec.rules[0].matches[0].path.value"]),
            (
                matching(json!({"path": {"type": "RegularExpression", "value": "["}})),
                vec!["spec.rules[0].matches[0].path.value"],
            ),
            (matching(json!({"method": "BREW"})), vec!["spec.rules[0].matches[0].method"]),
            (
                matching(json!({"headers": [{"name": "a b", "value": "x"}]})),
                vec!["spec.rules[0].matches[0].headers[0].name"],
            ),
            (
                filtering(
                    json!({"type": "RequestRedirect", "requestRedirect": {"path": {"type": "ReplaceFullPath", "replaceFullPath": "x"}}}),
                ),
                vec!["spec.rules[0].filters[0].requestRedirect.path.replaceFullPath"],
            ),
            (
                filtering(json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["a b"]}})),
                vec!["spec.rules[0].filters[0].requestHeaderModifier.remove[0]"],
            ),
            (json!({"rules": [{}, {"timeouts": {"request": "-1s"}}]}), vec!["spec.rules[1].timeouts.request"]),
            (
                json!({"rules": [{"timeouts": {"request": "1s", "backendRequest": "2s"}}]}),
                vec!["spec.rules[0].timeouts.backendRequest"],
            ),
        ]
    }

    #[test]
    fn http_routes_of_both_groups_have_one_set_of_rules() {
        for (spec, expected) in http_specs() {
            assert_eq!(fields(http_route, json!({}), &server(), spec.clone()), expected, "{spec}");
            assert_eq!(fields(gateway_http_route, json!({}), &service(), spec.clone()), expected, "{spec}");
            assert_eq!(fields(gateway_http_route, json!({}), &gateway(), spec), [""; 0], "another controller's");
        }
    }

    #[test]
    fn filters_of_others_are_refused_only_where_there_is_no_other_reader() {
        let mirror = json!({"rules": [{"filters": [{"type": "RequestMirror"}],
            "backendRefs": [{"name": "web", "port": 80, "filters": [{"type": "URLRewrite"}]}]}]});
        let expected = ["spec.rules[0].filters[0].type", "spec.rules[0].backendRefs[0].filters[0].type"];
        assert_eq!(fields(http_route, json!({}), &service(), mirror.clone()), expected);
        assert_eq!(fields(gateway_http_route, json!({}), &service(), mirror), [""; 0]);
    }

    #[test]
    fn annotations_count_where_a_parent_is_outbound() {
        let bad = json!({"retry.linkerd.io/http": "6xx", "timeout.linkerd.io/idle": "1",
            "balancer.linkerd.io/failure-accrual": "some"});
        let egress = json!({"group": GROUP, "kind": "EgressNetwork", "name": "out", "port": 443});
        for (parent, expected) in [(server(), 0), (service(), 3), (egress, 3)] {
            assert_eq!(fields(http_route, bad.clone(), &parent, json!({})).len(), expected, "{parent}");
            assert_eq!(fields(gateway_http_route, bad.clone(), &parent, json!({})).len(), expected, "{parent}");
        }
        let good = json!({"retry.linkerd.io/http": "5xx", "timeout.linkerd.io/idle": "1s"});
        assert_eq!(fields(http_route, good, &service(), json!({})), [""; 0]);
        let codes = json!({"retry.linkerd.io/grpc": "ok"});
        assert_eq!(fields(http_route, codes.clone(), &service(), json!({})), [""; 0], "no annotation of HTTP");
        let expected = ["metadata.annotations[\"retry.linkerd.io/grpc\"]"];
        assert_eq!(fields(grpc_route, codes, &service(), json!({})), expected);
    }

    #[test]
    fn egress_networks_need_a_port() {
        let mut parent = json!({"group": GROUP, "kind": "EgressNetwork", "name": "out"});
        let spec = || json!({"rules": [{}]});
        let expected = ["spec.parentRefs[0].port"];
        assert_eq!(fields(http_route, json!({}), &parent, spec()), expected);
        assert_eq!(fields(gateway_http_route, json!({}), &parent, spec()), expected);
        assert_eq!(fields(grpc_route, json!({}), &parent, spec()), expected);
        assert_eq!(fields(tls_route, json!({}), &parent, spec()), expected);
        assert_eq!(fields(tcp_route, json!({}), &parent, spec()), expected);
        parent["port"] = json!(443);
        assert_eq!(fields(http_route, json!({}), &parent, spec()), [""; 0]);
        assert_eq!(fields(tcp_route, json!({}), &parent, spec()), [""; 0]);
    }

    #[test]
    fn services_of_the_gateway_api_need_a_port() {
        let with = |backend: Value| json!({"rules": [{"backendRefs": [backend]}]});
        let expected = ["spec.rules[0].backendRefs[0].port"];
        let lacking = with(json!({"name": "web"}));
        assert_eq!(fields(gateway_http_route, json!({}), &service(), lacking.clone()), expected);
        assert_eq!(fields(grpc_route, json!({}), &service(), lacking.clone()), expected);
        assert_eq!(fields(tcp_route, json!({}), &service(), lacking.clone()), expected);
        assert_eq!(fields(gateway_http_route, json!({}), &gateway(), lacking.clone()), [""; 0]);
        assert_eq!(fields(http_route, json!({}), &service(), lacking), [""; 0], "as in Linkerd");
        for fine in [json!({"name": "web", "port": 80}), json!({"group": "x", "kind": "Y", "name": "web"})] {
            assert_eq!(fields(gateway_http_route, json!({}), &service(), with(fine.clone())), [""; 0]);
            assert_eq!(fields(tls_route, json!({}), &service(), with(fine)), [""; 0]);
        }
    }

    #[test]
    fn grpc_routes() {
        for (spec, expected) in [
            (json!({"rules": [{"matches": [{"method": {"service": "a.B"}}]}]}), &[][..]),
            (json!({"rules": [{"matches": [{"method": {}}]}]}), &["spec.rules[0].matches[0].method"]),
            (
                json!({"rules": [{"matches": [{"method": {"type": "RegularExpression", "method": "."}}]}]}),
                &["spec.rules[0].matches[0].method.type"],
            ),
            (json!({"hostnames": ["A"]}), &["spec.hostnames[0]"]),
            (json!({"rules": [{"filters": [{"type": "RequestMirror"}]}]}), &[]),
            (
                json!({"rules": [{"filters": [{"type": "RequestHeaderModifier"}]}]}),
                &["spec.rules[0].filters[0].requestHeaderModifier"],
            ),
        ] {
            assert_eq!(fields(grpc_route, json!({}), &service(), spec.clone()), expected, "{spec}");
            assert_eq!(fields(grpc_route, json!({}), &gateway(), spec), [""; 0]);
        }
    }

    #[test]
    fn routes_of_connections_have_one_rule() {
        let rules = |count| json!({"rules": vec![json!({"backendRefs": [{"name": "web", "port": 80}]}); count]});
        for (count, expected) in [(0, &["spec.rules"][..]), (1, &[]), (2, &["spec.rules"])] {
            assert_eq!(fields(tls_route, json!({}), &service(), rules(count)), expected, "{count}");
            assert_eq!(fields(tcp_route, json!({}), &service(), rules(count)), expected, "{count}");
            assert_eq!(fields(tcp_route, json!({}), &gateway(), rules(count)), [""; 0], "{count}");
        }
        let named = json!({"hostnames": ["a b"], "rules": [{}]});
        assert_eq!(fields(tls_route, json!({}), &service(), named), ["spec.hostnames[0]"]);
    }
}
