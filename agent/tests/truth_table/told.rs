//! What traces and explanations say about a case, held against its verdicts: every verdict that the agent counts is
//! traced with the destination that was dialled, and what is explained beforehand is what happens.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use weft_proto::agent::{Direction, Event, ExplainRequest, PodRef};

use crate::{
    case::{Act, Case, Given, How, MATE, PEER, POD, Place, SHIFT},
    check::primary,
    server::canonical,
    world::Watch,
};

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between the last event of one case and the first of the next.
const QUIET: Duration = Duration::from_millis(30);

/// Leaves earlier cases behind: their events, and late segments of their connections.
pub(crate) fn skip_old(watch: &mut Watch<'_>) {
    while watch.try_next(QUIET).is_some() {}
}

/// Events until each of the case's verdicts was traced, or for as long as one may wait.
pub(crate) fn traced(watch: &mut Watch<'_>, case: &Case) -> BTreeSet<(String, String)> {
    let (mut seen, begin) = (BTreeSet::new(), Instant::now());
    while case.verdicts.iter().any(|verdict| !seen.iter().any(|(label, _)| label == verdict))
        && begin.elapsed() < PATIENCE
    {
        if let Some(event) = watch.try_next(PATIENCE) {
            seen.insert((label(&event), event.original_destination));
        }
    }
    seen
}

fn label(event: &Event) -> String {
    format!("{} {}", if event.direction() == Direction::Inbound { "inbound" } else { "outbound" }, event.verdict)
}

/// Compares; nothing said is what should be.
pub(crate) fn check_trace(case: &Case, seen: &BTreeSet<(String, String)>, complaints: &mut String) {
    // Where a balancer or netfilter comes first, what was dialled is hidden; that is the point of the row.
    let hidden = case.given.iter().any(|given| matches!(given, Given::BalancerBelow | Given::InitRules));
    let first = match case.act {
        Act::Dial(How::After(first) | How::Alternating(first) | How::Beside(first)) | Act::Cancel(first) => Some(first),
        _ => None,
    };
    let targets = case.to.iter().copied().chain(first).filter(|_| !hidden);
    let dialled: BTreeSet<String> =
        targets.filter_map(|to| to.parse().ok()).map(|to| canonical(to).to_string()).collect();
    for verdict in case.verdicts {
        let found = |(label, to): &(String, String)| label == verdict && (dialled.is_empty() || dialled.contains(to));
        if !seen.iter().any(found) {
            let _ = writeln!(complaints, "  no trace of {verdict} to {dialled:?}, only {seen:?}");
        }
    }
}

/// The question about one of a case's connections, and the answers that would be right. None where there is none to ask:
/// about processes outside of pods, passed sockets, or connections that are there already.
pub(crate) fn question(case: &Case, target: &str) -> Option<(ExplainRequest, BTreeSet<String>)> {
    let address = target.parse::<SocketAddr>().ok()?;
    let how = match case.act {
        Act::Dial(How::Fresh) | Act::ConnectEarly | Act::Borrow(_) => return None,
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
        pod: Some(PodRef { namespace: "test".into(), name: pod.into() }),
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

/// Where a connection from outside comes from.
fn source(case: &Case, how: How, target: IpAddr) -> IpAddr {
    let chosen = match how {
        How::From(end) | How::FromPort(end) => end.parse::<SocketAddr>().ok().map(|end| end.ip()),
        _ => None,
    };
    chosen.unwrap_or_else(|| primary(case.by.netns, target.to_canonical()).parse().unwrap())
}
