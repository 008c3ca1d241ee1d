//! `weft version`: of this program, of the control plane and of proxies, in Linkerd's form; and of this host, for bug
//! reports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
};

use anyhow::{Result, anyhow};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use serde::Serialize;
use weft_k8s_api::{labels, printable};

use crate::{
    cluster::{Cluster, ClusterArgs},
    mesh::{is_agent, list, pods},
    output::{self, Format, note, progress},
};

/// Printed for an unknown version, as Linkerd does.
const UNAVAILABLE: &str = "unavailable";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  weft version                    of this program and of the control plane
  weft version --client --short   for scripts
  weft version --proxy -n shop    also of the proxies in a namespace
  weft version -o json            also the host, for bug reports

Ends with 0 also when no control plane can be asked: its version is `unavailable` then, and standard error says why.")]
pub(crate) struct VersionArgs {
    /// Only of this program
    #[arg(long, conflicts_with_all = ["proxy", "namespace"])]
    client: bool,
    /// Only the versions
    #[arg(long)]
    short: bool,
    /// Also of the proxies of meshed pods
    #[arg(long)]
    proxy: bool,
    /// With --proxy: only of this namespace [default: all]
    #[arg(short, long, requires = "proxy")]
    namespace: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Default, Serialize)]
struct Version {
    /// Of this program.
    version: &'static str,
    /// The commit that this program was built from; `None` outside `cargo xtask dist`, which sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<&'static str>,
    architecture: &'static str,
    operating_system: &'static str,
    /// `None` if /proc is not mounted.
    kernel: Option<String>,
    /// Of the control plane; `None` if it was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<String>,
    /// Number of pods by the version of their proxies.
    #[serde(skip_serializing_if = "Option::is_none")]
    proxies: Option<BTreeMap<String, usize>>,
}

pub(crate) async fn execute(args: &VersionArgs) -> Result<()> {
    let mut version = Version {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("WEFT_GIT_SHA").filter(|commit| !commit.is_empty()),
        architecture: std::env::consts::ARCH,
        operating_system: std::env::consts::OS,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|release| release.trim().to_owned()),
        ..Version::default()
    };
    if !args.client {
        let asked = async {
            match args.cluster.cluster().await {
                Ok(cluster) => ask(args, &cluster).await,
                Err(error) => (Err(error), None),
            }
        };
        let (server, proxies) = progress::during("the pods of the control plane", asked).await;
        version.server = Some(server.unwrap_or_else(|error| {
            note(&format!("the control plane's version: {error:#}"));
            UNAVAILABLE.to_owned()
        }));
        version.proxies = proxies.transpose().unwrap_or_else(|error| {
            note(&format!("the proxies' versions: {error:#}"));
            None
        });
    }
    match args.output.data() {
        Some(data) => data.print(&version),
        None => Ok(output::styled(text(&version, args).trim_end())?),
    }
}

async fn ask(args: &VersionArgs, cluster: &Cluster) -> (Result<String>, Option<Result<BTreeMap<String, usize>>>) {
    let server = async {
        let of_control_plane = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
        let wanted = ListParams::default().labels(labels::CONTROL_PLANE_COMPONENT);
        let found = list(of_control_plane, &wanted).await;
        let found = found.map_err(|error| anyhow!("pods in namespace {}: {error}", cluster.namespace))?;
        of_server(&found).ok_or_else(|| anyhow!("namespace {} has no control plane; see -L", cluster.namespace))
    };
    if !args.proxy {
        return (server.await, None);
    }
    let proxies = async {
        let meshed = match &args.namespace {
            Some(namespace) => Api::<Pod>::namespaced(cluster.client.clone(), namespace),
            None => Api::all(cluster.client.clone()),
        };
        let wanted = ListParams::default().labels(&format!("{}={}", labels::CONTROL_PLANE_NS, cluster.namespace));
        let found = list(meshed, &wanted).await.map_err(|error| anyhow!("pods with a proxy: {error}"))?;
        Ok(of_proxies(&found))
    };
    let (server, proxies) = futures::join!(server, proxies);
    (server, Some(proxies))
}

