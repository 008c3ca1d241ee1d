//! What the verbs of `weft` show of the tutorial's mesh, beside what kubectl shows of it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

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
}
