//! Certificates, keys and trust bundles, as a SPIFFE Workload API delivers them.

use std::sync::LazyLock;

use prost::Message as _;
use weft_proto::spiffe::{X509svid, X509svidResponse};
use weft_tls::{
    anchors::TrustAnchors,
    credentials::{Credentials, CredentialsError},
    identity::Identity,
};

/// The anchors of the settings: a certificate that signs none of an input's.
static ANCHORS: LazyLock<TrustAnchors> =
    LazyLock::new(|| TrustAnchors::from_pem(include_str!("anchor.pem")).expect("a certificate"));
/// An identity that no seed has.
const OTHER: &str = "spiffe://other.test/web";
/// The most SVIDs of an update that are read; each costs signatures.
const MAX_SVIDS: usize = 4;

/// Reads an update.
pub(super) fn update(bytes: &[u8]) {
    let Ok(update) = X509svidResponse::decode(bytes) else { return };
    for svid in update.svids.iter().take(MAX_SVIDS) {
        let Ok(anchors) = ANCHORS.with_bundle(&svid.bundle) else { continue };
        check_bundle(&svid.bundle);
        check_credentials(svid, &anchors);
    }
}

/// A bundle is read as a whole, and each of its certificates counts once.
fn check_bundle(bundle: &[u8]) {
    if let Some((_, cut)) = bundle.split_last() {
        assert!(ANCHORS.with_bundle(cut).is_err(), "a certificate without an end");
    }
    assert!(ANCHORS.with_bundle(&[bundle, &[0]].concat()).is_err(), "a byte that is no certificate");
    assert!(ANCHORS.with_bundle(&[bundle, bundle].concat()).is_ok());
}

/// Credentials have the name that was asked for, and come from a whole chain with its key.
fn check_credentials(svid: &X509svid, anchors: &TrustAnchors) {
    let Ok(name) = svid.spiffe_id.parse::<Identity>() else { return };
    let read = |name: &Identity, key: &[u8], chain: &[u8]| {
        Credentials::from_svid(name.clone(), key.to_vec(), chain, anchors.clone())
    };
    let (key, chain) = (&svid.x509_svid_key[..], &svid.x509_svid[..]);
    let Ok(credentials) = read(&name, key, chain) else { return };
    assert_eq!(credentials.name(), &name);
    let _ = (credentials.server_config(&[]), credentials.client_config(&name, &[]));
    let other = OTHER.parse::<Identity>().expect("an identity");
    assert!(name == other || matches!(read(&other, key, chain), Err(CredentialsError::Name { .. })));
    let cut = chain.split_last().map_or(chain, |(_, cut)| cut);
    for broken in [&[][..], cut] {
        assert!(matches!(read(&name, key, broken), Err(CredentialsError::Parse(_))));
    }
    assert!(matches!(read(&name, &[], chain), Err(CredentialsError::Key(_))));
}

#[cfg(test)]
mod tests {
    use super::{super::tests::seeds, *};

    /// Their certificates are valid until the year 9999.
    #[test]
    fn every_seed_has_credentials() {
        for seed in seeds("svid") {
            for svid in X509svidResponse::decode(&seed[..]).unwrap().svids {
                let anchors = ANCHORS.with_bundle(&svid.bundle).unwrap();
                let name = svid.spiffe_id.parse().unwrap();
                Credentials::from_svid(name, svid.x509_svid_key, &svid.x509_svid, anchors).unwrap();
            }
        }
    }
}
