//! Invalid input is reported: which object, which field, and what to do.

use std::{
    panic::{self, AssertUnwindSafe},
    time::Duration,
};

use anyhow::bail;
use serde_json::Value;
use weft_tests::{certificates::Certificates, report::assert_vouched_for};
use weft_tls::ca::Root;

use crate::{
    certificates::generate_certificates,
    world::{CHART, CLIENT_ID, MESH, SHOP, World},
};

/// A pod that the application's namespace admits.
const RESTRICTED: &str = r#"{"spec": {"securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "probe", "image": "probe",
        "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]}}"#;

pub(super) fn missing_crds(world: &mut World) {
    let certificates = generate_certificates();
    let values = certificates.all();
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    let install = ["install", "too-early", CHART, "--namespace", MESH, "--create-namespace"];
    let (installed, said) = world.helm(&[&install[..], &values].concat());
    assert!(!installed, "{said}");
    assert!(said.contains("weft-crds") && said.contains("helm install"), "{said}");
    // Nothing of it may remain, or the tutorial would fail.
    world.cluster.kubectl(&["delete", "namespace", MESH, "--ignore-not-found"]).unwrap();
}

pub(super) fn missing_values(world: &mut World) {
    let (rendered, said) = world.helm(&["template", "x", CHART, "--namespace", MESH]);
    assert!(!rendered && said.contains("identityTrustAnchorsPEM"), "{said}");
    let (rendered, said) = world.helm(&["template", "x", CHART, "--set", "identityTrustAnchorsPEM=nonsense"]);
    assert!(!rendered && said.contains("identity"), "{said}");
}

pub(super) fn mismatched_certificates(world: &mut World) {
    let stranger = Root::generate("stranger.linkerd.cluster.local").unwrap();
    let issuer = stranger.issue_issuer("identity.linkerd.cluster.local").unwrap();
    let certificates = Certificates::write(stranger.certificate_pem(), &issuer.certificate, &issuer.key).unwrap();
    let values = certificates.issuer();
    let release = world.upgrade(&values.iter().map(String::as_str).collect::<Vec<_>>());

    // Rolled back in any case, so that later checks do not find a foreign issuer.
    let told = panic::catch_unwind(AssertUnwindSafe(|| foreign_issuer_is_told(world)));
    let (rolled_back, said) = world.helm(&["rollback", &release, "--namespace", MESH]);
    if let Err(failure) = told {
        panic::resume_unwind(failure);
    }
    assert!(rolled_back, "{said}");
    world.cluster.rolled_out(MESH, "deploy/linkerd-identity").unwrap();
}

/// The new identity pod does not become ready and reports why, and the old one keeps running.
fn foreign_issuer_is_told(world: &mut World) {
    world.event(MESH, "Deployment/linkerd-identity", &["linkerd-identity-issuer", "trust anchor"]);
    let logged = world.cluster.until(Duration::from_secs(60), |cluster| {
        let selector = "linkerd.io/control-plane-component=identity";
        let log = cluster.kubectl(&["-n", MESH, "logs", "-l", selector, "-c", "identity", "--tail=-1"])?;
        let told = log.lines().any(|line| line.contains("linkerd-identity-issuer") || line.contains("trust anchor"));
        if told { Ok(()) } else { bail!("the log of identity does not name the issuer: {log}") }
    });
    logged.unwrap();
    let complaint = world.weft(&["check", "-o", "json", "--wait", "0s"]).unwrap_err().to_string();
    assert!(complaint.contains("linkerd-identity-issuer"), "{complaint}");
    let client = world.client(SHOP);
    let report = world.cluster.client(SHOP, &client, &["http1", "--target", "web.shop:80", "--count", "20"]).unwrap();
    assert_eq!(report.failures, 0, "{report:?}");
}

pub(super) fn unreadable_annotation(world: &mut World) {
    let manifest = format!(
        r#"
apiVersion: apps/v1
kind: Deployment
metadata: {{name: unreadable, namespace: {SHOP}}}
spec:
  selector: {{matchLabels: {{app: unreadable}}}}
  template:
    metadata:
      labels: {{app: unreadable}}
      annotations: {{config.linkerd.io/skip-outbound-ports: "80-x"}}
    spec:
      securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
      containers:
        - name: client
          image: localhost/weft-examples:0.1.0
          command: [/weft-client, wait]
          securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"#
    );
    world.cluster.apply(&manifest).unwrap();
    let told = ["config.linkerd.io/skip-outbound-ports", "80-x", "8000-8100"];
    world.event(SHOP, "Deployment/unreadable", &told);
    let replica_set = world.cluster.kubectl(&["-n", SHOP, "get", "rs", "-l", "app=unreadable", "-o", "name"]).unwrap();
    let replica_set = replica_set.trim().rsplit('/').next().unwrap().to_owned();
    world.event(SHOP, &format!("ReplicaSet/{replica_set}"), &told);
    let described = world.cluster.kubectl(&["-n", SHOP, "describe", "deploy/unreadable"]).unwrap();
    assert!(told.iter().all(|word| described.contains(word)), "{described}");
    assert_eq!(world.cluster.pods(SHOP, "app=unreadable").unwrap(), [""; 0], "it was started all the same");
    world.cluster.kubectl(&["-n", SHOP, "delete", "deploy/unreadable"]).unwrap();
}

