//! The issuer in force, and its replacement when the files change.
//!
//! Problems with certificates are reported where people look: in the log, and in a cluster as an Event on the
//! Deployment, with the object, its key and the Helm value that sets it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use clap::ValueEnum;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::ObjectReference};
use kube::{Api, Client, Resource, runtime::events::EventType};
use notify::RecursiveMode;
use parking_lot::RwLock;
use weft_tls::{
    anchors::{AnchorsError, TrustAnchors},
    ca::{Issuer, IssuerError},
};

use crate::{
    api::{events::Events, explain},
    file_changes::{self, FileChanges},
};

/// The files of one update may change one by one; reading waits until the directory has been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// Linkerd's names of the objects that contain certificates in a cluster.
const DEPLOYMENT: &str = "linkerd-identity";
const SECRET: &str = "linkerd-identity-issuer";
const CONFIG_MAP: &str = "linkerd-identity-trust-roots";
const CONFIG_MAP_KEY: &str = "ca-bundle.crt";
/// Deadline for a last Event before the process exits.
const LAST_EVENT: Duration = Duration::from_secs(5);
/// Reason of the Event about unusable certificates, Linkerd's.
pub(super) const VALIDATION_FAILED: &str = "IssuerValidationFailed";

/// What sets the trust anchors, in remedies: the chart ignores its value where another tool writes the ConfigMap, and
/// this process does not know which of both it is.
pub(super) const SETS_ANCHORS: &str =
    "the Helm value identityTrustAnchorsPEM or, with identity.externalCA, the tool that writes the ConfigMap";

/// Format of the issuer's Secret, by the names of the value `identity.issuer.scheme`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scheme {
    /// `crt.pem` and `key.pem`, as Linkerd's chart and ours write them.
    #[value(name = "linkerd.io/tls")]
    Linkerd,
    /// `tls.crt` and `tls.key`, as other tools write them, such as cert-manager.
    #[value(name = "kubernetes.io/tls")]
    Kubernetes,
}

impl Scheme {
    /// Names of certificate and key.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Linkerd => ("crt.pem", "key.pem"),
            Self::Kubernetes => ("tls.crt", "tls.key"),
        }
    }

    /// Paths of certificate and key in a directory.
    fn files(self, directory: &Path) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.names();
        (directory.join(certificate), directory.join(key))
    }
}

/// Why an issuer could not be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// The certificate or the key does not exist.
    #[error("the issuer's certificate or key is missing in {directory}")]
    Missing {
        /// The directory of both.
        directory: PathBuf,
        /// Which pair of files was read; `None` if there is neither.
        scheme: Option<Scheme>,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file of the anchors contains none.
    #[error("{path}: {source}")]
    Anchors {
        /// Path of the file.
        path: PathBuf,
        /// The error in it.
        source: AnchorsError,
    },
    /// The files are not an issuer for these anchors.
    #[error("{path}: {source}")]
    Issuer {
        /// Path of the file that contains the error.
        path: PathBuf,
        /// The error in it.
        source: IssuerError,
    },
}

/// The source of certificates, for people who have to change them.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Files named on the command line; this is the one of the trust anchors.
    Files(PathBuf),
    /// Objects of a cluster.
    Cluster {
        /// Namespace of the control plane.
        namespace: String,
        /// Format of the issuer's Secret.
        scheme: Option<Scheme>,
        /// The Deployment on which Events are published.
        deployment: Box<ObjectReference>,
    },
}

impl Place {
    /// The objects of a cluster. Without the Deployment's uid `kubectl describe` would not show its Events.
    pub(crate) async fn cluster(client: &Client, namespace: &str, scheme: Option<Scheme>) -> Self {
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
        Self::Cluster { namespace: namespace.to_owned(), scheme, deployment: Box::new(reference) }
    }

    /// The object of Events about the issuer.
    pub(super) fn regarding(&self) -> Option<ObjectReference> {
        match self {
            Self::Files(_) => None,
            Self::Cluster { deployment, .. } => Some((**deployment).clone()),
        }
    }

