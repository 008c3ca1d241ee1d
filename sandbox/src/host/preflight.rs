//! Reports what a sandbox lacks, with a remedy, before anything is changed.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use super::{HostError, Result, cgroup};
use crate::config::{Config, ControlPlane, Interception};

const BUILD: &str = "it belongs beside `weft`, where `install.sh` puts it; from the sources, `cargo build` or `cargo xtask demo` builds it";

/// Checks whether user, kernel, tools and binaries are sufficient for this sandbox.
///
/// # Errors
/// The first thing that is missing, with a remedy.
pub fn check(config: &Config) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Err(HostError::NotRoot);
    }
    cgroup::mount_point()?;
    if config.interception == Interception::Ebpf {
        if !Path::new("/sys/kernel/btf/vmlinux").exists() {
            return Err(HostError::NoBtf);
        }
        let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !known.lines().any(|line| line.split_whitespace().next_back() == Some("bpf")) {
            return Err(HostError::NoBpffs);
        }
    }
    find_tool("nft", "nftables")?;
    if config.interception == Interception::Iptables {
        find_tool("iptables-nft-restore", "iptables")?;
        find_tool("ip6tables-nft-restore", "iptables")?;
    }
    binaries(config).into_iter().try_for_each(find_binary)
}

fn binaries(config: &Config) -> Vec<(PathBuf, &'static str)> {
    let built = |name: &str| (config.bin_dir.join(name), BUILD);
    let mut needed = vec![built("weft")];
    if config.interception == Interception::Ebpf {
        needed.push((
            config.bin_dir.join("weft-agent"),
            "it belongs beside `weft`, where `install.sh` puts it; from the sources, `cargo xtask ebpf` and `cargo build` build it",
        ));
    }
    needed.push(match &config.proxy {
        Some(path) => (path.clone(), "give the program of another proxy with `--proxy PATH`, or leave the flag out"),
        None => built("weft-proxy"),
    });
    if config.control_plane == ControlPlane::Weft {
        needed.push(built("weft-control-plane"));
    }
    needed
}

fn find_binary((path, remedy): (PathBuf, &'static str)) -> Result<()> {
    if path.is_file() { Ok(()) } else { Err(HostError::MissingBinary { path, remedy }) }
}

fn find_tool(tool: &'static str, package: &'static str) -> Result<()> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).any(|dir| dir.join(tool).is_file());
    if found { Ok(()) } else { Err(HostError::MissingTool { tool, package }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sandbox_needs_its_own_binaries() {
        let mut config = Config::new("a", "/m", "/b").unwrap();
        let names = |config: &Config| -> Vec<PathBuf> { binaries(config).into_iter().map(|(path, _)| path).collect() };
        assert_eq!(names(&config).len(), 4);
        config.interception = Interception::Iptables;
        config.proxy = Some("/other/proxy".into());
        config.control_plane = ControlPlane::None;
        assert_eq!(names(&config), [PathBuf::from("/b/weft"), "/other/proxy".into()]);
    }

    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let error = find_binary(("/nowhere/weft".into(), BUILD)).unwrap_err().to_string();
        assert!(error.contains("/nowhere/weft") && error.contains("cargo build"), "{error}");
        assert!(find_tool("no-such-tool", "nothing").is_err());
        assert!(find_tool("sh", "dash").is_ok());
    }
}
