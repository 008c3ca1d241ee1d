//! Differences between processors: names of packages, programs and devices.

use anyhow::{Context as _, Result};
use weft_xtask::command::{self, step};

/// A processor that Weft is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Processor {
    #[value(name = "amd64")]
    X86_64,
    /// On an x86_64 machine, with a cross compiler and an emulator
    #[value(name = "arm64")]
    Aarch64,
}

/// The kind of emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Accelerator {
    /// Translation, on any machine
    Tcg,
    /// This machine's own processors; a /dev/kvm inside a virtual machine may exist and not work
    Kvm,
}

impl Processor {
    pub(crate) const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// Rust's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Debian's name.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Whether programs built for this machine run on it.
    pub(crate) fn is_native(self) -> bool {
        self.name() == std::env::consts::ARCH
    }

    /// Rust's name of the platform.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// A tool of the GNU toolchain for it.
    pub(crate) fn tool(self, name: &str) -> String {
        if self.is_native() { name.to_owned() } else { format!("{}-linux-gnu-{name}", self.name()) }
    }

    /// qemu's program and its machine type. Another processor cannot be accelerated.
    pub(crate) fn emulator(self, accelerator: Accelerator) -> (&'static str, &'static str) {
        match (self, accelerator) {
            (Self::X86_64, Accelerator::Tcg) => ("qemu-system-x86_64", "pc,accel=tcg"),
            (Self::X86_64, Accelerator::Kvm) => ("qemu-system-x86_64", "pc,accel=kvm"),
            (Self::Aarch64, _) => ("qemu-system-aarch64", "virt,accel=tcg"),
        }
    }

    /// The kernel's serial line, and that of the programs. arm64's `virt` machine has one line, on which the kernel
    /// prints only its panic.
    pub(crate) fn lines(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("ttyS0", "ttyS1"),
            Self::Aarch64 => ("ttyAMA0", "ttyAMA0"),
        }
    }

    /// The triple of Debian's directories and of the GNU toolchain.
    pub(crate) fn multiarch(self) -> String {
        format!("{}-linux-gnu", self.name())
    }

    /// This machine's.
    ///
    /// # Errors
    /// When it is one that Weft is not built for.
    pub(crate) fn native() -> Result<Self> {
        let known = Self::ALL.into_iter().find(|processor| processor.is_native());
        known.with_context(|| format!("Weft is not built for {}", std::env::consts::ARCH))
    }
}

/// Makes sure that Rust can build for a target.
///
/// # Errors
/// When there is no standard library for it and rustup cannot fetch it.
pub(crate) fn ensure_standard_library(target: &str) -> Result<()> {
    let mut rustc = std::process::Command::new("rustc");
    let directory = command::output(rustc.args(["--print", "target-libdir", "--target", target]))?;
    if std::path::Path::new(directory.trim()).is_dir() {
        return Ok(());
    }
    step(&format!("rustup target add {target}"));
    command::run(std::process::Command::new("rustup").args(["target", "add", target]))
        .with_context(|| format!("there is no standard library for {target}"))
}
