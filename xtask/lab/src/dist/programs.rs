//! The programs that are packed: of the tests as they are, for users linked statically, also for another processor.
//!
//! What runs in images is linked with glibc, with which it was measured. `weft` runs on any Linux and is linked with
//! musl: a static glibc loads the name service modules of the machine that it finds itself on, which were made for
//! another one. No directory of the machine that compiles them is named in them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use weft_xtask::{
    build::{self, Profile},
    command::{self, step},
    ebpf,
    setup::{self, Scope, packages},
    workspace::Workspace,
};

use crate::{
    kernels,
    processor::{Processor, ensure_standard_library},
};

/// The registry in the sources: that of images which are loaded and not pulled.
pub(super) const REGISTRY: &str = "localhost";
/// The command line's program.
const WEFT: &str = "weft";
/// Not in the cargo profile: the names of functions, by which the PGO profile knows them, depend on it.
const STRIPPED: [&str; 1] = ["-Cstrip=symbols"];

/// Names our images in a registry.
pub(super) fn in_registry(values: &str, registry: &str) -> String {
    values.replace(&format!("{REGISTRY}/weft-"), &format!("{registry}/weft-"))
}

/// Where programs of a profile are, for a processor.
#[derive(Debug)]
pub(super) struct Programs {
    processor: Processor,
    servers: PathBuf,
    command_line: PathBuf,
    is_static: bool,
}

impl Programs {
    /// Whether they are there or not.
    pub(super) fn of(workspace: &Workspace, profile: Profile, processor: Processor) -> Self {
        let built = profile.directory();
        if profile == Profile::Dev && processor.is_native() {
            let binaries = workspace.binaries(built);
            return Self { processor, servers: binaries.clone(), command_line: binaries, is_static: false };
        }
        let of = |libc| workspace.target.join(target(processor, libc)).join(built);
        Self { processor, servers: of("gnu"), command_line: of("musl"), is_static: true }
    }

    /// The processor that they are for.
    pub(super) fn processor(&self) -> Processor {
        self.processor
    }

    /// Whether they need no library.
    pub(super) fn is_static(&self) -> bool {
        self.is_static
    }

    /// A program's file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        if name == WEFT { self.command_line.join(name) } else { self.servers.join(name) }
    }

    /// A program, ready to start: in an emulator, if it is for another processor.
    pub(super) fn command(&self, program: &Path) -> Result<Command> {
        if self.processor.is_native() {
            return Ok(Command::new(program));
        }
        packages::ensure(&packages::EMULATOR)?;
        let mut command = Command::new(format!("qemu-{}-static", self.processor.name()));
        command.arg(program);
        Ok(command)
    }

    /// Builds them; the charts in `weft` name images in this registry.
    ///
    /// # Errors
    /// When something does not compile, and when a program needs a library that it should have within itself.
    pub(super) fn build(&self, workspace: &Workspace, profile: Profile, registry: &str) -> Result<()> {
        let toolchain = setup::ensure(Scope::Build)?;
        ebpf::build(workspace, &toolchain)?;
        if !self.is_static {
            return build::binaries(workspace, Profile::Dev).map(drop);
        }
        packages::ensure(&packages::ALLOCATOR)?;
        if !self.processor.is_native() {
            packages::ensure(&packages::CROSS)?;
        }
        step(&format!("build the servers for {}", self.processor.name()));
        let target = target(self.processor, "gnu");
        ensure_standard_library(&target)?;
        let mut servers = build::for_users(workspace, profile, &target, &STRIPPED, "")?;
        self.prepare(&mut servers, workspace, &target);
        command::run(servers.args(build::servers(profile, &build::OTHER_SERVERS)))?;
        step(&format!("build the proxy for {}", self.processor.name()));
        let mut proxy = build::proxy(workspace, profile, &target, &STRIPPED)?;
        self.prepare(&mut proxy, workspace, &target);
        command::run(&mut proxy)?;
        step(&format!("build weft for {}", self.processor.name()));
        let mut weft = self.weft(workspace, profile)?;
        command::run(weft.args(["--package", "weft-cli"]).env("WEFT_REGISTRY", registry))?;
        let places = workspace.places()?;
        for program in build::OTHER_SERVERS.iter().chain(&[build::PROXY, WEFT]).map(|name| self.path(name)) {
            needs_nothing(&program)?;
            names_no_place(&program, &places)?;
        }
        Ok(())
    }

    /// A build of the command line.
    fn weft(&self, workspace: &Workspace, profile: Profile) -> Result<Command> {
        let target = target(self.processor, "musl");
        ensure_standard_library(&target)?;
        let (compiler, flags) = musl(self.processor)?;
        let mut cargo = build::for_users(workspace, profile, &target, &STRIPPED, &flags)?;
        cargo.env(build::c_of_target("CC", &target), compiler);
        self.prepare(&mut cargo, workspace, &target);
        Ok(cargo)
    }

    /// Names the commit to a build, and what one for another processor needs.
    fn prepare(&self, cargo: &mut Command, workspace: &Workspace, target: &str) {
        let commit = command::output(command::git(&workspace.root).args(["rev-parse", "HEAD"]));
        // Shown by the proxy's metric proxy_build_info and by `weft version`; empty outside a repository, such as in an
        // unpacked archive.
        cargo.env("WEFT_GIT_SHA", commit.unwrap_or_default().trim());
        if !self.processor.is_native() {
            cargo.env(build::of_target("LINKER", target), self.processor.tool("gcc"));
        }
        if self.processor == Processor::Aarch64 {
            // jemalloc takes the largest page of the machines that it shall run on; arm64 has up to 64 KiB.
            cargo.env("JEMALLOC_SYS_WITH_LG_PAGE", "16");
        }
    }
}

