//! `dist`: everything to install in a cluster: container images of our programs, packaged charts, the command line `weft`, and
//! what goes with them.
//!
//! An image contains a program, the libraries that it is linked with at their own paths, and a list of users, and
//! nothing else. The libraries are one layer that all images share.

pub(crate) mod image;
mod release;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use image::{Files, Image, Layer};
use weft_xtask::{
    build::{self, Profile},
    command::{self, step},
    ebpf,
    setup::{self, Scope},
    workspace::Workspace,
};

use crate::tools::Tools;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask dist                      optimised images, charts and weft in dist/, with completions, manual
                                        pages, bills of materials and checksums
  cargo xtask dist --profile dev        the same from the binaries of the tests, in seconds
  docker load < dist/images/weft-proxy-0.1.0.tar
  kind load image-archive dist/images/weft-proxy-0.1.0.tar
  ctr -n k8s.io images import dist/images/weft-proxy-0.1.0.tar

The archives need no daemon to make: each is an OCI layout and a docker archive in one.")]
pub(crate) struct Args {
    /// How to compile
    #[arg(long, value_enum, default_value_t = Profile::Dist)]
    profile: Profile,
    /// Use the programs as they were last built
    #[arg(long)]
    no_build: bool,
    /// Leave out everything but the images
    #[arg(long)]
    images_only: bool,
}

/// An image: its programs, of which the first is the entry point, and its user.
struct Recipe {
    name: &'static str,
    programs: &'static [&'static str],
    user: &'static str,
    title: &'static str,
}

const RECIPES: [Recipe; 4] = [
    Recipe { name: "weft-proxy", programs: &["weft-proxy"], user: "2102:2102", title: "Weft's sidecar proxy" },
    Recipe {
        name: "weft-control-plane",
        programs: &["weft-control-plane"],
        user: "2103:2103",
        title: "Weft's control plane",
    },
    // Loads eBPF programs and enters the namespaces of pods.
    Recipe { name: "weft-agent", programs: &["weft-agent"], user: "0:0", title: "Weft's node agent" },
    Recipe {
        name: "weft-examples",
        programs: &["weft-echo", "weft-client"],
        user: "65532:65532",
        title: "Applications to try Weft with",
    },
];

/// Charts in the order of installation; the last one is for clusters with Linkerd.
const CHARTS: [&str; 3] = ["weft-crds", "weft-control-plane", "weft-agent"];
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Every user of the images, for programs that look up their user's name.
const PASSWD: &str = "\
root:x:0:0:root:/:/
weft-proxy:x:2102:2102:weft-proxy:/:/
weft-control-plane:x:2103:2103:weft-control-plane:/:/
nonroot:x:65532:65532:nonroot:/:/
";

/// Builds images and charts.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let mut written = if args.no_build {
        pack(&workspace, &workspace.binaries(args.profile.directory()))?
    } else {
        images(&workspace, args.profile)?
    };
    if !args.images_only {
        written.extend(charts(&workspace)?);
        let weft = command_line(&workspace, &workspace.binaries(args.profile.directory()))?;
        written.extend(release::of_command_line(&workspace, &weft)?);
        written.push(weft);
        written.extend(release::bills_of_materials(&workspace)?);
        written.push(release::checksums(&workspace.root.join("dist"), &written)?);
    }
    for path in written {
        println!("{}", path.display());
    }
    Ok(())
}

/// Builds the programs, then [`pack`]s them.
///
/// # Errors
/// When something does not compile, and as [`pack`].
pub(crate) fn images(workspace: &Workspace, profile: Profile) -> Result<Vec<PathBuf>> {
    let toolchain = setup::ensure(Scope::Build)?;
    ebpf::build(workspace, &toolchain)?;
    pack(workspace, &build::binaries(workspace, profile)?)
}

/// Packs the programs of a directory; returns the archives. Archives of unchanged programs are kept.
///
/// # Errors
/// When a program is missing or a library is not found.
pub(crate) fn pack(workspace: &Workspace, binaries: &Path) -> Result<Vec<PathBuf>> {
    let directory = workspace.root.join("dist/images");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let lock = File::create(directory.join(".lock")).context("create the lock of the images")?;
    lock.lock().context("lock the images")?;

    let programs: Vec<_> = RECIPES.iter().flat_map(|recipe| recipe.programs).map(|name| binaries.join(name)).collect();
    let libraries = libraries(&programs)?;
    let base = pack_libraries(&libraries)?;
    let mut archives = Vec::new();
    for recipe in &RECIPES {
        let archive = directory.join(format!("{}-{VERSION}.tar", recipe.name));
        let own: Vec<_> = recipe.programs.iter().map(|name| binaries.join(name)).collect();
        let inputs = fingerprint(own.iter().chain(&libraries))?;
        let known = directory.join(format!(".{}.inputs", recipe.name));
        if !archive.exists() || fs::read_to_string(&known).ok().as_ref() != Some(&inputs) {
            step(&format!("write {}", archive.display()));
            // Until the new archive is complete, the old fingerprint must not be valid.
            let _ = fs::remove_file(&known);
            let programs = pack_programs(workspace, &own)?;
            write(recipe, &[&base, &programs], &archive)?;
            fs::write(&known, inputs).with_context(|| format!("write {}", known.display()))?;
        }
        archives.push(archive);
    }
    Ok(archives)
}

