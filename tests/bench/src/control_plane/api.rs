//! Requests to the API server: JSON by path, each with a deadline, retried when the server asks for it.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::Value;
use tokio::time::{sleep, timeout};

/// Deadline of one request.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// Attempts of a request that the API server refuses for now.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
const AGENT: &str = "weft-bench";

/// The API server.
#[derive(Clone)]
pub(crate) struct Api(Client);

/// What a body is.
#[derive(Clone, Copy, Debug)]
enum Content {
    Json,
    MergePatch,
    ApplyPatch,
}

impl Api {
    /// Prepares a client; nothing is sent yet.
    ///
    /// # Errors
    /// The kubeconfig cannot be read.
    pub(crate) async fn connect(kubeconfig: &Path) -> anyhow::Result<Self> {
        weft_tls::install_crypto_provider();
        let of = || format!("kubeconfig {}", kubeconfig.display());
        let config = Kubeconfig::read_from(kubeconfig).with_context(of)?;
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.with_context(of)?;
        Ok(Self(Client::try_from(config).with_context(of)?))
    }

    /// Creates an object in a collection, and returns it as the server has it.
    pub(crate) async fn create(&self, collection: &str, object: &Value) -> anyhow::Result<Value> {
        self.send("POST", collection, Some((Content::Json, object))).await
    }

    /// Replaces an object, whatever its version.
    pub(crate) async fn replace(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        self.send("PUT", path, Some((Content::Json, object))).await
    }

    pub(crate) async fn merge(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        self.send("PATCH", path, Some((Content::MergePatch, patch))).await
    }

    /// Creates or changes an object by server-side apply.
    pub(crate) async fn apply(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        let path = format!("{path}?fieldManager={AGENT}&force=true");
        self.send("PATCH", &path, Some((Content::ApplyPatch, object))).await
    }

    /// An object, or `None` if there is none.
    pub(crate) async fn read(&self, path: &str) -> anyhow::Result<Option<Value>> {
        found(self.request("GET", path, None).await).with_context(|| format!("GET {path}"))
    }

    /// Deletes an object or a collection; one that is gone is fine.
    pub(crate) async fn delete(&self, path: &str) -> anyhow::Result<()> {
        found(self.request("DELETE", path, None).await).map(drop).with_context(|| format!("DELETE {path}"))
    }

    async fn send(&self, method: &str, path: &str, body: Option<(Content, &Value)>) -> anyhow::Result<Value> {
        self.request(method, path, body).await.map_err(anyhow::Error::from).with_context(|| format!("{method} {path}"))
    }

    async fn request(&self, method: &str, path: &str, body: Option<(Content, &Value)>) -> Result<Value, Refusal> {
        for attempt in 1.. {
            let request = http_request(method, path, body).map_err(|error| Refusal::Failed(error.to_string()))?;
            let refusal = match timeout(ANSWERS_WITHIN, self.0.request::<Value>(request)).await {
                Err(_) => return Err(Refusal::Failed(format!("no answer within {ANSWERS_WITHIN:?}"))),
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(kube::Error::Api(status))) => Refusal::Status(status.code, status.message),
                Ok(Err(error)) => return Err(Refusal::Failed(format!("{:#}", anyhow!(error)))),
            };
            if attempt == ATTEMPTS || !refusal.may_pass() {
                return Err(refusal);
            }
            sleep(PAUSE).await;
        }
        Err(Refusal::Failed("not sent".to_owned()))
    }
}

/// Why a request failed.
#[derive(Debug)]
enum Refusal {
    /// The API server's answer.
    Status(u16, String),
    /// There is no answer.
    Failed(String),
}

impl Refusal {
    /// Whether the server may accept the same request later.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Status(429 | 500..=599, _))
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(code, message) => write!(formatter, "{message} ({code})"),
            Self::Failed(reason) => formatter.write_str(reason),
        }
    }
}

impl std::error::Error for Refusal {}

fn found(answer: Result<Value, Refusal>) -> anyhow::Result<Option<Value>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(Refusal::Status(404, _)) => Ok(None),
        Err(refusal) => bail!(refusal),
    }
}

fn http_request(method: &str, path: &str, body: Option<(Content, &Value)>) -> anyhow::Result<http::Request<Vec<u8>>> {
    let mut request = http::Request::builder().method(method).uri(path).header(http::header::USER_AGENT, AGENT);
    let bytes = match body {
        None => Vec::new(),
        Some((content, value)) => {
            let content = match content {
                Content::Json => "application/json",
                Content::MergePatch => "application/merge-patch+json",
                Content::ApplyPatch => "application/apply-patch+yaml",
            };
            request = request.header(http::header::CONTENT_TYPE, content);
            serde_json::to_vec(value)?
        }
    };
    Ok(request.body(bytes)?)
}
