//! A pod's rules as asked for, checked and put into the kernel's form. Pure: touches neither maps nor namespaces.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use weft_ebpf_abi::{
    address::Address,
    pod::{self, BLOCK_PORTS, Pod, PortBlock},
};
use weft_proto::agent::{EnrolRequest, PodRef, PortRange};

use crate::netns::is_link_local;

/// Linkerd's default ports.
const OUTBOUND_PORT: u16 = 4140;
const INBOUND_PORT: u16 = 4143;
const CONTROL_PORT: u16 = weft_ebpf_abi::socket::DEFAULT_CONTROL_PORT;
/// Bounds the longest-prefix map's share of one pod.
const MAX_SUBNETS: usize = 256;

/// Names a pod: namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// What is to be in force for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) pod: PodName,
    ips: Vec<IpAddr>,
    proxy_uid: u32,
    /// Exempt beside the user; 0 for none.
    proxy_gid: u32,
    /// Exempt instead of user and group; 0 for none.
    proxy_cgroup: u64,
    bypass: bool,
    outbound_port: u16,
    inbound_port: u16,
    control_port: u16,
    /// Skipped outbound ports by block.
    pub(crate) outbound: BTreeMap<u16, PortBlock>,
    /// Skipped inbound ports by block.
    pub(crate) inbound: BTreeMap<u16, PortBlock>,
    /// Skipped clients.
    pub(crate) subnets: Vec<IpNet>,
}

/// Which field of a request cannot be used, and why.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{field}: {reason}")]
pub(crate) struct InvalidRule {
    pub(crate) field: &'static str,
    pub(crate) reason: String,
}

pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> InvalidRule {
    InvalidRule { field, reason: reason.into() }
}

impl PodName {
    /// Reads a reference.
    ///
    /// # Errors
    /// When it is missing or a part of it is empty or contains a slash.
    pub(crate) fn parse(pod: Option<PodRef>) -> Result<Self, InvalidRule> {
        let pod = pod.ok_or_else(|| invalid("pod", "missing"))?;
        for (field, part) in [("pod.namespace", &pod.namespace), ("pod.name", &pod.name)] {
            if part.is_empty() {
                return Err(invalid(field, "empty"));
            }
            if part.len() > 253 || !part.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
                return Err(invalid(field, format!("{part:?} is not a Kubernetes name")));
            }
        }
        Ok(Self { namespace: pod.namespace, name: pod.name })
    }
}

/// The path by which a request refers to a network namespace.
///
/// # Errors
/// When it is empty.
pub(crate) fn netns_path(request: &EnrolRequest) -> Result<PathBuf, InvalidRule> {
    if request.netns_path.is_empty() { Err(invalid("netns_path", "empty")) } else { Ok((&request.netns_path).into()) }
}

impl From<&PodName> for PodRef {
    fn from(pod: &PodName) -> Self {
        Self { namespace: pod.namespace.clone(), name: pod.name.clone() }
    }
}

