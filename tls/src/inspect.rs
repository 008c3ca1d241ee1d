//! The content of certificates, for commands that explain why a mesh does not work.
//!
//! Refuses to accept or reject: [`crate::credentials`] and [`crate::ca`] do that.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{
    ClientConfig,
    client::verify_server_name,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    server::ParsedCertificate,
    version::TLS13,
};
use x509_parser::{
    der_parser::oid::Oid,
    oid_registry::{
        OID_PKCS1_RSASSAPSS, OID_PKCS1_SHA256WITHRSA, OID_PKCS1_SHA384WITHRSA, OID_PKCS1_SHA512WITHRSA,
        OID_SIG_ECDSA_WITH_SHA256, OID_SIG_ECDSA_WITH_SHA384, OID_SIG_ECDSA_WITH_SHA512, OID_SIG_ED25519,
    },
    prelude::{FromDer, X509Certificate},
    public_key::PublicKey,
};

use crate::{
    anchors::TrustAnchors,
    crypto_provider,
    identity::{Identity, all_in},
    verify::{AnyServer, chains_to},
};

/// The content of one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Its subject, e.g. `CN=root.linkerd.cluster.local`.
    pub subject: String,
    /// The subject of the certificate that signed it.
    pub issuer: String,
    /// Its serial number, hexadecimal, with colons between bytes.
    pub serial: String,
    /// Its subject alternative names that are identities.
    pub names: Vec<String>,
    /// How it is signed, e.g. `ECDSA-SHA256`.
    pub signature: String,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
    /// Whether it may sign other certificates.
    pub is_ca: bool,
    /// The kind of its key, e.g. `ECDSA P-256`.
    pub key: String,
    /// Whether proxies can verify signatures of this key.
    pub supported: bool,
}

/// Why a text contains no certificates.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The text is not PEM.
    #[error("not PEM: {0}; expected one or more CERTIFICATE blocks")]
    Pem(#[source] rustls::pki_types::pem::Error),
    /// There is no certificate in the text.
    #[error("holds no certificate; expected one or more CERTIFICATE blocks")]
    Empty,
    /// A block is not X.509.
    #[error("certificate number {number} is not X.509: {reason}")]
    Certificate {
        /// Number of the block in the text, from 1.
        number: usize,
        /// The error of the parser.
        reason: String,
    },
}

