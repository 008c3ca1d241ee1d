//! Values: those that are refused, by name, and those of Linkerd's users.

use super::*;

#[test]
fn a_value_that_cannot_be_right_is_refused_by_name() {
    let certificates = generate_certificates();
    let (anchors, crt, key) = ("identityTrustAnchorsPEM", "identity.issuer.tls.crtPEM", "identity.issuer.tls.keyPEM");
    let without = |value: &str| -> Vec<String> {
        let pairs = certificates.all().chunks(2).map(<[_]>::to_vec).collect::<Vec<_>>();
        pairs.into_iter().filter(|pair| !pair[1].starts_with(value)).flatten().collect()
    };
    let with = |value: &str, setting: &[String]| [without(value), setting.to_vec()].concat();
    let set = |setting: &str| [certificates.all(), strings(&["--set", setting])].concat();
    for (row, arguments, words) in [
        ("no trust anchor", without(anchors), &[anchors, "--set-file"][..]),
        ("no issuer", without(crt), &[crt, "--set-file"]),
        ("no issuer's key", without(key), &[key, "--set-file"]),
        (
            "a path instead of a file",
            with(anchors, &strings(&["--set", "identityTrustAnchorsPEM=ca.crt"])),
            &[anchors, "--set-file"],
        ),
        ("a key as trust anchor", with(anchors, &certificates.set(anchors, "issuer.key")), &[anchors, "private key"]),
        ("a key as issuer", with(crt, &certificates.set(crt, "issuer.key")), &[crt, "not a PEM certificate"]),
        ("a certificate as key", with(key, &certificates.set(key, "issuer.crt")), &[key, "not a PEM private key"]),
        ("misspelt", set("controllerReplica=3"), &["controllerReplica"]),
        ("no level", set("controllerLogLevel=loud"), &["controllerLogLevel", "loud"]),
        ("no policy", set("proxy.defaultInboundPolicy=open"), &["/proxy/defaultInboundPolicy", "all-unauthenticated"]),
        ("no network", set("clusterNetworks=everything"), &["clusterNetworks", "everything"]),
        ("no port", set("proxyInit.ignoreInboundPorts=http"), &["ignoreInboundPorts"]),
        (
            "Linkerd's, and not supported",
            set("controller.tracing.enabled=true"),
            &["controller.tracing", "not supported yet"],
        ),
        ("Linkerd's, of an older chart", set("controlPlaneTracing=true"), &["controlPlaneTracing: not supported yet"]),
        ("no collector", set("proxy.tracing.enabled=true"), &["proxy.tracing.collector.endpoint"]),
        (
            "a collector outside the mesh",
            set("proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=otel.obs:4317"),
            &["proxy.tracing.collector.meshIdentity", "otel.obs:4317"],
        ),
        ("a URL", set("proxy.tracing.collector.endpoint=http://otel.obs:4317"), &["/proxy/tracing/collector/endpoint"]),
        ("no duration", set("proxy.inboundConnectTimeout=1m30s"), &["inboundConnectTimeout", "1m30s"]),
        ("no probe", set("proxy.livenessProbe.successThreshold=2"), &["/proxy/livenessProbe/successThreshold"]),
        ("no fraction", set("proxy.runtime.workers.maximumCPURatio=2"), &["maximumCPURatio"]),
        ("Linkerd's, switched off", set("identity.serviceAccountTokenProjection=false"), &["not supported yet"]),
        ("IPv6 without slices", set("enableEndpointSlices=false,disableIPv6=false"), &["enableEndpointSlices", "IPv6"]),
        ("no transport mode", set("proxy.outboundTransportMode=tunnel"), &["/proxy/outboundTransportMode"]),
        ("nobody signed it", set("proxyInjector.externalSecret=true"), &["proxyInjector.externalSecret", "caBundle"]),
    ] {
        let output = helm(&["template", "weft", CONTROL_PLANE, "--namespace", MESH], &arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{row}: it was taken");
        assert!(words.iter().all(|word| said.contains(word)), "{row}: {said}");
    }
}

/// Every value of Linkerd's own files, by the transcriptions in k8s-api/linkerd.
#[test]
fn linkerds_own_values_are_understood() {
    let certificates = generate_certificates();
    let with = |file: &str, more: &[&str]| {
        let arguments = [strings(&["-f", file]), certificates.all(), strings(more)].concat();
        render(&arguments)
    };
    assert!(with("k8s-api/linkerd/values.yaml", &[]).contains("--identity-issuance-lifetime=24h0m0s"));
    let available = with("k8s-api/linkerd/values-ha.yaml", &[]);
    for expected in ["maxUnavailable: 1\n", "matchLabelKeys: [pod-template-hash]", "memory: 250Mi\n", "cpu: 100m\n"] {
        assert!(available.contains(expected), "{expected}");
    }
    let meaningless = with("k8s-api/linkerd/values.yaml", &["--set", "cniEnabled=true,proxyInit.runAsRoot=true"]);
    assert!(!meaningless.contains("linkerd-init"));
    let digest = format!("sha256:{}", "0".repeat(64));
    let pinned =
        format!("controllerImageVersion={digest},proxy.image.name=weft/proxy@{digest},agent.image.version={digest}");
    let pinned = format!("controllerImage=weft/control-plane,{pinned}");
    let pinned = with("k8s-api/linkerd/values.yaml", &["--set", &pinned, "--set", "controllerLogLevel=fatal"]);
    for expected in ["weft/control-plane@sha256:", "weft/proxy@sha256:", "weft-agent@sha256:", "--log-level=error"] {
        assert!(pinned.contains(expected), "{expected}");
    }
}

/// Copies of Linkerd's values.yaml name its images.
#[test]
fn images_that_are_copied_from_linkerds_values_become_ours() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    for (row, settings, controller, proxy, notes) in [
        ("a copy", "", "localhost/weft-control-plane:0.1.0", "localhost/weft-proxy:0.1.0", true),
        (
            "a copy with a release",
            "controllerImageVersion=edge-26.8.3,linkerdVersion=edge-26.8.3",
            "localhost/weft-control-plane:0.1.0",
            "localhost/weft-proxy:0.1.0",
            true,
        ),
        (
            "a registry of one's own",
            "agent.image.name=registry.example:5000/mesh/weft-agent",
            "registry.example:5000/mesh/weft-control-plane:0.1.0",
            "registry.example:5000/mesh/weft-proxy:0.1.0",
            true,
        ),
        (
            "Linkerd's proxy, wanted",
            "controllerImage=weft/control-plane,proxy.image.version=edge-26.8.3",
            "weft/control-plane:0.1.0",
            "cr.l5d.io/linkerd/proxy:edge-26.8.3",
            false,
        ),
    ] {
        let settings = strings(&["-f", "k8s-api/linkerd/values.yaml", "--set", settings]);
        let arguments = [certificates.all(), settings].concat();
        let rendered = cluster.objects(&render(&arguments)).unwrap();
        let spec = &object(&rendered, "Deployment", "linkerd-destination")["spec"]["template"]["spec"];
        assert_eq!(spec["containers"][0]["image"], controller, "{row}");
        assert_eq!(spec["initContainers"][0]["image"], proxy, "{row}");
        let config = &object(&rendered, "ConfigMap", "linkerd-config")["data"]["values"];
        let injected = Values::parse(config.as_str().unwrap()).unwrap().inject_config(MESH, "anchors").unwrap();
        assert_eq!(injected.proxy_image, proxy, "{row}");
        // Another test may have installed the chart: helm then refuses even a dry run that does not take its objects.
        let dry = ["install", "weft", CONTROL_PLANE, "--namespace", MESH, "--dry-run=client", "--take-ownership"];
        let said = succeeded(&helm(&dry, &arguments));
        assert_eq!(said.contains("is Linkerd's"), notes, "{row}: {said}");
    }
}

