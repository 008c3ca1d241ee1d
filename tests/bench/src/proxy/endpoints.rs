//! A Service with thousands of endpoints, of which some are removed and added while requests run.
//!
//! All endpoints are the server's pod: its network namespace accepts a whole range of addresses, and its proxy those
//! too (`LINKERD2_PROXY_INBOUND_IPS` is empty in pods.yaml). To the control plane each is a pod of its own, in
//! manifests beside those that the sandbox publishes. So the client's proxy balances over them, with a connection and a
//! TLS session for each that it has picked.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::{process::Command, sync::oneshot, task::JoinHandle, time::MissedTickBehavior};
use weft_sandbox::state::write_atomically;

use crate::load::server;

/// Endpoints that are removed or added, per second.
const CHANGES_PER_SECOND: u32 = 20;
/// Endpoints of a slice, as Kubernetes' controller makes them.
const PER_SLICE: u32 = 100;
/// The range that the server's network namespace accepts; no pod has an address in it.
const RANGE: &str = "10.251.0.0/16";
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 251, 0, 1);
/// An address of the Services' range that the sandbox assigns to no Service so early.
const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 250, 1);
const SERVICE: &str = "many";
/// The manifest of the server's pod, as the sandbox names it.
const SERVER: &str = "pod.core_bench_server.json";

/// The sandbox that gets the Service.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    /// The directory that the control plane reads.
    pub(super) published: PathBuf,
    /// The node's network namespace.
    pub(super) node: PathBuf,
    /// The server's network namespace.
    pub(super) server: PathBuf,
    /// The server's address.
    pub(super) server_ip: IpAddr,
}

/// The published Service.
pub(crate) struct ManyEndpoints {
    published: PathBuf,
    endpoints: u32,
}

/// Changes of the endpoints, until it is ended.
pub(super) struct Churn {
    end: oneshot::Sender<()>,
    task: JoinHandle<anyhow::Result<u64>>,
}

impl ManyEndpoints {
    /// Publishes the Service with `endpoints` endpoints, replacing an earlier one.
    ///
    /// # Errors
    /// The networks or the manifests cannot be changed.
    pub(super) async fn publish(surroundings: &Surroundings, endpoints: u32) -> anyhow::Result<Self> {
        let via = surroundings.server_ip.to_string();
        ip(&surroundings.server, &["route", "replace", "local", RANGE, "dev", "lo"]).await?;
        let link = link_to(&surroundings.node, &via).await?;
        ip(&surroundings.node, &["route", "replace", RANGE, "via", &via, "dev", &link, "onlink"]).await?;
        let many = Self { published: surroundings.published.clone(), endpoints };
        for entry in fs::read_dir(&many.published)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(SERVICE)) {
                fs::remove_file(path)?;
            }
        }
        let server = fs::read(many.published.join(SERVER)).context("the server's pod is not published")?;
        let server: Value = serde_json::from_slice(&server)?;
        for slice in 0..endpoints.div_ceil(PER_SLICE) {
            let pods: Vec<_> = many.of(slice).map(|number| pod(&server, number).to_string()).collect();
            many.write(&format!("{SERVICE}-pods-{slice}.yaml"), &pods.join("\n---\n"))?;
            many.write_slice(slice, None)?;
        }
        many.write(&format!("{SERVICE}.json"), &service().to_string())?;
        Ok(many)
    }

    /// Where the client dials.
    pub(crate) fn target() -> SocketAddr {
        SocketAddr::from((CLUSTER_IP, server::HTTP1))
    }

    /// Removes an endpoint and adds it again, one after the other, until the end.
    pub(super) fn churn(&self) -> Churn {
        let (end, mut ended) = oneshot::channel();
        let many = Self { published: self.published.clone(), endpoints: self.endpoints };
        let task = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(1) / CHANGES_PER_SECOND);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            let mut changes = 0;
            for number in (0..many.endpoints).step_by(7).cycle() {
                for without in [Some(number), None] {
                    tokio::select! {
                        _ = &mut ended => {
                            many.write_slice(number / PER_SLICE, None)?;
                            return Ok(changes);
                        }
                        _ = ticks.tick() => {}
                    }
                    many.write_slice(number / PER_SLICE, without)?;
                    changes += 1;
                }
            }
            bail!("a Service without endpoints")
        });
        Churn { end, task }
    }

    /// Numbers of the endpoints of a slice.
    fn of(&self, slice: u32) -> impl Iterator<Item = u32> + use<> {
        let first = slice * PER_SLICE;
        first..(first + PER_SLICE).min(self.endpoints)
    }

    fn write_slice(&self, slice: u32, without: Option<u32>) -> anyhow::Result<()> {
        let endpoints: Vec<_> = self.of(slice).filter(|number| Some(*number) != without).map(endpoint).collect();
        let object = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": format!("{SERVICE}-{slice}"), "namespace": "bench",
                "labels": {"kubernetes.io/service-name": SERVICE},
            },
            "ports": [{"name": "http1", "port": server::HTTP1, "protocol": "TCP"}],
            "endpoints": endpoints,
        });
        self.write(&format!("{SERVICE}-slice-{slice}.json"), &object.to_string())
    }

    fn write(&self, file: &str, text: &str) -> anyhow::Result<()> {
        let path = self.published.join(file);
        write_atomically(&path, text.as_bytes()).with_context(|| format!("write {}", path.display()))
    }
}

