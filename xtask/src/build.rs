//! Builds our binaries, always with the same selection of packages.
//!
//! Cargo unifies the features of dependencies over the packages that it builds. Building the whole workspace each time
//! keeps one set of features, and so one build of every dependency. Tests add features that no binary needs (tokio's
//! clock that can be paused), so binaries for the tests are built together with the tests: [`tests`].
//!
//! What users get is built for a target, without the packages of tests and benches: [`for_users`].

use std::{
    env::consts::ARCH,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{
    command::{self, step},
    setup::packages,
    workspace::Workspace,
};

/// Gives the proxy and the control plane the allocator that users get. Debug builds spare themselves the minute that
/// compiling it takes.
const ALLOCATOR: [&str; 2] = ["--features", "weft-proxy/jemalloc,weft-control-plane/jemalloc"];

/// Selects every package but this program and the lab: one selection for all builds keeps the features of dependencies.
pub(crate) const PRODUCT: [&str; 5] = ["--workspace", "--exclude", "weft-xtask", "--exclude", "weft-lab"];

/// The packages of the programs that run in images.
const SERVERS: [&str; 5] = ["weft-agent", "weft-control-plane", "weft-examples", "weft-proxy", "weft-viz"];
/// The programs of those, except [`PROXY`].
pub const OTHER_SERVERS: [&str; 5] = ["weft-agent", "weft-client", "weft-control-plane", "weft-echo", "weft-viz"];
/// The proxy's program.
pub const PROXY: &str = "weft-proxy";

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

    /// Selects it.
    fn apply(self, cargo: &mut Command) {
        if self != Self::Dev {
            cargo.args(["--profile", self.directory()]);
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
    profile.apply(&mut cargo);
    if profile != Profile::Dev {
        packages::ensure(&packages::ALLOCATOR)?;
        cargo.args(ALLOCATOR);
    }
    command::run(&mut cargo)?;
    Ok(workspace.binaries(profile.directory()))
}

/// Builds what `bench proxy` compares, and returns its directory: the proxy as users get it, but for its symbols,
/// beside a release build of every other binary.
///
/// # Errors
/// When something does not compile, or the directory cannot be written.
pub(crate) fn measured(workspace: &Workspace) -> Result<PathBuf> {
    let release = binaries(workspace, Profile::Release)?;
    step("build the proxy as users get it");
    command::run(&mut proxy(workspace, Profile::Dist, &own_target(), &[])?)?;
    link_programs(workspace, &release, &workspace.target, "measured")
}

/// As [`measured`], with an instrumented proxy, which writes its execution counts into files of the directory `counts`.
///
/// # Errors
/// As [`measured`].
pub(crate) fn instrumented(workspace: &Workspace, counts: &Path) -> Result<PathBuf> {
    let release = binaries(workspace, Profile::Release)?;
    step("build an instrumented proxy");
    let flag = format!("-Cprofile-generate={}", counts.display());
    let built_in = workspace.target.join("instrumented");
    let mut cargo = for_users(workspace, Profile::Dist, &own_target(), &[&flag], "")?;
    command::run(cargo.args(servers(Profile::Dist, &[PROXY])).arg("--target-dir").arg(&built_in))?;
    link_programs(workspace, &release, &built_in, "instrumented/programs")
}

/// Links the proxy for users that was built in a target directory, and every other program of a release build.
fn link_programs(workspace: &Workspace, release: &Path, built_in: &Path, name: &str) -> Result<PathBuf> {
    let proxy = built_in.join(own_target()).join(Profile::Dist.directory()).join(PROXY);
    let directory = workspace.binaries(name);
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    for name in workspace.binary_names() {
        let from = if name == PROXY { proxy.clone() } else { release.join(&name) };
        // Programs that measure nothing are not built.
        if from.is_file() {
            let to = directory.join(&name);
            let _ = fs::remove_file(&to);
            link(&from, &to)?;
        }
    }
    Ok(directory)
}

fn link(from: &Path, to: &Path) -> Result<()> {
    fs::hard_link(from, to).with_context(|| format!("link {} to {}", from.display(), to.display()))
}

/// A build of the proxy for users on a target, as [`for_users`]. What they get is compiled with the PGO profile of that
/// target (`cargo xtask pgo`), if there is one.
///
/// # Errors
/// As [`for_users`].
pub fn proxy(workspace: &Workspace, profile: Profile, target: &str, flags: &[&str]) -> Result<Command> {
    let pgo = pgo_profile(workspace, target);
    let with_pgo = format!("-Cprofile-use={}", pgo.display());
    let is_used = profile == Profile::Dist && pgo.is_file();
    let flags: Vec<_> = flags.iter().copied().chain(is_used.then_some(&*with_pgo)).collect();
    let mut cargo = for_users(workspace, profile, target, &flags, "")?;
    cargo.args(servers(profile, &[PROXY]));
    Ok(cargo)
}

/// Selects programs of the servers. All of their packages are named: a build of one has the features of all.
pub fn servers<'a>(profile: Profile, programs: &[&'a str]) -> Vec<&'a str> {
    let packages = SERVERS.into_iter().flat_map(|package| ["--package", package]);
    let programs = programs.iter().flat_map(|program| ["--bin", program]);
    let allocator = ALLOCATOR.into_iter().filter(|_| profile != Profile::Dev);
    packages.chain(programs).chain(allocator).collect()
}

/// The proxy's profile for profile-guided optimisation on a target.
pub(crate) fn pgo_profile(workspace: &Workspace, target: &str) -> PathBuf {
    workspace.root.join("proxy/pgo").join(format!("{target}.profdata"))
}

/// Rust's name of this machine's platform, for programs that are linked with glibc.
pub(crate) fn own_target() -> String {
    format!("{ARCH}-unknown-linux-gnu")
}

/// A build for users on a target: linked statically, with no directory of this machine named in it. `flags` and
/// `c_flags` are more of them for the compilers of Rust and C.
///
/// # Errors
/// When nothing says where cargo keeps what it downloads.
pub fn for_users(
    workspace: &Workspace,
    profile: Profile,
    target: &str,
    flags: &[&str],
    c_flags: &str,
) -> Result<Command> {
    let mut cargo = command::cargo();
    cargo.current_dir(&workspace.root).args(["build", "--target", target]);
    profile.apply(&mut cargo);
    let mut rust = workspace.remapping()?;
    rust.push("-Ctarget-feature=+crt-static".to_owned());
    rust.extend(flags.iter().map(|flag| (*flag).to_owned()));
    cargo.env(of_target("RUSTFLAGS", target), rust.join(" "));
    let places = workspace.places()?;
    let mut c: Vec<_> =
        places.iter().map(|(path, name)| format!("-ffile-prefix-map={}={name}", path.display())).collect();
    c.push(c_flags.to_owned());
    cargo.env(c_of_target("CFLAGS", target), c.join(" "));
    Ok(cargo)
}

/// The name of cargo's variable for a target.
pub fn of_target(name: &str, target: &str) -> String {
    format!("CARGO_TARGET_{}_{name}", target.replace('-', "_").to_uppercase())
}

/// The same for the compiler of C.
pub fn c_of_target(name: &str, target: &str) -> String {
    format!("{name}_{}", target.replace('-', "_"))
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
            link(&binaries.join(&name), &snapshot.directory.join(&name))?;
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
