//! Policies of ports, by section 3.3 of the contract with Linkerd.

use super::{endpoints::identity, reading::*, *};

/// The policy of a workload's port.
pub(super) fn of_workload(objects: &Objects<'_>, cluster: &Cluster, workload: &Value, port: u16) -> Value {
    let selecting = servers(objects, workload, port);
    let Some(server) = selecting.into_iter().min_by_key(|server| age(server)) else {
        return default_server(cluster, workload, port);
    };
    let of = (namespace(server), name(server));
    let protocol = match server["spec"]["proxyProtocol"].as_str() {
        None | Some("unknown") => "detect",
        Some("HTTP/1") => "http/1",
        Some("HTTP/2") => "http/2",
        Some("gRPC") => "grpc",
        Some("opaque") => "opaque",
        Some("TLS") => "tls",
        Some(other) => panic!("no protocol {other}"),
    };
    let mut authorizations = by_server_authorizations(objects, cluster, server);
    let targets = [target("policy.linkerd.io", "Server", of.1), target("", "Namespace", of.0)];
    authorizations.extend(by_policies(objects, cluster, of.0, &targets));
    authorizations.extend(by_default(cluster, server["spec"]["accessPolicy"].as_str().unwrap_or("deny")));
    authorizations.sort_unstable();
    let routes = routes(objects, cluster, server, protocol);
    let probes = match (protocol, &routes) {
        ("detect" | "http/1" | "http/2", None) => probe_paths(workload, port),
        _ => Vec::new(),
    };
    json!({"origin": format!("server {}", of.1), "protocol": protocol, "authorizations": authorizations,
        "routes": routes, "probes": probes, "limit": limit(objects, of)})
}

/// What counts where no Server selects the port.
fn default_server(cluster: &Cluster, workload: &Value, port: u16) -> Value {
    let set = annotation(workload, "config.linkerd.io/default-inbound-policy");
    let policy = set.unwrap_or(cluster.default_policy.label());
    let required = annotation(workload, "config.linkerd.io/proxy-require-identity-inbound-ports");
    let required = required.is_some_and(|ports| covers(ports, port, |_| Vec::new()));
    let policy = match policy {
        "all-unauthenticated" if required => "all-authenticated",
        "cluster-unauthenticated" if required => "cluster-authenticated",
        // What cannot be read denies.
        "unreadable" => "deny",
        other => other,
    };
    let opaque = is_opaque(workload, port, |wanted| named_ports(workload, wanted));
    let probes = if opaque { Vec::new() } else { probe_paths(workload, port) };
    let authorizations: Vec<_> = by_default(cluster, policy).into_iter().collect();
    json!({"origin": format!("default {policy}"), "protocol": if opaque { "opaque" } else { "detect" },
        "authorizations": authorizations, "routes": null, "probes": probes, "limit": null})
}

/// One authorization, in words.
fn grant(by: &str, who: &[String], from: &[String]) -> String {
    let (mut who, mut from) = (who.to_vec(), from.to_vec());
    who.sort_unstable();
    from.sort_unstable();
    format!("{by}: {} from {}", who.join(" or "), from.join(" or "))
}

fn everywhere() -> Vec<String> {
    ["0.0.0.0/0", "::/0"].map(str::to_owned).to_vec()
}

fn inside(cluster: &Cluster) -> Vec<String> {
    cluster.networks.iter().map(ToString::to_string).collect()
}

fn by_default(cluster: &Cluster, policy: &str) -> Option<String> {
    let (who, from) = match policy {
        "all-unauthenticated" | "audit" => ("anyone", everywhere()),
        "all-authenticated" => ("*", everywhere()),
        "cluster-unauthenticated" => ("anyone", inside(cluster)),
        "cluster-authenticated" => ("*", inside(cluster)),
        "deny" => return None,
        other => panic!("no policy {other}"),
    };
    Some(grant(&format!("default {policy}"), &[who.to_owned()], &from))
}

fn networks(all: &Value) -> Vec<String> {
    let network = |one: &Value| {
        let except: Vec<_> = list(&one["except"]).iter().map(text).collect();
        if except.is_empty() {
            text(&one["cidr"]).to_owned()
        } else {
            format!("{} but {}", text(&one["cidr"]), except.join(","))
        }
    };
    list(all).iter().map(network).collect()
}

fn by_server_authorizations(objects: &Objects<'_>, cluster: &Cluster, server: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for authorization in objects.within("ServerAuthorization", namespace(server)) {
        let (wanted, client) = (&authorization["spec"]["server"], &authorization["spec"]["client"]);
        let is_about = match wanted["name"].as_str() {
            Some(wanted) => wanted == name(server),
            None => selects(&wanted["selector"], &server["metadata"]["labels"]),
        };
        if !is_about {
            continue;
        }
        let from = networks(&client["networks"]);
        let from = if from.is_empty() { inside(cluster) } else { from };
        let tls = &client["meshTLS"];
        let mut who: Vec<_> = list(&tls["identities"]).iter().map(|one| text(one).to_owned()).collect();
        for account in list(&tls["serviceAccounts"]) {
            let of = account["namespace"].as_str().unwrap_or(namespace(server));
            who.push(identity(cluster, of, text(&account["name"])));
        }
        if who.is_empty() && client["unauthenticated"] == true {
            who.push("anyone".to_owned());
        } else if who.is_empty() && tls["unauthenticatedTLS"] == true {
            who.push("any TLS".to_owned());
        }
        if !who.is_empty() {
            found.push(grant(&format!("ServerAuthorization {}", name(authorization)), &who, &from));
        }
    }
    found
}

