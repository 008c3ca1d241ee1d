//! What a cluster must have before the mesh: what the charts themselves ask for when helm installs them
//! (`weft.requireCluster` in the chart), because `weft install` and `weft upgrade` render without a cluster.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use futures::join;
use serde_json::Value;

use super::cluster;
use crate::{
    check,
    cluster::{Cluster, is_ipv6},
    mesh::{Fetched, other_agent::OtherAgent},
    output,
};

/// What a cluster has of that.
pub(super) struct Offer {
    /// Of Kubernetes.
    version: String,
    /// The versions that each custom resource definition serves.
    served: BTreeMap<String, BTreeSet<String>>,
    /// The address of the API server's own Service.
    service_address: Fetched<String>,
    /// Agents of other installations.
    other_agents: Fetched<Vec<OtherAgent>>,
}

impl Offer {
    pub(super) async fn of(cluster: &Cluster) -> Result<Self> {
        let (version, served, service_address, other_agents) = join!(
            cluster::version(cluster),
            cluster::served(cluster),
            cluster.service_address(),
            OtherAgent::list(cluster)
        );
        Ok(Self { version: version?, served: served?, service_address, other_agents })
    }

    /// Notes what this user may not read: few clusters are refused for it, and the installation needs no right to it.
    pub(super) fn note_unknown(&self) {
        self.unknown().iter().for_each(|text| output::note(text));
    }

    fn unknown(&self) -> Vec<String> {
        let address = self.service_address.as_ref().err().map(|problem| {
            format!("Service default/kubernetes: {problem}: where its address is of IPv6, add --set disableIPv6=false")
        });
        let agents = self.other_agents.as_ref().err().map(|problem| {
            format!("DaemonSets of all namespaces: {problem}: where there is another agent of Weft, remove it first")
        });
        address.into_iter().chain(agents).collect()
    }

    /// What is not enough for a mesh with these values, and what to do first. `verb` is `install` or `upgrade`.
    pub(super) fn lack(&self, values: &Value, verb: &str) -> Option<String> {
        let Self { version, served, service_address, other_agents } = self;
        if check::is_too_old(version) {
            return Some(format!(
                "this cluster runs Kubernetes {version}; Weft needs 1.31 or newer, for native sidecars"
            ));
        }
        let definitions = format!("first `weft {verb} --crds | kubectl apply --server-side -f -`");
        let ours = check::our_crds();
        if let Some(first) = ours.keys().find(|name| !served.contains_key(*name)) {
            return Some(format!("custom resource definitions are missing, such as {first}: {definitions}"));
        }
        if let Some(first) = outdated(&ours, served).first() {
            return Some(format!("custom resource definitions are too old: {first}: {definitions}"));
        }
        if let Some(other) = other_agents.iter().flatten().next() {
            return Some(format!("{} {}: {}", other.object(), other.problem(), other.remedy()));
        }
        let is_ipv6 = service_address.as_deref().is_ok_and(is_ipv6) && values["disableIPv6"] == true;
        is_ipv6.then(|| {
            "the first address family of this cluster is IPv6, and disableIPv6 is true: neither probes nor proxies would reach \
             the control plane; add --set disableIPv6=false"
                .to_owned()
        })
    }
}

/// Definitions that do not serve what this version reads. Those that are missing are not among them.
fn outdated(ours: &BTreeMap<String, BTreeSet<String>>, there: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let lacking = ours.iter().filter_map(|(name, versions)| {
        let missing: Vec<_> = versions.difference(there.get(name)?).map(String::as_str).collect();
        (!missing.is_empty()).then(|| format!("{name} does not serve {}", missing.join(", ")))
    });
    lacking.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::mesh::other_agent::tests::alone;

    #[test]
    fn definitions_that_lack_a_version_are_named() {
        let of = |versions: &[&str]| versions.iter().map(|version| (*version).to_owned()).collect::<BTreeSet<_>>();
        let map = |versions: &[&str]| BTreeMap::from([("a".to_owned(), of(versions))]);
        assert_eq!(outdated(&map(&["v1", "v2"]), &map(&["v1"])), ["a does not serve v2"]);
        assert!(outdated(&map(&["v1"]), &map(&["v1", "v2"])).is_empty());
        assert!(outdated(&map(&["v1"]), &BTreeMap::new()).is_empty());
    }

    /// A cluster that has what the charts ask for.
    fn offer() -> Offer {
        Offer {
            version: "v1.31.0".to_owned(),
            served: check::our_crds(),
            service_address: Ok("10.96.0.1".to_owned()),
            other_agents: Ok(Vec::new()),
        }
    }

    #[test]
    fn a_cluster_that_lacks_what_the_charts_ask_for_is_refused_with_what_to_do() {
        let values = json!({"disableIPv6": true});
        assert_eq!(offer().lack(&values, "install"), None);
        let said = |offer: Offer, verb| offer.lack(&values, verb).unwrap();
        let old = said(Offer { version: "v1.30.4".to_owned(), ..offer() }, "upgrade");
        assert!(old.contains("v1.30.4") && old.contains("1.31"), "{old}");
        let mut served = offer().served;
        served.remove("servers.policy.linkerd.io");
        for verb in ["install", "upgrade"] {
            let missing = said(Offer { served: served.clone(), ..offer() }, verb);
            let remedy = format!("weft {verb} --crds");
            assert!(missing.contains("servers.policy.linkerd.io") && missing.contains(&remedy), "{missing}");
        }
        served.insert("servers.policy.linkerd.io".to_owned(), ["v1beta1".to_owned()].into());
        let outdated = said(Offer { served, ..offer() }, "upgrade");
        assert!(
            outdated.contains("does not serve")
                && outdated.contains("v1beta3")
                && outdated.contains("weft upgrade --crds"),
            "{outdated}"
        );
        let second = said(Offer { other_agents: Ok(vec![alone()]), ..offer() }, "install");
        assert!(
            second.contains("DaemonSet linkerd-cni/linkerd-cni") && second.contains("cniEnabled=false"),
            "{second}"
        );
        let ipv6 = || Offer { service_address: Ok("fd00::1".to_owned()), ..offer() };
        assert!(said(ipv6(), "install").contains("--set disableIPv6=false"));
        assert_eq!(ipv6().lack(&json!({"disableIPv6": false}), "install"), None);
    }

    #[test]
    fn what_a_user_may_not_read_is_noted_and_refuses_nothing() {
        let refused = || "forbidden".to_owned();
        let unread = Offer { service_address: Err(refused()), other_agents: Err(refused()), ..offer() };
        assert_eq!(unread.lack(&json!({"disableIPv6": true}), "install"), None);
        let [address, agents] = unread.unknown().try_into().unwrap();
        assert!(
            address.contains("default/kubernetes: forbidden") && address.contains("disableIPv6=false"),
            "{address}"
        );
        assert!(agents.contains("DaemonSets of all namespaces: forbidden"), "{agents}");
        assert!(offer().unknown().is_empty());
    }
}
