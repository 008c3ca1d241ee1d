//! Programs and libraries of the distribution: their use, their detection, their installation.

use std::{
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::Scope;
use crate::{
    command::{self, step},
    workspace,
};

/// How to detect that something is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// A program in PATH or in the system's `sbin`.
    Program(&'static str),
    /// A file at this path.
    File(&'static str),
    /// A file at one of these paths.
    OneOf(&'static [&'static str]),
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program(name) => f.write_str(name),
            Self::File(path) => f.write_str(path),
            Self::OneOf(paths) => f.write_str(&paths.join(" or ")),
        }
    }
}

/// A requirement that the distribution provides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// How to notice that it is missing.
    pub probe: Probe,
    /// Debian's and Ubuntu's package.
    pub package: &'static str,
    /// Who uses it, for the message.
    pub why: &'static str,
}

const fn need(probe: Probe, package: &'static str, why: &'static str) -> Need {
    Need { probe, package, why }
}

/// Requirements of compiling: the C parts of our dependencies.
const BUILD: [Need; 2] = [
    need(Probe::Program("cc"), "gcc", "links every program and compiles the cryptography (aws-lc)"),
    need(Probe::File("/usr/include/stdio.h"), "libc6-dev", "headers of the C library for the same"),
];

/// Requirement of building the proxy for measurements and for users.
pub const ALLOCATOR: [Need; 1] =
    [need(Probe::Program("make"), "make", "builds the memory allocator of the proxy and the control plane (jemalloc)")];

/// Programs that the sandbox, the tests and the benches call.
const RUN: [Need; 5] = [
    need(Probe::Program("nsenter"), "util-linux", "looks into the network namespaces of pods"),
    need(Probe::Program("ip"), "iproute2", "makes the network namespaces of the agent's tests"),
    need(Probe::Program("nft"), "nftables", "answers Service addresses in the sandbox's node namespace"),
    need(Probe::Program("iptables-nft-restore"), "iptables", "is the interception that eBPF is compared with"),
    need(Probe::Program("iptables-legacy-save"), "iptables", "shows that no pod has rules of the old kind either"),
];

/// Requirements of the tests of the dashboard.
const BROWSER: [Need; 2] = [
    need(Probe::Program("chromium"), "chromium", "looks at the dashboard in its tests"),
    need(Probe::File("/usr/share/fonts/opentype/inter"), "fonts-inter", "is the font of the dashboard's pictures"),
];

/// Clients and servers that the tests of the proxies send through them.
pub(crate) const CLIENTS: [Need; 4] = [
    need(Probe::Program("curl"), "curl", "is a client of HTTP/1 and HTTP/2 in the tests of the proxies"),
    need(Probe::Program("h2load"), "nghttp2-client", "is another one"),
    need(
        // A program of the package with the standard library; `python3` itself may come without.
        Probe::File("/usr/bin/pydoc3"),
        "python3",
        "is a client and a server of HTTP/1 in the tests of the proxies",
    ),
    need(Probe::File("/usr/bin/node"), "nodejs", "is a client and a server of HTTP/1 and HTTP/2 there"),
];

/// Requirements of a Kubernetes node, besides the programs that `kube` builds.
const KUBE: [Need; 11] = [
    need(Probe::Program("containerd"), "containerd", "runs the containers of the test cluster"),
    need(Probe::Program("runc"), "runc", "starts them"),
    need(Probe::OneOf(&PTP), "containernetworking-plugins", "gives the pods of the test cluster their network"),
    need(Probe::Program("ipset"), "ipset", "keeps the addresses that NetworkPolicies of the test cluster admit"),
    need(Probe::Program("openssl"), "openssl", "makes the certificates of the test cluster"),
    need(Probe::Program("strip"), "binutils", "takes the symbols out of programs in images"),
    need(Probe::Program("mount"), "mount", "makes the file systems of the test cluster's node"),
    need(Probe::Program("curl"), "curl", "gets a release in the test of the script that installs it"),
    need(Probe::Program("ssh-keygen"), "openssh-client", "signs releases"),
    need(Probe::Program("faketime"), "faketime", "sets the clocks of processes of the control plane in its tests"),
    need(Probe::Program("kill"), "procps", "ends processes of the control plane in its tests"),
];