    fn anchors(&self) -> String {
        match self {
            Self::Files(path) => format!("--identity-trust-anchors {}", path.display()),
            Self::Cluster { namespace, .. } => format!("ConfigMap {namespace}/{CONFIG_MAP}, key {CONFIG_MAP_KEY}"),
        }
    }

    fn file(&self, file: &Path) -> String {
        match self {
            Self::Files(_) => format!("--identity-issuer-dir: {}", file.display()),
            Self::Cluster { .. } if file.file_name().is_some_and(|name| name == CONFIG_MAP_KEY) => self.anchors(),
            Self::Cluster { namespace, .. } => {
                let key = file.file_name().unwrap_or_default().to_string_lossy();
                format!("Secret {namespace}/{SECRET}, key {key}")
            }
        }
    }

    /// The beginning of a remedy, and what certificate and key are called in it: the chart ignores its values where
    /// another tool writes the Secret.
    pub(super) fn issuer_values(&self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Cluster { scheme: Some(Scheme::Kubernetes), .. } => {
                ("have the tool that writes the Secret set", "tls.crt", "tls.key")
            }
            Self::Cluster { .. } | Self::Files(_) => {
                ("set", "identity.issuer.tls.crtPEM", "identity.issuer.tls.keyPEM")
            }
        }
    }

    /// The problem with the issuer, and a remedy.
    fn explain(&self, error: &LoadError) -> String {
        let (set, certificate, key) = self.issuer_values();
        match error {
            LoadError::Missing { directory, scheme } => {
                let missing = match scheme.map(Scheme::names) {
                    Some((certificate, key)) => format!("{certificate} or {key} is missing"),
                    None => "neither crt.pem and key.pem nor tls.crt and tls.key".to_owned(),
                };
                match self {
                    Self::Files(_) => format!("--identity-issuer-dir {}: {missing}", directory.display()),
                    Self::Cluster { namespace, .. } => {
                        format!("Secret {namespace}/{SECRET}: {missing}; {set} {certificate} and {key}")
                    }
                }
            }
            LoadError::Read { path, source } => format!("{}: cannot be read: {source}", self.file(path)),
            LoadError::Anchors { source, .. } => {
                format!("{}: {source}; set it to the root certificate in PEM with {SETS_ANCHORS}", self.anchors())
            }
            LoadError::Issuer { path, source } => {
                let remedy = match source {
                    IssuerError::Chain(_) => format!(
                        "{certificate} must be issued by the root in {}, which {SETS_ANCHORS} sets, and neither may be \
                         expired",
                        self.anchors()
                    ),
                    IssuerError::AnchorExpired => {
                        format!("set {} to a root that is valid now, with {SETS_ANCHORS}", self.anchors())
                    }
                    IssuerError::Mismatch => format!("{set} {certificate} and {key} to a certificate and its own key"),
                    IssuerError::Key(_) => {
                        format!("{set} {key} to the issuer's private key in PEM, without a password")
                    }
                    _ => format!(
                        "{set} {certificate} to a certificate of an intermediate authority, such as step certificate \
                         create --profile intermediate-ca makes"
                    ),
                };
                format!("{}: {source}; {remedy}", self.file(path))
            }
        }
    }
}

/// The files of an issuer.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// Directory of certificate and key.
    pub(crate) issuer: PathBuf,
    /// Which pair of files to read; by default the first that exists. A Secret may have both: a tool that writes into
    /// one of Linkerd's format leaves its keys there.
    pub(crate) scheme: Option<Scheme>,
    /// The trust anchors.
    pub(crate) anchors: PathBuf,
}

/// The content of the files.
#[derive(PartialEq, Eq)]
struct Texts {
    certificate: (PathBuf, String),
    key: (PathBuf, String),
    anchors: String,
}

/// An issuer and the state needed to replace it.
pub(crate) struct Running {
    /// The issuer in force.
    pub(crate) current: CurrentIssuer,
    files: Files,
    in_force: Texts,
}

