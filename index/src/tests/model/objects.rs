//! Objects of every kind that answers depend on, made up from few names and values, so that they concern each other.

use super::{traffic, *};

const TIMES: [&str; 3] = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"];
const SERVERS: [&str; 3] = ["s1", "s2", "s3"];

/// Numbers that do not differ between runs (SplitMix64, <https://prng.di.unimi.it/splitmix64.c>).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.next() % of.len() as u64).unwrap()].clone()
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// Some of these, in order.
    fn some<T: Clone>(&mut self, percent: u64, of: &[T]) -> Vec<T> {
        of.iter().filter(|_| self.chance(percent)).cloned().collect()
    }

    /// One of these, or null as often as `percent` says not.
    pub(super) fn maybe(&mut self, percent: u64, of: &[Value]) -> Value {
        if self.chance(percent) { self.pick(of) } else { Value::Null }
    }

    fn namespace(&mut self) -> &'static str {
        self.pick(&["shop", "shop", "shop", "shop", "ops"])
    }
}

/// An object without the fields that are null, which the API server leaves out.
fn object(version: &str, kind: &str, (namespace, name): (&str, &str), rest: Value) -> Value {
    let mut object = json!({"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace, "name": name}});
    merge(&mut object, rest);
    prune(&mut object);
    object
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(prune);
        }
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

/// An object of any kind but Node.
pub(super) fn any(dice: &mut Dice) -> Value {
    type Make = fn(&mut Dice) -> Value;
    let kinds: &[(u64, Make)] = &[
        (12, service),
        (14, slice),
        (18, pod),
        (3, replica_set),
        (4, external),
        (12, server),
        (7, server_authorization),
        (9, authorization_policy),
        (5, mesh_tls),
        (4, network_authentication),
        (3, rate_limit),
        (4, profile),
        (4, egress_network),
        (24, route),
        (5, reference_grant),
    ];
    let mut left = dice.next() % kinds.iter().map(|(weight, _)| weight).sum::<u64>();
    for (weight, make) in kinds {
        match left.checked_sub(*weight) {
            Some(rest) => left = rest,
            None => {
                let mut made = make(dice);
                made["metadata"]["creationTimestamp"] = json!(dice.pick(&TIMES));
                return made;
            }
        }
    }
    unreachable!("the weights are all there is")
}

/// The nodes, which stay.
pub(super) fn nodes() -> Vec<Value> {
    let node = |(name, zone): (&str, Value)| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": zone}});
    let zone = |zone: &str| json!({"topology.kubernetes.io/zone": zone});
    [("n1", zone("a")), ("n2", zone("b")), ("n3", json!({}))].map(node).to_vec()
}

fn service(dice: &mut Dice) -> Value {
    let (namespace, name, ip) =
        dice.pick(&[("shop", "web", "10.96.0.1"), ("shop", "api", "10.96.0.2"), ("ops", "web", "10.96.0.3")]);
    let ip = if dice.chance(75) { ip } else { dice.pick(&["None", "None", "10.96.0.1", "10.96.0.2", "8.8.8.8"]) };
    let apps = ["http", "kubernetes.io/h2c", "linkerd.io/opaque", "linkerd.io/tcp", "odd"].map(|app| json!(app));
    let ports = [("http", 80), ("more", 8080), (dice.pick(&["db", "postgres-replication"]), 3306)];
    let ports = dice.some(75, &ports).into_iter();
    let ports: Vec<_> =
        ports.map(|(name, port)| json!({"name": name, "port": port, "appProtocol": dice.maybe(30, &apps)})).collect();
    let opaque = ["80", "more", "8000-9000", "443", "My_Port,postgres-replication"].map(|list| json!(list));
    let opaque = dice.maybe(25, &opaque);
    let local = dice.maybe(25, &[json!("Local"), json!("Cluster")]);
    let strict = dice.maybe(20, &["true", "1", "odd", "false"].map(|value| json!(value)));
    let mut annotations = json!({"config.linkerd.io/opaque-ports": opaque, "weft.io/require-mtls": strict});
    let mut labels = Value::Null;
    merge(&mut annotations, if dice.chance(60) { traffic::annotations(dice) } else { json!({}) });
    merge(&mut annotations, if dice.chance(60) { traffic::balancing(dice) } else { json!({}) });
    match dice.next() % 6 {
        0 => {
            labels = json!({"multicluster.linkerd.io/remote-discovery": dice.pick(&["east", "west"]),
                "multicluster.linkerd.io/remote-service": dice.maybe(80, &[json!("web"), json!("api")])});
        }
        1 => {
            let members = ["web@east,api@west", "web@east, web@east,", "web", "@west,web@,a@b@c,web@west", ""];
            let federated = json!({"multicluster.linkerd.io/remote-discovery": dice.maybe(80, &members.map(|of| json!(of))),
                "multicluster.linkerd.io/local-discovery": dice.maybe(70, &[json!("web"), json!("api"), json!("")])});
            merge(&mut annotations, federated);
        }
        _ => {}
    }
    object(
        "v1",
        "Service",
        (namespace, name),
        json!({"metadata": {"annotations": annotations, "labels": labels},
        "spec": {"clusterIP": ip, "ports": ports, "internalTrafficPolicy": local}}),
    )
}

fn slice(dice: &mut Dice) -> Value {
    let (namespace, service) = dice.pick(&[("shop", "web"), ("shop", "web"), ("shop", "api"), ("ops", "web")]);
    let name = format!("{service}-{}", dice.pick(&["a", "b", "c"]));
    let v6 = dice.chance(20);
    let ports = [("http", 8080), ("http", 9090), ("more", 8080), ("db", 3306)];
    let mut ports: Vec<_> = dice.some(70, &ports);
    ports.dedup_by_key(|(name, _)| *name);
    let mut endpoints = Vec::new();
    for number in dice.some(50, &[1, 2, 3, 4]) {
        let ip = if v6 { format!("fd00::{number}") } else { format!("10.244.0.{number}") };
        endpoints.push(json!({"addresses": [ip], "targetRef": {"kind": "Pod", "name": format!("p{number}")},
            "zone": dice.maybe(70, &[json!("a"), json!("b")])}));
    }
    if !v6 && dice.chance(15) {
        let vm = json!({"kind": "ExternalWorkload", "name": "vm"});
        endpoints.push(json!({"addresses": ["192.168.0.1"], "targetRef": dice.maybe(60, &[vm])}));
    }
    let all_hinted = dice.chance(50);
    for endpoint in &mut endpoints {
        let hint = json!({"forZones": [{"name": dice.pick(&["a", "b"])}]});
        merge(
            endpoint,
            json!({
                "conditions": {"ready": dice.maybe(50, &[json!(true), json!(true), json!(false)])},
                "hostname": dice.maybe(40, &[json!("web-0"), json!("web-1")]),
                "nodeName": dice.maybe(80, &[json!("n1"), json!("n2"), json!("n3"), json!("nx")]),
                "hints": if all_hinted || dice.chance(30) { hint } else { Value::Null },
            }),
        );
    }
    let mirrored = dice.chance(15);
    let labels = json!({"kubernetes.io/service-name": service,
        "mirror.linkerd.io/cluster-name": if mirrored { json!("east") } else { Value::Null }});
    let annotations = if mirrored {
        json!({"mirror.linkerd.io/remote-gateway-identity": dice.maybe(70, &[json!("gateway.east")]),
            "mirror.linkerd.io/remote-svc-fq-name": dice.maybe(70, &[json!("web.shop.svc.east")])})
    } else {
        Value::Null
    };
    let ports: Vec<_> = ports.into_iter().map(|(name, port)| json!({"name": name, "port": port})).collect();
    object(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        (namespace, &name),
        json!({
        "metadata": {"labels": labels, "annotations": annotations}, "ports": ports, "endpoints": endpoints,
        "addressType": if v6 { "IPv6" } else { "IPv4" }}),
    )
}

fn owner(dice: &mut Dice) -> Value {
    let owner = |kind: &str, name: &str| json!({"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u"});
    let (set, job) = (owner("ReplicaSet", "web-abc"), owner("Job", "nightly-1"));
    dice.maybe(70, &[json!([set]), json!([set]), json!([job]), json!([owner("StatefulSet", "db")]), json!([set, job])])
}

fn pod(dice: &mut Dice) -> Value {
    let number = dice.pick(&[1, 2, 3, 4]);
    let namespace = if number == 1 { dice.namespace() } else { "shop" };
    let shown = if dice.chance(90) { number } else { dice.pick(&[1, 2]) };
    let (v4, v6) = (format!("10.244.0.{shown}"), format!("fd00::{shown}"));
    let labels = json!({"app": dice.pick(&["web", "web", "api"]), "tier": dice.maybe(50, &[json!("front"), json!("back")]),
        "linkerd.io/control-plane-ns": dice.maybe(85, &["linkerd", "linkerd", "linkerd", "other", ""].map(|of| json!(of))),
        "pod-template-hash": dice.maybe(50, &[json!("abc")])});
    let mut policies = DefaultPolicy::ALL.map(|policy| json!(policy.label())).to_vec();
    policies.push(json!("unreadable"));
    let annotations = json!({
        "config.linkerd.io/opaque-ports": dice.maybe(25, &[json!("8080"), json!("http,9000-9100"), json!("more")]),
        "config.linkerd.io/skip-inbound-ports": dice.maybe(15, &[json!("8080"), json!("3000-4000")]),
        "config.linkerd.io/default-inbound-policy": dice.maybe(40, &policies),
        "config.linkerd.io/proxy-require-identity-inbound-ports": dice.maybe(20, &[json!("8080,9090"), json!("80")]),
    });
    let any = dice.pick(&["0.0.0.0", "[::]", "[::]"]);
    let env = |part: &str, port: u16| json!({"name": format!("LINKERD2_PROXY_{part}_LISTEN_ADDR"), "value": format!("{any}:{port}")});
    let mut env = vec![env("INBOUND", 4143), env("ADMIN", 4191), env("CONTROL", 9090)];
    if dice.chance(8) {
        env.pop();
    }
    let proxy = json!({"name": "linkerd-proxy", "restartPolicy": "Always", "env": env});
    let native = dice.chance(60);
    let probe = |dice: &mut Dice, path: &str| {
        let port = dice.pick(&[json!("http"), json!(8080), json!(9090)]);
        dice.maybe(40, &[json!({"httpGet": {"path": path, "port": port}})])
    };
    let app = json!({"name": "app", "livenessProbe": probe(dice, "/live"), "readinessProbe": probe(dice, "/ready"),
        "ports": [{"name": "http", "containerPort": 8080, "hostPort": dice.maybe(20, &[json!(80), json!(8080)])},
            {"name": "more", "containerPort": dice.pick(&[80, 9090]), "protocol": dice.maybe(30, &[json!("TCP"), json!("UDP")])}]});
    let containers = if native { json!([app]) } else { json!([app, proxy]) };
    let sidecars = if native { json!([proxy]) } else { Value::Null };
    let phase = dice.pick(&["Running", "Running", "Running", "Running", "Pending", "Succeeded", "Failed"]);
    let ended = dice.maybe(8, &[json!("2026-02-01T00:00:00Z")]);
    let owners = owner(dice);
    object(
        "v1",
        "Pod",
        (namespace, &format!("p{number}")),
        json!({
        "metadata": {"labels": labels, "annotations": annotations, "deletionTimestamp": ended, "ownerReferences": owners},
        "spec": {"serviceAccountName": dice.maybe(80, &[json!("web"), json!("api"), json!("")]),
            "hostNetwork": dice.maybe(6, &[json!(true)]), "initContainers": sidecars, "containers": containers},
        "status": {"phase": phase, "podIP": v4, "hostIP": dice.maybe(60, &[json!("192.168.0.1")]),
            "podIPs": if dice.chance(50) { json!([{"ip": v4}, {"ip": v6}]) } else { json!([{"ip": v4}]) }}}),
    )
}

fn replica_set(dice: &mut Dice) -> Value {
    let owner = |kind: &str, name: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u"}]);
    if dice.chance(40) {
        let owners = dice.maybe(70, &[owner("CronJob", "nightly")]);
        let rest = json!({"metadata": {"ownerReferences": owners}, "spec": {"template": {}}});
        return object("batch/v1", "Job", ("shop", "nightly-1"), rest);
    }
    let owners = dice.maybe(80, &[owner("Deployment", "web"), owner("Rollout", "web")]);
    let rest = json!({"metadata": {"ownerReferences": owners}, "spec": {"selector": {}, "template": {}}});
    object("apps/v1", "ReplicaSet", ("shop", "web-abc"), rest)
}

fn external(dice: &mut Dice) -> Value {
    let name = dice.pick(&["vm", "vm", "vm", "other-vm"]);
    let labels =
        json!({"app": dice.pick(&["web", "vm"]), "topology.kubernetes.io/zone": dice.maybe(40, &[json!("a")])});
    let annotations = json!({"config.linkerd.io/opaque-ports": dice.maybe(25, &[json!("http"), json!("80")]),
        "config.linkerd.io/default-inbound-policy": dice.maybe(30, &[json!("deny"), json!("cluster-authenticated")])});
    let ports = [("http", 8080), ("more", 80), ("linkerd-proxy", 4999)];
    let ports: Vec<_> =
        dice.some(60, &ports).into_iter().map(|(name, port)| json!({"name": name, "port": port})).collect();
    let owners = owner(dice);
    object(
        "workload.linkerd.io/v1beta1",
        "ExternalWorkload",
        ("shop", name),
        json!({
        "metadata": {"labels": labels, "annotations": annotations, "ownerReferences": owners},
        "spec": {"meshTLS": {"identity": format!("spiffe://root.linkerd.cluster.local/{name}"), "serverName": format!("{name}.local")},
            "ports": ports, "workloadIPs": [{"ip": "192.168.0.1"}]}}),
    )
}

fn selector(dice: &mut Dice) -> Value {
    let rule = |key: &str, operator: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    dice.pick(&[
        json!({}),
        json!({"matchLabels": {"app": "web"}}),
        json!({"matchLabels": {"app": "web"}}),
        json!({"matchLabels": {"app": "api", "tier": "back"}}),
        rule("app", "In", json!(["web"])),
        rule("app", "In", json!(["web", "vm"])),
        rule("app", "NotIn", json!(["web"])),
        rule("tier", "NotIn", json!(["front"])),
        rule("tier", "Exists", Value::Null),
        rule("tier", "DoesNotExist", Value::Null),
    ])
}

fn policy_object(dice: &mut Dice, kind: &str, version: &str, name: &str, rest: Value) -> Value {
    let namespace = dice.namespace();
    object(&format!("policy.linkerd.io/{version}"), kind, (namespace, name), rest)
}

fn server(dice: &mut Dice) -> Value {
    let name = dice.pick(&SERVERS);
    let kind = if dice.chance(80) { "podSelector" } else { "externalWorkloadSelector" };
    let protocols = ["unknown", "HTTP/1", "HTTP/1", "HTTP/2", "gRPC", "opaque", "TLS"].map(|one| json!(one));
    let policies = DefaultPolicy::ALL.map(|policy| json!(policy.label()));
    let spec = json!({kind: selector(dice), "proxyProtocol": dice.maybe(70, &protocols), "accessPolicy": dice.maybe(40, &policies),
        "port": dice.pick(&[json!(8080), json!(8080), json!("http"), json!("more"), json!(80)])});
    let labels = json!({"team": dice.maybe(70, &[json!("a"), json!("b")])});
    policy_object(dice, "Server", "v1beta3", name, json!({"metadata": {"labels": labels}, "spec": spec}))
}

fn networks(dice: &mut Dice) -> Value {
    dice.pick(&[
        json!([{"cidr": "10.0.0.0/8"}]),
        json!([{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}, {"cidr": "fd00::/8"}]),
        json!([{"cidr": "192.168.1.1/32"}]),
    ])
}

fn server_authorization(dice: &mut Dice) -> Value {
    let name = dice.pick(&["z1", "z2", "z3"]);
    let server = if dice.chance(50) {
        json!({"name": dice.pick(&SERVERS)})
    } else {
        let team = |team: &str| json!({"selector": {"matchLabels": {"team": team}}});
        let other = json!({"selector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}});
        dice.pick(&[team("a"), team("b"), other, json!({"selector": {}})])
    };
    let mut client = dice.pick(&[
        json!({"unauthenticated": true}),
        json!({"unauthenticated": false}),
        json!({"meshTLS": {"unauthenticatedTLS": true}}),
        json!({"meshTLS": {"identities": ["*"]}}),
        json!({"meshTLS": {"identities": ["*.ops.serviceaccount.identity.linkerd.cluster.local"],
            "serviceAccounts": [{"name": "web"}, {"name": "web", "namespace": "ops"}]}}),
    ]);
    if dice.chance(40) {
        client["networks"] = networks(dice);
    }
    policy_object(dice, "ServerAuthorization", "v1beta1", name, json!({"spec": {"server": server, "client": client}}))
}

fn reference(group: &str, kind: &str, name: &str) -> Value {
    json!({"group": group, "kind": kind, "name": name})
}

fn authorization_policy(dice: &mut Dice) -> Value {
    let name = dice.pick(&["a1", "a2", "a3"]);
    let (linkerd, gateway) = ("policy.linkerd.io", "gateway.networking.k8s.io");
    let server = dice.pick(&SERVERS);
    let route = dice.pick(&["r1", "r2"]);
    let target = dice.pick(&[
        reference(linkerd, "Server", server),
        reference(linkerd, "Server", server),
        reference("", "Namespace", "shop"),
        reference(linkerd, "HTTPRoute", route),
        reference(gateway, "HTTPRoute", route),
        reference(gateway, "GRPCRoute", route),
    ]);
    let mesh = reference(linkerd, "MeshTLSAuthentication", dice.pick(&["m1", "m2"]));
    let mut mesh_there = mesh.clone();
    mesh_there["namespace"] = json!("ops");
    let network = reference(linkerd, "NetworkAuthentication", dice.pick(&["n1", "n2"]));
    let account = reference("", "ServiceAccount", "web");
    let refs = dice.pick(&[
        json!([]),
        json!([mesh]),
        json!([mesh]),
        json!([mesh_there]),
        json!([network]),
        json!([mesh, network]),
        json!([account]),
        json!([account, network]),
        json!([mesh, account]),
    ]);
    let spec = json!({"targetRef": target, "requiredAuthenticationRefs": refs});
    policy_object(dice, "AuthorizationPolicy", "v1alpha1", name, json!({"spec": spec}))
}

fn mesh_tls(dice: &mut Dice) -> Value {
    let name = dice.pick(&["m1", "m2"]);
    let spec = dice.pick(&[
        json!({"identities": ["*"]}),
        json!({"identities": ["*.ops.serviceaccount.identity.linkerd.cluster.local", "spiffe://root.linkerd.cluster.local/vm"]}),
        json!({"identityRefs": [{"kind": "ServiceAccount", "name": "web"}, {"kind": "ServiceAccount", "name": "web", "namespace": "ops"}]}),
        json!({"identityRefs": [{"kind": "Namespace", "name": "ops"}]}),
    ]);
    policy_object(dice, "MeshTLSAuthentication", "v1alpha1", name, json!({"spec": spec}))
}

fn network_authentication(dice: &mut Dice) -> Value {
    let name = dice.pick(&["n1", "n2"]);
    let spec = json!({"networks": networks(dice)});
    policy_object(dice, "NetworkAuthentication", "v1alpha1", name, json!({"spec": spec}))
}

fn rate_limit(dice: &mut Dice) -> Value {
    let (name, server) = (dice.pick(&["l1", "l2"]), dice.pick(&SERVERS));
    let total = json!({"requestsPerSecond": dice.pick(&[1, 10, 100])});
    let spec = json!({"targetRef": reference("policy.linkerd.io", "Server", server), "total": total});
    policy_object(dice, "HTTPLocalRateLimitPolicy", "v1alpha1", name, json!({"spec": spec}))
}

fn profile(dice: &mut Dice) -> Value {
    let name = dice.pick(&["web.shop.svc.cluster.local", "api.shop.svc.cluster.local", "web.ops.svc.cluster.local"]);
    let namespace = dice.namespace();
    let route = |name: &str| json!({"name": name, "condition": {"method": "GET", "pathRegex": "/"}});
    let tuned = json!({"name": "three", "condition": {"method": "GET"}, "isRetryable": true, "timeout": "300ms"});
    let routes = dice.some(50, &[route("one"), route("two"), tuned]);
    let budget = |ratio: f32, ttl: &str| json!({"retryRatio": ratio, "minRetriesPerSecond": 5, "ttl": ttl});
    let budget = dice.maybe(50, &[budget(0.5, "10s"), budget(0.25, "1m30s")]);
    let instead = |authority: &str, weight: Value| json!({"authority": authority, "weight": weight});
    let instead = dice.some(
        30,
        &[instead("api.shop.svc.cluster.local:80", json!("500m")), instead("web.ops.svc.cluster.local", json!(2))],
    );
    let spec = json!({"routes": routes, "retryBudget": budget, "dstOverrides": instead});
    object("linkerd.io/v1alpha2", "ServiceProfile", (namespace, name), json!({"spec": spec}))
}

fn egress_network(dice: &mut Dice) -> Value {
    let (namespace, name) =
        (dice.pick(&["ops", "ops", "linkerd-egress", "linkerd-egress", "shop"]), dice.pick(&["e1", "e2"]));
    let networks = dice.maybe(
        80,
        &[
            json!([{"cidr": "8.8.0.0/16", "except": ["8.8.8.0/24"]}]),
            json!([{"cidr": "8.8.8.0/24"}, {"cidr": "93.0.0.0/8"}]),
            json!([{"cidr": "8.0.0.0/8"}]),
            json!([{"cidr": "10.0.0.0/8"}]),
        ],
    );
    let mut annotations = json!({"config.linkerd.io/opaque-ports": dice.maybe(20, &[json!("80")])});
    merge(&mut annotations, if dice.chance(60) { traffic::annotations(dice) } else { json!({}) });
    merge(&mut annotations, if dice.chance(30) { traffic::balancing(dice) } else { json!({}) });
    object(
        "policy.linkerd.io/v1alpha1",
        "EgressNetwork",
        (namespace, name),
        json!({
        "metadata": {"annotations": annotations},
        "spec": {"trafficPolicy": dice.pick(&["Allow", "Deny"]), "networks": networks}}),
    )
}

/// What a route is attached to.
fn parent(dice: &mut Dice) -> Value {
    let (namespace, service) = dice.pick(&[("shop", "web"), ("shop", "web"), ("shop", "api"), ("ops", "web")]);
    let mut parent = match dice.next() % 10 {
        0..4 => {
            let port = dice.maybe(8, &[json!(8080)]);
            let namespace = dice.maybe(10, &[json!("ops"), json!("shop")]);
            json!({"group": "policy.linkerd.io", "kind": "Server", "name": dice.pick(&SERVERS), "port": port,
                "namespace": namespace})
        }
        4..9 => json!({"group": dice.pick(&["", "core"]), "kind": "Service", "name": service, "namespace": namespace,
            "port": dice.maybe(60, &[json!(80), json!(8080)])}),
        _ => json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": dice.pick(&["e1", "e2"]),
            "namespace": dice.pick(&["ops", "linkerd-egress"]), "port": dice.maybe(80, &[json!(80), json!(8080)])}),
    };
    prune(&mut parent);
    parent
}

fn route(dice: &mut Dice) -> Value {
    let (version, kind) = dice.pick(&[
        ("policy.linkerd.io/v1beta3", "HTTPRoute"),
        ("policy.linkerd.io/v1beta3", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "GRPCRoute"),
        ("gateway.networking.k8s.io/v1", "GRPCRoute"),
        ("gateway.networking.k8s.io/v1", "TLSRoute"),
        ("gateway.networking.k8s.io/v1alpha2", "TCPRoute"),
    ]);
    let (namespace, name) = (dice.namespace(), dice.pick(&["r1", "r2"]));
    let of_requests = matches!(kind, "HTTPRoute" | "GRPCRoute");
    let mut parents = vec![parent(dice)];
    if dice.chance(30) {
        parents.push(parent(dice));
    }
    let rule = |dice: &mut Dice| {
        let (of, to) = dice.pick(&[("shop", "web"), ("shop", "api"), ("ops", "web")]);
        let some_filters = |dice: &mut Dice, percent| {
            let of_requests = of_requests && dice.chance(percent);
            if of_requests { json!([traffic::filter(dice, kind)]) } else { Value::Null }
        };
        let service = json!({"name": to, "namespace": of, "port": 80, "weight": dice.maybe(50, &[json!(3)]),
            "filters": some_filters(dice, 25)});
        let mut backends = dice.some(60, &[service]);
        if dice.chance(8) {
            let namespace = dice.pick(&["ops", "linkerd-egress"]);
            backends
                .push(json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": dice.pick(&["e1", "e2"]),
                "namespace": namespace, "port": 80}));
        }
        let timeouts = ["500ms", "2s", "0s"].map(|request| json!({"request": request}));
        let timeouts = if kind == "HTTPRoute" { dice.maybe(30, &timeouts) } else { Value::Null };
        let mut filters = some_filters(dice, 35);
        if let (Some(filters), true) = (filters.as_array_mut(), dice.chance(30)) {
            filters.push(traffic::filter(dice, kind));
        }
        json!({"backendRefs": backends, "filters": filters, "timeouts": timeouts})
    };
    let rules = if of_requests {
        match dice.next() % 5 {
            0 => Value::Null,
            1 => json!([rule(dice), rule(dice)]),
            _ => json!([rule(dice)]),
        }
    } else {
        json!([rule(dice)])
    };
    let hosts = if of_requests { dice.maybe(25, &[json!(["web.example.org", "*.example.com"])]) } else { Value::Null };
    let annotations = if dice.chance(40) { traffic::annotations(dice) } else { Value::Null };
    object(
        version,
        kind,
        (namespace, name),
        json!({
        "metadata": {"annotations": annotations}, "spec": {"parentRefs": parents, "rules": rules, "hostnames": hosts}}),
    )
}

fn reference_grant(dice: &mut Dice) -> Value {
    let from = |dice: &mut Dice| {
        json!({"group": dice.pick(&["gateway.networking.k8s.io", "gateway.networking.k8s.io", "policy.linkerd.io"]),
            "kind": dice.pick(&["HTTPRoute", "HTTPRoute", "GRPCRoute", "TCPRoute"]), "namespace": dice.pick(&["shop", "ops"])})
    };
    let to = json!({"group": "", "kind": dice.pick(&["Service", "Service", "Service", "Secret"]),
        "name": dice.maybe(40, &[json!("web"), json!("api")])});
    let spec = json!({"from": [from(dice), from(dice)], "to": [to]});
    let name = (dice.namespace(), dice.pick(&["g1", "g2"]));
    object("gateway.networking.k8s.io/v1beta1", "ReferenceGrant", name, json!({"spec": spec}))
}
