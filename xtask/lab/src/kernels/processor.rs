//! Differences between processors: names of packages, programs and devices.

use anyhow::{Context as _, Result};
use weft_xtask::command::{self, step};

/// A processor that Weft is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Processor {
    X86_64,
    /// On an x86_64 machine, with a cross compiler and an emulator.
    Aarch64,
}

/// The kind of emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Accelerator {
    /// Translation, on any machine
    Tcg,
    /// This machine's own processors; a /dev/kvm inside a virtual machine may exist and not work
    Kvm,
}

impl Processor {
    pub(super) const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// Rust's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Debian's name.
    pub(super) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Whether programs built for this machine run on it.
    pub(super) fn is_native(self) -> bool {
        self.name() == std::env::consts::ARCH
    }

    /// Rust's name of the platform.
    pub(super) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// A tool of the GNU toolchain for it.
    pub(super) fn tool(self, name: &str) -> String {
        if self.is_native() { name.to_owned() } else { format!("{}-linux-gnu-{name}", self.name()) }
    }

    /// qemu's program and its machine type. Another processor cannot be accelerated.
    pub(super) fn emulator(self, accelerator: Accelerator) -> (&'static str, &'static str) {
        match (self, accelerator) {
            (Self::X86_64, Accelerator::Tcg) => ("qemu-system-x86_64", "pc,accel=tcg"),
            (Self::X86_64, Accelerator::Kvm) => ("qemu-system-x86_64", "pc,accel=kvm"),
            (Self::Aarch64, _) => ("qemu-system-aarch64", "virt,accel=tcg"),
        }
    }

    /// The kernel's serial line, and that of the programs. arm64's `virt` machine has one line, on which the kernel
    /// prints only its panic.
    pub(super) fn lines(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("ttyS0", "ttyS1"),
            Self::Aarch64 => ("ttyAMA0", "ttyAMA0"),
        }
    }

    /// Makes sure that Rust can build for it.
    ///
    /// # Errors
    /// When there is no standard library for it and rustup cannot fetch it.
    pub(super) fn ensure_standard_library(self) -> Result<()> {
        let target = self.target();
        let mut rustc = std::process::Command::new("rustc");
        let directory = command::output(rustc.args(["--print", "target-libdir", "--target", &target]))?;
        if std::path::Path::new(directory.trim()).is_dir() {
            return Ok(());
        }
        step(&format!("rustup target add {target}"));
        command::run(std::process::Command::new("rustup").args(["target", "add", &target]))
            .with_context(|| format!("there is no standard library for {target}"))
    }
}
