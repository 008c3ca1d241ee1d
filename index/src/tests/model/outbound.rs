//! Policies of clients, by section 3.4 of the contract with Linkerd.

use super::{reading::*, traffic, *};

/// The policy towards an address for clients of a namespace; `None` if the address is unknown, or it is not clear whose
/// it is.
pub(super) fn of_address(objects: &Objects<'_>, cluster: &Cluster, addr: SocketAddr, client: &str) -> Option<Value> {
    let ip = addr.ip().to_string();
    let owners: Vec<_> = objects.of("Service").filter(|service| cluster_ips(service).contains(&&*ip)).collect();
    match owners[..] {
        [service] if declared(service, addr.port()).is_none() => {
            Some(json!({"undefined port of": format!("{}/{}", namespace(service), name(service))}))
        }
        [service] => Some(of_service(objects, cluster, (namespace(service), name(service)), addr.port(), client)),
        [] if cluster.networks.iter().any(|network| network.contains(&addr.ip())) => None,
        [] => Some(match egress_network(objects, cluster, addr.ip(), client) {
            Some(network) => of_egress_network(objects, cluster, network, addr.port(), client),
            None => json!({"outside": addr.to_string()}),
        }),
        _ => None,
    }
}

/// The policy towards a Service by its name.
pub(super) fn of_service(
    objects: &Objects<'_>,
    cluster: &Cluster,
    (of, service): (&str, &str),
    port: u16,
    client: &str,
) -> Value {
    let object = objects.find("Service", of, service);
    let opaque = match object {
        Some(object) => is_opaque(object, port, |wanted| service_ports(object, wanted)),
        None => is_default_opaque(port),
    };
    // Routes of a headless Service, or of none, are not accepted.
    let has_parent = object.is_some_and(|object| !cluster_ips(object).is_empty());
    let parent = object.unwrap_or(&Value::Null);
    let attached = |kind: &str| {
        let routes = attached(objects, cluster, kind, ("Service", parent), (of, service), port, client);
        if has_parent { routes } else { Vec::new() }
    };
    let app = object.and_then(|object| declared(object, port)?["appProtocol"].as_str());
    let (protocol, routes) = match app {
        Some("http") => ("http/1", attached("HTTPRoute")),
        Some("kubernetes.io/h2c") if !attached("GRPCRoute").is_empty() => ("grpc", attached("GRPCRoute")),
        Some("kubernetes.io/h2c") => ("http/2", attached("HTTPRoute")),
        Some(_) => ("opaque", attached("TCPRoute")),
        None if opaque => ("opaque", attached("TCPRoute")),
        None => detected(attached),
    };
    // Not Linkerd's: failures are those of responses, which an opaque port has none of.
    let biased = !opaque && matches!(app, None | Some("http" | "kubernetes.io/h2c"));
    json!({"service": format!("{of}/{service}:{port}"), "protocol": protocol, "routes": routes,
        "traffic": traffic::of_parent(parent, biased)})
}

/// The strongest kind of route decides what is not set.
fn detected(attached: impl Fn(&str) -> Vec<Value>) -> (&'static str, Vec<Value>) {
    for (kind, protocol) in
        [("GRPCRoute", "grpc"), ("HTTPRoute", "detect"), ("TLSRoute", "tls"), ("TCPRoute", "opaque")]
    {
        let routes = attached(kind);
        if !routes.is_empty() {
            return (protocol, routes);
        }
    }
    ("detect", Vec::new())
}

/// Routes of a kind at a port of a parent for clients of a namespace, the oldest first, then by name.
fn attached(
    objects: &Objects<'_>,
    cluster: &Cluster,
    kind: &str,
    (parent, parent_object): (&str, &Value),
    (of, named): (&str, &str),
    port: u16,
    client: &str,
) -> Vec<Value> {
    // References of a route to this parent, as the ports that they name.
    let ports = |route: &Value| {
        let references = list(&route["spec"]["parentRefs"]).iter().filter(|reference| {
            reference["kind"] == parent
                && reference["name"] == named
                && reference["namespace"].as_str().unwrap_or(namespace(route)) == of
        });
        references.map(|reference| number(&reference["port"])).collect::<Vec<_>>()
    };
    let stronger: &[&str] = match kind {
        "GRPCRoute" => &[],
        "HTTPRoute" => &["GRPCRoute"],
        "TLSRoute" => &["GRPCRoute", "HTTPRoute"],
        _ => &["GRPCRoute", "HTTPRoute", "TLSRoute"],
    };
    let is_in_force = |route: &&Value| {
        let is_followed = namespace(route) == of || namespace(route) == client;
        let by_one = |wanted: &Option<u16>| {
            let covers = match wanted {
                Some(wanted) => *wanted == port,
                // 3.4: at an EgressNetwork, a port has to be named.
                None => parent == "Service",
            };
            // A stronger route at all of the ports that the reference names takes its place. Not Linkerd's: only if all
            // clients that follow this one follow it.
            let loses = stronger
                .iter()
                .flat_map(|kind| objects.of(kind))
                .filter(|other| namespace(other) == of || namespace(other) == namespace(route))
                .any(|other| ports(other).iter().any(|its| its.is_none() || its == wanted));
            covers && !loses
        };
        is_followed && ports(route).iter().any(by_one)
    };
    let mut routes: Vec<_> = objects.of(kind).filter(is_in_force).collect();
    routes.sort_by_key(|route| order(route));
    let described = routes.into_iter().map(|route| {
        // Without rules, there is one about every request.
        let every = [Value::Null];
        let rules = route["spec"]["rules"].as_array().map_or(&every[..], Vec::as_slice);
        let of_requests = matches!(kind, "HTTPRoute" | "GRPCRoute");
        let rules = rules.iter().map(|rule| {
            let backends = list(&rule["backendRefs"]).iter().map(|backend| {
                let of = backend["namespace"].as_str().unwrap_or(namespace(route));
                let (named_backend, port) = (text(&backend["name"]), &backend["port"]);
                let exists = if backend["kind"] == "EgressNetwork" {
                    parent == "EgressNetwork"
                        && (of, named_backend) == (parent_namespace(route, parent, named).unwrap_or_default(), named)
                } else {
                    let needs_grant = cluster.require_reference_grants && of != namespace(route);
                    objects.find("Service", of, named_backend).is_some()
                        && (!needs_grant || is_granted(objects, route, of, named_backend))
                };
                let weight = backend["weight"].as_u64().unwrap_or(1);
                let filters = traffic::outbound_filters(route, &backend["filters"], false);
                let works = if exists && filters.is_some() { "works" } else { "fails" };
                let backend = format!("{of}/{named_backend}:{port} x{weight} {works}");
                json!({"to": backend, "filters": filters.unwrap_or_default()})
            });
            let backends: Vec<_> = backends.collect();
            if !of_requests {
                return json!({"backends": backends});
            }
            let filters = traffic::outbound_filters(route, &rule["filters"], true);
            json!({"backends": backends, "filters": filters.unwrap_or_else(|| vec!["fails".to_owned()]),
                "timeouts": traffic::rule_timeouts(route, rule, parent_object),
                "retry": traffic::rule_retry(route, parent_object)})
        });
        let rules: Vec<_> = rules.collect();
        json!({"route": format!("{} {}/{}", group(route), namespace(route), name(route)), "rules": rules})
    });
    described.collect()
}