/// An administrator empties them so that nothing bypasses the proxy, or that no port is opaque by default.
#[test]
fn emptied_lists_of_ports_reach_every_part() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let emptied = ["ignoreInboundPorts", "ignoreOutboundPorts", "kubeAPIServerPorts"];
    let emptied = emptied.map(|name| format!("proxyInit.{name}=")).join(",");
    let emptied = strings(&["--set", &emptied, "--set", "proxy.opaquePorts="]);
    let rendered = render(&[certificates.all(), emptied].concat());
    let lists: Vec<_> = rendered.lines().filter_map(|line| line.split_once("--default-opaque-ports=")).collect();
    assert!(!lists.is_empty() && lists.iter().all(|(_, list)| list.trim_matches('"').is_empty()), "{lists:?}");
    let rendered = cluster.objects(&rendered).unwrap();
    let config = &object(&rendered, "ConfigMap", "linkerd-config")["data"]["values"];
    let config = Values::parse(config.as_str().unwrap()).unwrap().inject_config(MESH, "anchors").unwrap();
    let skips = [config.skips.inbound, config.skips.outbound, config.skips.api_server_ports];
    assert!(skips.iter().all(PortSet::is_empty) && config.default_opaque_ports.is_empty(), "{skips:?}");
}

/// Each of Linkerd's values for one component reaches that one, and no other.
#[test]
fn a_components_own_values_are_its_own() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let probes = |component: &str| {
        format!("{component}.livenessProbe.timeoutSeconds=7,{component}.readinessProbe.periodSeconds=9")
    };
    for (component, deployment, container, annotations, proxy) in [
        ("identity", "identity", "identity", "identity", "identityProxyResources"),
        ("destinationController", "destination", "destination", "destinationController", "destinationProxyResources"),
        ("policyController", "destination", "policy", "destinationController", "destinationProxyResources"),
        ("spValidator", "destination", "sp-validator", "destinationController", "destinationProxyResources"),
        ("proxyInjector", "proxy-injector", "proxy-injector", "proxyInjector", "proxyInjectorProxyResources"),
    ] {
        let team = "podAnnotations.example\\.org/team";
        let probes = probes(component);
        let settings = format!(
            "{probes},{annotations}.{team}=mesh,{team}=all,{annotations}.podAnnotations.note=,podAnnotations.note=all,\
             {proxy}.memory.limit=77Mi"
        );
        let rendered =
            cluster.objects(&render(&[certificates.all(), strings(&["--set", &settings])].concat())).unwrap();
        for other in ["destination", "identity", "proxy-injector"] {
            let template = &object(&rendered, "Deployment", &format!("linkerd-{other}"))["spec"]["template"];
            let own = other == deployment;
            let team = &template["metadata"]["annotations"]["example.org/team"];
            assert_eq!(team, if own { "mesh" } else { "all" }, "{component}: pods of {other}");
            // An annotation without a text is one, too.
            let note = &template["metadata"]["annotations"]["note"];
            assert_eq!(note, if own { "" } else { "all" }, "{component}: pods of {other}");
            let lists = [&template["spec"]["containers"], &template["spec"]["initContainers"]];
            for found in lists.into_iter().filter_map(Value::as_array).flatten() {
                let (name, probe) = (found["name"].as_str().unwrap(), &found["livenessProbe"]["timeoutSeconds"]);
                assert_eq!(*probe == json!(7), own && name == container, "{component}: {other}/{name}");
                let late = found["readinessProbe"]["periodSeconds"] == json!(9);
                assert_eq!(late, own && name == container, "{component}: {other}/{name}");
                let limit = &found["resources"]["limits"]["memory"];
                assert_eq!(*limit == json!("77Mi"), own && name == "linkerd-proxy", "{component}: {other}/{name}");
            }
        }
    }
}

