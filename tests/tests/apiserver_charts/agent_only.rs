//! The chart of the agent alone, for clusters with Linkerd: what it refuses, what `linkerd check` finds, and that
//! nothing is left of it.

use super::*;

pub(super) const CHART: &str = "charts/weft-agent";
/// Where Linkerd's chart linkerd2-cni is installed by default.
const NAMESPACE: &str = "linkerd-cni";

fn template(settings: &str) -> Output {
    helm(&["template", "weft-agent", CHART, "--namespace", NAMESPACE], &strings(&["--set", settings]))
}

#[test]
fn values_that_the_agent_cannot_honour_are_refused_by_name() {
    for (row, settings, words) in [
        ("the plugin's image", "image.name=cr.l5d.io/linkerd/cni-plugin", &["image.name", "weft-agent"][..]),
        ("only some ports", "portsToRedirect=80", &["portsToRedirect", "ignoreInboundPorts"]),
        ("further containers", "extraInitContainers[0].name=wait", &["extraInitContainers"]),
        ("misspelt", "proxyUid=2102", &["proxyUid"]),
        ("no ports", "ignoreInboundPorts=http", &["ignoreInboundPorts"]),
        ("root", "proxyUID=0", &["proxyUID"]),
        ("no namespace", r"controllerNamespace=linkerd\,", &["controllerNamespace"]),
        ("any control plane", "controllerNamespace=,allowBypass=false", &["controllerNamespace", "allowBypass"]),
    ] {
        let output = template(settings);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{row}: it was taken");
        assert!(words.iter().all(|word| said.contains(word)), "{row}: {said}");
    }
}

