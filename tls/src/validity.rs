//! Validity of certificates.

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
