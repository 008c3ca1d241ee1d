//! What the verbs of `weft` show of the tutorial's mesh, beside what kubectl shows of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
};

use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::world::{MESH, SHOP, World};

const WEB: &str = "web.shop.svc.cluster.local";

fn read(world: &World, arguments: &[&str]) -> Value {
    let text = world.weft(arguments).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("weft {}: {error}: {text}", arguments.join(" ")))
}

fn error(world: &World, arguments: &[&str]) -> String {
    match world.weft(arguments) {
        Ok(text) => panic!("weft {} succeeded: {text}", arguments.join(" ")),
        Err(error) => format!("{error:#}"),
    }
}

fn file_of(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// The values of a field, in all rows.
fn all<'a>(rows: &'a Value, field: &str) -> BTreeSet<&'a str> {
    rows.as_array().unwrap().iter().map(|row| row[field].as_str().unwrap()).collect()
}

fn pods(world: &World, app: &str) -> BTreeSet<String> {
    world.cluster.pods(SHOP, &format!("app={app}")).unwrap().into_iter().collect()
}

fn is(shown: &BTreeSet<&str>, expected: &BTreeSet<String>) {
    assert_eq!(shown.iter().map(ToString::to_string).collect::<BTreeSet<_>>(), *expected);
}

pub(super) fn endpoints(world: &mut World) {
    let (web, api) = (format!("{WEB}:80"), "api.shop.svc.cluster.local:80");
    let rows = read(world, &["diagnostics", "endpoints", &web, "-o", "json"]);
    is(&all(&rows, "pod"), &pods(world, "web"));
    assert_eq!(all(&rows, "service"), ["web.shop"].into());
    assert_eq!(all(&rows, "identity"), ["web.shop.serviceaccount.identity.linkerd.cluster.local"].into());
    let table = world.weft(&["diagnostics", "ep", &web, api]).unwrap();
    let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(lines.next().unwrap(), ["NAMESPACE", "IP", "PORT", "POD", "SERVICE"]);
    let shown: BTreeSet<String> = lines.map(|line| line[3].to_owned()).collect();
    assert_eq!(shown, pods(world, "web").union(&pods(world, "api")).cloned().collect());
    let none = error(world, &["diagnostics", "endpoints", "web.example.com:80"]);
    assert!(none.contains("web.example.com:80"), "{none}");
    completion(world);
}

pub(super) fn policy(world: &mut World) {
    let store = pods(world, "store").pop_first().unwrap();
    let expected = json!({"group": "policy.linkerd.io", "kind": "server", "name": "store-http"});
    for resource in [format!("po/{store}"), "deploy/store".to_owned()] {
        let server = read(world, &["diagnostics", "policy", "-n", SHOP, &resource, "8080", "-o", "json"]);
        assert_eq!(server["labels"], expected, "{server:#}");
        assert!(server.to_string().contains("api.shop.serviceaccount"), "{server:#}");
    }
    let outbound = read(world, &["diagnostics", "policy", "-n", SHOP, "svc/web", "80", "-o", "json"]);
    let service = &outbound["metadata"]["Kind"]["Resource"];
    assert_eq!((&service["kind"], &service["name"], &service["port"]), (&"Service".into(), &"web".into(), &80.into()));
    assert!(outbound["protocol"]["Kind"].is_object(), "{outbound:#}");
    let yaml = world.weft(&["diagnostics", "policy", WEB, "80"]).unwrap();
    assert!(yaml.starts_with("metadata:\n  Kind:\n    Resource:\n"), "{yaml}");
    let none = error(world, &["diagnostics", "policy", "-n", SHOP, "po/nothing", "8080"]);
    assert!(none.contains("po/nothing port 8080") && none.contains("NotFound"), "{none}");
}