/// `helm upgrade --reuse-values` keeps the values of the installed chart, without those that are new in this one.
#[test]
fn values_of_an_older_chart_are_enough() {
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let new = [
        "agent.updateStrategy",
        "destinationController.additionalArgs",
        "destinationController.livenessProbe",
        "destinationController.podAnnotations",
        "destinationProxyResources",
        "enableRemoteDiscovery",
        "identity.acceptAnyTokenAudience",
        "networkPolicy",
        "podMonitor",
        "policyController.additionalArgs",
        "policyController.readinessProbe",
        "policyController.requireReferenceGrants",
        "prometheusRule",
        "proxy.denyUnansweredPorts",
        "proxy.livenessProbe",
        "proxy.readinessProbe",
        "proxy.requireIdentityOnInboundPorts",
        "proxy.startupProbe",
        "spValidator",
    ];
    let absent = new.map(|name| format!("{name}=null")).join(",");
    let rendered = render(&[certificates.all(), strings(&["--set", &absent])].concat());
    // What a template prints of a value that it does not find.
    assert!(!rendered.contains("%!") && !rendered.contains("<nil>"), "{rendered}");
    let rendered = cluster.objects(&rendered).unwrap();
    let template = &object(&rendered, "Deployment", "linkerd-destination")["spec"]["template"]["spec"];
    let startup = &template["initContainers"][0]["startupProbe"];
    assert_eq!((&startup["periodSeconds"], &startup["failureThreshold"]), (&json!(1), &json!(120)));
    let config = &object(&rendered, "ConfigMap", "linkerd-config")["data"]["values"];
    Values::parse(config.as_str().unwrap()).unwrap().inject_config(MESH, "anchors").unwrap();
}
