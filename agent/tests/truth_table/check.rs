//! Compares the outcome of a case with the expected one. Observations have names:
//!
//! | Name | What |
//! |---|---|
//! | `error` | why the client's call failed |
//! | `listener` | the port of the server that answered |
//! | `orig` | SO_ORIGINAL_DST as linkerd's proxy asks for it, on the accepted socket |
//! | `accepted-local`, `accepted-peer` | the accepted socket's two ends |
//! | `peername`, `sockname` | the client's two ends |
//! | `own-orig` | SO_ORIGINAL_DST on the client's socket |
//! | `own-orig-is` | whether that is the socket's `local` address, its `peer`, or neither |
//! | `source` | the address in `sockname` |
//! | `same-source` | whether `sockname` and `accepted-peer` are the same |
//! | `syn-data` | whether the SYN carried data |
//! | `syn-ack` | the address that answered a SYN on a raw or packet socket |
//! | `ask:LEVEL/ROOM`, `own:LEVEL/ROOM` | SO_ORIGINAL_DST with that room, as `LENGTH:ADDRESS`, of the accepted socket and of the client's |
//! | `kernel:COUNTER` | whether a counter of the pod's kernel moved |

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use crate::{
    case::{Act, Case, Given, How, INBOUND_PORT, MATE, NESTED, OUTBOUND_PORT, OWN, Outcome, PEER, POD, Place, Reach},
    fixture::{Column, Findings},
    server::canonical,
    trace,
};

/// Observations that every connection of a case has.
type Observations = BTreeMap<String, String>;

/// Compares the outcome of a case with the expected one; the error lists every observation that differs.
pub(crate) fn check(case: &Case, column: Column, findings: &Findings) -> Result<(), String> {
    let outcome = outcome(case, column);
    let mut complaints = String::new();
    for (target, answer) in case.to.iter().zip(&findings.answers) {
        let observed = observed(&answer.0, findings);
        for (name, expected) in expected(case, &outcome, column, target) {
            let found = observed.get(&name).map_or("nothing", String::as_str);
            if found != expected {
                let _ = writeln!(complaints, "  {target}: {name} is {found}, not {expected}");
            }
        }
        if observed.contains_key("error") && !matches!(outcome.reach, Reach::Fails(_)) {
            let _ = writeln!(complaints, "  {target}: {}", observed["error"]);
        }
    }
    if column == Column::Weft {
        check_verdicts(case, findings, &mut complaints);
        trace::check_trace(case, &findings.verdicts, &findings.traced, &mut complaints);
        for (target, right, explained) in &findings.explained {
            if !right.contains(explained) {
                let _ = writeln!(complaints, "  {target}: explained as {explained}, not {right:?}");
            }
        }
    }
    if complaints.is_empty() { Ok(()) } else { Err(format!("{complaints}  all of it: {findings:?}")) }
}

/// The outcome that a case expects in a column.
pub(crate) fn outcome(case: &Case, column: Column) -> Outcome {
    match (column, &case.differs) {
        (Column::Weft, Some(difference)) => difference.weft,
        _ => case.outcome,
    }
}

fn check_verdicts(case: &Case, findings: &Findings, complaints: &mut String) {
    let expected: BTreeSet<&str> = case.verdicts.iter().copied().collect();
    let moved: BTreeSet<&str> = findings.verdicts.keys().map(String::as_str).collect();
    if moved != expected {
        let _ = writeln!(complaints, "  verdicts are {moved:?}, not {expected:?}");
    } else if counts_exactly(case) {
        let connections = case.to.len() as u64;
        for (verdict, count) in findings.verdicts.iter().filter(|(_, count)| **count != connections) {
            let _ = writeln!(complaints, "  {verdict} counts {count} of {connections} connections");
        }
    }
}

/// Whether each target stands for one connection and one lookup. With SYN cookies, the last segment of the handshake is
/// looked up like the first.
fn counts_exactly(case: &Case) -> bool {
    if case.given.iter().any(|given| matches!(given, Given::Sysctl(..))) {
        return false;
    }
    match case.act {
        Act::Dial(how) => !matches!(how, How::Alternating(_) | How::Beside(_) | How::After(_)),
        Act::ConnectEarly | Act::CreateEarly | Act::Borrow(_) => true,
        Act::Cancel(_) | Act::Overflow => false,
    }
}

