//! `bare`: the commands of the README on an empty machine.
//!
//! debootstrap creates the root file system of a new Debian or Ubuntu. Rust comes from this machine's rustup, under an
//! overlay; the checkout is a clone of the last commit; the command itself has to install everything else. It runs on
//! this kernel, with its own mounts ([`ENTER`]) and the caches of a new user.
//!
//! The mounts end with the last process in them. The next run removes directories of runs that were killed.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use weft_xtask::{
    command::{self, step},
    setup::packages,
    workspace::{self, Workspace, cargo_home, home_of},
};

use crate::kernels::packages::{DEBIAN_KEYS, ubuntu_keys};

/// Makes the directory in `$1` the root and runs the other arguments there. The mount namespace is private, so nothing
/// of this is visible outside. `/sys` includes its control groups and the bpf file system.
const ENTER: &str = r#"
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir "$root/.upper" "$root/.work"
mount -t overlay -o "lowerdir=$RUSTUP_HOME,upperdir=$root/.upper,workdir=$root/.work" overlay "$root/root/.rustup"
mount --bind -o ro "$CARGO_BIN" "$root/root/.cargo/bin"
cd "$root"
mkdir -p .host
pivot_root . .host
umount --lazy /.host
rmdir /.host
cd /root/weft
exec env -i "$@"
"#;

/// Environment variables that are passed on: access to package registries, and that rustup cannot fetch toolchains if
/// it cannot.
const PASSED_ON: [&str; 13] = [
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "GOPROXY",
    "GONOSUMDB",
    "PIP_INDEX_URL",
    "RUSTUP_AUTO_INSTALL",
    "RUSTUP_TOOLCHAIN",
    "RUSTUP_DIST_SERVER",
    "TERM",
];

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask bare                              `cargo xtask demo` on a new Debian 12
  cargo xtask bare --run test                   `cargo xtask test`, with every cache empty
  cargo xtask bare --release noble --run setup  what is installed on a new Ubuntu 24.04
  cargo xtask bare --run unit --keep            leave the root file system, to look at it

Needs root, a mirror of the distribution and 40 GB. What is not committed is left out.")]
pub(crate) struct Args {
    /// Distribution of the root file system
    #[arg(long, value_enum, default_value_t = Release::Bookworm)]
    release: Release,
    /// The command to run there
    #[arg(long, value_enum, default_value_t = Run::Demo)]
    run: Run,
    /// Do not remove the root file system
    #[arg(long)]
    keep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Release {
    /// Debian 12
    Bookworm,
    /// Debian 13
    Trixie,
    /// Ubuntu 24.04
    Noble,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Run {
    /// cargo xtask setup
    Setup,
    /// cargo xtask test unit
    Unit,
    /// cargo xtask demo
    Demo,
    /// cargo xtask test
    Test,
}

impl Release {
    fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Noble => "noble",
        }
    }

    fn mirror(self) -> &'static str {
        match self {
            Self::Bookworm | Self::Trixie => "http://deb.debian.org/debian",
            Self::Noble => "http://archive.ubuntu.com/ubuntu",
        }
    }

    /// debootstrap's recipe. An older debootstrap does not know newer releases, whose recipe is the same.
    fn recipe(self) -> &'static str {
        match self {
            Self::Bookworm | Self::Trixie => "sid",
            Self::Noble => "gutsy",
        }
    }

    /// The package sources that the distribution's installer writes.
    fn sources(self) -> String {
        let (name, mirror) = (self.name(), self.mirror());
        match self {
            Self::Bookworm | Self::Trixie => format!(
                "deb {mirror} {name} main\ndeb {mirror} {name}-updates main\n\
                 deb http://deb.debian.org/debian-security {name}-security main\n"
            ),
            Self::Noble => ["", "-updates", "-security"]
                .map(|pocket| format!("deb {mirror} {name}{pocket} main universe\n"))
                .concat(),
        }
    }
}

impl Run {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Setup => &["setup"],
            Self::Unit => &["test", "unit"],
            Self::Demo => &["demo"],
            Self::Test => &["test"],
        }
    }
}

/// Creates the root file system, runs the command in it, and removes it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !command::is_root() {
        bail!("making a root file system needs root");
    }
    let workspace = Workspace::load()?;
    packages::ensure(&packages::BARE)?;
    packages::ensure(&[packages::GIT])?;
    let parent = workspace::cache_directory()?.join("bare");
    fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
    remove_abandoned(&parent)?;
    let root = Root { path: parent.join(format!("{}-{}", args.release.name(), std::process::id())), keep: args.keep };
    root.make(args.release, &parent)?;
    root.furnish(&workspace, args.release)?;
    let started = Instant::now();
    let result = root.run(args.run.arguments());
    step(&format!(
        "{} in a bare {}: {} s",
        args.run.arguments().join(" "),
        args.release.name(),
        started.elapsed().as_secs()
    ));
    result
}

/// A root file system, removed when dropped.
#[derive(Debug)]
struct Root {
    path: PathBuf,
    keep: bool,
}