pub(super) fn profile(world: &mut World) {
    let ip = world.cluster.kubectl(&["-n", SHOP, "get", "svc", "web", "-o", "jsonpath={.spec.clusterIP}"]).unwrap();
    for address in [format!("{WEB}:80"), format!("{ip}:80")] {
        let profile = read(world, &["diagnostics", "profile", &address]);
        assert_eq!(profile["fully_qualified_name"], WEB, "{address}: {profile:#}");
    }
    // The webhook takes what `weft profile` prints.
    let template = file_of(&world.weft(&["profile", "web", "-n", SHOP, "--template"]).unwrap());
    let apply = ["apply", "--dry-run=server", "-o", "name", "-f", template.path().to_str().unwrap()];
    assert_eq!(world.cluster.kubectl(&apply).unwrap().trim(), format!("serviceprofile.linkerd.io/{WEB}"));
}

pub(super) fn metrics(world: &mut World) {
    let arguments = ["diagnostics", "proxy-metrics", "-n", SHOP, "deploy/client"];
    let text = world.weft(&arguments).unwrap();
    let client = world.client(SHOP);
    assert!(text.starts_with(&format!("#\n# POD {client} (1 of 1)\n#\n")), "{text}");
    let names = ["server_id=\"web.shop.", "dst_pod=\"web-", "dst_service=\"web\""];
    let hidden = world.weft(&[&arguments[..], &["--obfuscate"]].concat()).unwrap();
    for name in names {
        assert!(text.contains(name) && !hidden.contains(name), "{name}: {text}");
    }
    assert!(hidden.contains("request_total{direction=\"outbound\",authority=\""), "{hidden}");

    let text = world.weft(&["diagnostics", "controller-metrics"]).unwrap();
    let mut shown = BTreeMap::<&str, usize>::new();
    for container in text.lines().filter_map(|line| line.strip_prefix("# CONTAINER ")) {
        *shown.entry(container).or_default() += 1;
    }
    let expected = ["agent", "destination", "identity", "linkerd-proxy", "policy", "proxy-injector", "sp-validator"];
    assert_eq!(shown.keys().copied().collect::<Vec<_>>(), expected);
    assert!(!text.contains("# ERROR") && text.contains("endpoints_cache_size"), "{text}");
    let outside = error(world, &["diagnostics", "proxy-metrics", "-n", "outside", "deploy/client"]);
    assert!(outside.contains("# ERROR has no proxy"), "{outside}");
}

pub(super) fn identity(world: &mut World) {
    let name = "web.shop.serviceaccount.identity.linkerd.cluster.local";
    for arguments in [&["-n", SHOP, "deploy/web"][..], &["-l", "app=web"]] {
        let rows = read(world, &[&["identity", "-o", "json"], arguments].concat());
        is(&all(&rows, "pod"), &pods(world, "web"));
        for row in rows.as_array().unwrap() {
            assert_eq!((&row["accepted"], &row["error"]), (&true.into(), &Value::Null), "{row:#}");
            assert_eq!(row["certificates"][0]["names"], json!([name]), "{row:#}");
            assert_eq!(row["certificates"][0]["issuer"], "CN=identity.linkerd.cluster.local");
        }
    }
    let text = world.weft(&["identity", "-n", MESH, "deploy/linkerd-destination"]).unwrap();
    let own = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local";
    assert!(text.contains(own) && text.contains("Accepted:             yes"), "{text}");
    let outside = error(world, &["identity", "-n", "outside", "deploy/client"]);
    assert!(outside.contains("has no proxy"), "{outside}");
}

pub(super) fn authorizations(world: &mut World) {
    let rows = read(world, &["authz", "-n", SHOP, "deploy/store", "-o", "json"]);
    let expected = json!([{
        "route": "*", "server": "store-http", "authorization_policy": "store-http", "server_authorization": "",
        "requires": ["MeshTLSAuthentication/store-clients"],
    }]);
    assert_eq!(rows, expected);
    let table = world.weft(&["authz", "-n", SHOP, "deploy", "store"]).unwrap();
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION"]);
    assert_eq!(lines[1..], [["*", "store-http", "store-http", "-"]]);
    assert_eq!(read(world, &["authz", "-n", SHOP, "deploy/web", "-o", "json"]), json!([]));
    let none = error(world, &["authz", "-n", SHOP, "deploy/nothing"]);
    assert!(none.contains("deployments.apps \"nothing\" not found"), "{none}");
}

