//! The issuer in force, and its replacement when the files change.
//!
//! What is wrong with a certificate is said where people look: in the log, and in a cluster as an Event on the Deployment,
//! with the object, its key and the Helm value that sets it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::ObjectReference};
use kube::{Api, Client, Resource, runtime::events::EventType};
use notify::{RecursiveMode, Watcher};
use parking_lot::RwLock;
use tokio::sync::mpsc;
use weft_tls::{
    anchors::{AnchorsError, TrustAnchors},
    ca::{Issuer, IssuerError},
};

use crate::api::{events::Events, explain};

/// Names of certificate and key: Linkerd's secret, then that of type `kubernetes.io/tls` (cert-manager).
const FILE_NAMES: [(&str, &str); 2] = [("crt.pem", "key.pem"), ("tls.crt", "tls.key")];
/// Files of one update may come one by one; reading waits until the directory was quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// Linkerd's names of what a cluster keeps certificates in.
const DEPLOYMENT: &str = "linkerd-identity";
const SECRET: &str = "linkerd-identity-issuer";
const CONFIG_MAP: &str = "linkerd-identity-trust-roots";
/// How long a last Event may take before the process ends.
const LAST_EVENT: Duration = Duration::from_secs(5);
/// Reason of the Event about certificates that cannot be used, Linkerd's.
pub(super) const VALIDATION_FAILED: &str = "IssuerValidationFailed";

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
        /// The file that is to blame.
        path: PathBuf,
        /// Why.
        source: IssuerError,
    },
}

/// Where certificates come from, for people who have to change them.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Files that somebody named; this is the one of the trust anchors.
    Files(PathBuf),
    /// Objects of a cluster.
    Cluster {
        /// Namespace of the control plane.
        namespace: String,
        /// Whose Events people read.
        deployment: Box<ObjectReference>,
    },
}

impl Place {
    /// The objects of a cluster. Without the Deployment's uid `kubectl describe` would not show its Events.
    pub(crate) async fn cluster(client: &Client, namespace: &str) -> Self {
        let reference = match Api::<Deployment>::namespaced(client.clone(), namespace).get(DEPLOYMENT).await {
            Ok(deployment) => deployment.object_ref(&()),
            Err(error) => {
                let error = explain(&error);
                tracing::warn!(
                    error,
                    deployment = DEPLOYMENT,
                    namespace,
                    "deployment cannot be read, kubectl describe will not show its events"
                );
                ObjectReference {
                    api_version: Some("apps/v1".to_owned()),
                    kind: Some("Deployment".to_owned()),
                    name: Some(DEPLOYMENT.to_owned()),
                    namespace: Some(namespace.to_owned()),
                    ..ObjectReference::default()
                }
            }
        };
        Self::Cluster { namespace: namespace.to_owned(), deployment: Box::new(reference) }
    }

    /// The object that Events about the issuer are about.
    pub(super) fn regarding(&self) -> Option<ObjectReference> {
        match self {
            Self::Files(_) => None,
            Self::Cluster { deployment, .. } => Some((**deployment).clone()),
        }
    }

    fn anchors(&self) -> String {
        match self {
            Self::Files(path) => format!("--identity-trust-anchors {}", path.display()),
            Self::Cluster { namespace, .. } => format!("ConfigMap {namespace}/{CONFIG_MAP}, key ca-bundle.crt"),
        }
    }

    fn issuer(&self, file: &Path) -> String {
        match self {
            Self::Files(_) => format!("--identity-issuer-dir: {}", file.display()),
            Self::Cluster { namespace, .. } => {
                let key = file.file_name().unwrap_or_default().to_string_lossy();
                format!("Secret {namespace}/{SECRET}, key {key}")
            }
        }
    }

    /// What is wrong with the anchors, and the cure.
    fn explain_anchors(&self, error: &AnchorsError) -> String {
        let cure = "set the Helm value identityTrustAnchorsPEM to the root certificate in PEM";
        format!("{}: {error}; {cure}", self.anchors())
    }

