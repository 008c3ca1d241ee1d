//! `lint`: the checks that must pass before a push. Every check runs, then all findings are printed together.
//!
//! Checks that rustc, clippy or cargo-deny can do are theirs (`[workspace.lints]`, clippy.toml, deny.toml). The others
//! are pure functions over parsed files ([`rust::RustFile`]), documents and `cargo metadata`, tested beside their
//! code. Warnings are denied here and not in the sources, so that a newer compiler does not break a build.

mod artefacts;
mod commits;
mod copies;
mod cycles;
mod deny;
mod documents;
mod edges;
mod platforms;
mod reach;
mod rust;
mod sources;
mod widths;
mod words;

use std::{fmt, fs, path::PathBuf};

use anyhow::{Context, Result, bail};

use crate::{
    command::{self, step},
    ebpf,
    setup::{
        self, Scope,
        toolchain::{Compiler, Toolchain},
    },
    workspace::Workspace,
};
use rust::RustFile;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask lint             everything
  cargo xtask lint --quick     only what needs no compiler: formatting, dependency edges, conventions")]
pub(crate) struct Args {
    /// Skip clippy, rustdoc and cargo-deny
    #[arg(long)]
    quick: bool,
}

/// A document of ours.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// Relative to the root of the checkout.
    pub(crate) path: PathBuf,
    /// Its content on disk.
    pub(crate) text: String,
}

/// Something to correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The subject: a file, a package.
    pub(crate) subject: String,
    /// Counted from 1; absent if it concerns the whole subject.
    pub(crate) line: Option<usize>,
    pub(crate) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.subject, self.message),
            None => write!(f, "{}: {}", self.subject, self.message),
        }
    }
}

/// Runs the checks.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let mut failures = Vec::new();
    let mut check = |name: &str, result: Result<()>| {
        if let Err(error) = result {
            eprintln!("error: {error:#}");
            failures.push(name.to_owned());
        }
    };
    check("conventions", conventions(&workspace));
    check("fmt", format(&workspace));
    if !args.quick {
        let toolchain = setup::ensure(Scope::Build)?;
        check("ebpf", ebpf::build(&workspace, &toolchain).map(drop));
        check("clippy", clippy(&workspace));
        check("clippy for the fuzz targets", clippy_fuzz(&workspace));
        check("other systems", platforms::check(&workspace));
        check("clippy for BPF", clippy_ebpf(&workspace, &toolchain));
        check("doc", doc(&workspace));
        check("deny", deny::check(&workspace));
        check("charts", artefacts::charts(&workspace));
        check("scripts", artefacts::scripts(&workspace));
    }
    if !failures.is_empty() {
        bail!("lint failed: {}", failures.join(", "));
    }
    step("lint passed");
    Ok(())
}

fn conventions(workspace: &Workspace) -> Result<()> {
    step("dependency edges and conventions");
    let documents = read(workspace, ".md")?;
    let mut files = Vec::new();
    for Document { path, text } in read(workspace, ".rs")? {
        files.push(RustFile::parse(path, text)?);
    }
    let roots = rust::roots(workspace)?;
    let mut findings = edges::check(workspace)?;
    findings.extend(commits::check(workspace)?);
    findings.extend(copies::check(workspace)?);
    findings.extend(files.iter().flat_map(sources::check));
    findings.extend(reach::check(&files, &roots));
    findings.extend(cycles::check(&files, &roots));
    let sources: Vec<_> = files.iter().map(|file| (file.path.as_path(), file.text.as_str())).collect();
    findings.extend(words::check(&documents, &sources));
    findings.extend(widths::check(&documents, &sources));
    findings.extend(documents::check(&documents, &files, |path| workspace.root.join(path).exists()));
    for finding in &findings {
        eprintln!("{finding}");
    }
    if !findings.is_empty() {
        bail!("{} findings against the conventions of CONTRIBUTING.md", findings.len());
    }
    Ok(())
}

/// Every file with this suffix in the checkout, outside target directories and hidden ones.
fn read(workspace: &Workspace, ending: &str) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    let mut open = vec![workspace.root.clone()];
    while let Some(directory) = open.pop() {
        let entries = fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                open.push(path);
            } else if path.is_file() && name.ends_with(ending) {
                let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                let path = path.strip_prefix(&workspace.root).unwrap_or(&path).to_path_buf();
                documents.push(Document { path, text });
            }
        }
    }
    documents.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(documents)
}

fn format(workspace: &Workspace) -> Result<()> {
    step("cargo fmt");
    let check = |directory: PathBuf| {
        let mut cargo = command::cargo();
        command::run(cargo.args(["fmt", "--all", "--", "--check", "-l"]).current_dir(directory))
    };
    check(workspace.root.clone()).context("run cargo fmt --all")?;
    check(workspace.ebpf()).context("run cargo fmt --all in ebpf")?;
    check(workspace.fuzz()).context("run cargo fmt --all in fuzz")
}

fn clippy(workspace: &Workspace) -> Result<()> {
    step("cargo clippy");
    let mut cargo = command::cargo();
    cargo.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    command::run(cargo.current_dir(&workspace.root))
}

/// Clippy for the fuzz targets, which are a workspace of their own. Nothing is linked, so libFuzzer need not be
/// compiled: an empty file stands in for it.
fn clippy_fuzz(workspace: &Workspace) -> Result<()> {
    step("cargo clippy for the fuzz targets");
    let directory = workspace.target.join("xtask");
    let library = directory.join("libempty-fuzzer.a");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    // A newer file would have everything above it checked again.
    if !library.exists() {
        fs::write(&library, []).with_context(|| format!("write {}", library.display()))?;
    }
    let mut cargo = command::cargo();
    // Dependencies that both workspaces build alike are checked once.
    cargo.args(["clippy", "--all-targets", "--target-dir"]).arg(&workspace.target).args(["--", "-D", "warnings"]);
    command::run(cargo.env("CUSTOM_LIBFUZZER_PATH", &library).current_dir(workspace.fuzz()))
}

/// Clippy for the kernel programs comes with the compiler that builds them.
fn clippy_ebpf(workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    step("cargo clippy for the kernel programs");
    let mut cargo = match &toolchain.compiler {
        Compiler::Nightly { .. } => ebpf::cargo(workspace, toolchain, "clippy")?,
        Compiler::System { rustc, .. } => {
            let driver = rustc.with_file_name("clippy-driver");
            if !driver.exists() {
                bail!("no {}: install the package rust-web-clippy", driver.display());
            }
            // This is what `cargo clippy` itself does; the one in PATH would use the driver of another compiler.
            let mut cargo = ebpf::cargo(workspace, toolchain, "check")?;
            cargo
                .env("RUSTC_WORKSPACE_WRAPPER", driver)
                .env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
            cargo.env("RUSTC_BOOTSTRAP", "1");
            cargo
        }
    };
    if matches!(toolchain.compiler, Compiler::Nightly { .. }) {
        cargo.args(["--", "-D", "warnings"]);
    }
    command::run(&mut cargo)
}

fn doc(workspace: &Workspace) -> Result<()> {
    step("cargo doc");
    let mut cargo = command::cargo();
    // Naming the examples makes cargo choose clippy's features, so that dependencies are checked once. Documentation
    // of private items is included: its readers are developers.
    cargo.args(["doc", "--workspace", "--no-deps", "--lib", "--examples", "--document-private-items"]);
    cargo.args(workspace.programs_without_library().iter().flat_map(|name| ["--bin", name]));
    cargo.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links");
    command::run(cargo.current_dir(&workspace.root))
}
