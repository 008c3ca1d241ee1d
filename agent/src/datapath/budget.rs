//! How many entries in the maps of rules the pods of one namespace may have. A pod's owner chooses its skipped ports
//! and subnets, and the maps are the node's: without a limit, one tenant's pods could leave no room for those of
//! others.
//!
//! Half of a map is kept for pods with few entries, which nearly all pods are. Pods with more share the other half, and
//! those of one namespace may have a quarter of that.

use weft_ebpf_abi::{map, pod};

/// The most entries of a pod with few.
pub(crate) const FEW: usize = 8;

/// A map of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleMap {
    name: &'static str,
    entries: u32,
}

/// Skipped ports, in blocks.
pub(crate) const PORTS: RuleMap = RuleMap { name: map::PORTS, entries: pod::MAX_PORT_BLOCKS };
/// Skipped subnets.
pub(crate) const SUBNETS: RuleMap = RuleMap { name: map::SUBNETS, entries: pod::MAX_SUBNETS };

/// A pod's rules have too many entries beside those of other pods.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its {wanted} entries in map {map} are more than are left: {whose} with more than {FEW} each have {used} of {limit} on \
     this node. Skip fewer ports that are far apart, ranges of ports, or fewer and larger subnets"
)]
pub(crate) struct OverBudget {
    wanted: usize,
    map: &'static str,
    whose: String,
    used: usize,
    limit: usize,
}

impl RuleMap {
    /// What all pods with more than a few entries may have.
    const fn shared(self) -> usize {
        self.entries as usize / 2
    }

    /// What those of one namespace may have.
    const fn of_one_namespace(self) -> usize {
        self.shared() / 4
    }

    /// Whether a pod of this namespace may have `wanted` entries in addition to `others`: the namespaces of the node's
    /// other pods, as far as they are known, and their entries.
    ///
    /// # Errors
    /// Names the limit that would be exceeded.
    pub(crate) fn admit<'a>(
        self,
        namespace: &str,
        wanted: usize,
        others: impl Iterator<Item = (Option<&'a str>, usize)>,
    ) -> Result<(), OverBudget> {
        if wanted <= FEW {
            return Ok(());
        }
        let (mut of_all, mut of_namespace) = (0, 0);
        for (other, entries) in others.filter(|(_, entries)| *entries > FEW) {
            of_all += entries;
            if other == Some(namespace) {
                of_namespace += entries;
            }
        }
        for (used, limit, whose) in [
            (of_namespace, self.of_one_namespace(), format!("the pods of namespace {namespace}")),
            (of_all, self.shared(), "all pods".to_owned()),
        ] {
            if used + wanted > limit {
                return Err(OverBudget { wanted, map: self.name, whose, used, limit });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: RuleMap = RuleMap { name: "MAP", entries: 800 };

    fn admit(namespace: &str, wanted: usize, others: &[(&str, usize)]) -> Result<(), String> {
        let others = others.iter().map(|(namespace, entries)| (Some(*namespace), *entries));
        MAP.admit(namespace, wanted, others).map_err(|error| error.to_string())
    }

    #[test]
    fn a_namespace_has_a_quarter_of_what_pods_with_many_entries_share() {
        assert_eq!(admit("a", 64, &[("a", 36), ("b", 64)]), Ok(()));
        let refused = admit("a", 65, &[("a", 36), ("b", 64)]).unwrap_err();
        assert!(refused.contains("its 65 entries in map MAP") && refused.contains("namespace a"), "{refused}");
        assert!(refused.contains("have 36 of 100"), "{refused}");
    }

    #[test]
    fn half_of_the_map_is_kept_for_pods_with_few_entries() {
        let many = [("a", 100), ("b", 100), ("c", 100), ("d", 90)];
        assert_eq!(admit("e", 10, &many), Ok(()));
        assert!(admit("e", 11, &many).unwrap_err().contains("all pods with more than 8 each have 390 of 400"));
        assert_eq!(admit("a", FEW, &many), Ok(()));
    }

    #[test]
    fn pods_with_few_entries_do_not_count() {
        let few: Vec<_> = std::iter::repeat_n(("a", FEW), 90).collect();
        assert_eq!(admit("a", 64, &few), Ok(()));
    }

    #[test]
    fn pods_without_a_name_count_for_all() {
        let unknown = std::iter::repeat_n((None, 64), 6);
        assert!(MAP.admit("a", 17, unknown.clone()).is_err());
        assert_eq!(MAP.admit("a", 16, unknown), Ok(()));
    }
}
