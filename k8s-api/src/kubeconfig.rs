//! Kubeconfigs, read as kubectl reads them. Behind the feature `kubeconfig`: only what connects to a cluster needs the
//! part of the client library that this takes.

use std::{env, ffi::OsStr, io, path::PathBuf};

use kube::config::{Kubeconfig, KubeconfigError};

/// A file that cannot be read, is no kubeconfig, or does not fit those before it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub source: KubeconfigError,
}

/// An empty name of the current context, which kubectl and kind leave when they remove one, names none.
#[must_use]
pub fn without_empty_context(mut kubeconfig: Kubeconfig) -> Kubeconfig {
    kubeconfig.current_context = kubeconfig.current_context.filter(|name| !name.is_empty());
    kubeconfig
}

/// Reads the files that the variable KUBECONFIG names, or one that stands in its place: of several, those that do not
/// exist are skipped, and the first one that defines a name counts.
///
/// # Errors
/// When a file is no kubeconfig, or the only one does not exist.
pub fn read(paths: &OsStr) -> Result<Kubeconfig, ReadError> {
    let paths: Vec<_> = env::split_paths(paths).filter(|path| !path.as_os_str().is_empty()).collect();
    let may_skip = |error: &KubeconfigError| {
        let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        paths.len() > 1 && matches!(error, KubeconfigError::ReadConfig(error, _) if is_missing(error))
    };
    let mut merged = Kubeconfig::default();
    for path in &paths {
        let read = match Kubeconfig::read_from(path) {
            Err(error) if may_skip(&error) => continue,
            read => read.and_then(|next| merged.merge(without_empty_context(next))),
        };
        merged = read.map_err(|source| ReadError { path: path.clone(), source })?;
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_files_the_first_that_defines_a_name_counts() {
        let directory = tempfile::tempdir().unwrap();
        let cluster = |server: &str| format!("clusters: [{{name: west, cluster: {{server: 'https://{server}'}}}}]\n");
        let contexts = "current-context: east\ncontexts: [{name: west, context: {cluster: west, user: jane}}]\n";
        for (name, text) in [
            ("unset", "current-context: ''\n".to_owned()),
            ("first", format!("current-context: west\n{}", cluster("first"))),
            ("second", format!("{contexts}{}", cluster("second"))),
            ("broken", "current-context: [\n".to_owned()),
        ] {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        let read = |names: &[&str]| {
            let paths = names.iter().map(|name| if name.is_empty() { "".into() } else { directory.path().join(name) });
            read(&env::join_paths(paths).unwrap())
        };
        let merged = read(&["", "none", "unset", "first", "second"]).unwrap();
        assert_eq!((merged.current_context.as_deref(), merged.contexts.len()), (Some("west"), 1));
        let servers = merged.clusters.iter().map(|named| named.cluster.as_ref().unwrap().server.as_deref().unwrap());
        assert_eq!(servers.collect::<Vec<_>>(), ["https://first"]);
        assert_eq!(read(&["none", "nothing"]).unwrap().current_context, None);

        let missing = read(&["none"]).unwrap_err();
        assert!(missing.path.ends_with("none") && missing.to_string().contains("none: "), "{missing}");
        let broken = read(&["first", "broken"]).unwrap_err();
        assert!(matches!(broken.source, KubeconfigError::Parse(_)), "{broken}");
    }
}
