//! What goes with the artefacts of a release: bills of materials, completions and manual pages of `weft`, checksums.
//!
//! The same commit makes the same files, wherever and whenever it is built.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use weft_xtask::{
    command::{self, step},
    setup::cargo_tools,
    workspace::Workspace,
};

use super::image::sha256;

/// Packages whose programs are shipped.
const SHIPPED: [&str; 5] = ["weft-agent", "weft-cli", "weft-control-plane", "weft-examples", "weft-proxy"];

/// Shells, and the names of their scripts where distributions keep them.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "weft.bash"), ("zsh", "_weft"), ("fish", "weft.fish")];

/// Writes for each shipped package which crates its programs are built from, with versions and licences, as CycloneDX 1.5. The
/// C library and the other libraries of the images are not in it: the distribution's packages have their own.
///
/// # Errors
/// When the tool does not build or fails, or nothing says when the sources were written.
pub(super) fn bills_of_materials(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let tool = cargo_tools::ensure(&cargo_tools::CARGO_CYCLONEDX)?;
    let directory = workspace.root.join("dist/sbom");
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
            let path = directory.join(format!("{name}-{}.cdx.json", super::VERSION));
            fs::write(&path, without_checkout(&text, &workspace.root))
                .with_context(|| format!("write {}", path.display()))?;
            written.push(path);
        }
        fs::remove_file(&made).with_context(|| format!("remove {}", made.display()))?;
    }
    written.sort();
    Ok(written)
}

/// Writes the scripts and manual pages that `weft` itself prints.
///
/// # Errors
/// When it fails.
pub(super) fn of_command_line(workspace: &Workspace, weft: &Path) -> Result<Vec<PathBuf>> {
    let (completions, manuals) = (workspace.root.join("dist/completions"), workspace.root.join("dist/man"));
    // Pages of commands that are gone would stay.
    if manuals.exists() {
        fs::remove_dir_all(&manuals).with_context(|| format!("remove {}", manuals.display()))?;
    }
    for directory in [&completions, &manuals] {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let mut written = Vec::new();
    for (shell, name) in COMPLETIONS {
        let path = completions.join(name);
        let script = command::output(Command::new(weft).args(["completion", shell]))?;
        fs::write(&path, script).with_context(|| format!("write {}", path.display()))?;
        written.push(path);
    }
    command::run(Command::new(weft).arg("man").arg(&manuals))?;
    for page in fs::read_dir(&manuals).with_context(|| format!("list {}", manuals.display()))? {
        written.push(page?.path());
    }
    Ok(written)
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