pub(super) fn versions(world: &mut World) {
    let version = read(world, &["version", "--proxy", "-n", SHOP, "-o", "json"]);
    let own = version["version"].as_str().unwrap();
    assert_eq!(version["server"], own, "{version:#}");
    let meshed = world.cluster.pods(SHOP, "linkerd.io/control-plane-ns=linkerd").unwrap().len();
    assert_eq!(version["proxies"], json!({own: meshed}));
    let text = world.weft(&["version"]).unwrap();
    assert_eq!(text, format!("Client version: {own}\nServer version: {own}\n"));
    assert_eq!(world.weft(&["version", "--client", "--short"]).unwrap(), format!("{own}\n"));
    let nowhere = world.weft(&["version", "-L", "nowhere"]).unwrap();
    assert!(nowhere.contains("Server version: unavailable"), "{nowhere}");
    context_before_the_command(world);
}

/// The cluster of `--context` is asked, and not that of the kubeconfig's current context.
fn context_before_the_command(world: &World) {
    let config = world.cluster.kubectl(&["config", "view", "--raw", "--minify", "--flatten", "-o", "json"]).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let name = config["current-context"].as_str().unwrap().to_owned();
    let add = |list: &mut Value, entry: Value| list.as_array_mut().unwrap().push(entry);
    add(&mut config["clusters"], json!({"name": "nowhere", "cluster": {"server": "https://127.0.0.1:1"}}));
    let user = config["contexts"][0]["context"]["user"].clone();
    add(&mut config["contexts"], json!({"name": "nowhere", "context": {"cluster": "nowhere", "user": user}}));
    config["current-context"] = json!("nowhere");
    let file = file_of(&config.to_string());
    let kubeconfig = ["--kubeconfig", file.path().to_str().unwrap()];
    let status = read(world, &[&kubeconfig[..], &["--context", &name, "status", "-n", SHOP, "-o", "json"]].concat());
    let pods = status["pods"].as_array().unwrap();
    assert!(!pods.is_empty() && pods.iter().all(|pod| pod["namespace"] == SHOP), "{status:#}");
    let current = world.weft(&[&kubeconfig[..], &["version"]].concat()).unwrap();
    assert!(current.contains("Server version: unavailable"), "{current}");
}

/// What is checked before an installation, where there is one.
pub(super) fn checks_before_an_installation(world: &World) {
    world.weft(&["check", "--crds"]).unwrap();
    let mut check = world.cluster.command("weft");
    let output = check.args(["check", "--pre", "-o", "json", "--wait", "0s"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["success"]), (Some(1), &false.into()), "{report:#}");
    let categories = report["categories"].as_array().unwrap();
    let checks: Vec<_> = categories.iter().flat_map(|category| category["checks"].as_array().unwrap()).collect();
    let with = |result: &str| -> Vec<&str> {
        let found = checks.iter().filter(|check| check["result"] == result);
        found.map(|check| check["description"].as_str().unwrap()).collect()
    };
    assert_eq!(with("error"), ["control plane is not already installed"], "{report:#}");
    for passed in ["nodes have a kernel that the agent supports", "no other agent of Weft is installed"] {
        assert!(with("success").contains(&passed), "{report:#}");
    }
}

/// In a real shell, with the script that `weft completion` prints.
fn completion(world: &World) {
    let script = format!(
        "source <(weft completion bash)\nCOMP_WORDS=(weft trace -n {SHOP} deploy/)\nCOMP_CWORD=4\n\
         _clap_complete_weft weft deploy/\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    let output = world.cluster.command("bash").args(["-c", &script]).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let deployments = world.cluster.get(&["-n", SHOP, "deployments"]).unwrap();
    let names = deployments["items"].as_array().unwrap().iter().map(|it| it["metadata"]["name"].as_str().unwrap());
    let expected: BTreeSet<String> = names.map(|name| format!("deploy/{name}")).collect();
    is(&shown.lines().collect(), &expected);
}
