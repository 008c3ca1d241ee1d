//! The identity in a peer's certificate.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rustls_pki_types::CertificateDer;
use weft_tls::identity::Identity;

fuzz_target!(|der: &[u8]| {
    if let Some(identity) = Identity::from_certificate(&CertificateDer::from(der)) {
        assert_eq!(identity.as_str().parse::<Identity>().expect("an identity can be read again"), identity);
    }
});
