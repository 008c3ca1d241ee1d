//! One HTTP/2 connection of simulated proxies, with all of its streams in one task. What is lost is opened again, as
//! proxies do.

use std::{
    net::SocketAddr,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use h2::client::SendRequest;
use tokio::{net::TcpStream, sync::watch, time::timeout};

use super::{
    Arrival, Round, Shared,
    link::{Link, Pace},
};
use crate::control_plane::wire::{self, Frames, Method};

/// Deadline for TCP's and HTTP/2's handshakes, while thousands of clients come at once.
const CONNECTS_WITHIN: Duration = Duration::from_secs(30);
/// Pause before a lost connection or stream is opened again.
const BACKOFF: Duration = Duration::from_millis(200);
/// Windows of hyper's client, which proxies have. h2 derives from that of the connection how many small messages may
/// wait for their readers; with its own default, a connection of 250 clients that is behind for a moment is closed by
/// its client.
const STREAM_WINDOW: u32 = 2 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 5 * 1024 * 1024;

/// One stream.
#[derive(Debug)]
pub(super) struct Spec {
    pub(super) method: Method,
    /// The request as it is sent.
    pub(super) request: Bytes,
    /// Whether it has a message to send at once; else it counts as answered when it is open.
    pub(super) has_answer: bool,
}

/// A connection that runs until it is dropped.
pub(super) struct Connection {
    pub(super) address: SocketAddr,
    /// By client.
    pub(super) specs: Vec<(u32, Arc<[Spec]>)>,
    pub(super) shared: Arc<Shared>,
    pub(super) round: Arc<Round>,
    /// How fast the client reads, if it is one of those that do not always.
    pub(super) pace: Option<watch::Receiver<Pace>>,
}

impl Connection {
    pub(super) async fn run(self) {
        let answered: Vec<_> =
            self.specs.iter().flat_map(|(_, specs)| &**specs).map(|_| AtomicBool::new(false)).collect();
        loop {
            if let Err(error) = self.run_once(&answered).await {
                self.shared.lost_connections.fetch_add(1, Ordering::Relaxed);
                self.report(&format!("connection to {}: {error:#}", self.address));
            }
            self.round.retried();
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// Connects and runs every stream until the connection ends.
    async fn run_once(&self, answered: &[AtomicBool]) -> anyhow::Result<()> {
        let connecting = async {
            let stream = TcpStream::connect(self.address).await.context("connect")?;
            stream.set_nodelay(true)?;
            let link = Link::new(stream, self.pace.clone());
            let mut http2 = h2::client::Builder::new();
            http2.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
            http2.handshake(link).await.context("begin HTTP/2")
        };
        let (requests, mut connection) =
            timeout(CONNECTS_WITHIN, connecting).await.context("no connection in time")??;
        let specs = self.specs.iter().flat_map(|(client, specs)| specs.iter().map(|spec| (*client, spec)));
        let mut streams: FuturesUnordered<_> = specs
            .zip(answered)
            .map(|((client, spec), answered)| self.stream(client, spec, requests.clone(), answered))
            .collect();
        let mut pace = self.pace.clone();
        let mut stall = std::pin::pin!(stalls(&mut pace));
        let mut reads = true;
        loop {
            tokio::select! {
                ended = &mut connection => {
                    ended?;
                    bail!("closed by the server");
                }
                () = &mut stall, if reads => {
                    reads = false;
                    connection.set_initial_window_size(0)?;
                }
                // Streams only end with their connection.
                _ = streams.next(), if !streams.is_empty() => {}
            }
        }
    }

    /// Keeps one stream open for as long as there is the connection.
    async fn stream(&self, client: u32, spec: &Spec, requests: SendRequest<Bytes>, answered: &AtomicBool) {
        loop {
            match self.stream_once(client, spec, requests.clone(), answered).await {
                Ok(reason) => {
                    self.shared.ended_streams.fetch_add(1, Ordering::Relaxed);
                    self.report(&format!("{}: {reason}", spec.method.label()));
                }
                // The connection's own end says why.
                Err(error) if error.is_io() || error.is_go_away() => return,
                Err(error) => {
                    self.shared.ended_streams.fetch_add(1, Ordering::Relaxed);
                    self.report(&format!("{}: {error}", spec.method.label()));
                }
            }
            self.round.retried();
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// Opens a stream and reads it to its end; returns why it ended.
    async fn stream_once(
        &self,
        client: u32,
        spec: &Spec,
        requests: SendRequest<Bytes>,
        answered: &AtomicBool,
    ) -> Result<String, h2::Error> {
        let request = http::Request::post(format!("http://{}{}", self.address, spec.method.path()))
            .header(http::header::CONTENT_TYPE, "application/grpc")
            .header(http::header::TE, "trailers")
            .body(());
        let Ok(request) = request else { return Ok("the request is not HTTP".to_owned()) };
        let (response, mut body) = requests.ready().await?.send_request(request, false)?;
        body.send_data(spec.request.clone(), true)?;
        let (head, mut body) = response.await?.into_parts();
        // An error at once has no trailers, only a head.
        if let Some(status) = status(&head.headers) {
            return Ok(status);
        }
        let answer = || {
            if !answered.swap(true, Ordering::Relaxed) {
                self.round.answered(spec.method);
            }
        };
        if !spec.has_answer {
            answer();
        }
        let mut frames = Frames::default();
        // The first message repeats what is known already.
        let mut first = spec.has_answer;
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            self.shared.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            frames.feed(&chunk, |message| {
                self.shared.messages.fetch_add(1, Ordering::Relaxed);
                if self.pace() != Pace::Full {
                    self.shared.stalled_messages.fetch_add(1, Ordering::Relaxed);
                }
                if !std::mem::take(&mut first) && spec.method == Method::Get {
                    self.arrived(client, message);
                }
                answer();
            });
            if self.pace() != Pace::Stalled {
                body.flow_control().release_capacity(chunk.len())?;
            }
        }
        let trailers = body.trailers().await?;
        Ok(trailers.as_ref().and_then(status).unwrap_or_else(|| "ended without a status".to_owned()))
    }

    fn arrived(&self, client: u32, message: &[u8]) {
        let at = Instant::now();
        let arrivals = wire::addresses(message).map(|what| Arrival { client, what, at });
        self.shared.arrivals.lock().unwrap_or_else(PoisonError::into_inner).extend(arrivals);
    }

    fn pace(&self) -> Pace {
        self.pace.as_ref().map_or(Pace::Full, |pace| *pace.borrow())
    }

    fn report(&self, problem: &str) {
        *self.shared.last_problem.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem.to_owned());
    }
}

/// Returns when the client is to stop reading.
async fn stalls(pace: &mut Option<watch::Receiver<Pace>>) {
    if let Some(pace) = pace
        && pace.wait_for(|pace| *pace == Pace::Stalled).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// The status of a call that ended, as text.
fn status(headers: &http::HeaderMap) -> Option<String> {
    let status = tonic::Status::from_header_map(headers)?;
    Some(format!("status {} {}", i32::from(status.code()), status.message()).trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_with_its_message() {
        let mut headers = http::HeaderMap::new();
        assert_eq!(status(&headers), None);
        headers.insert("grpc-status", "5".parse().unwrap());
        assert_eq!(status(&headers).as_deref(), Some("status 5"));
        headers.insert("grpc-message", "it%20is%20gone".parse().unwrap());
        assert_eq!(status(&headers).as_deref(), Some("status 5 it is gone"));
    }
}
