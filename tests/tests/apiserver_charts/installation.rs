//! Installations: whether the API server accepts the objects, what the accounts may do, and what is left afterwards.

use super::*;

/// One installation, because its objects are cluster-wide.
#[test]
fn an_installation_has_what_it_needs_and_leaves_nothing() {
    let _installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::from_env().unwrap();
    let certificates = generate_certificates();
    let manifest = |chart: &[&str], more: &[String]| succeeded(&helm(&[&["template", "weft"], chart].concat(), more));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rendered.yaml");
    let apply = |yaml: &str, how: &[&str]| {
        fs::write(&file, yaml).unwrap();
        cluster.kubectl(&[&["apply", "-f", file.to_str().unwrap()], how].concat())
    };
    // Other tests may have installed their own definitions.
    let force = ["--server-side", "--force-conflicts"];
    apply(&manifest(&[CRDS], &strings(&["--set", "installGatewayAPI=true"])), &force).unwrap();

    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MESH}});
    apply(&namespace.to_string(), &[]).unwrap();
    for (row, values) in [
        ("defaults", vec![]),
        ("production", strings(&["-f", "charts/weft-control-plane/values-ha.yaml"])),
        ("Linkerd's values", strings(&["-f", "k8s-api/linkerd/values.yaml"])),
        (
            "Linkerd's values for production",
            strings(&["-f", "k8s-api/linkerd/values.yaml", "-f", "k8s-api/linkerd/values-ha.yaml"]),
        ),
        (
            "network policies",
            strings(&[
                "--set",
                "networkPolicy.enabled=true,networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b",
            ]),
        ),
        ("IPv6", strings(&["--set", "disableIPv6=false"])),
        (
            "certificates of other tools",
            strings(&[
                "--set",
                "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls",
                "--set",
                "proxyInjector.externalSecret=true,proxyInjector.injectCaFrom=linkerd/injector",
            ]),
        ),
    ] {
        let rendered = render(&[certificates.all(), values].concat());
        apply(&rendered, &["--server-side", "--dry-run=server"]).unwrap_or_else(|error| panic!("{row}: {error:#}"));
    }

    let install = |more: &[&str]| {
        let arguments = ["install", "weft-charts", CONTROL_PLANE, "--namespace", MESH];
        helm(&[&arguments[..], more].concat(), &certificates.all())
    };
    let label = |value: &str| {
        let label = format!("pod-security.kubernetes.io/enforce{value}");
        cluster.kubectl(&["label", "--overwrite", "namespace", MESH, &label]).unwrap()
    };
    label("=baseline");
    let refused = String::from_utf8_lossy(&install(&[]).stderr).into_owned();
    assert!(refused.contains("pod-security.kubernetes.io/enforce=privileged"), "{refused}");
    label("=privileged");
    cluster.kubectl(&["delete", "crd", "serviceprofiles.linkerd.io", "--wait"]).unwrap();
    let refused = String::from_utf8_lossy(&install(&[]).stderr).into_owned();
    assert!(refused.contains("serviceprofiles.linkerd.io") && refused.contains("helm install weft-crds"), "{refused}");
    apply(&manifest(&[CRDS], &[]), &force).unwrap();
    agents_are_told_by_their_labels(&cluster, &|| install(&[]));
    succeeded(&install(&[]));

    let alone = helm(&["install", "weft-agent", agent_only::CHART, "--namespace", MESH], &[]);
    let whole = helm(&["install", "second", CONTROL_PLANE, "--namespace", "second-mesh"], &certificates.all());
    for second in [alone, whole] {
        let refused = String::from_utf8_lossy(&second.stderr).into_owned();
        let words = ["DaemonSet weft-agent of namespace linkerd", "weft-control-plane"];
        assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
    }
    accounts_are_limited(&cluster);
    destination_writes_its_own_slices_only(&cluster);

    succeeded(&helm(&["uninstall", "weft-charts", "--namespace", MESH, "--wait"], &[]));
    let kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings,\
                 daemonsets,deployments,services,secrets,configmaps,roles,rolebindings,serviceaccounts";
    let left = cluster.kubectl(&["get", kinds, "-A", "-l", "linkerd.io/control-plane-ns", "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
    cluster.kubectl(&["delete", "namespace", MESH, "--wait=false"]).unwrap();
}

/// The agent alone is upgraded whatever its name, and Weft's control plane is not installed beside it.
fn agents_are_told_by_their_labels(cluster: &Cluster, install: &dyn Fn() -> Output) {
    const ALONE: &str = "agent-alone";
    cluster.kubectl(&["create", "namespace", ALONE]).unwrap();
    let settings = strings(&["--set", "name=weft-agent", "--set", "controllerNamespace=agent-alone"]);
    for verb in ["install", "upgrade"] {
        succeeded(&helm(&[verb, "only-agent", agent_only::CHART, "--namespace", ALONE], &settings));
    }
    let refused = String::from_utf8_lossy(&install().stderr).into_owned();
    let words =
        ["DaemonSet weft-agent of namespace agent-alone", "cniEnabled=false", "helm uninstall only-agent --namespace"];
    assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
    succeeded(&helm(&["uninstall", "only-agent", "--namespace", ALONE, "--wait"], &[]));
    cluster.kubectl(&["delete", "namespace", ALONE, "--wait=false"]).unwrap();
}

/// RBAC lets it write every EndpointSlice; the chart's admission policy lets it write those of ExternalWorkloads.
fn destination_writes_its_own_slices_only(cluster: &Cluster) {
    const OWN: &str = "linkerd-external-workloads-controller";
    const OTHER: &str = "endpointslice-controller.k8s.io";
    let slice = |name: &str, manager: &str| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [],
            "metadata": {"name": name, "namespace": "default", "labels": {"endpointslice.kubernetes.io/managed-by": manager}},
        })
    };
    let directory = tempfile::tempdir().unwrap();
    let write = |verb: &str, slice: &Value, user: &[&str]| {
        let file = directory.path().join("slice.json");
        fs::write(&file, slice.to_string()).unwrap();
        cluster.kubectl(&[&[verb, "-f", file.to_str().unwrap()], user].concat()).map_err(|error| format!("{error:#}"))
    };
    let account = format!("--as=system:serviceaccount:{MESH}:linkerd-destination");
    let destination = [account.as_str()];
    // The API server takes a moment to enforce a new policy.
    let refused = cluster.until(Duration::from_secs(30), |_| {
        let foreign = slice("weft-test-foreign", OTHER);
        match write("create", &foreign, &destination) {
            Err(refusal) => Ok(refusal),
            Ok(_) => {
                write("delete", &foreign, &[]).map_err(anyhow::Error::msg)?;
                anyhow::bail!("it created another controller's slice")
            }
        }
    });
    let refused = refused.unwrap();
    assert!(refused.contains("writes EndpointSlices of ExternalWorkloads only"), "{refused}");

    write("create", &slice("weft-test-foreign", OTHER), &[]).unwrap();
    for (verb, manager) in [("replace", OTHER), ("replace", OWN), ("delete", OTHER)] {
        let refused = write(verb, &slice("weft-test-foreign", manager), &destination).unwrap_err();
        assert!(refused.contains("EndpointSlices of ExternalWorkloads only"), "{verb} {manager}: {refused}");
    }
    write("create", &slice("weft-test-own", OWN), &destination).unwrap();
    write("replace", &slice("weft-test-own", OWN), &destination).unwrap();
    write("replace", &slice("weft-test-own", OTHER), &destination).unwrap_err();
    write("delete", &slice("weft-test-own", OWN), &destination).unwrap();
    write("delete", &slice("weft-test-foreign", OTHER), &[]).unwrap();
}

