//! Pods that are objects alone, and what answers as their proxies: one server, which knows by its own address which
//! proxy is asked.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use weft_test_kit::scrape::ScrapeConnection;

use crate::world::{World, object};

/// Requests that a proxy counts between two scrapes.
pub(crate) const REQUESTS: u64 = 100;
/// Upper bounds of the proxies' latency histogram.
const BOUNDS: [&str; 27] = [
    "1", "2", "3", "4", "5", "10", "20", "30", "40", "50", "100", "200", "300", "400", "500", "1000", "2000", "3000",
    "4000", "5000", "10000", "20000", "30000", "40000", "50000", "60000", "+Inf",
];
/// Destinations of each proxy.
const DESTINATIONS: usize = 5;
/// Requests to the API server at a time.
const AT_ONCE: usize = 32;

/// One server for all proxies: the address that was connected to says which one answers.
pub(crate) struct Proxies {
    pub(crate) port: u16,
    /// Scrapes of each.
    scrapes: Arc<Vec<AtomicU64>>,
}

/// The address of a pod, in 127.1.0.0/16: all of 127.0.0.0/8 is this host's.
fn address(number: usize) -> Ipv4Addr {
    let [high, low] = u16::try_from(number).unwrap().to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}

impl Proxies {
    /// Serves that many proxies; the last `silent` ones accept connections and never answer.
    pub(crate) async fn serve(count: usize, silent: usize) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let scrapes: Arc<Vec<AtomicU64>> = Arc::new((0..count).map(|_| AtomicU64::new(0)).collect());
        let counting = Arc::clone(&scrapes);
        tokio::spawn(async move {
            let mut held = Vec::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let IpAddr::V4(asked) = stream.local_addr().unwrap().ip() else { unreachable!() };
                let [_, _, high, low] = asked.octets();
                let number = usize::from(u16::from_be_bytes([high, low]));
                if number + silent >= count {
                    held.push(stream);
                } else {
                    tokio::spawn(answer(stream, number, Arc::clone(&counting)));
                }
            }
        });
        Self { port, scrapes }
    }

    /// Scrapes so far.
    pub(crate) fn scrapes(&self) -> u64 {
        self.scrapes.iter().map(|scrapes| scrapes.load(Ordering::Relaxed)).sum()
    }

    /// Creates their pods: of Deployment `web`, in the world's namespace.
    pub(crate) async fn create(&self, world: &World) {
        let api: Api<Pod> = Api::namespaced(world.client.clone(), &world.namespace);
        let admin = self.port;
        let creating = (0..self.scrapes.len()).map(|number| {
            let api = api.clone();
            async move {
                let (name, ip) = (format!("web-7f9-{number}"), address(number).to_string());
                // Kubernetes' garbage collector deletes pods whose owner is gone; of this version it cannot know.
                let owner = json!({"apiVersion": "apps/v0", "kind": "ReplicaSet", "name": "web-7f9", "uid": "u", "controller": true});
                let proxy = json!({"name": "linkerd-proxy", "image": "x", "ports": [{"name": "linkerd-admin", "containerPort": admin}]});
                let pod: Pod = object(json!({
                    "metadata": {
                        "name": name, "ownerReferences": [owner],
                        "labels": {"app": "web", "pod-template-hash": "7f9", "linkerd.io/control-plane-ns": "linkerd"},
                    },
                    // Pods of a node that is not there are collected as well.
                    "spec": {"schedulerName": "none", "terminationGracePeriodSeconds": 0, "containers": [proxy]},
                }));
                api.create(&PostParams::default(), &pod).await.unwrap();
                let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}});
                api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
            }
        });
        stream::iter(creating).buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}

/// Answers the requests of a connection.
async fn answer(stream: TcpStream, number: usize, scrapes: Arc<Vec<AtomicU64>>) {
    let mut client = ScrapeConnection::new(stream);
    while client.next_request().await {
        let page = exposition(REQUESTS * scrapes[number].fetch_add(1, Ordering::Relaxed));
        if client.answer(&page).await.is_err() {
            return;
        }
    }
}

/// What a proxy exposes that has answered this number of requests, of which one in ten failed, all within 3 ms.
fn exposition(requests: u64) -> String {
    let mut text = String::from("process_start_time_seconds 1\n");
    let mut side = |labels: &str| {
        for (class, status, share) in [("success", 200, 9), ("failure", 500, 1)] {
            let count = requests * share / 10;
            let _ = writeln!(
                text,
                "response_total{{{labels},classification=\"{class}\",status_code=\"{status}\",error=\"\"}} {count}"
            );
            for (at, bound) in BOUNDS.iter().enumerate() {
                let below = if at < 2 { 0 } else { count };
                let _ = writeln!(
                    text,
                    "response_latency_ms_bucket{{{labels},status_code=\"{status}\",le=\"{bound}\"}} {below}"
                );
            }
        }
        for name in ["tcp_read_bytes_total", "tcp_write_bytes_total", "tcp_open_connections"] {
            let _ = writeln!(text, "{name}{{{labels},peer=\"src\"}} {requests}");
        }
    };
    side(
        "direction=\"inbound\",target_addr=\"10.0.0.1:8080\",tls=\"true\",client_id=\"a.b.serviceaccount.identity.linkerd.cluster.local\"",
    );
    for number in 0..DESTINATIONS {
        side(&format!(
            "direction=\"outbound\",target_addr=\"10.0.1.{number}:8080\",tls=\"true\",dst_namespace=\"shop\",dst_deployment=\"d{number}\",\
             dst_service=\"d{number}\",dst_pod=\"d{number}-1\",authority=\"d{number}.shop.svc.cluster.local:80\""
        ));
    }
    text
}
