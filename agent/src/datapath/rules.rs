//! A pod's rules as requested, validated and converted to the kernel's form. Pure: touches neither maps nor namespaces.

use std::{collections::BTreeMap, net::IpAddr, ops::RangeInclusive};

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};
use weft_ebpf_abi::{
    address::Address,
    pod::{self, BLOCK_PORTS, Pod, PortBlock},
};

use crate::datapath::addresses::is_link_local;

/// Limit for one pod's entries in the longest-prefix map.
const MAX_SUBNETS: usize = 256;
/// Limit for one pod's entries in the map of skipped ports, for each direction.
const MAX_BLOCKS: usize = 32;

/// Names a pod: namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// Rules to put in force for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) pod: PodName,
    ips: Vec<IpAddr>,
    /// See [`Wanted::loopback_source`].
    loopback_source: bool,
    pub(crate) proxy_uid: u32,
    /// Group that is exempt in addition to the user; 0 for none.
    proxy_gid: u32,
    /// Cgroup that is exempt instead of user and group; 0 for none.
    proxy_cgroup: u64,
    bypass: bool,
    outbound_port: u16,
    inbound_port: u16,
    control_port: u16,
    admin_port: u16,
    /// Skipped outbound ports by block.
    pub(crate) outbound: BTreeMap<u16, PortBlock>,
    /// Skipped inbound ports by block.
    pub(crate) inbound: BTreeMap<u16, PortBlock>,
    /// Skipped clients.
    pub(crate) subnets: Vec<IpNet>,
}

/// The field of a request that is invalid, and the reason.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{field}: {reason}")]
pub(crate) struct InvalidRule {
    pub(crate) field: &'static str,
    pub(crate) reason: String,
}

pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> InvalidRule {
    InvalidRule { field, reason: reason.into() }
}

/// A pod's proxy as the host sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Proxy {
    pub(crate) uid: u32,
    /// Group that is exempt in addition to the user; 0 for none.
    pub(crate) gid: u32,
    /// Id of the cgroup that is exempt instead of user and group; 0 for none.
    pub(crate) cgroup: u64,
}

/// A pod's rules as requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) pod: PodName,
    /// The pod's own addresses. The first of a family is the source of its redirected connections.
    pub(crate) ips: Vec<IpAddr>,
    /// Redirected connections have a loopback source instead. For a pod in which iptables redirect, too: connection
    /// tracking remembers for minutes what they redirected from the pod's address to the proxy, and would give a new
    /// connection between the same addresses another source port where it chose one of those, by which the proxy's
    /// end would not find its original destination.
    pub(crate) loopback_source: bool,
    pub(crate) proxy: Proxy,
    pub(crate) bypass: bool,
    pub(crate) outbound_port: u16,
    pub(crate) inbound_port: u16,
    /// Where the proxy may serve tap; 0 for none.
    pub(crate) control_port: u16,
    /// Where it may serve probes and metrics; 0 for none.
    pub(crate) admin_port: u16,
    pub(crate) skip_outbound_ports: Vec<RangeInclusive<u16>>,
    pub(crate) skip_inbound_ports: Vec<RangeInclusive<u16>>,
    pub(crate) skip_subnets: Vec<IpNet>,
}

impl PodName {
    /// Checks a pod's namespace and name.
    ///
    /// # Errors
    /// When a part is empty or not a valid Kubernetes name.
    pub(crate) fn new(namespace: String, name: String) -> Result<Self, InvalidRule> {
        for (field, part) in [("pod.namespace", &namespace), ("pod.name", &name)] {
            if part.is_empty() {
                return Err(invalid(field, "empty"));
            }
            if part.len() > 253 || !part.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
                return Err(invalid(field, format!("{part:?} is not a Kubernetes name")));
            }
        }
        Ok(Self { namespace, name })
    }
}

