//! `dist`: everything to install in a cluster: container images of our programs, packaged charts, the command line
//! `weft`, and what goes with them.
//!
//! ```text
//! programs ──┬──> images/*.tar              (image)
//!            └──> weft-linux-ARCH.tar.gz    (release)
//! charts ───────> charts/*.tgz, *.oci.tar   (chart)
//! examples ─────> shop.yaml                 (application)
//! ```
//!
//! An image contains a program and a list of users. Programs for users are linked statically; those of the tests are
//! not, and their images have a layer that all share, with the libraries at their own paths.

mod chart;
pub(crate) mod image;
mod programs;
mod release;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use image::{Files, Image, Layer, PROGRAM_MODE};
use programs::{Programs, in_registry};
use weft_xtask::{
    build::Profile,
    command::{self, step},
    workspace::{self, Workspace},
};

use crate::{libraries, processor::Processor};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask dist                      everything that is shipped, in dist/, for this machine's processor
  cargo xtask dist --profile dev        the same from the binaries of the tests, in seconds
  cargo xtask dist --arch arm64 --output dist-arm64
                                        the same for arm64, cross-compiled
  cargo xtask dist --registry ghcr.io/OWNER --sign-key ~/.ssh/id_ed25519
                                        for a registry, which charts and weft name, and signed
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
    /// The processor to compile for [default: this machine's]
    #[arg(long, value_enum)]
    arch: Option<Processor>,
    /// Only these parts
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<Part>,
    /// The directory to write to, from the repository's root
    #[arg(long, value_name = "DIRECTORY", default_value = "dist")]
    output: PathBuf,
    /// The registry, and a path in it, from which clusters will pull the images
    #[arg(long, default_value = programs::REGISTRY)]
    registry: String,
    /// Sign the checksums with this SSH key
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
}

/// A part of what is shipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Container images
    Images,
    /// Packaged charts
    Charts,
    /// The command line with its completions and manual pages, and the script that installs it
    CommandLine,
    /// The manifests of an application to try Weft with
    Application,
    /// Bills of materials
    Bills,
}

/// An image: its programs, of which the first is the entry point, and its user.
struct Recipe {
    name: &'static str,
    programs: &'static [&'static str],
    user: &'static str,
    title: &'static str,
}

const RECIPES: [Recipe; 5] = [
    Recipe { name: "weft-proxy", programs: &["weft-proxy"], user: "2102:2102", title: "Weft's sidecar proxy" },
    Recipe {
        name: "weft-control-plane",
        programs: &["weft-control-plane"],
        user: "2103:2103",
        title: "Weft's control plane",
    },
    Recipe { name: "weft-viz", programs: &["weft-viz"], user: "2104:2104", title: "Weft's metrics and taps" },
    // Loads eBPF programs and enters the namespaces of pods.
    Recipe { name: "weft-agent", programs: &["weft-agent"], user: "0:0", title: "Weft's node agent" },
    Recipe {
        name: "weft-examples",
        programs: &["weft-echo", "weft-client"],
        user: "65532:65532",
        title: "Applications to try Weft with",
    },
];

/// The example's manifests, in the order in which they can be applied.
const APPLICATION: [&str; 5] = ["namespaces", "store", "api", "web", "clients"];

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Every user of the images, for programs that look up their user's name.
const PASSWD: &str = "\
root:x:0:0:root:/:/
weft-proxy:x:2102:2102:weft-proxy:/:/
weft-control-plane:x:2103:2103:weft-control-plane:/:/
weft-viz:x:2104:2104:weft-viz:/:/
nonroot:x:65532:65532:nonroot:/:/
";

