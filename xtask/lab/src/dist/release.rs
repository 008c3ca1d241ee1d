//! What goes with the images and charts of a release: the command line and what installs it, bills of materials,
//! checksums and their signature.
//!
//! The same commit makes the same files, wherever and whenever it is built.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use weft_xtask::{
    command::{self, step},
    setup::cargo_tools,
    workspace::Workspace,
};

use super::{
    image::{Files, Layer, sha256},
    programs::Programs,
    versioned,
};

/// Packages whose programs are shipped.
const SHIPPED: [&str; 6] = ["weft-agent", "weft-cli", "weft-control-plane", "weft-examples", "weft-proxy", "weft-viz"];

/// The programs in the archive: `weft`, what `weft sandbox` starts, and those of the example.
const IN_ARCHIVE: [&str; 6] = ["weft", "weft-agent", "weft-client", "weft-control-plane", "weft-echo", "weft-proxy"];
/// The manifests of the example for a sandbox, in the repository and in the archive.
const EXAMPLE: &str = "examples/mesh";
/// The script that installs the archive, in the repository and beside the archive.
const SCRIPT: &str = "install.sh";
/// What a signature is for: one of something else by the same key says nothing about a release.
const SIGNED_FOR: &str = "weft-release";

/// Shells, and the names of their scripts where distributions keep them.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "weft.bash"), ("zsh", "_weft"), ("fish", "weft.fish")];

/// Writes for each shipped package which crates its programs are built from, with versions and licences, as CycloneDX
/// 1.5. What is linked in and is no crate of the workspace is not in it: the C library, and the crates of the kernel
/// programs.
///
/// # Errors
/// When the tool does not build or fails, or nothing says when the sources were written.
pub(super) fn bills_of_materials(workspace: &Workspace, dist: &Path) -> Result<Vec<PathBuf>> {
    let tool = cargo_tools::ensure(&cargo_tools::CARGO_CYCLONEDX)?;
    let directory = dist.join("sbom");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    step("write bills of materials");
    let mut generate = Command::new(tool);
    generate
        .args(["cyclonedx", "--format", "json", "--spec-version", "1.5", "--no-build-deps", "--quiet"])
        .env("SOURCE_DATE_EPOCH", written_at(workspace)?)
        .current_dir(&workspace.root);
    command::run(&mut generate)?;
    let mut written = Vec::new();
    // The tool writes one beside every manifest.
    for package in workspace.packages() {
        let (name, manifest) = (package["name"].as_str(), package["manifest_path"].as_str());
        let (name, manifest) = name.zip(manifest).context("cargo names every package and its manifest")?;
        let made = Path::new(manifest).with_file_name(format!("{name}.cdx.json"));
        if SHIPPED.contains(&name) {
            let text = fs::read_to_string(&made).with_context(|| format!("read {}", made.display()))?;
            let path = versioned(&directory, name, ".cdx.json")?;
            fs::write(&path, without_checkout(&text, &workspace.root))
                .with_context(|| format!("write {}", path.display()))?;
            written.push(path);
        }
        fs::remove_file(&made).with_context(|| format!("remove {}", made.display()))?;
    }
    written.sort();
    Ok(written)
}

/// Writes the archive of the command line, as the script that installs it expects it, and that script: programs below
/// `bin`, the completions and manual pages that `weft` itself prints, and the manifests of an example.
///
/// # Errors
/// When a program is missing or fails.
pub(super) fn command_line(workspace: &Workspace, programs: &Programs, dist: &Path) -> Result<Vec<PathBuf>> {
    let parts = ["bin", "completions", "man", EXAMPLE].map(|part| dist.join(part));
    for part in &parts {
        // What is no longer made would stay.
        if part.exists() {
            fs::remove_dir_all(part).with_context(|| format!("remove {}", part.display()))?;
        }
        fs::create_dir_all(part).with_context(|| format!("create {}", part.display()))?;
    }
    let [bin, completions, man, example] = parts;
    let mut written = Vec::new();
    for name in IN_ARCHIVE {
        let stripped = super::strip(workspace, programs.processor(), &programs.path(name))?;
        let path = bin.join(name);
        fs::copy(&stripped, &path).with_context(|| format!("write {}", path.display()))?;
        written.push(path);
    }
    let weft = bin.join("weft");
    for (shell, name) in COMPLETIONS {
        let path = completions.join(name);
        let script = command::output(programs.command(&weft)?.args(["completion", shell]))?;
        fs::write(&path, script).with_context(|| format!("write {}", path.display()))?;
        written.push(path);
    }
    command::run(programs.command(&weft)?.arg("man").arg(&man))?;
    for page in fs::read_dir(&man).with_context(|| format!("list {}", man.display()))? {
        written.push(page?.path());
    }
    let manifests = workspace.root.join(EXAMPLE);
    for manifest in fs::read_dir(&manifests).with_context(|| format!("list {}", manifests.display()))? {
        let manifest = manifest?;
        let path = example.join(manifest.file_name());
        fs::copy(manifest.path(), &path).with_context(|| format!("write {}", path.display()))?;
        written.push(path);
    }
    let archive = dist.join(format!("weft-linux-{}.tar.gz", programs.processor().debian()));
    fs::write(&archive, pack(dist, &written)?).with_context(|| format!("write {}", archive.display()))?;
    let script = dist.join(SCRIPT);
    fs::copy(workspace.root.join(SCRIPT), &script).with_context(|| format!("write {}", script.display()))?;
    written.extend([archive, script]);
    Ok(written)
}