/// Packages the charts with helm; returns the packages.
///
/// # Errors
/// When helm refuses a chart.
fn charts(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let directory = workspace.root.join("dist/charts");
    let sources: Vec<_> = CHARTS.iter().map(|name| workspace.root.join("charts").join(name)).collect();
    let helm = Tools::ensure(&["helm"])?.program("helm");
    for source in &sources {
        let mut package = Command::new(&helm);
        package.args(["package", "--destination"]).arg(&directory).arg(source);
        command::run(&mut package)?;
    }
    Ok(CHARTS.iter().map(|name| directory.join(format!("{name}-{VERSION}.tgz"))).collect())
}

/// Copies `weft` next to the images.
fn command_line(workspace: &Workspace, binaries: &Path) -> Result<PathBuf> {
    let directory = workspace.root.join("dist/bin");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let (built, program) = (binaries.join("weft"), directory.join("weft"));
    command::run(Command::new("strip").arg("-o").arg(&program).arg(&built))?;
    Ok(program)
}

fn write(recipe: &Recipe, layers: &[&Layer], archive: &Path) -> Result<()> {
    let name = format!("localhost/{}:{VERSION}", recipe.name);
    let labels = [
        ("org.opencontainers.image.title", recipe.title),
        ("org.opencontainers.image.version", VERSION),
        ("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE")),
        ("org.opencontainers.image.vendor", "Weft"),
    ];
    let entrypoint = format!("/{}", recipe.programs[0]);
    Image { name: &name, layers, entrypoint: &entrypoint, user: recipe.user, labels: &labels }.write(archive)
}

/// Programs without their symbols, which are several times as large.
fn pack_programs(workspace: &Workspace, programs: &[PathBuf]) -> Result<Layer> {
    let directory = workspace.target.join("xtask/stripped");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let mut files = Files::default();
    for program in programs {
        let name = program.file_name().context("a program has a name")?;
        let stripped = directory.join(name);
        command::run(Command::new("strip").arg("-o").arg(&stripped).arg(program))?;
        files.add_program(&format!("/{}", name.display()), &stripped)?;
    }
    Layer::pack(&files)
}

fn pack_libraries(libraries: &BTreeSet<PathBuf>) -> Result<Layer> {
    let mut files = Files::default();
    files.add("/etc/passwd", 0o644, PASSWD.as_bytes().to_vec());
    for library in libraries {
        files.add_program(&library.display().to_string(), library)?;
    }
    Layer::pack(&files)
}

/// The libraries that programs are linked with, directly and indirectly.
///
/// # Errors
/// When a library is missing, and for a program that is linked statically.
pub(crate) fn libraries(programs: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for program in programs {
        let text = command::output(Command::new("ldd").arg(program))?;
        found.extend(parse_ldd(&text).with_context(|| format!("libraries of {}", program.display()))?);
    }
    Ok(found)
}

/// Lines are `NAME => PATH (ADDRESS)`, `PATH (ADDRESS)` for the loader, and `NAME (ADDRESS)` for libraries that the
/// kernel maps.
fn parse_ldd(text: &str) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.contains("not found") {
            bail!("{}", line.trim());
        }
        let target = line.rsplit("=>").next().unwrap_or(line).trim();
        let path = target.split(" (").next().unwrap_or(target);
        if path.starts_with('/') {
            found.insert(PathBuf::from(path));
        }
    }
    Ok(found)
}

/// The inputs of an archive, by name, size and time: reading them would take as long as writing the archive.
fn fingerprint<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Result<String> {
    // This program is an input too. Not by its path: a build of the workspace replaces this program's file while it
    // runs.
    let own = PathBuf::from("/proc/self/exe");
    let mut text = String::new();
    for file in std::iter::once(own).chain(files.cloned()) {
        let found = file.metadata().with_context(|| format!("look at {}", file.display()))?;
        let name = file.file_name().unwrap_or_default();
        text += &format!("{} {} {}.{}\n", name.display(), found.size(), found.mtime(), found.mtime_nsec());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_taken_from_where_the_loader_finds_them() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f9d)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f9d)\n";
        let expected = ["/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(text).expect("all there"), BTreeSet::from(expected));
        assert_eq!(parse_ldd("\tstatically linked\n").expect("none"), BTreeSet::new());
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = parse_ldd("\tlibfoo.so.1 => not found\n").expect_err("missing");
        assert!(error.to_string().contains("libfoo.so.1"), "{error}");
    }
}
