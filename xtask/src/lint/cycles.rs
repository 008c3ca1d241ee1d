//! Modules of one crate that use each other: such a group can be neither read, tested nor moved on its own.
//!
//! The check concerns modules under one parent. A module uses the modules in its paths from `crate`, `self` and
//! `super`, in `use` and elsewhere, through re-exports; an edge between two modules counts for their ancestors that
//! are siblings. A parent and its descendants may use each other. Tests may use anything.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::{
    Finding,
    rust::{Root, RustFile, Tree, is_test},
};

/// The absolute path of a module in its crate.
type Path = Vec<String>;

/// Checks every library and program.
pub(crate) fn check(files: &[RustFile], roots: &[Root]) -> Vec<Finding> {
    roots.iter().filter(|root| root.is_product).flat_map(|root| check_crate(files, root)).collect()
}

fn check_crate(files: &[RustFile], root: &Root) -> Vec<Finding> {
    let modules = Modules::read(files, root);
    let mut findings = Vec::new();
    for (parent, edges) in modules.sibling_edges() {
        for group in circles(&edges) {
            let parent = if parent.is_empty() { "crate".to_owned() } else { parent.join("::") };
            let inside = edges.iter().filter(|((from, to), _)| group.contains(from) && group.contains(to));
            let shown: Vec<_> = inside.map(|((from, to), place)| format!("{from} -> {to} ({place})")).collect();
            findings.push(Finding {
                subject: root.package.clone(),
                line: None,
                message: format!("modules of {parent} use each other in a circle: {}", shown.join(", ")),
            });
        }
    }
    findings
}

/// Edges between siblings, each with the first place that causes it.
type Edges = BTreeMap<(String, String), String>;

/// The modules of a crate, without test modules.
#[derive(Debug, Default)]
struct Modules {
    known: BTreeSet<Path>,
    /// Names that a module imports or renames.
    imports: BTreeMap<(Path, String), Path>,
    uses: Vec<Use>,
}

#[derive(Debug)]
struct Use {
    by: Path,
    what: Path,
    place: String,
}

impl Modules {
    fn read(files: &[RustFile], root: &Root) -> Self {
        let mut modules = Self::default();
        for (path, file, items) in Tree::read(files, root).modules {
            modules.known.insert(path.clone());
            let mut visitor = Visitor { modules: &mut modules, module: path, file };
            for item in items {
                visitor.visit_item(item);
            }
        }
        modules
    }

    fn sibling_edges(&self) -> BTreeMap<Path, Edges> {
        let mut by_parent: BTreeMap<Path, Edges> = BTreeMap::new();
        for Use { by, what, place } in &self.uses {
            let used = self.resolve(what, 0);
            let common = by.iter().zip(&used).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (by.get(common), used.get(common)) else { continue };
            let edges = by_parent.entry(by[..common].to_vec()).or_default();
            edges.entry((from.clone(), to.clone())).or_insert_with(|| place.clone());
        }
        by_parent
    }

    /// The module that defines the last part of a path.
    fn resolve(&self, path: &[String], depth: usize) -> Path {
        let mut module = Path::new();
        for (index, part) in path.iter().enumerate() {
            let mut next = module.clone();
            next.push(part.clone());
            if self.known.contains(&next) {
                module = next;
                continue;
            }
            // A longer chain of re-exports is a cycle of names.
            if depth < 8
                && let Some(origin) = self.imports.get(&(module.clone(), part.clone()))
            {
                let rest = origin.iter().chain(&path[index + 1..]).cloned().collect::<Path>();
                return self.resolve(&rest, depth + 1);
            }
            break;
        }
        module
    }
}

/// Collects the modules that one module uses.
struct Visitor<'a> {
    modules: &'a mut Modules,
    module: Path,
    file: &'a RustFile,
}

