//! How the mesh verifies a server: the chain leads to the trust anchors, and the leaf carries exactly the expected
//! identity. Host names, wildcards and the system's roots are not used.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
};

use crate::{
    anchors::TrustAnchors,
    identity::{Identity, all_in},
};

/// Verifies servers for a client that accepts only `server_id`.
#[derive(Debug)]
pub(crate) struct ExactIdentity {
    pub(crate) anchors: TrustAnchors,
    pub(crate) server_id: Identity,
    pub(crate) provider: Arc<CryptoProvider>,
}

/// Accepts every server that proves to have the key of its certificate, for [`crate::inspect`].
#[derive(Debug)]
pub(crate) struct AnyServer {
    pub(crate) provider: Arc<CryptoProvider>,
}

/// Checks that `leaf` chains to `anchors` at `now`, regardless of its name.
pub(crate) fn chains_to(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    anchors: &TrustAnchors,
    provider: &CryptoProvider,
    now: UnixTime,
) -> Result<(), Error> {
    verify_server_cert_signed_by_trust_anchor(
        &ParsedCertificate::try_from(leaf)?,
        &anchors.store,
        intermediates,
        now,
        provider.signature_verification_algorithms.all,
    )
}

/// The methods of both verifiers about signatures: those of TLS 1.3, by the algorithms of `self.provider`, and none of
/// TLS 1.2.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for ExactIdentity {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _sni: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        chains_to(leaf, intermediates, &self.anchors, &self.provider, now)?;
        if all_in(leaf).contains(&self.server_id) {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::NotValidForName.into())
        }
    }

    signatures!();

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        None
    }
}

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _sni: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}
