//! Checks of certificates: the trust anchors, the issuer, and the anchors of proxies.

use std::time::{Duration, SystemTime};

use k8s_openapi::{
    ByteString,
    api::core::v1::{Pod, Secret},
};
use kube::ResourceExt as _;
use serde_yaml_ng::Value;
use sha2::{Digest as _, Sha256};
use weft_k8s_api::labels;
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, IssuerError},
    inspect::{Certificate, certificates},
};

use super::{
    answer::{Stop, known},
    facts::{ClusterFacts, Facts},
};
use crate::{mesh::pods, problem::Problem};

/// Linkerd's bound: enough time to replace certificates that are replaced by hand.
const SOON: Duration = Duration::from_secs(60 * DAY);
const DAY: u64 = 24 * 60 * 60;

const NEW_ANCHORS: &str = "--set-file identityTrustAnchorsPEM=ca.crt";
const NEW_ISSUER: &str =
    "--set-file identity.issuer.tls.crtPEM=issuer.crt --set-file identity.issuer.tls.keyPEM=issuer.key";
/// What has to be made before an upgrade, in remedies.
const NEW: &str = "make a new one";
const SUPPORTED: &str = "make one whose key is ECDSA P-256";

pub(super) fn config_is_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let mut found = Vec::new();
    let (anchors, remedy) = (anchors_field(facts), new_anchors(facts, None));
    match known(&anchors, &cluster.trust_roots)?.as_ref().map(|_| cluster.anchors_pem()) {
        None => found.push(Problem::new(facts.named("ConfigMap", ANCHORS), "does not exist", remedy)),
        Some(None) => found.push(Problem::new(anchors, "is missing", remedy)),
        Some(Some(pem)) => {
            if let Err(error) = certificates(pem) {
                found.push(Problem::new(anchors, error.to_string(), remedy));
            } else if let Err(error) = TrustAnchors::from_pem(pem) {
                found.push(Problem::new(anchors, error.to_string(), remedy));
            }
        }
    }
    found.extend(issuer_problems(facts, cluster)?);
    Ok(found)
}

fn issuer_problems(facts: &Facts, cluster: &ClusterFacts) -> Result<Vec<Problem>, Stop> {
    let secret = known(&facts.named("Secret", ISSUER), &cluster.issuer)?;
    let remedy = new_issuer(facts, None);
    let Some(secret) = secret else {
        return Ok(vec![Problem::new(facts.named("Secret", ISSUER), "does not exist", remedy)]);
    };
    let (crt_key, key_key) = keys(cluster, secret);
    let problem = |key: &str, problem: String| Problem::new(data_field(facts, ISSUER, key), problem, remedy.clone());
    let mut found = Vec::new();
    for key in [crt_key, key_key] {
        match text(secret, key) {
            None => found.push(problem(key, "is missing".to_owned())),
            Some(Err(())) => found.push(problem(key, "is not text".to_owned())),
            Some(Ok(pem)) if key == crt_key => {
                if let Err(error) = certificates(&pem) {
                    found.push(problem(key, error.to_string()));
                }
            }
            Some(Ok(_)) => {}
        }
    }
    if !found.is_empty() {
        return Ok(found);
    }
    // Parsed with the identity service's own function. Other checks report problems of validity and anchors.
    let field = match issuer(cluster) {
        Some(Err(IssuerError::Key(_) | IssuerError::Mismatch)) => key_key,
        Some(Err(IssuerError::Chain(_)) | Ok(_)) | None => return Ok(found),
        Some(Err(_)) => crt_key,
    };
    if let Some(Err(error)) = issuer(cluster) {
        found.push(problem(field, error.to_string()));
    }
    Ok(found)
}

pub(super) fn anchors_supported(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let anchors = anchors(facts)?;
    Ok(unsupported(&anchors_field(facts), &anchors, &new_anchors(facts, Some(SUPPORTED))))
}

pub(super) fn anchors_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let anchors = anchors(facts)?;
    Ok(invalid_now(&anchors_field(facts), &anchors, facts.now, &new_anchors(facts, Some(NEW))))
}

