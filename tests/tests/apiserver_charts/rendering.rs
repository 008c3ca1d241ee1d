//! The objects that the charts render: what is in them, and that the control plane's own proxy equals the one that the
//! injector adds to other pods.

use super::*;

#[test]
fn monitoring_objects_select_every_metrics_port_and_alerts_fire() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    // kubectl does not know these kinds here, and need not.
    let names = |setting: &str| -> Vec<String> {
        let rendered = render(&[certificates.all(), strings(&["--set", setting])].concat());
        let monitoring = rendered.split("---\n").filter(|text| text.contains("apiVersion: monitoring.coreos.com/v1\n"));
        let name = |text: &str| text.lines().find_map(|line| line.strip_prefix("  name: ")).unwrap().to_owned();
        monitoring.map(name).collect()
    };
    assert_eq!(names("podMonitor.labels.a=b"), Vec::<String>::new());
    let monitors = ["linkerd-controller", "linkerd-multicluster-controller", "linkerd-proxy"];
    assert_eq!(names("podMonitor.enabled=true"), monitors);
    assert_eq!(names("podMonitor.enabled=true,podMonitor.serviceMirror.enabled=false"), [monitors[0], monitors[2]]);
    assert_eq!(names("prometheusRule.enabled=true"), ["weft"]);

    // The ports by whose names the control plane's PodMonitor selects them.
    let rendered = cluster.objects(&render(&certificates.all())).unwrap();
    let runs = |object: &&Value| ["Deployment", "DaemonSet"].contains(&object["kind"].as_str().unwrap());
    for workload in rendered.iter().filter(runs) {
        for container in workload["spec"]["template"]["spec"]["containers"].as_array().unwrap() {
            let ports = container["ports"].as_array().unwrap().iter().map(|port| port["name"].as_str().unwrap());
            assert_eq!(ports.filter(|name| name.ends_with("-admin")).count(), 1, "{container}");
        }
    }

    let promtool = |arguments: &[&str]| {
        let directory = Cluster::repository().join("tests/alerts");
        let output = cluster.command("promtool").args(arguments).current_dir(directory).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    };
    promtool(&["check", "rules", "../../charts/weft-control-plane/files/alerts.yaml"]);
    promtool(&["test", "rules", "alerts.yaml"]);
}

/// A port that is served and missing from the policies would be unreachable.
#[test]
fn network_policies_admit_the_ports_that_are_served() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let settings = "networkPolicy.enabled=true,proxy.ports.inbound=5143,proxy.ports.control=5190,\
                    networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=ops";
    let rendered = cluster.objects(&render(&[certificates.all(), strings(&["--set", settings])].concat())).unwrap();
    for name in ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector"] {
        let template = &object(&rendered, "Deployment", name)["spec"]["template"];
        let policy = &object(&rendered, "NetworkPolicy", name)["spec"];
        for (label, value) in policy["podSelector"]["matchLabels"].as_object().unwrap() {
            assert_eq!(&template["metadata"]["labels"][label], value, "{name}");
        }
        let containers = ["containers", "initContainers"].map(|list| template["spec"][list].as_array());
        let ports = containers.into_iter().flatten().flatten().filter_map(|container| container["ports"].as_array());
        let (metrics, mut served): (Vec<_>, Vec<_>) =
            ports.flatten().partition(|port| port["name"].as_str().unwrap().ends_with("-admin"));
        // The proxy's tap server has no container port.
        let tap = json!({"containerPort": 5190});
        served.push(&tap);
        let rules = policy["ingress"].as_array().unwrap();
        let from = json!([{"namespaceSelector": {"matchLabels": {"team": "ops"}}}]);
        for (rule, expected, clients) in [(&rules[0], served, &Value::Null), (&rules[1], metrics, &from)] {
            let numbers = |ports: Vec<&Value>, field: &str| -> BTreeSet<_> {
                ports.into_iter().map(|port| port[field].as_i64().unwrap()).collect()
            };
            let admitted = rule["ports"].as_array().unwrap().iter().collect();
            assert_eq!(numbers(admitted, "port"), numbers(expected, "containerPort"), "{name}");
            assert_eq!(&rule["from"], clients, "{name}");
        }
        assert_eq!(rules.len(), 2, "{name}");
    }
}

#[test]
fn rendering_twice_is_rendering_once() {
    let certificates = generate_certificates();
    let values = certificates.all();
    // Generated certificates would differ each time, so every upgrade would restart everything.
    assert_eq!(render(&values), render(&values));
}

