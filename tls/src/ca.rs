//! The mesh's certificate authority: a root, issuers under it, and leaf certificates signed for workloads.
//!
//! Owns the content of certificates. Refuses to decide who may have one: the identity service does that.

mod request;

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SerialNumber,
};
use rustls::pki_types::{CertificateDer, UnixTime, pem::PemObject};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{anchors::TrustAnchors, crypto_provider, identity::Identity, validity::not_after, verify::chains_to};

pub use request::SigningRequest;

/// Lifetime of generated roots and issuers: a year, as with `step` and in Linkerd's tutorial for issuers.
const CA_LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Allowed difference between clocks when a CA is created.
const CA_CLOCK_SKEW: Duration = Duration::from_secs(60);

/// A self-signed root with its key.
pub struct Root {
    issuer: rcgen::Issuer<'static, KeyPair>,
    certificate_pem: String,
}

/// A certificate authority that signs workload certificates.
pub struct Issuer {
    issuer: rcgen::Issuer<'static, KeyPair>,
    chain: Vec<CertificateDer<'static>>,
    expiry: SystemTime,
    anchors: TrustAnchors,
    /// A leaf without a holder, which is verified as a peer would verify other leaves.
    probe: CertificateDer<'static>,
}

/// An issuer's files: certificate and key, PEM.
pub struct IssuerPem {
    /// The issuer's certificate, without the trust anchor.
    pub certificate: String,
    /// The private key, PKCS#8.
    pub key: String,
}

/// A freshly signed leaf.
#[derive(Debug)]
pub struct Issued {
    /// The certificate, DER.
    pub leaf_der: Vec<u8>,
    /// The certificates between it and the trust anchors, DER, nearest first.
    pub intermediates: Vec<Vec<u8>>,
    /// End of its validity.
    pub not_after: SystemTime,
}

