//! Finds `.rs` files that no target includes, which compile nowhere and whose tests never run.
//!
//! `mod x;` declarations are followed from the files that cargo names. Every possible path of `x` counts as reached,
//! so a file is never reported by mistake; the compiler reports missing files.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use syn::visit::{self, Visit};

use super::{
    Finding,
    rust::{Root, RustFile, candidates, normal},
};

/// The files that cannot be reached from the roots.
pub(crate) fn check(files: &[RustFile], roots: &[Root]) -> Vec<Finding> {
    let mut reached: BTreeSet<PathBuf> = BTreeSet::new();
    let mut open: Vec<(PathBuf, bool)> = roots.iter().map(|root| (root.path.clone(), true)).collect();
    while let Some((path, is_root)) = open.pop() {
        let Some(file) = files.iter().find(|file| file.path == path) else {
            continue;
        };
        if reached.insert(path.clone()) {
            open.extend(submodules(file, is_root).into_iter().map(|path| (path, false)));
        }
    }
    let unreached = files.iter().filter(|file| !reached.contains(&file.path));
    unreached
        .map(|file| Finding {
            subject: file.path.display().to_string(),
            line: None,
            message: "no target includes this file: declare it with `mod` or remove it".to_owned(),
        })
        .collect()
}

/// Possible paths of the files that a file includes.
fn submodules(file: &RustFile, is_root: bool) -> Vec<PathBuf> {
    let beside = file.path.parent().unwrap_or(Path::new(""));
    // `foo.rs` has its modules in `foo/`; a root has them beside itself.
    let below = if is_root { beside.to_path_buf() } else { file.path.with_extension("") };
    let mut visitor = Visitor { file: &file.path, below, found: Vec::new() };
    visitor.visit_file(&file.syntax);
    visitor.found
}

struct Visitor<'a> {
    file: &'a Path,
    below: PathBuf,
    found: Vec<PathBuf>,
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.content.is_none() {
            self.found.extend(candidates(module, self.file, &self.below));
            return;
        }
        let below = self.below.join(module.ident.to_string());
        let outer = std::mem::replace(&mut self.below, below);
        visit::visit_item_mod(self, module);
        self.below = outer;
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if call.path.is_ident("include")
            && let Ok(name) = call.parse_body::<syn::LitStr>()
        {
            self.found.push(normal(&self.file.with_file_name(name.value())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orphans(files: &[(&str, &str)], roots: &[&str]) -> Vec<String> {
        let files: Vec<_> =
            files.iter().map(|(path, text)| RustFile::parse(path.into(), text.to_string()).expect(path)).collect();
        let root = |path: &&str| Root { package: "a".to_owned(), path: path.into(), is_product: true };
        check(&files, &roots.iter().map(root).collect::<Vec<_>>()).into_iter().map(|finding| finding.subject).collect()
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