#[test]
fn what_discovery_may_read_depends_on_what_it_is_to_do() {
    let certificates = generate_certificates();
    let with = |setting: &str| render(&[certificates.all(), strings(&["--set", setting])].concat());
    let (linked, plain) = (with("enableRemoteDiscovery=true"), render(&certificates.all()));
    for part in ["name: remote-discovery", "--enable-remote-discovery=true"] {
        assert!(linked.contains(part) && !plain.contains(part), "{part}");
    }
    let by_endpoints = with("enableEndpointSlices=false");
    for part in ["resources: [endpoints]", "--enable-endpoint-slices=false"] {
        assert!(by_endpoints.contains(part) && !plain.contains(part), "{part}");
    }
}

/// A kubelet of IPv6 alone probes nothing else.
#[test]
fn every_component_listens_on_the_families_that_proxies_have() {
    let certificates = generate_certificates();
    for (setting, any) in [("disableIPv6=true", "0.0.0.0"), ("disableIPv6=false", "[::]")] {
        let rendered = render(&[certificates.all(), strings(&["--set", setting])].concat());
        let listening: Vec<_> = rendered
            .lines()
            .filter(|line| !line.contains("metrics-addr="))
            .filter_map(|line| line.split_once("-addr=")?.1.rsplit_once(':'))
            .map(|(address, _)| address)
            .collect();
        assert_eq!(listening.len(), 11, "{setting}: {listening:?}");
        assert!(listening.iter().all(|address| *address == any), "{setting}: {listening:?}");
    }
}

#[test]
fn the_issuers_key_is_in_its_secret_only() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let key = fs::read_to_string(certificates.path("issuer.key")).unwrap();
    let line = key.lines().nth(1).unwrap();
    let rendered = cluster.objects(&render(&certificates.all())).unwrap();
    let holders: Vec<_> = rendered.iter().filter(|object| object.to_string().contains(line)).collect();
    assert!(holders.is_empty(), "{holders:?}");
    let secret = object(&rendered, "Secret", "linkerd-identity-issuer");
    assert!(secret["data"]["key.pem"].is_string());
    // An upgrade must not empty what the control plane fills.
    for name in ["linkerd-proxy-injector-k8s-tls", "linkerd-sp-validator-k8s-tls", "linkerd-policy-validator-k8s-tls"] {
        assert!(object(&rendered, "Secret", name)["data"].is_null(), "{name}");
    }
}

#[test]
fn a_client_authority_reaches_every_webhook() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let set = strings(&["--set-file", &format!("webhookClientCA={}", certificates.path("ca.crt").display())]);
    for (more, expected) in [(&set[..], 3), (&[], 0)] {
        let rendered = cluster.objects(&render(&[certificates.all(), more.to_vec()].concat())).unwrap();
        let deployments = rendered.iter().filter(|object| object["kind"] == "Deployment");
        let told = deployments.flat_map(|object| {
            let pod = &object["spec"]["template"]["spec"];
            let volumes = pod["volumes"].to_string();
            let containers = pod["containers"].as_array().unwrap().clone();
            containers.into_iter().filter(move |container| {
                let told = container["args"].to_string().contains("--webhook-client-ca=");
                let mounted = container["volumeMounts"].to_string().contains("/var/run/linkerd/webhook");
                assert!(told == mounted && (!told || volumes.contains("linkerd-webhook-client-ca")), "{container}");
                told
            })
        });
        assert_eq!(told.count(), expected);
    }
    // Webhooks read it once, so another one must restart them.
    let pods = |file: &str| {
        let authority = certificates.set("webhookClientCA", file).to_vec();
        let rendered = cluster.objects(&render(&[certificates.all(), authority].concat())).unwrap();
        ["linkerd-destination", "linkerd-proxy-injector"]
            .map(|name| object(&rendered, "Deployment", name)["spec"]["template"].clone())
    };
    let (before, after) = (pods("ca.crt"), pods("issuer.crt"));
    assert!(before[0] != after[0] && before[1] != after[1], "{before:?}");
}