    /// What is wrong with the issuer, and the cure.
    fn explain(&self, error: &LoadError) -> String {
        match error {
            LoadError::Missing(dir) => match self {
                Self::Files(_) => format!("--identity-issuer-dir {}: {error}", dir.display()),
                Self::Cluster { namespace, .. } => format!(
                    "Secret {namespace}/{SECRET}: neither keys crt.pem and key.pem nor tls.crt and tls.key; set the Helm \
                     values identity.issuer.tls.crtPEM and keyPEM"
                ),
            },
            LoadError::Read { path, source } => format!("{}: cannot be read: {source}", self.issuer(path)),
            LoadError::Issuer { path, source } => {
                let cure = match source {
                    IssuerError::Chain(_) => format!(
                        "identity.issuer.tls.crtPEM must be issued by the root in identityTrustAnchorsPEM ({}), and \
                         neither may be expired",
                        self.anchors()
                    ),
                    IssuerError::Mismatch => {
                        "set identity.issuer.tls.crtPEM and keyPEM to a certificate and its own key".to_owned()
                    }
                    IssuerError::Key(_) => {
                        "set identity.issuer.tls.keyPEM to the issuer's private key in PEM, without a password"
                            .to_owned()
                    }
                    _ => "set identity.issuer.tls.crtPEM to a certificate of an intermediate authority, such as step \
                          certificate create --profile intermediate-ca makes"
                        .to_owned(),
                };
                format!("{}: {source}; {cure}", self.issuer(path))
            }
        }
    }
}

/// An issuer and what it takes to replace it.
pub(crate) struct Running {
    /// The issuer in force.
    pub(crate) current: CurrentIssuer,
    dir: PathBuf,
    anchors: TrustAnchors,
}

/// Reads the first issuer.
///
/// # Errors
/// When it or the anchors cannot be used; an Event has then been published.
pub(crate) async fn start(
    dir: &Path,
    anchors: Result<TrustAnchors, AnchorsError>,
    place: &Place,
    events: &Events,
) -> anyhow::Result<Running> {
    let loaded = match anchors {
        Ok(anchors) => match load(dir, &anchors) {
            Ok(issuer) => Ok((issuer, anchors)),
            Err(error) => Err(place.explain(&error)),
        },
        Err(error) => Err(place.explain_anchors(&error)),
    };
    match loaded {
        Ok((issuer, anchors)) => Ok(Running { current: CurrentIssuer::new(issuer), dir: dir.to_owned(), anchors }),
        Err(problem) => {
            if let Some(regarding) = place.regarding() {
                let published = events.publish(EventType::Warning, VALIDATION_FAILED, problem.clone(), &regarding);
                let _ = tokio::time::timeout(LAST_EVENT, published).await;
            }
            Err(anyhow::anyhow!(problem))
        }
    }
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
    Issuer::from_pem(&read(&certificate)?, &read(&key)?, anchors).map_err(|source| {
        let key_is_to_blame = matches!(source, IssuerError::Key(_) | IssuerError::Mismatch);
        LoadError::Issuer { path: if key_is_to_blame { key } else { certificate }, source }
    })
}

impl Running {
    /// Replaces the issuer whenever the files change and verify; keeps the old one when they do not. Runs until dropped.
    ///
    /// # Errors
    /// When the directory cannot be watched.
    pub(crate) async fn reload(self, place: Place, events: Events) -> anyhow::Result<()> {
        let (wake_tx, mut wake_rx) = mpsc::channel(1);
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the files is an event, too, and must not cause another reading.
            if event.is_ok_and(|event| !event.kind.is_access()) {
                let _ = wake_tx.try_send(());
            }
        })?;
        watcher.watch(&self.dir, RecursiveMode::NonRecursive)?;
        while wake_rx.recv().await.is_some() {
            while let Ok(Some(())) = tokio::time::timeout(QUIET, wake_rx.recv()).await {}
            match load(&self.dir, &self.anchors) {
                Ok(issuer) => {
                    self.current.set(issuer);
                    tracing::info!(dir = %self.dir.display(), "issuer updated");
                    if let Some(regarding) = place.regarding() {
                        events.normal("IssuerUpdated", "Updated identity issuer".to_owned(), regarding);
                    }
                }
                Err(error) => {
                    let problem = place.explain(&error);
                    tracing::error!(problem, "issuer update skipped, the old issuer stays in force");
                    if let Some(regarding) = place.regarding() {
                        events.warning("IssuerUpdateSkipped", problem, regarding);
                    }
                }
            }
        }
        Ok(())
    }
}
