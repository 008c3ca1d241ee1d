//! What the kernel would decide about a connection, and why: the programs' own decision functions, run on the live
//! maps. Owns the texts. Refuses to send anything.

use std::net::{IpAddr, SocketAddr};

use weft_ebpf_abi::{
    address::Address,
    decision::{Arrival, Caller, Connect, decide_connect, decide_inbound},
    pod::Pod,
    verdict::{Direction, Verdict},
};
use weft_k8s_api::labels;

use crate::datapath::{Datapath, DatapathError, rules::PodName};

/// A user and group that no proxy has: ids are below this.
pub(crate) const NOBODY: u32 = u32::MAX;

/// A hypothetical connection, validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) pod: PodName,
    pub(crate) direction: Direction,
    pub(crate) destination: SocketAddr,
    pub(crate) source: Option<IpAddr>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) as_proxy: bool,
    pub(crate) not_tcp: bool,
    pub(crate) device_bound: bool,
}

/// The predicted decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) verdict: Verdict,
    /// `None` if the connection would be refused.
    pub(crate) new_destination: Option<SocketAddr>,
    pub(crate) reason: String,
    /// Empty if there is nothing to change.
    pub(crate) change: String,
}

/// Answers from the kernel's maps.
///
/// # Errors
/// When they cannot be read.
pub(crate) fn explain(datapath: &Datapath, question: &Question) -> Result<Answer, DatapathError> {
    let Some((cookie, entry)) = datapath.find(&question.pod)? else {
        return Ok(answer(question, None, question.destination, Verdict::PassNotMeshed));
    };
    let destination = own_end(question, &entry);
    let verdict = match question.direction {
        Direction::Outbound => connect_verdict(datapath, question, cookie, &entry, destination)?,
        Direction::Inbound => inbound_verdict(datapath, question, cookie, &entry, destination)?,
    };
    Ok(answer(question, Some(&entry), destination, verdict))
}

fn connect_verdict(
    datapath: &Datapath,
    question: &Question,
    cookie: u64,
    entry: &Pod,
    destination: SocketAddr,
) -> Result<Verdict, DatapathError> {
    let skips_port = datapath.maps().skips_port(cookie, entry, Direction::Outbound, destination.port())?;
    let connect = Connect {
        node_bypassed: datapath.maps().bypassed()?,
        caller: caller(question, entry),
        bound_to_device: question.device_bound,
    };
    let address = Address::from(destination.ip());
    let decision = decide_connect(!question.not_tcp, Some(entry), &address, || connect, || skips_port);
    // The hypothetical caller has no CAP_NET_RAW.
    Ok(if decision.release { Verdict::DenyDevice } else { decision.verdict })
}

fn inbound_verdict(
    datapath: &Datapath,
    question: &Question,
    cookie: u64,
    entry: &Pod,
    destination: SocketAddr,
) -> Result<Verdict, DatapathError> {
    if question.not_tcp {
        return Ok(Verdict::PassNotTcp);
    }
    // Without the link, no program runs. With it, one does, before the entry's inbound bit is set.
    if !datapath.steers(cookie)? {
        return Ok(Verdict::PassNotMeshed);
    }
    let (local, port) = (Address::from(destination.ip()), destination.port());
    let client = question.source.map_or_else(|| stranger(&local), Address::from);
    let skips_port = datapath.maps().skips_port(cookie, entry, Direction::Inbound, port)?;
    let skips_subnet = datapath.maps().skips_subnet(cookie, entry, &client)?;
    let listens = datapath.listens(cookie, entry, port)?;
    let bypassed = datapath.maps().bypassed()?;
    let arrival = Arrival { client: &client, local: &local, port };
    let decision = decide_inbound(Some(entry), &arrival, || bypassed, |_| listens, || skips_port, || skips_subnet);
    match decision.steer_to {
        Some(port) if !datapath.accepts(cookie, entry, port, local.is_v4())? => Ok(Verdict::DenyNoListener),
        _ => Ok(decision.verdict),
    }
}

/// The destination; inbound, an unspecified address is replaced with the pod's own.
fn own_end(question: &Question, entry: &Pod) -> SocketAddr {
    let destination = question.destination;
    if question.direction == Direction::Outbound || !destination.ip().is_unspecified() {
        return destination;
    }
    let own = entry.addresses.into_iter().filter(|address| *address != Address::UNSPECIFIED).map(IpAddr::from);
    let mut of_family = own.filter(|ip| ip.is_ipv4() == destination.is_ipv4());
    SocketAddr::new(of_family.next().unwrap_or(destination.ip()), destination.port())
}

fn caller(question: &Question, entry: &Pod) -> Caller {
    if question.as_proxy {
        return Caller { uid: entry.proxy_uid, gid: entry.proxy_gid, cgroup: entry.proxy_cgroup };
    }
    // Ids of cgroups start at 1.
    Caller { uid: question.uid, gid: question.gid, cgroup: 0 }
}

/// A client address that is not the pod's and belongs to no host (RFC 5737, RFC 3849).
fn stranger(own: &Address) -> Address {
    if own.is_v4() {
        IpAddr::from([192, 0, 2, 1]).into()
    } else {
        IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]).into()
    }
}

