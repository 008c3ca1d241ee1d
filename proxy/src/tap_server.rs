//! The tap server: `io.linkerd.proxy.tap.Tap/Observe` on the control port.
//!
//! Owns who may tap: the client that the settings name, by its certificate, and processes of the pod itself, over
//! loopback. Everybody else gets UNAUTHENTICATED.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use tokio::{net::TcpListener, sync::mpsc};
use tonic::{Request, Response, Status, codegen::Service as _};
use weft_proto::linkerd::tap::{
    ObserveRequest, TapEvent,
    observe_request::{Extract, extract},
    tap_server::{Tap as TapService, TapServer},
};
use weft_runtime::{
    drain::Watch,
    server::{Limits, Server},
};
use weft_tls::identity::Identity;

use crate::{
    failure_log::LineLimit,
    inbound::tls::TlsServer,
    policy::authz::{Client, ClientTls},
    shared::Shared,
    tap::{Match, Taps},
};

/// Limits of the listener. One client opens a connection for each tap; all other clients are refused.
const LIMITS: Limits = Limits {
    connections: 64,
    source_connections: 32,
    streams: 32,
    source_streams: 64,
    local_streams: 32,
    waiting: 1024,
    begin: Duration::from_secs(10),
    receive: Duration::from_secs(10),
    exchange: None,
    idle: Duration::from_secs(60),
    ping: Duration::from_secs(30),
    held_bytes: 1024 * 1024,
};

/// The largest request, in bytes: a few matches.
const MAX_REQUEST: usize = 64 * 1024;

/// Serves until the process ends. During a drain, taps end.
pub(crate) async fn run(shared: Arc<Shared>, client: Identity, listener: TcpListener) -> anyhow::Result<()> {
    let tls = Arc::new(TlsServer::new(shared.credentials.clone()));
    let drain = shared.drain.clone();
    let denials = LineLimit::default();
    let service = Service { taps: Arc::clone(&shared.taps), client, drain: drain.clone(), denials };
    let service = TapServer::new(service).max_decoding_message_size(MAX_REQUEST);
    let accept = move |stream| {
        let (tls, shared) = (Arc::clone(&tls), Arc::clone(&shared));
        async move { tls.accept_own_port(stream, &shared.config.identity.server_name).await }
    };
    let answer = move |request, _peer| {
        let answered = service.clone().call(request);
        async move { answered.await.unwrap_or_else(|never| match never {}) }
    };
    Server::new("tap", LIMITS, drain).serve_with_extensions(listener, accept, answer).await;
    // The drain has begun; the process ends when it is done.
    std::future::pending().await
}

struct Service {
    taps: Arc<Taps>,
    client: Identity,
    drain: Watch,
    /// Lines about clients that may not tap.
    denials: LineLimit,
}

#[tonic::async_trait]
impl TapService for Service {
    type ObserveStream = Pin<Box<dyn Stream<Item = Result<TapEvent, Status>> + Send>>;

    async fn observe(&self, request: Request<ObserveRequest>) -> Result<Response<Self::ObserveStream>, Status> {
        let client = request.extensions().get::<Client>();
        permit(client, &self.client).inspect_err(|_| {
            let addr = client.map(|client| client.addr);
            let id = client.and_then(Client::identity).map(Identity::as_str);
            self.denials.write(|suppressed| {
                tracing::info!(client.addr = ?addr, client.id = id, suppressed, "tap denied");
            });
        })?;
        let ObserveRequest { limit, r#match, extract } = request.into_inner();
        if limit == 0 {
            return Err(Status::invalid_argument("limit must be positive"));
        }
        let matches = Match::read(r#match).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let Some((base, events)) = self.taps.open(matches, limit, extracts_headers(extract)) else {
            return Err(Status::resource_exhausted("too many taps of this proxy are open"));
        };
        let drain = self.drain.clone();
        let observing = Observing { taps: Arc::clone(&self.taps), base, events };
        Ok(Response::new(observing.take_until(async move { drain.signaled().await }).boxed()))
    }
}

/// Whether a client may tap. One with TLS has to be the one; without TLS it has to be of the pod itself.
fn permit(client: Option<&Client>, allowed: &Identity) -> Result<(), Status> {
    let refuse = |reason: &str| Err(Status::unauthenticated(reason.to_owned()));
    match client {
        Some(Client { tls: ClientTls::Established(Some(id)), .. }) if id == allowed => Ok(()),
        Some(Client { tls: ClientTls::Established(Some(id)), .. }) => refuse(&format!("Unauthorized peer: {id}")),
        Some(Client { addr, tls: ClientTls::None(_) }) if addr.ip().is_loopback() => Ok(()),
        _ => refuse("mutual TLS is required"),
    }
}

fn extracts_headers(extract: Option<Extract>) -> bool {
    let Some(extract::Extract::Http(http)) = extract.and_then(|extract| extract.extract) else { return false };
    matches!(http.extract, Some(extract::http::Extract::Headers(_)))
}

/// A tap's events; dropping it closes the tap.
struct Observing {
    taps: Arc<Taps>,
    base: u32,
    events: mpsc::Receiver<TapEvent>,
}

impl Stream for Observing {
    type Item = Result<TapEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx).map(|event| event.map(Ok))
    }
}

impl Drop for Observing {
    fn drop(&mut self) {
        self.taps.close(self.base);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::authz::NoTls;

    use super::*;

    #[test]
    fn the_named_client_and_the_pod_itself_may_tap() {
        let tap: Identity = "tap.linkerd-viz.serviceaccount.identity.linkerd.cluster.local".parse().unwrap();
        let established = |name: &str| ClientTls::Established(Some(name.parse().unwrap()));
        let none = || ClientTls::None(NoTls::NotFromRemote);
        for (addr, tls, allowed) in [
            ("10.0.0.1:1", established(tap.as_str()), true),
            ("10.0.0.1:1", established("web.demo"), false),
            ("10.0.0.1:1", ClientTls::Established(None), false),
            ("10.0.0.1:1", none(), false),
            ("127.0.0.1:1", none(), true),
            ("[::1]:1", none(), true),
            ("127.0.0.1:1", established("web.demo"), false),
            ("127.0.0.1:1", ClientTls::Established(None), false),
        ] {
            let client = Client { addr: addr.parse().unwrap(), tls };
            let permitted = permit(Some(&client), &tap);
            assert_eq!(permitted.is_ok(), allowed, "{client:?}");
            assert!(permitted.is_ok() || permitted.is_err_and(|status| status.code() == tonic::Code::Unauthenticated));
        }
        assert!(permit(None, &tap).is_err());
    }
}
