//! Certificates of HTTPS servers that the Kubernetes API server calls: generated here, or supplied by somebody else.
//!
//! They are independent of mesh identities. A generated certificate comes with its own authority, whose key is
//! discarded at once: nothing else can ever be signed by the authority that the API server trusts.

use std::{
    sync::{Arc, RwLock},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256,
};
use rustls::{
    ClientConfig, ServerConfig,
    client::verify_server_name,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::{ClientHello, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::{
    anchors::{AnchorsError, TrustAnchors},
    crypto_provider,
    validity::validity,
    verify::chains_to,
};

/// Allowed difference between clocks when a certificate is generated.
const CLOCK_SKEW: Duration = Duration::from_secs(60);

/// A certificate for a server and the authority that signed it, PEM.
pub struct Generated {
    /// The server's certificate.
    pub certificate: String,
    /// Its private key, PKCS#8.
    pub key: String,
    /// The authority's certificate.
    pub authority: String,
}

/// A certificate could not be generated.
#[derive(Debug, thiserror::Error)]
#[error("cannot create a certificate for {names}: {source}")]
pub struct GenerateError {
    names: String,
    source: rcgen::Error,
}

/// Why a certificate and a key cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The certificate is not PEM.
    #[error("the certificate is not PEM: {0}")]
    CertificatePem(#[source] rustls::pki_types::pem::Error),
    /// There is no certificate in the PEM.
    #[error("there is no CERTIFICATE block in the certificate")]
    Empty,
    /// The certificate is not X.509.
    #[error("the certificate is not X.509: {0}")]
    Certificate(String),
    /// The key is not a private key in PEM.
    #[error("the key is not a private key in PEM: {0}")]
    KeyPem(#[source] rustls::pki_types::pem::Error),
    /// The key belongs to another certificate, or is of a kind that TLS does not know.
    #[error("the key does not fit the certificate: {0}")]
    Key(#[source] rustls::Error),
}

/// A certificate with its key, ready to serve.
#[derive(Clone, Debug)]
pub struct Pair {
    key: Arc<CertifiedKey>,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
}

/// Generates a certificate for `names` (DNS names or IP addresses) and the authority that signs it, both valid for
/// `lifetime` from `now`.
///
/// # Errors
/// When a name is neither, or the system provides no randomness.
pub fn generate(names: &[String], now: SystemTime, lifetime: Duration) -> Result<Generated, GenerateError> {
    let failed = |source| GenerateError { names: names.join(", "), source };
    let (not_before, not_after) = (now - CLOCK_SKEW, now + lifetime);
    let common_name = names.first().map_or("webhook", String::as_str);

    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, format!("authority of {common_name}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    authority.not_before = not_before.into();
    authority.not_after = not_after.into();
    let authority_key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
    let authority_pem = authority.self_signed(&authority_key).map_err(failed)?.pem();
    let authority = rcgen::Issuer::new(authority, authority_key);

    let mut leaf = CertificateParams::new(names.to_vec()).map_err(failed)?;
    leaf.distinguished_name.push(DnType::CommonName, common_name);
    leaf.is_ca = IsCa::ExplicitNoCa;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.not_before = not_before.into();
    leaf.not_after = not_after.into();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
    let certificate = leaf.signed_by(&key, &authority).map_err(failed)?.pem();
    Ok(Generated { certificate, key: key.serialize_pem(), authority: authority_pem })
}

impl Pair {
    /// Parses a certificate, optionally followed by intermediates, and its key.
    ///
    /// # Errors
    /// See [`PairError`].
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, PairError> {
        let chain = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<Vec<_>, _>>()
            .map_err(PairError::CertificatePem)?;
        let leaf = chain.first().ok_or(PairError::Empty)?;
        let (not_before, not_after) = validity(leaf).map_err(PairError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(PairError::KeyPem)?;
        let key = CertifiedKey::from_der(chain, key, &crypto_provider()).map_err(PairError::Key)?;
        Ok(Self { key: Arc::new(key), not_before, not_after })
    }

    /// Whether a client that dials `name` accepts the certificate's names.
    #[must_use]
    pub fn covers(&self, name: &str) -> bool {
        let Ok(name) = ServerName::try_from(name) else { return false };
        let leaf = self.key.cert.first().and_then(|leaf| ParsedCertificate::try_from(leaf).ok());
        leaf.is_some_and(|leaf| verify_server_name(&leaf, &name).is_ok())
    }

    /// Whether a client that trusts only `authorities` accepts the certificate at the start of its validity.
    #[must_use]
    pub fn chains_to(&self, authorities: &TrustAnchors) -> bool {
        let Some((leaf, intermediates)) = self.key.cert.split_first() else { return false };
        let Ok(since) = self.not_before.duration_since(SystemTime::UNIX_EPOCH) else { return false };
        let now = UnixTime::since_unix_epoch(since);
        chains_to(leaf, intermediates, authorities, &crypto_provider(), now).is_ok()
    }

    /// Whether both are the same certificate.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        self.key.cert == other.key.cert
    }
}

/// The certificate that a server serves now; clones share it. Connections keep the one that they began with.
#[derive(Clone, Debug, Default)]
pub struct CurrentPair(Arc<RwLock<Option<Pair>>>);

impl CurrentPair {
    /// Serves another certificate on new connections.
    pub fn set(&self, pair: Pair) {
        *self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(pair);
    }

    /// The certificate in force; `None` before the first.
    #[must_use]
    pub fn get(&self) -> Option<Pair> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// A TLS 1.3 server with the certificate in force. If authorities of clients are given, a client needs a
    /// certificate that one of them signed, of any name; otherwise no client certificate is requested.
    #[must_use]
    pub fn server_config(&self, alpn: &[&[u8]], clients: Option<&TrustAnchors>) -> Arc<ServerConfig> {
        let config = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has cipher suites of TLS 1.3");
        let config = match clients {
            Some(authorities) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(authorities.store.clone(), crypto_provider()).build();
                config.with_client_cert_verifier(verifier.expect("trust anchors are never empty"))
            }
            None => config.with_no_client_auth(),
        };
        let mut config = config.with_cert_resolver(Arc::new(self.clone()));
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }
}

impl ResolvesServerCert for CurrentPair {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.get().map(|pair| pair.key)
    }
}

/// A TLS client that trusts only these authorities, PEM, and sends `pair` to servers that ask for it.
///
/// # Errors
/// When the authorities cannot be parsed.
pub fn client_config(authorities: &str, pair: Option<&Pair>) -> Result<Arc<ClientConfig>, AnchorsError> {
    let anchors = TrustAnchors::from_pem(authorities)?;
    let config = ClientConfig::builder_with_provider(crypto_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has cipher suites of TLS 1.3")
        .with_root_certificates(anchors.store);
    let config = match pair {
        Some(pair) => config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair.key.clone()))),
        None => config.with_no_client_auth(),
    };
    Ok(Arc::new(config))
}

/// The first `at_most` certificates in a PEM text that are valid at `now`.
#[must_use]
pub fn still_valid(pem: &str, now: SystemTime, at_most: usize) -> String {
    let mut kept = String::new();
    for block in blocks(pem).filter(|block| is_valid(block, now)).take(at_most) {
        kept.push_str(block);
        kept.push('\n');
    }
    kept
}

/// Whether every certificate of `wanted` is in `bundle`, both PEM.
#[must_use]
pub fn includes(bundle: &[u8], wanted: &[u8]) -> bool {
    let read = |pem: &[u8]| CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    match (read(bundle), read(wanted)) {
        (Ok(bundle), Ok(wanted)) => !wanted.is_empty() && wanted.iter().all(|one| bundle.contains(one)),
        _ => false,
    }
}

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

fn blocks(pem: &str) -> impl Iterator<Item = &str> {
    let mut rest = pem;
    std::iter::from_fn(move || {
        let begin = rest.find(BEGIN)?;
        let end = begin + rest[begin..].find(END)? + END.len();
        let block = &rest[begin..end];
        rest = &rest[end..];
        Some(block)
    })
}

fn is_valid(block: &str, now: SystemTime) -> bool {
    let certificate = CertificateDer::from_pem_slice(block.as_bytes());
    certificate.is_ok_and(|certificate| validity(&certificate).is_ok_and(|(_, not_after)| now < not_after))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_generated_certificate_is_what_the_api_server_wants() {
        let generated = generate(&names(&["hook.mesh.svc", "10.0.0.1"]), SystemTime::now(), HOUR).unwrap();
        let pair = Pair::from_pem(generated.certificate.as_bytes(), generated.key.as_bytes()).unwrap();
        assert!(pair.covers("hook.mesh.svc") && pair.covers("10.0.0.1"));
        assert!(!pair.covers("other.mesh.svc") && !pair.covers("not a name"));
        assert!(pair.chains_to(&TrustAnchors::from_pem(&generated.authority).unwrap()));
        let other = generate(&names(&["hook.mesh.svc"]), SystemTime::now(), HOUR).unwrap();
        assert!(!pair.chains_to(&TrustAnchors::from_pem(&other.authority).unwrap()));
        assert!(pair.not_before < SystemTime::now() && pair.not_after <= SystemTime::now() + HOUR);
    }

    #[test]
    fn broken_pairs_say_what_is_broken() {
        let (one, two) = (
            generate(&names(&["a.b"]), SystemTime::now(), HOUR).unwrap(),
            generate(&names(&["a.b"]), SystemTime::now(), HOUR).unwrap(),
        );
        let read = |certificate: &str, key: &str| Pair::from_pem(certificate.as_bytes(), key.as_bytes()).unwrap_err();
        assert!(matches!(read(&one.certificate, &two.key), PairError::Key(_)));
        assert!(matches!(read("nothing", &one.key), PairError::Empty));
        assert!(matches!(read(&one.certificate, "nothing"), PairError::KeyPem(_)));
        assert!(matches!(
            read("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &one.key),
            PairError::Certificate(_)
        ));
    }

    #[test]
    fn bundles_keep_what_is_valid_and_are_compared_as_sets() {
        let (one, two) = (
            generate(&names(&["a.b"]), SystemTime::now(), HOUR).unwrap(),
            generate(&names(&["a.b"]), SystemTime::now(), 2 * HOUR).unwrap(),
        );
        let both = format!("# comment\n{}{}", one.authority, two.authority);
        assert!(includes(both.as_bytes(), one.authority.as_bytes()));
        assert!(!includes(one.authority.as_bytes(), both.as_bytes()));
        assert!(!includes(both.as_bytes(), b"") && !includes(b"", both.as_bytes()));
        let now = SystemTime::now();
        assert!(includes(still_valid(&both, now, 9).as_bytes(), both.as_bytes()));
        assert!(!includes(still_valid(&both, now, 1).as_bytes(), two.authority.as_bytes()));
        let later = still_valid(&both, now + HOUR + HOUR / 2, 9);
        assert!(includes(later.as_bytes(), two.authority.as_bytes()));
        assert!(!includes(later.as_bytes(), one.authority.as_bytes()));
    }

    #[test]
    fn a_server_without_a_certificate_refuses_and_with_one_serves() {
        let current = CurrentPair::default();
        let generated = generate(&names(&["hook.mesh.svc"]), SystemTime::now(), HOUR).unwrap();
        let client = client_config(&generated.authority, None).unwrap();
        assert!(handshake(&client, &current, None).is_err());
        current.set(Pair::from_pem(generated.certificate.as_bytes(), generated.key.as_bytes()).unwrap());
        handshake(&client, &current, None).unwrap();
    }

    #[test]
    fn a_server_that_knows_its_clients_refuses_others() {
        let generated = || generate(&names(&["hook.mesh.svc"]), SystemTime::now(), HOUR).unwrap();
        let pair = |of: &Generated| Pair::from_pem(of.certificate.as_bytes(), of.key.as_bytes()).unwrap();
        let (server, stranger) = (generated(), generated());
        // As `step` and Kubernetes create them, with the usage clientAuth.
        let root = crate::ca::Root::generate("clients").unwrap();
        let clients = TrustAnchors::from_pem(root.certificate_pem()).unwrap();
        let issuer = root.issue_issuer("issuer").unwrap();
        let issuer = crate::ca::Issuer::from_pem(&issuer.certificate, &issuer.key, &clients).unwrap();
        let (name, key) = ("api-server.mesh".parse().unwrap(), crate::keys::IdentityKey::generate().unwrap());
        let issued = issuer.sign(&key.csr_der(&name).unwrap(), &name, HOUR, CLOCK_SKEW).unwrap();
        let chain = [issued.leaf_der].into_iter().chain(issued.intermediates).map(CertificateDer::from).collect();
        let known = CertifiedKey::from_der(
            chain,
            PrivateKeyDer::try_from(key.pkcs8_der().to_vec()).unwrap(),
            &crypto_provider(),
        )
        .unwrap();
        let (not_before, not_after) = (SystemTime::now(), issued.not_after);
        let known = Pair { key: Arc::new(known), not_before, not_after };

        let current = CurrentPair::default();
        current.set(pair(&server));
        for (case, shown, expected) in
            [("nothing", None, false), ("another's", Some(pair(&stranger)), false), ("its own", Some(known), true)]
        {
            let client = client_config(&server.authority, shown.as_ref()).unwrap();
            assert_eq!(handshake(&client, &current, Some(&clients)).is_ok(), expected, "{case}");
        }
    }

    fn handshake(
        client: &Arc<ClientConfig>,
        server: &CurrentPair,
        clients: Option<&TrustAnchors>,
    ) -> Result<(), rustls::Error> {
        let name = ServerName::try_from("hook.mesh.svc").unwrap();
        let mut client = rustls::ClientConnection::new(client.clone(), name).unwrap();
        let mut server = rustls::ServerConnection::new(server.server_config(&[], clients)).unwrap();
        crate::handshake::complete(&mut client, &mut server)
    }
}
