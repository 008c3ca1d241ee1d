//! The echo server: answers every request with what it observed (which pod answered, the client's address, the
//! protocol, the headers), so that a test can see what happened on the way.
//!
//! With an upstream, it sends a request to the upstream for every plain HTTP request, and its answer contains the
//! upstream's, so that services can call services.
//!
//! ```text
//! HTTP port    HTTP/1.1 and HTTP/2 by prior knowledge: JSON; `application/grpc`: the Echo service; `/ws`: WebSocket
//! banner port  the server speaks first: one JSON line; then every line comes back with the pod's name before it
//! ```

mod upstream;

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};
use tonic::body::Body;
use tower::Service as _;

use crate::echo::{
    SayReply, SayRequest,
    echo_server::{Echo, EchoServer},
};

pub use upstream::Upstream;

/// Before a status, which is then the answer's.
const STATUS_PATH: &str = "/status/";
/// The path of probes, which concern this server and not its upstream.
const PROBE_PATH: &str = "/healthz";
/// Delay before accepting again when the process ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The server's observations of one request or connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    /// The pod that answered.
    pub pod: String,
    /// `HTTP/1.1`, `HTTP/2.0`, `gRPC`, `WebSocket` or `banner`.
    pub protocol: String,
    /// The client's address, from `getpeername`.
    pub peer: String,
    /// The server's own address of this connection, from `getsockname`.
    pub local: String,
    /// Method of the request; empty without HTTP.
    pub method: String,
    /// Path and query of the request; empty without HTTP.
    pub path: String,
    /// Headers of the request; of repeated names, the last one.
    pub headers: BTreeMap<String, String>,
    /// Bytes in the request's body.
    pub body_bytes: usize,
    /// The upstream's answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Box<Seen>>,
}

/// Parameters of both ports of a server.
#[derive(Clone, Debug)]
pub struct EchoApp {
    /// The name in answers: the pod's.
    pub pod: Arc<str>,
    /// The upstream, called before an HTTP request is answered.
    pub upstream: Option<Upstream>,
}

/// One connection's addresses, from the server's socket.
#[derive(Clone, Copy, Debug)]
struct Ends {
    peer: SocketAddr,
    local: SocketAddr,
}

impl EchoApp {
    /// Serves HTTP/1.1, HTTP/2, gRPC and WebSocket until `stop`, then finishes the requests in flight.
    pub async fn serve_http(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        // Connections close when this sender is dropped.
        let (open, closing) = watch::channel(());
        let mut connections = JoinSet::new();
        let mut stop = pin!(stop);
        loop {
            let accepted = tokio::select! {
                accepted = accept(&listener) => accepted,
                () = &mut stop => break,
            };
            while connections.try_join_next().is_some() {}
            if let Some((stream, ends)) = accepted {
                connections.spawn(self.clone().serve_connection(stream, ends, closing.clone()));
            }
        }
        drop((listener, open));
        while connections.join_next().await.is_some() {}
    }