impl Rules {
    /// Validates the request and converts it to the kernel's form.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub(crate) fn new(wanted: Wanted) -> Result<Self, InvalidRule> {
        let mut ips = Vec::new();
        for ip in wanted.ips.iter().map(IpAddr::to_canonical) {
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
        let mut subnets: Vec<IpNet> = wanted.skip_subnets.iter().map(IpNet::trunc).collect();
        if subnets.len() > MAX_SUBNETS {
            return Err(invalid("skip_subnets", format!("at most {MAX_SUBNETS} are possible, not {}", subnets.len())));
        }
        subnets.sort_unstable();
        subnets.dedup();
        if wanted.outbound_port == wanted.inbound_port {
            return Err(invalid("inbound_port", "the same as outbound_port"));
        }
        for (field, port) in [("control_port", wanted.control_port), ("admin_port", wanted.admin_port)] {
            if [wanted.outbound_port, wanted.inbound_port].contains(&port) {
                return Err(invalid(field, "the same as outbound_port or inbound_port"));
            }
        }
        Ok(Self {
            pod: wanted.pod,
            ips,
            loopback_source: wanted.loopback_source,
            proxy_uid: wanted.proxy.uid,
            proxy_gid: wanted.proxy.gid,
            proxy_cgroup: wanted.proxy.cgroup,
            bypass: wanted.bypass,
            outbound_port: wanted.outbound_port,
            inbound_port: wanted.inbound_port,
            control_port: wanted.control_port,
            admin_port: wanted.admin_port,
            outbound: blocks("skip_outbound_ports", &wanted.skip_outbound_ports)?,
            inbound: blocks("skip_inbound_ports", &wanted.skip_inbound_ports)?,
            subnets,
        })
    }

    /// Adds the addresses of the pod's network namespace, as far as there is room.
    pub(crate) fn add_addresses(&mut self, addresses: &[IpAddr]) {
        for ip in addresses.iter().map(IpAddr::to_canonical) {
            if self.ips.len() < pod::ADDRESSES && !self.ips.contains(&ip) {
                self.ips.push(ip);
            }
        }
    }

    /// The same rules, except that inbound connections to the admin port are skipped even if the proxy's listener there
    /// is not known.
    pub(crate) fn with_admin_port_skipped(&self) -> Self {
        let mut rules = self.clone();
        rules.inbound.entry(self.admin_port / BLOCK_PORTS).or_default().insert(self.admin_port);
        rules
    }

    /// The kernel's entry, with nothing in force yet.
    pub(crate) fn entry(&self, generation: u32) -> Pod {
        let mut addresses = [Address::UNSPECIFIED; pod::ADDRESSES];
        for (slot, ip) in addresses.iter_mut().zip(&self.ips) {
            *slot = Address::from(*ip);
        }
        let dialled = || self.ips.iter().filter(|ip| !self.loopback_source && !is_link_local(ip));
        let source = |v4: bool| dialled().find(|ip| ip.is_ipv4() == v4).copied().map(Address::from);
        let mut flags = 0;
        for (present, flag) in [
            (!self.outbound.is_empty(), pod::SKIPS_OUTBOUND_PORTS),
            (!self.inbound.is_empty(), pod::SKIPS_INBOUND_PORTS),
            (
                [&self.outbound, &self.inbound].iter().any(|blocks| blocks.contains_key(&pod::WHOLE_BLOCKS)),
                pod::SKIPS_WHOLE_BLOCKS,
            ),
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
            admin_port: self.admin_port,
        }
    }

    /// Identifies the rules, so that another agent recognises them. A pod's owner chooses most of the input, and must
    /// not be able to find other rules with the same digest: SHA-256, of which the first 64 bits are kept. Each list
    /// begins with its length.
    fn digest(&self) -> u64 {
        let mut hash = Sha256::new();
        let mut feed = |bytes: &[u8]| hash.update(bytes);
        feed(&self.ips.len().to_le_bytes());
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
        feed(&self.admin_port.to_le_bytes());
        for blocks in [&self.outbound, &self.inbound] {
            feed(&blocks.len().to_le_bytes());
            for (block, ports) in blocks {
                feed(&block.to_le_bytes());
                for word in ports.words {
                    feed(&word.to_le_bytes());
                }
            }
        }
        feed(&self.subnets.len().to_le_bytes());
        for subnet in &self.subnets {
            feed(&Address::from(subnet.addr()).octets());
            feed(&[subnet.prefix_len(), u8::from(subnet.addr().is_ipv4())]);
        }
        // Not fed otherwise, so that an agent recognises what one before it, without this rule, put in force.
        if self.loopback_source {
            feed(b"loopback source");
        }
        let digest = hash.finalize();
        u64::from_le_bytes(std::array::from_fn(|at| digest[at]))
    }
}

