//! `weft version`: the facts about the program and its host that a bug report needs.

use std::fs;

use anyhow::Result;
use serde::Serialize;

use crate::output::{self, Format};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  weft version -o json")]
pub(crate) struct VersionArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
    architecture: &'static str,
    /// `None` if /proc is not mounted.
    kernel: Option<String>,
}

pub(crate) fn execute(args: &VersionArgs) -> Result<()> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        architecture: std::env::consts::ARCH,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|release| release.trim().to_owned()),
    };
    match args.output {
        Format::Json => output::json(&version),
        Format::Table => {
            let kernel = version.kernel.as_deref().unwrap_or("unknown");
            output::line(&format!("weft {}, {}, Linux {kernel}", version.version, version.architecture))?;
            Ok(())
        }
    }
}