#[test]
fn the_control_planes_own_proxy_is_the_injectors() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let tuning = "proxy.resources.cpu.request=100m,proxy.ports.admin=4999,proxy.cores=2,proxy.runtime.workers.maximum=3,\
                  proxy.runtime.workers.maximumCPURatio=0.5,proxy.requireTLSOnInboundPorts=1,\
                  proxy.enableShutdownEndpoint=true,proxy.shutdownGracePeriod=30s,proxy.waitBeforeExitSeconds=5,\
                  proxy.control.streams.lifetime=2h,proxy.inboundConnectTimeout=1s,\
                  proxy.disableOutboundProtocolDetectTimeout=true,proxy.inbound.server.http2.maxConcurrentStreams=9,\
                  proxy.livenessProbe.timeoutSeconds=4,\
                  proxy.startupProbe.failureThreshold=9,proxy.readinessProbe.initialDelaySeconds=3,\
                  proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=otel.obs:4317,\
                  proxy.tracing.collector.meshIdentity.serviceAccountName=otel,\
                  proxy.tracing.collector.meshIdentity.namespace=obs,proxy.tracing.labels.zone=z,\
                  proxy.tracing.labels.none=,proxy.tracing.labels.k8s\\.pod\\.uid=,\
                  proxy.experimentalEnv[0].name=A,proxy.experimentalEnv[0].value=a";
    let settings = strings(&["--set", tuning]);
    let rendered = cluster.objects(&render(&[certificates.all(), settings].concat())).unwrap();
    let text = |object: &Value, key: &str| object["data"][key].as_str().unwrap().to_owned();
    let values = Values::parse(&text(object(&rendered, "ConfigMap", "linkerd-config"), "values")).unwrap();
    let anchors = text(object(&rendered, "ConfigMap", "linkerd-identity-trust-roots"), "ca-bundle.crt");
    let config = values.inject_config(MESH, &anchors).unwrap();

    let template = &object(&rendered, "Deployment", "linkerd-proxy-injector")["spec"]["template"];
    let bare = json!({
        "metadata": {
            "namespace": MESH,
            "annotations": {"linkerd.io/inject": "enabled", "config.linkerd.io/opaque-ports": "8443"}
        },
        "spec": {"containers": template["spec"]["containers"]}
    });
    let decision = inject(&serde_json::from_value(bare).unwrap(), None, &config).unwrap();
    let Decision::Injected(pod) = decision else { panic!("{decision:?}") };
    let injected = serde_json::to_value(&pod).unwrap();
    // The streams of all proxies end at the control plane's.
    let of_control_plane = [
        json!({"name": "LINKERD2_PROXY_INBOUND_MAX_IN_FLIGHT", "value": "1048576"}),
        json!({"name": "WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT", "value": "16384"}),
    ];
    for name in ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector"] {
        let spec = &object(&rendered, "Deployment", name)["spec"]["template"]["spec"];
        let mut containers =
            [&spec["initContainers"], &spec["containers"]].into_iter().filter_map(Value::as_array).flatten();
        let environment =
            containers.find(|container| container["name"] == "linkerd-proxy").unwrap()["env"].as_array().unwrap();
        assert!(of_control_plane.iter().all(|variable| environment.contains(variable)), "{name}: {environment:?}");
    }
    let comparable = |pod: &Value| {
        let mut proxy = pod["spec"]["initContainers"][0].clone();
        // From the ConfigMap there, inlined in the environment here.
        let environment = proxy["env"].as_array().unwrap().iter();
        let others = environment.filter(|variable| variable["name"] != "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS");
        proxy["env"] = others.filter(|variable| !of_control_plane.contains(variable)).cloned().collect();
        proxy
    };
    let (ours, theirs) = (comparable(template), comparable(&injected));
    for (name, value) in theirs.as_object().unwrap() {
        assert_eq!(&ours[name], value, "{name}");
    }
    assert_eq!(ours.as_object().unwrap().len(), theirs.as_object().unwrap().len());
    for volume in injected["spec"]["volumes"].as_array().unwrap() {
        let volumes = template["spec"]["volumes"].as_array().unwrap();
        assert!(volumes.contains(volume), "{volume} is not among {volumes:?}");
    }
}

/// Tokens arrive there.
/// Otherwise a control plane that starts as a whole would wait for its own policy controller.
#[test]
fn unanswered_ports_of_the_control_plane_are_not_denied() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let deny = strings(&["--set", "proxy.denyUnansweredPorts=true"]);
    let rendered = cluster.objects(&render(&[certificates.all(), deny].concat())).unwrap();
    let config = object(&rendered, "ConfigMap", "linkerd-config")["data"]["values"].as_str().unwrap();
    assert!(Values::parse(config).unwrap().inject_config(MESH, "anchors").unwrap().tuning.deny_unanswered_ports);
    let with_proxies: Vec<_> =
        rendered.iter().filter(|one| one["kind"] == "Deployment").map(Value::to_string).collect();
    assert_eq!(with_proxies.len(), 3);
    for deployment in with_proxies {
        assert!(deployment.contains("LINKERD2_PROXY_INBOUND_DEFAULT_POLICY"), "{deployment}");
        assert!(!deployment.contains("INBOUND_POLICY_UNANSWERED"), "{deployment}");
    }
}

