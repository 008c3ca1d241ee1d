//! The addresses of a network namespace, from the kernel's rtnetlink(7).
//!
//! A pod with CAP_NET_ADMIN, or in a user namespace of its own, may give its namespace a million addresses, or
//! thousands of links. So links are asked one by one, loopback not at all, and a bounded number of addresses is kept:
//! an entry holds few ([`weft_ebpf_abi::pod::ADDRESSES`]), and the pod's own that the API server knows is chosen among
//! them.

use std::{collections::BTreeSet, io, net::IpAddr, time::Duration};

use netlink_packet_core::{NlasIterator, parse_ip};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{Connection, Request};

/// The most links that are asked for addresses.
const MAX_LINKS: usize = 64;
/// The most addresses that are kept.
const MAX_ADDRESSES: usize = 256;
/// Length and name of the attribute `IFLA_EXT_MASK` (rtnetlink(7)).
const EXT_MASK: [[u8; 2]; 2] = [8_u16.to_ne_bytes(), 29_u16.to_ne_bytes()];
/// `RTEXT_FILTER_SKIP_STATS`: statistics are most of an answer.
const SKIP_STATISTICS: [u8; 4] = 8_u32.to_ne_bytes();

/// A network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    index: u32,
    is_up: bool,
    is_loopback: bool,
}

/// Connects to the part of the kernel that knows this thread's namespace's addresses.
///
/// # Errors
/// Those of the kernel.
pub(super) fn connect() -> io::Result<Connection> {
    Connection::open(NETLINK_ROUTE)
}

/// The addresses that are the namespace's own on every interface, except loopback's, in the order of interfaces;
/// link-local ones last. The deadline is a processor time of this thread.
///
/// # Errors
/// Those of the kernel, and `TimedOut`.
pub(super) fn own(connection: &mut Connection, deadline: Duration) -> io::Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    let links = links(connection, deadline)?;
    for link in &links {
        for family in [libc::AF_INET, libc::AF_INET6] {
            match of_link(connection, *link, family, MAX_ADDRESSES - addresses.len(), deadline) {
                // The link is gone.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                found => addresses.extend(found?),
            }
        }
    }
    Ok(own_among(&links, &addresses))
}

/// The links but loopback, the first ones if there are too many.
fn links(connection: &mut Connection, deadline: Duration) -> io::Result<Vec<Link>> {
    // struct ifinfomsg.
    let mut payload = vec![0; 16];
    payload.extend(EXT_MASK.into_iter().flatten().chain(SKIP_STATISTICS));
    let request = Request { message_type: libc::RTM_GETLINK, payload: &payload, most: MAX_LINKS, deadline };
    connection.dump(&request, |message_type, payload| {
        let link = if message_type == libc::RTM_NEWLINK { parse_link(payload) } else { None };
        Ok(link.filter(|link| !link.is_loopback))
    })
}

/// A link's addresses of one family, the first ones if there are too many.
fn of_link(
    connection: &mut Connection,
    link: Link,
    family: i32,
    most: usize,
    deadline: Duration,
) -> io::Result<Vec<(u32, IpAddr)>> {
    let family = u8::try_from(family).map_err(io::Error::other)?;
    // struct ifaddrmsg.
    let mut payload = [family, 0, 0, 0, 0, 0, 0, 0];
    payload[4..].copy_from_slice(&link.index.to_ne_bytes());
    let request = Request { message_type: libc::RTM_GETADDR, payload: &payload, most, deadline };
    connection.dump(&request, |message_type, payload| {
        // A kernel without IPv6 answers with the addresses of IPv4.
        let is_wanted = message_type == libc::RTM_NEWADDR && payload.first() == Some(&family);
        let address = if is_wanted { parse_address(payload) } else { None };
        Ok(address.filter(|(index, _)| *index == link.index))
    })
}

/// A link in an answer (rtnetlink(7), struct ifinfomsg): family, type, index, flags.
fn parse_link(payload: &[u8]) -> Option<Link> {
    let flags = number(payload, 8)?.cast_signed();
    Some(Link {
        index: number(payload, 4)?,
        is_up: flags & libc::IFF_UP != 0,
        is_loopback: flags & libc::IFF_LOOPBACK != 0,
    })
}

