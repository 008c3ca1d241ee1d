//! Who may use whom: the table of ARCHITECTURE.md, checked against `cargo metadata`.
//!
//! Two questions: does a package name one of ours that it may not know, and does a crate that it must never use reach
//! it, directly or through others. Development dependencies are free: tests may use what they like.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde_json::Value;

use super::Finding;
use crate::workspace::{self, Workspace, text};

/// One row of the table.
struct Row {
    package: &'static str,
    /// Those of our packages that it may use.
    ours: &'static [&'static str],
    /// Crates that must not reach it.
    never: &'static [&'static str],
}

const TABLE: [Row; 13] = [
    // aya only behind a feature: `OPTIONAL`.
    Row { package: "weft-ebpf-abi", ours: &[], never: &[] },
    Row { package: "weft-proto", ours: &[], never: &["kube", "aya"] },
    Row { package: "weft-k8s-api", ours: &[], never: &["tonic", "aya"] },
    Row { package: "weft-runtime", ours: &[], never: &["kube", "aya"] },
    Row { package: "weft-tls", ours: &[], never: &["kube", "aya"] },
    Row {
        package: "weft-agent",
        ours: &["weft-ebpf-abi", "weft-proto", "weft-k8s-api", "weft-runtime"],
        never: &["weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-proxy",
        ours: &["weft-proto", "weft-runtime", "weft-tls"],
        never: &["kube", "aya", "weft-agent", "weft-control-plane"],
    },
    Row {
        package: "weft-control-plane",
        ours: &["weft-proto", "weft-k8s-api", "weft-runtime", "weft-tls"],
        never: &["aya", "weft-agent", "weft-proxy"],
    },
    Row {
        package: "weft-sandbox",
        ours: &["weft-k8s-api", "weft-proto", "weft-tls"],
        never: &["aya", "weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row { package: "weft-cli", ours: &["weft-k8s-api", "weft-proto", "weft-sandbox", "weft-tls"], never: &["aya"] },
    Row { package: "weft-examples", ours: &[], never: &["kube", "aya"] },
    Row {
        package: "weft-tests",
        ours: &["weft-k8s-api", "weft-proto", "weft-sandbox", "weft-tls"],
        never: &["weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row { package: "weft-xtask", ours: &[], never: &["tokio"] },
];

/// Crates that a package may only have behind a feature.
const OPTIONAL: [(&str, &str); 1] = [("weft-ebpf-abi", "aya")];

/// All that the kernel programs may use.
const EBPF: [&str; 3] = ["weft-ebpf-abi", "aya-ebpf", "aya-log-ebpf"];

/// Crates that nothing of ours may contain, with the reason.
const BANNED: [(&str, &str); 4] = [
    ("ring", "aws-lc-rs is the one crypto provider"),
    ("openssl-sys", "rustls does TLS"),
    ("native-tls", "rustls does TLS"),
    ("serde_yaml", "serde_yaml_ng is the one YAML reader"),
];

/// Asks cargo for both workspaces and checks them.
///
/// # Errors
/// When cargo cannot resolve a workspace.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let host = workspace::metadata(&workspace.root, &["--filter-platform", "x86_64-unknown-linux-gnu"])?;
    let mut findings = check_host(&host);
    findings.extend(check_ebpf(&workspace::metadata(&workspace.ebpf(), &["--no-deps"])?));
    Ok(findings)
}

fn check_host(metadata: &Value) -> Vec<Finding> {
    let graph = Graph::new(metadata);
    let mut findings = Vec::new();
    for package in graph.members() {
        let Some(row) = TABLE.iter().find(|row| row.package == package.name) else {
            findings
                .push(finding(package.name, "has no row in the table of dependency edges (xtask/src/lint/edges.rs)"));
            continue;
        };
        let ours = package.direct.iter().filter(|name| name.starts_with("weft-"));
        for name in ours.filter(|name| !row.ours.contains(&name.as_str())) {
            findings.push(finding(package.name, format!("may not use {name}")));
        }
        for (_, optional) in OPTIONAL.iter().filter(|(owner, _)| *owner == package.name) {
            if package.always.contains(*optional) {
                findings.push(finding(package.name, format!("may use {optional} only as an optional dependency")));
            }
        }
        let never = row.never.iter().map(|name| (*name, "the table of dependency edges says never"));
        for (name, reason) in never.chain(BANNED) {
            if let Some(path) = graph.path(package.id, name) {
                findings.push(finding(package.name, format!("reaches {name} by {}: {reason}", path.join(" -> "))));
            }
        }
    }
    findings
}

fn check_ebpf(metadata: &Value) -> Vec<Finding> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let direct = packages.flat_map(|package| package["dependencies"].as_array().into_iter().flatten());
    let names = direct.filter(|dependency| dependency["kind"].is_null()).map(|dependency| text(&dependency["name"]));
    names
        .filter(|name| !EBPF.contains(&name.as_str()))
        .map(|name| finding("weft-ebpf", format!("may not use {name}")))
        .collect()
}

fn finding(subject: &str, message: impl Into<String>) -> Finding {
    Finding { subject: subject.to_owned(), line: None, message: message.into() }
}

/// A member of the workspace.
struct Member<'a> {
    id: &'a str,
    name: &'a str,
    /// Names of the dependencies in the manifest, optional ones too, without development dependencies.
    direct: Vec<String>,
    /// Those of them that are not optional.
    always: BTreeSet<String>,
}

/// What cargo resolved, without development dependencies.
struct Graph<'a> {
    metadata: &'a Value,
    names: BTreeMap<&'a str, &'a str>,
    edges: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Graph<'a> {
    fn new(metadata: &'a Value) -> Self {
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let names = packages.filter_map(|package| Some((package["id"].as_str()?, package["name"].as_str()?))).collect();
        let nodes = metadata["resolve"]["nodes"].as_array().into_iter().flatten();
        let edges = nodes.filter_map(|node| Some((node["id"].as_str()?, used_by(node)))).collect();
        Self { metadata, names, edges }
    }

    fn members(&self) -> impl Iterator<Item = Member<'a>> {
        let members = self.metadata["workspace_members"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let members: BTreeSet<_> = members.collect();
        let packages = self.metadata["packages"].as_array().into_iter().flatten();
        packages.filter_map(move |package| {
            let id = package["id"].as_str().filter(|id| members.contains(id))?;
            let all = package["dependencies"].as_array().into_iter().flatten();
            let used: Vec<_> = all.filter(|dependency| dependency["kind"] != "dev").collect();
            Some(Member {
                id,
                name: package["name"].as_str()?,
                direct: used.iter().map(|dependency| text(&dependency["name"])).collect(),
                always: used.iter().filter(|d| d["optional"] != true).map(|d| text(&d["name"])).collect(),
            })
        })
    }

    /// The names on the way from a package to a crate, when there is a way.
    fn path(&self, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
        let mut seen = BTreeSet::from([from]);
        let mut paths = vec![vec![from]];
        while let Some(path) = paths.pop() {
            let last = path.last()?;
            for next in self.edges.get(last).into_iter().flatten() {
                let mut longer = path.clone();
                longer.push(next);
                if self.names.get(next) == Some(&to) {
                    return Some(longer.iter().filter_map(|id| self.names.get(id).copied()).collect());
                }
                if seen.insert(next) {
                    paths.push(longer);
                }
            }
        }
        None
    }
}

/// The packages that a node uses outside its tests.
fn used_by(node: &Value) -> Vec<&str> {
    let edges = node["deps"].as_array().into_iter().flatten();
    let used = edges.filter(|edge| {
        let mut kinds = edge["dep_kinds"].as_array().into_iter().flatten();
        kinds.any(|kind| kind["kind"] != "dev")
    });
    used.filter_map(|edge| edge["pkg"].as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A workspace of one package of ours with direct dependencies, each of which uses `beneath`.
    fn metadata(package: &str, direct: &[&str], beneath: &[&str]) -> Value {
        let edge = |name: &&str| json!({"pkg": name, "dep_kinds": [{"kind": null}]});
        let dependency = |name: &&str| json!({"name": name, "kind": null, "optional": false});
        let crates = direct.iter().chain(beneath).map(|name| json!({"id": name, "name": name, "dependencies": []}));
        let own = json!({
            "id": package, "name": package, "dependencies": direct.iter().map(dependency).collect::<Vec<_>>(),
        });
        let mut nodes = vec![json!({"id": package, "deps": direct.iter().map(edge).collect::<Vec<_>>()})];
        nodes.extend(
            direct.iter().map(|name| json!({"id": name, "deps": beneath.iter().map(edge).collect::<Vec<_>>()})),
        );
        json!({
            "packages": std::iter::once(own).chain(crates).collect::<Vec<_>>(),
            "workspace_members": [package],
            "resolve": {"nodes": nodes},
        })
    }

    fn messages(metadata: &Value) -> Vec<String> {
        check_host(metadata).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn an_edge_of_the_table_is_allowed() {
        assert_eq!(messages(&metadata("weft-proxy", &["weft-tls", "tonic"], &["hyper"])), Vec::<String>::new());
    }

    #[test]
    fn an_edge_outside_the_table_is_found() {
        assert_eq!(messages(&metadata("weft-proxy", &["weft-k8s-api"], &[])), ["may not use weft-k8s-api"]);
    }

    #[test]
    fn a_forbidden_crate_is_found_through_others() {
        let found = messages(&metadata("weft-proxy", &["weft-tls"], &["kube"]));
        assert_eq!(found, ["reaches kube by weft-proxy -> weft-tls -> kube: the table of dependency edges says never"]);
    }

    #[test]
    fn a_second_crypto_provider_is_found() {
        let found = messages(&metadata("weft-tls", &["rustls"], &["ring"]));
        assert_eq!(found, ["reaches ring by weft-tls -> rustls -> ring: aws-lc-rs is the one crypto provider"]);
    }

    #[test]
    fn a_test_may_use_what_it_likes() {
        let mut metadata = metadata("weft-proxy", &["weft-k8s-api"], &["kube"]);
        metadata["packages"][0]["dependencies"][0]["kind"] = json!("dev");
        metadata["resolve"]["nodes"][0]["deps"][0]["dep_kinds"][0]["kind"] = json!("dev");
        assert_eq!(messages(&metadata), Vec::<String>::new());
    }

    #[test]
    fn an_optional_dependency_must_stay_optional() {
        let mut metadata = metadata("weft-ebpf-abi", &["aya"], &[]);
        assert_eq!(messages(&metadata), ["may use aya only as an optional dependency"]);
        metadata["packages"][0]["dependencies"][0]["optional"] = json!(true);
        assert_eq!(messages(&metadata), Vec::<String>::new());
    }

    #[test]
    fn a_package_without_a_row_is_found() {
        assert_eq!(messages(&metadata("weft-new", &[], &[])).len(), 1);
    }

    #[test]
    fn kernel_programs_use_only_their_own() {
        let of = |name: &str| json!({"packages": [{"dependencies": [{"name": name, "kind": null}]}]});
        assert_eq!(check_ebpf(&of("aya-ebpf")), []);
        assert_eq!(check_ebpf(&of("serde"))[0].message, "may not use serde");
    }
}
