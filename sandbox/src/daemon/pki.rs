//! The sandbox's keys: a root and an issuer for the control plane, and a key that signs service-account tokens.
//!
//! Created at every start, kept in the sandbox's directory, removed with it.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use weft_tls::{
    ca::{IssuerError, Root},
    tokens::{AUDIENCE, ServiceAccount, TokenKeyError, TokenSigner},
};

/// Lifetime of a token: a day, like Linkerd's projected tokens.
pub(super) const TOKEN_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The trust anchors of a sandbox, and the key that signs its tokens. The issuer is in the control plane's files alone.
pub(super) struct Pki {
    /// The trust anchors, PEM.
    pub(super) anchors_pem: String,
    signer: TokenSigner,
}

/// Why keys or tokens are not available.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A certificate could not be created.
    #[error(transparent)]
    Issuer(#[from] IssuerError),
    /// A token key or a token could not be created.
    #[error(transparent)]
    Token(#[from] TokenKeyError),
    /// A file could not be written.
    #[error("cannot write the sandbox's keys: {0}")]
    Write(#[from] io::Error),
}

impl Pki {
    /// Creates keys and certificates and writes the control plane's files: `crt.pem`, `key.pem`, `ca-bundle.crt`,
    /// `token.pub`.
    pub(super) fn create(dir: &Path) -> Result<Self, PkiError> {
        let root = Root::generate("root.linkerd.cluster.local")?;
        let issuer = root.issue_issuer("identity.linkerd.cluster.local")?;
        let signer = TokenSigner::generate()?;
        fs::create_dir_all(dir)?;
        for (file, content) in [
            ("crt.pem", issuer.certificate.as_str()),
            ("key.pem", issuer.key.as_str()),
            ("ca-bundle.crt", root.certificate_pem()),
            ("token.pub", signer.public_pem()),
        ] {
            let path = dir.join(file);
            fs::write(&path, content)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        }
        Ok(Self { anchors_pem: root.certificate_pem().to_owned(), signer })
    }

    /// A service account's token for the identity service.
    pub(super) fn token(&self, namespace: &str, name: &str) -> Result<String, PkiError> {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        Ok(self.signer.sign(&account, AUDIENCE, TOKEN_LIFETIME)?)
    }
}
