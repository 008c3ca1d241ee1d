//! Paths: the checkout, cargo's target directory, the cache for tools; and the output of `cargo metadata`.

use std::{
    env,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// The checkout and its target directory.
#[derive(Debug)]
pub struct Workspace {
    /// The directory of the root manifest.
    pub root: PathBuf,
    /// Cargo's target directory, according to CARGO_TARGET_DIR and cargo's configuration.
    pub target: PathBuf,
    /// Our packages without their dependencies, as `cargo metadata --no-deps` prints them.
    metadata: Value,
}

impl Workspace {
    /// Reads it from cargo.
    ///
    /// # Errors
    /// When a manifest does not parse; cargo's message is part of the error.
    pub fn load() -> Result<Self> {
        let root = root();
        let metadata = metadata(&root, &["--no-deps"])?;
        let target = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
        Ok(Self { target: PathBuf::from(target), root, metadata })
    }

    /// Directories whose files are compiled into programs, each with the name that programs show in its place. If one
    /// directory is inside another, the inner one comes last, and the compiler uses its name.
    ///
    /// # Errors
    /// When nothing says where cargo keeps the sources of dependencies.
    pub fn places(&self) -> Result<[(PathBuf, &'static str); 3]> {
        Ok([(self.root.clone(), "/weft"), (self.target.clone(), "/target"), (cargo_home()?, "/cargo")])
    }

    /// What makes rustc write those names.
    ///
    /// # Errors
    /// As [`Self::places`].
    pub fn remapping(&self) -> Result<Vec<String>> {
        let places = self.places()?;
        Ok(places.iter().map(|(path, name)| format!("--remap-path-prefix={}={name}", path.display())).collect())
    }

    /// Our packages.
    pub fn packages(&self) -> impl Iterator<Item = &Value> {
        self.metadata["packages"].as_array().into_iter().flatten()
    }

    /// The directory of the kernel programs, a workspace of its own.
    pub fn ebpf(&self) -> PathBuf {
        self.root.join("ebpf")
    }

    /// The directory of the fuzz targets, another workspace.
    pub(crate) fn fuzz(&self) -> PathBuf {
        self.root.join("fuzz")
    }

    /// Directory of the binaries of a profile (`debug`, `release`).
    pub fn binaries(&self, profile: &str) -> PathBuf {
        self.target.join(profile)
    }

    /// The names of our binaries other than this program.
    pub(crate) fn binary_names(&self) -> Vec<String> {
        self.targets("bin").map(|(_, name)| name).filter(|name| name != "weft-xtask").collect()
    }

    /// The names of our binaries beside which there is no library of the same name: rustdoc would write both to one
    /// file.
    pub(crate) fn programs_without_library(&self) -> Vec<String> {
        let libraries: Vec<_> = self.targets("lib").map(|(_, name)| name.replace('_', "-")).collect();
        self.binary_names().into_iter().filter(|name| !libraries.contains(name)).collect()
    }

    /// The integration tests as (package, test).
    pub(crate) fn integration_tests(&self) -> Vec<(String, String)> {
        self.targets("test").collect()
    }

    fn targets(&self, kind: &str) -> impl Iterator<Item = (String, String)> {
        let of_kind =
            move |target: &&Value| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k == kind));
        self.packages().flat_map(move |package| {
            let targets = package["targets"].as_array().into_iter().flatten();
            targets.filter(of_kind).map(|target| (text(&package["name"]), text(&target["name"])))
        })
    }
}

/// Where cargo keeps what it downloads.
///
/// # Errors
/// When no variable tells.
pub fn cargo_home() -> Result<PathBuf> {
    home_of("CARGO_HOME", ".cargo")
}

/// The directory that a variable names; without it, the one of this name in HOME.
///
/// # Errors
/// When neither is set.
pub fn home_of(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(directory) = env::var_os(variable) {
        return Ok(directory.into());
    }
    let home = env::var_os("HOME").with_context(|| format!("neither {variable} nor HOME is set"))?;
    Ok(PathBuf::from(home).join(name))
}

/// Runs `cargo metadata` in a directory.
///
/// # Errors
/// When a manifest does not parse or the lock file does not fit.
pub fn metadata(directory: &Path, arguments: &[&str]) -> Result<Value> {
    let mut cargo = command::cargo();
    cargo.args(["metadata", "--format-version", "1"]).args(arguments).current_dir(directory);
    serde_json::from_str(&command::output(&mut cargo)?).context("read the output of cargo metadata")
}

/// The string in a JSON value, or an empty one.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Directory of tools that this program builds: outside the checkout, so that all checkouts share them.
///
/// # Errors
/// When neither WEFT_CACHE_DIR nor HOME is set.
pub fn cache_directory() -> Result<PathBuf> {
    if let Some(directory) = std::env::var_os("WEFT_CACHE_DIR") {
        return Ok(PathBuf::from(directory));
    }
    let home = std::env::var_os("HOME").context("neither WEFT_CACHE_DIR nor HOME is set, so tools have no place")?;
    Ok(PathBuf::from(home).join(".cache/weft"))
}

/// Waits for other runs of this program that hold a lock, and holds it until the file is dropped.
///
/// # Errors
/// When the file or its directory cannot be created.
pub fn lock(path: &Path) -> Result<File> {
    let name = || format!("lock {}", path.display());
    fs::create_dir_all(path.parent().unwrap_or(path)).with_context(name)?;
    let file = File::create(path).with_context(name)?;
    file.lock().with_context(name)?;
    Ok(file)
}

/// The files in a directory whose names end in `.extension`, sorted.
///
/// # Errors
/// When there is no such directory.
pub fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let list = || format!("list {}", directory.display());
    let entries = fs::read_dir(directory).with_context(list)?;
    let paths: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut files = paths.with_context(list)?;
    files.retain(|path| path.extension().is_some_and(|found| found == extension));
    files.sort();
    Ok(files)
}

/// The checkout from which cargo started this program, or in which it was built if started by hand.
fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let root = own.ancestors().find(|directory| directory.join("Cargo.lock").exists());
    root.unwrap_or(&own).to_path_buf()
}
