//! Our Rust files as syntax trees, and the mapping of modules to files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::Item;

use crate::workspace::{self, Workspace, text};

/// A file of ours.
pub(crate) struct RustFile {
    /// Relative to the root of the checkout.
    pub(crate) path: PathBuf,
    /// Its content on disk.
    pub(crate) text: String,
    pub(crate) syntax: syn::File,
}

impl RustFile {
    /// Parses a file.
    ///
    /// # Errors
    /// When it is not valid Rust; the compiler's error says more.
    pub(crate) fn parse(path: PathBuf, text: String) -> Result<Self> {
        let syntax = syn::parse_file(&text).with_context(|| format!("parse {}", path.display()))?;
        Ok(Self { path, text, syntax })
    }
}

/// The first file of a library, a program or a test.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    pub(crate) package: String,
    /// Relative to the root of the checkout.
    pub(crate) path: PathBuf,
    /// Whether it is a library or a program, and not a test, an example or a build script.
    pub(crate) is_product: bool,
}

/// The roots of all workspaces.
///
/// # Errors
/// When cargo cannot read the workspace of the kernel programs or of the fuzz targets.
pub(crate) fn roots(workspace: &Workspace) -> Result<Vec<Root>> {
    let ebpf = workspace::metadata(&workspace.ebpf(), &["--no-deps"])?;
    let fuzz = workspace::metadata(&workspace.fuzz(), &["--no-deps"])?;
    let outside = [&ebpf, &fuzz].into_iter().flat_map(|metadata| metadata["packages"].as_array().into_iter().flatten());
    let mut roots = Vec::new();
    for package in workspace.packages().chain(outside) {
        for target in package["targets"].as_array().into_iter().flatten() {
            let path = Path::new(target["src_path"].as_str().unwrap_or_default());
            let kinds = target["kind"].as_array().into_iter().flatten();
            let is_product = kinds.map(text).any(|kind| ["lib", "bin", "proc-macro"].contains(&kind.as_str()));
            if let Ok(path) = path.strip_prefix(&workspace.root) {
                roots.push(Root { package: text(&package["name"]), path: path.to_path_buf(), is_product });
            }
        }
    }
    Ok(roots)
}

/// The modules of a crate, without test modules.
pub(crate) struct Tree<'a> {
    /// Path, file and items of each module.
    pub(crate) modules: Vec<(Vec<String>, &'a RustFile, &'a [Item])>,
}

impl<'a> Tree<'a> {
    /// Follows `mod` from the root.
    pub(crate) fn read(files: &'a [RustFile], root: &Root) -> Self {
        let mut tree = Self { modules: Vec::new() };
        if let Some(file) = files.iter().find(|file| file.path == root.path) {
            let beside = root.path.parent().unwrap_or(Path::new("")).to_path_buf();
            tree.add(files, Vec::new(), file, &file.syntax.items, &beside);
        }
        tree
    }

    /// Adds a module whose own modules are files in `below`.
    fn add(&mut self, files: &'a [RustFile], path: Vec<String>, file: &'a RustFile, items: &'a [Item], below: &Path) {
        self.modules.push((path.clone(), file, items));
        for item in items.iter().filter(|item| !is_test(item)) {
            let Item::Mod(module) = item else { continue };
            let name = module.ident.to_string();
            let mut inner = path.clone();
            inner.push(name.clone());
            let directory = below.join(&name);
            if let Some((_, items)) = &module.content {
                self.add(files, inner, file, items, &directory);
                continue;
            }
            let candidates = candidates(module, &file.path, below);
            if let Some(file) = candidates.iter().find_map(|path| files.iter().find(|file| file.path == *path)) {
                self.add(files, inner, file, &file.syntax.items, &directory);
            }
        }
    }
}

/// Possible paths of the file of `mod name;`; `below` is the directory of its parent's modules.
pub(crate) fn candidates(module: &syn::ItemMod, file: &Path, below: &Path) -> Vec<PathBuf> {
    let named = module.attrs.iter().filter(|attribute| attribute.path().is_ident("path"));
    let named = named.filter_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) => literal(&pair.value),
        _ => None,
    });
    // `#[path = "x.rs"]` is relative to the file.
    let mut found: Vec<_> = named.map(|name| normal(&file.with_file_name(name))).collect();
    let name = module.ident.to_string();
    let name = name.trim_start_matches("r#");
    found.push(below.join(format!("{name}.rs")));
    found.push(below.join(name).join("mod.rs"));
    found
}

/// The text of a string literal.
pub(crate) fn literal(expression: &syn::Expr) -> Option<String> {
    match expression {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// Whether an item is compiled only for tests.
pub(crate) fn is_test(item: &Item) -> bool {
    let attributes = match item {
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Const(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let words = list.tokens.to_string();
            !words.contains("not") && words.split(|c: char| !c.is_alphanumeric()).any(|word| word == "test")
        }
        _ => false,
    })
}

/// The path without `a/..`, as in git.
pub(crate) fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path {
        match part.to_str() {
            Some("..") => drop(normal.pop()),
            Some(".") => {}
            _ => normal.push(part),
        }
    }
    normal
}
