//! Parses Kubernetes manifests: text in; typed objects and errors with file, line and field out.
//!
//! One bad document never hides the others: every document of every file is parsed by itself. An object of a kind that
//! Weft does not use is returned as [`Ignored`], so that the caller can report it. Nothing is applied here.
//!
//! ```text
//! file --documents--> text of one document --kind--> Object --check--> Located | ManifestError
//! ```

mod check;
mod documents;
mod locate;
mod object;
mod read;
mod restrictive;

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use documents::{Document, split};
pub use locate::locate;
pub use object::{Kind, Object, ObjectRef};
pub use read::{from_api, parse};

/// The contents of a set of manifests.
#[derive(Clone, Debug, Default)]
pub struct Manifests {
    /// Good objects, in the order of files and documents.
    pub objects: Vec<Located>,
    /// Documents that could not be used, one error for each problem.
    pub errors: Vec<ManifestError>,
    /// Objects of kinds that Weft does not read.
    pub ignored: Vec<Ignored>,
}

/// An object and where it was read.
#[derive(Clone, Debug)]
pub struct Located {
    /// The object; its namespace is filled in if its kind has one.
    pub object: Object,
    /// Path of the manifest, as it was given or found.
    pub file: Arc<Path>,
    /// First line of the document, from 1.
    pub line: usize,
}

/// An object that was skipped because Weft does not read its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// API group and version, such as `batch/v1`.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Name, where it has one.
    pub name: Option<String>,
    /// Path of the manifest, as it was given or found.
    pub file: Arc<Path>,
    /// First line of the document, from 1.
    pub line: usize,
}

/// A document, or a field of it, that cannot be used.
#[derive(Clone, Debug)]
pub struct ManifestError {
    /// Path of the manifest, as it was given or found.
    pub file: Arc<Path>,
    /// Line of the field, or of the document where the field is unknown; from 1, and absent when the file is
    /// unreadable.
    pub line: Option<usize>,
    /// Column, from 1.
    pub column: Option<usize>,
    /// The object, as far as it could be read.
    pub object: Option<ObjectRef>,
    /// Path of the field, such as `spec.replicas`; empty for the document as a whole.
    pub field: String,
    /// What was found and what was expected.
    pub problem: String,
    /// For readers that must fail closed, the object: its unreadable parts deny. If a type is wrong, or if what a
    /// Server selects cannot be read, something stands for a policy that allows nothing, and for no other kind. To be
    /// used only if no good version of the object is known.
    pub restrictive: Option<Box<Object>>,
}

/// An object from the Kubernetes API that cannot be used as it is.
#[derive(Clone, Debug)]
pub struct Unreadable {
    /// What is wrong with it, at least one problem.
    pub problems: Vec<Problem>,
    /// The object: its unreadable parts deny. If a type is wrong, or if what a Server selects cannot be read, something
    /// stands for a policy that allows nothing, and for no other kind.
    pub restrictive: Option<Box<Object>>,
    /// Whether `restrictive` is not the object but stands for it, so that a good version of it is better.
    pub is_stand_in: bool,
}

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the field, such as `spec.replicas`; empty for the object as a whole.
    pub field: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl std::error::Error for ManifestError {}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
            if let Some(column) = self.column {
                write!(f, ":{column}")?;
            }
        }
        f.write_str(": ")?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.problem)
    }
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.kind)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        write!(f, ": Weft does not use this kind ({}); ignored", self.api_version)
    }
}

/// Whether a file's name marks it as a manifest: `*.yaml`, `*.yml` or `*.json`, and not hidden.
pub fn is_manifest(path: &Path) -> bool {
    let hidden = path.file_name().and_then(|name| name.to_str()).is_none_or(|name| name.starts_with('.'));
    let known = path.extension().and_then(|ext| ext.to_str()).is_some_and(|ext| matches!(ext, "yaml" | "yml" | "json"));
    known && !hidden
}

/// Reads every manifest under `dir`, recursively and in the order of paths.
///
/// # Errors
/// When `dir` itself cannot be listed. A file that cannot be read becomes one of [`Manifests::errors`].
pub fn load_dir(dir: &Path) -> io::Result<Manifests> {
    let mut all = Manifests::default();
    for file in files(dir)? {
        all.append(load_file(&file));
    }
    Ok(all)
}

/// Paths of the manifests under `dir`, recursively, sorted.
///
/// # Errors
/// When `dir` itself cannot be listed. A directory inside it that vanishes during the scan is left out.
pub fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path).unwrap_or_default());
        } else if is_manifest(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads one file; an unreadable one is reported in [`Manifests::errors`].
pub fn load_file(file: &Path) -> Manifests {
    match std::fs::read_to_string(file) {
        Ok(text) => parse(file, &text),
        Err(error) => Manifests {
            errors: vec![ManifestError {
                file: file.into(),
                line: None,
                column: None,
                object: None,
                field: String::new(),
                problem: format!("read: {error}, expected a readable UTF-8 file"),
                restrictive: None,
            }],
            ..Manifests::default()
        },
    }
}

impl Manifests {
    /// Appends the contents of another set.
    pub fn append(&mut self, other: Self) {
        self.objects.extend(other.objects);
        self.errors.extend(other.errors);
        self.ignored.extend(other.ignored);
    }
}

#[cfg(test)]
mod tests;
