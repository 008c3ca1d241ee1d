//! What is left in the maps when its owner is gone: entries of network namespaces, flows, clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use weft_ebpf_abi::pod;

use super::{Datapath, DatapathError, handle::Collected};

/// How long a namespace that the kernel enrolled is kept before the first check that it still exists.
const SELF_ENROLLED_GRACE: Duration = Duration::from_secs(60);

/// How long a connection may wait in a proxy's accept queue before the agent forgets its original destination: longer
/// than clients wait for an answer.
const ABANDONED: Duration = Duration::from_secs(300);

/// How often clients whose connect(2) failed are looked for, which takes two system calls for each open connection.
const CLIENTS_PERIOD: Duration = Duration::from_secs(60);

pub(super) fn collect(datapath: &mut Datapath) -> Result<Collected, DatapathError> {
    let mut cookies: BTreeSet<u64> = datapath.pins.pods()?.into_iter().map(|(cookie, _)| cookie).collect();
    let mut self_enrolled = BTreeMap::new();
    for (cookie, entry) in datapath.maps.entries()? {
        if entry.has(pod::SELF_ENROLLED) && !cookies.contains(&cookie) {
            let first_seen = datapath.self_enrolled.get(&cookie).copied();
            self_enrolled.insert(cookie, first_seen.unwrap_or_else(Instant::now));
        } else {
            // An entry without a directory is left over from a crash in `remove`.
            cookies.insert(cookie);
        }
    }
    let admissions = datapath.maps.admissions()?;
    for (_, cookie) in &admissions {
        // A proxy that bound its inbound port alone has no entry, and its namespace may end without one.
        if datapath.maps.entry(*cookie)?.is_none() {
            let first_seen = datapath.self_enrolled.get(cookie).copied();
            self_enrolled.insert(*cookie, first_seen.unwrap_or_else(Instant::now));
        }
    }
    datapath.self_enrolled = self_enrolled;
    let mut removed = Vec::new();
    for cookie in cookies {
        if datapath.is_gone(cookie)? {
            datapath.remove(cookie)?;
            removed.push(cookie);
        }
    }
    let is_old = |seen: &Instant| seen.elapsed() > SELF_ENROLLED_GRACE;
    let suspects = datapath.self_enrolled.iter().filter(|(_, seen)| is_old(seen)).map(|(cookie, _)| *cookie).collect();
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
    let absent: Vec<u64> = absent.iter().copied().filter(|it| datapath.self_enrolled.contains_key(it)).collect();
    absent.iter().try_for_each(|cookie| datapath.remove(*cookie))?;
    let admissions = datapath.maps.admissions()?;
    datapath.maps.remove_admissions(admissions, &absent)?;
    Ok(absent)
}
