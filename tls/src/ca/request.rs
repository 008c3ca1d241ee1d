//! Certificate signing requests (PKCS#10, RFC 2986): what one asks for, and that its own key signed it.
//!
//! Of the subject only the common name is read: nothing else of it gets into a certificate.

use rcgen::{
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ECDSA_P521_SHA512, PublicKeyData, SignatureAlgorithm,
};
use rustls::pki_types::{AlgorithmIdentifier, alg_id};
use x509_parser::{
    certification_request::X509CertificationRequest,
    extensions::{GeneralName, ParsedExtension},
    prelude::FromDer,
};

use super::SignError;
use crate::crypto_provider;

/// A certificate signing request that parses and is signed by its own key.
pub struct SigningRequest {
    /// `None` for a key that is not ECDSA on a curve below.
    key: Option<RequestKey>,
    names: Vec<RequestedName>,
    common_names: Vec<String>,
}

/// The public key of a request.
pub(super) struct RequestKey {
    point: Vec<u8>,
    curve: &'static Curve,
}

enum RequestedName {
    Dns(String),
    Uri,
    Other,
}

/// An elliptic curve of keys.
struct Curve {
    /// Object identifier (RFC 5480 section 2.1.1.1).
    oid: &'static str,
    key: AlgorithmIdentifier,
    /// How rcgen calls a key on it.
    algorithm: &'static SignatureAlgorithm,
}

static CURVES: [Curve; 3] = [
    Curve { oid: "1.2.840.10045.3.1.7", key: alg_id::ECDSA_P256, algorithm: &PKCS_ECDSA_P256_SHA256 },
    Curve { oid: "1.3.132.0.34", key: alg_id::ECDSA_P384, algorithm: &PKCS_ECDSA_P384_SHA384 },
    Curve { oid: "1.3.132.0.35", key: alg_id::ECDSA_P521, algorithm: &PKCS_ECDSA_P521_SHA512 },
];

/// Object identifier of a key on a curve (RFC 5480 section 2.1.1).
const EC_PUBLIC_KEY: &str = "1.2.840.10045.2.1";

/// Hashes of ECDSA signatures, by object identifier (RFC 5758 section 3.2).
const HASHES: [(&str, AlgorithmIdentifier); 3] = [
    ("1.2.840.10045.4.3.2", alg_id::ECDSA_SHA256),
    ("1.2.840.10045.4.3.3", alg_id::ECDSA_SHA384),
    ("1.2.840.10045.4.3.4", alg_id::ECDSA_SHA512),
];

impl PublicKeyData for RequestKey {
    fn der_bytes(&self) -> &[u8] {
        &self.point
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.curve.algorithm
    }
}

impl SigningRequest {
    /// Parses a request, PKCS#10 DER.
    ///
    /// # Errors
    /// When it does not parse, or its signature is not that of its key.
    pub fn parse(der: &[u8]) -> Result<Self, SignError> {
        let unreadable = |problem: &str| SignError::Parse(problem.to_owned());
        let (rest, request) =
            X509CertificationRequest::from_der(der).map_err(|error| SignError::Parse(error.to_string()))?;
        if !rest.is_empty() {
            return Err(unreadable("something follows it"));
        }
        let info = &request.certification_request_info;
        let common_names = info.subject.iter_common_name().map(|name| name.as_str().map(str::to_owned));
        let common_names =
            common_names.collect::<Result<_, _>>().map_err(|_| unreadable("its common name is not text"))?;
        let extensions = request.requested_extensions().into_iter().flatten();
        let names = extensions.filter_map(|extension| match extension {
            ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
            _ => None,
        });
        let names = names.flatten().map(|name| match name {
            GeneralName::DNSName(name) => RequestedName::Dns((*name).to_owned()),
            GeneralName::URI(_) => RequestedName::Uri,
            _ => RequestedName::Other,
        });
        let names = names.collect();
        let key = verified_key(&request)?;
        Ok(Self { key, names, common_names })
    }

    /// Checks that it asks for `name` and nothing else, with an ECDSA key.
    ///
    /// # Errors
    /// When it asks for anything else.
    pub fn check(&self, name: &str) -> Result<(), SignError> {
        self.checked(name).map(|_| ())
    }

    /// Its key, if it asks for `name` and nothing else.
    pub(super) fn checked(&self, name: &str) -> Result<&RequestKey, SignError> {
        let refuse = |why: String| Err(SignError::Content(why));
        let Some(key) = &self.key else {
            return refuse("its key is not ECDSA on P-256, P-384 or P-521".to_owned());
        };
        let asked = match self.names.as_slice() {
            [RequestedName::Dns(dns)] => dns,
            [RequestedName::Uri] => return refuse("it has a URI name; expected one DNS name".to_owned()),
            [RequestedName::Other] => return refuse("its name is not a DNS name".to_owned()),
            names => return refuse(format!("it has {} names; expected exactly one DNS name", names.len())),
        };
        if asked != name {
            return refuse(format!("it asks for {asked}, the requested identity is {name}"));
        }
        if self.common_names.iter().any(|common_name| common_name != name) {
            return refuse("its common name differs from its DNS name".to_owned());
        }
        Ok(key)
    }

    /// Whether its subject has a common name.
    pub(super) fn has_common_name(&self) -> bool {
        !self.common_names.is_empty()
    }
}

/// The key of a request, which signed it; `None` if it is on no curve of [`CURVES`].
fn verified_key(request: &X509CertificationRequest<'_>) -> Result<Option<RequestKey>, SignError> {
    let info = &request.certification_request_info;
    let kind = &info.subject_pki.algorithm;
    let parameters = kind.parameters.as_ref().filter(|_| kind.algorithm.to_id_string() == EC_PUBLIC_KEY);
    let oid = parameters.and_then(|parameters| parameters.as_oid().ok()).map(|oid| oid.to_id_string());
    let Some(curve) = CURVES.iter().find(|curve| Some(curve.oid) == oid.as_deref()) else { return Ok(None) };
    let signature = request.signature_algorithm.algorithm.to_id_string();
    let hash = HASHES.iter().find(|(oid, _)| *oid == signature).map(|(_, hash)| hash);
    let provider = crypto_provider();
    let mut known = provider.signature_verification_algorithms.all.iter();
    let algorithm =
        known.find(|known| known.public_key_alg_id() == curve.key && Some(&known.signature_alg_id()) == hash);
    let algorithm = algorithm.ok_or_else(|| SignError::Parse("its signature is of an unknown kind".to_owned()))?;
    let point = &info.subject_pki.subject_public_key.data;
    let verified = algorithm.verify_signature(point, info.raw, &request.signature_value.data);
    verified.map_err(|_| SignError::Parse("its signature is not that of its key".to_owned()))?;
    Ok(Some(RequestKey { point: point.to_vec(), curve }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_openssl_writes() {
        let request = SigningRequest::parse(include_bytes!("../../../fuzz/corpus/signing_request/web")).unwrap();
        request.check("web.demo").unwrap();
        assert!(request.has_common_name() && request.check("admin.demo").is_err());
        assert!(SigningRequest::parse(b"garbage").is_err());
    }
}
