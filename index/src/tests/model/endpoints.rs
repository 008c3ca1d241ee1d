//! Endpoints of Services and profiles, by sections 1.4, 1.5 and 1.8 of the contract with Linkerd.

use std::time::Duration;

use super::{reading::*, *};

/// Whom an answer is for.
#[derive(Clone, Copy)]
pub(super) enum Client<'a> {
    /// A client of this cluster, on this node.
    On(Option<&'a str>),
    /// A client of another cluster, in this zone.
    Afar(Option<&'a str>),
}

/// The endpoints of a Service's port for a client, by address.
pub(super) fn of_service(
    objects: &Objects<'_>,
    cluster: &Cluster,
    service: &Key,
    port: u16,
    client: Client<'_>,
    hostname: Option<&str>,
) -> BTreeMap<String, Value> {
    let Some(object) = objects.find("Service", &service.namespace, &service.name) else { return BTreeMap::new() };
    let slices = slices(objects, object);
    // 1.4: the port's name is looked up in the slice; a port that the Service does not declare is taken literally.
    let target_port = |slice: &Value| match declared(object, port) {
        None => Some(port),
        Some(declared) => {
            let found = list(&slice["ports"]).iter().find(|of| text(&of["name"]) == text(&declared["name"]));
            found.and_then(|of| number(&of["port"]))
        }
    };
    let mut candidates = Vec::new();
    for slice in slices.iter().copied() {
        let Some(target) = target_port(slice) else { continue };
        for endpoint in list(&slice["endpoints"]) {
            let is_ready = endpoint["conditions"]["ready"] != false;
            let is_wanted = hostname.is_none_or(|wanted| endpoint["hostname"] == wanted);
            let reference = &endpoint["targetRef"];
            let workload = objects.find(text(&reference["kind"]), &service.namespace, text(&reference["name"]));
            if is_ready && is_wanted && (reference.is_null() || workload.is_some()) {
                candidates.push((slice, target, endpoint, workload));
            }
        }
    }
    let (node, zone) = match client {
        Client::On(node) => (node, node.and_then(|node| zone_of(objects, node))),
        Client::Afar(zone) => (None, zone),
    };
    // 1.5: topology does not concern other clusters. Here, either the node counts, or the zone hints if all have some
    // and one fits.
    if matches!(client, Client::Afar(_)) {
        // All of them count.
    } else if object["spec"]["internalTrafficPolicy"] == "Local" {
        candidates.retain(|(_, _, endpoint, _)| node.is_some_and(|node| endpoint["nodeName"] == node));
    } else if let Some(zone) = zone {
        let hints = |endpoint: &Value| list(&endpoint["hints"]["forZones"]).to_vec();
        let is_near = |endpoint: &Value| hints(endpoint).iter().any(|hint| hint["name"] == zone);
        let all_hinted = candidates.iter().all(|(_, _, endpoint, _)| !hints(endpoint).is_empty());
        if all_hinted && candidates.iter().any(|(_, _, endpoint, _)| is_near(endpoint)) {
            candidates.retain(|(_, _, endpoint, _)| is_near(endpoint));
        }
    }
    let mut shared = BTreeMap::from([
        ("namespace".to_owned(), json!(service.namespace)),
        ("service".to_owned(), json!(service.name)),
    ]);
    for slice in slices.iter().copied() {
        shared.extend(mirrored(slice));
    }
    let mut found = BTreeMap::new();
    let mut pods_with_v6 = Vec::new();
    for (slice, target, endpoint, workload) in candidates {
        for ip in list(&endpoint["addresses"]).iter().map(|ip| text(ip).parse::<IpAddr>().unwrap()) {
            let is_pod = workload.is_some_and(|workload| workload["kind"] == "Pod");
            // 1.5; a proxy that was injected for IPv4 alone refuses IPv6.
            let refuses_v6 = |pod| !cluster.ipv6 || listens_for_v4_alone(pod, target);
            if is_pod && ip.is_ipv6() && workload.is_some_and(refuses_v6) {
                continue;
            }
            let addr = SocketAddr::new(ip, target);
            let seen = match workload {
                None => Some(bare(cluster, slice, port)),
                Some(workload) => of_workload(objects, cluster, workload, target),
            };
            // A pod whose proxy does not say where it listens is left out.
            let Some(mut seen) = seen else { continue };
            let its_zone = endpoint["zone"].as_str();
            let labels = seen["labels"].as_object_mut().unwrap();
            if workload.is_some() {
                labels.entry("zone").or_insert_with(|| json!(""));
                if let Some(zone) = its_zone {
                    labels.insert("zone".to_owned(), json!(zone));
                }
            }
            labels.extend(shared.iter().map(|(key, value)| (key.clone(), value.clone())));
            if requires_mtls(object) {
                labels.insert("require_mtls".to_owned(), json!("true"));
            }
            seen["locality"] = match (zone, its_zone.filter(|_| workload.is_some())) {
                (Some(client), Some(its)) => json!(if client == its { "local" } else { "remote" }),
                _ => json!("unknown"),
            };
            if is_pod {
                let pod = format!("{}:{target}", name(workload.unwrap()));
                seen["pod"] = json!(pod);
                if ip.is_ipv6() {
                    pods_with_v6.push(pod);
                }
            }
            // Of two entries for an address, that of the last slice by name counts.
            found.insert(addr.to_string(), seen);
        }
    }
    // 1.5: a pod with both families is presented once, by IPv6.
    found.retain(|addr, seen| {
        addr.parse::<SocketAddr>().unwrap().is_ipv6() || !pods_with_v6.iter().any(|pod| seen["pod"] == *pod)
    });
    for seen in found.values_mut() {
        seen.as_object_mut().unwrap().remove("pod");
        // 1.8: only profiles say so; to clients of endpoints, the hint does.
        seen.as_object_mut().unwrap().remove("opaque");
    }
    found
}

/// 1.7: where the endpoints of a Service are.
pub(super) fn discovery(service: &Value) -> Value {
    let (remote, local) = ("multicluster.linkerd.io/remote-discovery", "multicluster.linkerd.io/local-discovery");
    if annotation(service, remote).is_some() || annotation(service, local).is_some() {
        let mut members: Vec<&str> = Vec::new();
        for member in annotation(service, remote).unwrap_or_default().split(',').map(str::trim) {
            // Each once, and only names of a Service and of a cluster.
            let parts: Vec<_> = member.split('@').collect();
            if parts.len() == 2 && !parts.contains(&"") && !members.contains(&member) {
                members.push(member);
            }
        }
        return json!({"here": annotation(service, local).filter(|name| !name.is_empty()), "members": members});
    }
    match label(service, remote) {
        Some(cluster) => {
            json!({"cluster": cluster, "service": label(service, "multicluster.linkerd.io/remote-service")})
        }
        None => json!("here"),
    }
}

/// The slices of a Service.
fn slices<'a>(objects: &Objects<'a>, service: &Value) -> Vec<&'a Value> {
    let is_of = |slice: &&Value| {
        label(slice, "kubernetes.io/service-name") == Some(name(service)) && slice["addressType"] != "FQDN"
    };
    objects.within("EndpointSlice", namespace(service)).filter(is_of).collect()
}

