//! linkerd-init's interception: its chains and rules, in its order (linkerd2-proxy-init, pkg/iptables/iptables.go), by
//! the nft variant of iptables, which it prefers.

use std::{
    fmt::Write as _,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    case::{ADMIN_PORT, CONTROL_PORT, INBOUND_PORT, OUTBOUND_PORT, SKIPPED_INBOUND, SKIPPED_OUTBOUND, SKIPPED_SUBNETS},
    fixture::Rules,
};

const V4: &str = "iptables-nft-restore";
const V6: &str = "ip6tables-nft-restore";

/// Installs the rules in place of all others.
pub(crate) fn install(netns: &Path, rules: &Rules) {
    restore(netns, V4, &table(rules, false));
    let v6 = if rules.ipv6 { table(rules, true) } else { String::new() };
    restore(netns, V6, &v6);
}

/// Removes them.
pub(crate) fn flush(netns: &Path) {
    [V4, V6].iter().for_each(|restorer| restore(netns, restorer, ""));
}

/// Installs or removes rules that require connection tracking and accept everything.
pub(crate) fn track(netns: &Path, on: bool) {
    let rules = if on { "-A INPUT -m conntrack --ctstate NEW,ESTABLISHED -j ACCEPT\n" } else { "" };
    for restorer in [V4, V6] {
        feed(netns, restorer, &format!("*filter\n{rules}COMMIT\n"));
    }
}

fn restore(netns: &Path, restorer: &str, rules: &str) {
    feed(netns, restorer, &format!("*nat\n{rules}COMMIT\n"));
}

fn feed(netns: &Path, restorer: &str, input: &str) {
    let mut child = Command::new("nsenter")
        .args([&format!("--net={}", netns.display()), restorer, "--wait"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("nsenter: {error}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{restorer} refused:\n{input}");
}

fn table(rules: &Rules, v6: bool) -> String {
    let ports = |ports: &[u16]| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let mut text = String::from(":PROXY_INIT_REDIRECT - [0:0]\n:PROXY_INIT_OUTPUT - [0:0]\n");
    let mut rule = |rule: &str| {
        let _ = writeln!(text, "-A {rule}");
    };
    rule(&format!(
        "PROXY_INIT_REDIRECT -p tcp -m multiport --dports {} -j RETURN",
        ports(&[&[CONTROL_PORT, ADMIN_PORT], SKIPPED_INBOUND.as_slice()].concat())
    ));
    for subnet in SKIPPED_SUBNETS.iter().filter(|subnet| subnet.contains(':') == v6) {
        rule(&format!("PROXY_INIT_REDIRECT -s {subnet} -j RETURN"));
    }
    let only = rules.only_port.map(|port| format!("--dport {port} ")).unwrap_or_default();
    rule(&format!("PROXY_INIT_REDIRECT -p tcp {only}-j REDIRECT --to-port {INBOUND_PORT}"));
    rule(&format!("PROXY_INIT_OUTPUT -m owner --uid-owner {} -j RETURN", rules.proxy_uid));
    if let Some(gid) = rules.proxy_gid {
        rule(&format!("PROXY_INIT_OUTPUT -m owner --gid-owner {gid} -j RETURN"));
    }
    rule("PROXY_INIT_OUTPUT -o lo -j RETURN");
    rule(&format!("PROXY_INIT_OUTPUT -p tcp -m multiport --dports {} -j RETURN", ports(&SKIPPED_OUTBOUND)));
    rule(&format!("PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-port {OUTBOUND_PORT}"));
    rule("PREROUTING -j PROXY_INIT_REDIRECT");
    rule("OUTPUT -j PROXY_INIT_OUTPUT");
    text
}