/// The index of a link, and an address of it, in an answer (rtnetlink(7), struct ifaddrmsg and attributes).
fn parse_address(payload: &[u8]) -> Option<(u32, IpAddr)> {
    let index = number(payload, 4)?;
    let (mut local, mut address) = (None, None);
    for attribute in NlasIterator::new(payload.get(8..)?).flatten() {
        match attribute.kind() {
            libc::IFA_LOCAL => local = parse_ip(attribute.value()).ok(),
            // At the other end, if both are there.
            libc::IFA_ADDRESS => address = parse_ip(attribute.value()).ok(),
            _ => {}
        }
    }
    Some((index, local.or(address)?))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// The addresses that are the namespace's own on every interface. An IPv6 link-local address is the pod's own on one
/// interface only, and another host's on the others.
fn own_among(links: &[Link], addresses: &[(u32, IpAddr)]) -> Vec<IpAddr> {
    let up: BTreeSet<u32> = links.iter().filter(|link| link.is_up).map(|link| link.index).collect();
    let is_own = |ip: &IpAddr| is_unicast(ip) && (up.len() < 2 || ip.is_ipv4() || !is_link_local(ip));
    let mut ips: Vec<IpAddr> = addresses.iter().map(|(_, ip)| *ip).filter(is_own).collect();
    ips.sort_by_key(is_link_local);
    ips
}

fn is_unicast(ip: &IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}

/// Whether an address is valid on its link only: the pod's own like any other, but not a source for other links.
pub(crate) fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use nix::ifaddrs::getifaddrs;

    use super::*;
    use crate::datapath::scans::processor_time;

    fn link(index: u32, is_up: bool) -> Link {
        Link { index, is_up, is_loopback: false }
    }

    #[test]
    fn a_link_local_address_is_own_where_there_is_one_link() {
        let address = |index, ip: &str| (index, ip.parse::<IpAddr>().unwrap());
        let eth0 = [address(2, "fe80::5"), address(2, "10.0.0.5")];
        for (what, more, addresses, expected) in [
            ("one link", vec![], vec![], "10.0.0.5 fe80::5"),
            ("another that is down", vec![link(3, false)], vec![], "10.0.0.5 fe80::5"),
            ("another without addresses", vec![link(3, true)], vec![], "10.0.0.5"),
            (
                "another with addresses, IPv4's link-local ones among them",
                vec![link(3, true)],
                vec![address(3, "fe80::6"), address(3, "169.254.1.6"), address(3, "fd00::6")],
                "10.0.0.5 fd00::6 169.254.1.6",
            ),
        ] {
            let links = [vec![link(2, true)], more].concat();
            let own = own_among(&links, &[eth0.to_vec(), addresses].concat());
            let own: Vec<String> = own.iter().map(ToString::to_string).collect();
            assert_eq!(own.join(" "), expected, "{what}");
        }
    }

    #[test]
    fn the_addresses_are_those_that_getifaddrs_finds() {
        let own = own(&mut connect().unwrap(), processor_time() + Duration::from_secs(20)).unwrap();
        let all = getifaddrs().unwrap().filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))
        });
        let wanted = |ip: &IpAddr| is_unicast(ip) && !is_link_local(ip);
        let all: BTreeSet<IpAddr> = all.filter(wanted).collect();
        assert_eq!(own.into_iter().filter(wanted).collect::<BTreeSet<_>>(), all);
    }

    #[test]
    fn a_dump_ends_at_its_deadline() {
        let error = own(&mut connect().unwrap(), Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn an_address_at_this_end_of_a_link_counts() {
        let attribute = |kind: u16, ip: &[u8]| {
            let length = u16::try_from(4 + ip.len()).unwrap();
            [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), ip].concat()
        };
        let header = [&[2, 32, 0, 0][..], &7_u32.to_ne_bytes()].concat();
        let (there, here) = (attribute(libc::IFA_ADDRESS, &[10, 0, 0, 1]), attribute(libc::IFA_LOCAL, &[10, 0, 0, 2]));
        for (attributes, expected) in
            [([there.clone(), here].concat(), Some("10.0.0.2")), (there, Some("10.0.0.1")), (Vec::new(), None)]
        {
            let found = parse_address(&[header.clone(), attributes].concat());
            assert_eq!(found, expected.map(|ip| (7, ip.parse().unwrap())));
        }
        assert_eq!(parse_address(&header[..6]), None);
        assert_eq!(parse_link(&header), None);
    }
}
