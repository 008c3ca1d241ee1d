//! Kernels from distributions' packages: found by apt in a separate directory, verified with the distribution's keys,
//! unpacked into the cache. Nothing is installed, and this machine's package lists do not change.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use weft_xtask::{
    command::{self, step},
    setup::packages::unpack_archives,
    workspace,
};

use super::Kernel;
use crate::processor::Processor;

/// Debian's keys, installed by `setup`.
pub(crate) const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Ubuntu's keys, in a package that Debian has as well.
const UBUNTU_KEYS: &str = "usr/share/keyrings/ubuntu-archive-keyring.gpg";

/// The distribution of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Archive {
    Debian,
    DebianSecurity,
    Ubuntu,
}

/// A kernel in the cache.
#[derive(Debug)]
pub(super) struct Fetched {
    /// Release, as printed by `uname -r`.
    pub(super) release: String,
    /// The kernel image.
    pub(super) image: PathBuf,
    /// The directory of its modules.
    pub(super) modules: PathBuf,
}

impl Archive {
    /// The repository's name of itself, and its address unless this machine's apt knows a mirror.
    fn identity(self) -> (&'static str, &'static str) {
        match self {
            Self::Debian => ("Debian|Debian", "http://deb.debian.org/debian"),
            Self::DebianSecurity => ("Debian|Debian-Security", "http://deb.debian.org/debian-security"),
            Self::Ubuntu => ("Ubuntu|Ubuntu", "http://archive.ubuntu.com/ubuntu"),
        }
    }

    fn address(self) -> String {
        let (identity, default) = self.identity();
        let mut targets = Command::new("apt-get");
        targets.args(["indextargets", "--format", "$(ORIGIN)|$(LABEL) $(REPO_URI)", "Created-By: Packages"]);
        let known = command::output(&mut targets).unwrap_or_default();
        mirror(&known, identity).unwrap_or(default).to_owned()
    }
}

/// The mirror in lines of `ORIGIN|LABEL ADDRESS`.
fn mirror<'a>(targets: &'a str, identity: &str) -> Option<&'a str> {
    targets.lines().find_map(|line| line.strip_prefix(identity)?.strip_prefix(' '))
}

/// Ensures that a kernel is in the cache.
///
/// # Errors
/// When the archive cannot be reached, its signature is not its distribution's, or its package contains no kernel.
pub(super) fn fetch(kernel: &Kernel, refresh: bool) -> Result<Fetched> {
    let cache = workspace::cache_directory()?.join("kernels");
    let unpacked = cache.join(kernel.name);
    if refresh || find(&unpacked).is_err() {
        let keys = match kernel.archive {
            Archive::Debian | Archive::DebianSecurity => PathBuf::from(DEBIAN_KEYS),
            Archive::Ubuntu => ubuntu_keys()?,
        };
        step(&format!("fetch {} of {}", kernel.package, kernel.suite));
        let apt =
            Apt::new(&cache.join("apt").join(kernel.name), kernel.archive, kernel.suite, kernel.processor, &keys)?;
        let image = apt
            .dependency(kernel.package, "linux-image-")?
            .with_context(|| format!("no image for {}", kernel.package))?;
        // Older packages of Debian contain everything.
        let parts = [apt.dependency(&image, "linux-modules-")?, apt.dependency(&image, "linux-binary-")?];
        let wanted: Vec<String> = std::iter::once(image).chain(parts.into_iter().flatten()).collect();
        apt.unpack(&wanted, &unpacked)?;
    }
    find(&unpacked).with_context(|| format!("look into {}", unpacked.display()))
}

/// Unpacks a user space for another processor than this machine's: the C library, `ip` and a static busybox.
///
/// # Errors
/// As [`fetch`].
pub(super) fn userland(processor: Processor, root: &Path) -> Result<()> {
    let unpacked = workspace::cache_directory()?.join("kernels").join(format!("userland-{}", processor.name()));
    if !unpacked.is_dir() {
        step(&format!("fetch a user space for {}", processor.name()));
        let apt = debian(&unpacked.with_extension("apt"), processor)?;
        apt.unpack_with_dependencies(&["libc6", "libgcc-s1", "iproute2", "busybox-static"], &unpacked)?;
    }
    // Documentation and data that nothing here uses would be most of it.
    for name in ["usr/bin", "usr/lib"] {
        let to = root.join(name);
        fs::create_dir_all(&to)?;
        command::run(Command::new("cp").arg("-a").arg(unpacked.join(name).join(".")).arg(&to))?;
    }
    for (name, target) in [("bin", "usr/bin"), ("lib", "usr/lib")] {
        std::os::unix::fs::symlink(target, root.join(name)).with_context(|| format!("link {name}"))?;
    }
    Ok(())
}

/// The headers of musl for another processor than this machine's, which has no package with them.
///
/// # Errors
/// As [`fetch`].
pub(crate) fn musl_headers(processor: Processor) -> Result<PathBuf> {
    let unpacked = workspace::cache_directory()?.join("tools").join(format!("musl-{}", processor.name()));
    if !unpacked.is_dir() {
        step(&format!("fetch musl's headers for {}", processor.name()));
        debian(&unpacked.with_extension("apt"), processor)?.unpack(&["musl-dev".to_owned()], &unpacked)?;
    }
    Ok(unpacked.join("usr/include").join(format!("{}-linux-musl", processor.name())))
}

/// The Debian release of user spaces: one that has merged /bin and /lib into /usr.
fn debian(directory: &Path, processor: Processor) -> Result<Apt> {
    Apt::new(directory, Archive::Debian, "trixie", processor, Path::new(DEBIAN_KEYS))
}

