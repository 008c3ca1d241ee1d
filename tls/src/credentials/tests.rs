//! Handshakes: which protocol, which chains and which names make two peers meet. Certificates come from authorities
//! without the rules of [`crate::ca`], as those of a SPIFFE agent do.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType, SignatureAlgorithm};
use rustls::{
    ClientConnection, Error, HandshakeKind, ServerConnection,
    crypto::aws_lc_rs::default_provider,
    pki_types::ServerName,
    version::{TLS12, TLS13},
};

use super::*;
use crate::handshake::complete;

const WEB: &str = "web.demo";
const CLIENT: &str = "client.demo";

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
}

impl Authority {
    fn new(common_name: &str) -> Self {
        Self::of(&rcgen::PKCS_ECDSA_P256_SHA256, common_name)
    }

    fn of(algorithm: &'static SignatureAlgorithm, common_name: &str) -> Self {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate_pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate_pem }
    }

    fn anchors(&self) -> TrustAnchors {
        TrustAnchors::from_pem(&self.certificate_pem).unwrap()
    }

    /// A certificate with these names, and its key.
    fn certify(
        &self,
        algorithm: &'static SignatureAlgorithm,
        names: Vec<SanType>,
    ) -> (CertificateDer<'static>, KeyPair) {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = names;
        (params.signed_by(&key, &self.issuer).unwrap().der().clone(), key)
    }

    /// Credentials for the last of these names, with peers from `anchors`.
    fn credentials(&self, names: Vec<SanType>, anchors: &TrustAnchors) -> Credentials {
        let name = match names.last() {
            Some(SanType::DnsName(name) | SanType::URI(name)) => name.as_str().parse().unwrap(),
            other => panic!("{other:?} is no identity"),
        };
        let (leaf, key) = self.certify(&rcgen::PKCS_ECDSA_P256_SHA256, names);
        Credentials::from_svid(name, key.serialize_der(), &leaf, anchors.clone()).unwrap()
    }
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

fn uri(name: &str) -> SanType {
    SanType::URI(name.try_into().unwrap())
}

/// The connections of both sides after the handshake, whose client asks for [`WEB`].
fn meet(client: Arc<ClientConfig>, server: Arc<ServerConfig>) -> Result<(ClientConnection, ServerConnection), Error> {
    let name = ServerName::try_from(WEB).unwrap();
    let (mut client, mut server) =
        (ClientConnection::new(client, name).unwrap(), ServerConnection::new(server).unwrap());
    complete(&mut client, &mut server)?;
    Ok((client, server))
}

/// A client of the system's own kind, without the rules of the mesh.
fn stock_client(anchors: &TrustAnchors, version: &'static rustls::SupportedProtocolVersion) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(default_provider().into());
    let builder = builder.with_protocol_versions(&[version]).unwrap();
    Arc::new(builder.with_root_certificates(anchors.store.clone()).with_no_client_auth())
}

/// A server of the system's own kind.
fn stock_server(authority: &Authority, version: &'static rustls::SupportedProtocolVersion) -> Arc<ServerConfig> {
    let (leaf, key) = authority.certify(&rcgen::PKCS_ECDSA_P256_SHA256, vec![dns(WEB)]);
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let builder = ServerConfig::builder_with_provider(default_provider().into());
    let builder = builder.with_protocol_versions(&[version]).unwrap();
    Arc::new(builder.with_no_client_auth().with_single_cert(vec![leaf], key).unwrap())
}

#[test]
fn peers_speak_tls_1_3_alone() {
    let authority = Authority::new("root");
    let anchors = authority.anchors();
    let server = authority.credentials(vec![dns(WEB)], &anchors).server_config(&[]);
    let client = authority.credentials(vec![dns(CLIENT)], &anchors);
    let web = WEB.parse().unwrap();
    let bootstrap = bootstrap_client_config(&anchors, &web, &[]);
    for (version, is_spoken) in [(&TLS12, false), (&TLS13, true)] {
        let outcomes = [
            meet(stock_client(&anchors, version), server.clone()),
            meet(client.client_config(&web, &[]), stock_server(&authority, version)),
            meet(bootstrap.clone(), stock_server(&authority, version)),
        ];
        for (index, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(_) => assert!(is_spoken, "{version:?} {index}"),
                Err(Error::PeerIncompatible(_)) => assert!(!is_spoken, "{version:?} {index}"),
                Err(other) => panic!("{version:?} {index}: {other}"),
            }
        }
        // Both sides without the mesh's rules speak either version.
        meet(stock_client(&anchors, version), stock_server(&authority, version)).unwrap();
    }
}

