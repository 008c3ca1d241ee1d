//! A meshed pod in the kernel: its entry and its rules. Refuses names and Kubernetes' vocabulary.

use core::hint::black_box;

use crate::{address::Address, verdict::Direction};

/// Maximum number of own addresses of a pod; further ones are treated as addresses of other hosts.
pub const ADDRESSES: usize = 16;

/// Pods per node. Kubernetes' own limit is 110 by default; large nodes run some hundreds.
pub const MAX_PODS: u32 = 4096;

/// Maximum number of network namespaces on one node that the kernel may admit by itself: those of proxies that bind
/// their ports before an agent enrols them. Less than [`MAX_PODS`], so that there is always room for those that an
/// agent enrols.
pub const MAX_ADMISSIONS: u32 = 1024;

/// Maximum number of network namespaces that may be admitted at a time for one cgroup, which is a container: the pod's,
/// and one more while a sandbox is replaced. The agent removes an admission when the namespace is enrolled or gone.
pub const ADMISSION_SLOTS: u32 = 2;

/// The slot of a namespace whose containers have no cgroups of their own; the key has the namespace's cookie in place
/// of the cgroup.
pub const SHARED_CGROUP: u32 = u32::MAX;

/// One network namespace that the kernel admitted by itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdmissionKey {
    /// The cgroup of the process that bound a proxy's port.
    pub cgroup: u64,
    /// Below [`ADMISSION_SLOTS`], or [`SHARED_CGROUP`].
    pub slot: u32,
    /// Unused.
    pub pad: u32,
}

/// Outbound connections are redirected.
pub const OUTBOUND: u32 = 1 << 0;
/// Inbound connections are steered: the sk_lookup program is attached to the pod's namespace.
pub const INBOUND: u32 = 1 << 1;
/// Some outbound ports are skipped; without it the lookup is omitted.
pub const SKIPS_OUTBOUND_PORTS: u32 = 1 << 2;
/// Some inbound ports are skipped.
pub const SKIPS_INBOUND_PORTS: u32 = 1 << 3;
/// Some clients' subnets are skipped.
pub const SKIPS_SUBNETS: u32 = 1 << 4;
/// Redirection is switched off on request.
pub const BYPASSED: u32 = 1 << 5;
/// Processes of `proxy_gid` are the proxy, too.
pub const EXEMPTS_GROUP: u32 = 1 << 6;
/// Strict: only processes in `proxy_cgroup` are the proxy, whatever their user.
pub const EXEMPTS_CGROUP: u32 = 1 << 7;
/// Created by the kernel when a proxy bound its outbound port, and not completed by an agent since: outbound
/// connections are redirected, nothing is skipped, and nothing is steered inbound.
pub const SELF_ENROLLED: u32 = 1 << 8;
/// Some ports are skipped by whole blocks ([`WHOLE_BLOCKS`]); without it the lookup is omitted.
pub const SKIPS_WHOLE_BLOCKS: u32 = 1 << 9;

/// A meshed pod, by its network namespace's cookie.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The pod's own addresses; unused entries are [`Address::UNSPECIFIED`].
    pub addresses: [Address; ADDRESSES],
    /// The source of redirected IPv4 connections, or unspecified.
    pub source_v4: Address,
    /// The source of redirected IPv6 connections, or unspecified.
    pub source_v6: Address,
    /// A digest of the requested rules of this pod, so that a repeated request changes nothing.
    pub rules: u64,
    /// Counts rule changes from 1; part of the keys of the pod's rules, so that a change is one write.
    pub generation: u32,
    /// [`OUTBOUND`] and the other bits.
    pub flags: u32,
    /// The proxy's cgroup by its id in the cgroup2 tree, with [`EXEMPTS_CGROUP`].
    pub proxy_cgroup: u64,
    /// The proxy's user as the host sees it.
    pub proxy_uid: u32,
    /// The proxy's group as the host sees it, with [`EXEMPTS_GROUP`].
    pub proxy_gid: u32,
    /// The port of the proxy's outbound listener, on loopback.
    pub outbound_port: u16,
    /// The port of the proxy's inbound listener.
    pub inbound_port: u16,
    /// A port on which the proxy may serve an endpoint of its own, such as tap: skipped inbound while the proxy listens
    /// there. 0 for none.
    pub control_port: u16,
    /// Another one, for probes and metrics. Older agents wrote 0, and skipped the port by the pod's rules.
    pub admin_port: u16,
}

impl Pod {
    /// Whether the address is one of the pod's own.
    #[inline(always)]
    #[must_use]
    pub fn owns(&self, address: &Address) -> bool {
        if address.is_unspecified() {
            return false;
        }
        let mut at = 0;
        // Unrolled, this would be a third of the program, of which every pod has an instance.
        let end = black_box(ADDRESSES);
        while at < ADDRESSES && at < end {
            let ([a, b, c, d], [e, f, g, h]) = (self.addresses[at].words, address.words);
            // One branch: LLVM would compare word by word, and the verifier follows both ways of every branch, in every
            // round.
            if black_box((a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)) == 0 {
                return true;
            }
            if a | b | c | d == 0 {
                return false;
            }
            at += 1;
        }
        false
    }

    /// Whether the proxy may serve an endpoint of its own on a port.
    #[inline(always)]
    #[must_use]
    pub const fn is_proxys_own(&self, port: u16) -> bool {
        port != 0 && (port == self.control_port || port == self.admin_port)
    }