/// Not Linkerd's: whether nothing may be sent to a Service's endpoints in plaintext. What cannot be read says so.
fn requires_mtls(service: &Value) -> bool {
    annotation(service, "weft.io/require-mtls").is_some_and(|value| !matches!(value, "0" | "false"))
}

/// Whether a Service lists a pod of its namespace, ready or not.
fn lists(objects: &Objects<'_>, service: &Value, pod: &Value) -> bool {
    let is_it = |reference: &Value| reference["kind"] == "Pod" && reference["name"] == name(pod);
    let mut endpoints = slices(objects, service).into_iter().flat_map(|slice| list(&slice["endpoints"]));
    endpoints.any(|endpoint| is_it(&endpoint["targetRef"]))
}

/// The zone of a node, if both are known.
fn zone_of<'a>(objects: &Objects<'a>, node: &str) -> Option<&'a str> {
    objects.of("Node").find(|object| name(object) == node).and_then(|node| label(node, "topology.kubernetes.io/zone"))
}

/// 1.4: labels of the endpoints of a mirrored Service.
fn mirrored(slice: &Value) -> BTreeMap<String, Value> {
    let Some(cluster) = label(slice, "mirror.linkerd.io/cluster-name") else { return BTreeMap::new() };
    let mut found = BTreeMap::from([("target_cluster".to_owned(), json!(cluster))]);
    let mut parts = annotation(slice, "mirror.linkerd.io/remote-svc-fq-name").unwrap_or_default().split('.');
    if let (Some(service), Some(namespace)) = (parts.next(), parts.next()) {
        found.insert("target_service".to_owned(), json!(service));
        found.insert("target_service_namespace".to_owned(), json!(namespace));
    }
    found
}