    async fn serve_connection(self, stream: TcpStream, ends: Ends, mut closing: watch::Receiver<()>) {
        let service = service_fn(move |request| {
            let app = self.clone();
            async move { Ok::<_, Infallible>(app.answer(request, ends).await) }
        });
        let builder = auto::Builder::new(TokioExecutor::new());
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        // The client disconnected or broke the protocol, which is not an error.
        tokio::select! {
            _ = connection.as_mut() => {}
            _ = closing.changed() => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }

    /// Serves the protocol in which the server speaks first until the caller drops the future.
    pub async fn serve_banner(self, listener: TcpListener) {
        loop {
            let Some((stream, ends)) = accept(&listener).await else {
                continue;
            };
            let app = self.clone();
            tokio::spawn(async move {
                // The client disconnected, which is not an error.
                let _ = app.greet(stream, ends).await;
            });
        }
    }

    async fn answer(&self, request: Request<Incoming>, ends: Ends) -> Response<Body> {
        if is_grpc(request.headers()) {
            return self.answer_grpc(request, ends).await;
        }
        if request.uri().path() == "/ws" {
            return self.upgrade(request, ends);
        }
        let mut seen = self.seen(ends, &format!("{:?}", request.version()));
        seen.method = request.method().to_string();
        seen.path = request.uri().path_and_query().map_or_else(String::new, ToString::to_string);
        seen.headers = plain(request.headers());
        match request.into_body().collect().await {
            Ok(body) => seen.body_bytes = body.to_bytes().len(),
            Err(error) => return text(StatusCode::BAD_REQUEST, error.to_string()),
        }
        if let Some(status) = request_status(&seen.path) {
            return text(status, format!("{status}, as {} wishes", seen.path));
        }
        if let Some(upstream) = self.upstream.as_ref().filter(|_| seen.path != PROBE_PATH) {
            match upstream.ask(&seen.path).await {
                Ok(answer) => seen.upstream = Some(Box::new(answer)),
                Err(error) => return text(StatusCode::BAD_GATEWAY, error.to_string()),
            }
        }
        let json = serde_json::to_vec(&seen).unwrap_or_default();
        // hyper leaves it to the application that an HTTP/2 answer to HEAD has no body.
        let mut response = Response::new(full(if seen.method == "HEAD" { Vec::new() } else { json }));
        response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        response
    }

    async fn answer_grpc(&self, request: Request<Incoming>, ends: Ends) -> Response<Body> {
        let mut service = EchoServer::new(Say { seen: self.seen(ends, "gRPC") });
        match service.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    fn upgrade(&self, mut request: Request<Incoming>, ends: Ends) -> Response<Body> {
        let Some(key) = request.headers().get(header::SEC_WEBSOCKET_KEY).cloned() else {
            return text(StatusCode::BAD_REQUEST, "/ws wants a WebSocket handshake".to_owned());
        };
        let mut seen = self.seen(ends, "WebSocket");
        seen.path = request.uri().path().to_owned();
        seen.headers = plain(request.headers());
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            if let Ok(upgraded) = upgrade.await {
                let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
                converse(socket, seen).await;
            }
        });
        Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_ACCEPT, derive_accept_key(key.as_bytes()))
            .body(full(Vec::new()))
            .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    }

    async fn greet(&self, stream: TcpStream, ends: Ends) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut banner = serde_json::to_string(&self.seen(ends, "banner")).unwrap_or_default();
        banner.push('\n');
        stream.write_all(banner.as_bytes()).await?;
        let mut line = String::new();
        while stream.read_line(&mut line).await? > 0 {
            let reply = format!("{} {line}", self.pod);
            stream.write_all(reply.as_bytes()).await?;
            line.clear();
        }
        Ok(())
    }

    fn seen(&self, ends: Ends, protocol: &str) -> Seen {
        Seen {
            pod: self.pod.to_string(),
            protocol: protocol.to_owned(),
            peer: ends.peer.to_string(),
            local: ends.local.to_string(),
            ..Seen::default()
        }
    }
}

/// The gRPC service of one request: it knows the request's connection.
struct Say {
    seen: Seen,
}

#[tonic::async_trait]
impl Echo for Say {
    async fn say(&self, request: tonic::Request<SayRequest>) -> Result<tonic::Response<SayReply>, tonic::Status> {
        let headers = plain(&request.metadata().clone().into_headers());
        Ok(tonic::Response::new(SayReply {
            pod: self.seen.pod.clone(),
            peer: self.seen.peer.clone(),
            message: request.into_inner().message,
            headers: headers.into_iter().collect(),
        }))
    }
}

/// Answers each text message with the server's observations of the handshake, as one JSON message, until the client
/// closes.
async fn converse(mut socket: WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>, mut seen: Seen) {
    while let Some(Ok(message)) = socket.next().await {
        let Message::Text(text) = message else { continue };
        seen.body_bytes = text.len();
        let json = serde_json::to_string(&seen).unwrap_or_default();
        if socket.send(Message::text(json)).await.is_err() {
            return;
        }
    }
}

async fn accept(listener: &TcpListener) -> Option<(TcpStream, Ends)> {
    let Ok((stream, peer)) = listener.accept().await else {
        tokio::time::sleep(ACCEPT_PAUSE).await;
        return None;
    };
    // A connection that broke in the meantime has no address.
    let local = stream.local_addr().ok()?;
    stream.set_nodelay(true).ok()?;
    Some((stream, Ends { peer, local }))
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

fn plain(headers: &HeaderMap) -> BTreeMap<String, String> {
    headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect()
}

/// The status that a path of the form `/status/503` asks for.
fn request_status(path: &str) -> Option<StatusCode> {
    path.strip_prefix(STATUS_PATH)?.parse().ok()
}

fn full(bytes: Vec<u8>) -> Body {
    Body::new(Full::new(Bytes::from(bytes)))
}

fn text(status: StatusCode, message: String) -> Response<Body> {
    let mut response = Response::new(full(message.into_bytes()));
    *response.status_mut() = status;
    response
}