#[test]
fn no_session_is_resumed() {
    let authority = Authority::new("root");
    let anchors = authority.anchors();
    let server = authority.credentials(vec![dns(WEB)], &anchors).server_config(&[]);
    let web = WEB.parse().unwrap();
    let client = authority.credentials(vec![dns(CLIENT)], &anchors).client_config(&web, &[]);
    let bootstrap = bootstrap_client_config(&anchors, &web, &[]);
    let (stock_client, stock_server) = (stock_client(&anchors, &TLS13), stock_server(&authority, &TLS13));
    for (case, client, server, second) in [
        ("between proxies", &client, &server, HandshakeKind::Full),
        ("a client that would", &stock_client, &server, HandshakeKind::Full),
        ("a server that would", &client, &stock_server, HandshakeKind::Full),
        ("without a certificate", &bootstrap, &stock_server, HandshakeKind::Full),
        ("both would", &stock_client, &stock_server, HandshakeKind::Resumed),
    ] {
        for expected in [HandshakeKind::Full, second] {
            let (client, server) = meet(client.clone(), server.clone()).unwrap();
            let kinds = (client.handshake_kind(), server.handshake_kind());
            assert_eq!(kinds, (Some(expected), Some(expected)), "{case}");
        }
    }
}

#[test]
fn peers_chain_to_the_anchors_or_do_not_meet() {
    let (own, next, stranger) = (Authority::new("own"), Authority::new("next"), Authority::new("stranger"));
    let bundle = |authorities: &[&Authority]| {
        let pem: String = authorities.iter().map(|authority| authority.certificate_pem.as_str()).collect();
        TrustAnchors::from_pem(&pem).unwrap()
    };
    // While anchors are replaced, peers trust both and have certificates of either.
    let both = bundle(&[&own, &next]);
    let everybody = bundle(&[&own, &next, &stranger]);
    let web = WEB.parse().unwrap();
    for (case, server_of, trusted_by_server, client_of, trusted_by_client, is_server_known, is_client_known) in [
        ("one anchor", &own, own.anchors(), &own, own.anchors(), true, true),
        ("each trusts both, the client has the next", &own, both.clone(), &next, both.clone(), true, true),
        ("each trusts both, the server has the next", &next, both.clone(), &own, both.clone(), true, true),
        ("the server is of another mesh", &stranger, everybody.clone(), &own, both.clone(), false, true),
        ("the client is of another mesh", &own, both.clone(), &stranger, everybody.clone(), true, false),
        ("the client does not trust the next one yet", &next, both.clone(), &own, own.anchors(), false, true),
        ("the server does not trust the next one yet", &own, own.anchors(), &next, both, true, false),
    ] {
        let server = server_of.credentials(vec![dns(WEB)], &trusted_by_server);
        let client = client_of.credentials(vec![dns(CLIENT)], &trusted_by_client);
        match meet(client.client_config(&web, &[]), server.server_config(&[])) {
            Ok((_, server)) => {
                assert!(is_server_known && is_client_known, "{case}");
                assert_eq!(peer_identity(server.peer_certificates().unwrap()), Some(CLIENT.parse().unwrap()));
            }
            Err(Error::InvalidCertificate(_)) => assert!(!is_server_known || !is_client_known, "{case}"),
            Err(other) => panic!("{case}: {other}"),
        }
        // Before it has a certificate a client verifies the server, too, and may do without.
        let bootstrap = bootstrap_client_config(&trusted_by_client, &web, &[]);
        match meet(bootstrap, server.server_config(&[])) {
            Ok((_, server)) => assert!(is_server_known && server.peer_certificates().is_none(), "{case}"),
            Err(error) => assert!(!is_server_known && matches!(error, Error::InvalidCertificate(_)), "{case}: {error}"),
        }
    }
}

