//! The sandbox's network: one namespace that routes, one for each pod, and nothing in the host's own.
//!
//! ```text
//! pod netns                          node netns
//! eth0 10.244.0.10/32 ══ veth ══ pod1   route 10.244.0.10/32 dev pod1
//! default via 169.254.1.1              lo 10.244.0.1, 10.96.0.10; route 10.96.0.0/16
//! ```
//!
//! All traffic between two pods passes the node, as with Calico, so that its address translation sees both directions.
//! All neighbours are configured statically: no ARP, no neighbour discovery, no waiting.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use nix::net::if_::if_nametoindex;
use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        address::{AddressAttribute, AddressFlags},
        link::{InfoData, InfoVeth},
        neighbour::NeighbourState,
        route::RouteScope,
    },
};

use super::{
    HostError, Result,
    netlink::{index_of, on_netlink, refused, up},
    netns::{self, set_sysctl},
};
use crate::config::{DNS_ADDRESS, GATEWAY_V4, GATEWAY_V6, Layout, POD_CIDR_V4, POD_CIDR_V6, SERVICE_CIDR_V4};

/// The interface of the node that carries its addresses and the cluster IPs' route: every kernel has it.
const SERVICES_LINK: &str = "lo";
/// The node's end of every veth: Calico's choice, locally administered.
const NODE_MAC: [u8; 6] = [0xee; 6];

/// The node's own address: the first of the pod CIDR. Probes come from here.
pub(super) const NODE_V4: Ipv4Addr = Ipv4Addr::from_bits(POD_CIDR_V4.0.to_bits() + 1);
/// The same for IPv6.
pub(super) const NODE_V6: Ipv6Addr = Ipv6Addr::from_bits(POD_CIDR_V6.0.to_bits() + 1);

/// Creates the node's namespace: forwarding, its own addresses, the name server's address, the cluster IPs' route.
///
/// # Errors
/// When there is a node already, or the kernel refuses a step.
pub async fn create_node(layout: &Layout) -> Result<PathBuf> {
    let name = layout.node_netns();
    blocking(move || {
        let netns = netns::create(&name)?;
        netns::within(&netns, || {
            set_sysctl("ipv4/ip_forward", "1")?;
            // A pod that calls its own Service is answered over the link on which it asked, as intended.
            set_sysctl("ipv4/conf/all/send_redirects", "0")?;
            set_sysctl("ipv4/conf/default/send_redirects", "0")?;
            set_sysctl("ipv6/conf/all/forwarding", "1")?;
            set_sysctl("ipv6/conf/default/forwarding", "1")?;
            on_netlink(async |handle| node_links(&handle).await)
        })??;
        Ok(netns)
    })
    .await
}

/// Creates a pod's namespace and connects it to the node's. `number` is the pod's, unique within the sandbox; the
/// first address of each family is the pod's.
///
/// # Errors
/// When there is such a pod already (see [`detach_pod`]), or the kernel refuses a step.
pub async fn attach_pod(layout: &Layout, number: u32, ips: &[IpAddr]) -> Result<PathBuf> {
    let (node, name, ips) =
        (Path::new(netns::NETNS_DIR).join(layout.node_netns()), layout.pod_netns(number), ips.to_vec());
    blocking(move || {
        let pod = netns::create(&name)?;
        let connected = connect(&node, &pod, number, &ips);
        if connected.is_err() {
            // Only the first error is reported; the node's end is removed together with the pod's end.
            let _ = netns::delete(&name);
        }
        connected.map(|()| pod)
    })
    .await
}

/// Removes a pod's link, its routes and its namespace. A missing one is not an error.
///
/// # Errors
/// When the kernel refuses a step.
pub async fn detach_pod(layout: &Layout, number: u32) -> Result<()> {
    let (node, name) = (Path::new(netns::NETNS_DIR).join(layout.node_netns()), layout.pod_netns(number));
    blocking(move || {
        if node.exists() {
            netns::within(&node, move || {
                let Ok(index) = if_nametoindex(link_name(number).as_str()) else { return Ok(()) };
                on_netlink(async |handle| {
                    handle.link().del(index).execute().await.map_err(refused(|| format!("delete link pod{number}")))
                })
            })??;
        }
        netns::delete(&name)
    })
    .await
}

async fn node_links(handle: &Handle) -> Result<()> {
    let index = index_of(SERVICES_LINK)?;
    for address in [IpAddr::V4(NODE_V4), IpAddr::V6(NODE_V6), DNS_ADDRESS] {
        add_address(handle, index, address).await?;
    }
    // Without a route a packet to a cluster IP would be refused before the rules of `services` see it.
    let (network, bits) = SERVICE_CIDR_V4;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(network, bits)
        .output_interface(index)
        .scope(RouteScope::Link)
        .pref_source(NODE_V4)
        .build();
    handle.route().add(route).execute().await.map_err(refused(|| format!("add route to {network}/{bits}")))
}

