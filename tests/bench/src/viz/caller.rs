//! Somebody who asks the component for the golden metrics of all pods, as an open dashboard does.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use tonic::{Request, metadata::AsciiMetadataValue, transport::Channel};
use weft_proto::viz::{Resource, StatRequest, viz_client::VizClient};

/// Deadline of an answer; the component's own is 60 s.
const ANSWERS_WITHIN: Duration = Duration::from_secs(90);

/// A caller with its token.
#[derive(Clone)]
pub(super) struct Caller {
    client: VizClient<Channel>,
    token: AsciiMetadataValue,
    namespace: String,
    pods: u32,
}

impl Caller {
    /// Prepares a connection.
    ///
    /// # Errors
    /// The token is no header.
    pub(super) fn new(component: SocketAddr, token: &str, namespace: &str, pods: u32) -> anyhow::Result<Self> {
        let channel = Channel::from_shared(format!("http://{component}"))?.connect_lazy();
        let token = format!("Bearer {token}").parse().context("the token")?;
        Ok(Self { client: VizClient::new(channel), token, namespace: namespace.to_owned(), pods })
    }

    /// Asks for the Deployments of the namespace, and returns the milliseconds until the answer.
    ///
    /// # Errors
    /// It is refused, or says that a proxy did not answer twice.
    pub(super) async fn ask(&self, window: Duration) -> anyhow::Result<f64> {
        let resource =
            Resource { namespace: self.namespace.clone(), kind: "deployment".to_owned(), name: String::new() };
        let window_seconds = u32::try_from(window.as_secs())?;
        let question = StatRequest { resource: Some(resource), window_seconds, ..StatRequest::default() };
        let mut request = Request::new(question);
        request.metadata_mut().insert("authorization", self.token.clone());
        request.set_timeout(ANSWERS_WITHIN);
        let began = Instant::now();
        let mut client = self.client.clone();
        let answer = client.stat(request).await.context("ask weft-viz")?.into_inner();
        let milliseconds = began.elapsed().as_secs_f64() * 1e3;
        let coverage = answer.coverage.unwrap_or_default();
        let problem = coverage.problems.first().map_or_else(String::new, |problem| format!(": {problem:?}"));
        ensure!(coverage.answered == self.pods, "{} of {} proxies answered{problem}", coverage.answered, self.pods);
        let counted = answer.rows.iter().filter_map(|row| row.http.as_ref()).map(|http| http.success).sum::<u64>();
        ensure!(counted > 0, "no request was counted");
        Ok(milliseconds)
    }
}
