//! Certificates as DER: where each of a sequence ends, and validity.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Start and end of a certificate's validity.
pub(crate) fn validity(certificate: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), String> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|error| error.to_string())?;
    let at =
        |timestamp: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(timestamp).unwrap_or_default());
    let validity = parsed.validity();
    Ok((at(validity.not_before.timestamp()), at(validity.not_after.timestamp())))
}

/// End of a certificate's validity.
pub(crate) fn not_after(certificate: &CertificateDer<'_>) -> Result<SystemTime, String> {
    validity(certificate).map(|(_, not_after)| not_after)
}

/// The certificates that follow directly after each other, as in messages of the SPIFFE Workload API.
pub(crate) fn der_sequence(mut bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut certificates = Vec::new();
    while !bytes.is_empty() {
        let (after, _) = X509Certificate::from_der(bytes).map_err(|error| error.to_string())?;
        certificates.push(bytes[..bytes.len() - after.len()].to_vec());
        bytes = after;
    }
    Ok(certificates)
}
