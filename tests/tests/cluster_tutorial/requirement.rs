//! Requirements that not every cluster meets. A check that has one states it, and where the cluster does not meet it,
//! the check is reported as ignored, with the reason. A cluster that was made by `cargo xtask test` meets all of them:
//! there the check fails.

use weft_test_kit::check::requires_all;
use weft_tests::cluster::Cluster;

use crate::kernel;

/// The reason why [`Requirement::LocalNodes`] is not met.
pub(super) const NODES_ELSEWHERE: &str = "the nodes of this cluster are not on this host";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requirement {
    /// The API server's audit log is a file on this host.
    AuditLog,
    /// The nodes are on this host, which shares its kernel, its processes and its files with them.
    LocalNodes,
    /// At least this many nodes.
    Nodes(usize),
}

impl Requirement {
    /// The reason why the cluster does not meet it; `None` if it does.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub(super) fn missing(self, cluster: &Cluster) -> anyhow::Result<Option<String>> {
        Ok(match self {
            Self::AuditLog if cluster.has_audit_log() => None,
            Self::AuditLog => Some("the audit log of this cluster is not on this host".to_owned()),
            Self::LocalNodes if kernel::kubelets().is_empty() => Some(NODES_ELSEWHERE.to_owned()),
            Self::LocalNodes => None,
            Self::Nodes(wanted) => {
                let nodes = cluster.get(&["nodes"])?["items"].as_array().map_or(0, Vec::len);
                (nodes < wanted).then(|| format!("the cluster has {nodes} of {wanted} nodes"))
            }
        })
    }

    /// Whether the cluster meets it, for a part of a check, which is left out otherwise.
    pub(super) fn allows(self, part: &str, cluster: &Cluster) -> bool {
        let missing = self.missing(cluster).unwrap();
        if let Some(reason) = &missing {
            leave_out(part, reason);
        }
        missing.is_none()
    }
}

/// Prints which part of a check is left out, and why.
///
/// # Panics
/// Where every requirement has to be met.
pub(super) fn leave_out(part: &str, reason: &str) {
    assert!(!requires_all(), "{part}: {reason}");
    println!("  left out: {part}: {reason}");
}
