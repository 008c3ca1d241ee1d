//! The trust anchor and the issuer of a new mesh, and the check of given ones.

use std::time::SystemTime;

use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, Root},
};

/// What the values say about certificates.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// Nothing: they are to be generated.
    Nothing,
    /// All of them.
    All { anchors: String, certificate: String, key: String },
    /// Another tool writes one of them or both into the cluster.
    Elsewhere,
}

/// What merged values say.
///
/// # Errors
/// When something is missing; the error names it.
pub(super) fn given(values: &Value) -> Result<Given> {
    let identity = &values["identity"];
    let text = |value: &Value| value.as_str().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned);
    let anchors = text(&values["identityTrustAnchorsPEM"]);
    let tls = &identity["issuer"]["tls"];
    let (certificate, key) = (text(&tls["crtPEM"]), text(&tls["keyPEM"]));
    let elsewhere = identity["externalCA"] == Value::Bool(true) || identity["issuer"]["scheme"] != "linkerd.io/tls";
    match (anchors, certificate, key) {
        _ if elsewhere => Ok(Given::Elsewhere),
        (None, None, None) => Ok(Given::Nothing),
        (Some(anchors), Some(certificate), Some(key)) => Ok(Given::All { anchors, certificate, key }),
        (anchors, certificate, key) => {
            let missing = [
                (anchors.is_none(), "--identity-trust-anchors-file (identityTrustAnchorsPEM)"),
                (certificate.is_none(), "--identity-issuer-certificate-file (identity.issuer.tls.crtPEM)"),
                (key.is_none(), "--identity-issuer-key-file (identity.issuer.tls.keyPEM)"),
            ];
            let missing: Vec<_> = missing.into_iter().filter_map(|(missing, name)| missing.then_some(name)).collect();
            bail!(
                "certificates are given in part: add {}, or none of the three to have them generated",
                missing.join(" and ")
            )
        }
    }
}

/// Checks that certificates belong together and are valid now.
pub(super) fn check(anchors: &str, certificate: &str, key: &str) -> Result<()> {
    let anchors = TrustAnchors::from_pem(anchors).map_err(|error| anyhow!("identityTrustAnchorsPEM: {error}"))?;
    let issuer =
        Issuer::from_pem(certificate, key, &anchors).map_err(|error| anyhow!("identity.issuer.tls: {error}"))?;
    if issuer.expiry() <= SystemTime::now() {
        bail!("identity.issuer.tls: the issuer certificate has expired");
    }
    Ok(())
}

/// A root, whose key is not kept, and an issuer, as values.
pub(super) fn generate(trust_domain: &str, namespace: &str) -> Result<Value> {
    let root = Root::generate(&format!("root.{namespace}.{trust_domain}"))?;
    let issuer = root.issue_issuer(&format!("identity.{namespace}.{trust_domain}"))?;
    Ok(as_values(root.certificate_pem(), &issuer.certificate, &issuer.key))
}

/// Values that contain certificates.
fn as_values(anchors: &str, certificate: &str, key: &str) -> Value {
    let mut values = issuer_values(certificate, key);
    values["identityTrustAnchorsPEM"] = Value::from(anchors);
    values
}

/// Values that contain an issuer.
pub(super) fn issuer_values(certificate: &str, key: &str) -> Value {
    json!({"identity": {"issuer": {"tls": {"crtPEM": certificate, "keyPEM": key}}}})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Value {
        serde_yaml_ng::from_str(text).unwrap()
    }

    const NOTHING: &str =
        "identityTrustAnchorsPEM: ''\nidentity: {issuer: {scheme: linkerd.io/tls, tls: {crtPEM: '', keyPEM: ''}}}";

    #[test]
    fn what_is_generated_belongs_together() {
        let generated = generate("cluster.local", "linkerd").unwrap();
        let mut all = values(NOTHING);
        all["identityTrustAnchorsPEM"] = generated["identityTrustAnchorsPEM"].clone();
        all["identity"]["issuer"]["tls"] = generated["identity"]["issuer"]["tls"].clone();
        let Given::All { anchors, certificate, key } = given(&all).unwrap() else { panic!("not all") };
        check(&anchors, &certificate, &key).unwrap();
        let other = generate("cluster.local", "linkerd").unwrap();
        let other = other["identityTrustAnchorsPEM"].as_str().unwrap();
        assert!(check(other, &certificate, &key).unwrap_err().to_string().contains("identity.issuer.tls"));
    }

    #[test]
    fn nothing_all_or_elsewhere() {
        assert_eq!(given(&values(NOTHING)).unwrap(), Given::Nothing);
        for elsewhere in [
            NOTHING.replace("linkerd.io/tls", "kubernetes.io/tls"),
            NOTHING.replace("{issuer", "{externalCA: true, issuer"),
        ] {
            assert_eq!(given(&values(&elsewhere)).unwrap(), Given::Elsewhere);
        }
        let error = given(&values(&NOTHING.replace("PEM: ''\n", "PEM: x\n"))).unwrap_err().to_string();
        assert!(
            error.contains("--identity-issuer-certificate-file") && error.contains("--identity-issuer-key-file"),
            "{error}"
        );
    }
}
