//! Builds our binaries, always with the same selection of packages.
//!
//! Cargo unifies the features of dependencies over the packages that it builds. Building the whole workspace each time
//! keeps one set of features, and so one build of every dependency. Tests add features that no binary needs (tokio's
//! clock that can be paused), so binaries for the tests are built together with the tests: [`tests`].

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{
    command::{self, step},
    setup::packages,
    workspace::Workspace,
};

/// Gives the proxy and the control plane the allocator that users get. Debug builds spare themselves the minute that
/// compiling it takes.
pub const ALLOCATOR: [&str; 2] = ["--features", "weft-proxy/jemalloc,weft-control-plane/jemalloc"];

/// Selects every package but this program and the lab: one selection for all builds keeps the features of dependencies.
pub(crate) const PRODUCT: [&str; 5] = ["--workspace", "--exclude", "weft-xtask", "--exclude", "weft-lab"];

/// The profile of the proxy that is measured, `dist` with symbols, and the name of its directory.
const MEASURED: &str = "measured";
const PROXY: &str = "weft-proxy";

/// Build profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// For the demo and the tests
    Dev,
    /// For measurements
    Release,
    /// For users: small and fast programs, slow to build
    Dist,
}

impl Profile {
    /// Cargo's name of the output directory.
    pub fn directory(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
            Self::Dist => "dist",
        }
    }
}

/// Builds every binary of the workspace and returns their directory.
///
/// # Errors
/// When something does not compile.
pub fn binaries(workspace: &Workspace, profile: Profile) -> Result<PathBuf> {
    step("build the binaries");
    let mut cargo = command::cargo();
    cargo.current_dir(&workspace.root).arg("build").args(PRODUCT).arg("--bins");
    match profile {
        Profile::Dev => &mut cargo,
        Profile::Release => cargo.arg("--release").args(ALLOCATOR),
        Profile::Dist => cargo.args(["--profile", "dist"]).args(ALLOCATOR),
    };
    if profile == Profile::Dist {
        // Shown by the proxy's metric proxy_build_info and by `weft version`; empty outside a repository, such as in an
        // unpacked archive.
        let commit = command::output(Command::new("git").current_dir(&workspace.root).args(["rev-parse", "HEAD"]));
        cargo.env("WEFT_GIT_SHA", commit.unwrap_or_default().trim());
    }
    if profile != Profile::Dev {
        packages::ensure(&packages::ALLOCATOR)?;
    }
    command::run(&mut cargo)?;
    Ok(workspace.binaries(profile.directory()))
}

/// Builds what `bench proxy` compares, and returns its directory: the proxy as users get it, with its symbols for
/// profiles, beside a release build of every other binary.
///
/// # Errors
/// When something does not compile, or the directory cannot be written.
pub(crate) fn measured(workspace: &Workspace) -> Result<PathBuf> {
    let release = binaries(workspace, Profile::Release)?;
    step("build the proxy as users get it");
    let mut cargo = command::cargo();
    cargo.current_dir(&workspace.root).arg("build").args(PRODUCT).args(["--profile", MEASURED, "--bin", PROXY]);
    command::run(cargo.args(ALLOCATOR))?;
    let measured = workspace.binaries(MEASURED);
    // Those of programs that measure nothing are not built here.
    let is_built = |name: &&String| *name != PROXY && release.join(name).is_file();
    for name in workspace.binary_names().iter().filter(is_built) {
        let (from, to) = (release.join(name), measured.join(name));
        let _ = fs::remove_file(&to);
        fs::hard_link(&from, &to).with_context(|| format!("link {} to {}", from.display(), to.display()))?;
    }
    Ok(measured)
}

/// Builds every binary and every test with one set of features, and returns the directory of the binaries.
///
/// # Errors
/// When something does not compile.
pub(crate) fn tests(workspace: &Workspace) -> Result<PathBuf> {
    step("build the binaries and the tests");
    let mut cargo = command::cargo();
    command::run(cargo.current_dir(&workspace.root).args(["build", "--workspace", "--bins", "--tests"]))?;
    Ok(workspace.binaries(Profile::Dev.directory()))
}

/// A directory with links to the present binaries, removed when dropped.
///
/// Cargo replaces a binary by removing and linking it again. If a second run builds while the first one starts
/// processes, the first one would miss a file for a moment; its own links do not change.
#[derive(Debug)]
pub(crate) struct Snapshot {
    directory: PathBuf,
}

impl Snapshot {
    /// Links the output of [`binaries`] or [`tests`].
    ///
    /// # Errors
    /// When the target directory cannot be written or a binary is missing.
    pub(crate) fn take(workspace: &Workspace, binaries: &std::path::Path) -> Result<Self> {
        let parent = workspace.target.join("xtask");
        fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
        remove_abandoned(&parent);
        let directory = parent.join(format!("bin-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).with_context(|| format!("create {}", directory.display()))?;
        let snapshot = Self { directory };
        for name in workspace.binary_names() {
            let (from, to) = (binaries.join(&name), snapshot.directory.join(&name));
            fs::hard_link(&from, &to).with_context(|| format!("link {} to {}", from.display(), to.display()))?;
        }
        Ok(snapshot)
    }

    /// The directory with the links.
    pub(crate) fn directory(&self) -> &std::path::Path {
        &self.directory
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Removes the remains of runs that were killed: directories named after processes that are gone.
fn remove_abandoned(parent: &std::path::Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix("bin-")).and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