/// The blocks of ports in these ranges, and under [`pod::WHOLE_BLOCKS`] the blocks in which every port is skipped.
fn blocks(field: &'static str, ranges: &[RangeInclusive<u16>]) -> Result<BTreeMap<u16, PortBlock>, InvalidRule> {
    let mut blocks = BTreeMap::<u16, PortBlock>::new();
    for range in ranges {
        if *range.start() == 0 || range.is_empty() {
            return Err(invalid(field, format!("{}-{} is not a range of ports", range.start(), range.end())));
        }
        for port in range.clone() {
            blocks.entry(port / BLOCK_PORTS).or_default().insert(port);
        }
    }
    let mut whole = PortBlock::default();
    blocks.extract_if(.., |_, ports| *ports == PortBlock::FULL).for_each(|(block, _)| whole.insert(block));
    if whole != PortBlock::default() {
        blocks.insert(pod::WHOLE_BLOCKS, whole);
    }
    if blocks.len() > MAX_BLOCKS {
        return Err(invalid(
            field,
            format!(
                "single ports in {} blocks of {BLOCK_PORTS}, of which {MAX_BLOCKS} are possible: skip ranges of ports",
                blocks.len()
            ),
        ));
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Wanted {
        Wanted {
            pod: PodName { namespace: "shop".into(), name: "web-0".into() },
            ips: vec!["10.244.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
            loopback_source: false,
            proxy: Proxy { uid: 2102, ..Proxy::default() },
            bypass: false,
            outbound_port: 4140,
            inbound_port: 4143,
            control_port: 4190,
            admin_port: 4191,
            skip_outbound_ports: vec![25..=25],
            skip_inbound_ports: vec![4567..=4568, 510..=513],
            skip_subnets: vec!["10.9.1.2/16".parse().unwrap(), "fd99::/16".parse().unwrap()],
        }
    }

    #[test]
    fn becomes_an_entry() {
        let entry = Rules::new(wanted()).unwrap().entry(3);
        assert_eq!((entry.outbound_port, entry.inbound_port, entry.generation), (4140, 4143, 3));
        assert_eq!((entry.control_port, entry.admin_port), (4190, 4191));
        assert_eq!(IpAddr::from(entry.source_v4).to_string(), "10.244.0.5");
        assert_eq!(IpAddr::from(entry.source_v6).to_string(), "fd00::5");
        assert_eq!(entry.flags, pod::SKIPS_OUTBOUND_PORTS | pod::SKIPS_INBOUND_PORTS | pod::SKIPS_SUBNETS);
    }

    #[test]
    fn link_local_addresses_are_own_and_never_a_source() {
        let ips = ["fe80::5", "fd00::5"].map(|ip| ip.parse().unwrap()).to_vec();
        let mut rules = Rules::new(Wanted { ips, ..wanted() }).unwrap();
        rules.add_addresses(&["169.254.1.5".parse().unwrap(), "fd00::5".parse().unwrap()]);
        let entry = rules.entry(1);
        for own in ["fe80::5", "fd00::5", "169.254.1.5"] {
            assert!(entry.owns(&own.parse::<IpAddr>().unwrap().into()), "{own}");
        }
        assert_eq!(IpAddr::from(entry.source_v6).to_string(), "fd00::5");
        assert_eq!(entry.source_v4, Address::UNSPECIFIED);
    }

    #[test]
    fn a_loopback_source_is_other_rules_and_takes_no_address_away() {
        let [usual, loopback] =
            [false, true].map(|loopback_source| Rules::new(Wanted { loopback_source, ..wanted() }).unwrap().entry(1));
        assert_eq!((loopback.source_v4, loopback.source_v6), (Address::UNSPECIFIED, Address::UNSPECIFIED));
        assert_eq!(loopback.addresses, usual.addresses);
        assert_ne!(loopback.rules, usual.rules, "an agent would keep the entry of another one that knew no such pods");
    }

    #[test]
    fn whole_blocks_share_one_entry() {
        let all = blocks("ports", &[1..=u16::MAX]).unwrap();
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), [0, pod::WHOLE_BLOCKS], "port 0 is missing in the first");
        let whole = all[&pod::WHOLE_BLOCKS];
        assert!(!whole.contains(0) && (1..128).all(|block| whole.contains(block)));
        assert!((1..512).all(|port| all[&0].contains(port)));
        let rules = Rules::new(Wanted { skip_outbound_ports: vec![1..=u16::MAX], ..wanted() }).unwrap();
        assert!(rules.entry(1).has(pod::SKIPS_WHOLE_BLOCKS));
        assert!(!Rules::new(wanted()).unwrap().entry(1).has(pod::SKIPS_WHOLE_BLOCKS), "most pods need no second look");
    }

    #[test]
    fn scattered_ports_are_bounded() {
        let scattered = |count: u16| (1..=count).map(|block| block * BLOCK_PORTS..=block * BLOCK_PORTS).collect();
        let rules = |count| Rules::new(Wanted { skip_inbound_ports: scattered(count), ..wanted() });
        assert!(rules(32).is_ok());
        let error = rules(33).unwrap_err();
        assert_eq!(error.field, "skip_inbound_ports");
        assert!(error.reason.contains("33 blocks of 512"), "{}", error.reason);
    }

    #[test]
    fn a_range_over_two_blocks_fills_both() {
        let rules = Rules::new(wanted()).unwrap();
        assert!(rules.inbound[&0].contains(511) && !rules.inbound[&0].contains(509));
        assert!(rules.inbound[&1].contains(512) && !rules.inbound[&1].contains(514));
    }

    #[test]
    fn subnets_lose_their_host_bits() {
        let rules = Rules::new(wanted()).unwrap();
        assert_eq!(rules.subnets[0].to_string(), "10.9.0.0/16");
    }

    #[test]
    fn the_admin_port_can_be_skipped_besides() {
        let rules = Rules::new(wanted()).unwrap();
        let skipping = rules.with_admin_port_skipped();
        let mut asked_for = wanted();
        asked_for.skip_inbound_ports.push(4191..=4191);
        assert_eq!(skipping, Rules::new(asked_for).unwrap());
        assert_ne!(skipping.entry(1).rules, rules.entry(1).rules, "a later attempt has to know that it is not done");
    }

    #[test]
    fn the_same_rules_have_the_same_digest_and_others_another() {
        let first = Rules::new(wanted()).unwrap().entry(1);
        let mut reordered = wanted();
        reordered.skip_subnets.reverse();
        reordered.skip_inbound_ports.reverse();
        assert_eq!(Rules::new(reordered).unwrap().entry(9).rules, first.rules);
        type Change = fn(&mut Wanted);
        let changes: [Change; 6] = [
            |w| w.skip_outbound_ports.clear(),
            |w| w.proxy.gid = 7,
            |w| w.proxy.cgroup = 7,
            |w| w.bypass = true,
            |w| w.control_port = 7,
            |w| w.admin_port = 7,
        ];
        for (row, change) in changes.into_iter().enumerate() {
            let mut other = wanted();
            change(&mut other);
            assert_ne!(Rules::new(other).unwrap().entry(1).rules, first.rules, "{row}");
        }
    }

    #[test]
    fn names_the_field_that_cannot_be_used() {
        type Change = fn(&mut Wanted);
        let rows: [(&str, Change); 8] = [
            ("ips", |w| w.ips.clear()),
            ("ips", |w| w.ips = vec!["127.0.0.1".parse().unwrap()]),
            ("skip_subnets", |w| {
                w.skip_subnets =
                    (0..=u16::MAX).map(|n| IpNet::from(IpAddr::from([10, 0, (n >> 8) as u8, n as u8]))).collect()
            }),
            ("skip_outbound_ports", |w| w.skip_outbound_ports = vec![0..=5]),
            ("skip_inbound_ports", |w| w.skip_inbound_ports = vec![RangeInclusive::new(9, 7)]),
            ("inbound_port", |w| w.inbound_port = 4140),
            ("control_port", |w| w.control_port = 4143),
            ("admin_port", |w| w.admin_port = 4140),
        ];
        for (field, change) in rows {
            let mut wanted = wanted();
            change(&mut wanted);
            assert_eq!(Rules::new(wanted).unwrap_err().field, field);
        }
    }

    #[test]
    fn names_the_part_of_a_pods_name_that_cannot_be_used() {
        for (namespace, name, field) in [("a", "", "pod.name"), ("a/b", "c", "pod.namespace"), ("a", "b c", "pod.name")]
        {
            assert_eq!(PodName::new(namespace.into(), name.into()).unwrap_err().field, field);
        }
        assert!(PodName::new("a".into(), "b-0.c".into()).is_ok());
    }
}
