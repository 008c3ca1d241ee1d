//! Compares traces and explanations of a case with its verdicts: every counted verdict is traced with the destination
//! that was dialled, and an explanation before a connection matches its verdict.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use weft_proto::agent::{Direction, ExplainRequest};
use weft_test_kit::node::{Node, Watch};

use crate::{
    case::{Act, Case, Given, How, MATE, PEER, POD, Place, Reach, SHIFT},
    check::{outcome, primary},
    fixture::{Column, Counts},
    server::canonical,
};

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between the last event of one case and the first of the next.
const QUIET: Duration = Duration::from_millis(10);

/// Discards events of earlier cases.
pub(crate) fn skip_old(watch: &mut Watch) {
    while watch.try_next(QUIET).is_some() {}
}

/// A case's events, as verdict and dialled destination, until there are as many as were counted, or until the timeout.
pub(crate) fn traced(watch: &mut Watch, case: &Case, counted: &Counts) -> Vec<(String, String)> {
    let (mut traced, begin) = (Vec::new(), Instant::now());
    while !unmatched(case, counted, &traced).is_empty() && begin.elapsed() < PATIENCE {
        if let Some(event) = watch.try_next(PATIENCE) {
            traced.push((label(event.direction(), &event.verdict), event.original_destination));
        }
    }
    traced
}

/// The verdicts that are traced less often than counted: how often they are, and how often they should be.
fn unmatched<'a>(case: &Case, counted: &'a Counts, traced: &[(String, String)]) -> BTreeMap<&'a str, (u64, u64)> {
    // Redirected connections are traced once they have a source port.
    let never = outcome(case, Column::Weft).reach == Reach::Fails("EADDRNOTAVAIL");
    let portless = if never { case.to.len() as u64 } else { 0 };
    let all = counted.iter().map(|(verdict, count)| {
        let times = traced.iter().filter(|(traced, _)| traced == verdict).count() as u64;
        let expected = if verdict == "outbound redirect" { count.saturating_sub(portless) } else { *count };
        (verdict.as_str(), (times, expected))
    });
    all.filter(|(_, (times, expected))| times < expected).collect()
}

/// The label of a verdict in the table.
pub(crate) fn label(direction: Direction, verdict: &str) -> String {
    format!("{} {verdict}", if direction == Direction::Inbound { "inbound" } else { "outbound" })
}

/// Adds a line to `complaints` for every mismatch.
pub(crate) fn check_trace(case: &Case, counted: &Counts, traced: &[(String, String)], complaints: &mut String) {
    // If a load balancer or netfilter comes first, the dialled address is hidden; that is what the row shows. And the
    // answer to a SYN of the pod's own making arrives at a port of the pod.
    let hidden = case.given.iter().any(|given| matches!(given, Given::BalancerBelow | Given::InitRules))
        || matches!(case.act, Act::Dial(How::PacketSyn));
    let first = match case.act {
        Act::Dial(How::After(first) | How::Alternating(first) | How::Beside(first)) | Act::Cancel(first) => Some(first),
        _ => None,
    };
    let targets = case.to.iter().copied().chain(first).filter(|_| !hidden);
    let dialled: BTreeSet<String> =
        targets.filter_map(|to| to.parse().ok()).map(|to| canonical(to).to_string()).collect();
    for verdict in case.verdicts {
        let found = |(label, to): &(String, String)| label == verdict && (dialled.is_empty() || dialled.contains(to));
        if !traced.iter().any(found) {
            let _ = writeln!(complaints, "  no trace of {verdict} to {dialled:?}, only {traced:?}");
        }
    }
    for (verdict, (times, expected)) in unmatched(case, counted, traced) {
        let _ = writeln!(complaints, "  {verdict} is traced {times} times, not {expected}");
    }
}

/// The query about one of a case's connections, and the answers that would be right. None if no query is possible:
/// about processes outside of pods, passed sockets, or existing connections.
pub(crate) fn question(case: &Case, target: &str) -> Option<(ExplainRequest, BTreeSet<String>)> {
    let address = target.parse::<SocketAddr>().ok()?;
    let how = match case.act {
        Act::Dial(How::Fresh | How::RawSyn | How::PacketSyn) | Act::ConnectEarly | Act::Borrow(_) => return None,
        Act::Dial(how) => how,
        Act::CreateEarly | Act::Cancel(_) | Act::Overflow => How::Plain,
    };
    let direction = match case.by.netns {
        _ if case.by.place == Place::Host => return None,
        POD | MATE => Direction::Outbound,
        PEER => Direction::Inbound,
        _ => return None,
    };
    let prefix = if direction == Direction::Inbound { "inbound " } else { "outbound " };
    let mut right: BTreeSet<String> =
        case.verdicts.iter().filter_map(|verdict| verdict.strip_prefix(prefix)).map(str::to_owned).collect();
    let not_tcp = matches!(how, How::Udp | How::Icmp);
    if right.is_empty() {
        let verdict = match () {
            () if case.given.contains(&Given::NoRules) => "pass_not_meshed",
            () if not_tcp => "pass_not_tcp",
            () => return None,
        };
        right.insert(verdict.to_owned());
    }
    let outside: Option<IpAddr> = (direction == Direction::Inbound).then(|| source(case, how, address.ip()));
    let shift = if case.by.place == Place::UserNamespace { SHIFT } else { 0 };
    let in_proxy = case.by.place == Place::Proxy && case.given.contains(&Given::Strict);
    let pod = if direction == Direction::Inbound { POD } else { case.by.netns };
    let request = ExplainRequest {
        pod: Some(Node::pod_ref(pod)),
        direction: direction.into(),
        destination: address.to_string(),
        source: outside.map(|ip| ip.to_string()).unwrap_or_default(),
        uid: (!in_proxy).then_some(case.by.uid + shift),
        gid: (!in_proxy).then_some(case.by.gid + shift),
        as_proxy: in_proxy,
        not_tcp,
        device_bound: matches!(how, How::Device(device) if device != "lo") && case.by.uid != 0,
    };
    Some((request, right))
}

/// The source of a connection from outside.
fn source(case: &Case, how: How, target: IpAddr) -> IpAddr {
    let chosen = match how {
        How::From(end) | How::FromPort(end) => end.parse::<SocketAddr>().ok().map(|end| end.ip()),
        _ => None,
    };
    chosen.unwrap_or_else(|| primary(case.by.netns, target.to_canonical()).parse().unwrap())
}
