//! The mesh as the engine sees it: pods from the watch, connections to the addresses of their proxies.
//!
//! Connections are plain here. The component's own sidecar makes mutual TLS of them, and by its identity proxies admit
//! its taps.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::time::timeout;
use tonic::{Streaming, transport::Endpoint};
use weft_proto::linkerd::tap::{ObserveRequest, TapEvent, tap_client::TapClient};
use weft_runtime::error::chain;
use weft_viz_core::fleet::{Exposition, Fleet, Pod};

use crate::{metrics::VizMetrics, pods::Pods};

/// Deadline of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Deadline of the beginning of a tap.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(7);
/// The buffer that a connection reads into, and keeps until the next scrape. hyper's own grows to 408 KiB, of each of
/// 1,000 proxies.
const READ_BUFFER: usize = 16 * 1024;
/// How long a connection stays for the next scrape: longer than the time between two.
const IDLE: Duration = Duration::from_secs(30);
/// The largest event of a tap: a request's headers.
const MAX_EVENT_BYTES: usize = 1024 * 1024;
/// Silence after which a tapped proxy is asked whether it is there, and deadline of its answer.
const PING: Duration = Duration::from_secs(10);

/// See above.
#[derive(Debug)]
pub(crate) struct Mesh {
    pods: Pods,
    http: Client<HttpConnector, Empty<Bytes>>,
    metrics: VizMetrics,
}

/// A scrape, counted at its end; as a failure where the engine gives it up.
struct Scrape<'a> {
    metrics: &'a VizMetrics,
    bytes: Option<usize>,
}

impl Drop for Scrape<'_> {
    fn drop(&mut self) {
        self.metrics.scraped(self.bytes);
    }
}

impl Mesh {
    pub(crate) fn new(pods: Pods, metrics: VizMetrics) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(1)
            .http1_read_buf_exact_size(READ_BUFFER)
            .build(connector);
        Self { pods, http, metrics }
    }

    async fn scrape(&self, url: String, metrics: &mut Exposition<'_>) -> Result<(), String> {
        let request = Request::get(url).body(Empty::new()).map_err(|error| error.to_string())?;
        let response = self.http.request(request).await.map_err(|error| chain(&error))?;
        if response.status() != StatusCode::OK {
            return Err(format!("its proxy answered {}", response.status()));
        }
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            if let Ok(piece) = frame.map_err(|error| chain(&error))?.into_data() {
                metrics.read(&piece)?;
            }
        }
        Ok(())
    }
}

impl Fleet for Mesh {
    async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        self.pods.of_namespace(namespace).ok_or_else(|| "the cluster's pods are not listed yet".to_owned())
    }

    async fn metrics(&self, pod: &Pod, metrics: &mut Exposition<'_>) -> Result<(), String> {
        let ports = pod.proxy.ok_or("it has no proxy")?;
        let url = format!("http://{}/metrics", address(pod, ports.admin)?);
        let mut scrape = Scrape { metrics: &self.metrics, bytes: None };
        self.scrape(url, metrics).await?;
        scrape.bytes = Some(metrics.size());
        Ok(())
    }

    async fn tap(&self, pod: &Pod, request: ObserveRequest) -> Result<Streaming<TapEvent>, String> {
        let ports = pod.proxy.ok_or("it has no proxy")?;
        let port =
            ports.tap.ok_or("tap is off: restart the pod if it was created before Weft named a client of tap")?;
        let endpoint =
            Endpoint::from_shared(format!("http://{}", address(pod, port)?)).map_err(|error| error.to_string())?;
        let endpoint =
            endpoint.connect_timeout(CONNECT_TIMEOUT).http2_keep_alive_interval(PING).keep_alive_timeout(PING);
        let begin = async {
            let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
            let mut client = TapClient::new(channel).max_decoding_message_size(MAX_EVENT_BYTES);
            client.observe(request).await.map_err(|status| status.message().to_owned())
        };
        let begun = timeout(BEGIN_TIMEOUT, begin).await;
        Ok(begun.map_err(|_| "its proxy did not answer in time".to_owned())??.into_inner())
    }
}

/// The first of a pod's addresses: proxies listen on all.
fn address(pod: &Pod, port: u16) -> Result<SocketAddr, String> {
    pod.addresses
        .first()
        .map(|address| SocketAddr::new(*address, port))
        .ok_or_else(|| "it has no address yet".to_owned())
}
