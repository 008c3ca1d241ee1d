//! New certificates for an installation, for tests that include this file.

use weft_tests::certificates::Certificates;
use weft_tls::ca::Root;

/// A new trust anchor, and an issuer that it has signed.
pub(crate) fn generate_certificates() -> Certificates {
    let root = Root::generate("root.linkerd.cluster.local").unwrap();
    let issuer = root.issue_issuer("identity.linkerd.cluster.local").unwrap();
    Certificates::write(root.certificate_pem(), &issuer.certificate, &issuer.key).unwrap()
}
