//! The trust anchors of a mesh: the only roots that certificates are verified against.

use std::{sync::Arc, time::SystemTime};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::validity::{der_sequence, validity};

/// The mesh's roots, never the system's.
#[derive(Clone, Debug)]
pub struct TrustAnchors {
    pub(crate) store: Arc<RootCertStore>,
    certificates: Arc<[CertificateDer<'static>]>,
}

/// Why a PEM bundle is not a valid set of trust anchors.
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
        /// Number of the block in the bundle, from 1.
        number: usize,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// The bundle is not a sequence of DER certificates.
    #[error("trust bundle is not X.509 DER: {0}")]
    Der(String),
}

impl TrustAnchors {
    /// Reads a bundle of PEM certificates.
    ///
    /// # Errors
    /// When the text is not PEM, contains no certificate, or one that rustls cannot use: nothing is skipped silently.
    pub fn from_pem(pem: &str) -> Result<Self, AnchorsError> {
        let mut store = RootCertStore::empty();
        let mut certificates = Vec::new();
        for (index, certificate) in CertificateDer::pem_slice_iter(pem.as_bytes()).enumerate() {
            let certificate = certificate.map_err(AnchorsError::Pem)?;
            let added = store.add(certificate.clone());
            added.map_err(|source| AnchorsError::Certificate { number: index + 1, source })?;
            certificates.push(certificate);
        }
        if store.is_empty() {
            return Err(AnchorsError::Empty);
        }
        Ok(Self { store: Arc::new(store), certificates: certificates.into() })
    }

    /// These anchors and those of a trust bundle of the SPIFFE Workload API: the DER of its certificates, one directly
    /// after the other.
    ///
    /// # Errors
    /// When the bundle is not DER, or contains a certificate that rustls cannot use: nothing is skipped silently.
    pub fn with_bundle(&self, bundle: &[u8]) -> Result<Self, AnchorsError> {
        let mut store = RootCertStore::clone(&self.store);
        let mut certificates = self.certificates.to_vec();
        for (index, certificate) in der_sequence(bundle).map_err(AnchorsError::Der)?.into_iter().enumerate() {
            let certificate = CertificateDer::from(certificate);
            if certificates.contains(&certificate) {
                continue;
            }
            let added = store.add(certificate.clone());
            added.map_err(|source| AnchorsError::Certificate { number: index + 1, source })?;
            certificates.push(certificate);
        }
        Ok(Self { store: Arc::new(store), certificates: certificates.into() })
    }

    /// The anchors whose own validity includes `now`; possibly none. A verifier may trust an anchor's key regardless
    /// of its validity (RFC 5280 section 6.1.1), but Go's requires it to be valid, and so does Linkerd's identity
    /// service.
    #[must_use]
    pub(crate) fn valid_at(&self, now: SystemTime) -> Self {
        let is_valid = |certificate: &&CertificateDer<'_>| {
            validity(certificate).is_ok_and(|(not_before, not_after)| not_before <= now && now <= not_after)
        };
        let certificates: Arc<[_]> = self.certificates.iter().filter(is_valid).cloned().collect();
        let mut store = RootCertStore::empty();
        // None is refused, because each was accepted before.
        store.add_parsable_certificates(certificates.iter().cloned());
        Self { store: Arc::new(store), certificates }
    }
}