/// A compressed tar of files at their paths from a directory; those in `bin` are programs.
fn pack(directory: &Path, paths: &[PathBuf]) -> Result<Vec<u8>> {
    let mut files = Files::default();
    for path in paths {
        let below = path.strip_prefix(directory).with_context(|| format!("{} is elsewhere", path.display()))?;
        let mode = if below.starts_with("bin") { 0o755 } else { 0o644 };
        let content = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        files.add(&below.display().to_string(), mode, content);
    }
    compressed(Layer::pack(&files)?.content())
}

/// With gzip, without a name and a time.
///
/// # Errors
/// When memory is short.
pub(super) fn compressed(content: &[u8]) -> Result<Vec<u8>> {
    let mut packed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
    packed.write_all(content).and_then(|()| packed.finish()).context("compress")
}

/// Signs a file; `ssh-keygen -Y verify` checks it, which is wherever there is SSH.
///
/// # Errors
/// When the key does not sign.
pub(super) fn sign(path: &Path, key: &Path) -> Result<PathBuf> {
    let signature = path.with_added_extension("sig");
    if signature.exists() {
        // ssh-keygen would ask whether to replace it.
        fs::remove_file(&signature).with_context(|| format!("remove {}", signature.display()))?;
    }
    let mut sign = Command::new("ssh-keygen");
    command::run(sign.args(["-q", "-Y", "sign", "-n", SIGNED_FOR, "-f"]).arg(key).arg(path))?;
    Ok(signature)
}

/// Writes `SHA256SUMS` for `sha256sum --check`.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn checksums(directory: &Path, artefacts: &[PathBuf]) -> Result<PathBuf> {
    let mut lines = Vec::new();
    for path in artefacts {
        let content = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let name = path.strip_prefix(directory).with_context(|| format!("{} is elsewhere", path.display()))?;
        lines.push((name, format!("{}  {}\n", sha256(&content), name.display())));
    }
    lines.sort();
    let path = directory.join("SHA256SUMS");
    let text: String = lines.into_iter().map(|(_, line)| line).collect();
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// When the sources were written, in seconds since 1970: the commit's time, unless a builder says another.
fn written_at(workspace: &Workspace) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut log = Command::new("git");
    log.args(["log", "-1", "--format=%ct"]).current_dir(&workspace.root);
    let time =
        command::output(&mut log).context("not a git checkout: set SOURCE_DATE_EPOCH to the time of the sources")?;
    Ok(time.trim().to_owned())
}

/// Identifiers of our own packages contain the checkout's path.
fn without_checkout(bill: &str, root: &Path) -> String {
    bill.replace(&format!("path+file://{}", root.display()), "path+file:///weft")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256sum_accepts_the_checksums() {
        let directory = std::env::temp_dir().join(format!("weft-dist-{}", std::process::id()));
        fs::create_dir_all(directory.join("bin")).expect("create");
        let files = ["bin/weft", "a.tar"].map(|name| directory.join(name));
        for file in &files {
            fs::write(file, file.display().to_string()).expect("write");
        }
        let path = checksums(&directory, &files).expect("checksums");
        let text = fs::read_to_string(&path).expect("read");
        let check =
            || Command::new("sha256sum").args(["--check", "--status", "SHA256SUMS"]).current_dir(&directory).status();
        let accepted = check().expect("sha256sum");
        fs::write(&files[1], "changed").expect("write");
        let refused = check().expect("sha256sum");
        fs::remove_dir_all(&directory).expect("remove");
        assert!(text.lines().map(|line| &line[66..]).eq(["a.tar", "bin/weft"]), "{text}");
        assert!(accepted.success() && !refused.success());
    }

    #[test]
    fn bills_do_not_depend_on_the_place_of_the_checkout() {
        let bill = r#"{"bom-ref": "path+file:///home/me/weft/proxy#weft-proxy@0.1.0"}"#;
        let expected = r#"{"bom-ref": "path+file:///weft/proxy#weft-proxy@0.1.0"}"#;
        assert_eq!(without_checkout(bill, Path::new("/home/me/weft")), expected);
    }
}
