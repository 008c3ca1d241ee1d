//! Reads a directory repeatedly, and each file only if it changed.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use weft_k8s_api::manifest::{self, Manifests};

/// Manifests by file.
pub(super) type Files = BTreeMap<PathBuf, Arc<Manifests>>;

/// Identifies a file's content: a replaced file has another inode, a rewritten one other times.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Remembers the contents of files.
#[derive(Default)]
pub(super) struct Scanner {
    known: BTreeMap<PathBuf, (Option<Stamp>, Arc<Manifests>)>,
}

impl Scanner {
    /// Reads changed files and returns all of them.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub(super) fn scan(&mut self, dir: &Path) -> io::Result<Files> {
        let paths = manifest::files(dir)?;
        let mut next = BTreeMap::new();
        for path in paths {
            let stamp = stamp(&path);
            let unchanged = self.known.remove(&path).filter(|(known, _)| stamp.is_some() && *known == stamp);
            let manifests = match unchanged {
                Some((_, manifests)) => manifests,
                None => {
                    let read = manifest::load_file(&path);
                    report(&read);
                    Arc::new(read)
                }
            };
            next.insert(path, (stamp, manifests));
        }
        self.known = next;
        Ok(self.known.iter().map(|(path, (_, manifests))| (path.clone(), manifests.clone())).collect())
    }
}

/// Reports every problem when it is read, which is once.
fn report(manifests: &Manifests) {
    for error in &manifests.errors {
        let object = error.object.as_ref().map(ToString::to_string);
        tracing::error!(
            file = %error.file.display(),
            line = error.line,
            column = error.column,
            object,
            field = error.field,
            problem = error.problem,
            "malformed manifest, the last good state stays in force"
        );
    }
    for ignored in &manifests.ignored {
        tracing::debug!(
            file = %ignored.file.display(),
            line = ignored.line,
            api_version = ignored.api_version,
            kind = ignored.kind,
            name = ignored.name,
            "kind is not read"
        );
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = fs::metadata(path).ok()?;
    Some(Stamp {
        inode: meta.ino(),
        size: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        changed: (meta.ctime(), meta.ctime_nsec()),
    })
}
