//! The issuer in force, and its replacement when the files change.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use notify::{RecursiveMode, Watcher};
use parking_lot::RwLock;
use tokio::sync::mpsc;
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, IssuerError},
};

/// Names of certificate and key: Linkerd's secret, then that of type `kubernetes.io/tls` (cert-manager).
const FILE_NAMES: [(&str, &str); 2] = [("crt.pem", "key.pem"), ("tls.crt", "tls.key")];
/// Files of one update may come one by one; reading waits until the directory was quiet for this long.
const QUIET: Duration = Duration::from_millis(100);

/// Why there is no issuer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// Neither pair of files is there.
    #[error("{0} holds neither crt.pem and key.pem nor tls.crt and tls.key")]
    Missing(PathBuf),
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The files are no issuer for these anchors.
    #[error("{path}: {source}")]
    Issuer {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        source: IssuerError,
    },
}

/// The issuer in force; clones follow each other.
#[derive(Clone)]
pub(crate) struct CurrentIssuer {
    issuer: Arc<RwLock<Arc<Issuer>>>,
    expiry: Arc<RwLock<SystemTime>>,
}

impl CurrentIssuer {
    /// Starts with an issuer.
    pub(crate) fn new(issuer: Issuer) -> Self {
        let expiry = Arc::new(RwLock::new(issuer.expiry()));
        Self { issuer: Arc::new(RwLock::new(Arc::new(issuer))), expiry }
    }

    /// The issuer now.
    pub(crate) fn get(&self) -> Arc<Issuer> {
        self.issuer.read().clone()
    }

    /// When its chain expires, for metrics.
    pub(crate) fn expiry(&self) -> Arc<RwLock<SystemTime>> {
        self.expiry.clone()
    }

    fn set(&self, issuer: Issuer) {
        *self.expiry.write() = issuer.expiry();
        *self.issuer.write() = Arc::new(issuer);
    }
}

/// Reads the issuer from a directory.
///
/// # Errors
/// When files are missing or unreadable, or do not verify against the anchors.
pub(crate) fn load(dir: &Path, anchors: &TrustAnchors) -> Result<Issuer, LoadError> {
    let pair = FILE_NAMES.iter().map(|(certificate, key)| (dir.join(certificate), dir.join(key)));
    let (certificate, key) = pair
        .into_iter()
        .find(|(certificate, _)| certificate.exists())
        .ok_or_else(|| LoadError::Missing(dir.to_owned()))?;
    let read =
        |path: &Path| fs::read_to_string(path).map_err(|source| LoadError::Read { path: path.to_owned(), source });
    Issuer::from_pem(&read(&certificate)?, &read(&key)?, anchors)
        .map_err(|source| LoadError::Issuer { path: certificate, source })
}

/// Replaces the issuer whenever the files change and verify; keeps the old one when they do not. Runs until dropped.
///
/// # Errors
/// When the directory cannot be watched.
pub(crate) async fn reload(dir: PathBuf, anchors: TrustAnchors, current: CurrentIssuer) -> anyhow::Result<()> {
    let (wake_tx, mut wake_rx) = mpsc::channel(1);
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the files is an event, too, and must not cause another reading.
        if event.is_ok_and(|event| !event.kind.is_access()) {
            let _ = wake_tx.try_send(());
        }
    })?;
    watcher.watch(&dir, RecursiveMode::NonRecursive)?;
    while wake_rx.recv().await.is_some() {
        while let Ok(Some(())) = tokio::time::timeout(QUIET, wake_rx.recv()).await {}
        match load(&dir, &anchors) {
            Ok(issuer) => {
                current.set(issuer);
                tracing::info!(dir = %dir.display(), "issuer updated");
            }
            Err(error) => tracing::error!(%error, "issuer update skipped, the old issuer stays in force"),
        }
    }
    Ok(())
}