/// Why a server's certificate is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The text contains no certificates.
    #[error(transparent)]
    Read(#[from] InspectError),
    /// The certificate does not chain to the anchors, or is not valid now.
    #[error("does not verify: {0}")]
    Chain(#[source] rustls::Error),
    /// The certificate is for another name.
    #[error("is not for {name}: {source}")]
    Name {
        /// The name that it should contain.
        name: String,
        /// The error of rustls.
        source: rustls::Error,
    },
}

/// The certificates in a PEM text, in their order; at least one.
///
/// # Errors
/// When the text is not PEM, or a block is not X.509: nothing is skipped silently.
pub fn certificates(pem: &str) -> Result<Vec<Certificate>, InspectError> {
    chain(&blocks(pem)?)
}

/// The certificates of a chain, in its order.
///
/// # Errors
/// When one of them is not X.509.
pub fn chain(certificates: &[CertificateDer<'_>]) -> Result<Vec<Certificate>, InspectError> {
    certificates.iter().enumerate().map(|(index, der)| read(der).map_err(|reason| broken(index, reason))).collect()
}

/// Configuration of a client that inspects a server's certificates: it accepts every chain whose key the server has,
/// and presents none. Do not send data over such a connection: the server is not authenticated.
#[must_use]
pub fn inspection_config() -> Arc<ClientConfig> {
    let provider = crypto_provider();
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .expect("the provider has TLS 1.3 cipher suites")
        .dangerous() // An unacceptable chain has to be shown, too; no data is sent.
        .with_custom_certificate_verifier(Arc::new(AnyServer { provider }))
        .with_no_client_auth();
    Arc::new(config)
}

/// Verifies a workload's chain (leaf first) as a client in the mesh would that trusts `anchors` and expects `identity`,
/// at this moment.
///
/// # Errors
/// See [`ServerError`].
pub fn check_workload(
    chain: &[CertificateDer<'_>],
    anchors: &TrustAnchors,
    identity: &Identity,
) -> Result<(), ServerError> {
    let [leaf, intermediates @ ..] = chain else { return Err(InspectError::Empty.into()) };
    chains_to(leaf, intermediates, anchors, &crypto_provider(), UnixTime::now()).map_err(ServerError::Chain)?;
    if all_in(leaf).contains(identity) {
        return Ok(());
    }
    let source = rustls::CertificateError::NotValidForName.into();
    Err(ServerError::Name { name: identity.to_string(), source })
}

/// Verifies a server's chain (PEM, leaf first) as a client would that trusts `anchors` and dials `name`, at this
/// moment.
///
/// # Errors
/// See [`ServerError`].
pub fn check_server(chain_pem: &str, anchors: &TrustAnchors, name: &str) -> Result<(), ServerError> {
    let chain = blocks(chain_pem)?;
    let [leaf, intermediates @ ..] = chain.as_slice() else { return Err(InspectError::Empty.into()) };
    chains_to(leaf, intermediates, anchors, &crypto_provider(), UnixTime::now()).map_err(ServerError::Chain)?;
    let parsed = ParsedCertificate::try_from(leaf).map_err(ServerError::Chain)?;
    let refused = |source| ServerError::Name { name: name.to_owned(), source };
    let server = ServerName::try_from(name).map_err(|error| refused(rustls::Error::General(error.to_string())))?;
    verify_server_name(&parsed, &server).map_err(refused)
}

fn blocks(pem: &str) -> Result<Vec<CertificateDer<'static>>, InspectError> {
    let found: Vec<_> =
        CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().map_err(InspectError::Pem)?;
    if found.is_empty() { Err(InspectError::Empty) } else { Ok(found) }
}

fn broken(index: usize, reason: String) -> InspectError {
    InspectError::Certificate { number: index + 1, reason }
}

fn read(der: &CertificateDer<'_>) -> Result<Certificate, String> {
    let (_, parsed) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
    let (key, supported) = key(&parsed);
    Ok(Certificate {
        subject: parsed.subject().to_string(),
        issuer: parsed.issuer().to_string(),
        serial: parsed.raw_serial_as_string(),
        names: all_in(der).iter().map(Identity::to_string).collect(),
        signature: signature(&parsed.signature_algorithm.algorithm),
        not_before: time(parsed.validity().not_before.timestamp()),
        not_after: time(parsed.validity().not_after.timestamp()),
        is_ca: parsed.is_ca(),
        key,
        supported,
    })
}

/// Go's name of a signature algorithm, which Linkerd's users know.
fn signature(algorithm: &Oid<'_>) -> String {
    let names = [
        (OID_SIG_ECDSA_WITH_SHA256, "ECDSA-SHA256"),
        (OID_SIG_ECDSA_WITH_SHA384, "ECDSA-SHA384"),
        (OID_SIG_ECDSA_WITH_SHA512, "ECDSA-SHA512"),
        (OID_SIG_ED25519, "Ed25519"),
        (OID_PKCS1_SHA256WITHRSA, "SHA256-RSA"),
        (OID_PKCS1_SHA384WITHRSA, "SHA384-RSA"),
        (OID_PKCS1_SHA512WITHRSA, "SHA512-RSA"),
        (OID_PKCS1_RSASSAPSS, "RSAPSS"),
    ];
    let known = names.into_iter().find(|(oid, _)| oid == algorithm);
    known.map_or_else(|| algorithm.to_id_string(), |(_, name)| name.to_owned())
}

/// Kind of a key, and whether the crypto provider verifies its signatures: ECDSA on NIST curves, Ed25519, RSA of 2048
/// to 8192 bits.
fn key(certificate: &X509Certificate<'_>) -> (String, bool) {
    const ED25519: &str = "1.3.101.112";
    let info = certificate.public_key();
    match info.parsed() {
        Ok(PublicKey::EC(point)) => match point.key_size() {
            size @ (256 | 384) => (format!("ECDSA P-{size}"), true),
            // The size is in whole bytes.
            528 => ("ECDSA P-521".to_owned(), true),
            size => (format!("ECDSA with {size} bits"), false),
        },
        Ok(PublicKey::RSA(key)) => (format!("RSA {}", key.key_size()), (2048..=8192).contains(&key.key_size())),
        _ if info.algorithm.algorithm.to_id_string() == ED25519 => ("Ed25519".to_owned(), true),
        _ => (format!("algorithm {}", info.algorithm.algorithm), false),
    }
}

/// A time before 1970 becomes 1970: no certificate is that old.
fn time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};

    use super::*;
    use crate::ca::Root;

    /// A certificate for a server, signed by a root of its own.
    fn server(name: &str) -> (String, TrustAnchors) {
        let (root_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let mut root = CertificateParams::new(Vec::new()).unwrap();
        root.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let root_pem = root.self_signed(&root_key).unwrap().pem();
        let mut leaf = CertificateParams::new([name.to_owned()]).unwrap();
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = leaf.signed_by(&key, &Issuer::new(root, root_key)).unwrap();
        (leaf.pem(), TrustAnchors::from_pem(&root_pem).unwrap())
    }

    #[test]
    fn a_root_says_what_it_is() {
        let root = Root::generate("root.linkerd.cluster.local").unwrap();
        let [certificate] = certificates(root.certificate_pem()).unwrap().try_into().unwrap();
        assert_eq!(certificate.subject, "CN=root.linkerd.cluster.local");
        assert_eq!((certificate.key.as_str(), certificate.supported), ("ECDSA P-256", true));
        assert!(certificate.is_ca && certificate.not_after > SystemTime::now());
        assert_eq!((&certificate.issuer, certificate.signature.as_str()), (&certificate.subject, "ECDSA-SHA256"));
        assert!(!certificate.serial.is_empty());
    }

    #[test]
    fn a_workload_is_known_by_its_anchor_and_identity() {
        const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
        let (leaf, anchors) = server(WEB);
        let leaf = blocks(&leaf).unwrap();
        assert_eq!(chain(&leaf).unwrap()[0].names, [WEB]);
        check_workload(&leaf, &anchors, &WEB.parse().unwrap()).unwrap();
        let other = check_workload(&leaf, &anchors, &"api.shop".parse().unwrap());
        assert!(matches!(other, Err(ServerError::Name { .. })));
        assert!(matches!(check_workload(&leaf, &server(WEB).1, &WEB.parse().unwrap()), Err(ServerError::Chain(_))));
        assert!(matches!(check_workload(&[], &anchors, &WEB.parse().unwrap()), Err(ServerError::Read(_))));
    }

    #[test]
    fn what_holds_no_certificate_is_refused() {
        assert!(matches!(certificates(""), Err(InspectError::Empty)));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(certificates(garbage), Err(InspectError::Certificate { number: 1, .. })));
        assert!(matches!(certificates("-----BEGIN CERTIFICATE-----\n"), Err(InspectError::Pem(_))));
    }

    #[test]
    fn a_server_is_known_by_its_chain_and_its_name() {
        let (leaf, anchors) = server("injector.mesh.svc");
        check_server(&leaf, &anchors, "injector.mesh.svc").unwrap();
        assert!(matches!(check_server(&leaf, &anchors, "other.mesh.svc"), Err(ServerError::Name { .. })));
        let (_, others) = server("injector.mesh.svc");
        assert!(matches!(check_server(&leaf, &others, "injector.mesh.svc"), Err(ServerError::Chain(_))));
    }
}
