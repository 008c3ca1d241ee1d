//! Finds `.rs` files that no target includes, which compile nowhere and whose tests never run.
//!
//! Starting from the files that cargo names, `mod x;` declarations are followed. Every place where `x` may be is taken
//! as reached, so a file is never reported by mistake; a missing file is the compiler's to report.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{Finding, Source, lexer::code_only};
use crate::workspace::{self, Workspace};

/// The root files of all targets, relative to the checkout.
///
/// # Errors
/// When cargo cannot read the workspace of the kernel programs.
pub(crate) fn roots(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let ebpf = workspace::metadata(&workspace.ebpf(), &["--no-deps"])?;
    let packages = workspace.packages().chain(ebpf["packages"].as_array().into_iter().flatten());
    let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let paths = targets.filter_map(|target| target["src_path"].as_str());
    Ok(paths.filter_map(|path| Path::new(path).strip_prefix(&workspace.root).ok()).map(Path::to_path_buf).collect())
}

/// The sources that cannot be reached from the roots.
pub(crate) fn check(sources: &[Source], roots: &[PathBuf]) -> Vec<Finding> {
    let by_path: BTreeMap<&Path, &Source> = sources.iter().map(|source| (source.path.as_path(), source)).collect();
    let mut reached: BTreeSet<PathBuf> = BTreeSet::new();
    let mut open: Vec<(PathBuf, bool)> = roots.iter().map(|root| (root.clone(), true)).collect();
    while let Some((path, is_root)) = open.pop() {
        let Some(source) = by_path.get(path.as_path()) else {
            continue;
        };
        if reached.insert(path.clone()) {
            open.extend(submodules(source, is_root).into_iter().map(|path| (path, false)));
        }
    }
    let unreached = sources.iter().filter(|source| !reached.contains(&source.path));
    unreached
        .map(|source| Finding {
            subject: source.path.display().to_string(),
            line: None,
            message: "no target includes this file: declare it with `mod` or remove it".to_owned(),
        })
        .collect()
}

/// Where the modules that a file declares may be.
fn submodules(source: &Source, is_root: bool) -> Vec<PathBuf> {
    let beside = source.path.parent().unwrap_or(Path::new(""));
    // `foo.rs` has its modules in `foo/`; a root has them beside itself.
    let own = if is_root { beside.to_path_buf() } else { source.path.with_extension("") };
    let mut found = Vec::new();
    for name in declared(&source.text) {
        found.push(own.join(format!("{name}.rs")));
        found.push(own.join(&name).join("mod.rs"));
    }
    // `#[path = "x.rs"]` and `include!("x.rs")` are relative to the file itself.
    let named = ["#[path = \"", "include!(\""].iter().flat_map(|start| source.text.split(start).skip(1));
    found.extend(named.filter_map(|rest| rest.split('"').next()).map(|name| normal(&beside.join(name))));
    found
}

/// The names in `mod name;`.
fn declared(text: &str) -> Vec<String> {
    let code = code_only(text);
    let words: Vec<&str> = code.split_whitespace().collect();
    let pairs = words.windows(2).filter(|pair| pair[0] == "mod");
    pairs.filter_map(|pair| pair[1].strip_suffix(';')).map(|name| name.trim_start_matches("r#").to_owned()).collect()
}

/// The path without `a/..`, as git writes it.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path {
        if part == ".." {
            normal.pop();
        } else {
            normal.push(part);
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orphans(files: &[(&str, &str)], roots: &[&str]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| Source { path: path.into(), text: (*text).to_owned() };
        let sources: Vec<_> = files.iter().map(file).collect();
        let roots: Vec<_> = roots.iter().map(PathBuf::from).collect();
        check(&sources, &roots).into_iter().map(|finding| finding.subject).collect()
    }

    #[test]
    fn follows_declarations_downwards() {
        let files = [
            ("a/src/lib.rs", "pub mod one;\n#[cfg(test)]\nmod tests;"),
            ("a/src/one.rs", "pub(crate) mod two;"),
            ("a/src/one/two.rs", ""),
            ("a/src/tests.rs", "#[path = \"../shared/three.rs\"]\nmod three;"),
            ("a/shared/three.rs", ""),
        ];
        assert_eq!(orphans(&files, &["a/src/lib.rs"]), Vec::<String>::new());
    }

    #[test]
    fn finds_what_nobody_declares() {
        let files = [
            ("a/src/lib.rs", "// mod commented;\nmod inline { }\n"),
            ("a/src/commented.rs", ""),
            ("a/src/inline.rs", ""),
            ("a/tests/level/server.rs", ""),
        ];
        assert_eq!(
            orphans(&files, &["a/src/lib.rs"]),
            ["a/src/commented.rs", "a/src/inline.rs", "a/tests/level/server.rs"]
        );
    }
}
