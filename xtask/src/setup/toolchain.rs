//! The eBPF toolchain: a compiler that can build `core` for the kernel, and a bpf-linker with the same LLVM.
//!
//! Two compilers are supported. Rustup's nightly with `rust-src` is the usual one; Debian's packaged `rustc` with its
//! source package works if rustup cannot download. bpf-linker reads the compiler's bitcode, and LLVM reads no bitcode
//! newer than itself, so the major versions of LLVM have to agree. Existing tools are used as they are.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{cargo_tools, packages};
use crate::command::{self, step};

/// The version of bpf-linker that is installed; the kernel tests have run with its output.
const LINKER_VERSION: &str = "0.13.0";
/// The oldest bpf-linker accepted from PATH: it has `--btf`, for our typed maps.
const OLDEST_LINKER: (u32, u32) = (0, 10);
/// The LLVM of Debian's `rustc-web`.
const SYSTEM_LLVM: u32 = 22;
/// The compiler of a distribution, as opposed to rustup's proxies earlier in PATH.
const SYSTEM_RUSTC: &str = "/usr/bin/rustc";
/// Debian's compiler and the build requirements of bpf-linker.
const SYSTEM_PACKAGES: [&str; 8] = [
    "rustc-web",
    "rust-web-src",
    "rust-web-clippy",
    "llvm-22-dev",
    "libpolly-22-dev",
    "zlib1g-dev",
    "libzstd-dev",
    "libxml2-dev",
];
/// Arguments of `rustup`; clippy is for `lint`.
const RUSTUP_NIGHTLY: [&str; 7] =
    ["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src,clippy"];

/// A compiler for the kernel programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// Rustup's nightly with its `rust-src` component.
    Nightly { llvm: u32 },
    /// A distribution's compiler with its source package.
    System { rustc: PathBuf, llvm: u32 },
}

impl Compiler {
    fn llvm(&self) -> u32 {
        match self {
            Self::Nightly { llvm } | Self::System { llvm, .. } => *llvm,
        }
    }
}

/// A compiler and the directory of a compatible bpf-linker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    pub(crate) compiler: Compiler,
    /// Must come first in PATH: rustc starts `bpf-linker` by name.
    pub(crate) linker_directory: PathBuf,
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.compiler {
            Compiler::Nightly { llvm } => write!(f, "eBPF toolchain: rustup's nightly (LLVM {llvm})")?,
            Compiler::System { rustc, llvm } => write!(f, "eBPF toolchain: {} (LLVM {llvm})", rustc.display())?,
        }
        write!(f, " with {}", self.linker_directory.join("bpf-linker").display())
    }
}

/// A bpf-linker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Linker {
    directory: PathBuf,
    version: (u32, u32),
    /// Absent if cargo did not install it, so that its LLVM is unknown.
    llvm: Option<u32>,
}

/// Finds a compatible compiler and linker.
///
/// # Errors
/// When no usable toolchain is found; the message lists what was found.
pub(crate) fn detect() -> Result<Toolchain> {
    choose(&compilers(), &linkers()?)
}

/// Finds a toolchain, and installs one if there is none.
///
/// # Errors
/// When nothing can be installed or installing fails; the message says what to do.
pub(crate) fn ensure() -> Result<Toolchain> {
    let lacking = match detect() {
        Ok(found) => return Ok(found),
        Err(lacking) => lacking,
    };
    step(&format!("missing the eBPF toolchain: {lacking:#}"));
    if compilers().is_empty() {
        install_compiler()?;
    }
    for compiler in compilers() {
        if let Err(reason) = install_linker(compiler.llvm()) {
            step(&format!("{reason:#}"));
        } else {
            break;
        }
    }
    detect().context("no eBPF toolchain after installing one; `cargo xtask setup --help` says which two ways there are")
}

/// A tool of LLVM that reads what the workspace's compiler writes.
///
/// # Errors
/// When it is not here; the message says how to install it.
pub(crate) fn llvm_tool(name: &str) -> Result<PathBuf> {
    let rustc = |arguments: &[&str]| command::output(Command::new("rustc").args(arguments));
    let llvm = llvm_major(&rustc(&["-vV"])?).context("rustc names no version of LLVM")?;
    let sysroot = rustc(&["--print", "target-libdir"])?;
    let of_rustup = Path::new(sysroot.trim()).with_file_name("bin").join(name);
    let of_system = PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin/{name}"));
    let package = format!("llvm-{llvm}");
    if !of_rustup.is_file() && !of_system.is_file() && packages::apt_knows(&[&package]) {
        packages::apt_install(&[&package])?;
    }
    [of_rustup, of_system].into_iter().find(|tool| tool.is_file()).with_context(|| {
        format!("no {name} of LLVM {llvm}: run `rustup component add llvm-tools`, or install the package {package}")
    })
}

