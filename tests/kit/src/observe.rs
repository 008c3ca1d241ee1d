//! Inspects the host and pods from outside the mesh, so that no part of the mesh can hide its own miscounts.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use weft_sandbox::{
    config::{Layout, RUN_DIR},
    host::mounts,
};

/// The netfilter state of a pod's network namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Netfilter {
    /// Rules of iptables, ip6tables and nftables in every table and chain.
    pub rules: usize,
    /// Connections that the kernel tracks.
    pub conntrack: usize,
}

/// Counts the netfilter state of a network namespace.
///
/// # Errors
/// `nsenter`, `nft` or `iptables-legacy-save` is missing or fails: the state is then unknown, not zero.
pub fn netfilter(netns: &Path) -> io::Result<Netfilter> {
    let nft = inside(netns, &["nft", "--json", "list", "ruleset"])?;
    let ruleset: serde_json::Value = serde_json::from_str(&nft).map_err(io::Error::other)?;
    let mut rules = count_nft_rules(&ruleset);
    // Tables of the old interface are not visible in nftables; its -save commands print nothing if the kernel has none.
    for program in ["iptables-legacy-save", "ip6tables-legacy-save"] {
        rules += count_legacy_rules(&inside(netns, &[program])?);
    }
    let count = inside(netns, &["cat", "/proc/sys/net/netfilter/nf_conntrack_count"]);
    let conntrack = match count {
        Ok(text) => text.trim().parse().map_err(io::Error::other)?,
        // A kernel without connection tracking tracks nothing.
        Err(_) if !Path::new("/proc/sys/net/netfilter/nf_conntrack_max").exists() => 0,
        Err(error) => return Err(error),
    };
    Ok(Netfilter { rules, conntrack })
}

fn count_nft_rules(ruleset: &serde_json::Value) -> usize {
    let objects = ruleset.get("nftables").and_then(serde_json::Value::as_array);
    objects.map_or(0, |objects| objects.iter().filter(|object| object.get("rule").is_some()).count())
}

fn count_legacy_rules(saved: &str) -> usize {
    saved.lines().filter(|line| line.starts_with("-A ")).count()
}

fn inside(netns: &Path, command: &[&str]) -> io::Result<String> {
    let output = Command::new("nsenter").arg(format!("--net={}", netns.display())).arg("--").args(command).output()?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("{} in {}: {}", command.join(" "), netns.display(), error.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Everything on this host that has a sandbox's name: namespaces, links, cgroups, files, mounts, processes. Empty after
/// a sandbox has cleaned up.
///
/// # Errors
/// The host's own tables cannot be read.
pub fn leftovers(sandbox: &str) -> io::Result<BTreeSet<String>> {
    let layout = Layout::of(sandbox);
    let run_dir = layout.run_dir();
    let cgroup_name = layout.cgroup();
    let mut found = BTreeSet::new();
    for entry in entries(Path::new("/run/netns"))? {
        if file_name(&entry).starts_with(&layout.netns_prefix()) {
            found.insert(format!("namespace {}", entry.display()));
        }
    }
    for entry in entries(Path::new(RUN_DIR))? {
        let name = file_name(&entry);
        if name == sandbox || name.strip_prefix(sandbox).is_some_and(|rest| rest.starts_with('.')) {
            found.insert(format!("files {}", entry.display()));
        }
    }
    for (target, kind) in mounts().map_err(io::Error::other)? {
        if target.starts_with(&run_dir) {
            found.insert(format!("mount {}", target.display()));
        }
        let cgroup = target.join(&cgroup_name);
        if kind == "cgroup2" && fs::exists(&cgroup)? {
            found.insert(format!("cgroup {}", cgroup.display()));
        }
    }
    for process in entries(Path::new("/proc"))? {
        // Processes start and end while the table is read.
        let Ok(command) = fs::read(process.join("cmdline")) else { continue };
        if command.is_empty() {
            // A zombie: dead already, and without resources.
            continue;
        }
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let cgroup = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
        let inside = cgroup.lines().any(|line| line.split('/').any(|part| Path::new(part) == cgroup_name));
        if inside || command.contains(&format!("{}/", run_dir.display())) {
            found.insert(format!("process {} {}", file_name(&process), command.trim()));
        }
    }
    Ok(found)
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_rules_and_not_tables_or_chains() {
        let ruleset = serde_json::json!({"nftables": [
            {"metainfo": {}}, {"table": {}}, {"chain": {}}, {"rule": {}}, {"rule": {}}
        ]});
        assert_eq!(count_nft_rules(&ruleset), 2);
        assert_eq!(count_legacy_rules("*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j X\n-A X -j RETURN\nCOMMIT\n"), 2);
        assert_eq!(count_legacy_rules(""), 0);
    }
}
