//! A trust anchor and an issuer in files, and the options of helm and `weft` that name them.

use std::{fs, io, path::PathBuf};

use tempfile::TempDir;

/// The files `ca.crt`, `issuer.crt` and `issuer.key` in a directory, which is removed on drop.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    /// Writes PEM: the trust anchor's certificate, the issuer's certificate and the issuer's key.
    ///
    /// # Errors
    /// No temporary directory could be made or written.
    pub fn write(anchor: &str, issuer: &str, key: &str) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        for (file, pem) in [("ca.crt", anchor), ("issuer.crt", issuer), ("issuer.key", key)] {
            fs::write(directory.path().join(file), pem)?;
        }
        Ok(Self(directory))
    }

    /// The path of a file in the directory.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// The option that sets a value of the chart to a file's content.
    pub fn set(&self, value: &str, file: &str) -> [String; 2] {
        ["--set-file".to_owned(), format!("{value}={}", self.path(file).display())]
    }

    /// The options for the issuer.
    pub fn issuer(&self) -> Vec<String> {
        let certificate = self.set("identity.issuer.tls.crtPEM", "issuer.crt");
        let key = self.set("identity.issuer.tls.keyPEM", "issuer.key");
        [certificate, key].concat()
    }

    /// The options for all values that the control plane's chart requires: the trust anchor and the issuer.
    pub fn all(&self) -> Vec<String> {
        [self.set("identityTrustAnchorsPEM", "ca.crt").to_vec(), self.issuer()].concat()
    }
}