fn choose(compilers: &[Compiler], linkers: &[Linker]) -> Result<Toolchain> {
    let fits = |compiler: &Compiler, linker: &Linker| {
        linker.version >= OLDEST_LINKER && linker.llvm.is_none_or(|llvm| llvm == compiler.llvm())
    };
    for compiler in compilers {
        if let Some(linker) = linkers.iter().find(|linker| fits(compiler, linker)) {
            let linker_directory = linker.directory.clone();
            return Ok(Toolchain { compiler: compiler.clone(), linker_directory });
        }
    }
    match (compilers, linkers) {
        ([], _) => bail!(
            "no compiler can build `core` for the kernel: neither rustup's nightly with rust-src nor {SYSTEM_RUSTC} \
             (LLVM {SYSTEM_LLVM}) with rust-web-src"
        ),
        ([compiler, ..], []) => bail!("no bpf-linker, neither ours nor in PATH (LLVM {} is wanted)", compiler.llvm()),
        ([compiler, ..], [linker, ..]) => bail!(
            "bpf-linker in {} is {}.{} with LLVM {}, and the compiler's is LLVM {}: `cargo xtask setup` builds one that fits",
            linker.directory.display(),
            linker.version.0,
            linker.version.1,
            linker.llvm.map_or_else(|| "unknown".to_owned(), |llvm| llvm.to_string()),
            compiler.llvm()
        ),
    }
}

fn compilers() -> Vec<Compiler> {
    nightly().into_iter().chain(system()).collect()
}

fn nightly() -> Option<Compiler> {
    let rustup = command::find("rustup")?;
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(&rustup);
        // Without this, asking for a missing nightly would download it.
        command.args(["run", "nightly", "rustc"]).args(arguments).env("RUSTUP_AUTO_INSTALL", "0");
        command::output(command.env_remove("RUSTUP_TOOLCHAIN")).ok()
    };
    let llvm = llvm_major(&ask(&["-vV"])?)?;
    has_core(ask(&["--print", "sysroot"])?.trim()).then_some(Compiler::Nightly { llvm })
}

fn system() -> Option<Compiler> {
    let ask = |arguments: &[&str]| command::output(Command::new(SYSTEM_RUSTC).args(arguments)).ok();
    let llvm = llvm_major(&ask(&["-vV"])?)?;
    let usable = llvm >= SYSTEM_LLVM && has_core(ask(&["--print", "sysroot"])?.trim());
    usable.then(|| Compiler::System { rustc: PathBuf::from(SYSTEM_RUSTC), llvm })
}

fn has_core(sysroot: &str) -> bool {
    Path::new(sysroot).join("lib/rustlib/src/rust/library/core/src/lib.rs").is_file()
}

/// The major version in the line `LLVM version: 22.1.8` of `rustc -vV`.
fn llvm_major(version: &str) -> Option<u32> {
    let full = version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    full.split('.').next()?.trim().parse().ok()
}

fn linkers() -> Result<Vec<Linker>> {
    let ours = cargo_tools::directory()?.join("bin/bpf-linker");
    let in_path = command::find("bpf-linker");
    Ok([Some(ours), in_path].into_iter().flatten().filter_map(|program| linker(&program)).collect())
}

fn linker(program: &Path) -> Option<Linker> {
    let version = command::output(Command::new(program).arg("--version")).ok()?;
    let directory = program.parent()?.to_path_buf();
    let records = std::fs::read_to_string(directory.parent()?.join(".crates2.json")).unwrap_or_default();
    Some(Linker { version: linker_version(&version)?, llvm: linker_llvm(&records), directory })
}