impl Rules {
    /// Checks a request.
    ///
    /// # Errors
    /// Names the first field that cannot be used.
    pub(crate) fn parse(request: EnrolRequest) -> Result<Self, InvalidRule> {
        let pod = PodName::parse(request.pod)?;
        let mut ips = Vec::new();
        for text in &request.ips {
            let ip: IpAddr = text.parse().map_err(|_| invalid("ips", format!("{text:?} is not an IP address")))?;
            let ip = ip.to_canonical();
            if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() {
                return Err(invalid("ips", format!("{ip} cannot be a pod's address")));
            }
            if !ips.contains(&ip) {
                ips.push(ip);
            }
        }
        if ips.is_empty() {
            return Err(invalid("ips", "at least one is needed"));
        }
        if ips.len() > pod::ADDRESSES {
            return Err(invalid("ips", format!("at most {} are possible, not {}", pod::ADDRESSES, ips.len())));
        }
        let mut subnets = Vec::new();
        for text in &request.skip_subnets {
            let subnet = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).map_err(|_| {
                invalid("skip_subnets", format!("{text:?} is not a network such as 10.0.0.0/8 or fd00::/8"))
            })?;
            subnets.push(subnet.trunc());
        }
        if subnets.len() > MAX_SUBNETS {
            return Err(invalid("skip_subnets", format!("at most {MAX_SUBNETS} are possible, not {}", subnets.len())));
        }
        subnets.sort_unstable();
        subnets.dedup();
        let outbound_port = port("outbound_port", request.outbound_port, OUTBOUND_PORT)?;
        let inbound_port = port("inbound_port", request.inbound_port, INBOUND_PORT)?;
        if outbound_port == inbound_port {
            return Err(invalid("inbound_port", "the same as outbound_port"));
        }
        let control_port = port("control_port", request.control_port, CONTROL_PORT)?;
        if [outbound_port, inbound_port].contains(&control_port) {
            return Err(invalid("control_port", "the same as outbound_port or inbound_port"));
        }
        Ok(Self {
            pod,
            ips,
            proxy_uid: request.proxy_uid,
            proxy_gid: request.proxy_gid,
            proxy_cgroup: request.proxy_cgroup,
            bypass: request.bypass,
            outbound_port,
            inbound_port,
            control_port,
            outbound: blocks("skip_outbound_ports", &request.skip_outbound_ports)?,
            inbound: blocks("skip_inbound_ports", &request.skip_inbound_ports)?,
            subnets,
        })
    }

    /// Adds what the pod's network namespace has, as far as there is room.
    pub(crate) fn add_addresses(&mut self, addresses: &[IpAddr]) {
        for ip in addresses.iter().map(IpAddr::to_canonical) {
            if self.ips.len() < pod::ADDRESSES && !self.ips.contains(&ip) {
                self.ips.push(ip);
            }
        }
    }

    /// The kernel's entry, with nothing in force yet.
    pub(crate) fn entry(&self, generation: u32) -> Pod {
        let mut addresses = [Address::UNSPECIFIED; pod::ADDRESSES];
        for (slot, ip) in addresses.iter_mut().zip(&self.ips) {
            *slot = Address::from(*ip);
        }
        let dialled = || self.ips.iter().filter(|ip| !is_link_local(ip));
        let source = |v4: bool| dialled().find(|ip| ip.is_ipv4() == v4).copied().map(Address::from);
        let mut flags = 0;
        for (present, flag) in [
            (!self.outbound.is_empty(), pod::SKIPS_OUTBOUND_PORTS),
            (!self.inbound.is_empty(), pod::SKIPS_INBOUND_PORTS),
            (!self.subnets.is_empty(), pod::SKIPS_SUBNETS),
            (self.bypass, pod::BYPASSED),
            (self.proxy_gid != 0, pod::EXEMPTS_GROUP),
            (self.proxy_cgroup != 0, pod::EXEMPTS_CGROUP),
        ] {
            if present {
                flags |= flag;
            }
        }
        Pod {
            addresses,
            source_v4: source(true).unwrap_or_default(),
            source_v6: source(false).unwrap_or_default(),
            rules: self.digest(),
            generation,
            flags,
            proxy_cgroup: self.proxy_cgroup,
            proxy_uid: self.proxy_uid,
            proxy_gid: self.proxy_gid,
            outbound_port: self.outbound_port,
            inbound_port: self.inbound_port,
            control_port: self.control_port,
            pad: 0,
        }
    }

    /// FNV-1a over everything that the kernel is told, so that the same request is recognised by another agent too.
    fn digest(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut feed = |bytes: &[u8]| {
            for byte in bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        for ip in &self.ips {
            feed(&Address::from(*ip).octets());
        }
        feed(&self.proxy_uid.to_le_bytes());
        feed(&self.proxy_gid.to_le_bytes());
        feed(&self.proxy_cgroup.to_le_bytes());
        feed(&[u8::from(self.bypass)]);
        feed(&self.outbound_port.to_le_bytes());
        feed(&self.inbound_port.to_le_bytes());
        feed(&self.control_port.to_le_bytes());
        for (mark, blocks) in [(b"out", &self.outbound), (b"in ", &self.inbound)] {
            feed(mark);
            for (block, ports) in blocks {
                feed(&block.to_le_bytes());
                for word in ports.words {
                    feed(&word.to_le_bytes());
                }
            }
        }
        for subnet in &self.subnets {
            feed(&Address::from(subnet.addr()).octets());
            feed(&[subnet.prefix_len(), u8::from(subnet.addr().is_ipv4())]);
        }
        hash
    }
}

fn port(field: &'static str, number: u32, default: u16) -> Result<u16, InvalidRule> {
    match u16::try_from(number) {
        Ok(0) => Ok(default),
        Ok(port) => Ok(port),
        Err(_) => Err(invalid(field, format!("{number} is not a port"))),
    }
}