pub(super) fn anchors_last(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let anchors = anchors(facts)?;
    Ok(ending(&anchors_field(facts), &anchors, facts.now, |_| SOON, &new_anchors(facts, Some(NEW))))
}

pub(super) fn issuer_supported(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (field, chain) = issuer_chain(facts)?;
    Ok(unsupported(&field, &chain, &new_issuer(facts, Some(SUPPORTED))))
}

pub(super) fn issuer_valid(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (field, chain) = issuer_chain(facts)?;
    Ok(invalid_now(&field, &chain, facts.now, &new_issuer(facts, Some(NEW))))
}

pub(super) fn issuer_lasts(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (field, chain) = issuer_chain(facts)?;
    let is_external = has_external_issuer(facts.cluster()?) == Some(true);
    let soon = |certificate: &Certificate| if is_external { overdue(certificate) } else { SOON };
    Ok(ending(&field, &chain, facts.now, soon, &new_issuer(facts, Some(NEW))))
}

pub(super) fn issuer_is_ours(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (field, chain) = issuer_chain(facts)?;
    // A certificate outside its validity does not verify; another check reports that.
    if !invalid_now(&field, &chain, facts.now, "").is_empty() {
        return Err(Stop::Skip);
    }
    let anchors = anchors(facts)?;
    Ok(match issuer(facts.cluster()?) {
        Some(Err(IssuerError::Chain(error))) => {
            let subjects: Vec<_> = anchors.iter().map(|anchor| anchor.subject.as_str()).collect();
            let issuer = chain.first().map(|issuer| issuer.subject.as_str()).unwrap_or_default();
            let problem = format!(
                "{issuer} is signed by no certificate of {} ({}): {error}",
                anchors_field(facts),
                subjects.join(", ")
            );
            let remedy = format!(
                "with an issuer that this root signed: {}; or with the root that signed this issuer: {}",
                new_issuer(facts, None),
                new_anchors(facts, None)
            );
            vec![Problem::new(field, problem, remedy)]
        }
        Some(Ok(_)) => Vec::new(),
        // The anchors cannot be read, as another check reports.
        Some(Err(_)) | None => return Err(Stop::Skip),
    })
}

/// A proxy trusts the anchors with which it was injected.
pub(super) fn proxies_trust_it(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let current = digests(cluster.anchors_pem().ok_or(Stop::Skip)?);
    let all = known("Pods with a proxy", &cluster.mesh.meshed)?;
    let stale = |pod: &&Pod| {
        let given = pod.annotations().get(labels::TRUST_ROOT_SHA256);
        !pods::is_over(pod) && !pods::is_leaving(pod) && given.is_some_and(|given| !current.contains(given))
    };
    Ok(all
        .iter()
        .filter(stale)
        .map(|pod| {
            let object =
                format!("Pod {}, metadata.annotations[\"{}\"]", pods::full_name(pod), labels::TRUST_ROOT_SHA256);
            let problem = format!("is not the digest of {}: its proxy trusts other anchors", anchors_field(facts));
            let remedy = format!("kubectl -n {} rollout restart deployment", pod.namespace().unwrap_or_default());
            Problem::new(object, problem, remedy)
        })
        .collect())
}

const ANCHORS: &str = "linkerd-identity-trust-roots";
const ISSUER: &str = "linkerd-identity-issuer";

fn anchors_field(facts: &Facts) -> String {
    format!("{}, data[\"ca-bundle.crt\"]", facts.named("ConfigMap", ANCHORS))
}

/// A field of a Secret, for messages.
pub(super) fn data_field(facts: &Facts, secret: &str, key: &str) -> String {
    format!("{}, data[\"{key}\"]", facts.named("Secret", secret))
}

fn anchors(facts: &Facts) -> Result<Vec<Certificate>, Stop> {
    let pem = facts.cluster()?.anchors_pem().ok_or(Stop::Skip)?;
    certificates(pem).map_err(|_| Stop::Skip)
}

