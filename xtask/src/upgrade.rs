//! `upgrade`: shows that a mesh goes back to an earlier revision and is upgraded from it while requests run.
//!
//! The revision is built in a worktree by its own `cargo xtask dist`, which names its images in a registry of their
//! own, so that nodes have those of both versions. A check in a cluster does the rest
//! (`tests/tests/cluster_tutorial/upgrade.rs`).

use std::{
    fs,
    path::{self, Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    command::{self, step},
    previous::Previous,
    setup::{self, packages},
    test,
    workspace::{self, Workspace},
};

/// The registry of the earlier version's images. No cluster finds it: nodes have the images or report an error.
const REGISTRY: &str = "previous.weft.test";
/// A part of the check's name that no other check has.
const CHECK: &str = "an upgrade from an earlier version";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask upgrade                       back to the latest tag, and the upgrade from it
  cargo xtask upgrade --from v0.1.0         the same with another tag
  cargo xtask upgrade --from HEAD~100       the same with any commit
  cargo xtask upgrade --from v0.1.0 --keep  leave the cluster running, to look at it

Needs root; brings a cluster up and down by itself, or uses that of KUBECONFIG, as `cargo xtask test cluster` does. The
revision has to have `cargo xtask dist --registry`. What is compiled of it stays in ~/.cache/weft/upgrade, so that a
second run takes less time.")]
pub(crate) struct Args {
    /// The revision to upgrade from [default: the latest tag]
    #[arg(long, value_name = "REV")]
    from: Option<String>,
    /// Leave the cluster running, to look at what the check left in it
    #[arg(long)]
    keep: bool,
}

/// Builds the earlier revision, then runs the check.
pub(crate) fn run(args: &Args) -> Result<()> {
    // Before minutes of building, not after.
    setup::can_run()?;
    packages::ensure(&[packages::GIT])?;
    let root = Workspace::load()?.root;
    let commit = commit(&root, args.from.as_deref())?;
    // The earlier version is built in another directory.
    let cache = path::absolute(workspace::cache_directory()?.join("upgrade")).context("find the cache")?;
    // Until the check has ended: it reads what was built.
    let _turn = workspace::lock(&cache.join(".lock"))?;
    let previous = build(&root, &commit, &cache)?;
    let directory = previous.directory().display();
    step(&format!("the same again: cargo xtask test cluster --previous {directory} -- \"{CHECK}\""));
    test::upgrade_from(previous, CHECK, args.keep)
}

/// The hash of a revision, or of the latest tag.
fn commit(root: &Path, revision: Option<&str>) -> Result<String> {
    let git = |arguments: &[&str]| command::output(command::git(root).args(arguments));
    let revision = match revision {
        Some(revision) => revision.to_owned(),
        None => git(&["describe", "--tags", "--abbrev=0"])
            .context("no tag to upgrade from: name a revision, as in `--from HEAD~100`")?,
    };
    let revision = revision.trim();
    let commit = git(&["rev-parse", "--verify", &format!("{revision}^{{commit}}")])
        .with_context(|| format!("no commit {revision} in this clone (`git fetch --tags --unshallow` gets all)"))?;
    Ok(commit.trim().to_owned())
}

/// Builds images and charts of a commit as that commit does it.
fn build(root: &Path, commit: &str, cache: &Path) -> Result<Previous> {
    let output = cache.join("dist");
    remove(&output)?;
    // Always the same place, or cargo would keep what it compiled for each.
    let source = Worktree::add(root, cache.join("source"), commit)?;
    let subject = command::output(command::git(root).args(["show", "--no-patch", "--format=%h, %cs: %s", commit]))?;
    step(&format!("build the earlier version ({})", subject.trim()));
    let mut dist = command::cargo();
    dist.current_dir(&source.path).args(["xtask", "dist", "--profile", "dev", "--registry", REGISTRY]);
    dist.args(["--only", "images", "--only", "charts", "--output"]).arg(&output);
    // Not that of this checkout, whose programs it would replace.
    dist.env("CARGO_TARGET_DIR", cache.join("target"));
    command::run(&mut dist).context("build the earlier version")?;
    Previous::find(&output)
}

/// A commit's files, removed when dropped.
#[derive(Debug)]
struct Worktree<'a> {
    root: &'a Path,
    path: PathBuf,
}

impl<'a> Worktree<'a> {
    fn add(root: &'a Path, path: PathBuf, commit: &str) -> Result<Self> {
        let worktree = Self { root, path };
        // That of a run that was killed.
        worktree.remove()?;
        command::run(worktree.git("add").args(["--quiet", "--detach"]).arg(&worktree.path).arg(commit))?;
        Ok(worktree)
    }

    fn remove(&self) -> Result<()> {
        // git refuses when there is none, and when it is of another clone; what counts is the directory.
        let _ = command::output(self.git("remove").arg(&self.path));
        remove(&self.path)
    }

    /// `git worktree`. Forced twice, it also takes a worktree that a killed run left locked.
    fn git(&self, verb: &str) -> Command {
        let mut git = command::git(self.root);
        git.args(["worktree", verb, "--force", "--force"]);
        git
    }
}

impl Drop for Worktree<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("error: {error:#}");
        }
    }
}

/// Removes a directory, if there is one.
fn remove(directory: &Path) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A filter that selects nothing would succeed, and images in another registry would be the wrong ones.
    #[test]
    fn the_check_has_this_name_and_expects_this_registry() {
        let checks = include_str!("../../tests/tests/cluster_tutorial/main.rs");
        assert_eq!(checks.matches(CHECK).count(), 1);
        let check = include_str!("../../tests/tests/cluster_tutorial/upgrade.rs");
        assert!(check.contains(&format!("\"{REGISTRY}/\"")));
    }
}