/// 1.4: an address without an object, which may be another cluster's gateway.
fn bare(cluster: &Cluster, slice: &Value, port: u16) -> Value {
    let identity = annotation(slice, "mirror.linkerd.io/remote-gateway-identity");
    let service = annotation(slice, "mirror.linkerd.io/remote-svc-fq-name");
    json!({
        "labels": {},
        "identity": identity.map(|identity| format!("gateway {identity}")),
        "hint": if identity.is_some() && cluster.h2_upgrade { "h2" } else { "none" },
        "transport": null,
        "http2": identity.is_some(),
        "authority": service.map(|service| format!("{service}:{port}")),
    })
}

/// 1.4: the endpoint of a pod's or an ExternalWorkload's port. `None` if it cannot be reached by mesh TLS.
fn of_workload(objects: &Objects<'_>, cluster: &Cluster, workload: &Value, port: u16) -> Option<Value> {
    let named = |wanted: &str| named_ports(workload, wanted);
    let opaque = is_opaque(workload, port, named)
        || servers(objects, workload, port).iter().any(|server| server["spec"]["proxyProtocol"] == "opaque");
    let by_header = opaque || cluster.transport_mode == TransportMode::TransportHeader;
    let hint = match (opaque, cluster.h2_upgrade) {
        (true, _) => "opaque",
        (false, true) => "h2",
        (false, false) => "detect",
    };
    let mut seen = json!({"labels": labels_of(objects, workload), "identity": null, "hint": "none", "transport": null,
        "http2": false, "authority": null, "opaque": opaque});
    if workload["kind"] == "ExternalWorkload" {
        let tls = &workload["spec"]["meshTLS"];
        let inbound = named_ports(workload, "linkerd-proxy").first().copied().unwrap_or(4143);
        seen["identity"] = json!(format!("{} as {}", text(&tls["identity"]), text(&tls["serverName"])));
        seen["hint"] = json!(hint);
        seen["http2"] = json!(true);
        seen["transport"] = json!(by_header.then_some(inbound));
        return Some(seen);
    }
    if !is_redirected(workload, port) {
        return Some(seen);
    }
    let listens = |part: &str| listener(workload, part)?.rsplit(':').next()?.parse::<u16>().ok();
    let (inbound, admin, control) = (listens("INBOUND")?, listens("ADMIN")?, listens("CONTROL")?);
    seen["hint"] = json!(hint);
    seen["http2"] = json!(true);
    if by_header && port != admin && port != control {
        seen["transport"] = json!(inbound);
    }
    if label(workload, "linkerd.io/control-plane-ns") == Some(&cluster.control_namespace) {
        seen["identity"] = json!(identity(cluster, namespace(workload), account(workload)));
    }
    Some(seen)
}

/// Whether connections to a pod's port arrive at its proxy.
fn is_redirected(pod: &Value, port: u16) -> bool {
    let skipped = annotation(pod, "config.linkerd.io/skip-inbound-ports").unwrap_or_default();
    let mesh = label(pod, "linkerd.io/control-plane-ns").unwrap_or_default();
    !mesh.is_empty() && !covers(skipped, port, |_| Vec::new())
}

