//! The network of one cluster: its own namespace, and a pair of interfaces through which the host reaches its API
//! server.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result};
use weft_xtask::command;

use super::Cluster;

/// The node forwards, and does not ask who else has the addresses of the pods' links.
const SETTINGS: &str = "cd /proc/sys/net && echo 1 >ipv4/ip_forward && echo 1 >ipv6/conf/all/forwarding && \
                        echo 0 >ipv6/conf/default/accept_dad";

/// Creates namespace and interfaces.
///
/// # Errors
/// When `ip` fails, with its reason.
pub(crate) fn create(cluster: &Cluster) -> Result<()> {
    let (ns, link) = (cluster.scope(), cluster.link());
    ip(&["netns", "add", &ns])?;
    ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &ns])?;
    ip(&["addr", "add", &format!("{}/24", cluster.host_address()), "dev", &link])?;
    // Nobody else has these addresses; without a look for it they are there at once.
    let of_host = cluster.host_address_v6();
    ip(&["addr", "add", &format!("{of_host}/64"), "dev", &link, "nodad"])?;
    ip(&["link", "set", &link, "up"])?;
    let inside = |arguments: &[&str]| ip(&[&["-n", &ns], arguments].concat());
    inside(&["link", "set", "lo", "up"])?;
    inside(&["addr", "add", &format!("{}/24", cluster.node_address()), "dev", "eth0"])?;
    inside(&["addr", "add", &format!("{}/64", cluster.node_address_v6()), "dev", "eth0", "nodad"])?;
    inside(&["link", "set", "eth0", "up"])?;
    // Without a default route the kernel refuses Service addresses before kube-proxy sees them.
    inside(&["route", "add", "default", "via", &cluster.host_address()])?;
    inside(&["-6", "route", "add", "default", "via", &of_host])?;
    let mut settings = Command::new("nsenter");
    settings.arg(format!("--net={}", cluster.netns().display())).args(["sh", "-c", SETTINGS]);
    command::output(&mut settings).map(drop)
}

/// Removes both. Succeeds if there are none.
///
/// # Errors
/// When `ip` fails.
pub(crate) fn remove(cluster: &Cluster) -> Result<()> {
    if Path::new("/sys/class/net").join(cluster.link()).exists() {
        ip(&["link", "del", &cluster.link()])?;
    }
    if cluster.netns().exists() {
        ip(&["netns", "del", &cluster.scope()])?;
    }
    Ok(())
}

/// A number `X` such that nothing on this host has an address or a route in `10.88.X.0/24`.
///
/// # Errors
/// When all are taken.
pub(crate) fn free_subnet() -> Result<u8> {
    let routes = ip(&["-4", "route", "show", "table", "all"])?;
    let taken = taken(&routes);
    (1..=250).find(|subnet| !taken.contains(subnet)).context("10.88.1.0/24 to 10.88.250.0/24 are all in use")
}

fn taken(routes: &str) -> BTreeSet<u8> {
    let subnet = |word: &str| word.strip_prefix("10.88.")?.split('.').next()?.parse().ok();
    routes.split_whitespace().filter_map(subnet).collect()
}

fn ip(arguments: &[&str]) -> Result<String> {
    command::output(Command::new("ip").args(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_is_taken_by_any_route_into_it() {
        let routes =
            "default via 192.168.1.1 dev eth0\n10.88.1.0/24 dev a proto kernel src 10.88.1.1\nlocal 10.88.7.1 dev b\n";
        assert_eq!(taken(routes), BTreeSet::from([1, 7]));
    }
}