fn target(processor: Processor, libc: &str) -> String {
    format!("{}-unknown-linux-{libc}", processor.name())
}

/// What the C parts are compiled with: musl's headers, after which come those of the kernel.
fn musl(processor: Processor) -> Result<(String, String)> {
    Ok(if processor.is_native() {
        packages::ensure(&packages::MUSL)?;
        let flags = format!("-idirafter /usr/include -idirafter /usr/include/{}", processor.multiarch());
        ("musl-gcc".to_owned(), flags)
    } else {
        let compiler = processor.tool("gcc");
        let own = command::output(Command::new(&compiler).arg("-print-file-name=include"))?;
        let headers = kernels::packages::musl_headers(processor)?;
        let flags = format!(
            "-nostdinc -isystem {} -isystem {} -idirafter /usr/{}/include -U_FORTIFY_SOURCE",
            headers.display(),
            own.trim(),
            processor.multiarch()
        );
        (compiler, flags)
    })
}

/// Checks that the kernel can start a program without a loader.
fn needs_nothing(program: &Path) -> Result<()> {
    let headers = command::output(Command::new("readelf").arg("--program-headers").arg(program))?;
    if headers.contains("INTERP") {
        bail!("{} is not linked statically:\n{headers}", program.display());
    }
    Ok(())
}

/// Checks that a program does not tell on which machine it was compiled.
fn names_no_place(program: &Path, places: &[(PathBuf, &str)]) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    for (place, _) in places {
        let place = place.as_os_str().as_encoded_bytes();
        if let Some(at) = memchr::memmem::find(&bytes, place) {
            let text = bytes[at..].iter().take_while(|byte| byte.is_ascii_graphic()).take(200);
            let text: String = text.map(|byte| char::from(*byte)).collect();
            bail!("{} names a path of this machine: {text}", program.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_the_tests_are_packed_as_they_are_and_others_are_static() {
        let workspace = Workspace::load().expect("a workspace");
        let native = Processor::native().expect("a processor");
        let dev = Programs::of(&workspace, Profile::Dev, native);
        assert_eq!(dev.path("weft"), workspace.target.join("debug/weft"));
        assert!(!dev.is_static());
        let arm64 = Programs::of(&workspace, Profile::Dist, Processor::Aarch64);
        assert_eq!(arm64.path("weft"), workspace.target.join("aarch64-unknown-linux-musl/dist/weft"));
        assert_eq!(arm64.path("weft-proxy"), workspace.target.join("aarch64-unknown-linux-gnu/dist/weft-proxy"));
        assert!(arm64.is_static());
    }

    #[test]
    fn a_program_with_a_loader_is_found() {
        let own = std::env::current_exe().expect("a path");
        let error = needs_nothing(&own).expect_err("tests are linked with the C library");
        assert!(error.to_string().contains("not linked statically"), "{error}");
    }

    #[test]
    fn a_program_that_names_its_checkout_is_found() {
        let own = std::env::current_exe().expect("a path");
        let workspace = Workspace::load().expect("a workspace");
        let error = names_no_place(&own, &[(workspace.root, "/weft")]).expect_err("tests are compiled with paths");
        assert!(error.to_string().contains("names a path of this machine: /"), "{error}");
        // A name that this program does not contain, either.
        let other = format!("/of-another/{}", std::process::id());
        names_no_place(&own, &[(other.into(), "/weft")]).expect("no such path");
    }
}