fn listens_for_v4_alone(pod: &Value, port: u16) -> bool {
    is_redirected(pod, port) && !listener(pod, "INBOUND").is_some_and(|address| address.starts_with("[::]:"))
}

/// The address of one of the proxy's listeners.
fn listener<'a>(pod: &'a Value, part: &str) -> Option<&'a str> {
    let proxy = containers(pod).find(|container| container["name"] == "linkerd-proxy")?;
    let variable = format!("LINKERD2_PROXY_{part}_LISTEN_ADDR");
    let found = list(&proxy["env"]).iter().find(|one| one["name"] == *variable)?;
    Some(text(&found["value"]))
}

fn account(pod: &Value) -> &str {
    match text(&pod["spec"]["serviceAccountName"]) {
        "" => "default",
        account => account,
    }
}

/// 1.4: the identity of a ServiceAccount.
pub(super) fn identity(cluster: &Cluster, namespace: &str, account: &str) -> String {
    let Cluster { control_namespace, trust_domain, .. } = cluster;
    format!("{account}.{namespace}.serviceaccount.identity.{control_namespace}.{trust_domain}")
}

fn labels_of(objects: &Objects<'_>, workload: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    if workload["kind"] == "ExternalWorkload" {
        found.insert("external_workload".to_owned(), json!(name(workload)));
        if let Some(zone) = label(workload, "topology.kubernetes.io/zone") {
            found.insert("zone".to_owned(), json!(zone));
        }
    } else {
        found.insert("pod".to_owned(), json!(name(workload)));
        found.insert("serviceaccount".to_owned(), json!(account(workload)));
        if let Some(mesh) = label(workload, "linkerd.io/control-plane-ns").filter(|mesh| !mesh.is_empty()) {
            found.insert("control_plane_ns".to_owned(), json!(mesh));
        }
        if let Some(hash) = label(workload, "pod-template-hash") {
            found.insert("pod_template_hash".to_owned(), json!(hash));
        }
    }
    let owners = list(&workload["metadata"]["ownerReferences"]);
    if let [owner] = owners {
        let (mut kind, mut name) = (text(&owner["kind"]), text(&owner["name"]));
        let above = objects.find(kind, namespace(workload), name);
        let above = above.map_or(&[][..], |above| list(&above["metadata"]["ownerReferences"]));
        if workload["kind"] == "ExternalWorkload" {
            // Its owner is nothing that Kubernetes made.
        } else if let ("ReplicaSet" | "Job", [above]) = (kind, above) {
            (kind, name) = (text(&above["kind"]), text(&above["name"]));
        } else if let ("ReplicaSet", Some(hash)) = (kind, label(workload, "pod-template-hash")) {
            // Not Linkerd's: a ReplicaSet that is not known is called after its Deployment.
            if let Some(deployment) = name.strip_suffix(hash).and_then(|name| name.strip_suffix('-')) {
                (kind, name) = ("Deployment", deployment);
            }
        }
        let kind = if kind == "Job" { "k8s_job".to_owned() } else { kind.to_lowercase() };
        found.insert(kind, json!(name));
    }
    found
}