/// Not Linkerd's: whether a ReferenceGrant lets the route send traffic to a Service of another namespace.
fn is_granted(objects: &Objects<'_>, route: &Value, of: &str, service: &str) -> bool {
    objects.within("ReferenceGrant", of).any(|grant| {
        let is_from = |from: &Value| {
            (text(&from["group"]), &from["kind"], text(&from["namespace"]))
                == (group(route), &route["kind"], namespace(route))
        };
        let is_to = |to: &Value| to["kind"] == "Service" && (to["name"].is_null() || to["name"] == service);
        list(&grant["spec"]["from"]).iter().any(is_from) && list(&grant["spec"]["to"]).iter().any(is_to)
    })
}

/// The namespace of the parent of this name.
fn parent_namespace<'a>(route: &'a Value, parent: &str, named: &str) -> Option<&'a str> {
    let references = list(&route["spec"]["parentRefs"]).iter();
    let mut found = references.filter(|reference| reference["kind"] == parent && reference["name"] == named);
    found.next().map(|reference| reference["namespace"].as_str().unwrap_or(namespace(route)))
}

/// The EgressNetwork of an address: of the client's namespace, else of the cluster's; the most specific, then the
/// oldest.
fn egress_network<'a>(objects: &Objects<'a>, cluster: &Cluster, ip: IpAddr, client: &str) -> Option<&'a Value> {
    let usable = |of: &str| -> Vec<_> {
        objects.within("EgressNetwork", of).filter(|network| !overlaps(cluster, network)).collect()
    };
    let mut candidates = usable(client);
    if candidates.is_empty() {
        candidates = usable(&cluster.egress_namespace);
    }
    let length = |network: &Value| -> Option<u8> {
        let Some(networks) = network["spec"]["networks"].as_array() else { return Some(0) };
        let contains = |cidr: &Value| text(cidr).parse::<ipnet::IpNet>().unwrap().contains(&ip);
        let holds = |one: &&Value| contains(&one["cidr"]) && !list(&one["except"]).iter().any(contains);
        let lengths = networks.iter().filter(holds).map(|one| text(&one["cidr"]).split_once('/').unwrap().1);
        lengths.map(|length| length.parse().unwrap()).max()
    };
    let matching = candidates.into_iter().filter_map(|network| Some((length(network)?, network)));
    matching.min_by_key(|(length, network)| (u8::MAX - length, age(network))).map(|(_, network)| network)
}

/// 3.5: an EgressNetwork of addresses of the cluster is not accepted.
fn overlaps(cluster: &Cluster, network: &Value) -> bool {
    let mut cidrs =
        list(&network["spec"]["networks"]).iter().map(|one| text(&one["cidr"]).parse::<ipnet::IpNet>().unwrap());
    cidrs.any(|cidr| cluster.networks.iter().any(|own| own.contains(&cidr.addr()) || cidr.contains(&own.addr())))
}

fn of_egress_network(objects: &Objects<'_>, cluster: &Cluster, network: &Value, port: u16, client: &str) -> Value {
    let of = (namespace(network), name(network));
    let attached = |kind: &str| attached(objects, cluster, kind, ("EgressNetwork", network), of, port, client);
    let opaque = is_opaque(network, port, |_| Vec::new());
    let (protocol, routes) = if opaque { ("opaque", attached("TCPRoute")) } else { detected(attached) };
    json!({"network": format!("{}/{}", of.0, of.1), "policy": network["spec"]["trafficPolicy"], "protocol": protocol,
        "routes": routes, "traffic": traffic::of_parent(network, false)})
}
