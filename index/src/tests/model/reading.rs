//! Objects as JSON: what the model reads of them, without the types and the rules of the product.

use super::*;

/// Ports that are opaque by default (section 1.1).
const DEFAULT_OPAQUE: [u16; 8] = [25, 587, 3306, 4444, 5432, 6379, 9300, 11211];

/// Everything that exists.
pub(super) struct Objects<'a>(pub(super) Vec<&'a Value>);

impl<'a> Objects<'a> {
    /// Objects of a kind, in all namespaces, by namespace and name.
    pub(super) fn of(&self, kind: &str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().copied().filter(move |object| object["kind"] == kind)
    }

    /// Objects of a kind in a namespace.
    pub(super) fn within(&self, kind: &str, namespace: &str) -> impl Iterator<Item = &'a Value> {
        self.of(kind).filter(move |object| super::reading::namespace(object) == namespace)
    }

    pub(super) fn find(&self, kind: &str, namespace: &str, name: &str) -> Option<&'a Value> {
        self.within(kind, namespace).find(|object| super::reading::name(object) == name)
    }
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

pub(super) fn name(object: &Value) -> &str {
    text(&object["metadata"]["name"])
}

pub(super) fn namespace(object: &Value) -> &str {
    text(&object["metadata"]["namespace"])
}

pub(super) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"].get(key)?.as_str()
}

pub(super) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["annotations"].get(key)?.as_str()
}

/// The oldest first, then by name: every order of Linkerd's (sections 3.3 and 3.4). Times are written alike, so that
/// their text sorts as they do.
pub(super) fn age(object: &Value) -> (&str, &str) {
    (text(&object["metadata"]["creationTimestamp"]), name(object))
}

/// The API group of an object.
pub(super) fn group(object: &Value) -> &str {
    text(&object["apiVersion"]).split_once('/').map_or("", |(group, _)| group)
}

/// The order of routes. Linkerd does not say which of two kinds is first; ours is Linkerd's own HTTPRoute.
pub(super) fn order(route: &Value) -> (&str, &str, &str, bool) {
    let (created, name) = age(route);
    (created, name, namespace(route), group(route) != "policy.linkerd.io")
}

pub(super) fn number(value: &Value) -> Option<u16> {
    value.as_u64().and_then(|number| u16::try_from(number).ok())
}

/// What Kubernetes says of label selectors.
pub(super) fn selects(selector: &Value, labels: &Value) -> bool {
    let found = |key: &str| labels.get(key).and_then(Value::as_str);
    let pairs = selector["matchLabels"].as_object();
    let all_pairs = pairs.into_iter().flatten().all(|(key, value)| found(key) == value.as_str());
    all_pairs
        && list(&selector["matchExpressions"]).iter().all(|rule| {
            let value = found(text(&rule["key"]));
            let listed = value.is_some_and(|value| list(&rule["values"]).iter().any(|wanted| wanted == value));
            match text(&rule["operator"]) {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                other => panic!("no operator {other}"),
            }
        })
}

/// Whether a list of numbers, ranges and names contains a port; `named` are the numbers of a name.
pub(super) fn covers(ports: &str, port: u16, named: impl Fn(&str) -> Vec<u16>) -> bool {
    ports.split(',').map(str::trim).any(|item| {
        let range = item.split_once('-').and_then(|(from, to)| Some((from.parse::<u16>().ok()?, to.parse().ok()?)));
        match (range, item.parse::<u16>()) {
            (Some((from, to)), _) => (from..=to).contains(&port),
            (None, Ok(number)) => number == port,
            (None, Err(_)) => named(item).contains(&port),
        }
    })
}

/// Whether the annotation about opaque ports, or else the default list, contains a port.
pub(super) fn is_opaque(object: &Value, port: u16, named: impl Fn(&str) -> Vec<u16>) -> bool {
    match annotation(object, "config.linkerd.io/opaque-ports") {
        Some(ports) => covers(ports, port, named),
        None => DEFAULT_OPAQUE.contains(&port),
    }
}

pub(super) fn is_default_opaque(port: u16) -> bool {
    DEFAULT_OPAQUE.contains(&port)
}

/// Containers that serve: those of the pod, and native sidecars.
pub(super) fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let sidecars = list(&pod["spec"]["initContainers"]).iter().filter(|one| one["restartPolicy"] == "Always");
    sidecars.chain(list(&pod["spec"]["containers"]))
}

/// The numbers of a workload's port name: of a pod's containers, or of an ExternalWorkload.
pub(super) fn named_ports(workload: &Value, wanted: &str) -> Vec<u16> {
    let of_pod = containers(workload).flat_map(|container| list(&container["ports"]));
    // A name of a UDP port says nothing of the TCP port with its number.
    let of_pod = of_pod
        .filter(|port| port["name"] == wanted && port["protocol"] != "UDP")
        .filter_map(|port| number(&port["containerPort"]));
    let external = list(&workload["spec"]["ports"]).iter().filter(|port| port["name"] == wanted);
    of_pod.chain(external.filter_map(|port| number(&port["port"]))).collect()
}

/// Whether a Server's port, a number or a name, is this port of a workload.
pub(super) fn is_port(wanted: &Value, workload: &Value, port: u16) -> bool {
    number(wanted).map_or_else(|| named_ports(workload, text(wanted)).contains(&port), |number| number == port)
}

/// Servers that select a port of a pod or an ExternalWorkload.
pub(super) fn servers<'a>(objects: &Objects<'a>, workload: &Value, port: u16) -> Vec<&'a Value> {
    let selector = if workload["kind"] == "Pod" { "podSelector" } else { "externalWorkloadSelector" };
    let selected = |server: &&Value| {
        let spec = &server["spec"];
        !spec[selector].is_null()
            && selects(&spec[selector], &workload["metadata"]["labels"])
            && is_port(&spec["port"], workload, port)
    };
    objects.within("Server", namespace(workload)).filter(selected).collect()
}

/// The number of a Service's port, if it declares it.
pub(super) fn declared(service: &Value, port: u16) -> Option<&Value> {
    list(&service["spec"]["ports"]).iter().find(|declared| number(&declared["port"]) == Some(port))
}

/// The cluster addresses of a Service; none of a headless one.
pub(super) fn cluster_ips(service: &Value) -> Vec<&str> {
    let ip = text(&service["spec"]["clusterIP"]);
    if ip.parse::<IpAddr>().is_ok() { vec![ip] } else { Vec::new() }
}

/// The numbers of the name of a Service's port.
pub(super) fn service_ports(service: &Value, wanted: &str) -> Vec<u16> {
    let named = list(&service["spec"]["ports"]).iter().filter(|port| port["name"] == wanted);
    named.filter_map(|port| number(&port["port"])).collect()
}
