//! MeshTLSAuthentication: the mesh identities that a client may have.

use std::{fmt, str::FromStr};

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NamespacedTargetRef;
use crate::names::is_dns_name;

/// Spec of a MeshTLSAuthentication (`policy.linkerd.io/v1alpha1`); exactly one of the two lists is set.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1alpha1", kind = "MeshTLSAuthentication")]
#[kube(plural = "meshtlsauthentications", shortname = "meshtlsauthn", namespaced, derive = "PartialEq")]
#[serde(rename_all = "camelCase")]
pub struct MeshTLSAuthenticationSpec {
    /// Identities, suffixes (`*.ns.serviceaccount...`), or `*` for every identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identities: Option<Vec<IdentityMatch>>,
    /// ServiceAccounts, or Namespaces with all their ServiceAccounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_refs: Option<Vec<NamespacedTargetRef>>,
}

/// A set of identities: one, or all with a suffix.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub enum IdentityMatch {
    /// Exactly this DNS name or SPIFFE URI.
    Exact(String),
    /// Every name that ends with these labels; no labels means every name.
    Suffix(Vec<String>),
}

/// The text is not an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad identity {0:?}, expected a DNS name such as web.shop.serviceaccount.identity.linkerd.cluster.local, a suffix \
     such as *.shop.serviceaccount.identity.linkerd.cluster.local, a URI spiffe://trust-domain/path, or *"
)]
pub struct IdentityMatchError(pub String);

impl FromStr for IdentityMatch {
    type Err = IdentityMatchError;

    fn from_str(text: &str) -> Result<Self, IdentityMatchError> {
        let bad = || IdentityMatchError(text.to_owned());
        if text == "*" {
            return Ok(Self::Suffix(Vec::new()));
        }
        if let Some(suffix) = text.strip_prefix("*.") {
            return if is_dns_name(suffix) {
                Ok(Self::Suffix(suffix.split('.').map(str::to_owned).collect()))
            } else {
                Err(bad())
            };
        }
        if is_dns_name(text) || is_spiffe_uri(text) { Ok(Self::Exact(text.to_owned())) } else { Err(bad()) }
    }
}

impl TryFrom<String> for IdentityMatch {
    type Error = IdentityMatchError;

    fn try_from(text: String) -> Result<Self, IdentityMatchError> {
        text.parse()
    }
}

impl From<IdentityMatch> for String {
    fn from(identity: IdentityMatch) -> Self {
        identity.to_string()
    }
}

impl fmt::Display for IdentityMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::Suffix(labels) if labels.is_empty() => f.write_str("*"),
            Self::Suffix(labels) => write!(f, "*.{}", labels.join(".")),
        }
    }
}

/// SPIFFE-ID section 2: scheme `spiffe`, a trust domain, no port, query, fragment or user.
fn is_spiffe_uri(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("spiffe://") else { return false };
    let (domain, path) = rest.split_once('/').unwrap_or((rest, ""));
    let domain_ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-' | '_');
    let path_ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/');
    text.len() <= 2048 && !domain.is_empty() && domain.chars().all(domain_ok) && path.chars().all(path_ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_identities_suffixes_and_uris() {
        for (text, valid) in [
            ("*", true),
            ("*.shop.serviceaccount.identity.linkerd.cluster.local", true),
            ("web.shop.serviceaccount.identity.linkerd.cluster.local", true),
            ("spiffe://root.linkerd.cluster.local/vm/one", true),
            ("", false),
            ("*web", false),
            ("web.*", false),
            ("Web.shop", false),
            ("spiffe://", false),
            ("https://example.org", false),
        ] {
            let parsed = text.parse::<IdentityMatch>();
            assert_eq!(parsed.is_ok(), valid, "{text:?}: {parsed:?}");
            if let Ok(identity) = parsed {
                assert_eq!(identity.to_string(), text);
            }
        }
    }
}