/// The issuer's certificates, and the field that contains them.
fn issuer_chain(facts: &Facts) -> Result<(String, Vec<Certificate>), Stop> {
    let cluster = facts.cluster()?;
    let secret = cluster.issuer.as_ref().ok().and_then(Option::as_ref).ok_or(Stop::Skip)?;
    let (key, _) = keys(cluster, secret);
    let Some(Ok(pem)) = text(secret, key) else { return Err(Stop::Skip) };
    let chain = certificates(&pem).map_err(|_| Stop::Skip)?;
    Ok((data_field(facts, ISSUER, key), chain))
}

/// The issuer, parsed as in the identity service; `None` if its Secret or the anchors are missing.
fn issuer(cluster: &ClusterFacts) -> Option<Result<Issuer, IssuerError>> {
    let anchors = TrustAnchors::from_pem(cluster.anchors_pem()?).ok()?;
    let secret = cluster.issuer.as_ref().ok()?.as_ref()?;
    let (crt, key) = keys(cluster, secret);
    let (Some(Ok(crt)), Some(Ok(key))) = (text(secret, crt), text(secret, key)) else { return None };
    Some(Issuer::from_pem(&crt, &key, &anchors))
}

/// Fields of certificate and key, as the identity service chooses them: those of the format in the mesh's values, of
/// which a Secret may have both.
fn keys(cluster: &ClusterFacts, secret: &Secret) -> (&'static str, &'static str) {
    let has = |key: &str| secret.data.as_ref().is_some_and(|data| data.contains_key(key));
    let by_default = || !has("crt.pem") && has("tls.crt");
    if has_external_issuer(cluster).unwrap_or_else(by_default) {
        ("tls.crt", "tls.key")
    } else {
        ("crt.pem", "key.pem")
    }
}

/// Whether the mesh's values leave the issuer to another tool; `None` if they do not say.
fn has_external_issuer(cluster: &ClusterFacts) -> Option<bool> {
    values(cluster)?["identity"]["issuer"]["scheme"].as_str().map(|scheme| scheme == "kubernetes.io/tls")
}

/// Whether the mesh's values leave the trust anchors to another tool; `None` if they do not say.
fn has_external_anchors(cluster: &ClusterFacts) -> Option<bool> {
    values(cluster)?["identity"]["externalCA"].as_bool()
}

fn values(cluster: &ClusterFacts) -> Option<Value> {
    serde_yaml_ng::from_str(cluster.config_yaml()?).ok()
}

/// The remedy that replaces the issuer: an upgrade, before which something may have to be made, or the tool to which
/// the values leave it. An upgrade would store a key there and change nothing.
fn new_issuer(facts: &Facts, make: Option<&str>) -> String {
    match facts.cluster().ok().and_then(has_external_issuer) {
        Some(true) => by_another_tool(make, &facts.named("Secret", ISSUER), "with cert-manager, its Certificate"),
        _ => by_upgrade(make, &facts.upgrade(NEW_ISSUER)),
    }
}

/// As [`new_issuer`], for the trust anchors.
fn new_anchors(facts: &Facts, make: Option<&str>) -> String {
    match facts.cluster().ok().and_then(has_external_anchors) {
        Some(true) => by_another_tool(make, &facts.named("ConfigMap", ANCHORS), "with trust-manager, its Bundle"),
        _ => by_upgrade(make, &facts.upgrade(NEW_ANCHORS)),
    }
}

fn by_upgrade(make: Option<&str>, upgrade: &str) -> String {
    make.map_or_else(|| upgrade.to_owned(), |make| format!("{make}, then {upgrade}"))
}

fn by_another_tool(make: Option<&str>, object: &str, source: &str) -> String {
    format!("{} with the tool that writes {object} ({source})", make.unwrap_or("renew it"))
}

pub(super) fn text(secret: &Secret, key: &str) -> Option<Result<String, ()>> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    Some(String::from_utf8(bytes.clone()).map_err(|_| ()))
}