/// What a policy is about: group, kind and name.
fn target(group: &str, kind: &str, name: &str) -> Value {
    json!([group, kind, name])
}

/// AuthorizationPolicies of a namespace with one of these targets; one of which a part is missing counts for nothing.
fn by_policies(objects: &Objects<'_>, cluster: &Cluster, of: &str, targets: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for policy in objects.within("AuthorizationPolicy", of) {
        let about = &policy["spec"]["targetRef"];
        if !targets.contains(&target(text(&about["group"]), text(&about["kind"]), text(&about["name"]))) {
            continue;
        }
        let required = list(&policy["spec"]["requiredAuthenticationRefs"]);
        let (mut who, mut from) = (Vec::new(), Vec::new());
        for reference in required {
            let of = reference["namespace"].as_str().unwrap_or(of);
            let wanted = text(&reference["name"]);
            match text(&reference["kind"]) {
                "NetworkAuthentication" => {
                    let found = objects.find("NetworkAuthentication", of, wanted);
                    from.push(found.map(|found| networks(&found["spec"]["networks"])));
                }
                "MeshTLSAuthentication" => {
                    let found = objects.find("MeshTLSAuthentication", of, wanted);
                    who.push(found.map(|found| identities(cluster, found)));
                }
                "ServiceAccount" => who.push(Some(vec![identity(cluster, of, wanted)])),
                _ => who.push(None),
            }
        }
        if who.len() > 1 || from.len() > 1 {
            continue;
        }
        let (Some(who), Some(from)) = (
            who.pop().unwrap_or_else(|| Some(vec!["anyone".to_owned()])),
            from.pop().unwrap_or_else(|| Some(everywhere())),
        ) else {
            continue;
        };
        found.push(grant(&format!("AuthorizationPolicy {}", name(policy)), &who, &from));
    }
    found
}

/// Identities that a MeshTLSAuthentication names.
fn identities(cluster: &Cluster, authentication: &Value) -> Vec<String> {
    let spec = &authentication["spec"];
    let mut found: Vec<_> = list(&spec["identities"]).iter().map(|one| text(one).to_owned()).collect();
    for reference in list(&spec["identityRefs"]) {
        let wanted = text(&reference["name"]);
        let of = reference["namespace"].as_str().unwrap_or(namespace(authentication));
        found.push(match text(&reference["kind"]) {
            "Namespace" => identity(cluster, wanted, "*"),
            _ => identity(cluster, of, wanted),
        });
    }
    found
}

/// The routes of a Server, the oldest first; `None` if every request takes the default route.
fn routes(objects: &Objects<'_>, cluster: &Cluster, server: &Value, protocol: &str) -> Option<Vec<Value>> {
    let kind = match protocol {
        "detect" | "http/1" | "http/2" => "HTTPRoute",
        "grpc" => "GRPCRoute",
        _ => return None,
    };
    let names_it = |parent: &Value| {
        parent["group"] == "policy.linkerd.io"
            && parent["kind"] == "Server"
            && parent["name"] == name(server)
            && parent["namespace"].as_str().is_none_or(|of| of == namespace(server))
            && parent["port"].is_null()
    };
    let attached = objects.within(kind, namespace(server));
    let mut attached: Vec<_> =
        attached.filter(|route| list(&route["spec"]["parentRefs"]).iter().any(names_it)).collect();
    attached.sort_by_key(|route| order(route));
    let described = attached.into_iter().map(|route| {
        let targets = [target(group(route), kind, name(route))];
        let mut authorizations = by_policies(objects, cluster, namespace(route), &targets);
        authorizations.sort_unstable();
        // Without rules, there is one about every request.
        let every = [Value::Null];
        let rules = route["spec"]["rules"].as_array().map_or(&every[..], Vec::as_slice);
        let rules: Vec<_> = rules.iter().map(|rule| traffic::inbound_filters(&rule["filters"])).collect();
        json!({"route": format!("{} {}", group(route), name(route)), "authorizations": authorizations,
            "hosts": list(&route["spec"]["hostnames"]), "rules": rules})
    });
    let described: Vec<_> = described.collect();
    (!described.is_empty()).then_some(described)
}

/// Paths of the HTTP probes of a pod's port, each once.
fn probe_paths(workload: &Value, port: u16) -> Vec<String> {
    let kinds = ["livenessProbe", "readinessProbe", "startupProbe"];
    let probes = containers(workload).flat_map(|container| kinds.map(|kind| &container[kind]["httpGet"]));
    let of_port = probes.filter(|probe| !probe.is_null() && is_port(&probe["port"], workload, port));
    of_port.map(|probe| text(&probe["path"]).to_owned()).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The rate limit of a Server: of several, the oldest, then the first by name.
fn limit(objects: &Objects<'_>, (of, server): (&str, &str)) -> Value {
    let about = |policy: &&Value| {
        let about = &policy["spec"]["targetRef"];
        about["kind"] == "Server" && about["name"] == server
    };
    let found = objects.within("HTTPLocalRateLimitPolicy", of).filter(about).min_by_key(|policy| age(policy));
    found.map_or(Value::Null, |policy| {
        json!(format!("{} {}", name(policy), policy["spec"]["total"]["requestsPerSecond"]))
    })
}
