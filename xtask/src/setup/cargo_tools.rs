//! Development tools that cargo builds: pinned, kept in the cache, shared by every checkout, and not optimised.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::{
    command::{self, step},
    workspace,
};

/// A program from crates.io.
#[derive(Debug)]
pub struct Tool {
    name: &'static str,
    version: &'static str,
    /// Purpose, for the message.
    pub(crate) why: &'static str,
}

/// Checks licences, bans, sources and advisories.
pub(crate) const CARGO_DENY: Tool =
    Tool { name: "cargo-deny", version: "0.20.2", why: "checks licences and origins of what we build from" };

/// Lists what programs are built from, as CycloneDX.
pub const CARGO_CYCLONEDX: Tool =
    Tool { name: "cargo-cyclonedx", version: "0.5.9", why: "lists what a release is built from" };

/// The program, if it is built in this version.
///
/// # Errors
/// When there is no cache directory.
pub(crate) fn find(tool: &Tool) -> Result<Option<PathBuf>> {
    let directory = directory()?;
    let program = directory.join("bin").join(tool.name);
    // Cargo's own record of what it has installed there.
    let record = std::fs::read_to_string(directory.join(".crates.toml")).unwrap_or_default();
    let is_there = program.exists() && record.contains(&format!("\"{} {} (", tool.name, tool.version));
    Ok(is_there.then_some(program))
}

/// The program, built if necessary.
///
/// # Errors
/// When it does not build.
pub fn ensure(tool: &Tool) -> Result<PathBuf> {
    if let Some(program) = find(tool)? {
        return Ok(program);
    }
    step(&format!("build {} {}: {} (a minute, once)", tool.name, tool.version, tool.why));
    install(tool.name, tool.version, &[], &[])?;
    find(tool)?.with_context(|| format!("cargo installed {} but not in version {}", tool.name, tool.version))
}

/// Installs a program from crates.io into the cache, with more arguments for cargo and variables of its build.
///
/// # Errors
/// When it does not build.
pub(super) fn install(name: &str, version: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    let directory = directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let mut install = command::cargo();
    install
        .args(["install", name, "--version", version, "--locked", "--force", "--root"])
        .arg(&directory)
        // It runs for seconds: optimising it would take minutes.
        .args(["--debug"])
        .args(arguments)
        .envs([("CARGO_PROFILE_DEV_DEBUG", "0"), ("CARGO_INCREMENTAL", "0")])
        .envs(variables.iter().copied())
        // Our target directory would keep a gigabyte for a tool that is built once.
        .env_remove("CARGO_TARGET_DIR")
        .current_dir(&directory);
    command::run(&mut install)
}

/// Where they are, below `bin`.
pub(super) fn directory() -> Result<PathBuf> {
    Ok(workspace::cache_directory()?.join("tools"))
}
