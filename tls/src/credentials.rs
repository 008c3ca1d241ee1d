//! A workload's certificate and key, and the rustls configurations made from them.
//!
//! Credentials are immutable: a renewal creates new ones and the owner swaps the pointer.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{
    ClientConfig, ServerConfig,
    client::Resumption,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime},
    server::WebPkiClientVerifier,
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

use crate::{
    anchors::TrustAnchors,
    crypto_provider,
    identity::{Identity, all_in},
    keys::IdentityKey,
    validity::{der_sequence, not_after},
    verify::{ExactIdentity, chains_to},
};

/// A certificate with its key, checked against the trust anchors.
pub struct Credentials {
    name: Identity,
    expiry: SystemTime,
    anchors: TrustAnchors,
    certified: Arc<CertifiedKey>,
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The leaf is not X.509.
    #[error("the leaf certificate is not X.509 DER: {0}")]
    Parse(String),
    /// The leaf is for another identity.
    #[error("the certificate is for {found}, not for {expected}")]
    Name {
        /// The identity that it should name.
        expected: Identity,
        /// The identity that it names.
        found: String,
    },
    /// The chain does not lead to the trust anchors, or the certificate is not valid at this time.
    #[error("the certificate does not verify against the trust anchors: {0}")]
    Chain(#[source] rustls::Error),
    /// Key and certificate do not belong together, or the key is unusable.
    #[error("key and certificate do not fit: {0}")]
    Key(#[source] rustls::Error),
}

impl Credentials {
    /// Checks name, chain and validity, and binds the certificate to its key.
    ///
    /// # Errors
    /// See [`CredentialsError`]; the caller should keep its credentials and request a certificate again.
    pub fn new(
        name: Identity,
        key: &IdentityKey,
        leaf_der: Vec<u8>,
        intermediates: Vec<Vec<u8>>,
        anchors: TrustAnchors,
    ) -> Result<Self, CredentialsError> {
        Self::with_key(name, key.to_rustls(), leaf_der, intermediates, anchors)
    }

    /// The same for an X.509-SVID as the SPIFFE Workload API delivers it: `chain` is the leaf's DER and directly after
    /// it that of its intermediates, `key` is PKCS#8 DER of any kind that TLS signs with.
    ///
    /// # Errors
    /// See [`CredentialsError`]; the caller should keep its credentials and wait for the next SVID.
    pub fn from_svid(
        name: Identity,
        key: Vec<u8>,
        chain: &[u8],
        anchors: TrustAnchors,
    ) -> Result<Self, CredentialsError> {
        let mut certificates = der_sequence(chain).map_err(CredentialsError::Parse)?.into_iter();
        let leaf =
            certificates.next().ok_or_else(|| CredentialsError::Parse("the chain has no certificate".to_owned()))?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key));
        Self::with_key(name, key, leaf, certificates.collect(), anchors)
    }

    fn with_key(
        name: Identity,
        key: PrivateKeyDer<'static>,
        leaf_der: Vec<u8>,
        intermediates: Vec<Vec<u8>>,
        anchors: TrustAnchors,
    ) -> Result<Self, CredentialsError> {
        let provider = crypto_provider();
        let leaf = CertificateDer::from(leaf_der);
        let expiry = not_after(&leaf).map_err(CredentialsError::Parse)?;
        let names = all_in(&leaf);
        if !names.contains(&name) {
            let found = names.first().map_or_else(|| "no identity".to_owned(), Identity::to_string);
            return Err(CredentialsError::Name { expected: name, found });
        }
        let intermediates: Vec<_> = intermediates.into_iter().map(CertificateDer::from).collect();
        chains_to(&leaf, &intermediates, &anchors, &provider, UnixTime::now()).map_err(CredentialsError::Chain)?;

        let mut chain = vec![leaf];
        chain.extend(intermediates);
        let certified = CertifiedKey::from_der(chain, key, &provider).map_err(CredentialsError::Key)?;
        Ok(Self { name, expiry, anchors, certified: Arc::new(certified) })
    }

    /// The identity in the certificate.
    #[must_use]
    pub fn name(&self) -> &Identity {
        &self.name
    }

    /// End of the certificate's validity.
    #[must_use]
    pub fn expiry(&self) -> SystemTime {
        self.expiry
    }

    /// Whether peers refuse the certificate at `now`. It is valid for the whole second of its end (RFC 5280 section
    /// 4.1.2.5).
    #[must_use]
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now.duration_since(self.expiry).is_ok_and(|since| since >= Duration::from_secs(1))
    }

    /// Configuration of a server: TLS 1.3; a client certificate is requested, may be missing, and must chain to the
    /// anchors.
    ///
    /// `alpn` is in order of preference; an empty list negotiates none.
    #[must_use]
    pub fn server_config(&self, alpn: &[&[u8]]) -> Arc<ServerConfig> {
        let provider = crypto_provider();
        let verifier = WebPkiClientVerifier::builder_with_provider(self.anchors.store.clone(), provider.clone())
            .allow_unauthenticated()
            .build()
            .expect("trust anchors are never empty");
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .expect("the provider has TLS 1.3 cipher suites")
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(self.certified.clone())));
        config.alpn_protocols = owned(alpn);
        // Sessions are not resumed in the mesh, so tickets would be wasted.
        config.send_tls13_tickets = 0;
        Arc::new(config)
    }

    /// Configuration of a client that accepts only `server_id`: TLS 1.3, own certificate, no resumption.
    #[must_use]
    pub fn client_config(&self, server_id: &Identity, alpn: &[&[u8]]) -> Arc<ClientConfig> {
        let provider = crypto_provider();
        let verifier =
            ExactIdentity { anchors: self.anchors.clone(), server_id: server_id.clone(), provider: provider.clone() };
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .expect("the provider has TLS 1.3 cipher suites")
            .dangerous() // rustls's word for every verifier that is not its own; ours is stricter about names.
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(self.certified.clone())));
        config.alpn_protocols = owned(alpn);
        config.resumption = Resumption::disabled();
        Arc::new(config)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("name", &self.name).field("expiry", &self.expiry).finish_non_exhaustive()
    }
}

/// Configuration of a client before it has credentials, for the request for the first certificate. The server is
/// verified as always, and no client certificate is sent.
#[must_use]
pub fn bootstrap_client_config(anchors: &TrustAnchors, server_id: &Identity, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let provider = crypto_provider();
    let verifier = ExactIdentity { anchors: anchors.clone(), server_id: server_id.clone(), provider: provider.clone() };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the provider has TLS 1.3 cipher suites")
        .dangerous() // As in `Credentials::client_config`.
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = owned(alpn);
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

/// The identity of a peer, from the certificates that it sent, leaf first.
#[must_use]
pub fn peer_identity(certificates: &[CertificateDer<'_>]) -> Option<Identity> {
    certificates.first().and_then(Identity::from_certificate)
}

fn owned(alpn: &[&[u8]]) -> Vec<Vec<u8>> {
    alpn.iter().map(|protocol| protocol.to_vec()).collect()
}

#[cfg(test)]
mod tests;
