//! `weft` on systems other than Linux: clippy for those whose standard library is installed (`rustup target add`).
//!
//! Nothing is linked, so the C parts of dependencies need not be compiled, for which another system's headers would
//! have to be here. A stand-in for the C compiler and the archiver writes empty files.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    command::{self, step},
    workspace::Workspace,
};

/// One for each family of systems; a release is built for more.
const TARGETS: [&str; 2] = ["aarch64-apple-darwin", "x86_64-pc-windows-gnu"];

/// `cc -o FILE` and `ar cq FILE.a` write an empty file.
const STAND_IN: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        -o) shift; : >"$1" ;;
        *.a) : >"$1" ;;
    esac
    shift
done
"#;

/// Checks `weft` for each of the installed targets.
///
/// # Errors
/// When it does not compile for one of them, or with a warning.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let installed: Vec<_> = TARGETS.into_iter().filter(|target| is_installed(target)).collect();
    if installed.is_empty() {
        step(&format!("weft on other systems: skipped, rustup target add {} was not run", TARGETS.join(" ")));
        return Ok(());
    }
    step(&format!("cargo clippy of weft for {}", installed.join(", ")));
    let stand_in = stand_in(&workspace.target.join("xtask"))?;
    let mut cargo = command::cargo();
    cargo.current_dir(&workspace.root).args(["clippy", "--package", "weft-cli", "--bins"]);
    for target in installed {
        cargo.args(["--target", target]);
        for tool in ["CC", "CXX", "AR"] {
            cargo.env(format!("{tool}_{}", target.replace('-', "_")), &stand_in);
        }
    }
    command::run(cargo.args(["--", "-D", "warnings"]))
}

fn is_installed(target: &str) -> bool {
    let mut rustc = Command::new("rustc");
    let directory = command::output(rustc.args(["--print", "target-libdir", "--target", target]));
    directory.is_ok_and(|directory| Path::new(directory.trim()).is_dir())
}

fn stand_in(directory: &Path) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let path = directory.join("empty-cc");
    fs::write(&path, STAND_IN).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).context("make the stand-in a program")?;
    Ok(path)
}
