//! Who may use whom: the table of ARCHITECTURE.md, checked against cargo's own view.
//!
//! Two questions: does a package name one of ours that it may not know, and does a crate that it must never use reach
//! it, directly or through others. Development dependencies are free: tests may use what they like.

use anyhow::Result;
use serde_json::Value;

use super::Finding;
use crate::{
    command,
    workspace::{self, Workspace, text},
};

/// One row of the table.
struct Row {
    package: &'static str,
    /// Those of our packages that it may use.
    ours: &'static [&'static str],
    /// Crates that must not reach it.
    never: &'static [&'static str],
}

const TABLE: [Row; 21] = [
    // aya only behind a feature: `OPTIONAL`.
    Row { package: "weft-ebpf-abi", ours: &[], never: &[] },
    Row { package: "weft-proto", ours: &[], never: &["kube", "aya"] },
    Row { package: "weft-k8s-api", ours: &[], never: &["tonic", "aya"] },
    // The state of the control plane knows Kubernetes' types, and neither gRPC nor watches.
    Row { package: "weft-index", ours: &["weft-k8s-api"], never: &["tonic", "aya"] },
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
        ours: &["weft-index", "weft-proto", "weft-k8s-api", "weft-runtime", "weft-tls"],
        never: &["aya", "weft-agent", "weft-proxy"],
    },
    Row {
        package: "weft-sandbox",
        ours: &["weft-k8s-api", "weft-proto", "weft-tls"],
        never: &["aya", "weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-cli",
        ours: &["weft-k8s-api", "weft-proto", "weft-sandbox", "weft-tls", "weft-viz-core"],
        never: &["aya"],
    },
    Row {
        package: "weft-viz",
        ours: &["weft-k8s-api", "weft-proto", "weft-runtime", "weft-viz-core"],
        never: &["aya", "weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row { package: "weft-viz-core", ours: &["weft-proto"], never: &["kube", "aya"] },
    Row { package: "weft-examples", ours: &[], never: &["kube", "aya"] },
    Row {
        package: "weft-passthrough",
        ours: &["weft-examples"],
        never: &["kube", "aya", "weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-test-kit",
        ours: &["weft-ebpf-abi", "weft-examples", "weft-proto", "weft-sandbox"],
        never: &["weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-bench",
        ours: &[
            "weft-ebpf-abi",
            "weft-examples",
            "weft-passthrough",
            "weft-proto",
            "weft-sandbox",
            "weft-test-kit",
            "weft-tls",
        ],
        never: &["weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-demo",
        ours: &["weft-examples", "weft-proto", "weft-test-kit"],
        never: &["weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row {
        package: "weft-tests",
        ours: &["weft-examples", "weft-test-kit"],
        never: &["weft-agent", "weft-proxy", "weft-control-plane"],
    },
    Row { package: "weft-xtask", ours: &[], never: &["tokio"] },
    Row { package: "weft-lab", ours: &["weft-xtask"], never: &["tokio"] },
];

/// Crates that a package may only have behind a feature.
const OPTIONAL: [(&str, &str); 1] = [("weft-ebpf-abi", "aya")];

/// Packages whose callers can tell every failure apart, so that none is an `anyhow::Error`.
const TYPED_ERRORS: [&str; 5] = ["weft-ebpf-abi", "weft-proto", "weft-k8s-api", "weft-tls", "weft-sandbox"];

/// All that the kernel programs may use.
const EBPF: [&str; 3] = ["weft-ebpf-abi", "aya-ebpf", "aya-log-ebpf"];

/// Those of our packages that fuzz targets may use.
const FUZZ: [&str; 6] = ["weft-control-plane", "weft-index", "weft-k8s-api", "weft-proxy", "weft-tls", "weft-viz-core"];

/// Crates that nothing of ours may contain, with the reason.
const BANNED: [(&str, &str); 4] = [
    ("ring", "aws-lc-rs is the one crypto provider"),
    ("openssl-sys", "rustls does TLS"),
    ("native-tls", "rustls does TLS"),
    ("serde_yaml", "serde_yaml_ng is the one YAML reader"),
];

/// Asks cargo for all workspaces and checks them.
///
/// # Errors
/// When cargo cannot resolve a workspace.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for package in workspace.packages() {
        findings.extend(check_package(package, &tree(workspace, &text(&package["name"]))?));
    }
    findings.extend(check_ebpf(&workspace::metadata(&workspace.ebpf(), &["--no-deps"])?));
    findings.extend(check_fuzz(&workspace::metadata(&workspace.fuzz(), &["--no-deps"])?));
    Ok(findings)
}

/// What a package is built from, one crate per line after its depth. `cargo metadata` would name crates that only
/// stand in the lock file because an optional feature could want them.
fn tree(workspace: &Workspace, package: &str) -> Result<String> {
    let mut cargo = command::cargo();
    cargo.args(["tree", "--package", package, "--edges", "normal,build", "--prefix", "depth", "--format", " {p}"]);
    command::output(cargo.args(["--target", "x86_64-unknown-linux-gnu"]).current_dir(&workspace.root))
}

fn check_package(package: &Value, tree: &str) -> Vec<Finding> {
    let name = text(&package["name"]);
    let Some(row) = TABLE.iter().find(|row| row.package == name) else {
        return vec![finding(&name, "has no row in the table of dependency edges (xtask/src/lint/edges.rs)")];
    };
    let mut findings = Vec::new();
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    for dependency in dependencies.filter(|dependency| dependency["kind"] != "dev") {
        let used = text(&dependency["name"]);
        if used.starts_with("weft-") && !row.ours.contains(&used.as_str()) {
            findings.push(finding(&name, format!("may not use {used}")));
        }
        if used == "anyhow" && TYPED_ERRORS.contains(&row.package) {
            findings.push(finding(&name, "may not use anyhow: its callers get enums"));
        }
        if OPTIONAL.contains(&(row.package, &used)) && dependency["optional"] != true {
            findings.push(finding(&name, format!("may use {used} only as an optional dependency")));
        }
    }
    let never = row.never.iter().map(|name| (*name, "the table of dependency edges says never"));
    for (unwanted, reason) in never.chain(BANNED) {
        if let Some(path) = path(tree, unwanted) {
            findings.push(finding(&name, format!("reaches {unwanted} by {}: {reason}", path.join(" -> "))));
        }
    }
    findings
}

/// The names on the way from the root of a tree to a crate, when it is in it.
fn path<'a>(tree: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut path = Vec::new();
    for line in tree.lines() {
        let (depth, rest) = line.split_once(' ')?;
        let name = rest.split_whitespace().next()?;
        path.truncate(depth.parse().ok()?);
        path.push(name);
        if name == to {
            return Some(path);
        }
    }
    None
}

fn check_ebpf(metadata: &Value) -> Vec<Finding> {
    direct(metadata)
        .filter(|name| !EBPF.contains(&name.as_str()))
        .map(|name| finding("weft-ebpf", format!("may not use {name}")))
        .collect()
}

fn check_fuzz(metadata: &Value) -> Vec<Finding> {
    direct(metadata)
        .filter(|name| name.starts_with("weft-") && !FUZZ.contains(&name.as_str()))
        .map(|name| finding("weft-fuzz", format!("may not use {name}")))
        .collect()
}

/// The dependencies that a workspace of its own names, but for those of its tests.
fn direct(metadata: &Value) -> impl Iterator<Item = String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let direct = packages.flat_map(|package| package["dependencies"].as_array().into_iter().flatten());
    direct.filter(|dependency| dependency["kind"].is_null()).map(|dependency| text(&dependency["name"]))
}

fn finding(subject: &str, message: impl Into<String>) -> Finding {
    Finding { subject: subject.to_owned(), line: None, message: message.into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A package with these dependencies, of which `tree` is the whole tree.
    fn messages(package: &str, dependencies: &[Value], tree: &str) -> Vec<String> {
        let package = json!({"name": package, "dependencies": dependencies});
        check_package(&package, tree).into_iter().map(|finding| finding.message).collect()
    }

    fn uses(name: &str) -> Value {
        json!({"name": name, "kind": null, "optional": false})
    }

    #[test]
    fn an_edge_of_the_table_is_allowed() {
        let tree = "0 weft-proxy v0.1.0\n1 weft-tls v0.1.0\n2 rustls v0.23.46\n1 tonic v0.14.9\n";
        assert_eq!(messages("weft-proxy", &[uses("weft-tls"), uses("tonic")], tree), Vec::<String>::new());
    }

    #[test]
    fn an_edge_outside_the_table_is_found() {
        assert_eq!(messages("weft-proxy", &[uses("weft-k8s-api")], "0 weft-proxy\n"), ["may not use weft-k8s-api"]);
    }

    #[test]
    fn a_forbidden_crate_is_found_through_others() {
        let tree = "0 weft-proxy v0.1.0\n1 tonic v0.14.9\n2 hyper v1.12.0\n1 weft-tls v0.1.0\n2 kube v5.0.0\n";
        let found = messages("weft-proxy", &[uses("weft-tls")], tree);
        assert_eq!(found, ["reaches kube by weft-proxy -> weft-tls -> kube: the table of dependency edges says never"]);
    }

    #[test]
    fn a_second_crypto_provider_is_found() {
        let found = messages("weft-tls", &[], "0 weft-tls v0.1.0\n1 rustls v0.23.46\n2 ring v0.17.14\n");
        assert_eq!(found, ["reaches ring by weft-tls -> rustls -> ring: aws-lc-rs is the one crypto provider"]);
    }

    #[test]
    fn a_test_may_use_what_it_likes() {
        let for_tests = json!({"name": "weft-k8s-api", "kind": "dev", "optional": false});
        assert_eq!(messages("weft-proxy", &[for_tests], "0 weft-proxy v0.1.0\n"), Vec::<String>::new());
    }

    #[test]
    fn an_optional_dependency_must_stay_optional() {
        let tree = "0 weft-ebpf-abi v0.1.0\n";
        let found = messages("weft-ebpf-abi", &[uses("aya")], tree);
        assert_eq!(found, ["may use aya only as an optional dependency"]);
        let optional = json!({"name": "aya", "kind": null, "optional": true});
        assert_eq!(messages("weft-ebpf-abi", &[optional], tree), Vec::<String>::new());
    }

    #[test]
    fn a_library_has_errors_of_its_own() {
        let tree = "0 weft-tls v0.1.0\n";
        assert_eq!(messages("weft-tls", &[uses("anyhow")], tree), ["may not use anyhow: its callers get enums"]);
        assert_eq!(messages("weft-proxy", &[uses("anyhow")], tree), Vec::<String>::new());
    }

    #[test]
    fn a_package_without_a_row_is_found() {
        assert_eq!(messages("weft-new", &[], "0 weft-new v0.1.0\n").len(), 1);
    }

    #[test]
    fn kernel_programs_use_only_their_own() {
        let of = |name: &str| json!({"packages": [{"dependencies": [{"name": name, "kind": null}]}]});
        assert_eq!(check_ebpf(&of("aya-ebpf")), []);
        assert_eq!(check_ebpf(&of("serde"))[0].message, "may not use serde");
    }

    #[test]
    fn fuzz_targets_use_only_what_they_call() {
        let of = |name: &str| json!({"packages": [{"dependencies": [{"name": name, "kind": null}]}]});
        assert_eq!(check_fuzz(&of("weft-control-plane")), []);
        assert_eq!(check_fuzz(&of("libfuzzer-sys")), []);
        assert_eq!(check_fuzz(&of("weft-agent"))[0].message, "may not use weft-agent");
    }
}
