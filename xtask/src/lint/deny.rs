//! Licences, bans, sources and advisories of all three workspaces' dependencies, checked by cargo-deny.

use std::{fs, path::Path, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    command::{self, step},
    setup::cargo_tools,
    workspace::{Workspace, cargo_home},
};

/// Runs cargo-deny for the workspace, and for those of the kernel programs and of the fuzz targets.
///
/// # Errors
/// When cargo-deny is missing and cannot be built, or when it finds something.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let deny = cargo_tools::ensure(&cargo_tools::CARGO_DENY)?;
    let configuration = workspace.root.join("deny.toml");
    let run = |directory: &Path, options: &[&str], checks: &[&str]| {
        let mut command = Command::new(&deny);
        command.args(["--log-level", "error", "--workspace", "--all-features", "--config"]).arg(&configuration);
        command.args(options).arg("check").args(checks);
        command::run(command.current_dir(directory))
    };
    let mut checks = vec!["bans", "licenses", "sources"];
    let has_advisories = advisories(&deny, workspace)?;
    if has_advisories {
        checks.push("advisories");
    }
    step(&format!("cargo deny: {}", checks.join(", ")));
    for directory in [workspace.root.clone(), workspace.ebpf(), workspace.fuzz()] {
        // Advisories were fetched once above; yanked versions are looked up in the index, which needs the network.
        let offline: &[&str] = if has_advisories { &[] } else { &["--offline"] };
        // Crates for other platforms are checked, too, and no build here has fetched them.
        command::run(command::cargo().args(["fetch", "--locked"]).current_dir(&directory))?;
        run(&directory, offline, &checks).with_context(|| format!("cargo deny in {}", directory.display()))?;
    }
    Ok(())
}

/// Updates the database of advisories, and reports if none is available.
fn advisories(deny: &Path, workspace: &Workspace) -> Result<bool> {
    step("cargo deny: fetch the advisories of https://github.com/RustSec/advisory-db");
    let mut fetch = Command::new(deny);
    fetch.args(["--log-level", "off", "fetch", "db"]).current_dir(&workspace.root);
    let Err(error) = command::output(&mut fetch) else { return Ok(true) };
    let kept = database()?;
    match &kept {
        Some(kept) => step(&format!("cargo deny: not fetched ({error}); advisories as of {}", kept.display())),
        None => step("cargo deny: ADVISORIES ARE NOT CHECKED: the database cannot be fetched and no copy is kept here"),
    }
    Ok(kept.is_some())
}

/// An earlier copy of the database. A failed fetch leaves an empty directory.
fn database() -> Result<Option<PathBuf>> {
    let entries = fs::read_dir(cargo_home()?.join("advisory-dbs")).into_iter().flatten().flatten();
    Ok(entries.map(|entry| entry.path()).find(|path| path.join("crates").is_dir()))
}
