//! The Kubernetes API: connecting to it, logging of requests, and Events for people.
//!
//! Every request is counted and logged at debug with method, URL, status and duration, and fails if the answer does not
//! start in time, or pauses for too long. TCP keep-alive finds dead connections earlier; it does not find an
//! API server that hangs, or is gone, behind a load balancer that does not.

pub(crate) mod events;

use std::{
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use http::{Request, Response};
use hyper_timeout::TimeoutConnector;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::watcher::{self, DefaultBackoff},
};
use tokio::time::Instant;
use tower::{BoxError, Layer, Service, ServiceBuilder};
use weft_k8s_api::kubeconfig;

use crate::metrics::RequestMetrics;

/// How long the API server may take to start an answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Deadline for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which a connection is probed, and the interval of the probes; it counts as dead after 60 s
/// in all.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// Silence after which a connection is given up. The API server sends bookmarks to every watch each minute
/// (`k8s.io/apiserver:pkg/storage/cacher`, `defaultBookmarkFrequency`).
const SILENCE: Duration = Duration::from_secs(90);
/// The longest pause before the next attempt to watch, also after a missing definition is installed.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Prepares a client; nothing is sent yet.
///
/// # Errors
/// When neither a kubeconfig nor a pod's service account says how to reach the API.
pub(crate) async fn connect(kubeconfig: Option<&Path>, metrics: RequestMetrics) -> anyhow::Result<Client> {
    client(config(kubeconfig).await?, SILENCE, metrics).context("prepare the client of the Kubernetes API")
}

/// Prepares a client of another cluster's API; nothing is sent yet.
///
/// # Errors
/// When the kubeconfig names no server, or its credentials cannot be read.
pub(crate) async fn connect_to(kubeconfig: Kubeconfig, metrics: RequestMetrics) -> anyhow::Result<Client> {
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    client(config, SILENCE, metrics).context("prepare the client of a linked cluster's API")
}

/// The error on one line: the API server's own message, or the error with its causes.
pub(crate) fn explain(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{} ({})", status.message, status.code);
    }
    weft_runtime::error::chain(error)
}

/// The error of a watch, on one line.
pub(crate) fn explain_watch(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => explain(error),
        watcher::Error::WatchError(status) => format!("{} ({})", status.message, status.code),
        watcher::Error::NoResourceVersion => error.to_string(),
    }
}

/// The next pause of a watch that failed, 5 s at most: kube's own grow to 30 s.
pub(crate) fn next_pause(backoff: &mut DefaultBackoff) -> Duration {
    backoff.next().unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE)
}

async fn config(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    let options = KubeConfigOptions::default();
    if let Some(paths) = kubeconfig {
        let read = kubeconfig::read(paths.as_os_str()).context("--kubeconfig")?;
        return Config::from_custom_kubeconfig(read, &options)
            .await
            .with_context(|| format!("--kubeconfig {}", paths.display()));
    }
    let in_cluster = match Config::incluster() {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    Config::from_kubeconfig(&options).await.with_context(|| {
        format!(
            "no way to the Kubernetes API: this is no pod with a service account ({in_cluster}), and there is no \
             kubeconfig; name one with --kubeconfig, or read manifests with --dir"
        )
    })
}

/// The client's stack: address, log and deadline, authentication, HTTP/1.1 over TLS that may be silent for that long.
fn client(config: Config, silence: Duration, metrics: RequestMetrics) -> kube::Result<Client> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    let mut tls = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp)?);
    tls.set_read_timeout(Some(silence));
    // A connection that was idle is used again.
    tls.set_reset_reader_on_write(true);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(Observed(metrics))
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(HttpClient::builder(TokioExecutor::new()).build::<_, Body>(tls));
    Ok(Client::new(service, config.default_namespace))
}

/// Logs and counts requests, and bounds the wait for their answers.
#[derive(Clone)]
struct Observed(RequestMetrics);

impl<S> Layer<S> for Observed {
    type Service = ObservedService<S>;

    fn layer(&self, inner: S) -> ObservedService<S> {
        ObservedService { inner, metrics: self.0.clone() }
    }
}

#[derive(Clone)]
struct ObservedService<S> {
    inner: S,
    metrics: RequestMetrics,
}

impl<S, B> Service<Request<Body>> for ObservedService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let since = Instant::now();
        let answer = self.inner.call(request);
        let counted = self.metrics.begin(&method);
        Box::pin(async move {
            let answer = tokio::time::timeout(RESPONSE_TIMEOUT, answer)
                .await
                .unwrap_or_else(|_| Err("no answer from the Kubernetes API in time".into()));
            let ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            match &answer {
                Ok(response) => {
                    counted.answered(response.status());
                    tracing::debug!(%method, %uri, status = response.status().as_u16(), ms, "API request");
                }
                Err(error) => tracing::debug!(%method, %uri, %error, ms, "API request failed"),
            }
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use k8s_openapi::api::core::v1::Pod;
    use kube::{Api, runtime::watcher};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    /// Answers the first request with the beginning of a list, and says no more; returns what it is asked next.
    async fn hang(listener: TcpListener) -> String {
        let mut request = [0; 4096];
        let (mut first, _) = listener.accept().await.unwrap();
        assert!(first.read(&mut request).await.unwrap() > 0);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        first.write_all(format!("{head}1\r\n{{\r\n").as_bytes()).await.unwrap();
        let (mut second, _) = listener.accept().await.unwrap();
        let length = second.read(&mut request).await.unwrap();
        String::from_utf8_lossy(&request[..length]).into_owned()
    }

    /// Without a bound of its own, the list would be waited for as long as the connection lasts.
    #[tokio::test]
    async fn an_answer_that_does_not_go_on_is_given_up_and_asked_for_again() {
        weft_tls::install_crypto_provider();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let client = client(
            Config::new(url),
            Duration::from_millis(200),
            RequestMetrics::new(&mut prometheus_client::registry::Registry::default()),
        )
        .unwrap();
        let watch = async {
            let mut events = Box::pin(watcher::watcher(Api::<Pod>::all(client), watcher::Config::default()));
            let mut errors = Vec::new();
            loop {
                errors.extend(events.next().await.unwrap().err().map(|error| explain_watch(&error)));
                assert!(errors.len() < 3, "{errors:?}");
            }
        };
        let asked = tokio::select! {
            asked = hang(listener) => asked,
            () = watch => unreachable!(),
        };
        assert!(asked.starts_with("GET /api/v1/pods?"), "{asked}");
    }
}