impl Visitor<'_> {
    /// Makes a path absolute; `None` if it does not start with `crate`, `self` or `super`.
    fn absolute(&self, path: &[String]) -> Option<Path> {
        let mut absolute = match path.first()?.as_str() {
            "crate" => return Some(path[1..].to_vec()),
            "self" | "super" => self.module.clone(),
            _ => return None,
        };
        for part in path {
            match part.as_str() {
                "self" => {}
                "super" => drop(absolute.pop()),
                name => absolute.push(name.to_owned()),
            }
        }
        Some(absolute)
    }

    fn note(&mut self, path: &[String], at: &Ident) {
        if let Some(what) = self.absolute(path) {
            let place = format!("{}:{}", self.file.path.display(), at.span().start().line);
            self.modules.uses.push(Use { by: self.module.clone(), what, place });
        }
    }

    fn import(&mut self, mut prefix: Path, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.import(prefix, &path.tree);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.import(prefix.clone(), item)),
            syn::UseTree::Name(name) => self.imported(prefix, &name.ident, &name.ident),
            syn::UseTree::Rename(rename) => self.imported(prefix, &rename.ident, &rename.rename),
            syn::UseTree::Glob(glob) => {
                let star = Ident::new("all", glob.star_token.spans[0]);
                self.note(&prefix, &star);
            }
        }
    }

    fn imported(&mut self, mut path: Path, name: &Ident, alias: &Ident) {
        // `use a::{self}` imports `a`.
        let alias = if name == "self" { path.last().cloned() } else { Some(alias.to_string()) };
        if name != "self" {
            path.push(name.to_string());
        }
        self.note(&path, name);
        // A path that starts with a name belongs to a child or to another crate; only the former resolves.
        let mut relative = self.module.clone();
        relative.extend(path.iter().cloned());
        let origin = self.absolute(&path).unwrap_or(relative);
        if let Some(alias) = alias {
            self.modules.imports.insert((self.module.clone(), alias), origin);
        }
    }

    /// Arguments of a macro are not parsed: paths in them are found by their first word.
    fn tokens(&mut self, tokens: TokenStream) {
        let trees: Vec<_> = tokens.into_iter().collect();
        for (index, tree) in trees.iter().enumerate() {
            match tree {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) if first == "crate" || first == "super" => {
                    let words = trees[index..].iter().map_while(|tree| match tree {
                        TokenTree::Ident(word) => Some(Some(word.to_string())),
                        TokenTree::Punct(colon) if colon.as_char() == ':' => Some(None),
                        _ => None,
                    });
                    let path: Path = words.flatten().collect();
                    self.note(&path, first);
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        // Modules are visited separately.
        if !is_test(item) && !matches!(item, syn::Item::Mod(_)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(Path::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Path = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if let Some(first) = path.segments.first().filter(|_| parts.len() > 1) {
            self.note(&parts, &first.ident);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

/// The groups of names that reach each other.
fn circles(edges: &Edges) -> Vec<BTreeSet<String>> {
    let mut reached: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, _) in edges.keys() {
        let mut open = vec![from.as_str()];
        let mut seen = BTreeSet::new();
        while let Some(name) = open.pop() {
            let next = edges.keys().filter(|(from, _)| from == name).map(|(_, to)| to.as_str());
            open.extend(next.filter(|to| seen.insert(*to)));
        }
        reached.insert(from, seen);
    }
    let reaches = |a: &str, b: &str| reached.get(a).is_some_and(|seen| seen.contains(b));
    let in_circle = reached.keys().filter(|name| reaches(name, name));
    let groups = in_circle.map(|name| {
        let others = reached.keys().filter(|other| reaches(name, other) && reaches(other, name));
        others.map(|other| (*other).to_owned()).collect::<BTreeSet<String>>()
    });
    groups.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_in(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> =
            files.iter().map(|(path, text)| RustFile::parse(path.into(), text.to_string()).expect(path)).collect();
        let root = Root { package: "p".to_owned(), path: "src/lib.rs".into(), is_product: true };
        check(&files, &[root]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn siblings_that_use_each_other_are_found_with_the_places() {
        let found = circles_in(&[
            ("src/lib.rs", "mod a;\nmod b;\nmod c;"),
            ("src/a.rs", "use crate::{c::C, b::B};"),
            ("src/b.rs", "\nfn f() -> super::a::A { todo!() }"),
            ("src/c.rs", ""),
        ]);
        assert_eq!(found, ["p: modules of crate use each other in a circle: a -> b (src/a.rs:1), b -> a (src/b.rs:2)"]);
    }

    #[test]
    fn a_circle_may_have_more_than_two_members_and_lie_deeper() {
        let found = circles_in(&[
            ("src/lib.rs", "mod x { mod a; mod b; mod c; }"),
            ("src/x/a.rs", "use super::b::B;"),
            ("src/x/b.rs", "mod inner { fn f() { g!(crate::x::c::f()) } }"),
            ("src/x/c.rs", "use crate::x::a;"),
        ]);
        assert_eq!(found.len(), 1);
        for edge in ["modules of x", "a -> b", "b -> c", "c -> a"] {
            assert!(found[0].contains(edge), "{edge}: {found:?}");
        }
    }

    #[test]
    fn a_re_export_hides_nothing() {
        let found = circles_in(&[
            ("src/lib.rs", "mod a;\nmod b;\npub use a::A as Renamed;"),
            ("src/a.rs", "use crate::b;"),
            ("src/b.rs", "use crate::Renamed;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn parents_tests_and_one_way_use_are_no_circle() {
        let found = circles_in(&[
            ("src/lib.rs", "mod a;\nmod b;\nuse a::A;"),
            ("src/a.rs", "use crate::b::B;\nuse super::X;\nmod below;"),
            ("src/a/below.rs", "use super::A;\nuse crate::a::other;"),
            ("src/b.rs", "#[cfg(test)]\nmod tests { use crate::a::A; }\n#[cfg(test)]\nuse crate::a::A;"),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }
}
