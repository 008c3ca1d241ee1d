//! Mesh identities and the TLS that proves them.
//!
//! Owns names ([`identity`]), private keys and signing requests ([`keys`]), trust anchors ([`anchors`]), a workload's
//! credentials and the rustls configurations made from them ([`credentials`]), the certificate authority ([`ca`]) and
//! service-account tokens signed by a local key ([`tokens`]). Certificates of webhooks ([`serving`]) are independent
//! of all that. Refuses to do IO beyond the identity directory, to know about connections, and to accept anything but
//! TLS 1.3 with a certificate that chains to the mesh's trust anchors.
//!
//! ```text
//! key + CSR ── Certify ──> leaf + intermediates ──> Credentials ──> server_config / client_config
//! ```

pub mod anchors;
pub mod ca;
pub mod credentials;
#[cfg(test)]
mod handshake;
pub mod identity;
pub mod inspect;
pub mod keys;
pub mod serving;
pub mod tokens;
mod validity;
mod verify;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The one crypto provider of every Weft process: aws-lc-rs with the TLS 1.3 cipher suites that Linkerd's proxy offers.
#[must_use]
pub fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
            aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
            aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..aws_lc_rs::default_provider()
    })
}

/// Makes [`crypto_provider`] the process default, for libraries that ask rustls for one. Repeated calls have no
/// effect.
pub fn install_crypto_provider() {
    // An error means that a default is installed already, which is what the caller wants.
    let _ = CryptoProvider::install_default((*crypto_provider()).clone());
}
