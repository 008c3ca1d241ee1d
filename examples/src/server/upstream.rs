//! The upstream of a server: another echo server.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;

use super::Seen;

/// The longest time for one answer, the connection included: longer than clients wait by default, who so learn what is
/// slow and what failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An echo server and the connections to it.
#[derive(Clone, Debug)]
pub struct Upstream {
    target: Arc<str>,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Reason for a missing answer.
#[derive(Debug)]
pub(super) enum AskError {
    /// The path of the request, appended to the target, is not a valid address.
    Address(String, http::uri::InvalidUri),
    /// Timeout.
    Timeout(Arc<str>),
    /// The connection failed or broke.
    Send(Arc<str>, hyper_util::client::legacy::Error),
    /// The answer ended early.
    Read(Arc<str>, hyper::Error),
    /// The upstream returned an error status.
    Refused(Arc<str>, StatusCode),
    /// The upstream is not an echo server.
    Decode(Arc<str>, serde_json::Error),
}

impl std::fmt::Display for AskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address, error) => write!(f, "{address}: {error}"),
            Self::Timeout(target) => write!(f, "{target}: no answer in {} s", TIMEOUT.as_secs()),
            Self::Send(target, error) => write!(f, "{target}: {error}"),
            Self::Read(target, error) => write!(f, "{target}: {error}"),
            Self::Refused(target, status) => write!(f, "{target}: answered {status}"),
            Self::Decode(target, error) => write!(f, "{target}: not an echo server: {error}"),
        }
    }
}

impl Upstream {
    /// The server at `HOST:PORT`.
    pub fn new(target: &str) -> Self {
        Self { target: Arc::from(target), client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Sends a GET request for `path`.
    pub(super) async fn ask(&self, path: &str) -> Result<Seen, AskError> {
        let target = || Arc::clone(&self.target);
        let address = format!("http://{}{path}", self.target);
        let uri: Uri = address.parse().map_err(|error| AskError::Address(address, error))?;
        let exchange = async {
            let response = self.client.get(uri).await.map_err(|error| AskError::Send(target(), error))?;
            if !response.status().is_success() {
                return Err(AskError::Refused(target(), response.status()));
            }
            response.into_body().collect().await.map_err(|error| AskError::Read(target(), error))
        };
        let body = timeout(TIMEOUT, exchange).await.map_err(|_| AskError::Timeout(target()))??;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| AskError::Decode(target(), error))
    }
}
