//! linkerd-init's interception: the nat rules that Weft's eBPF programs replace, for comparison.
//!
//! The rules, their order and the names of their chains are linkerd2-proxy-init's (`pkg/iptables/iptables.go`), with
//! the nft variant of iptables, which is its default.

use std::{
    fmt::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use ipnet::IpNet;

use super::{HostError, Result, netns, services::feed};

/// iptables' limit of ports in one multiport match; a range counts as two.
const MULTIPORT_SLOTS: usize = 15;
const REDIRECT_CHAIN: &str = "PROXY_INIT_REDIRECT";
const OUTPUT_CHAIN: &str = "PROXY_INIT_OUTPUT";

/// Parameters of linkerd-init.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitRules {
    /// User whose connections are not redirected; Linkerd's default is 2102.
    pub proxy_uid: u32,
    /// The proxy's port for connections from outside; Linkerd's default is 4143.
    pub inbound_port: u16,
    /// The proxy's port for connections to the outside; Linkerd's default is 4140.
    pub outbound_port: u16,
    /// Ports and ranges (`8000-8100`) whose inbound connections are not redirected.
    pub skip_inbound: Vec<String>,
    /// Ports and ranges whose outbound connections are not redirected.
    pub skip_outbound: Vec<String>,
    /// Source networks whose inbound connections are not redirected.
    pub skip_subnets: Vec<String>,
    /// Whether IPv6 is redirected too.
    pub ipv6: bool,
}

/// The programs of one address family.
struct Family {
    iptables: &'static str,
    restore: &'static str,
    is_v6: bool,
}

const V4: Family = Family { iptables: "iptables-nft", restore: "iptables-nft-restore", is_v6: false };
const V6: Family = Family { iptables: "ip6tables-nft", restore: "ip6tables-nft-restore", is_v6: true };

/// Installs the rules in a pod's namespace, IPv4 first. A second call replaces them.
///
/// # Errors
/// When a port or network is invalid, or iptables is missing or fails.
pub async fn install(netns: &Path, rules: &InitRules) -> Result<()> {
    let families: Vec<Family> = if rules.ipv6 { vec![V4, V6] } else { vec![V4] };
    let mut tables = Vec::new();
    for family in families {
        let table = table(rules, family.is_v6)?;
        tables.push((family, table));
    }
    netns::within_blocking(netns, move || {
        for (family, table) in tables {
            let jumps: String = [("PREROUTING", REDIRECT_CHAIN), ("OUTPUT", OUTPUT_CHAIN)]
                .into_iter()
                .filter(|(from, to)| !jumps(family.iptables, from, to))
                .map(|(from, to)| format!("-A {from} -j {to}\n"))
                .collect();
            let input = format!("*nat\n{table}{jumps}COMMIT\n");
            feed(family.restore, &["--noflush", "--wait"], "install the redirection", &input)?;
        }
        Ok(())
    })
    .await?
}

/// Whether a chain already jumps to another.
fn jumps(iptables: &str, from: &str, to: &str) -> bool {
    Command::new(iptables)
        .args(["-w", "-t", "nat", "-C", from, "-j", to])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Both chains, for iptables-restore; naming a chain empties it.
fn table(rules: &InitRules, is_v6: bool) -> Result<String> {
    let mut text = format!(":{REDIRECT_CHAIN} - [0:0]\n:{OUTPUT_CHAIN} - [0:0]\n");
    for ports in multiports(&rules.skip_inbound)? {
        let _ = writeln!(text, "-A {REDIRECT_CHAIN} -p tcp -m multiport --dports {ports} -j RETURN");
    }
    for subnet in &rules.skip_subnets {
        let network: IpNet = subnet
            .parse()
            .map_err(|_| HostError::ParseRule { value: subnet.clone(), expected: "a network like 10.0.0.0/8" })?;
        if matches!(network, IpNet::V6(_)) == is_v6 {
            let _ = writeln!(text, "-A {REDIRECT_CHAIN} -s {network} -j RETURN");
        }
    }
    let _ = writeln!(text, "-A {REDIRECT_CHAIN} -p tcp -j REDIRECT --to-port {}", rules.inbound_port);
    if rules.proxy_uid > 0 {
        let _ = writeln!(text, "-A {OUTPUT_CHAIN} -m owner --uid-owner {} -j RETURN", rules.proxy_uid);
    }
    let _ = writeln!(text, "-A {OUTPUT_CHAIN} -o lo -j RETURN");
    for ports in multiports(&rules.skip_outbound)? {
        let _ = writeln!(text, "-A {OUTPUT_CHAIN} -p tcp -m multiport --dports {ports} -j RETURN");
    }
    let _ = writeln!(text, "-A {OUTPUT_CHAIN} -p tcp -j REDIRECT --to-port {}", rules.outbound_port);
    Ok(text)
}

/// Ports and ranges in as few matches as iptables allows.
fn multiports(ports: &[String]) -> Result<Vec<String>> {
    let mut matches: Vec<(usize, String)> = Vec::new();
    for port in ports {
        let (text, slots) = parse_ports(port)?;
        match matches.last_mut() {
            Some((used, list)) if *used + slots <= MULTIPORT_SLOTS => {
                *used += slots;
                let _ = write!(list, ",{text}");
            }
            _ => matches.push((slots, text)),
        }
    }
    Ok(matches.into_iter().map(|(_, list)| list).collect())
}

fn parse_ports(value: &str) -> Result<(String, usize)> {
    let wrong = || HostError::ParseRule { value: value.to_owned(), expected: "a port or a range like 8000-8100" };
    let parse = |text: &str| text.trim().parse::<u16>().map_err(|_| wrong());
    match value.split_once('-') {
        None => Ok((parse(value)?.to_string(), 1)),
        Some((first, last)) => {
            let (first, last) = (parse(first)?, parse(last)?);
            if first > last {
                return Err(wrong());
            }
            Ok((format!("{first}:{last}"), 2))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> InitRules {
        InitRules {
            proxy_uid: 2102,
            inbound_port: 4143,
            outbound_port: 4140,
            skip_inbound: vec!["4190".into(), "4191".into(), "8000-8100".into()],
            skip_outbound: vec!["443".into()],
            skip_subnets: vec!["192.168.0.0/16".into(), "fd00::/8".into()],
            ipv6: true,
        }
    }

    #[test]
    fn rules_are_linkerd_inits() {
        let expected = "\
:PROXY_INIT_REDIRECT - [0:0]
:PROXY_INIT_OUTPUT - [0:0]
-A PROXY_INIT_REDIRECT -p tcp -m multiport --dports 4190,4191,8000:8100 -j RETURN
-A PROXY_INIT_REDIRECT -s 192.168.0.0/16 -j RETURN
-A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-port 4143
-A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -j RETURN
-A PROXY_INIT_OUTPUT -o lo -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -m multiport --dports 443 -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-port 4140
";
        assert_eq!(table(&rules(), false).unwrap(), expected);
        assert_eq!(table(&rules(), true).unwrap(), expected.replace("192.168.0.0/16", "fd00::/8"));
    }

    #[test]
    fn many_ports_are_split_where_iptables_must() {
        let ports: Vec<String> = (1..=14).map(|port| port.to_string()).chain(["20-30".to_owned()]).collect();
        let matches = multiports(&ports).unwrap();
        assert_eq!(matches, ["1,2,3,4,5,6,7,8,9,10,11,12,13,14", "20:30"]);
    }

    #[test]
    fn what_is_no_port_is_refused() {
        for port in ["", "http", "70000", "10-", "20-10"] {
            assert!(parse_ports(port).is_err(), "{port}");
        }
    }
}
