//! From a Secret to what it says about a linked cluster.
//!
//! A Secret must neither run programs nor read files of this process: a kubeconfig with an exec plugin would do the
//! one, and one with `tokenFile` would send this process's own token to a server of the Secret's choice.

use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use kube::config::{AuthInfo, Cluster, Kubeconfig};
use weft_k8s_api::labels;

/// Key of the Secret with the kubeconfig.
const KEY: &str = "kubeconfig";

/// A link to a cluster.
#[derive(Clone)]
pub(super) struct Link {
    /// Domain of identities there.
    pub(super) trust_domain: String,
    /// Domain of DNS names there.
    pub(super) cluster_domain: String,
    /// How to reach its API.
    pub(super) kubeconfig: Kubeconfig,
    /// The text that it was read from, for comparison.
    text: String,
    /// Whether its API server need not prove who it is.
    pub(super) insecure: bool,
}

impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        let parts = |link: &Self| (link.trust_domain.clone(), link.cluster_domain.clone(), link.text.clone());
        parts(self) == parts(other)
    }
}

// Without credentials.
impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trust_domain, cluster_domain, insecure, .. } = self;
        write!(f, "Link({cluster_domain}, {trust_domain}, insecure: {insecure})")
    }
}

/// Why a Secret cannot be used; each names the part.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LinkError {
    /// An annotation is missing.
    #[error("annotation {0} is missing")]
    Annotation(&'static str),
    /// The key is missing.
    #[error("key {KEY} is missing")]
    Key,
    /// The value is malformed.
    #[error("key {KEY}: not a kubeconfig: {0}")]
    Kubeconfig(String),
    /// The value says something that a Secret must not.
    #[error("key {KEY}: {field} of {object:?} is refused: {reason}")]
    Refused { object: String, field: &'static str, reason: &'static str },
}

impl Link {
    /// Reads a Secret.
    pub(super) fn read(secret: &Secret) -> Result<Self, LinkError> {
        let annotation = |name: &'static str| {
            let found = secret.metadata.annotations.as_ref().and_then(|all| all.get(name));
            found.filter(|value| !value.is_empty()).cloned().ok_or(LinkError::Annotation(name))
        };
        let (trust_domain, cluster_domain) =
            (annotation(labels::LINK_TRUST_DOMAIN)?, annotation(labels::LINK_CLUSTER_DOMAIN)?);
        let bytes = secret.data.as_ref().and_then(|data| data.get(KEY)).ok_or(LinkError::Key)?;
        let malformed = |problem: String| LinkError::Kubeconfig(problem);
        let text = std::str::from_utf8(&bytes.0).map_err(|error| malformed(error.to_string()))?;
        let kubeconfig = Kubeconfig::from_yaml(text).map_err(|error| malformed(error.to_string()))?;
        for user in &kubeconfig.auth_infos {
            refuse(&user.name, &user.auth_info.iter().flat_map(of_user).collect::<Vec<_>>())?;
        }
        for cluster in &kubeconfig.clusters {
            refuse(&cluster.name, &cluster.cluster.iter().flat_map(of_cluster).collect::<Vec<_>>())?;
        }
        let clusters = kubeconfig.clusters.iter().filter_map(|cluster| cluster.cluster.as_ref());
        let insecure = clusters.filter_map(|cluster| cluster.insecure_skip_tls_verify).any(|insecure| insecure);
        Ok(Self {
            trust_domain,
            cluster_domain: cluster_domain.trim_end_matches('.').to_owned(),
            kubeconfig,
            text: text.to_owned(),
            insecure,
        })
    }
}

/// A field, whether it is set, and why it must not be.
type Forbidden = (&'static str, bool, &'static str);

const PROGRAM: &str = "a Secret must not run programs";
const FILE: &str = "a Secret must not read files, give the data itself";

fn of_user(user: &AuthInfo) -> [Forbidden; 5] {
    [
        ("exec", user.exec.is_some(), PROGRAM),
        ("auth-provider", user.auth_provider.is_some(), PROGRAM),
        ("tokenFile", user.token_file.is_some(), FILE),
        ("client-certificate", user.client_certificate.is_some(), FILE),
        ("client-key", user.client_key.is_some(), FILE),
    ]
}