    /// The key that identifies the proxy's processes.
    #[inline(always)]
    #[must_use]
    pub const fn proxy(&self) -> Owner {
        if self.has(EXEMPTS_CGROUP) { Owner::cgroup(self.proxy_cgroup) } else { Owner::user(self.proxy_uid) }
    }

    /// Whether the rules skip a port. `contains` looks a bit up in the entry of a block, which may be absent.
    ///
    /// # Errors
    /// Those of `contains`.
    #[inline(always)]
    pub fn skips_port<E>(
        &self,
        netns_cookie: u64,
        direction: Direction,
        port: u16,
        contains: impl Fn(&PortBlockKey, u16) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let flag = match direction {
            Direction::Outbound => SKIPS_OUTBOUND_PORTS,
            Direction::Inbound => SKIPS_INBOUND_PORTS,
        };
        if !self.has(flag) {
            return Ok(false);
        }
        let key =
            |block| PortBlockKey { netns_cookie, generation: self.generation, direction: direction as u16, block };
        let block = port / BLOCK_PORTS;
        if contains(&key(block), port)? {
            return Ok(true);
        }
        if self.has(SKIPS_WHOLE_BLOCKS) { contains(&key(WHOLE_BLOCKS), block) } else { Ok(false) }
    }

    /// Whether the rules skip connections from an address. `contains` looks a prefix up.
    ///
    /// # Errors
    /// Those of `contains`.
    #[inline(always)]
    pub fn skips_subnet<E>(
        &self,
        netns_cookie: u64,
        client: &Address,
        contains: impl FnOnce(Subnet) -> Result<bool, E>,
    ) -> Result<bool, E> {
        if !self.has(SKIPS_SUBNETS) {
            return Ok(false);
        }
        contains(Subnet::new(netns_cookie, self.generation, client))
    }

    /// Whether a flag is set.
    #[inline(always)]
    #[must_use]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// The owner of a listener: a user, or the processes of a cgroup.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(u64);

impl Owner {
    /// Users have 32 bits; cgroup ids are inode numbers, which do not reach this bit.
    const CGROUP: u64 = 1 << 63;

    /// A user as the host sees it.
    #[inline(always)]
    #[must_use]
    pub const fn user(uid: u32) -> Self {
        Self(uid as u64)
    }

    /// A cgroup by its id in the cgroup2 tree.
    #[inline(always)]
    #[must_use]
    pub const fn cgroup(id: u64) -> Self {
        Self(id | Self::CGROUP)
    }
}

/// Ports in one [`PortBlock`].
pub const BLOCK_PORTS: u16 = 512;

/// Special block number: bit `n` of this entry means that all ports of block `n` are skipped.
pub const WHOLE_BLOCKS: u16 = u16::MAX;

/// Blocks of skipped ports on one node. One pod has at most 64 (the agent's rules), most have two.
pub const MAX_PORT_BLOCKS: u32 = 2 * MAX_PODS;

/// Skipped subnets on one node. One pod has at most 256 (the agent's rules), most have none.
pub const MAX_SUBNETS: u32 = 16 * MAX_PODS;

/// One block of a pod's skipped ports. Sparse: a block without a skipped port has no entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortBlockKey {
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// The generation of the pod's rules.
    pub generation: u32,
    /// [`crate::verdict::Direction`] as a number.
    pub direction: u16,
    /// The port divided by [`BLOCK_PORTS`], or [`WHOLE_BLOCKS`].
    pub block: u16,
}

/// One bit for each of [`BLOCK_PORTS`] ports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortBlock {
    /// Port `n` of the block is bit `n % 64` of word `n / 64`.
    pub words: [u64; 8],
}

impl PortBlock {
    /// Every port of a block.
    pub const FULL: Self = Self { words: [u64::MAX; 8] };

    /// Whether a port is in its block. Takes the whole port number.
    #[inline(always)]
    #[must_use]
    pub const fn contains(&self, port: u16) -> bool {
        let bit = port % BLOCK_PORTS;
        self.words[(bit / 64) as usize & 7] >> (bit % 64) & 1 == 1
    }

    /// Adds a port. Takes the whole port number.
    pub const fn insert(&mut self, port: u16) {
        let bit = port % BLOCK_PORTS;
        self.words[(bit / 64) as usize] |= 1 << (bit % 64);
    }
}

/// A skipped subnet of one pod: the data part of a longest-prefix key.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnet {
    /// The pod, as bytes because longest-prefix keys have no padding.
    pub netns_cookie: [u8; 8],
    /// The generation of the pod's rules.
    pub generation: [u8; 4],
    /// The subnet's address in an entry, the client's in a look-up.
    pub address: Address,
}

impl Subnet {
    /// Bits before the address: the prefix of an IPv6 subnet is these plus its own length, of an IPv4 subnet 96 more.
    pub const HEAD_BITS: u32 = 96;

    /// The key for a lookup or, with a shorter prefix, for an entry.
    #[inline(always)]
    #[must_use]
    pub const fn new(netns_cookie: u64, generation: u32, address: &Address) -> Self {
        Self { netns_cookie: netns_cookie.to_ne_bytes(), generation: generation.to_ne_bytes(), address: *address }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_exactly_its_ports() {
        let mut block = PortBlock::default();
        for port in [4190, 4191] {
            block.insert(port);
        }
        let found: [bool; 4] = [4189, 4190, 4191, 4192].map(|port| block.contains(port));
        assert_eq!(found, [false, true, true, false]);
    }

    #[test]
    fn the_last_port_has_a_place() {
        let mut block = PortBlock::default();
        block.insert(65535);
        assert!(block.contains(65535));
        assert!(!block.contains(65534));
    }
}