/// Loads the first issuer.
///
/// # Errors
/// When the issuer or the anchors cannot be used; an Event has then been published.
pub(crate) async fn start(files: Files, place: &Place, events: &Events) -> anyhow::Result<Running> {
    let loaded = files.read().and_then(|texts| Ok((files.parse(&texts)?, texts)));
    match loaded {
        Ok((issuer, in_force)) => Ok(Running { current: CurrentIssuer::new(issuer), files, in_force }),
        Err(error) => {
            let problem = place.explain(&error);
            if let Some(regarding) = place.regarding() {
                let published = events.publish(EventType::Warning, VALIDATION_FAILED, problem.clone(), &regarding);
                let _ = tokio::time::timeout(LAST_EVENT, published).await;
            }
            Err(anyhow::anyhow!(problem))
        }
    }
}

/// The issuer in force; clones share it.
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

impl Files {
    fn read(&self) -> Result<Texts, LoadError> {
        let missing = |scheme| LoadError::Missing { directory: self.issuer.clone(), scheme };
        let exists = |scheme: &Scheme| scheme.files(&self.issuer).0.exists();
        let scheme = self.scheme.or_else(|| [Scheme::Linkerd, Scheme::Kubernetes].into_iter().find(exists));
        let scheme = scheme.ok_or_else(|| missing(None))?;
        let (certificate, key) = scheme.files(&self.issuer);
        let read =
            |path: &Path| fs::read_to_string(path).map_err(|source| LoadError::Read { path: path.to_owned(), source });
        let read_issuer = |path: &Path| {
            read(path).map_err(|error| match error {
                LoadError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => missing(Some(scheme)),
                error => error,
            })
        };
        let anchors = read(&self.anchors)?;
        let (certificate_text, key_text) = (read_issuer(&certificate)?, read_issuer(&key)?);
        Ok(Texts { certificate: (certificate, certificate_text), key: (key, key_text), anchors })
    }

    fn parse(&self, texts: &Texts) -> Result<Issuer, LoadError> {
        let anchors = TrustAnchors::from_pem(&texts.anchors)
            .map_err(|source| LoadError::Anchors { path: self.anchors.clone(), source })?;
        Issuer::from_pem(&texts.certificate.1, &texts.key.1, &anchors).map_err(|source| {
            let key_is_to_blame = matches!(source, IssuerError::Key(_) | IssuerError::Mismatch);
            let (path, _) = if key_is_to_blame { &texts.key } else { &texts.certificate };
            LoadError::Issuer { path: path.clone(), source }
        })
    }
}

impl Running {
    /// Replaces the issuer whenever the files change and the new one verifies; otherwise keeps the old one. Runs until
    /// dropped.
    pub(crate) async fn reload(mut self, place: Place, events: Events) -> anyhow::Result<()> {
        let directories = vec![self.files.issuer.clone(), file_changes::directory(&self.files.anchors)];
        let mut changes = FileChanges::new(directories, RecursiveMode::NonRecursive, QUIET);
        let mut said = None;
        loop {
            // The files may have changed since the start.
            self.apply(&place, &events, &mut said);
            changes.wait().await;
        }
    }

    fn apply(&mut self, place: &Place, events: &Events, said: &mut Option<String>) {
        let texts = match self.files.read() {
            Ok(texts) if texts == self.in_force => {
                *said = None;
                return;
            }
            read => read,
        };
        match texts.and_then(|texts| Ok((self.files.parse(&texts)?, texts))) {
            Ok((issuer, texts)) => {
                self.current.set(issuer);
                self.in_force = texts;
                *said = None;
                tracing::info!(dir = %self.files.issuer.display(), "issuer updated");
                if let Some(regarding) = place.regarding() {
                    events.normal("IssuerUpdated", "Updated identity issuer".to_owned(), regarding);
                }
            }
            Err(error) => {
                let problem = place.explain(&error);
                if said.as_ref() == Some(&problem) {
                    return;
                }
                tracing::error!(problem, "issuer update skipped, the old issuer stays in force");
                if let Some(regarding) = place.regarding() {
                    events.warning("IssuerUpdateSkipped", problem.clone(), regarding);
                }
                *said = Some(problem);
            }
        }
    }
}