fn of_cluster(cluster: &Cluster) -> [Forbidden; 2] {
    [
        ("certificate-authority", cluster.certificate_authority.is_some(), FILE),
        ("proxy-url", cluster.proxy_url.is_some(), "proxies are not supported"),
    ]
}

fn refuse(object: &str, fields: &[Forbidden]) -> Result<(), LinkError> {
    match fields.iter().find(|(_, set, _)| *set) {
        Some((field, _, reason)) => Err(LinkError::Refused { object: object.to_owned(), field, reason }),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    pub(in crate::clusters) fn kubeconfig(cluster: Value, user: Value) -> String {
        json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "east", "cluster": cluster}], "users": [{"name": "reader", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "east", "user": "reader"}}]})
        .to_string()
    }

    /// A Secret as `linkerd multicluster link` writes it.
    pub(in crate::clusters) fn secret(name: &str, cluster: &str, kubeconfig: &str) -> Secret {
        serde_json::from_value(json!({"type": "mirror.linkerd.io/remote-kubeconfig",
            "metadata": {"name": name, "namespace": "linkerd", "resourceVersion": "1",
                "labels": {"multicluster.linkerd.io/cluster-name": cluster}, "annotations": {
                    "multicluster.linkerd.io/trust-domain": "east.trust", "multicluster.linkerd.io/cluster-domain": "east.local."}},
            "data": {"kubeconfig": k8s_openapi::ByteString(kubeconfig.as_bytes().to_vec())}}))
        .unwrap()
    }

    fn good() -> String {
        kubeconfig(json!({"server": "https://192.0.2.1:6443"}), json!({"token": "t"}))
    }

    #[test]
    fn a_link_is_read_with_its_domains() {
        let link = Link::read(&secret("a", "east", &good())).unwrap();
        assert_eq!((link.trust_domain.as_str(), link.cluster_domain.as_str()), ("east.trust", "east.local"));
        assert!(!link.insecure && link.kubeconfig.current_context.as_deref() == Some("c"));
        let unproven = kubeconfig(json!({"server": "https://a", "insecure-skip-tls-verify": true}), json!({}));
        assert!(Link::read(&secret("a", "east", &unproven)).unwrap().insecure);
    }

    #[test]
    fn what_is_missing_is_named() {
        for (part, words) in [
            ("trust-domain", "annotation multicluster.linkerd.io/trust-domain is missing"),
            ("cluster-domain", "annotation multicluster.linkerd.io/cluster-domain is missing"),
            ("kubeconfig", "key kubeconfig is missing"),
        ] {
            let mut object = secret("a", "east", &good());
            object.metadata.annotations.as_mut().unwrap().retain(|name, _| !name.ends_with(part));
            object.data.as_mut().unwrap().retain(|name, _| name != part);
            assert_eq!(Link::read(&object).unwrap_err().to_string(), words);
        }
        let error = Link::read(&secret("a", "east", "{")).unwrap_err();
        assert!(error.to_string().starts_with("key kubeconfig: not a kubeconfig: "), "{error}");
    }

    #[test]
    fn a_secret_runs_no_program_and_reads_no_file() {
        let server = || json!({"server": "https://192.0.2.1:6443"});
        for (cluster, user, field) in [
            (server(), json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh"}}), "exec"),
            (server(), json!({"auth-provider": {"name": "gcp", "config": {"cmd-path": "sh"}}}), "auth-provider"),
            (server(), json!({"tokenFile": "/var/run/secrets/kubernetes.io/serviceaccount/token"}), "tokenFile"),
            (server(), json!({"client-certificate": "/a"}), "client-certificate"),
            (server(), json!({"client-key": "/a"}), "client-key"),
            (json!({"server": "https://a", "certificate-authority": "/a"}), json!({}), "certificate-authority"),
            (json!({"server": "https://a", "proxy-url": "http://b"}), json!({}), "proxy-url"),
        ] {
            match Link::read(&secret("a", "east", &kubeconfig(cluster, user))) {
                Err(LinkError::Refused { field: refused, .. }) => assert_eq!(refused, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn users_that_the_context_does_not_name_run_nothing_either() {
        let mut config: Value = serde_json::from_str(&good()).unwrap();
        let other = json!({"name": "other", "user": {"exec": {"command": "sh"}}});
        config["users"].as_array_mut().unwrap().push(other);
        assert!(Link::read(&secret("a", "east", &config.to_string())).is_err());
    }
}