/// Why an issuer's files are refused.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    /// The certificate is not PEM.
    #[error("the issuer certificate is not PEM: {0}")]
    CertificatePem(#[source] rustls::pki_types::pem::Error),
    /// There is no certificate in the PEM.
    #[error("the issuer certificate file holds no CERTIFICATE block")]
    Empty,
    /// The certificate is not X.509.
    #[error("the issuer certificate is not X.509: {0}")]
    Certificate(String),
    /// The certificate may not sign others.
    #[error("the issuer certificate is not a CA: create it with the basic constraint CA:TRUE")]
    NotCa,
    /// The key is not a private key in PEM.
    #[error("the issuer key is not a private key in PEM: {0}")]
    Key(#[source] rcgen::Error),
    /// The key belongs to another certificate.
    #[error("the issuer key does not belong to the issuer certificate")]
    Mismatch,
    /// The certificate does not chain to the anchors.
    #[error("the issuer certificate does not verify against the trust anchors: {0}")]
    Chain(#[source] rustls::Error),
    /// The anchor that it chains to is not valid now.
    #[error("the trust anchor of the issuer certificate has expired or is not valid yet")]
    AnchorExpired,
    /// rcgen returned an error.
    #[error("cannot create a certificate authority: {0}")]
    Generate(#[source] rcgen::Error),
}

/// Why a request is not signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The request is not PKCS#10, or its signature is wrong.
    #[error("the certificate signing request cannot be read: {0}")]
    Parse(String),
    /// The request asks for something other than the identity.
    #[error("the certificate signing request is refused: {0}")]
    Content(String),
    /// rcgen returned an error, or the system provided no randomness.
    #[error("the issuer cannot sign: {0}")]
    Sign(#[source] rcgen::Error),
}

impl Root {
    /// Generates a root.
    ///
    /// # Errors
    /// When the system provides no randomness.
    pub fn generate(common_name: &str) -> Result<Self, IssuerError> {
        let key = new_key()?;
        let params = ca_params(common_name, BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).map_err(IssuerError::Generate)?;
        Ok(Self { certificate_pem: certificate.pem(), issuer: rcgen::Issuer::new(params, key) })
    }

    /// The root's certificate: the mesh's trust anchors.
    #[must_use]
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Signs an intermediate that may sign only leaves.
    ///
    /// # Errors
    /// When the system provides no randomness.
    pub fn issue_issuer(&self, common_name: &str) -> Result<IssuerPem, IssuerError> {
        let key = new_key()?;
        let certificate = ca_params(common_name, BasicConstraints::Constrained(0))
            .signed_by(&key, &self.issuer)
            .map_err(IssuerError::Generate)?;
        Ok(IssuerPem { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

impl Issuer {
    /// Parses an issuer and checks that it is a CA, fits its key and chains to the anchors. The certificate's file may
    /// contain further intermediates after the issuer's own.
    ///
    /// # Errors
    /// See [`IssuerError`]; a caller with a working issuer should keep it.
    pub fn from_pem(certificate_pem: &str, key_pem: &str, anchors: &TrustAnchors) -> Result<Self, IssuerError> {
        let chain = CertificateDer::pem_slice_iter(certificate_pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(IssuerError::CertificatePem)?;
        let own = chain.first().ok_or(IssuerError::Empty)?;
        let key = KeyPair::from_pem(key_pem).map_err(IssuerError::Key)?;

        let (_, parsed) =
            X509Certificate::from_der(own).map_err(|error| IssuerError::Certificate(error.to_string()))?;
        if !parsed.is_ca() {
            return Err(IssuerError::NotCa);
        }
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(IssuerError::Mismatch);
        }
        let mut expiry = not_after(own).map_err(IssuerError::Certificate)?;
        for certificate in &chain {
            expiry = expiry.min(not_after(certificate).map_err(IssuerError::Certificate)?);
        }
        let issuer = rcgen::Issuer::from_ca_cert_der(own, key).map_err(IssuerError::Generate)?;
        let issuer = Self { probe: probe(&issuer)?, issuer, chain, expiry, anchors: anchors.clone() };
        issuer.verify(SystemTime::now())?;
        Ok(issuer)
    }

    /// Verifies a leaf of this issuer as a peer would at `now`, and that its trust anchor has not expired.
    ///
    /// # Errors
    /// When peers would not accept its certificates.
    pub fn verify(&self, now: SystemTime) -> Result<(), IssuerError> {
        let at = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let verify = |anchors: &TrustAnchors| chains_to(&self.probe, &self.chain, anchors, &crypto_provider(), at);
        verify(&self.anchors).map_err(IssuerError::Chain)?;
        verify(&self.anchors.valid_at(now)).map_err(|_| IssuerError::AnchorExpired)
    }

    /// The earliest end of validity in the issuer's chain: no leaf is valid for longer.
    #[must_use]
    pub fn expiry(&self) -> SystemTime {
        self.expiry
    }

    /// Parses a request, PKCS#10 DER, and signs it: [`Issuer::sign_request`].
    ///
    /// # Errors
    /// Those of parsing and signing.
    pub fn sign(
        &self,
        csr_der: &[u8],
        name: &Identity,
        lifetime: Duration,
        skew: Duration,
    ) -> Result<Issued, SignError> {
        self.sign_request(&SigningRequest::parse(csr_der)?, name, lifetime, skew)
    }

    /// Signs a request for `name`, with a unique serial number.
    ///
    /// Valid from now minus `skew` to now plus `lifetime` plus `skew`, never longer than the issuer itself. Key usage
    /// and extended key usage are Linkerd's: digitalSignature, keyEncipherment; serverAuth, clientAuth.
    ///
    /// # Errors
    /// When the request asks for any other name, or the system provides no randomness.
    pub fn sign_request(
        &self,
        request: &SigningRequest,
        name: &Identity,
        lifetime: Duration,
        skew: Duration,
    ) -> Result<Issued, SignError> {
        let key = request.checked(name.as_str())?;

        let now = SystemTime::now();
        let not_after = (now + lifetime + skew).min(self.expiry);
        let dns = name.as_str().to_owned();
        let mut params = CertificateParams::new([dns.clone()]).map_err(SignError::Sign)?;
        params.distinguished_name = DistinguishedName::new();
        if request.has_common_name() {
            params.distinguished_name.push(DnType::CommonName, dns);
        }
        params.serial_number = Some(serial_number().map_err(SignError::Sign)?);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = (now - skew).into();
        params.not_after = not_after.into();

        let leaf = params.signed_by(key, &self.issuer).map_err(SignError::Sign)?;
        Ok(Issued {
            leaf_der: leaf.der().to_vec(),
            intermediates: self.chain.iter().map(|certificate| certificate.to_vec()).collect(),
            not_after,
        })
    }
}

/// Issues a leaf without a holder: an issuer is usable if the leaf's chain verifies.
fn probe(issuer: &rcgen::Issuer<'static, KeyPair>) -> Result<CertificateDer<'static>, IssuerError> {
    let mut params = CertificateParams::new(["probe.invalid".to_owned()]).map_err(IssuerError::Generate)?;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let probe = params.signed_by(&new_key()?, issuer).map_err(IssuerError::Generate)?;
    Ok(probe.der().clone())
}

/// 127 random bits: positive, unique, and at most 20 octets long (RFC 5280 section 4.1.2.2). rcgen's default is a hash
/// of the public key, which a proxy keeps when it renews its certificate.
fn serial_number() -> Result<SerialNumber, rcgen::Error> {
    let mut serial = [0; 16];
    crypto_provider().secure_random.fill(&mut serial).map_err(|_| rcgen::Error::RingUnspecified)?;
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(SerialNumber::from(serial.to_vec()))
}

fn new_key() -> Result<KeyPair, IssuerError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(IssuerError::Generate)
}

fn ca_params(common_name: &str, constraints: BasicConstraints) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now - CA_CLOCK_SKEW).into();
    params.not_after = (now + CA_LIFETIME).into();
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{credentials::Credentials, keys::IdentityKey};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    const SKEW: Duration = Duration::from_secs(10);

    fn authority() -> (Issuer, TrustAnchors) {
        let root = Root::generate("root").unwrap();
        let anchors = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
        let pem = root.issue_issuer("issuer").unwrap();
        (Issuer::from_pem(&pem.certificate, &pem.key, &anchors).unwrap(), anchors)
    }

    #[test]
    fn a_signed_request_becomes_credentials() {
        let (issuer, anchors) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, DAY, SKEW).unwrap();
        let credentials = Credentials::new(name.clone(), &key, issued.leaf_der, issued.intermediates, anchors).unwrap();
        assert_eq!(credentials.name(), &name);
        assert!(credentials.expiry() > SystemTime::now() + DAY);
    }

    #[test]
    fn a_request_for_somebody_else_is_refused() {
        let (issuer, _) = authority();
        let key = IdentityKey::generate().unwrap();
        let csr = key.csr_der(&"admin.demo".parse().unwrap()).unwrap();
        let error = issuer.sign(&csr, &"web.demo".parse().unwrap(), DAY, SKEW).unwrap_err();
        assert!(matches!(error, SignError::Content(_)), "{error}");
        assert!(matches!(issuer.sign(b"garbage", &"web.demo".parse().unwrap(), DAY, SKEW), Err(SignError::Parse(_))));
    }

    #[test]
    fn a_key_that_is_not_ecdsa_is_refused() {
        let (issuer, _) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let request = CertificateParams::new(["web.demo".to_owned()]).unwrap().serialize_request(&key).unwrap();
        let error = issuer.sign(request.der(), &name, DAY, SKEW).unwrap_err();
        assert!(error.to_string().contains("ECDSA"), "{error}");
    }

    #[test]
    fn keys_of_every_curve_are_certified() {
        let (issuer, anchors) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        for algorithm in [
            &PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ECDSA_P521_SHA512,
            // The hash need not be the curve's own.
            &rcgen::PKCS_ECDSA_P521_SHA384,
            &rcgen::PKCS_ECDSA_P521_SHA256,
        ] {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let issued = issuer.sign(&request(&key, &["web.demo"], None), &name, DAY, SKEW).unwrap();
            let leaf = CertificateDer::from(issued.leaf_der);
            let chain: Vec<_> = issued.intermediates.into_iter().map(CertificateDer::from).collect();
            chains_to(&leaf, &chain, &anchors, &crypto_provider(), UnixTime::now()).unwrap();
            let (_, parsed) = X509Certificate::from_der(&leaf).unwrap();
            assert_eq!(parsed.public_key().raw, rcgen::PublicKeyData::subject_public_key_info(&key), "{algorithm:?}");
        }
    }

    /// A request for these DNS names, and a common name.
    fn request(key: &KeyPair, names: &[&str], common_name: Option<&str>) -> Vec<u8> {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.serialize_request(key).unwrap().der().to_vec()
    }

    #[test]
    fn a_request_asks_for_one_name_and_signs_for_its_key() {
        let (issuer, _) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = new_key().unwrap();
        for (names, common_name, problem) in [
            (&["web.demo"][..], None, None),
            (&["web.demo"], Some("web.demo"), None),
            (&["web.demo"], Some("admin.demo"), Some("common name")),
            (&[], None, Some("0 names")),
            (&[], Some("web.demo"), Some("0 names")),
            (&["web.demo", "admin.demo"], None, Some("2 names")),
            (&["admin.demo"], None, Some("it asks for admin.demo")),
            (&["10.1.2.3"], None, Some("not a DNS name")),
        ] {
            let result = issuer.sign(&request(&key, names, common_name), &name, DAY, SKEW);
            match (result, problem) {
                (Ok(issued), None) => {
                    let (_, leaf) = X509Certificate::from_der(&issued.leaf_der).unwrap();
                    let subject: Vec<_> =
                        leaf.subject().iter_common_name().map(|name| name.as_str().unwrap()).collect();
                    assert_eq!(subject, common_name.as_slice(), "{names:?}");
                }
                (Err(SignError::Content(said)), Some(problem)) => assert!(said.contains(problem), "{names:?}: {said}"),
                (result, _) => panic!("{names:?} {common_name:?}: {:?}", result.err()),
            }
        }
        let mut forged = request(&key, &["web.demo"], None);
        let last = forged.len() - 1;
        forged[last] ^= 1;
        assert!(matches!(issuer.sign(&forged, &name, DAY, SKEW), Err(SignError::Parse(_))));
        let mut longer = request(&key, &["web.demo"], None);
        longer.push(0);
        assert!(matches!(issuer.sign(&longer, &name, DAY, SKEW), Err(SignError::Parse(_))));
    }

    #[test]
    fn renewals_with_the_same_key_have_serial_numbers_of_their_own() {
        let (issuer, _) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let serial = || {
            let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, DAY, SKEW).unwrap();
            let (_, leaf) = X509Certificate::from_der(&issued.leaf_der).unwrap();
            leaf.raw_serial().to_vec()
        };
        let serials: std::collections::HashSet<_> = (0..20).map(|_| serial()).collect();
        assert_eq!(serials.len(), 20);
        assert!(serials.iter().all(|serial| serial.len() == 16 && serial[0] < 0x80), "positive, at most 20 octets");
    }

    #[test]
    fn an_issuer_stops_when_its_anchor_or_itself_expires() {
        let now = SystemTime::now();
        let key = new_key().unwrap();
        // The anchor expires before the issuer does.
        let mut params = ca_params("root", BasicConstraints::Unconstrained);
        params.not_after = (now + DAY).into();
        let certificate = params.self_signed(&key).unwrap().pem();
        let anchors = TrustAnchors::from_pem(&certificate).unwrap();
        let root = Root { issuer: rcgen::Issuer::new(params, key), certificate_pem: certificate };
        let pem = root.issue_issuer("issuer").unwrap();
        let issuer = Issuer::from_pem(&pem.certificate, &pem.key, &anchors).unwrap();
        issuer.verify(now + DAY / 2).unwrap();
        assert!(matches!(issuer.verify(now + 2 * DAY), Err(IssuerError::AnchorExpired)));
        assert!(matches!(issuer.verify(now + 2 * CA_LIFETIME), Err(IssuerError::Chain(_))));
    }

    #[test]
    fn no_leaf_outlives_its_issuer() {
        let (issuer, _) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, 10_000 * DAY, SKEW).unwrap();
        assert_eq!(issued.not_after, issuer.expiry());
    }

    #[test]
    fn an_issuer_of_another_mesh_or_with_another_key_is_refused() {
        let root = Root::generate("root").unwrap();
        let anchors = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
        let stranger = Root::generate("stranger").unwrap().issue_issuer("issuer").unwrap();
        assert!(matches!(Issuer::from_pem(&stranger.certificate, &stranger.key, &anchors), Err(IssuerError::Chain(_))));
        let own = root.issue_issuer("issuer").unwrap();
        assert!(matches!(Issuer::from_pem(&own.certificate, &stranger.key, &anchors), Err(IssuerError::Mismatch)));
    }

    #[test]
    fn credentials_of_another_mesh_or_name_are_refused() {
        let (issuer, _) = authority();
        let (_, other_anchors) = authority();
        let name: Identity = "web.demo".parse().unwrap();
        let key = IdentityKey::generate().unwrap();
        let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, DAY, SKEW).unwrap();
        assert!(Credentials::new(name, &key, issued.leaf_der, issued.intermediates, other_anchors).is_err());
    }

    #[test]
    fn peers_meet_only_when_the_server_is_who_the_client_wants() {
        let (issuer, anchors) = authority();
        let credentials = |name: &str| {
            let name: Identity = name.parse().unwrap();
            let key = IdentityKey::generate().unwrap();
            let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, DAY, SKEW).unwrap();
            Credentials::new(name, &key, issued.leaf_der, issued.intermediates, anchors.clone()).unwrap()
        };
        let (web, client) = (credentials("web.demo"), credentials("client.demo"));
        assert!(handshake(&client, "web.demo", &web).is_ok());
        assert!(handshake(&client, "payments.demo", &web).is_err());
    }

    fn handshake(client: &Credentials, wanted: &str, server: &Credentials) -> Result<(), rustls::Error> {
        let wanted: Identity = wanted.parse().unwrap();
        let sni = rustls::pki_types::ServerName::try_from(wanted.as_str().to_owned()).unwrap();
        let mut client = rustls::ClientConnection::new(client.client_config(&wanted, &[]), sni).unwrap();
        let mut server = rustls::ServerConnection::new(server.server_config(&[])).unwrap();
        crate::handshake::complete(&mut client, &mut server)?;
        let names = server.peer_certificates().unwrap();
        assert_eq!(crate::credentials::peer_identity(names).unwrap().as_str(), "client.demo");
        Ok(())
    }
}
