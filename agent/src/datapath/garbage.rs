//! What is left in the maps when its owner is gone: entries of network namespaces, flows, clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use weft_ebpf_abi::pod::{self, Pod};

use super::{Datapath, DatapathError, handle::Collected};

/// How long a namespace that the kernel enrolled is known before it is suspect.
const SELF_ENROLLED_GRACE: Duration = Duration::from_secs(60);

/// How long a connection may wait in a proxy's accept queue before the agent forgets its original destination: longer
/// than clients wait for an answer.
const ABANDONED: Duration = Duration::from_secs(300);

/// How often clients whose connect(2) failed are looked for, which takes two system calls for each open connection.
const CLIENTS_PERIOD: Duration = Duration::from_secs(60);

pub(super) fn collect(datapath: &mut Datapath) -> Result<Collected, DatapathError> {
    let now = Instant::now();
    let entries: BTreeMap<u64, Pod> = datapath.maps.entries()?.into_iter().collect();
    let directories = datapath.pins.pods()?.into_iter().map(|(cookie, _)| cookie);
    let cookies: BTreeSet<u64> = entries.keys().copied().chain(directories).collect();
    let (mut suspects, mut removed) = (BTreeMap::new(), Vec::new());
    for cookie in cookies {
        match (datapath.is_gone(cookie)?, entries.get(&cookie)) {
            (Some(false), _) => {}
            // The kernel's, or one whose enrolment was interrupted: without its entry a pod that lives would be open.
            (None, Some(entry)) => {
                let grace = if entry.has(pod::SELF_ENROLLED) { SELF_ENROLLED_GRACE } else { Duration::ZERO };
                suspects.insert(cookie, now + grace);
            }
            (Some(true), _) | (None, None) => {
                datapath.remove(cookie)?;
                removed.push(cookie);
            }
        }
    }
    let admissions = datapath.maps.admissions()?;
    // A proxy that bound its inbound port alone has no entry, and its namespace may end without one.
    for (_, cookie) in admissions.iter().filter(|(_, cookie)| !entries.contains_key(cookie)) {
        suspects.insert(*cookie, now + SELF_ENROLLED_GRACE);
    }
    for (cookie, since) in &mut suspects {
        if let Some(known) = datapath.suspects.get(cookie) {
            *since = (*since).min(*known);
        }
    }
    datapath.suspects = suspects;
    let suspects = datapath.suspects.iter().filter(|(_, since)| **since <= now).map(|(cookie, _)| *cookie).collect();
    datapath.maps.remove_admissions(admissions, &removed)?;
    datapath.listeners.collect_garbage()?;
    if std::mem::take(&mut datapath.flows_may_be_stale) {
        datapath.maps.remove_stale_flows()?;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::try_from(now).unwrap_or_default();
    datapath.maps.remove_abandoned(now, ABANDONED)?;
    if datapath.clients_due <= now {
        datapath.maps.remove_failed_clients(now, ABANDONED)?;
        datapath.clients_due = now + CLIENTS_PERIOD;
    }
    Ok(Collected { removed, suspects })
}

pub(super) fn remove_absent(datapath: &mut Datapath, absent: &BTreeSet<u64>) -> Result<Vec<u64>, DatapathError> {
    // One that an agent has enrolled since then has a link.
    let absent: Vec<u64> = absent.iter().copied().filter(|it| datapath.suspects.contains_key(it)).collect();
    absent.iter().try_for_each(|cookie| datapath.remove(*cookie))?;
    let admissions = datapath.maps.admissions()?;
    datapath.maps.remove_admissions(admissions, &absent)?;
    Ok(absent)
}