/// Writes what was asked for, and checksums of it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let directory = workspace.root.join(&args.output);
    let wants = |part| args.only.is_empty() || args.only.contains(&part);
    let mut written = Vec::new();
    if wants(Part::Images) || wants(Part::CommandLine) {
        let processor = args.arch.map_or_else(Processor::native, Ok)?;
        let programs = Programs::of(&workspace, args.profile, processor);
        if !args.no_build {
            programs.build(&workspace, args.profile, &args.registry)?;
        }
        if wants(Part::Images) {
            written.extend(pack_into(&directory.join("images"), &workspace, &programs, &args.registry)?);
        }
        if wants(Part::CommandLine) {
            written.extend(release::command_line(&workspace, &programs, &directory)?);
        }
    }
    if wants(Part::Charts) {
        written.extend(chart::pack_all(&workspace.root.join("charts"), &directory.join("charts"), &args.registry)?);
    }
    if wants(Part::Application) {
        written.push(application(&workspace.root.join("examples/kubernetes"), &directory, &args.registry)?);
    }
    if wants(Part::Bills) {
        written.extend(release::bills_of_materials(&workspace, &directory)?);
    }
    let checksums = release::checksums(&directory, &written)?;
    if let Some(key) = &args.sign_key {
        written.push(release::sign(&checksums, key)?);
    }
    written.push(checksums);
    for path in written {
        println!("{}", path.display());
    }
    Ok(())
}

