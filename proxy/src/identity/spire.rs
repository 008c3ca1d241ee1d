//! Certificates from a SPIFFE Workload API, such as a SPIRE agent's: a stream on a unix socket that delivers key and
//! certificate whenever they change.
//!
//! The trust anchors are those of the settings and those of the bundle that comes with the certificate, so that the
//! root of a trust domain can be rotated while proxies run: connections made after an update trust what it contains.

use std::{
    future::Future,
    io,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use http::uri::{Authority, Scheme, Uri};
use hyper::body::Incoming;
use tokio::net::UnixStream;
use tonic::{Code, Request, Status, Streaming, metadata::MetadataValue};
use weft_proto::spiffe::{X509svidRequest, X509svidResponse, spiffe_workload_api_client::SpiffeWorkloadApiClient};
use weft_tls::{
    anchors::AnchorsError,
    credentials::{Credentials, CredentialsError},
};

use super::Publisher;
use crate::{
    control::{Sender, handshake},
    pauses::Pauses,
};

/// First and longest pause between attempts: Linkerd's. The agent is on the same node.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// Time for the first certificate of a stream. Later ones come when the agent has something new, so that silence is no
/// failure then.
const FIRST_UPDATE: Duration = Duration::from_secs(10);

/// The metadata without which the API answers nothing, so that a request cannot be forged through a browser.
const HEADER: &str = "workload.spiffe.io";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum SpireError {
    /// The socket cannot be used.
    #[error("connect to the SPIFFE Workload API at {path}: is its agent running, and its socket mounted?")]
    Connect {
        path: String,
        #[source]
        source: io::Error,
    },
    /// Nothing came.
    #[error("the SPIFFE Workload API delivers nothing: is its agent overloaded, or not connected to its server?")]
    Silent,
    /// The API refuses, or the stream broke.
    #[error("the SPIFFE Workload API did not deliver: {code:?}: {message}")]
    Stream { code: Code, message: String },
    /// It ended the stream.
    #[error("the SPIFFE Workload API ended the stream")]
    Ended,
    /// The workload has other identities.
    #[error("the SPIFFE Workload API has no SVID for {expected}, only for {offered}: is the workload registered?")]
    NoSvid { expected: String, offered: String },
    /// The certificate is not fit for use.
    #[error("the SVID is unusable: are the trust anchors, or its bundle, those of its trust domain?")]
    Credentials(#[from] CredentialsError),
    /// The trust bundle is not fit for use.
    #[error("the trust bundle of the SVID is unusable")]
    Bundle(#[from] AnchorsError),
}

/// Follows the API until the process ends.
///
/// # Errors
/// When the API says that the request itself is wrong: by its specification, a client must not repeat it.
pub(super) async fn follow(socket: &Path, publisher: &Publisher) -> anyhow::Result<()> {
    let mut pauses = Pauses::between(PAUSES.0, PAUSES.1);
    loop {
        let Err(error) = stream(socket, publisher, &mut pauses).await;
        publisher.failed(&error);
        if matches!(error, SpireError::Stream { code: Code::InvalidArgument, .. }) {
            return Err(error).context("the SPIFFE Workload API refuses the proxy's request for good");
        }
        pauses.wait().await;
    }
}

/// Publishes the SVIDs of one stream until it fails.
async fn stream(
    socket: &Path,
    publisher: &Publisher,
    pauses: &mut Pauses,
) -> Result<std::convert::Infallible, SpireError> {
    let opened = tokio::time::timeout(FIRST_UPDATE, open(socket)).await;
    let (mut updates, mut update) = opened.unwrap_or(Err(SpireError::Silent))?;
    loop {
        match credentials(update, publisher) {
            Ok(credentials) => {
                pauses.reset();
                publisher.publish(credentials);
            }
            // The next update may be another, so that the stream stays.
            Err(error) => publisher.failed(&error),
        }
        let mut is_reported = false;
        update = loop {
            tokio::select! {
                next = updates.message() => break next?.ok_or(SpireError::Ended)?,
                // The stream is silent while the agent has nothing new, whatever has expired.
                () = publisher.expired(), if !is_reported => is_reported = true,
            }
        };
    }
}

/// Opens a stream, and waits for its first update.
async fn open(socket: &Path) -> Result<(Streaming<X509svidResponse>, X509svidResponse), SpireError> {
    let connect = |source| SpireError::Connect { path: socket.display().to_string(), source };
    let stream = UnixStream::connect(socket).await.map_err(connect)?;
    let sender = handshake(stream, None).await.map_err(connect)?;
    let mut request = Request::new(X509svidRequest {});
    request.metadata_mut().insert(HEADER, MetadataValue::from_static("true"));
    let mut client = SpiffeWorkloadApiClient::new(SocketClient(sender));
    let mut updates = client.fetch_x509svid(request).await?.into_inner();
    let first = updates.message().await?.ok_or(SpireError::Ended)?;
    Ok((updates, first))
}

fn credentials(update: X509svidResponse, publisher: &Publisher) -> Result<Credentials, SpireError> {
    let name = &publisher.name;
    let offered: Vec<String> = update.svids.iter().map(|svid| svid.spiffe_id.clone()).collect();
    let svid = update.svids.into_iter().find(|svid| svid.spiffe_id == name.as_str());
    let svid = svid.ok_or_else(|| SpireError::NoSvid { expected: name.to_string(), offered: offered.join(", ") })?;
    let anchors = publisher.anchors.with_bundle(&svid.bundle)?;
    Ok(Credentials::from_svid(name.clone(), svid.x509_svid_key, &svid.x509_svid, anchors)?)
}

impl From<Status> for SpireError {
    fn from(status: Status) -> Self {
        Self::Stream { code: status.code(), message: status.message().to_owned() }
    }
}

/// A client for tonic over one connection.
#[derive(Clone)]
struct SocketClient(Sender);

impl tower::Service<http::Request<tonic::body::Body>> for SocketClient {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<tonic::body::Body>) -> Self::Future {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        // A unix socket has no name; gRPC's convention.
        parts.authority = Some(Authority::from_static("localhost"));
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        Box::pin(self.0.send_request(request))
    }
}

#[cfg(test)]
mod tests;