fn unsupported(field: &str, chain: &[Certificate], remedy: &str) -> Vec<Problem> {
    let unsupported = chain.iter().filter(|certificate| !certificate.supported);
    unsupported
        .map(|certificate| {
            let problem = format!("{} has a key that proxies cannot verify: {}", certificate.subject, certificate.key);
            Problem::new(field, problem, remedy)
        })
        .collect()
}

pub(super) fn invalid_now(field: &str, chain: &[Certificate], now: SystemTime, remedy: &str) -> Vec<Problem> {
    let mut found = Vec::new();
    for certificate in chain {
        let problem = if certificate.not_after <= now {
            format!("{} has expired {} ago", certificate.subject, days(now, certificate.not_after))
        } else if certificate.not_before > now {
            format!("{} is not valid for another {}", certificate.subject, days(certificate.not_before, now))
        } else {
            continue;
        };
        found.push(Problem::new(field, problem, remedy));
    }
    found
}

/// With less than this left, nothing renews a certificate that a program should renew. By default, cert-manager and the
/// control plane do it when a third of its validity is left.
pub(super) fn overdue(certificate: &Certificate) -> Duration {
    let validity = certificate.not_after.duration_since(certificate.not_before).unwrap_or_default();
    SOON.min(validity / 5)
}

/// `soon` is how long before its end a certificate is a problem.
pub(super) fn ending(
    field: &str,
    chain: &[Certificate],
    now: SystemTime,
    soon: impl Fn(&Certificate) -> Duration,
    remedy: &str,
) -> Vec<Problem> {
    let valid = chain.iter().filter(|certificate| certificate.not_after > now);
    let ending = valid.filter(|certificate| certificate.not_after < now + soon(certificate));
    ending
        .map(|certificate| {
            let problem = format!("{} expires in {}", certificate.subject, days(certificate.not_after, now));
            Problem::new(field, problem, remedy)
        })
        .collect()
}

fn days(later: SystemTime, earlier: SystemTime) -> String {
    let seconds = later.duration_since(earlier).unwrap_or_default().as_secs();
    match seconds / DAY {
        0 => format!("{} hours", seconds / 3600),
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    }
}