fn blocks(field: &'static str, ranges: &[PortRange]) -> Result<BTreeMap<u16, PortBlock>, InvalidRule> {
    let mut blocks = BTreeMap::<u16, PortBlock>::new();
    for range in ranges {
        let (Ok(first), Ok(last)) = (u16::try_from(range.first), u16::try_from(range.last)) else {
            return Err(invalid(field, format!("{}-{} leaves the ports 1 to 65535", range.first, range.last)));
        };
        if first == 0 || last < first {
            return Err(invalid(field, format!("{first}-{last} is not a range of ports")));
        }
        for port in first..=last {
            blocks.entry(port / BLOCK_PORTS).or_default().insert(port);
        }
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> EnrolRequest {
        EnrolRequest {
            pod: Some(PodRef { namespace: "shop".into(), name: "web-0".into() }),
            uid: "u".into(),
            netns_path: "/run/netns/x".into(),
            ips: vec!["10.244.0.5".into(), "fd00::5".into()],
            proxy_uid: 2102,
            outbound_port: 0,
            inbound_port: 0,
            skip_outbound_ports: vec![PortRange { first: 25, last: 25 }],
            skip_inbound_ports: vec![PortRange { first: 4191, last: 4192 }, PortRange { first: 510, last: 513 }],
            skip_subnets: vec!["10.9.1.2/16".into(), "fd99::/16".into()],
            ..EnrolRequest::default()
        }
    }

    #[test]
    fn becomes_an_entry() {
        let entry = Rules::parse(request()).unwrap().entry(3);
        assert_eq!((entry.outbound_port, entry.inbound_port, entry.generation), (4140, 4143, 3));
        assert_eq!(entry.control_port, 4190);
        assert_eq!(IpAddr::from(entry.source_v4).to_string(), "10.244.0.5");
        assert_eq!(IpAddr::from(entry.source_v6).to_string(), "fd00::5");
        assert_eq!(entry.flags, pod::SKIPS_OUTBOUND_PORTS | pod::SKIPS_INBOUND_PORTS | pod::SKIPS_SUBNETS);
    }

    #[test]
    fn link_local_addresses_are_own_and_never_a_source() {
        let mut request = request();
        request.ips = vec!["fe80::5".into(), "fd00::5".into()];
        let mut rules = Rules::parse(request).unwrap();
        rules.add_addresses(&["169.254.1.5".parse().unwrap(), "fd00::5".parse().unwrap()]);
        let entry = rules.entry(1);
        for own in ["fe80::5", "fd00::5", "169.254.1.5"] {
            assert!(entry.owns(&own.parse::<IpAddr>().unwrap().into()), "{own}");
        }
        assert_eq!(IpAddr::from(entry.source_v6).to_string(), "fd00::5");
        assert_eq!(entry.source_v4, Address::UNSPECIFIED);
    }

    #[test]
    fn a_range_over_two_blocks_fills_both() {
        let rules = Rules::parse(request()).unwrap();
        assert!(rules.inbound[&0].contains(511) && !rules.inbound[&0].contains(509));
        assert!(rules.inbound[&1].contains(512) && !rules.inbound[&1].contains(514));
    }

    #[test]
    fn subnets_lose_their_host_bits() {
        let rules = Rules::parse(request()).unwrap();
        assert_eq!(rules.subnets[0].to_string(), "10.9.0.0/16");
    }

    #[test]
    fn the_same_rules_have_the_same_digest_and_others_another() {
        let first = Rules::parse(request()).unwrap().entry(1);
        let mut reordered = request();
        reordered.skip_subnets.reverse();
        reordered.skip_inbound_ports.reverse();
        assert_eq!(Rules::parse(reordered).unwrap().entry(9).rules, first.rules);
        type Change = fn(&mut EnrolRequest);
        let changes: [Change; 5] = [
            |r| r.skip_outbound_ports.clear(),
            |r| r.proxy_gid = 7,
            |r| r.proxy_cgroup = 7,
            |r| r.bypass = true,
            |r| r.control_port = 7,
        ];
        for (row, change) in changes.into_iter().enumerate() {
            let mut other = request();
            change(&mut other);
            assert_ne!(Rules::parse(other).unwrap().entry(1).rules, first.rules, "{row}");
        }
    }

    #[test]
    fn names_the_field_that_cannot_be_used() {
        type Change = fn(&mut EnrolRequest);
        let rows: [(&str, Change); 11] = [
            ("pod", |r| r.pod = None),
            ("pod.name", |r| r.pod = Some(PodRef { namespace: "a".into(), name: String::new() })),
            ("pod.namespace", |r| r.pod = Some(PodRef { namespace: "a/b".into(), name: "c".into() })),
            ("ips", |r| r.ips.clear()),
            ("ips", |r| r.ips = vec!["10.0.0.300".into()]),
            ("ips", |r| r.ips = vec!["127.0.0.1".into()]),
            ("skip_subnets", |r| r.skip_subnets = vec!["10.0.0.0/33".into()]),
            ("skip_outbound_ports", |r| r.skip_outbound_ports = vec![PortRange { first: 0, last: 5 }]),
            ("skip_inbound_ports", |r| r.skip_inbound_ports = vec![PortRange { first: 9, last: 70000 }]),
            ("inbound_port", |r| r.inbound_port = 4140),
            ("control_port", |r| r.control_port = 4143),
        ];
        for (field, change) in rows {
            let mut request = request();
            change(&mut request);
            assert_eq!(Rules::parse(request).unwrap_err().field, field);
        }
        assert_eq!(netns_path(&EnrolRequest::default()).unwrap_err().field, "netns_path");
    }
}
