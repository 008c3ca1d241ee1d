//! The identity service: issues a certificate to a client that proves to be a service account.
//!
//! Order and codes of the checks are Linkerd's (`linkerd2:pkg/identity/service.go`): request, issuer, content of the
//! certificate signing request, token, name. The check that costs a request to the Kubernetes API comes last, because
//! anybody may send requests, and [`callers`] bounds how often. Of a request, only names are logged.

pub(crate) mod callers;
pub(crate) mod issuer;
pub(crate) mod review;
mod tokens;

use std::{
    fmt::Write,
    time::{Duration, SystemTime},
};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use sha2::{Digest, Sha256};
use tonic::{Code, Request, Response, Status};
use weft_proto::linkerd::identity::{CertifyRequest, CertifyResponse, identity_server};
use weft_tls::{
    ca::{Issued, SignError, SigningRequest},
    identity::Identity,
};

use crate::{
    api::events::Events,
    metrics::{GrpcMetrics, Method},
};
use callers::Callers;
use issuer::{CurrentIssuer, Place, SETS_ANCHORS};
use review::Reviewed;
pub(crate) use tokens::Tokens;

const CERTIFY: Method =
    Method { grpc_service: "io.linkerd.proxy.identity.Identity", grpc_method: "Certify", grpc_type: "unary" };

/// The largest request, in bytes: a token and a signing request of a few KiB each.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 * 1024;

/// Longest name in a certificate, in bytes: DNS's limit (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;

/// Signs certificates for service accounts, once their tokens are reviewed.
pub(crate) struct Certifier {
    /// The issuer, which signs.
    pub(crate) issuer: CurrentIssuer,
    /// The check of tokens.
    pub(crate) tokens: Tokens,
    /// Limits on callers with refused tokens.
    pub(crate) callers: Callers,
    /// Namespace of the control plane, which every name contains.
    pub(crate) control_namespace: String,
    /// Trust domain, which every name contains.
    pub(crate) trust_domain: String,
    /// How long certificates are valid.
    pub(crate) lifetime: Duration,
    /// Allowed difference between clocks: certificates are valid earlier and later by this.
    pub(crate) clock_skew: Duration,
    /// Counts the calls.
    pub(crate) metrics: GrpcMetrics,
    /// Source of the issuer's certificates, for error messages.
    pub(crate) place: Place,
    /// Publishes Events in a cluster.
    pub(crate) events: Events,
}

#[tonic::async_trait]
impl identity_server::Identity for Certifier {
    async fn certify(&self, request: Request<CertifyRequest>) -> Result<Response<CertifyResponse>, Status> {
        let call = self.metrics.start(CERTIFY);
        let request = request.into_inner();
        let result = self.issue(&request).await;
        match &result {
            Ok(_) => tracing::info!(identity = request.identity, "issued a certificate"),
            Err(status) => {
                let (identity, reason) = (shortened(&request.identity), shortened(status.message()));
                tracing::warn!(identity, code = ?status.code(), reason, "refused a certificate");
            }
        }
        call.end_with(result.map(Response::new))
    }
}

impl Certifier {
    async fn issue(&self, request: &CertifyRequest) -> Result<CertifyResponse, Status> {
        if request.identity.is_empty() {
            return Err(Status::invalid_argument("missing identity"));
        }
        if request.token.is_empty() {
            return Err(Status::invalid_argument("missing token"));
        }
        if request.certificate_signing_request.is_empty() {
            return Err(Status::invalid_argument("missing certificate signing request"));
        }
        if request.identity.len() > MAX_NAME {
            return Err(Status::invalid_argument(format!("the identity is longer than {MAX_NAME} bytes")));
        }
        let csr = SigningRequest::parse(&request.certificate_signing_request).map_err(|error| refusal(&error))?;
        let issuer = self.issuer.get();
        if let Err(error) = issuer.verify(SystemTime::now()) {
            let problem = error.to_string();
            if let Some(regarding) = self.place.regarding() {
                let (set, certificate, key) = self.place.issuer_values();
                let note = format!(
                    "{problem}; {set} {certificate} and {key} to new ones, or set a new root with {SETS_ANCHORS}"
                );
                self.events.repeated_warning(issuer::VALIDATION_FAILED, note, regarding);
            }
            return Err(Status::unknown(problem));
        }
        csr.check(&request.identity).map_err(|error| refusal(&error))?;
        let (name, reviewed) = self.identify(request).await?;
        let issued = issuer.sign_request(&csr, &name, self.lifetime, self.clock_skew);
        let issued = issued.map_err(|error| refusal(&error))?;
        self.announce(&name, &issued, reviewed);
        Ok(CertifyResponse {
            leaf_certificate: issued.leaf_der,
            intermediate_certificates: issued.intermediates,
            valid_until: Some(issued.not_after.into()),
        })
    }

    /// Returns the service account of the request's token, whose identity is the requested one.
    async fn identify(&self, request: &CertifyRequest) -> Result<(Identity, Reviewed), Status> {
        let _turn = self.callers.admit(&request.identity).await?;
        let identified = self.tokens.review(&request.token).await.and_then(|reviewed| {
            let account = &reviewed.account;
            let name = Identity::for_service_account(
                &account.name,
                &account.namespace,
                &self.control_namespace,
                &self.trust_domain,
            );
            let name = name.map_err(|error| Status::invalid_argument(error.to_string()))?;
            if name.as_str() != request.identity {
                return Err(Status::failed_precondition(format!(
                    "requested identity did not match provided token: requested={}; found={name}",
                    request.identity
                )));
            }
            Ok((name, reviewed))
        });
        // A token that could not be checked is nobody's fault.
        let refused = |status: &Status| matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition);
        match &identified {
            Ok(_) => self.callers.accepted(&request.identity),
            Err(status) if refused(status) => self.callers.refused(&request.identity),
            Err(_) => {}
        }
        identified
    }

    /// Publishes an Event on the service account that a certificate was issued for it.
    fn announce(&self, name: &Identity, issued: &Issued, reviewed: Reviewed) {
        let until = Timestamp::try_from(issued.not_after).map(|time| time.to_string()).unwrap_or_default();
        let mut hash = String::new();
        for byte in Sha256::digest(&issued.leaf_der) {
            let _ = write!(hash, "{byte:02x}");
        }
        let account = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("ServiceAccount".to_owned()),
            namespace: Some(reviewed.account.namespace),
            name: Some(reviewed.account.name),
            uid: reviewed.uid,
            ..ObjectReference::default()
        };
        let note = format!("issued certificate for {name} until {until}: {hash}");
        self.events.normal("IssuedLeafCertificate", note, account);
    }
}

fn refusal(error: &SignError) -> Status {
    match error {
        SignError::Parse(_) => Status::invalid_argument(error.to_string()),
        SignError::Content(_) => Status::failed_precondition(error.to_string()),
        SignError::Sign(_) => Status::internal(error.to_string()),
    }
}

/// The start of a client's text, for a log line.
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_NAME)]
}

#[cfg(test)]
mod tests;
