//! An earlier version as `cargo xtask dist` writes it, images and charts: what a check in a cluster upgrades from.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// Names the directory to the tests.
const VARIABLE: &str = "WEFT_TEST_PREVIOUS";

/// A directory with an earlier version.
#[derive(Clone, Debug)]
pub(crate) struct Previous {
    directory: PathBuf,
    images: Vec<String>,
}

impl Previous {
    /// Looks into a directory.
    ///
    /// # Errors
    /// When there are no images or no charts in it.
    pub(crate) fn find(directory: &Path) -> Result<Self> {
        // Tests run in another directory than this program.
        let directory = fs::canonicalize(directory).with_context(|| format!("find {}", directory.display()))?;
        let images = files(&directory.join("images"), "tar")?.iter().map(|path| path.display().to_string()).collect();
        files(&directory.join("charts"), "tgz")?;
        Ok(Self { directory, images })
    }

    /// The same, for a command line.
    ///
    /// # Errors
    /// As [`Self::find`], as text.
    pub(crate) fn parse(directory: &str) -> Result<Self, String> {
        Self::find(Path::new(directory)).map_err(|error| format!("{error:#}"))
    }

    /// Where it is.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The archives of its images.
    pub(crate) fn images(&self) -> &[String] {
        &self.images
    }

    /// The variable by which tests find it.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.directory.display().to_string())
    }
}

/// The files in a directory that end in this, at least one.
fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let files = workspace::files(directory, extension)?;
    if files.is_empty() {
        bail!("no *.{extension} in {}: is this what `cargo xtask dist` wrote?", directory.display());
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_images_and_charts() {
        let directory = std::env::temp_dir().join(format!("weft-previous-{}", std::process::id()));
        let write = |name: &str| {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("create");
            fs::write(path, "").expect("write");
        };
        for name in ["images/b.tar", "images/a.tar", "images/.a.inputs", "charts/.lock"] {
            write(name);
        }
        let without_charts = Previous::parse(&directory.display().to_string());
        write("charts/c.tgz");
        let found = Previous::find(&directory);
        fs::remove_dir_all(&directory).expect("remove");
        assert!(without_charts.expect_err("no chart").contains("no *.tgz in "));
        let found = found.expect("both");
        let names: Vec<_> = found.images().iter().filter_map(|path| path.rsplit('/').next()).collect();
        assert_eq!(names, ["a.tar", "b.tar"]);
        assert_eq!(found.variable().1, found.directory().display().to_string());
    }
}