/// Major and minor in `bpf-linker 0.13.0`.
fn linker_version(output: &str) -> Option<(u32, u32)> {
    let mut parts = output.trim().strip_prefix("bpf-linker ")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The LLVM of a bpf-linker that cargo installed, from the feature in cargo's record of installations (`.crates2.json`
/// beside `bin`).
fn linker_llvm(records: &str) -> Option<u32> {
    let records: serde_json::Value = serde_json::from_str(records).ok()?;
    let (_, record) = records["installs"].as_object()?.iter().find(|(name, _)| name.starts_with("bpf-linker "))?;
    let features = record["features"].as_array()?.iter().filter_map(serde_json::Value::as_str);
    features.filter_map(|feature| feature.strip_prefix("llvm-")).find_map(|major| major.parse().ok())
}

fn install_compiler() -> Result<()> {
    if packages::apt_knows(&SYSTEM_PACKAGES) {
        return packages::apt_install(&SYSTEM_PACKAGES);
    }
    let by_hand = format!("rustup {}", RUSTUP_NIGHTLY.join(" "));
    let Some(rustup) = command::find("rustup") else {
        bail!(
            "neither apt with the packages {} nor rustup is here; install rustup, then run: {by_hand}",
            SYSTEM_PACKAGES.join(" ")
        );
    };
    step(&by_hand);
    command::run(Command::new(rustup).args(RUSTUP_NIGHTLY))
}

fn install_linker(llvm: u32) -> Result<()> {
    if llvm == SYSTEM_LLVM && !llvm_is_here(llvm) && packages::apt_knows(&SYSTEM_PACKAGES) {
        packages::apt_install(&SYSTEM_PACKAGES)?;
    }
    if !llvm_is_here(llvm) {
        bail!(
            "bpf-linker has to be built against LLVM {llvm}, which is not here: install its development files (llvm-{llvm}-dev), then run this again"
        );
    }
    step(&format!("build bpf-linker {LINKER_VERSION} with LLVM {llvm} (a minute, once)"));
    let features = format!("llvm-{llvm}");
    cargo_tools::install(
        "bpf-linker",
        LINKER_VERSION,
        &["--no-default-features", "--features", &features],
        &[("LLVM_PREFIX", &format!("/usr/lib/llvm-{llvm}"))],
    )
}

fn llvm_is_here(llvm: u32) -> bool {
    Path::new(&format!("/usr/lib/llvm-{llvm}/bin/llvm-config")).exists()
        && Path::new(&format!("/usr/lib/llvm-{llvm}/lib/libPolly.a")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(llvm: u32) -> Compiler {
        Compiler::System { rustc: PathBuf::from(SYSTEM_RUSTC), llvm }
    }

    fn linker(version: (u32, u32), llvm: Option<u32>) -> Linker {
        Linker { directory: PathBuf::from("/tools/bin"), version, llvm }
    }

    #[test]
    fn takes_the_first_pair_whose_llvm_agrees() {
        let compilers = [Compiler::Nightly { llvm: 23 }, system(22)];
        let chosen = choose(&compilers, &[linker((0, 13), Some(22))]).expect("the system's compiler fits");
        assert_eq!(chosen.compiler, system(22));
        let chosen = choose(&compilers, &[linker((0, 13), None)]).expect("an unknown LLVM is given a chance");
        assert_eq!(chosen.compiler, Compiler::Nightly { llvm: 23 });
    }

    #[test]
    fn refuses_what_cannot_work_and_says_why() {
        let cases: [(&str, Vec<Compiler>, Vec<Linker>, &str); 4] = [
            ("nothing", vec![], vec![], "rust-src"),
            ("no linker", vec![system(22)], vec![], "no bpf-linker"),
            ("other LLVM", vec![system(22)], vec![linker((0, 13), Some(23))], "LLVM 23"),
            ("old linker", vec![system(22)], vec![linker((0, 9), Some(22))], "0.9"),
        ];
        for (name, compilers, linkers, expected) in cases {
            let error = choose(&compilers, &linkers).expect_err(name).to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
    }

    #[test]
    fn reads_versions() {
        assert_eq!(llvm_major("rustc 1.96.0\nrelease: 1.96.0\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(llvm_major("rustc 1.96.0"), None);
        assert_eq!(linker_version("bpf-linker 0.13.0\n"), Some((0, 13)));
        assert_eq!(linker_version("ld 2.40"), None);
        let records = r#"{"installs":{"bpf-linker 0.13.0 (registry)":{"features":["llvm-22"]}}}"#;
        assert_eq!(linker_llvm(records), Some(22));
        assert_eq!(linker_llvm("{}"), None);
    }
}