/// Digests of a bundle with and without a final newline, which tools add or remove.
fn digests(pem: &str) -> Vec<String> {
    let trimmed = pem.trim();
    let forms = [pem.to_owned(), trimmed.to_owned(), format!("{trimmed}\n")];
    forms.iter().map(|form| Sha256::digest(form).iter().map(|byte| format!("{byte:02x}")).collect()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_tls::ca::Root;

    use super::*;
    use crate::check::{
        facts::tests::{check, healthy},
        outcome::Judge,
    };

    const ISSUER_CRT: &str = "Secret linkerd/linkerd-identity-issuer, data[\"crt.pem\"]";
    const ISSUER_KEY: &str = "Secret linkerd/linkerd-identity-issuer, data[\"key.pem\"]";
    const ROOTS: &str = "ConfigMap linkerd/linkerd-identity-trust-roots, data[\"ca-bundle.crt\"]";
    /// Every check of the issuer's certificate and of the trust anchors.
    const OF_CERTIFICATES: [Judge; 8] = [
        config_is_valid,
        anchors_supported,
        anchors_valid,
        anchors_last,
        issuer_supported,
        issuer_valid,
        issuer_lasts,
        issuer_is_ours,
    ];

    fn with_issuer(mut facts: Facts, crt: &str, key: &str) -> Facts {
        let data = [("crt.pem", crt), ("key.pem", key)].map(|(key, pem)| (key.to_owned(), ByteString(pem.into())));
        let secret = Secret { data: Some(data.into()), ..Secret::default() };
        facts.cluster.as_mut().unwrap().issuer = Ok(Some(secret));
        facts
    }

    fn with_values(mut facts: Facts, values: &str) -> Facts {
        let object = serde_json::from_value(json!({"data": {"values": values}})).unwrap();
        facts.cluster.as_mut().unwrap().config = Ok(Some(object));
        facts
    }

    fn with_other_keys(mut facts: Facts) -> Facts {
        let secret = facts.cluster.as_mut().unwrap().issuer.as_mut().unwrap().as_mut().unwrap();
        let renamed = |(key, value): (String, ByteString)| {
            (if key == "crt.pem" { "tls.crt" } else { "tls.key" }.to_owned(), value)
        };
        secret.data = secret.data.take().map(|data| data.into_iter().map(renamed).collect());
        facts
    }

    /// A mesh whose certificates another tool writes.
    fn external(facts: Facts) -> Facts {
        let values = "identity: {externalCA: true, issuer: {scheme: kubernetes.io/tls}}";
        with_values(with_other_keys(facts), values)
    }

    fn with_anchors(mut facts: Facts, pem: &str) -> Facts {
        let object = serde_json::from_value(json!({"data": {"ca-bundle.crt": pem}})).unwrap();
        facts.cluster.as_mut().unwrap().trust_roots = Ok(Some(object));
        facts
    }

    #[test]
    fn good_certificates_pass_every_check() {
        let facts = healthy();
        for judge in OF_CERTIFICATES.into_iter().chain([proxies_trust_it as Judge]) {
            assert_eq!(judge(&facts), Ok(Vec::new()));
        }
    }

    #[test]
    fn another_certificates_key_is_named_as_the_key() {
        let root = Root::generate("root").unwrap();
        let (one, other) = (root.issue_issuer("one").unwrap(), root.issue_issuer("other").unwrap());
        let facts = with_issuer(with_anchors(healthy(), root.certificate_pem()), &one.certificate, &other.key);
        check(config_is_valid(&facts), &[(ISSUER_KEY, "does not belong")]);
    }

    #[test]
    fn an_issuer_of_another_root_names_both() {
        let stranger = Root::generate("stranger").unwrap().issue_issuer("issuer.stranger").unwrap();
        let facts = with_issuer(healthy(), &stranger.certificate, &stranger.key);
        assert_eq!(config_is_valid(&facts), Ok(Vec::new()));
        check(issuer_is_ours(&facts), &[(ISSUER_CRT, "CN=issuer.stranger is signed by no certificate of ConfigMap")]);
        let found = issuer_is_ours(&facts).unwrap();
        assert!(
            found[0].remedy.contains("identityTrustAnchorsPEM") && found[0].remedy.contains("crtPEM"),
            "{:?}",
            found[0]
        );
    }

    #[test]
    fn what_is_not_pem_is_named_by_its_field() {
        check(config_is_valid(&with_anchors(healthy(), "garbage")), &[(ROOTS, "holds no certificate")]);
        let own = Root::generate("root").unwrap().issue_issuer("issuer").unwrap();
        let facts = with_issuer(healthy(), &own.certificate, "garbage");
        check(config_is_valid(&facts), &[(ISSUER_KEY, "private key")]);
    }

    #[test]
    fn a_root_instead_of_an_issuer_is_fine_and_a_leaf_is_not() {
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(["leaf".to_owned()]).unwrap().self_signed(&key).unwrap();
        let facts = with_issuer(with_anchors(healthy(), &leaf.pem()), &leaf.pem(), &key.serialize_pem());
        check(config_is_valid(&facts), &[(ISSUER_CRT, "not a CA")]);
    }

    #[test]
    fn times_are_reported_in_days_and_only_by_the_check_that_asks_for_them() {
        const YEAR: Duration = Duration::from_secs(365 * DAY);
        let mut facts = healthy();
        facts.now += YEAR - Duration::from_secs(10 * DAY + 3600);
        check(issuer_lasts(&facts), &[(ISSUER_CRT, "expires in 10 days")]);
        check(anchors_last(&facts), &[(ROOTS, "expires in 10 days")]);
        assert_eq!(issuer_valid(&facts), Ok(Vec::new()));
        facts.now += Duration::from_secs(20 * DAY);
        check(issuer_valid(&facts), &[(ISSUER_CRT, "has expired 9 days ago")]);
        assert_eq!(issuer_lasts(&facts), Ok(Vec::new()));
        assert_eq!(issuer_is_ours(&facts), Err(Stop::Skip));
    }

    #[test]
    fn a_proxy_with_other_anchors_is_named() {
        let mut facts = healthy();
        let meshed = facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap();
        let annotations = meshed[0].metadata.annotations.get_or_insert_default();
        annotations.insert(labels::TRUST_ROOT_SHA256.to_owned(), "00".to_owned());
        let object = "Pod shop/web-0, metadata.annotations[\"linkerd.io/trust-root-sha256\"]";
        check(proxies_trust_it(&facts), &[(object, "other anchors")]);
    }

    #[test]
    fn an_issuer_of_another_tool_has_other_keys() {
        assert_eq!(config_is_valid(&with_other_keys(healthy())), Ok(Vec::new()));
    }

    /// An upgrade would change nothing there, and store a private key in the release.
    #[test]
    fn certificates_of_another_tool_are_renewed_by_it() {
        let mut expired = external(healthy());
        expired.now += Duration::from_secs(400 * DAY);
        let mut missing = external(healthy());
        let cluster = missing.cluster.as_mut().unwrap();
        (cluster.issuer, cluster.trust_roots) = (Ok(None), Ok(None));
        let stranger = Root::generate("stranger").unwrap().issue_issuer("issuer").unwrap();
        let stranger = external(with_issuer(healthy(), &stranger.certificate, &stranger.key));
        for (facts, count) in [(expired, 2), (missing, 2), (stranger, 1)] {
            let found: Vec<_> = OF_CERTIFICATES.iter().filter_map(|judge| judge(&facts).ok()).flatten().collect();
            assert_eq!(found.len(), count, "{found:#?}");
            for Problem { remedy, .. } in found {
                assert!(remedy.contains("with the tool that writes") && !remedy.contains("--set-file"), "{remedy}");
            }
        }
    }

    #[test]
    fn a_short_validity_of_another_tools_issuer_is_no_warning_until_renewal_is_overdue() {
        let (facts, validity) = (healthy(), Duration::from_secs(2 * DAY));
        let made = weft_tls::serving::generate(&["issuer".to_owned()], facts.now, validity).unwrap();
        let short = with_issuer(facts, &made.authority, "");
        check(issuer_lasts(&short), &[(ISSUER_CRT, "expires in")]);
        let mut facts = external(short);
        assert_eq!(issuer_lasts(&facts), Ok(Vec::new()));
        // The moment of cert-manager's renewal.
        facts.now += validity * 2 / 3;
        assert_eq!(issuer_lasts(&facts), Ok(Vec::new()));
        facts.now += validity / 6;
        check(issuer_lasts(&facts), &[("Secret linkerd/linkerd-identity-issuer, data[\"tls.crt\"]", "expires in")]);
    }

    /// A tool that writes into the chart's Secret leaves the old pair there.
    #[test]
    fn of_two_pairs_of_keys_the_schemes_is_checked() {
        let mut facts = healthy();
        let stranger = Root::generate("stranger").unwrap().issue_issuer("issuer.stranger").unwrap();
        let secret = facts.cluster.as_mut().unwrap().issuer.as_mut().unwrap().as_mut().unwrap();
        let data = secret.data.as_mut().unwrap();
        for (old, new, pem) in [("crt.pem", "tls.crt", stranger.certificate), ("key.pem", "tls.key", stranger.key)] {
            let good = data.insert(old.to_owned(), ByteString(pem.into())).unwrap();
            data.insert(new.to_owned(), good);
        }
        let of = |scheme: &str| {
            let values = format!("identity: {{issuer: {{scheme: {scheme}}}}}");
            issuer_is_ours(&with_values(facts.clone(), &values))
        };
        assert_eq!(of("kubernetes.io/tls"), Ok(Vec::new()));
        check(of("linkerd.io/tls"), &[(ISSUER_CRT, "CN=issuer.stranger is signed by no certificate of ConfigMap")]);
    }
}
