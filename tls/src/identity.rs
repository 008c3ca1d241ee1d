//! The name of a workload in the mesh: a DNS-like name or a URI (SPIFFE).
//!
//! Owns syntax and equality. Refuses to decide what an identity may do.

use std::{fmt, str::FromStr, sync::Arc};

use rustls::pki_types::{CertificateDer, DnsName};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// An identity as written in a certificate's subject alternative name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Identity {
    /// A DNS name without a trailing dot, in lower case.
    Dns(Arc<str>),
    /// A URI, e.g. `spiffe://trust.domain/workload`.
    Uri(Arc<str>),
}

/// A string that is neither a DNS name nor a URI.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not an identity: expected a DNS name without a trailing dot, or a URI with a scheme")]
pub struct ParseIdentityError(String);

impl Identity {
    /// Names a Kubernetes service account the way Linkerd does:
    /// `<sa>.<ns>.serviceaccount.identity.<control ns>.<trust domain>`.
    ///
    /// # Errors
    /// When a part is not a DNS label or the whole exceeds DNS's 253 bytes.
    pub fn for_service_account(
        service_account: &str,
        namespace: &str,
        control_namespace: &str,
        trust_domain: &str,
    ) -> Result<Self, ParseIdentityError> {
        format!("{service_account}.{namespace}.serviceaccount.identity.{control_namespace}.{trust_domain}").parse()
    }

    /// The identity as written in the certificate.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Dns(name) | Self::Uri(name) => name,
        }
    }

    /// The first DNS or URI subject alternative name of a certificate that parses as an identity, as Linkerd picks it.
    #[must_use]
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Option<Self> {
        all_in(certificate).into_iter().next()
    }
}

/// Every identity in a certificate's subject alternative names, in their order.
pub(crate) fn all_in(certificate: &CertificateDer<'_>) -> Vec<Identity> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
        return Vec::new();
    };
    let Ok(Some(names)) = parsed.subject_alternative_name() else {
        return Vec::new();
    };
    names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::DNSName(dns) => parse_dns(dns),
            GeneralName::URI(uri) => parse_uri(uri),
            _ => None,
        })
        .collect()
}

fn parse_dns(name: &str) -> Option<Identity> {
    if name.ends_with('.') {
        return None;
    }
    DnsName::try_from(name).ok().map(|dns| Identity::Dns(dns.as_ref().to_ascii_lowercase().into()))
}

fn parse_uri(uri: &str) -> Option<Identity> {
    let (scheme, rest) = uri.split_once("://")?;
    let scheme_is_valid = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
    let rest_is_valid = !rest.is_empty() && rest.chars().all(|c| c.is_ascii_graphic());
    (scheme_is_valid && rest_is_valid).then(|| Identity::Uri(uri.into()))
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_uri(text).or_else(|| parse_dns(text)).ok_or_else(|| ParseIdentityError(text.to_owned()))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_dns_names_and_uris() {
        let web = Identity::for_service_account("web", "demo", "linkerd", "cluster.local").unwrap();
        assert_eq!(web.as_str(), "web.demo.serviceaccount.identity.linkerd.cluster.local");
        assert!(matches!("spiffe://td/ns/web".parse().unwrap(), Identity::Uri(_)));
        assert_eq!("WEB.demo".parse::<Identity>().unwrap(), "web.demo".parse().unwrap());
    }

    #[test]
    fn refuses_what_is_neither() {
        for text in ["", "trailing.dot.", "sp ace", "://nothing", "spiffe://", "a..b"] {
            assert!(text.parse::<Identity>().is_err(), "{text:?} parsed");
        }
    }
}
