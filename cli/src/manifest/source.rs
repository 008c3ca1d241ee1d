//! Where manifests come from: standard input, files, folders, URLs.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, bail};
use http::Uri;

use super::download;
use crate::output::progress;

/// A text, and the name to call it by.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// File, URL or `standard input`.
    pub(crate) name: Arc<str>,
    /// All of it.
    pub(crate) text: String,
}

/// Reads `-`, a file, a folder with its sub-folders, or a URL.
///
/// # Errors
/// When one of them cannot be read; the error names it.
pub(crate) async fn read(from: &str) -> Result<Vec<Source>> {
    let path = Path::new(from);
    if !path.is_dir() {
        return Ok(vec![read_one(from).await?]);
    }
    let paths = files(path)?;
    if paths.is_empty() {
        bail!("{from}: this folder has no files with names that end in .yaml, .yml or .json");
    }
    paths.iter().map(|path| file(path)).collect()
}

/// Reads `-`, a file or a URL.
///
/// # Errors
/// When it cannot be read; the error names it.
pub(crate) async fn read_one(from: &str) -> Result<Source> {
    if from == "-" {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).context("standard input")?;
        return Ok(Source { name: "standard input".into(), text });
    }
    match url(from)? {
        Some(url) => {
            let text = progress::during(from, download::get(url)).await?;
            Ok(Source { name: from.into(), text })
        }
        None => file(Path::new(from)),
    }
}

/// Refuses standard input that is named twice: it would be empty the second time.
pub(crate) fn check_stdin<'a>(all: impl IntoIterator<Item = &'a String>) -> Result<()> {
    if all.into_iter().filter(|from| *from == "-").count() > 1 {
        bail!("standard input can be read once: - is given more than once");
    }
    Ok(())
}

fn url(from: &str) -> Result<Option<Uri>> {
    if !from.starts_with("http://") && !from.starts_with("https://") {
        return Ok(None);
    }
    from.parse().map(Some).with_context(|| format!("{from}: not a URL"))
}

fn file(path: &Path) -> Result<Source> {
    let name = path.display().to_string();
    let text = fs::read_to_string(path).with_context(|| name.clone())?;
    Ok(Source { name: name.into(), text })
}

/// The manifests in a folder and its sub-folders, by name. Others are left out, such as READMEs, as kubectl does.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        // A link to a parent would make this endless, so links to folders are not followed.
        let kind = fs::symlink_metadata(&path).with_context(|| path.display().to_string())?;
        if kind.is_dir() {
            found.extend(files(&path)?);
        } else if path
            .extension()
            .is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
        {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_folder_is_read_with_its_sub_folders_in_order() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("b")).unwrap();
        for (name, text) in [("c.yaml", "c"), ("a.yml", "a"), ("b/b.json", "b"), ("README.md", "no")] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let sources = read(folder.path().to_str().unwrap()).await.unwrap();
        let texts: Vec<_> = sources.iter().map(|source| source.text.as_str()).collect();
        assert_eq!(texts, ["a", "b", "c"]);
    }

    #[tokio::test]
    async fn what_is_not_there_is_named() {
        for (from, words) in [("nowhere.yaml", "nowhere.yaml"), ("http://[", "not a URL")] {
            let Err(error) = read(from).await else { panic!("{from} was read") };
            assert!(format!("{error:#}").contains(words), "{error:#}");
        }
        let folder = tempfile::tempdir().unwrap();
        let Err(error) = read(folder.path().to_str().unwrap()).await else { panic!("read") };
        assert!(format!("{error:#}").contains("no files"), "{error:#}");
    }
}