/// The version of the control plane's own containers; several during an upgrade.
fn of_server(all: &[Pod]) -> Option<String> {
    let own = all.iter().filter(|pod| !is_agent(pod) && !pods::is_over(pod) && !pods::is_leaving(pod));
    let versions: BTreeSet<&str> = own.flat_map(pods::own_versions).collect();
    (!versions.is_empty()).then(|| versions.into_iter().collect::<Vec<_>>().join(", "))
}

fn of_proxies(all: &[Pod]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for pod in all.iter().filter(|pod| !pods::is_over(pod)) {
        if let Some(image) = pods::proxy_container(pod).and_then(|proxy| proxy.image.as_deref()) {
            *counts.entry(pods::version(image).to_owned()).or_default() += 1;
        }
    }
    counts
}

fn text(version: &Version, args: &VersionArgs) -> String {
    let mut text = String::new();
    let label = |label: &str| if args.short { String::new() } else { format!("{label} version: ") };
    let _ = writeln!(text, "{}{}", label("Client"), version.version);
    if let Some(commit) = version.commit.filter(|_| !args.short) {
        let _ = writeln!(text, "Client commit: {commit}");
    }
    if let Some(server) = &version.server {
        let _ = writeln!(text, "{}{}", label("Server"), printable::line(server));
    }
    if !args.proxy {
        return text;
    }
    if !args.short {
        text.push_str("Proxy versions:\n");
    }
    let proxies = version.proxies.as_ref().filter(|proxies| !proxies.is_empty());
    let Some(proxies) = proxies else { return text + if args.short { UNAVAILABLE } else { "\tunavailable" } };
    for (version, count) in proxies {
        let version = printable::line(version);
        let _ = match args.short {
            true => writeln!(text, "{version}"),
            false => writeln!(text, "\t{version} ({count} {})", if *count == 1 { "pod" } else { "pods" }),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        version: VersionArgs,
    }

    fn printed(args: &[&str], version: &Version) -> String {
        text(version, &Cli::try_parse_from(std::iter::once("weft").chain(args.iter().copied())).unwrap().version)
    }

    fn pod(component: &str, image: &str, proxy: &str) -> Pod {
        serde_json::from_value(
            json!({"metadata": {"name": "a", "labels": {"linkerd.io/control-plane-component": component}},
            "spec": {"containers": [{"name": "it", "image": image}, {"name": "linkerd-proxy", "image": proxy}]},
            "status": {"phase": "Running"}}),
        )
        .unwrap()
    }

    #[test]
    fn the_form_is_linkerds() {
        let version = Version {
            version: "0.1.0",
            server: Some("0.0.9".into()),
            proxies: Some([("0.0.8".into(), 1), ("0.0.9".into(), 3)].into()),
            ..Version::default()
        };
        let proxies = "Proxy versions:\n\t0.0.8 (1 pod)\n\t0.0.9 (3 pods)\n";
        assert_eq!(printed(&["--proxy"], &version), format!("Client version: 0.1.0\nServer version: 0.0.9\n{proxies}"));
        assert_eq!(printed(&["--proxy", "--short"], &version), "0.1.0\n0.0.9\n0.0.8\n0.0.9\n");
        let built = Version { version: "0.1.0", commit: Some("0a1b2c"), ..Version::default() };
        assert_eq!(printed(&["--client"], &built), "Client version: 0.1.0\nClient commit: 0a1b2c\n");
        assert_eq!(printed(&["--client", "--short"], &built), "0.1.0\n");
        let client = Version { version: "0.1.0", ..Version::default() };
        assert_eq!(printed(&["--client"], &client), "Client version: 0.1.0\n");
        assert_eq!(printed(&["--client", "--short"], &client), "0.1.0\n");
        assert!(printed(&["--proxy"], &client).ends_with("Proxy versions:\n\tunavailable"));
    }

    #[test]
    fn versions_are_those_of_images() {
        let all = [
            pod("identity", "r/weft-control-plane:0.2.0", "r/weft-proxy:0.1.0"),
            pod("destination", "r/weft-control-plane:0.1.0", "r/weft-proxy:0.1.0"),
            pod("agent", "r/weft-agent:0.0.1", "r/weft-proxy:0.1.0"),
        ];
        assert_eq!(of_server(&all).as_deref(), Some("0.1.0, 0.2.0"));
        assert_eq!(of_proxies(&all), BTreeMap::from([("0.1.0".to_owned(), 3)]));
        assert_eq!(of_server(&[]), None);
    }
}
