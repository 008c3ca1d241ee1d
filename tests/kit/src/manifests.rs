//! A copy of the example mesh's manifests, to be edited while a mesh runs from it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// The files of `examples/mesh`, embedded when this program was built.
const EXAMPLE: [(&str, &str); 5] = [
    ("namespaces.yaml", include_str!("../../../examples/mesh/namespaces.yaml")),
    ("web.yaml", include_str!("../../../examples/mesh/web.yaml")),
    ("banner.yaml", include_str!("../../../examples/mesh/banner.yaml")),
    ("payments.yaml", include_str!("../../../examples/mesh/payments.yaml")),
    ("clients.yaml", include_str!("../../../examples/mesh/clients.yaml")),
];

/// A directory of manifests that is removed on drop.
#[derive(Debug)]
pub struct Manifests {
    directory: TempDir,
}

impl Manifests {
    /// An empty directory.
    ///
    /// # Errors
    /// No temporary directory could be made.
    pub fn empty() -> io::Result<Self> {
        Ok(Self { directory: tempfile::Builder::new().prefix("weft-manifests-").tempdir()? })
    }

    /// The example mesh.
    ///
    /// # Errors
    /// No temporary directory could be made or written.
    pub fn example() -> io::Result<Self> {
        let manifests = Self::empty()?;
        for (file, text) in EXAMPLE {
            manifests.write(file, text)?;
        }
        Ok(manifests)
    }

    /// The directory, which is removed on drop.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Keeps the directory and returns its path.
    pub fn keep(self) -> PathBuf {
        self.directory.keep()
    }

    /// Writes or replaces a file atomically, so that no reader sees half of it.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let new = self.directory.path().join(format!(".{file}.new"));
        fs::write(&new, text)?;
        fs::rename(new, self.directory.path().join(file))
    }

    /// Replaces `from`, which must be there, by `to` in a file, atomically.
    ///
    /// # Errors
    /// The file cannot be read or written, or does not contain `from`, so that the edit would do nothing.
    pub fn edit(&self, file: &str, from: &str, to: &str) -> io::Result<()> {
        let text = fs::read_to_string(self.directory.path().join(file))?;
        if !text.contains(from) {
            return Err(io::Error::other(format!("{file} does not contain {from:?}")));
        }
        self.write(file, &text.replace(from, to))
    }

    /// Removes a file.
    ///
    /// # Errors
    /// There is no such file.
    pub fn remove(&self, file: &str) -> io::Result<()> {
        fs::remove_file(self.directory.path().join(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_replaces_and_one_that_would_do_nothing_fails() {
        let manifests = Manifests::example().unwrap();
        manifests.edit("web.yaml", "replicas: 3", "replicas: 4").unwrap();
        assert!(fs::read_to_string(manifests.path().join("web.yaml")).unwrap().contains("replicas: 4"));
        assert!(manifests.edit("web.yaml", "replicas: 3", "replicas: 5").is_err());
    }

    #[test]
    fn the_example_is_what_the_repository_holds() {
        let files = fs::read_dir("../../examples/mesh").unwrap().count();
        assert_eq!(files, EXAMPLE.len(), "a file of examples/mesh is missing here");
    }
}
