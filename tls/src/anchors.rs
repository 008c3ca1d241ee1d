//! The trust anchors of a mesh: the only roots that anything is checked against.

use std::sync::Arc;

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

/// The mesh's roots. Never the system's.
#[derive(Clone, Debug)]
pub struct TrustAnchors {
    pub(crate) store: Arc<RootCertStore>,
}

/// Why a PEM bundle is no set of trust anchors.
#[derive(Debug, thiserror::Error)]
pub enum AnchorsError {
    /// The text is not PEM.
    #[error("trust anchors are not PEM: {0}; expected one or more CERTIFICATE blocks")]
    Pem(#[source] rustls::pki_types::pem::Error),
    /// There is no certificate in the text.
    #[error("trust anchors hold no certificate; expected one or more CERTIFICATE blocks")]
    Empty,
    /// A block is not an X.509 certificate.
    #[error("trust anchor number {number} is not usable: {source}")]
    Certificate {
        /// Which block of the bundle, from 1.
        number: usize,
        /// What rustls found.
        source: rustls::Error,
    },
}

impl TrustAnchors {
    /// Reads a bundle of PEM certificates.
    ///
    /// # Errors
    /// When the text is not PEM, holds no certificate, or one that rustls cannot use: nothing is skipped in silence.
    pub fn from_pem(pem: &str) -> Result<Self, AnchorsError> {
        let mut store = RootCertStore::empty();
        for (index, certificate) in CertificateDer::pem_slice_iter(pem.as_bytes()).enumerate() {
            let certificate = certificate.map_err(AnchorsError::Pem)?;
            store.add(certificate).map_err(|source| AnchorsError::Certificate { number: index + 1, source })?;
        }
        if store.is_empty() {
            return Err(AnchorsError::Empty);
        }
        Ok(Self { store: Arc::new(store) })
    }
}
