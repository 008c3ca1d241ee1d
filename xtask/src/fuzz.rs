//! `fuzz`: runs the fuzz targets of `fuzz/` with libFuzzer and stable Rust.
//!
//! LLVM adds the coverage counters, with options that every compiler accepts; only sanitizers would need nightly, and
//! safe Rust needs none. Each target starts from `fuzz/corpus/TARGET`, which is in the repository, and from the
//! findings of earlier runs in the cache. An input that breaks a target is written to `fuzz/artifacts/TARGET`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
};

use anyhow::{Context, Result, bail};

use crate::{
    command::{self, step},
    setup::{self, Scope, packages},
    workspace::{self, Workspace, text},
};

/// cargo-fuzz's options, without a sanitizer.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                        -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";
/// The number of targets that run at a time, each for its seconds by the clock.
const AT_ONCE: u32 = 4;
/// Memory limit of a parser in megabytes; exceeding it means a leak or an allocation that an input chose.
const MEGABYTES: u32 = 1024;
/// Time limit of one input in seconds: for an input without an end, as there may be little processor time for this.
const SLOWEST: u32 = 60;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask fuzz                          every target, a minute each, four at a time
  cargo xtask fuzz --total 60               every target, a minute together
  cargo xtask fuzz manifest --seconds 600   one of them for longer
  cargo xtask fuzz --list                   their names
  cargo xtask fuzz ports --input FILE       one input again")]
pub(crate) struct Args {
    /// The targets to run; all by default
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Seconds for all targets together, of which each has the same part; what earlier runs found is run again in any
    /// case
    #[arg(long, conflicts_with = "seconds")]
    total: Option<u32>,
    /// Only print the names of the targets
    #[arg(long)]
    list: bool,
    /// Run only this input
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

/// Builds and runs targets.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let directory = workspace.fuzz();
    let known = targets(&directory)?;
    if args.list {
        known.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    if let Some(unknown) = args.targets.iter().find(|name| !known.contains(name)) {
        bail!("no fuzz target {unknown}; there are {}", known.join(", "));
    }
    let chosen = if args.targets.is_empty() { known } else { args.targets.clone() };
    let binaries = build(&workspace, &directory)?;
    let seconds = args.total.map_or(args.seconds, |total| share(total, chosen.len()));
    let limits = Limits { seconds, input: args.input.as_deref() };
    run_targets(&directory, &binaries, &chosen, limits)
}

/// The seconds of each target that end all of them in time, one at least: libFuzzer takes 0 for no limit.
fn share(total: u32, targets: usize) -> u32 {
    let turns = u32::try_from(targets).unwrap_or(u32::MAX).div_ceil(AT_ONCE);
    (total / turns.max(1)).max(1)
}

/// The names of the targets.
fn targets(directory: &Path) -> Result<Vec<String>> {
    let metadata = workspace::metadata(directory, &["--no-deps"])?;
    let targets = metadata["packages"][0]["targets"].as_array().context("fuzz/Cargo.toml has no targets")?;
    Ok(targets.iter().map(|target| text(&target["name"])).collect())
}

/// Builds every target; returns their directory.
fn build(workspace: &Workspace, directory: &Path) -> Result<PathBuf> {
    setup::install_packages(Scope::Build)?;
    packages::ensure(&packages::FUZZ)?;
    step("build the fuzz targets");
    let version = command::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    let target = workspace.target.join("fuzz");
    let mut cargo = command::cargo();
    // Naming the platform keeps the counters out of build scripts and derive macros.
    cargo.args(["build", "--target", host, "--target-dir"]).arg(&target).env("RUSTFLAGS", COVERAGE);
    command::run(cargo.current_dir(directory))?;
    Ok(target.join(host).join("debug"))
}

/// The duration of a target, or its only input.
#[derive(Clone, Copy, Debug)]
struct Limits<'a> {
    seconds: u32,
    input: Option<&'a Path>,
}

