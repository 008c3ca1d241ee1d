//! Service-account tokens signed by a local key, for a mesh without a Kubernetes API server.
//!
//! The claims are those of a projected Kubernetes token that identity needs: `sub`, `aud`, `exp`, `iat`. Algorithm
//! ES256. With an API server, TokenReview replaces the verifier.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde::{Deserialize, Serialize};

/// The audience that Linkerd's proxies request, and that its identity service requires.
pub const AUDIENCE: &str = "identity.l5d.io";

/// A Kubernetes service account.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceAccount {
    /// Namespace, as in a token's subject `system:serviceaccount:NAMESPACE:NAME`.
    pub namespace: String,
    /// Name, as in a token's subject.
    pub name: String,
}

/// Signs tokens.
pub struct TokenSigner {
    key: EncodingKey,
    public_pem: String,
}

/// Checks tokens.
pub struct TokenVerifier(DecodingKey);

/// Why a token was not signed, or a key not parsed.
#[derive(Debug, thiserror::Error)]
pub enum TokenKeyError {
    /// The system provided no randomness.
    #[error("cannot create a token key: {0}")]
    Generate(#[source] rcgen::Error),
    /// The text is not the expected key.
    #[error("not an EC public key in PEM: {0}")]
    Parse(#[source] jsonwebtoken::errors::Error),
    /// Signing failed.
    #[error("cannot sign a token: {0}")]
    Sign(#[source] jsonwebtoken::errors::Error),
}

/// Why a token is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Signature, audience, expiry or syntax is wrong.
    #[error("the token is not valid: {0}")]
    Invalid(#[source] jsonwebtoken::errors::Error),
    /// The token is valid, but its subject is not a service account.
    #[error("the token's subject `{0}` is not a service account: expected system:serviceaccount:NAMESPACE:NAME")]
    Subject(String),
}

#[derive(Serialize, Deserialize)]
struct Claims {
    sub: String,
    aud: Vec<String>,
    iat: u64,
    exp: u64,
}

impl TokenSigner {
    /// Creates a signer with a new key.
    ///
    /// # Errors
    /// When the system provides no randomness.
    pub fn generate() -> Result<Self, TokenKeyError> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(TokenKeyError::Generate)?;
        Ok(Self { key: EncodingKey::from_ec_der(pair.serialized_der()), public_pem: pair.public_key_pem() })
    }

    /// The public key, for [`TokenVerifier::from_pem`].
    #[must_use]
    pub fn public_pem(&self) -> &str {
        &self.public_pem
    }

    /// Signs a token for a service account, valid from now.
    ///
    /// # Errors
    /// When the key cannot sign.
    pub fn sign(&self, account: &ServiceAccount, audience: &str, lifetime: Duration) -> Result<String, TokenKeyError> {
        let iat = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let claims = Claims {
            sub: format!("system:serviceaccount:{}:{}", account.namespace, account.name),
            aud: vec![audience.to_owned()],
            iat,
            exp: iat + lifetime.as_secs(),
        };
        encode(&Header::new(Algorithm::ES256), &claims, &self.key).map_err(TokenKeyError::Sign)
    }
}

impl TokenVerifier {
    /// Parses the public key.
    ///
    /// # Errors
    /// When the text is not an EC public key.
    pub fn from_pem(pem: &str) -> Result<Self, TokenKeyError> {
        DecodingKey::from_ec_pem(pem.as_bytes()).map(Self).map_err(TokenKeyError::Parse)
    }

    /// Checks signature, audience and expiry, and returns the token's service account.
    ///
    /// # Errors
    /// See [`TokenError`]; the token proves nothing.
    pub fn verify(&self, token: &str, audience: &str) -> Result<ServiceAccount, TokenError> {
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_audience(&[audience]);
        validation.set_required_spec_claims(&["exp", "aud", "sub"]);
        let claims = decode::<Claims>(token, &self.0, &validation).map_err(TokenError::Invalid)?.claims;
        let parts: Vec<&str> = claims.sub.split(':').collect();
        match parts.as_slice() {
            ["system", "serviceaccount", namespace, name] if !namespace.is_empty() && !name.is_empty() => {
                Ok(ServiceAccount { namespace: (*namespace).to_owned(), name: (*name).to_owned() })
            }
            _ => Err(TokenError::Subject(claims.sub)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> ServiceAccount {
        ServiceAccount { namespace: "demo".into(), name: "web".into() }
    }

    #[test]
    fn a_signed_token_names_its_account() {
        let signer = TokenSigner::generate().unwrap();
        let token = signer.sign(&account(), AUDIENCE, Duration::from_secs(60)).unwrap();
        let verifier = TokenVerifier::from_pem(signer.public_pem()).unwrap();
        assert_eq!(verifier.verify(&token, AUDIENCE).unwrap(), account());
    }

    #[test]
    fn other_audiences_keys_and_garbage_are_refused() {
        let signer = TokenSigner::generate().unwrap();
        let token = signer.sign(&account(), AUDIENCE, Duration::from_secs(60)).unwrap();
        let verifier = TokenVerifier::from_pem(signer.public_pem()).unwrap();
        assert!(verifier.verify(&token, "somebody.else").is_err());
        assert!(verifier.verify("garbage", AUDIENCE).is_err());
        let stranger = TokenVerifier::from_pem(TokenSigner::generate().unwrap().public_pem()).unwrap();
        assert!(stranger.verify(&token, AUDIENCE).is_err());
    }
}