/// Requirements of booting other kernels. `ip` goes into the machine.
const KERNELS: [Need; 8] = [
    need(Probe::Program("qemu-system-x86_64"), "qemu-system-x86", "boots kernels other than this machine's"),
    need(Probe::Program("busybox"), "busybox-static", "is the user space of those machines"),
    need(Probe::Program("cpio"), "cpio", "packs their initramfs"),
    need(Probe::Program("dpkg-deb"), "dpkg", "unpacks distributions' kernels"),
    need(Probe::Program("xz"), "xz-utils", "unpacks their modules"),
    need(Probe::Program("strip"), "binutils", "takes the symbols out of programs in their initramfs"),
    need(Probe::Program("ip"), "iproute2", "makes the network namespaces of the agent's tests"),
    need(
        Probe::File("/usr/share/keyrings/debian-archive-keyring.gpg"),
        "debian-archive-keyring",
        "shows that the kernels are Debian's",
    ),
];

/// Requirements of compiling for arm64 on another machine.
pub const CROSS: [Need; 2] = [
    need(Probe::Program("aarch64-linux-gnu-gcc"), "gcc-aarch64-linux-gnu", "links programs for arm64"),
    need(
        Probe::File("/usr/aarch64-linux-gnu/include/stdio.h"),
        "libc6-dev-arm64-cross",
        "headers of the C library for the same",
    ),
];

/// Requirement of booting kernels for arm64.
const ARM64: [Need; 1] = [need(Probe::Program("qemu-system-aarch64"), "qemu-system-arm", "boots kernels for arm64")];

/// Requirement of a command line that is linked statically.
pub const MUSL: [Need; 1] = [need(Probe::Program("musl-gcc"), "musl-tools", "compiles the C parts of a static weft")];

/// Requirement of starting programs for arm64 on another machine.
pub const EMULATOR: [Need; 1] =
    [need(Probe::Program("qemu-aarch64-static"), "qemu-user-static", "starts programs for arm64")];

/// Requirements of reading the history, if there is one.
pub const GIT: Need = need(Probe::Program("git"), "git", "lists commits, and checks out earlier ones");

/// Requirements of creating a bare root file system.
pub const BARE: [Need; 5] = [
    need(Probe::Program("debootstrap"), "debootstrap", "makes the root file system of a new machine"),
    need(Probe::Program("unshare"), "util-linux", "gives it mounts of its own"),
    need(Probe::Program("pivot_root"), "util-linux", "makes it the root"),
    need(Probe::Program("mount"), "mount", "mounts what a machine has in it"),
    need(
        Probe::File("/usr/share/keyrings/debian-archive-keyring.gpg"),
        "debian-archive-keyring",
        "shows that the packages are Debian's",
    ),
];

/// Requirement of checking shell scripts.
pub(crate) const SHELLCHECK: [Need; 1] = [need(Probe::Program("shellcheck"), "shellcheck", "checks our shell scripts")];

/// Requirements of building the fuzz targets.
pub(crate) const FUZZ: [Need; 1] = [need(Probe::Program("c++"), "g++", "compiles libFuzzer")];

/// Requirement of the bench of the proxy alone.
pub(crate) const PEER: [Need; 1] =
    [need(Probe::Program("haproxy"), "haproxy", "is the proxy that ours is compared with")];

/// Requirement of the profiles of the same.
pub(crate) const PROFILER: [Need; 1] =
    [need(Probe::Program("perf"), "linux-perf", "samples where the proxies spend their time")];

/// Paths of one of the plugins on distributions.
const PTP: [&str; 3] = ["/usr/lib/cni/ptp", "/opt/cni/bin/ptp", "/usr/libexec/cni/ptp"];

/// The missing requirements of a scope.
pub(crate) fn missing(scope: Scope) -> Vec<Need> {
    let more = match scope {
        Scope::Build => [&[][..], &[], &[]],
        Scope::Run => [&RUN[..], &[], &[]],
        Scope::Kube => [&RUN[..], &KUBE, &[]],
        Scope::Kernels => [&KERNELS[..], &[], &[]],
        Scope::KernelsArm64 => [&KERNELS[..], &CROSS, &ARM64],
    };
    missing_among(BUILD.iter().chain(more.into_iter().flatten()), is_there)
}

fn missing_among<'a>(needs: impl Iterator<Item = &'a Need>, is_there: impl Fn(&Probe) -> bool) -> Vec<Need> {
    needs.filter(|need| !is_there(&need.probe)).cloned().collect()
}

fn is_there(probe: &Probe) -> bool {
    match probe {
        Probe::Program(name) => command::find(name).is_some(),
        Probe::File(path) => Path::new(path).exists(),
        Probe::OneOf(paths) => paths.iter().any(|path| Path::new(path).exists()),
    }
}