fn observed(answer: &Observations, findings: &Findings) -> Observations {
    let mut observed = answer.clone();
    let socket = |name: &str| answer.get(name).and_then(|text| text.parse().ok()).map(canonical);
    if let Some(local) = socket("sockname") {
        observed.insert("source".into(), local.ip().to_string());
        let is = match socket("own-orig") {
            Some(original) if original == local => "local",
            original if original.is_some() && original == socket("peername") => "peer",
            _ => "neither",
        };
        observed.insert("own-orig-is".into(), is.into());
        if let Some(peer) = socket("accepted-peer") {
            observed.insert("same-source".into(), (local == peer).to_string());
        }
    }
    for counter in findings.kernel.keys() {
        observed.insert(format!("kernel:{counter}"), "true".into());
    }
    observed
}

fn expected(case: &Case, outcome: &Outcome, column: Column, target: &str) -> Observations {
    let mut expected = Observations::new();
    let mut expect = |name: &str, value: String| {
        expected.insert(name.to_owned(), value);
    };
    // Only the observations in `but` may have a target that is not an address, such as one with a device's name.
    let address: Option<SocketAddr> = target.parse().ok();
    if let Some(address) = address {
        let dialled = canonical(address);
        let loopback = if dialled.is_ipv4() { "127.0.0.1" } else { "[::1]" };
        let port = match outcome.reach {
            Reach::Outbound => Some(OUTBOUND_PORT),
            Reach::Inbound => Some(INBOUND_PORT),
            Reach::Direct => Some(address.port()),
            Reach::Seen | Reach::Fails(_) => None,
        };
        if let Some(port) = port {
            expect("listener", port.to_string());
            // Connection tracking changes the port if two redirected connections, this one and any of the last minutes,
            // would have the same reply.
            if column == Column::Weft || outcome.reach == Reach::Direct {
                expect("same-source", true.to_string());
            }
            expect("peername", address.to_string());
            if tells_own(case) {
                expect("own-orig", dialled.to_string());
            }
        }
        match outcome.reach {
            Reach::Outbound => {
                expect("orig", dialled.to_string());
                expect("accepted-local", format!("{loopback}:{OUTBOUND_PORT}"));
                expect("source", primary(case.by.netns, dialled.ip()).to_owned());
            }
            Reach::Inbound => {
                expect("orig", dialled.to_string());
                expect("source", primary(case.by.netns, dialled.ip()).to_owned());
                let local = match column {
                    Column::Iptables => SocketAddr::new(interface(dialled.ip()), INBOUND_PORT),
                    Column::Weft => dialled,
                };
                expect("accepted-local", local.to_string());
            }
            Reach::Direct => {
                expect("accepted-local", dialled.to_string());
                let own = OWN.contains(&dialled.ip().to_string().as_str()) || dialled.ip().is_loopback();
                if own && in_force(case) && case.act != Act::ConnectEarly {
                    expect("orig", dialled.to_string());
                }
            }
            Reach::Seen | Reach::Fails(_) => {}
        }
    }
    if let Reach::Fails(errno) = outcome.reach {
        expect("error", errno.to_owned());
    }
    for (name, value) in outcome.but {
        expect(name, (*value).to_owned());
    }
    expected
}

/// Whether interception is in force in a case.
fn in_force(case: &Case) -> bool {
    !case.given.iter().any(|given| matches!(given, Given::NoRules | Given::Bypassed | Given::NodeBypassed))
}

/// Whether a client's own socket returns the original destination, in both columns: not without interception, not the
/// proxy's (row S9), and not an MPTCP socket (row K5).
fn tells_own(case: &Case) -> bool {
    let of_proxy = case.verdicts.iter().any(|verdict| verdict.starts_with("outbound pass_proxy"));
    let watched = case.by.netns == POD && case.by.place != Place::Host && case.act != Act::ConnectEarly;
    in_force(case) && watched && !of_proxy && case.act != Act::Dial(How::Multipath)
}

/// The source address of most routes of a namespace.
pub(crate) fn primary(netns: &str, target: IpAddr) -> &'static str {
    match (netns, target.is_ipv4()) {
        (POD, true) => "10.99.0.2",
        (POD, false) => "fd99::2",
        (PEER, true) => "10.99.0.3",
        (PEER, false) => "fd99::3",
        (MATE, true) => "10.98.0.4",
        (MATE, false) => "fd98::4",
        (NESTED, _) => "10.97.0.5",
        _ => "unknown",
    }
}

/// The destination to which REDIRECT changes connections to an address: the first IPv4 address of the interface at
/// which they arrive, or the IPv6 address that was added last.
fn interface(target: IpAddr) -> IpAddr {
    let text = target.to_string();
    let primary = match text.as_str() {
        "10.99.0.22" => "10.99.0.2",
        "fd99::2" => "fd99::22",
        other => other,
    };
    primary.parse().unwrap()
}