fn answer(question: &Question, entry: Option<&Pod>, destination: SocketAddr, verdict: Verdict) -> Answer {
    let new_destination = match (verdict, entry) {
        (verdict, _) if verdict.is_refusal() => None,
        (Verdict::Redirect, Some(entry)) => Some(match question.direction {
            Direction::Inbound => SocketAddr::new(destination.ip(), entry.inbound_port),
            Direction::Outbound if destination.ip().to_canonical().is_ipv4() => {
                SocketAddr::from(([127, 0, 0, 1], entry.outbound_port))
            }
            Direction::Outbound => SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], entry.outbound_port)),
        }),
        _ => Some(destination),
    };
    let (reason, change) = sentences(question, entry, destination, verdict);
    Answer { verdict, new_destination, reason, change }
}

/// The reason, and what to change.
fn sentences(question: &Question, entry: Option<&Pod>, destination: SocketAddr, verdict: Verdict) -> (String, String) {
    let port = destination.port();
    let outbound = question.direction == Direction::Outbound;
    let skip_ports = if outbound { labels::SKIP_OUTBOUND_PORTS } else { labels::SKIP_INBOUND_PORTS };
    let (reason, change) = match verdict {
        Verdict::Redirect if outbound => (
            "no rule exempts it, so the proxy dials on the application's behalf".to_owned(),
            format!("to leave this port alone, add {port} to the pod's annotation {skip_ports}"),
        ),
        Verdict::Redirect => (
            "no rule exempts it, so the proxy accepts it on the application's behalf".to_owned(),
            format!(
                "to leave this port alone, add {port} to the pod's annotation {skip_ports}; to leave a client alone, add \
                 its network to {}",
                labels::SKIP_SUBNETS
            ),
        ),
        Verdict::PassProxy => (
            format!("user {} is the pod's proxy, whose own connections are never redirected", question_uid(question, entry)),
            format!(
                "if that is not the proxy: give the application another user, or set {}: cgroup",
                labels::PROXY_EXEMPTION
            ),
        ),
        Verdict::PassProxyGroup => (
            "the caller's group is the proxy's, whose own connections are never redirected".to_owned(),
            format!("if that is not the proxy: give it another group, or remove {}", labels::PROXY_GID_ANNOTATION),
        ),
        Verdict::PassProxyCgroup => {
            ("the caller runs in the proxy's container, whose own connections are never redirected".to_owned(), String::new())
        }
        Verdict::PassLoopback => (
            "loopback, and 0.0.0.0 or :: which mean the same, never leave the pod".to_owned(),
            "to go through the proxy, dial the pod's Service".to_owned(),
        ),
        Verdict::PassOwnAddress => (
            format!("{} is the pod's own address, which the kernel reaches over loopback", destination.ip()),
            "to go through the proxy, dial the pod's Service".to_owned(),
        ),
        Verdict::PassSkipPort => (
            format!("port {port} is skipped"),
            format!(
                "remove it from the pod's annotation {skip_ports}, or from the chart's value proxyInit.ignore{}Ports if \
                 the pod has none; the proxy's own ports are skipped inbound while it listens there",
                if outbound { "Outbound" } else { "Inbound" }
            ),
        ),
        Verdict::PassSkipSubnet => (
            "the client's network is skipped".to_owned(),
            format!(
                "remove it from the pod's annotation {}, or from the chart's value proxyInit.skipSubnets if the pod has none",
                labels::SKIP_SUBNETS
            ),
        ),
        Verdict::PassPodBypassed => (
            "this pod's redirection is switched off: plain text, without policy".to_owned(),
            format!("remove the pod's annotation {}", labels::BYPASS),
        ),
        Verdict::PassNodeBypassed => (
            "all redirection on this node is switched off: plain text, without policy".to_owned(),
            "run `weft-agent bypass off` in the node's agent".to_owned(),
        ),
        Verdict::DenyNoListener => (
            "the proxy does not listen, and nothing may go around it".to_owned(),
            "see whether the container linkerd-proxy runs: `kubectl describe pod`, `kubectl logs -c linkerd-proxy`".to_owned(),
        ),
        Verdict::DenyNoMemory => ("the kernel had no memory".to_owned(), "free some memory on the node".to_owned()),
        Verdict::DenyUnknownPod => (
            "the pod's entry is gone from the kernel".to_owned(),
            "restart the node's agent, which writes it again".to_owned(),
        ),
        Verdict::DenyDevice => (
            "the socket is bound to a device through which the proxy cannot be reached, and only a process with \
             CAP_NET_RAW can be freed from it"
                .to_owned(),
            "let the application bind a source address instead of a device".to_owned(),
        ),
        Verdict::PassNotMeshed => (
            match entry {
                Some(_) => "the pod is being enrolled: this direction is not in force yet".to_owned(),
                None => "no pod of this name is enrolled on this node".to_owned(),
            },
            "see the pod's state in `weft status`; a pod needs the annotation linkerd.io/inject: enabled when it is created"
                .to_owned(),
        ),
        Verdict::PassNotTcp => ("only TCP is redirected".to_owned(), String::new()),
    };
    (reason, change)
}

fn question_uid(question: &Question, entry: Option<&Pod>) -> u32 {
    if question.as_proxy { entry.map_or(question.uid, |entry| entry.proxy_uid) } else { question.uid }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_verdict_has_a_reason_of_its_own() {
        let question = Question {
            pod: PodName { namespace: "shop".into(), name: "web-0".into() },
            direction: Direction::Outbound,
            destination: "10.0.0.9:80".parse().unwrap(),
            source: None,
            uid: NOBODY,
            gid: NOBODY,
            as_proxy: false,
            not_tcp: false,
            device_bound: false,
        };
        let reasons: BTreeSet<_> =
            Verdict::ALL.iter().map(|verdict| sentences(&question, None, question.destination, *verdict).0).collect();
        assert_eq!(reasons.len(), Verdict::ALL.len());
    }
}