/// 1.8: the profile of a Service's port for clients of a namespace.
pub(super) fn service_profile(objects: &Objects<'_>, service: &Value, port: u16, client: Option<&str>) -> Value {
    if declared(service, port).is_none() {
        return json!("empty");
    }
    let fqdn = format!("{}.{}.svc.cluster.local", name(service), namespace(service));
    let primary = client.and_then(|client| objects.find("ServiceProfile", client, &fqdn));
    let profile = primary.or_else(|| objects.find("ServiceProfile", namespace(service), &fqdn));
    let opaque = is_opaque(service, port, |wanted| service_ports(service, wanted));
    let spec = profile.map_or(&Value::Null, |profile| &profile["spec"]);
    let budget = &spec["retryBudget"];
    let ttl = text(&budget["ttl"]);
    let budget = budget.is_object().then(|| {
        // Seconds of the only durations that are made up here.
        let ttl = Duration::from_secs(if ttl == "1m30s" { 90 } else { 10 });
        format!("{} {} {ttl:?}", budget["retryRatio"], budget["minRetriesPerSecond"])
    });
    let instead = list(&spec["dstOverrides"]).iter().map(|one| {
        // 1.8: the quantity in thousandths, times ten.
        let weight = if one["weight"] == "500m" { 5000 } else { one["weight"].as_u64().unwrap() * 10_000 };
        format!("{} {weight}", text(&one["authority"]))
    });
    let instead: Vec<_> = instead.collect();
    json!({"budget": budget, "instead": instead, "routes": list(&spec["routes"]), "name": fqdn, "port": port,
        "opaque": opaque, "profile": profile.map(namespace)})
}

/// 1.8: the profile of an address that belongs to no Service. `Err` if it is not clear whose address it is.
pub(super) fn address_profile(objects: &Objects<'_>, cluster: &Cluster, addr: SocketAddr) -> Result<Option<Value>, ()> {
    let ip = addr.ip().to_string();
    let is_over = |pod: &Value| matches!(text(&pod["status"]["phase"]), "Succeeded" | "Failed");
    let has_ip = |pod: &Value| {
        let all = list(&pod["status"]["podIPs"]).iter().map(|one| &one["ip"]);
        all.chain([&pod["status"]["podIP"]]).any(|one| *one == *ip)
    };
    let by_ip = objects.of("Pod").filter(|pod| has_ip(pod) && !is_over(pod) && pod["spec"]["hostNetwork"] != true);
    let mut found: Vec<_> = by_ip.map(|pod| (pod, addr.port())).collect();
    let mut on_node = false;
    if found.is_empty() {
        on_node = true;
        for pod in objects.of("Pod").filter(|pod| pod["status"]["hostIP"] == *ip && !is_over(pod)) {
            let mut ports = containers(pod).flat_map(|container| list(&container["ports"]));
            let port = ports.find(|port| number(&port["hostPort"]) == Some(addr.port()));
            found.extend(port.and_then(|port| Some((pod, number(&port["containerPort"])?))));
        }
    }
    // A pod that terminates has its address until another one has it.
    if found.iter().any(|(pod, _)| pod["metadata"]["deletionTimestamp"].is_null()) {
        found.retain(|(pod, _)| pod["metadata"]["deletionTimestamp"].is_null());
    }
    if found.is_empty() {
        on_node = false;
        let lists = |external: &Value| {
            list(&external["spec"]["ports"]).iter().any(|port| number(&port["port"]) == Some(addr.port()))
        };
        let has_ip = |external: &Value| list(&external["spec"]["workloadIPs"]).iter().any(|one| one["ip"] == *ip);
        let external = objects.of("ExternalWorkload").filter(|external| has_ip(external) && lists(external));
        found = external.map(|external| (external, addr.port())).collect();
    }
    let (workload, port) = match found[..] {
        [] => {
            let opaque = is_default_opaque(addr.port());
            return Ok(Some(json!({"labels": {}, "identity": null, "hint": "none", "transport": null, "http2": false,
                "authority": null, "opaque": opaque})));
        }
        [one] => one,
        _ => return Err(()),
    };
    let Some(mut seen) = of_workload(objects, cluster, workload, port) else { return Ok(None) };
    seen["labels"]["namespace"] = json!(namespace(workload));
    let mut services = objects.within("Service", namespace(workload));
    let is_pod = workload["kind"] == "Pod";
    if is_pod && services.any(|service| requires_mtls(service) && lists(objects, service, workload)) {
        seen["labels"]["require_mtls"] = json!("true");
    }
    if on_node {
        // Not Linkerd's: the node's address does not lead to the proxy's port.
        seen["transport"] = Value::Null;
    }
    Ok(Some(seen))
}