fn accounts_are_limited(cluster: &Cluster) {
    let may = |account: &str, question: &[&str]| {
        let user = format!("--as=system:serviceaccount:{MESH}:{account}");
        let asked = cluster.command("kubectl").args(["auth", "can-i", &user]).args(question).output().unwrap();
        asked.status.success()
    };
    // The API server learns of roles by a watch.
    let check = |account: &str, question: &[&str], expected: bool| {
        let answer = cluster.until(Duration::from_secs(30), |_| {
            anyhow::ensure!(may(account, question) == expected, "not {expected}");
            Ok(())
        });
        answer.unwrap_or_else(|error| panic!("{account}: {question:?}: {error}"));
    };
    let every = ["services", "pods", "endpointslices.discovery.k8s.io", "servers.policy.linkerd.io"];
    for resource in every {
        check("linkerd-destination", &["watch", resource, "-A"], true);
    }
    for (account, question, expected) in [
        ("linkerd-destination", &["update", "leases/linkerd-destination-endpoint-write", "-n", MESH][..], true),
        ("linkerd-destination", &["update", "leases/policy-controller-write", "-n", MESH], true),
        ("linkerd-destination", &["update", "leases/another", "-n", MESH], false),
        ("linkerd-destination", &["get", "deployments/linkerd-destination", "-n", MESH], true),
        ("linkerd-destination", &["get", "deployments/another", "-n", MESH], false),
        ("linkerd-destination", &["watch", "egressnetworks.policy.linkerd.io", "-A"], true),
        ("linkerd-destination", &["patch", "egressnetworks.policy.linkerd.io", "--subresource=status", "-A"], true),
        ("linkerd-destination", &["patch", "egressnetworks.policy.linkerd.io", "-A"], false),
        ("linkerd-destination", &["patch", "httproutes.policy.linkerd.io", "--subresource=status", "-A"], true),
        ("linkerd-destination", &["update", "httproutes.policy.linkerd.io", "--subresource=status", "-A"], false),
        ("linkerd-destination", &["patch", "servers.policy.linkerd.io", "--subresource=status", "-A"], false),
        ("linkerd-destination", &["create", "leases", "-n", "default"], false),
        ("linkerd-destination", &["patch", "leases/linkerd-destination-endpoint-write", "-n", MESH], false),
        ("linkerd-destination", &["update", "secrets/linkerd-sp-validator-k8s-tls", "-n", MESH], true),
        ("linkerd-destination", &["patch", "secrets/linkerd-sp-validator-k8s-tls", "-n", MESH], false),
        ("linkerd-destination", &["update", "endpointslices.discovery.k8s.io", "-A"], true),
        ("linkerd-destination", &["patch", "endpointslices.discovery.k8s.io", "-A"], false),
        ("linkerd-destination", &["get", "secrets/linkerd-identity-issuer", "-n", MESH], false),
        ("linkerd-destination", &["list", "secrets", "-n", MESH], false),
        ("linkerd-destination", &["patch", "pods", "-A"], false),
        (
            "linkerd-destination",
            &["patch", "validatingwebhookconfigurations/linkerd-sp-validator-webhook-config"],
            true,
        ),
        ("linkerd-destination", &["patch", "validatingwebhookconfigurations/another"], false),
        ("linkerd-heartbeat", &["list", "namespaces"], false),
        ("linkerd-heartbeat", &["get", "configmaps/linkerd-config", "-n", MESH], false),
        ("linkerd-identity", &["create", "tokenreviews.authentication.k8s.io"], true),
        ("linkerd-identity", &["get", "secrets/linkerd-identity-issuer", "-n", MESH], false),
        ("linkerd-identity", &["watch", "pods", "-A"], false),
        ("linkerd-proxy-injector", &["watch", "namespaces"], true),
        ("linkerd-proxy-injector", &["update", "secrets/linkerd-proxy-injector-k8s-tls", "-n", MESH], true),
        ("linkerd-proxy-injector", &["patch", "secrets/linkerd-proxy-injector-k8s-tls", "-n", MESH], false),
        ("linkerd-proxy-injector", &["get", "secrets/linkerd-policy-validator-k8s-tls", "-n", MESH], false),
        ("linkerd-proxy-injector", &["patch", "pods", "-A"], false),
        ("weft-agent", &["watch", "pods", "-A"], true),
        ("weft-agent", &["create", "events.events.k8s.io", "-n", "default"], true),
        ("weft-agent", &["get", "secrets", "-n", MESH], false),
        ("weft-agent", &["patch", "pods", "-A"], false),
        ("weft-agent", &["get", "daemonsets/weft-agent", "-n", MESH], true),
        ("weft-agent", &["get", "daemonsets/another", "-n", MESH], false),
    ] {
        check(account, question, expected);
    }
}