#[test]
fn the_identity_service_refuses_plaintext() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = cluster.objects(&render(&generate_certificates().all())).unwrap();
    let tls_ports = |name: &str| {
        let spec = &object(&rendered, "Deployment", name)["spec"]["template"]["spec"];
        let containers =
            ["containers", "initContainers"].into_iter().filter_map(|list| spec[list].as_array()).flatten();
        let variables = containers.filter_map(|container| container["env"].as_array()).flatten();
        let mut found = variables.filter(|variable| variable["name"] == "LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS");
        found.next().map(|variable| variable["value"].clone())
    };
    assert_eq!(tls_ports("linkerd-identity"), Some(json!("8080")));
    assert_eq!(tls_ports("linkerd-destination"), None);
}

/// The names are those in its source (`linkerd2:pkg/healthcheck/healthcheck.go`); the program itself is not run.
#[test]
fn objects_have_the_names_that_linkerds_check_looks_for() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = cluster.objects(&render(&generate_certificates().all())).unwrap();
    for (kind, name) in [
        ("ClusterRole", "linkerd-linkerd-destination"),
        ("ClusterRole", "linkerd-linkerd-identity"),
        ("ClusterRole", "linkerd-linkerd-proxy-injector"),
        ("ClusterRole", "linkerd-policy"),
        ("ClusterRoleBinding", "linkerd-linkerd-destination"),
        ("ClusterRoleBinding", "linkerd-linkerd-identity"),
        ("ClusterRoleBinding", "linkerd-linkerd-proxy-injector"),
        ("ClusterRoleBinding", "linkerd-destination-policy"),
        ("ServiceAccount", "linkerd-destination"),
        ("ServiceAccount", "linkerd-identity"),
        ("ServiceAccount", "linkerd-proxy-injector"),
        ("ServiceAccount", "linkerd-heartbeat"),
        ("MutatingWebhookConfiguration", "linkerd-proxy-injector-webhook-config"),
        ("ValidatingWebhookConfiguration", "linkerd-sp-validator-webhook-config"),
        ("ValidatingWebhookConfiguration", "linkerd-policy-validator-webhook-config"),
    ] {
        let found = object(&rendered, kind, name);
        assert_eq!(found["metadata"]["labels"]["linkerd.io/control-plane-ns"], MESH, "{kind} {name}");
    }
    let config = &object(&rendered, "ConfigMap", "linkerd-config")["data"];
    assert!(config["linkerd-crds-chart-version"].as_str().unwrap().starts_with("weft-crds-"), "{config}");
    assert!(config["values"].as_str().unwrap().contains("\ndisableHeartBeat: true"), "{config}");
    assert!(rendered.iter().all(|object| object["kind"] != "CronJob"));
}

/// Its pod uses the node's network: any process of the node can reach its listeners.
#[test]
fn the_agents_api_is_on_no_network() {
    let cluster = Cluster::from_env().unwrap();
    let rendered = cluster.objects(&render(&generate_certificates().all())).unwrap();
    let container = &object(&rendered, "DaemonSet", "weft-agent")["spec"]["template"]["spec"]["containers"][0];
    let arguments = container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap());
    let listening: Vec<_> = arguments.filter(|argument| argument.contains("addr")).collect();
    assert_eq!(listening, ["--metrics-addr=$(HOST_IP):9650", "--metrics-addr=127.0.0.1:9650"]);
    let ports = container["ports"].as_array().unwrap();
    assert_eq!(ports.iter().map(|port| &port["name"]).collect::<Vec<_>>(), ["agent-admin"]);
}

/// As those of every pod: the injector rounds, too (`values_without_an_annotation_become_variables`).
#[test]
fn requests_and_limits_of_cpu_bound_the_workers_of_the_control_planes_own_proxies() {
    let certificates = generate_certificates();
    for (settings, least, most) in [
        ("proxy.cores=0", Some(1), None),
        ("proxy.resources.cpu.request=100m,proxy.resources.cpu.limit=1", Some(1), Some(1)),
        ("proxy.resources.cpu.request=2.5,proxy.resources.cpu.limit=4100m", Some(3), Some(5)),
        ("proxy.resources.cpu.request=3000m,proxy.cores=2", Some(3), None),
        ("proxy.resources.cpu.request=1,proxy.cores=2", Some(2), None),
        ("proxy.resources.cpu.limit=8,proxy.runtime.workers.maximum=4", Some(1), Some(4)),
        ("proxy.resources.cpu=null,proxy.runtime.workers.minimum=0", None, None),
    ] {
        let rendered = render(&[certificates.all(), strings(&["--set", settings])].concat());
        for (name, wanted) in [("MIN", least), ("MAX", most)] {
            let mut found =
                rendered.lines().skip_while(|line| !line.ends_with(&format!(" LINKERD2_PROXY_CORES_{name}")));
            let found = found.nth(1).map(|line| line.trim().to_owned());
            let wanted: Option<u32> = wanted;
            assert_eq!(found, wanted.map(|number| format!("value: \"{number}\"")), "CORES_{name} with {settings}");
        }
    }
}
