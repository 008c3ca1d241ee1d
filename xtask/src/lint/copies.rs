//! Files that are copies: those of other packages, which do not export them, and templates of several charts, which
//! helm cannot share. Each is unchanged.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::Finding;
use crate::workspace::{self, Workspace, text};

/// Our directory, the package, and the directory in the package.
const COPIES: [(&str, &str, &str); 1] = [("proto/proto/linkerd", "linkerd2-proxy-api", "proto")];
/// The suffix of copied files; others in the directory are ours.
const COPIED: &str = "proto";

/// Templates, and the charts that have them. The first chart's is the original.
const TEMPLATES: [(&str, &[&str]); 2] = [
    ("_common.tpl", &["weft-control-plane", "weft-agent", "weft-viz"]),
    ("_agent.tpl", &["weft-control-plane", "weft-agent"]),
];

/// Compares the copies with the packages of the lock file, and the charts' templates with each other.
///
/// # Errors
/// When cargo does not know a package, or a directory cannot be read.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let metadata = workspace::metadata(&workspace.root, &["--filter-platform", "x86_64-unknown-linux-gnu"])?;
    let mut findings = Vec::new();
    for (copies, package, originals) in COPIES {
        let mut packages = metadata["packages"].as_array().into_iter().flatten();
        let found = packages.find(|known| known["name"] == package).with_context(|| format!("no package {package}"))?;
        let manifest = PathBuf::from(text(&found["manifest_path"]));
        let package = manifest.parent().context("a manifest has a directory")?;
        findings.extend(compare(&workspace.root, copies, &package.join(originals))?);
    }
    for (template, charts) in TEMPLATES {
        findings.extend(compare_templates(&workspace.root.join("charts"), template, charts));
    }
    Ok(findings)
}

fn compare_templates(charts: &Path, template: &str, names: &[&str]) -> Vec<Finding> {
    let read = |chart: &str| fs::read(charts.join(chart).join("templates").join(template)).ok();
    let original = read(names[0]);
    let differ = names[1..].iter().filter(|chart| read(chart) != original || original.is_none());
    let finding = |chart: &&str| Finding {
        subject: format!("charts/{chart}/templates/{template}"),
        line: None,
        message: format!("differs from the one of {}: copy the one that is right", names[0]),
    };
    differ.map(finding).collect()
}

fn compare(root: &Path, copies: &str, originals: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for entry in fs::read_dir(root.join(copies)).with_context(|| format!("list {copies}"))? {
        let copy = entry?.path();
        let Some(name) = copy.file_name().filter(|_| copy.extension().is_some_and(|it| it == COPIED)) else { continue };
        let original = originals.join(name);
        if fs::read(&copy).ok() != fs::read(&original).ok() {
            findings.push(Finding {
                subject: format!("{copies}/{}", name.display()),
                line: None,
                message: format!("is not a copy of {}", original.display()),
            });
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_differs_or_has_no_original_is_found() {
        let root = std::env::temp_dir().join(format!("weft-copies-{}", std::process::id()));
        let (ours, theirs) = (root.join("ours"), root.join("theirs"));
        for directory in [&ours, &theirs] {
            fs::create_dir_all(directory).unwrap();
        }
        for (file, text) in [("same.proto", "a"), ("other.proto", "a"), ("gone.proto", "a"), ("README.md", "ours")] {
            fs::write(ours.join(file), text).unwrap();
        }
        for (file, text) in [("same.proto", "a"), ("other.proto", "b"), ("more.proto", "a")] {
            fs::write(theirs.join(file), text).unwrap();
        }
        let mut found: Vec<_> = compare(&root, "ours", &theirs).unwrap().into_iter().map(|it| it.subject).collect();
        found.sort();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, ["ours/gone.proto", "ours/other.proto"]);
    }

    #[test]
    fn a_template_that_differs_between_charts_is_found() {
        let root = std::env::temp_dir().join(format!("weft-templates-{}", std::process::id()));
        for (chart, text) in [("one", "a"), ("two", "a"), ("three", "b")] {
            let templates = root.join(chart).join("templates");
            fs::create_dir_all(&templates).unwrap();
            fs::write(templates.join("_common.tpl"), text).unwrap();
        }
        let found = compare_templates(&root, "_common.tpl", &["one", "two", "three", "four"]);
        fs::remove_dir_all(&root).unwrap();
        let found: Vec<_> = found.into_iter().map(|finding| finding.subject).collect();
        assert_eq!(found, ["charts/three/templates/_common.tpl", "charts/four/templates/_common.tpl"]);
    }
}
