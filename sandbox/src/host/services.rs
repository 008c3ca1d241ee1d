//! Cluster IPs for clients outside the mesh: address translation in the node's namespace, as kube-proxy does.
//!
//! The rules are one nft table, which is replaced completely in one transaction. Meshed clients do not use it: their
//! proxies choose endpoints themselves. A Service without endpoints refuses at once instead of letting clients wait.

use std::{
    fmt::Write as _,
    io::Write as _,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
};

use super::{
    HostError, Result, netns,
    network::{NODE_V4, NODE_V6},
};
use crate::config::{DNS_ADDRESS, SERVICE_CIDR_V4};

/// The transport of a Service's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualService {
    /// The cluster IP.
    pub address: IpAddr,
    /// The Service's port.
    pub port: u16,
    /// TCP and UDP may have the same port and other endpoints.
    pub protocol: Protocol,
    /// The endpoints, each with the same probability. Those of the other address family are omitted.
    pub endpoints: Vec<SocketAddr>,
}

/// Replaces the node's Services. Established connections are not affected.
///
/// # Errors
/// When `nft` is missing or fails.
pub async fn apply(node_netns: &Path, services: &[VirtualService]) -> Result<()> {
    let rules = rules(services);
    netns::within_blocking(node_netns, move || feed("nft", &["-f", "-"], "replace the Services' rules", &rules)).await?
}

/// Runs a tool in the calling thread's namespace with this input.
pub(super) fn feed(tool: &'static str, arguments: &[&str], act: &'static str, input: &str) -> Result<()> {
    let failed = |source| HostError::RunTool { tool, source };
    let mut child = Command::new(tool)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // These tools read all input before they print anything, or exit early: then their output is the better error.
    let fed = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(HostError::ToolFailed { tool, act, stderr });
    }
    fed.map_err(failed)
}

/// The table, for `nft -f`. It is declared before it is deleted, so that the deletion succeeds the first time too.
fn rules(services: &[VirtualService]) -> String {
    let (mut translate, mut refuse, mut hairpin_v4, mut hairpin_v6) =
        (String::new(), String::new(), String::new(), String::new());
    for service in services {
        let matches = matches(service);
        let endpoints: Vec<_> =
            service.endpoints.iter().filter(|endpoint| endpoint.is_ipv4() == service.address.is_ipv4()).collect();
        if endpoints.is_empty() {
            let _ = writeln!(refuse, "    {matches} {}", rejection(service.protocol));
            continue;
        }
        let choices: Vec<String> = endpoints
            .iter()
            .enumerate()
            .map(|(index, endpoint)| format!("{index} : {} . {}", endpoint.ip(), endpoint.port()))
            .collect();
        let _ = writeln!(
            translate,
            "    {matches} dnat {} to numgen random mod {} map {{ {} }}",
            family(service.address),
            choices.len(),
            choices.join(", ")
        );
        // A client that is its own backend would answer itself directly, and not recognise the answer.
        for ip in endpoints.iter().map(|endpoint| endpoint.ip()) {
            let (list, node) = match ip {
                IpAddr::V4(_) => (&mut hairpin_v4, IpAddr::V4(NODE_V4)),
                IpAddr::V6(_) => (&mut hairpin_v6, IpAddr::V6(NODE_V6)),
            };
            let rule = format!("    {0} saddr {ip} {0} daddr {ip} snat {0} to {node}\n", family(ip));
            if !list.contains(&rule) {
                list.push_str(&rule);
            }
        }
    }
    let (network, bits) = SERVICE_CIDR_V4;
    let stray = format!("ip daddr {network}/{bits} ip daddr != {DNS_ADDRESS}");
    let (tcp, udp) = (rejection(Protocol::Tcp), rejection(Protocol::Udp));
    format!(
        "table inet weft\ndelete table inet weft\ntable inet weft {{\n  \
         chain services {{\n{translate}  }}\n  \
         chain refuse {{\n{refuse}    {stray} meta l4proto tcp {tcp}\n    {stray} {udp}\n  }}\n  \
         chain prerouting {{\n    type nat hook prerouting priority dstnat\n    jump services\n  }}\n  \
         chain output {{\n    type nat hook output priority -100\n    jump services\n  }}\n  \
         chain postrouting {{\n    type nat hook postrouting priority srcnat\n{hairpin_v4}{hairpin_v6}  }}\n  \
         chain forward {{\n    type filter hook forward priority filter\n    jump refuse\n  }}\n  \
         chain local {{\n    type filter hook output priority filter\n    jump refuse\n  }}\n}}\n"
    )
}

fn matches(service: &VirtualService) -> String {
    let protocol = match service.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    format!("{} daddr {} {protocol} dport {}", family(service.address), service.address, service.port)
}

fn rejection(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "reject with tcp reset",
        Protocol::Udp => "reject with icmpx type port-unreachable",
    }
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(endpoints: &[&str]) -> VirtualService {
        VirtualService {
            address: "10.96.0.20".parse().unwrap(),
            port: 80,
            protocol: Protocol::Tcp,
            endpoints: endpoints.iter().map(|endpoint| endpoint.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn endpoints_share_the_connections() {
        let rules = rules(&[service(&["10.244.0.10:8080", "10.244.0.11:8080"])]);
        assert!(
            rules.contains(
                "ip daddr 10.96.0.20 tcp dport 80 dnat ip to numgen random mod 2 map \
                 { 0 : 10.244.0.10 . 8080, 1 : 10.244.0.11 . 8080 }"
            ),
            "{rules}"
        );
        assert!(!rules.contains("dport 80 reject"), "{rules}");
    }

    #[test]
    fn without_endpoints_of_its_family_a_service_refuses() {
        for endpoints in [&[][..], &["[fd00:10:244::a]:8080"]] {
            let rules = rules(&[service(endpoints)]);
            assert!(rules.contains("ip daddr 10.96.0.20 tcp dport 80 reject with tcp reset"), "{rules}");
            assert!(!rules.contains("dnat"), "{rules}");
        }
    }
}