fn run_targets(directory: &Path, binaries: &Path, targets: &[String], limits: Limits<'_>) -> Result<()> {
    let (open, failed) = (Mutex::new(targets.iter()), Mutex::new(Vec::new()));
    // A panic in a thread is a bug of this program; the scope passes it on.
    let next = || open.lock().ok().and_then(|mut open| open.next());
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(target) = next() {
                    if let Err(error) = run_target(directory, binaries, target, limits) {
                        step(&format!("fuzz {target}: FAILED"));
                        failed.lock().into_iter().for_each(|mut failed| failed.push(format!("{target}: {error:#}")));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        bail!("inputs break fuzz targets\n{}", failed.join("\n"));
    }
    Ok(())
}

fn run_target(directory: &Path, binaries: &Path, target: &str, limits: Limits<'_>) -> Result<()> {
    let artifacts = directory.join("artifacts").join(target);
    let found = workspace::cache_directory()?.join("fuzz").join(target);
    for directory in [&artifacts, &found] {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let mut fuzzer = Command::new(binaries.join(target));
    fuzzer
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([format!("-rss_limit_mb={MEGABYTES}"), format!("-timeout={SLOWEST}"), "-print_final_stats=1".to_owned()])
        .current_dir(directory);
    match limits.input {
        Some(input) => fuzzer.arg(input),
        None => fuzzer
            .arg(format!("-max_total_time={}", limits.seconds))
            // New inputs go to the first directory.
            .arg(&found)
            .arg(directory.join("corpus").join(target)),
    };
    let output = fuzzer.output().with_context(|| format!("start {}", binaries.join(target).display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{}\n{}", output.status, tail(&said));
    }
    step(&format!("fuzz {target}: {}", summary(&said)));
    Ok(())
}

/// libFuzzer's summary of a run without findings: inputs tried, and inputs kept because they reached something new.
fn summary(said: &str) -> String {
    let number = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name));
        line.map_or("?", |line| line.trim_start_matches(':').trim()).to_owned()
    };
    format!("{} inputs, {} new ones kept", number("number_of_executed_units"), number("new_units_added"))
}

/// The last lines, which contain the finding and the path of the input.
fn tail(said: &str) -> String {
    let lines: Vec<_> = said.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_summed_up_in_a_line() {
        let said =
            "Done 100 runs in 1 second(s)\nstat::number_of_executed_units: 100\nstat::new_units_added:          7\n";
        assert_eq!(summary(said), "100 inputs, 7 new ones kept");
        assert_eq!(summary(""), "? inputs, ? new ones kept");
    }

    #[test]
    fn targets_share_their_time() {
        assert_eq!(share(60, 22), 10);
        assert_eq!(share(60, 4), 60);
        assert_eq!(share(3, 22), 1);
    }

    /// A directory of the checkout that this test belongs to.
    fn beside_xtask(name: &str) -> PathBuf {
        Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).with_file_name(name)
    }

    #[test]
    fn targets_have_the_lints_of_the_workspace() {
        let lints = |manifest: PathBuf, table: &str| -> Vec<String> {
            let text = fs::read_to_string(&manifest).expect("the manifest");
            let after = text.lines().skip_while(|line| *line != table).skip(1);
            let lints = after.take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
            lints.filter(|line| !line.is_empty()).map(str::to_owned).collect()
        };
        for tool in ["rust", "clippy"] {
            let root = lints(beside_xtask("Cargo.toml"), &format!("[workspace.lints.{tool}]"));
            assert!(!root.is_empty(), "{tool}");
            assert_eq!(lints(beside_xtask("fuzz").join("Cargo.toml"), &format!("[lints.{tool}]")), root);
        }
    }

    #[test]
    fn every_target_has_a_corpus_and_every_corpus_a_target() {
        let directory = beside_xtask("fuzz");
        let names = |directory: PathBuf| -> Vec<String> {
            let entries = fs::read_dir(&directory).expect("the directory").flatten();
            let mut names: Vec<_> =
                entries.filter_map(|entry| Some(entry.path().file_stem()?.to_string_lossy().into_owned())).collect();
            names.sort();
            names
        };
        assert_eq!(names(directory.join("fuzz_targets")), names(directory.join("corpus")));
    }
}