impl Churn {
    /// Ends it, and returns the number of changes.
    ///
    /// # Errors
    /// A manifest could not be written.
    pub(super) async fn end(self) -> anyhow::Result<u64> {
        let _ = self.end.send(());
        self.task.await?
    }
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(FIRST) + number)
}

fn name(number: u32) -> String {
    format!("{SERVICE}-{number}")
}

/// The server's pod under another name and address.
fn pod(server: &Value, number: u32) -> Value {
    let mut pod = server.clone();
    let address = address(number).to_string();
    pod["metadata"]["name"] = name(number).into();
    pod["metadata"]["uid"] = name(number).into();
    // Not one of the server's own Service.
    pod["metadata"]["labels"]["app"] = SERVICE.into();
    pod["status"]["podIP"] = address.clone().into();
    pod["status"]["podIPs"] = json!([{"ip": address}]);
    pod
}

fn endpoint(number: u32) -> Value {
    json!({
        "addresses": [address(number).to_string()],
        "conditions": {"ready": true, "serving": true},
        "targetRef": {"kind": "Pod", "namespace": "bench", "name": name(number), "uid": name(number)},
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": SERVICE, "namespace": "bench"},
        "spec": {
            "clusterIP": CLUSTER_IP.to_string(), "clusterIPs": [CLUSTER_IP.to_string()], "type": "ClusterIP",
            "selector": {"app": SERVICE},
            "ports": [{"name": "http1", "port": server::HTTP1, "targetPort": server::HTTP1, "protocol": "TCP"}],
        },
    })
}

/// The interface by which the node reaches a pod.
async fn link_to(node: &Path, address: &str) -> anyhow::Result<String> {
    let route = ip(node, &["route", "get", address]).await?;
    let mut words = route.split_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).map(str::to_owned).with_context(|| format!("no interface in {route:?}"))
}

/// Runs `ip` in a network namespace.
async fn ip(netns: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let name = netns.file_name().context("a network namespace without a name")?;
    let output = Command::new("ip").arg("-netns").arg(name).args(arguments).output().await.context("start ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(directory: &Path, slice: u32) -> Vec<String> {
        let text = fs::read(directory.join(format!("{SERVICE}-slice-{slice}.json"))).unwrap();
        let slice: Value = serde_json::from_slice(&text).unwrap();
        let address = |endpoint: &Value| endpoint["addresses"][0].as_str().unwrap_or_default().to_owned();
        slice["endpoints"].as_array().unwrap().iter().map(address).collect()
    }

    #[test]
    fn slices_share_the_endpoints_and_no_address_is_there_twice() {
        let directory = tempfile::tempdir().unwrap();
        let many = ManyEndpoints { published: directory.path().to_owned(), endpoints: 250 };
        let mut all = Vec::new();
        for slice in 0..3 {
            many.write_slice(slice, None).unwrap();
            all.extend(endpoints(directory.path(), slice));
        }
        assert_eq!(all.len(), 250);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 250);
        many.write_slice(2, Some(249)).unwrap();
        assert_eq!(endpoints(directory.path(), 2).len(), 49);
    }

    #[tokio::test]
    async fn churn_ends_with_every_endpoint_in_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let many = ManyEndpoints { published: directory.path().to_owned(), endpoints: 8 };
        many.write_slice(0, None).unwrap();
        let churn = many.churn();
        let changed = weft_test_kit::wait::until(Duration::from_secs(30), async || {
            anyhow::ensure!(endpoints(directory.path(), 0).len() == 7, "no endpoint is gone");
            Ok(())
        });
        changed.await.unwrap();
        assert!(churn.end().await.unwrap() > 0);
        assert_eq!(endpoints(directory.path(), 0).len(), 8);
    }
}