fn connect(node: &Path, pod: &Path, number: u32, ips: &[IpAddr]) -> Result<()> {
    let pod_mac = pod_mac(number);
    let pod_file = std::fs::File::open(pod).map_err(|source| HostError::EnterNetns { path: pod.to_owned(), source })?;
    let addresses = ips.to_vec();
    netns::within(node, move || {
        on_netlink(async |handle| node_end(&handle, number, &pod_file, pod_mac, &addresses).await)
    })??;
    let addresses = ips.to_vec();
    netns::within(pod, move || on_netlink(async |handle| pod_end(&handle, &addresses).await))?
}

/// In the node's namespace: creates both ends, moves the pod's end into its namespace, and adds routes to the pod.
async fn node_end(handle: &Handle, number: u32, pod: &std::fs::File, pod_mac: [u8; 6], ips: &[IpAddr]) -> Result<()> {
    let name = link_name(number);
    let peer = LinkMessageBuilder::<LinkUnspec>::new()
        .name("eth0")
        .address(pod_mac.to_vec())
        .setns_by_fd(pod.as_raw_fd())
        .build();
    let veth = LinkMessageBuilder::<LinkVeth>::new(&name, "eth0")
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .address(NODE_MAC.to_vec())
        .up()
        .build();
    handle.link().add(veth).execute().await.map_err(refused(|| format!("create link {name}")))?;
    let index = index_of(&name)?;
    for ip in ips {
        let route = match ip {
            IpAddr::V4(ip) => RouteMessageBuilder::<Ipv4Addr>::new()
                .destination_prefix(*ip, 32)
                .output_interface(index)
                .scope(RouteScope::Link)
                .pref_source(NODE_V4)
                .build(),
            IpAddr::V6(ip) => RouteMessageBuilder::<Ipv6Addr>::new()
                .destination_prefix(*ip, 128)
                .output_interface(index)
                .pref_source(NODE_V6)
                .build(),
        };
        handle.route().add(route).execute().await.map_err(refused(|| format!("add route to {ip}")))?;
        add_neighbour(handle, index, *ip, pod_mac).await?;
    }
    Ok(())
}

/// In the pod's namespace: addresses, gateways, default routes.
async fn pod_end(handle: &Handle, ips: &[IpAddr]) -> Result<()> {
    up(handle, "eth0").await?;
    let index = index_of("eth0")?;
    for ip in ips {
        add_address(handle, index, *ip).await?;
    }
    if ips.iter().any(IpAddr::is_ipv4) {
        add_neighbour(handle, index, GATEWAY_V4.into(), NODE_MAC).await?;
        let route = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index).gateway(GATEWAY_V4).onlink().build();
        handle.route().add(route).execute().await.map_err(refused(|| format!("add route via {GATEWAY_V4}")))?;
    }
    if ips.iter().any(IpAddr::is_ipv6) {
        add_neighbour(handle, index, GATEWAY_V6.into(), NODE_MAC).await?;
        let route = RouteMessageBuilder::<Ipv6Addr>::new().output_interface(index).gateway(GATEWAY_V6).onlink().build();
        handle.route().add(route).execute().await.map_err(refused(|| format!("add route via {GATEWAY_V6}")))?;
    }
    Ok(())
}

async fn add_address(handle: &Handle, index: u32, address: IpAddr) -> Result<()> {
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let mut request = handle.address().add(index, address, bits);
    // Even where duplicates are not looked for (accept_dad), an IPv6 address is tentative until the kernel's worker has
    // run, and a route with a tentative source is refused with EINVAL.
    if address.is_ipv6() {
        request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    request.execute().await.map_err(refused(|| format!("add address {address}")))
}

async fn add_neighbour(handle: &Handle, index: u32, address: IpAddr, mac: [u8; 6]) -> Result<()> {
    handle
        .neighbours()
        .add(index, address)
        .link_layer_address(&mac)
        .state(NeighbourState::Permanent)
        .execute()
        .await
        .map_err(refused(|| format!("add neighbour {address}")))
}

/// Name of the node's end of a pod's veth.
fn link_name(number: u32) -> String {
    format!("pod{number}")
}

/// The pod's MAC address: locally administered, unique within the sandbox.
fn pod_mac(number: u32) -> [u8; 6] {
    let [a, b, c, d] = number.to_be_bytes();
    [0x02, 0, a, b, c, d]
}

async fn blocking<T: Send + 'static>(f: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(f).await.map_err(|_| HostError::RunInNetns { path: netns::NETNS_DIR.into() })?
}
