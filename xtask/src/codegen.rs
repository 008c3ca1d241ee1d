//! `cargo xtask codegen`: files that are generated from code and kept in the repository.
//!
//! The example `crds` of `k8s-api` generates the custom resource definitions in charts/weft-crds from its types.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{
    build::PRODUCT,
    command::{self, step},
    workspace::Workspace,
};

/// Directory of the definitions.
const DEFINITIONS: &str = "charts/weft-crds/templates";
/// Suffix of generated files; other files in the directory are written by hand.
const GENERATED: &str = ".linkerd.io.yaml";

/// Generates files.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail when a file is not current
    #[arg(long)]
    check: bool,
}

/// Writes the files, or compares them.
///
/// # Errors
/// When k8s-api does not compile or a file cannot be written; with `--check`, when one is not current.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let generated = definitions(&workspace)?;
    let directory = workspace.root.join(DEFINITIONS);
    let kept = read(&directory)?;
    let stale: Vec<_> = kept.keys().filter(|name| !generated.contains_key(*name)).collect();
    let changed: Vec<_> = generated.iter().filter(|(name, text)| kept.get(*name) != Some(*text)).collect();
    if args.check {
        let names: Vec<_> = changed.iter().map(|(name, _)| *name).chain(stale).cloned().collect();
        if names.is_empty() {
            return Ok(());
        }
        bail!("{DEFINITIONS}: not current: {}; run `cargo xtask codegen`", names.join(", "));
    }
    for (name, text) in changed {
        eprintln!("    {name}");
        fs::write(directory.join(name), text).with_context(|| format!("write {DEFINITIONS}/{name}"))?;
    }
    for name in stale {
        eprintln!("    {name}: removed");
        fs::remove_file(directory.join(name)).with_context(|| format!("remove {DEFINITIONS}/{name}"))?;
    }
    Ok(())
}

/// The definitions' files, generated from the current types.
fn definitions(workspace: &Workspace) -> Result<BTreeMap<String, String>> {
    step("generate the custom resource definitions");
    let mut cargo = command::cargo();
    command::run(cargo.current_dir(&workspace.root).arg("build").args(PRODUCT).args(["--example", "crds"]))?;
    let directory: PathBuf = workspace.target.join("xtask").join(format!("crds-{}", std::process::id()));
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let example = workspace.binaries("debug").join("examples/crds");
    let made = command::run(std::process::Command::new(example).arg(&directory)).and_then(|()| read(&directory));
    let _ = fs::remove_dir_all(&directory);
    made
}

fn read(directory: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(GENERATED))
        else {
            continue;
        };
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        files.insert(name.to_owned(), text);
    }
    Ok(files)
}
