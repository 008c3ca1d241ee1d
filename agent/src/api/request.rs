//! Parses the API's requests into the agent's own types, and names the first field that cannot be used.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use ipnet::IpNet;
use weft_ebpf_abi::verdict::Direction;
use weft_proto::agent::{self, EnrolRequest, ExplainRequest, PodRef, PortRange};

use crate::datapath::{
    explain::{NOBODY, Question},
    rules::{InvalidRule, PodName, Proxy, Wanted, invalid},
};

/// Linkerd's default ports.
const OUTBOUND_PORT: u16 = 4140;
const INBOUND_PORT: u16 = 4143;
const CONTROL_PORT: u16 = weft_ebpf_abi::socket::DEFAULT_CONTROL_PORT;
const ADMIN_PORT: u16 = weft_ebpf_abi::socket::DEFAULT_ADMIN_PORT;

/// Parses a reference to a pod.
pub(super) fn pod_name(pod: Option<PodRef>) -> Result<PodName, InvalidRule> {
    let pod = pod.ok_or_else(|| invalid("pod", "missing"))?;
    PodName::new(pod.namespace, pod.name)
}

/// The path of the network namespace in a request.
pub(super) fn netns_path(request: &EnrolRequest) -> Result<PathBuf, InvalidRule> {
    if request.netns_path.is_empty() { Err(invalid("netns_path", "empty")) } else { Ok((&request.netns_path).into()) }
}

/// Parses the rules of an enrolment.
pub(super) fn rules(request: EnrolRequest) -> Result<Wanted, InvalidRule> {
    let ip = |text: &String| text.parse().map_err(|_| invalid("ips", format!("{text:?} is not an IP address")));
    let subnet = |text: &String| {
        text.parse::<IpNet>()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
            .map_err(|_| invalid("skip_subnets", format!("{text:?} is not a network such as 10.0.0.0/8 or fd00::/8")))
    };
    Ok(Wanted {
        pod: pod_name(request.pod)?,
        ips: request.ips.iter().map(ip).collect::<Result<_, _>>()?,
        loopback_source: false,
        proxy: Proxy { uid: request.proxy_uid, gid: request.proxy_gid, cgroup: request.proxy_cgroup },
        bypass: request.bypass,
        outbound_port: port("outbound_port", request.outbound_port, OUTBOUND_PORT)?,
        inbound_port: port("inbound_port", request.inbound_port, INBOUND_PORT)?,
        control_port: port("control_port", request.control_port, CONTROL_PORT)?,
        admin_port: port("admin_port", request.admin_port, ADMIN_PORT)?,
        skip_outbound_ports: ranges("skip_outbound_ports", &request.skip_outbound_ports)?,
        skip_inbound_ports: ranges("skip_inbound_ports", &request.skip_inbound_ports)?,
        skip_subnets: request.skip_subnets.iter().map(subnet).collect::<Result<_, _>>()?,
    })
}

fn port(field: &'static str, number: u32, default: u16) -> Result<u16, InvalidRule> {
    match u16::try_from(number) {
        Ok(0) => Ok(default),
        Ok(port) => Ok(port),
        Err(_) => Err(invalid(field, format!("{number} is not a port"))),
    }
}

fn ranges(field: &'static str, ranges: &[PortRange]) -> Result<Vec<RangeInclusive<u16>>, InvalidRule> {
    let range = |range: &PortRange| match (u16::try_from(range.first), u16::try_from(range.last)) {
        (Ok(first), Ok(last)) => Ok(first..=last),
        _ => Err(invalid(field, format!("{}-{} leaves the ports 1 to 65535", range.first, range.last))),
    };
    ranges.iter().map(range).collect()
}

/// Parses a question about a connection.
pub(super) fn question(request: ExplainRequest) -> Result<Question, InvalidRule> {
    let direction = match request.direction() {
        agent::Direction::Outbound => Direction::Outbound,
        agent::Direction::Inbound => Direction::Inbound,
        agent::Direction::Unspecified => return Err(invalid("direction", "neither 1 (outbound) nor 2 (inbound)")),
    };
    let destination = request
        .destination
        .parse::<SocketAddr>()
        .map_err(|_| invalid("destination", format!("{:?} is not ip:port or [ip]:port", request.destination)))?;
    if destination.port() == 0 && !request.not_tcp {
        return Err(invalid("destination", "no connection goes to port 0"));
    }
    let source = match request.source.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| invalid("source", format!("{text:?} is not an IP address")))?),
    };
    Ok(Question {
        pod: pod_name(request.pod)?,
        direction,
        destination,
        source,
        uid: request.uid.unwrap_or(NOBODY),
        gid: request.gid.unwrap_or(NOBODY),
        as_proxy: request.as_proxy,
        not_tcp: request.not_tcp,
        device_bound: request.device_bound,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Option<PodRef> {
        Some(PodRef { namespace: "shop".into(), name: "web-0".into() })
    }

    #[test]
    fn names_the_field_of_an_enrolment_that_cannot_be_used() {
        type Change = fn(&mut EnrolRequest);
        let good = EnrolRequest {
            pod: pod(),
            ips: vec!["10.244.0.5".into()],
            skip_subnets: vec!["10.9.1.2/16".into(), "10.8.0.1".into()],
            skip_inbound_ports: vec![PortRange { first: 510, last: 513 }],
            ..EnrolRequest::default()
        };
        let read = rules(good.clone()).unwrap();
        assert_eq!((read.outbound_port, read.inbound_port), (4140, 4143));
        assert_eq!((read.control_port, read.admin_port), (4190, 4191));
        assert_eq!(read.skip_inbound_ports, [510..=513]);
        assert_eq!(read.skip_subnets[1].to_string(), "10.8.0.1/32");
        let rows: [(&str, Change); 8] = [
            ("pod", |r| r.pod = None),
            ("pod.name", |r| r.pod = Some(PodRef { namespace: "a".into(), name: String::new() })),
            ("ips", |r| r.ips = vec!["10.0.0.300".into()]),
            ("skip_subnets", |r| r.skip_subnets = vec!["10.0.0.0/33".into()]),
            ("skip_inbound_ports", |r| r.skip_inbound_ports = vec![PortRange { first: 9, last: 70000 }]),
            ("inbound_port", |r| r.inbound_port = 70000),
            ("control_port", |r| r.control_port = 70000),
            ("admin_port", |r| r.admin_port = 70000),
        ];
        for (field, change) in rows {
            let mut request = good.clone();
            change(&mut request);
            assert_eq!(rules(request).unwrap_err().field, field);
        }
        assert_eq!(netns_path(&EnrolRequest::default()).unwrap_err().field, "netns_path");
    }

    #[test]
    fn names_the_field_of_a_question_that_cannot_be_used() {
        type Change = fn(&mut ExplainRequest);
        let good = ExplainRequest {
            pod: pod(),
            direction: agent::Direction::Outbound.into(),
            destination: "10.0.0.9:80".into(),
            ..ExplainRequest::default()
        };
        let rows: [(&str, Change); 5] = [
            ("pod", |r| r.pod = None),
            ("direction", |r| r.direction = 0),
            ("destination", |r| r.destination = "web.shop:80".into()),
            ("destination", |r| r.destination = "10.0.0.9:0".into()),
            ("source", |r| r.source = "10.0.0.0/8".into()),
        ];
        for (field, change) in rows {
            let mut request = good.clone();
            change(&mut request);
            assert_eq!(question(request).unwrap_err().field, field);
        }
        assert!(question(good).is_ok());
    }
}