/// Writes the example application into one file, for `kubectl apply` without the sources.
fn application(examples: &Path, directory: &Path, registry: &str) -> Result<PathBuf> {
    let read = |part: &&str| {
        let path = examples.join(part).with_extension("yaml");
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let parts = APPLICATION.iter().map(read).collect::<Result<Vec<_>>>()?;
    let path = directory.join("shop.yaml");
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    fs::write(&path, in_registry(&parts.join("---\n"), registry))
        .with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// Builds the programs for this machine, then [`pack`]s them.
///
/// # Errors
/// When something does not compile, and as [`pack`].
pub(crate) fn images(workspace: &Workspace, profile: Profile) -> Result<Vec<PathBuf>> {
    Programs::of(workspace, profile, Processor::native()?).build(workspace, profile, programs::REGISTRY)?;
    pack(workspace, profile)
}

/// Packs the programs of a profile as they were last built; returns the archives. Archives of unchanged programs are
/// kept.
///
/// # Errors
/// When a program is missing or a library is not found.
pub(crate) fn pack(workspace: &Workspace, profile: Profile) -> Result<Vec<PathBuf>> {
    let programs = Programs::of(workspace, profile, Processor::native()?);
    pack_into(&workspace.root.join("dist/images"), workspace, &programs, programs::REGISTRY)
}

fn pack_into(directory: &Path, workspace: &Workspace, programs: &Programs, registry: &str) -> Result<Vec<PathBuf>> {
    let _turn = workspace::lock(&directory.join(".lock"))?;

    let paths: Vec<_> = RECIPES.iter().flat_map(|recipe| recipe.programs).map(|name| programs.path(name)).collect();
    let libraries = if programs.is_static() { BTreeSet::new() } else { libraries::of(&paths)? };
    let base = pack_libraries(&libraries)?;
    let mut archives = Vec::new();
    for recipe in &RECIPES {
        let archive = versioned(directory, recipe.name, ".tar")?;
        let name = format!("{registry}/{}:{VERSION}", recipe.name);
        let own: Vec<_> = recipe.programs.iter().map(|name| programs.path(name)).collect();
        let inputs = format!("{name}\n{PROGRAM_MODE:o}\n") + &fingerprint(own.iter().chain(&libraries))?;
        let known = directory.join(format!(".{}.inputs", recipe.name));
        if !archive.exists() || fs::read_to_string(&known).ok().as_ref() != Some(&inputs) {
            step(&format!("write {}", archive.display()));
            // Until the new archive is complete, the old fingerprint must not be valid.
            let _ = fs::remove_file(&known);
            let layer = pack_programs(workspace, programs.processor(), &own)?;
            write(recipe, &name, programs.processor(), &[&base, &layer], &archive)?;
            fs::write(&known, inputs).with_context(|| format!("write {}", known.display()))?;
        }
        archives.push(archive);
    }
    Ok(archives)
}

/// The path of an artefact of this version. Those of other versions are removed: what takes all that is in `dist`, as
/// README's commands do, would take both.
///
/// # Errors
/// When the directory cannot be listed, or one cannot be removed.
fn versioned(directory: &Path, name: &str, ending: &str) -> Result<PathBuf> {
    let is_other = |file: &str| {
        let version = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(ending));
        // A name may begin like another one; a version begins with a digit.
        version.is_some_and(|version| version != VERSION && version.starts_with(|first: char| first.is_ascii_digit()))
    };
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        if path.file_name().and_then(|file| file.to_str()).is_some_and(is_other) {
            step(&format!("remove {}, of another version", path.display()));
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(directory.join(format!("{name}-{VERSION}{ending}")))
}

fn write(recipe: &Recipe, name: &str, processor: Processor, layers: &[&Layer], archive: &Path) -> Result<()> {
    let labels = [
        ("org.opencontainers.image.title", recipe.title),
        ("org.opencontainers.image.version", VERSION),
        ("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE")),
        ("org.opencontainers.image.vendor", "Weft"),
    ];
    let entrypoint = format!("/{}", recipe.programs[0]);
    let architecture = processor.debian();
    Image { name, architecture, layers, entrypoint: &entrypoint, user: recipe.user, labels: &labels }.write(archive)
}

fn pack_programs(workspace: &Workspace, processor: Processor, programs: &[PathBuf]) -> Result<Layer> {
    let mut files = Files::default();
    for program in programs {
        let stripped = strip(workspace, processor, program)?;
        let name = stripped.file_name().context("a program has a name")?;
        files.add_program(&format!("/{}", name.display()), &stripped)?;
    }
    Layer::pack(&files)
}

/// A copy of a program without its symbols, which are several times as large.
fn strip(workspace: &Workspace, processor: Processor, program: &Path) -> Result<PathBuf> {
    let directory = workspace.target.join("xtask/stripped").join(processor.name());
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let stripped = directory.join(program.file_name().context("a program has a name")?);
    command::run(Command::new(processor.tool("strip")).arg("-o").arg(&stripped).arg(program))?;
    Ok(stripped)
}

fn pack_libraries(libraries: &BTreeSet<PathBuf>) -> Result<Layer> {
    let mut files = Files::default();
    files.add("/etc/passwd", 0o644, PASSWD.as_bytes().to_vec());
    for library in libraries {
        files.add_library(&library.display().to_string(), library)?;
    }
    Layer::pack(&files)
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
    fn of_an_artefact_one_version_is_left() {
        let directory = tempfile::tempdir().expect("a directory");
        let (current, other) = (format!("weft-viz-{VERSION}.tgz"), "weft-viz-0.0.9-rc.1.tgz");
        let kept = [&current, "weft-viz-0.0.9.oci.tar", "weft-viz-extra-0.0.9.tgz", "weft-viz.tgz", "notes"];
        for name in kept.iter().chain([&other]) {
            fs::write(directory.path().join(name), "").expect("write");
        }
        let path = versioned(directory.path(), "weft-viz", ".tgz").expect("a path");
        assert_eq!(path, directory.path().join(&current));
        let names = fs::read_dir(directory.path()).expect("list").map(|entry| entry.expect("an entry").file_name());
        assert_eq!(names.collect::<BTreeSet<_>>(), kept.iter().map(std::ffi::OsString::from).collect());
    }

    #[test]
    fn the_release_workflow_publishes_every_image_and_chart() {
        let workflow = include_str!("../../../.github/workflows/release.yaml");
        let published = |kind: &str| {
            let start = format!("for {kind} in ");
            let list = workflow.lines().find_map(|line| line.trim().strip_prefix(&start)).expect("a loop");
            list.trim_end_matches("; do").split(' ').collect::<BTreeSet<_>>()
        };
        assert_eq!(published("image"), RECIPES.iter().map(|recipe| recipe.name).collect());
        assert_eq!(published("chart"), BTreeSet::from(chart::CHARTS));
    }
}