/// Values of linkerd2-cni, as a user of it has them; the image is the one that has to change.
#[test]
fn values_of_linkerds_plugin_reach_the_agent() {
    let cluster = Cluster::from_env().unwrap();
    let settings = "inboundProxyPort=5143,outboundProxyPort=5140,proxyAdminPort=5191,proxyControlPort=5190,\
                    proxyUID=3000,proxyGID=3001,ignoreInboundPorts=22,ignoreOutboundPorts=25\\,26,logLevel=debug,\
                    iptablesMode=legacy,useWaitFlag=true,privileged=true,repairController.enabled=true,\
                    resources.memory.limit=99Mi,updateStrategy.rollingUpdate.maxUnavailable=3,\
                    kubeAPIServerPorts=8443";
    let rendered = cluster.objects(&succeeded(&template(settings))).unwrap();
    let config = &object(&rendered, "ConfigMap", "linkerd-cni-config")["data"]["values"];
    let found = Values::parse(config.as_str().unwrap()).unwrap().redirection().unwrap();
    assert_eq!((found.ports.inbound, found.ports.outbound, found.ports.control), (5143, 5140, 5190));
    assert_eq!((found.ports.admin, found.proxy_uid, found.proxy_gid), (5191, 3000, Some(3001)));
    let ports = [&found.skips.inbound, &found.skips.outbound, &found.skips.api_server_ports];
    assert_eq!(ports.map(ToString::to_string), ["22", "25-26", "8443"]);

    let spec = &object(&rendered, "DaemonSet", "linkerd-cni")["spec"];
    assert_eq!(spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"], 3);
    let agent = &spec["template"]["spec"]["containers"][0];
    assert_eq!(agent["resources"]["limits"]["memory"], "99Mi");
    let arguments = agent["args"].as_array().unwrap();
    for expected in ["--controller-namespace=linkerd", "--no-self-enrol", "--log-level=debug"] {
        assert!(arguments.contains(&json!(expected)), "{arguments:?}");
    }

    let emptied = template("ignoreInboundPorts=,ignoreOutboundPorts=,kubeAPIServerPorts=");
    let emptied = cluster.objects(&succeeded(&emptied)).unwrap();
    let config = &object(&emptied, "ConfigMap", "linkerd-cni-config")["data"]["values"];
    let skips = Values::parse(config.as_str().unwrap()).unwrap().redirection().unwrap().skips;
    assert!([skips.inbound, skips.outbound, skips.api_server_ports].iter().all(PortSet::is_empty), "{config}");

    let several = succeeded(&template(r"controllerNamespace=linkerd\,linkerd-edge"));
    assert!(several.contains("- --controller-namespace=linkerd,linkerd-edge\n"), "{several}");

    let defaults = cluster.objects(&succeeded(&template("controllerNamespace="))).unwrap();
    let config = &object(&defaults, "ConfigMap", "linkerd-cni-config")["data"]["values"];
    let found = Values::parse(config.as_str().unwrap()).unwrap().redirection().unwrap();
    let mut linkerds = RedirectionDefaults::default();
    linkerds.skips.api_server_ports = "443,6443".parse().unwrap();
    assert_eq!(found, linkerds);
    let agent = &object(&defaults, "DaemonSet", "linkerd-cni")["spec"]["template"]["spec"]["containers"][0];
    // Without other control planes, there is no pod that the kernel would have to leave alone.
    for unexpected in ["--controller-namespace", "--no-self-enrol"] {
        assert!(!agent["args"].to_string().contains(unexpected), "{agent}");
    }
}

#[test]
fn the_agent_alone_is_installed_and_leaves_nothing() {
    let _installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::from_env().unwrap();
    let namespace = |labels: Value| {
        let metadata = json!({"name": NAMESPACE, "labels": labels});
        cluster.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}).to_string()).unwrap();
    };
    let install = || helm(&["install", "weft-agent", CHART, "--namespace", NAMESPACE], &[]);
    namespace(json!({"pod-security.kubernetes.io/enforce": "restricted"}));
    let refused = String::from_utf8_lossy(&install().stderr).into_owned();
    assert!(refused.contains("pod-security.kubernetes.io/enforce=privileged"), "{refused}");
    namespace(json!({"pod-security.kubernetes.io/enforce": "privileged"}));
    let said = succeeded(&install());
    assert!(said.contains("linkerd check --cni-namespace linkerd-cni --linkerd-cni-enabled"), "{said}");

    let second = helm(&["install", "second", CHART, "--namespace", NAMESPACE, "--set", "name=second"], &[]);
    let refused = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(refused.contains("DaemonSet linkerd-cni of namespace linkerd-cni"), "{refused}");

    // What `linkerd check` looks for (`linkerd2:pkg/healthcheck/healthcheck.go`, linkerd-cni-plugin).
    for name in ["configmap/linkerd-cni-config", "serviceaccount/linkerd-cni", "daemonset/linkerd-cni"] {
        cluster.kubectl(&["-n", NAMESPACE, "get", name]).unwrap();
    }
    cluster.kubectl(&["get", "clusterrole/linkerd-cni", "clusterrolebinding/linkerd-cni"]).unwrap();
    for (question, expected) in [
        (&["watch", "pods", "-A"][..], true),
        (&["create", "events.events.k8s.io", "-n", "default"], true),
        (&["get", "daemonsets/linkerd-cni", "-n", NAMESPACE], true),
        (&["get", "daemonsets/another", "-n", NAMESPACE], false),
        (&["get", "secrets", "-n", NAMESPACE], false),
        (&["patch", "pods", "-A"], false),
    ] {
        let user = format!("--as=system:serviceaccount:{NAMESPACE}:linkerd-cni");
        let asked = cluster.command("kubectl").args(["auth", "can-i", &user]).args(question).output().unwrap();
        assert_eq!(asked.status.success(), expected, "{question:?}");
    }

    succeeded(&helm(&["uninstall", "weft-agent", "--namespace", NAMESPACE, "--wait"], &[]));
    let kinds = "clusterroles,clusterrolebindings,daemonsets,configmaps,roles,rolebindings,serviceaccounts";
    let left = cluster.kubectl(&["get", kinds, "-A", "-l", "linkerd.io/cni-resource=true", "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).unwrap();
}
