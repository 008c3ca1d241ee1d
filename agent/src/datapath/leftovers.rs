//! What the programs leave in maps that nothing but the agent removes: hand-overs of connections that never came to be, and
//! admissions of network namespaces.

use std::collections::BTreeSet;

use aya::maps::MapError;
use weft_ebpf_abi::{
    map,
    pod::{self, AdmissionKey},
    socket::FlowKey,
};

use super::{Datapath, DatapathError, absent_is_fine, reading, writing};

impl Datapath {
    /// Removes admissions of namespaces that are gone, and of those that an agent enrolled since.
    pub(super) fn remove_admissions(
        &mut self,
        admissions: Vec<(AdmissionKey, u64)>,
        gone: &[u64],
    ) -> Result<(), DatapathError> {
        for (key, cookie) in admissions {
            if gone.contains(&cookie) || self.entry(cookie)?.is_some_and(|entry| !entry.has(pod::SELF_ENROLLED)) {
                absent_is_fine(self.admissions.remove(&key)).map_err(writing(map::ADMISSIONS))?;
            }
        }
        Ok(())
    }

    /// Removes what connections left that never came to be, of pods that are gone: one pass for all that left since the
    /// last time, as the map has room for thousands.
    pub(super) fn remove_stale_flows(&mut self) -> Result<(), DatapathError> {
        if !std::mem::take(&mut self.flows_may_be_stale) {
            return Ok(());
        }
        // Flows first: a pod is there before its flows are. Entries that come and go meanwhile are the kernel's business.
        let flows: Vec<FlowKey> = self.flows.keys().filter_map(Result::ok).collect();
        let pods: Result<BTreeSet<u64>, MapError> = self.entries.keys().collect();
        let pods = pods.map_err(reading(map::PODS))?;
        for key in flows.into_iter().filter(|key| !pods.contains(&key.netns_cookie)) {
            absent_is_fine(self.flows.remove(&key)).map_err(writing(map::FLOWS))?;
        }
        Ok(())
    }
}