#[test]
fn a_peer_is_known_by_the_first_name_that_can_be_read_and_a_server_by_any() {
    let authority = Authority::new("root");
    let anchors = authority.anchors();
    let ip = || SanType::IpAddress([10, 0, 0, 1].into());
    let mail = || SanType::Rfc822Name("web@demo".try_into().unwrap());
    for (names, expected) in [
        (vec![dns("a.demo"), dns("b.demo")], Some("a.demo")),
        (vec![uri("spiffe://mesh/a"), dns("b.demo")], Some("spiffe://mesh/a")),
        (vec![dns("a.demo"), uri("spiffe://mesh/b")], Some("a.demo")),
        (vec![ip(), mail(), dns("trailing.dot."), uri("no-scheme"), dns("Last.Demo")], Some("last.demo")),
        (vec![ip(), mail(), dns("trailing.dot."), uri("no-scheme")], None),
        (vec![], None),
    ] {
        let described = format!("{names:?}");
        let (leaf, _) = authority.certify(&rcgen::PKCS_ECDSA_P256_SHA256, names);
        assert_eq!(Identity::from_certificate(&leaf), expected.map(|name| name.parse().unwrap()), "{described}");
    }

    // Of a server the wanted name counts wherever it is, of its client the first.
    let server = authority.credentials(vec![ip(), dns("other.demo"), uri("spiffe://mesh/web"), dns(WEB)], &anchors);
    let client = authority.credentials(vec![dns("first.demo"), dns(CLIENT)], &anchors);
    for (wanted, meets) in
        [(WEB, true), ("other.demo", true), ("spiffe://mesh/web", true), ("spiffe://mesh/we", false), ("demo", false)]
    {
        let met = meet(client.client_config(&wanted.parse().unwrap(), &[]), server.server_config(&[]));
        assert_eq!(met.is_ok(), meets, "{wanted}");
        if let Ok((_, server)) = met {
            let identity = peer_identity(server.peer_certificates().unwrap());
            assert_eq!(identity, Some("first.demo".parse().unwrap()));
        }
    }
}

#[test]
fn chains_of_every_kind_of_key_verify() {
    let web: Identity = WEB.parse().unwrap();
    for algorithm in [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P521_SHA512,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
    ] {
        let authority = Authority::of(algorithm, "root");
        let (leaf, key) = authority.certify(algorithm, vec![dns(WEB)]);
        let credentials = Credentials::from_svid(web.clone(), key.serialize_der(), &leaf, authority.anchors());
        let credentials = credentials.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        let met = meet(credentials.client_config(&web, &[]), credentials.server_config(&[]));
        let (_, server) = met.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        assert_eq!(peer_identity(server.peer_certificates().unwrap()), Some(web.clone()));
    }
}

#[test]
fn a_certificate_is_valid_for_the_whole_second_of_its_end() {
    let authority = Authority::new("root");
    let credentials = authority.credentials(vec![dns(WEB)], &authority.anchors());
    let end = credentials.expiry();
    for (now, expected) in [
        (SystemTime::UNIX_EPOCH, false),
        (end, false),
        (end + Duration::from_millis(999), false),
        (end + Duration::from_secs(1), true),
    ] {
        assert_eq!(credentials.has_expired(now), expected, "{now:?}");
        // The verifier of peers says the same.
        let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
        let leaf = &credentials.certified.cert[0];
        let verified = chains_to(leaf, &[], &authority.anchors(), &crypto_provider(), now);
        let is_expired = matches!(
            verified,
            Err(Error::InvalidCertificate(
                rustls::CertificateError::Expired | rustls::CertificateError::ExpiredContext { .. }
            ))
        );
        assert_eq!(is_expired, expected, "{now:?}: {verified:?}");
    }
}