impl Root {
    fn make(&self, release: Release, cache: &Path) -> Result<()> {
        step(&format!("make a bare {} in {}", release.name(), self.path.display()));
        let archives = cache.join(format!("archives-{}", release.name()));
        fs::create_dir_all(&archives)?;
        let mut debootstrap = Command::new("debootstrap");
        // Required by rustup before it installs Rust: trusted certificates and a linker.
        debootstrap.args(["--variant=minbase", "--include=ca-certificates,gcc,libc6-dev"]);
        debootstrap.arg(format!("--cache-dir={}", archives.display()));
        let keys = match release {
            Release::Bookworm | Release::Trixie => PathBuf::from(DEBIAN_KEYS),
            Release::Noble => ubuntu_keys()?,
        };
        debootstrap.arg("--force-check-gpg").arg(format!("--keyring={}", keys.display()));
        debootstrap.arg(release.name()).arg(&self.path).args([release.mirror(), release.recipe()]);
        command::run(&mut debootstrap)
    }

    /// Adds the README's requirements, Rust through rustup, the checkout, and this network's names and certificates.
    fn furnish(&self, workspace: &Workspace, release: Release) -> Result<()> {
        fs::write(self.path.join("etc/apt/sources.list"), release.sources()).context("write sources.list")?;
        for file in ["etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt"] {
            let (from, to) = (Path::new("/").join(file), self.path.join(file));
            fs::copy(&from, &to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
        }
        let home = self.path.join("root");
        for directory in [".rustup", ".cargo/bin"] {
            fs::create_dir_all(home.join(directory))?;
        }
        // Toolchains link to each other by these paths.
        let outside = rustup_home()?;
        if outside != Path::new("/root/.rustup") {
            let link = self.path.join(outside.strip_prefix("/").unwrap_or(&outside));
            fs::create_dir_all(link.parent().unwrap_or(&link))?;
            symlink("/root/.rustup", &link).with_context(|| format!("link {}", link.display()))?;
        }
        let configuration = cargo_home()?.join("config.toml");
        if configuration.exists() {
            fs::copy(&configuration, home.join(".cargo/config.toml")).context("copy cargo's configuration")?;
        }
        let mut clone = Command::new("git");
        clone.args(["-c", "safe.directory=*", "clone", "--quiet", "--no-hardlinks"]);
        command::run(clone.arg(&workspace.root).arg(home.join("weft")))
    }

    fn run(&self, arguments: &[&str]) -> Result<()> {
        step(&format!("cargo xtask {} in it", arguments.join(" ")));
        // `setpriv` ends it with this process; each `exec` keeps the process.
        let mut enter = Command::new("setpriv");
        enter.args(["--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]);
        enter.arg(&self.path).args(["HOME=/root", "USER=root", "LANG=C.UTF-8"]);
        enter.arg("PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        for name in PASSED_ON {
            if let Ok(value) = std::env::var(name) {
                enter.arg(format!("{name}={value}"));
            }
        }
        enter.args(["cargo", "xtask"]).args(arguments);
        enter.env("RUSTUP_HOME", rustup_home()?).env("CARGO_BIN", cargo_home()?.join("bin"));
        // The command line would contain the whole script.
        let status = enter.status().context("start setpriv")?;
        if !status.success() {
            bail!("`cargo xtask {}` failed in {} ({status})", arguments.join(" "), self.path.display());
        }
        Ok(())
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if self.keep {
            step(&format!("{} stays; remove it when it has been looked at", self.path.display()));
        } else if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("error: remove {}: {error}", self.path.display());
        }
    }
}

/// Removes the remains of runs that were killed: directories that end in the number of a process that is gone.
fn remove_abandoned(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent).with_context(|| format!("list {}", parent.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let owner = name.rsplit_once('-').and_then(|(_, pid)| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            step(&format!("remove {}, left by a run that was killed", path.display()));
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn rustup_home() -> Result<PathBuf> {
    home_of("RUSTUP_HOME", ".rustup")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_those_of_the_distribution() {
        assert!(Release::Bookworm.sources().contains("debian-security bookworm-security main"));
        assert!(Release::Noble.sources().contains("ubuntu noble-updates main universe"));
    }

    #[test]
    fn only_directories_of_processes_that_are_gone_are_abandoned() {
        let parent = std::env::temp_dir().join(format!("weft-bare-{}", std::process::id()));
        let own = format!("noble-{}", std::process::id());
        // Above the largest pid of Linux (proc_sys_kernel(5)).
        for name in [own.as_str(), "bookworm-4194305", "archives-bookworm"] {
            fs::create_dir_all(parent.join(name)).expect("a directory");
        }
        let done = remove_abandoned(&parent);
        let is_there = |name: &str| parent.join(name).exists();
        let left = [is_there(&own), is_there("bookworm-4194305"), is_there("archives-bookworm")];
        fs::remove_dir_all(&parent).expect("removed");
        done.expect("listed");
        assert_eq!(left, [true, false, true]);
    }
}
