//! The network of one cluster: a namespace for each of its machines, and pairs of interfaces.
//!
//! One pair connects the first machine to the host, which reaches the API server through it. The other machines are
//! connected to the first, which routes between them and their pods, so that no rule of the host's firewall matters.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::{Context, Result};
use weft_xtask::command;

use super::cluster::{Cluster, Machine};

/// A machine forwards, and does not ask who else has the addresses of its links.
const SETTINGS: &str = "cd /proc/sys/net && echo 1 >ipv4/ip_forward && echo 1 >ipv6/conf/all/forwarding && \
                        echo 0 >ipv6/conf/default/accept_dad";
/// The first machine answers on the host's network for what is behind it.
const BEHIND: &str = "echo 1 >/proc/sys/net/ipv4/conf/eth0/proxy_arp";

/// Creates namespaces and interfaces.
///
/// # Errors
/// When `ip` fails, with its reason.
pub(crate) fn create(cluster: &Cluster) -> Result<()> {
    let first = cluster.first();
    for machine in cluster.machines() {
        ip(&["netns", "add", &machine.namespace()])?;
        inside(&machine, &["link", "set", "lo", "up"])?;
        set(&machine, SETTINGS)?;
        // The address of a pod that has just gone must not travel by the default route and come back.
        for (family, pods) in ["-4", "-6"].into_iter().zip(machine.pods()) {
            inside(&machine, &[family, "route", "add", "unreachable", &pods])?;
        }
    }
    connect_to_host(cluster, &first)?;
    cluster.machines().skip(1).try_for_each(|machine| connect(&machine, &first))
}

fn connect_to_host(cluster: &Cluster, first: &Machine) -> Result<()> {
    let (link, of_host) = (cluster.link(), cluster.host_address_v6());
    ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &first.namespace()])?;
    ip(&["addr", "add", &format!("{}/24", cluster.host_address()), "dev", &link])?;
    // Nobody else has these addresses; without a look for it they are there at once.
    ip(&["addr", "add", &format!("{of_host}/64"), "dev", &link, "nodad"])?;
    ip(&["link", "set", &link, "up"])?;
    inside(first, &["addr", "add", &format!("{}/24", first.address()), "dev", "eth0"])?;
    inside(first, &["addr", "add", &format!("{}/64", first.address_v6()), "dev", "eth0", "nodad"])?;
    inside(first, &["link", "set", "eth0", "up"])?;
    set(first, BEHIND)?;
    // Without a default route the kernel refuses Service addresses before kube-proxy sees them.
    inside(first, &["route", "add", "default", "via", &cluster.host_address()])?;
    inside(first, &["-6", "route", "add", "default", "via", &of_host])
}

/// Connects a machine to the first one, by addresses without a network and routes for all else.
fn connect(machine: &Machine, first: &Machine) -> Result<()> {
    let link = &machine.directory();
    inside(first, &["link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", &machine.namespace()])?;
    // IPv6 asks for neighbours by interface: the first machine has its address on each.
    inside(first, &["addr", "add", &format!("{}/128", first.address_v6()), "dev", link, "nodad"])?;
    inside(first, &["link", "set", link, "up"])?;
    inside(machine, &["addr", "add", &format!("{}/32", machine.address()), "dev", "eth0"])?;
    inside(machine, &["addr", "add", &format!("{}/128", machine.address_v6()), "dev", "eth0", "nodad"])?;
    inside(machine, &["link", "set", "eth0", "up"])?;
    let [pods, pods_v6] = machine.pods();
    for (family, own, firsts, pods) in
        [("-4", machine.address(), first.address(), pods), ("-6", machine.address_v6(), first.address_v6(), pods_v6)]
    {
        inside(first, &[family, "route", "add", &own, "dev", link, "src", &firsts])?;
        inside(first, &[family, "route", "add", &pods, "via", &own, "dev", link, "src", &firsts])?;
        inside(machine, &[family, "route", "add", &firsts, "dev", "eth0"])?;
        inside(machine, &[family, "route", "add", "default", "via", &firsts, "dev", "eth0"])?;
    }
    Ok(())
}

/// Removes all of it. Succeeds if there is none.
///
/// # Errors
/// When `ip` fails.
pub(crate) fn remove(cluster: &Cluster) -> Result<()> {
    if Path::new("/sys/class/net").join(cluster.link()).exists() {
        ip(&["link", "del", &cluster.link()])?;
    }
    for machine in cluster.machines().filter(|machine| machine.netns().exists()) {
        ip(&["netns", "del", &machine.namespace()])?;
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

/// Runs `ip` for a machine.
fn inside(machine: &Machine, arguments: &[&str]) -> Result<()> {
    ip(&[&["-n", &machine.namespace()], arguments].concat()).map(drop)
}

/// Sets settings of a machine's network by a script.
fn set(machine: &Machine, script: &str) -> Result<()> {
    let mut nsenter = Command::new("nsenter");
    nsenter.arg(format!("--net={}", machine.netns().display())).args(["sh", "-c", script]);
    command::output(&mut nsenter).map(drop)
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