/// A pod that was injected already and whose annotation becomes invalid later: its redirection does not change.
pub(super) fn annotation_broken_later(world: &mut World) {
    let pod = world.client(SHOP);
    let annotate = |value: &str| {
        let annotation = format!("config.linkerd.io/skip-inbound-ports{value}");
        world.cluster.kubectl(&["-n", SHOP, "annotate", "--overwrite", "pod", &pod, &annotation]).unwrap();
    };
    annotate("=nonsense");
    world.event(SHOP, &format!("Pod/{pod}"), &["config.linkerd.io/skip-inbound-ports", "nonsense"]);
    let load = ["http1", "--target", "web.shop:80", "--count", "20", "--fresh"];
    assert_vouched_for(&world.cluster.client(SHOP, &pod, &load).unwrap(), CLIENT_ID);
    let inbound = world.weft(&["explain", "-n", SHOP, "-o", "json", &pod, "--inbound", "8080"]).unwrap();
    let inbound: Value = serde_json::from_str(&inbound).unwrap();
    assert_eq!(inbound["verdict"], "redirect", "{inbound:#}");
    annotate("-");
}

pub(super) fn refused_by_admission(world: &mut World) {
    let profile = "apiVersion: linkerd.io/v1alpha2\nkind: ServiceProfile\nmetadata: {name: web.shop.svc.cluster.local, namespace: shop}\n\
                   spec: {routes: [{name: front, condition: {pathRegex: /}, timeout: soon}]}\n";
    let refusal = world.cluster.apply(profile).unwrap_err();
    let refusal = format!("{refusal:#}");
    assert!(refusal.contains("linkerd-sp-validator") && refusal.contains("soon"), "{refusal}");
    let network = "apiVersion: policy.linkerd.io/v1alpha1\nkind: NetworkAuthentication\nmetadata: {name: odd, namespace: shop}\n\
                   spec: {networks: [{cidr: 10.0.0.0/8, except: [192.168.0.0/16]}]}\n";
    let refusal = format!("{:#}", world.cluster.apply(network).unwrap_err());
    assert!(refusal.contains("linkerd-policy-validator") && refusal.contains("192.168.0.0/16"), "{refusal}");
    // Valid variants of them are accepted.
    let good = profile.replace("soon", "300ms");
    world.cluster.apply(&good).unwrap();
    world.cluster.kubectl(&["-n", SHOP, "delete", "serviceprofile", "web.shop.svc.cluster.local"]).unwrap();
}

pub(super) fn lost_webhook_certificate(world: &mut World) {
    let bundle = |world: &World| {
        let hook = world.cluster.get(&["mutatingwebhookconfiguration", "linkerd-proxy-injector-webhook-config"]);
        hook.unwrap()["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap_or_default().to_owned()
    };
    assert_ne!(bundle(world), "");
    let remove = r#"[{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]"#;
    let hook = "mutatingwebhookconfiguration/linkerd-proxy-injector-webhook-config";
    world.cluster.kubectl(&["patch", hook, "--type=json", "-p", remove]).unwrap();
    let secret = "secret/linkerd-proxy-injector-k8s-tls";
    world.cluster.kubectl(&["-n", MESH, "patch", secret, "--type=merge", "-p", r#"{"data":null}"#]).unwrap();
    let back = world.cluster.until(Duration::from_secs(30), |cluster| {
        let secret = cluster.get(&["-n", MESH, secret])?;
        if secret["data"]["tls.crt"].is_null() || bundle(world).is_empty() {
            bail!("not yet: {secret:#}")
        }
        Ok(())
    });
    back.unwrap();
    // And it works: a new pod is injected. The API server learns of the bundle by a watch, and leaves pods as they are
    // until then.
    let trusted = world.cluster.until(Duration::from_secs(60), |cluster| {
        let dry = ["-n", SHOP, "run", "probe", "--image", "probe", "--dry-run=server", "-o", "json"];
        let dry = [&dry[..], &["--overrides", RESTRICTED]].concat();
        let pod: Value = serde_json::from_str(&cluster.kubectl(&dry)?)?;
        anyhow::ensure!(!pod["spec"]["initContainers"].is_null(), "it has no proxy");
        Ok(())
    });
    trusted.unwrap();
    world.cluster.kubectl(&["-n", SHOP, "rollout", "restart", "deploy/client"]).unwrap();
    world.cluster.rolled_out(SHOP, "deploy/client").unwrap();
    let injected = world.cluster.until(Duration::from_secs(60), |cluster| cluster.pod(SHOP, "app=client")).unwrap();
    let pod = world.cluster.get(&["-n", SHOP, "pod", &injected]).unwrap();
    assert_eq!(pod["spec"]["initContainers"][0]["name"], "linkerd-proxy");
}