/// Installs the missing ones.
///
/// # Errors
/// As [`install`].
pub fn ensure(needs: &[Need]) -> Result<()> {
    install(&missing_among(needs.iter(), is_there))
}

/// Installs the browser of the dashboard's tests. `false` where there is none and the distribution has no package of
/// it, as Ubuntu.
///
/// # Errors
/// As [`install`].
pub(crate) fn ensure_browser() -> Result<bool> {
    let [browser, _] = &BROWSER;
    if !is_there(&browser.probe) && !apt_knows(&[browser.package]) {
        return Ok(false);
    }
    ensure(&BROWSER)?;
    Ok(true)
}

/// Installs requirements.
///
/// # Errors
/// Without apt or root, or when apt fails: the message names packages, reasons and the command to run.
pub fn install(missing: &[Need]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    for need in missing {
        step(&format!("missing {}: {}", need.probe, need.why));
    }
    let mut packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    packages.dedup();
    apt_install(&packages)?;
    let still: Vec<_> =
        missing.iter().filter(|need| !is_there(&need.probe)).map(|need| need.probe.to_string()).collect();
    if !still.is_empty() {
        bail!("apt installed the packages but {} is still missing: install it by hand", still.join(", "));
    }
    Ok(())
}

/// Installs packages with apt, never removing conflicting ones.
///
/// # Errors
/// Without apt or root, and when apt fails.
pub fn apt_install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    let apt = apt().with_context(|| {
        format!("install what your distribution calls these Debian packages, then run this again: {list}")
    })?;
    if !command::is_root() {
        bail!("installing needs root; run: sudo apt-get update && sudo apt-get install -y {list}");
    }
    let _turn = turn()?;
    step(&format!("apt-get install {list}"));
    command::run(apt_command(&apt).args(["update", "-qq"]))?;
    let mut install = apt_command(&apt);
    install.args(["install", "-y", "-qq", "--no-install-recommends", "--no-remove"]).args(packages);
    command::run(&mut install)
}

/// Unpacks a package into a directory without installing it: a server's package would start the server.
///
/// # Errors
/// When there is no apt, or it does not have the package.
pub fn unpack(package: &str, into: &Path) -> Result<()> {
    let apt = apt().with_context(|| format!("no apt-get to fetch the Debian package {package} with"))?;
    let _turn = turn()?;
    if command::is_root() {
        command::run(apt_command(&apt).args(["update", "-qq"]))?;
    }
    command::run(apt_command(&apt).args(["download", "-qq", package]).current_dir(into))?;
    unpack_archives(into, into)
}

/// Unpacks the packages in a directory into another, and removes them.
///
/// # Errors
/// When one is not a package.
pub fn unpack_archives(from: &Path, into: &Path) -> Result<()> {
    for archive in workspace::files(from, "deb")? {
        command::run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(into))?;
        fs::remove_file(&archive)?;
    }
    Ok(())
}

/// Whether apt could install every one of these packages.
pub fn apt_knows(packages: &[&str]) -> bool {
    let Ok(apt) = apt() else { return false };
    let known = |apt: &Path| {
        let mut simulate = apt_command(apt);
        simulate.args(["install", "-s", "-qq", "--no-install-recommends", "--no-remove"]).args(packages);
        command::output(&mut simulate).is_ok()
    };
    // A new machine has no package lists yet.
    known(&apt)
        || (command::is_root()
            && turn().is_ok_and(|_turn| command::run(apt_command(&apt).args(["update", "-qq"])).is_ok())
            && known(&apt))
}

/// Waits for other runs of this program: apt waits for the lock of the packages, and fails where the lists are locked.
fn turn() -> Result<File> {
    workspace::lock(&workspace::cache_directory()?.join("apt.lock"))
}

fn apt() -> Result<PathBuf> {
    command::find("apt-get").context("there is no apt-get")
}

fn apt_command(apt: &Path) -> Command {
    let mut command = Command::new(apt);
    // Another apt may hold the lock for a while.
    command.args(["-o", "DPkg::Lock::Timeout=600"]).env("DEBIAN_FRONTEND", "noninteractive");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_what_is_missing_and_only_that() {
        let without_nft = |probe: &Probe| *probe != Probe::Program("nft");
        let missing = missing_among(RUN.iter(), without_nft);
        assert_eq!(missing.iter().map(|need| need.package).collect::<Vec<_>>(), ["nftables"]);
        assert_eq!(missing_among(RUN.iter(), |_| true), []);
    }
}
