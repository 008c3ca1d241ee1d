//! A workload's private key and its certificate signing request.
//!
//! The files are those of Linkerd's `linkerd2-proxy-identity`: `key.p8` (PKCS#8 DER, ECDSA P-256) and `csr.der`, mode
//! 0600 where files have modes. A key lives as long as its directory; in a pod, that is as long as the pod.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::identity::Identity;

/// The private key's file in an identity directory.
pub const KEY_FILE: &str = "key.p8";
/// The signing request's file in an identity directory.
pub const CSR_FILE: &str = "csr.der";

/// An ECDSA P-256 key pair.
pub struct IdentityKey(KeyPair);

impl std::fmt::Debug for IdentityKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdentityKey(..)")
    }
}

/// Why a key or a request is not available.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The bytes are not a PKCS#8 ECDSA P-256 key.
    #[error("{} is not a PKCS#8 DER private key (ECDSA P-256): {source}", path.display())]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// The error of rcgen.
        source: rcgen::Error,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// `read`, `write` or `create`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The system provided no randomness, or the name does not fit into a certificate.
    #[error("cannot create the key or the signing request: {0}")]
    Generate(#[source] rcgen::Error),
}

impl IdentityKey {
    /// Generates a new key.
    ///
    /// # Errors
    /// When the system provides no randomness.
    pub fn generate() -> Result<Self, KeyError> {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map(Self).map_err(KeyError::Generate)
    }

    /// The key in PKCS#8 DER.
    #[must_use]
    pub fn pkcs8_der(&self) -> &[u8] {
        self.0.serialized_der()
    }

    /// A signing request for `name`: common name and exactly one subject alternative name, both the identity.
    ///
    /// # Errors
    /// When the identity contains characters that a certificate cannot.
    pub fn csr_der(&self, name: &Identity) -> Result<Vec<u8>, KeyError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name.as_str());
        let text = name.as_str().try_into().map_err(KeyError::Generate)?;
        params.subject_alt_names = vec![match name {
            Identity::Dns(_) => SanType::DnsName(text),
            Identity::Uri(_) => SanType::URI(text),
        }];
        let request = params.serialize_request(&self.0).map_err(KeyError::Generate)?;
        Ok(request.der().to_vec())
    }

    /// Reads key and request from `dir`; generates and stores them if there is no key yet. Returns the request's DER.
    ///
    /// # Errors
    /// When the directory cannot be used or its key is broken: a broken key is never replaced.
    pub fn load_or_create(dir: &Path, name: &Identity) -> Result<(Self, Vec<u8>), KeyError> {
        let key_path = dir.join(KEY_FILE);
        let key = match fs::read(&key_path) {
            Ok(der) => parse(&der, &key_path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = Self::generate()?;
                write_private(&key_path, key.pkcs8_der())?;
                key
            }
            Err(source) => {
                return Err(KeyError::File { action: "read", path: key_path, source });
            }
        };
        let csr_path = dir.join(CSR_FILE);
        let csr = match fs::read(&csr_path) {
            Ok(der) => der,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let der = key.csr_der(name)?;
                write_private(&csr_path, &der)?;
                der
            }
            Err(source) => {
                return Err(KeyError::File { action: "read", path: csr_path, source });
            }
        };
        Ok((key, csr))
    }

    pub(crate) fn to_rustls(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.pkcs8_der().to_vec()).into()
    }
}

fn parse(der: &[u8], path: &Path) -> Result<IdentityKey, KeyError> {
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &PKCS_ECDSA_P256_SHA256)
        .map(IdentityKey)
        .map_err(|source| KeyError::Parse { path: path.to_owned(), source })
}

fn write_private(path: &Path, bytes: &[u8]) -> Result<(), KeyError> {
    let failed = |action| move |source| KeyError::File { action, path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path).map_err(failed("create"))?;
    file.write_all(bytes).map_err(failed("write"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_a_restart_in_the_same_directory() {
        let dir = tempfile::tempdir().unwrap();
        let name: Identity = "web.demo".parse().unwrap();
        let (first, csr) = IdentityKey::load_or_create(dir.path(), &name).unwrap();
        let (second, same_csr) = IdentityKey::load_or_create(dir.path(), &name).unwrap();
        assert_eq!(first.pkcs8_der(), second.pkcs8_der());
        assert_eq!(csr, same_csr);
    }

    #[test]
    fn a_broken_key_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(KEY_FILE), b"garbage").unwrap();
        let error = IdentityKey::load_or_create(dir.path(), &"web.demo".parse().unwrap()).unwrap_err();
        assert!(error.to_string().contains(KEY_FILE), "{error}");
        assert_eq!(fs::read(dir.path().join(KEY_FILE)).unwrap(), b"garbage");
    }
}