/// Ubuntu's keys, from Debian's package of them.
///
/// # Errors
/// When Debian's archive cannot be reached.
pub(crate) fn ubuntu_keys() -> Result<PathBuf> {
    let cache = workspace::cache_directory()?.join("kernels");
    let unpacked = cache.join("ubuntu-keyring");
    let keys = unpacked.join(UBUNTU_KEYS);
    if !keys.is_file() {
        step("fetch Ubuntu's keys from Debian");
        let apt = debian(&cache.join("apt/ubuntu-keyring"), Processor::X86_64)?;
        apt.unpack(&["ubuntu-keyring".to_owned()], &unpacked)?;
    }
    Ok(keys)
}

/// The kernel in a directory into which its packages were unpacked.
fn find(unpacked: &Path) -> Result<Fetched> {
    let modules = ["lib/modules", "usr/lib/modules"].map(|path| unpacked.join(path));
    let modules = modules.iter().find(|path| path.is_dir()).context("no modules")?;
    let entry = fs::read_dir(modules)?.next().context("no modules")??;
    let release = entry.file_name().to_string_lossy().into_owned();
    let images = [unpacked.join("boot").join(format!("vmlinuz-{release}")), entry.path().join("vmlinuz")];
    let Some(image) = images.iter().find(|image| image.is_file()) else {
        bail!("no {}", images[0].display());
    };
    Ok(Fetched { release, image: image.clone(), modules: entry.path() })
}

/// An apt that knows one suite of one archive and nothing about this machine.
struct Apt {
    directory: PathBuf,
    processor: Processor,
}

impl Apt {
    fn new(directory: &Path, archive: Archive, suite: &str, processor: Processor, keys: &Path) -> Result<Self> {
        for path in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(directory.join(path)).with_context(|| format!("create {}", directory.display()))?;
        }
        let source = format!("deb [signed-by={}] {} {suite} main\n", keys.display(), archive.address());
        fs::write(directory.join("sources.list"), source)?;
        fs::write(directory.join("status"), "")?;
        let apt = Self { directory: directory.to_path_buf(), processor };
        command::run(apt.command("apt-get").args(["update", "-qq", "--error-on=any"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let mut set = |name: &str, value: &str| {
            command.arg("-o").arg(format!("{name}={value}"));
        };
        let path = |name: &str| self.directory.join(name).display().to_string();
        set("Dir::Etc::sourcelist", &path("sources.list"));
        set("Dir::Etc::sourceparts", "/dev/null");
        set("Dir::State::lists", &path("lists"));
        set("Dir::State::status", &path("status"));
        set("Dir::Cache", &path(""));
        set("Dir::Cache::archives", &path("archives"));
        set("APT::Architecture", self.processor.debian());
        set("APT::Architectures", self.processor.debian());
        // As the current user, who owns the directory.
        set("APT::Sandbox::User", "root");
        set("Acquire::Languages", "none");
        set("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", "false");
        command
    }

    /// The first package with this prefix that another depends on.
    fn dependency(&self, package: &str, prefix: &str) -> Result<Option<String>> {
        let mut show = self.command("apt-cache");
        Ok(dependency(&command::output(show.args(["show", "--no-all-versions", package]))?, prefix))
    }

    /// Replaces a directory with the content of packages.
    fn unpack(&self, packages: &[String], directory: &Path) -> Result<()> {
        let archives = self.empty_archives()?;
        command::run(self.command("apt-get").args(["download", "-qq"]).args(packages).current_dir(archives))?;
        self.unpack_archives(directory)
    }

    /// As [`Self::unpack`], with all their dependencies.
    fn unpack_with_dependencies(&self, packages: &[&str], directory: &Path) -> Result<()> {
        self.empty_archives()?;
        let mut install = self.command("apt-get");
        install.args(["install", "-qq", "-y", "--download-only", "--no-install-recommends"]).args(packages);
        command::run(&mut install)?;
        self.unpack_archives(directory)
    }

    fn empty_archives(&self) -> Result<PathBuf> {
        let directory = self.directory.join("archives");
        workspace::files(&directory, "deb")?.iter().try_for_each(fs::remove_file)?;
        Ok(directory)
    }

    fn unpack_archives(&self, directory: &Path) -> Result<()> {
        let part = directory.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        fs::create_dir_all(&part)?;
        unpack_archives(&self.directory.join("archives"), &part)?;
        let _ = fs::remove_dir_all(directory);
        fs::rename(&part, directory).with_context(|| format!("rename {} to {}", part.display(), directory.display()))
    }
}

/// A dependency in a package's record, without its version.
fn dependency(record: &str, prefix: &str) -> Option<String> {
    let depends = record.lines().find_map(|line| line.strip_prefix("Depends: "))?;
    let names = depends.split([',', '|']).filter_map(|part| part.split_whitespace().next());
    names.map(str::to_owned).find(|name| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_this_machines_mirror() {
        let targets = "Debian|Debian http://mirror/debian/\nDebian|Debian-Security http://mirror/security/\n";
        assert_eq!(mirror(targets, "Debian|Debian"), Some("http://mirror/debian/"));
        assert_eq!(mirror(targets, "Debian|Debian-Security"), Some("http://mirror/security/"));
        assert_eq!(mirror(targets, "Ubuntu|Ubuntu"), None);
    }

    #[test]
    fn reads_dependencies() {
        let record =
            "Package: a\nDepends: kmod, linux-base (>= 4.5) | x, linux-image-6.1.0-56-cloud-amd64 (= 6.1.192-2)\n";
        assert_eq!(dependency(record, "linux-image-").as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(dependency(record, "linux-modules-"), None);
    }

    #[test]
    fn a_directory_without_a_kernel_is_none() {
        assert!(find(Path::new("/nonexistent")).is_err());
    }
}
