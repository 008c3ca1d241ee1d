//! Checks of tokens: a closed set of methods.

use tonic::Status;
use weft_k8s_api::names;
use weft_tls::tokens::{TokenError, TokenVerifier};

use super::review::{Reviewed, Reviewer};

/// Audience that a token must have.
const AUDIENCE: &str = weft_k8s_api::labels::IDENTITY_AUDIENCE;

/// The method of checking tokens.
pub(crate) enum Tokens {
    /// With the public key of a local signer: the sandbox.
    LocalKey(TokenVerifier),
    /// With the Kubernetes API.
    Review(Box<Reviewer>),
}

impl Tokens {
    /// Returns the service account of a token.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not the token of a service account, `FailedPrecondition` if it is not authentic,
    /// `Internal` if it cannot be checked.
    pub(crate) async fn review(&self, token: &[u8]) -> Result<Reviewed, Status> {
        let token = std::str::from_utf8(token).map_err(|_| Status::invalid_argument("the token is not UTF-8"))?;
        let token = token.trim_end();
        let reviewed = match self {
            Self::LocalKey(verifier) => {
                let account = verifier.verify(token, AUDIENCE).map_err(|error| match error {
                    TokenError::Invalid(_) => {
                        Status::failed_precondition("authentication token could not be authenticated")
                    }
                    TokenError::Subject(_) => Status::invalid_argument(error.to_string()),
                })?;
                Reviewed { account, uid: None }
            }
            Self::Review(reviewer) => reviewer.review(token, AUDIENCE).await?,
        };
        // Names become labels of the identity, so a dot in one would forge another identity.
        for part in [&reviewed.account.namespace, &reviewed.account.name] {
            if !names::is_label(part) {
                return Err(Status::invalid_argument(format!("{part:?} in the token is not a DNS label")));
            }
        }
        Ok(reviewed)
    }
}
