//! One connection and its protocol's state: opens it over a stream, sends a request, reads the answer. Failures are
//! short texts (`status 403`, `closed`), because a report counts them by text.

use std::sync::Arc;

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{Request, Version};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::Mutex,
};
use tokio_tungstenite::{WebSocketStream, tungstenite};
use tonic::transport::{Channel, Endpoint};

use super::{Answer, Load, Protocol};
use crate::{
    echo::{SayRequest, echo_client::EchoClient},
    server::Seen,
};

/// The text of every message that contains one.
const MESSAGE: &str = "hello";

pub(super) enum Session {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
    Grpc(EchoClient<Channel>),
    WebSocket(Box<WebSocketStream<TcpStream>>),
    Banner(BufReader<TcpStream>, Answer),
}

impl Session {
    pub(super) async fn open(load: &Load, stream: TcpStream) -> Result<Self, String> {
        match load.protocol {
            Protocol::Http1 => {
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(hyper_failure)?;
                // Ends with the session; errors are reported by the request.
                tokio::spawn(connection);
                Ok(Self::Http1(sender))
            }
            Protocol::Http2 => {
                let (sender, connection) =
                    http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(hyper_failure)?;
                tokio::spawn(connection);
                Ok(Self::Http2(sender))
            }
            Protocol::Grpc => Ok(Self::Grpc(EchoClient::new(channel(&load.target, stream).await?))),
            Protocol::WebSocket => {
                let url = format!("ws://{}/ws", load.target);
                let (socket, _) = tokio_tungstenite::client_async(url, stream).await.map_err(websocket_failure)?;
                Ok(Self::WebSocket(Box::new(socket)))
            }
            Protocol::Banner => {
                let mut stream = BufReader::new(stream);
                let banner: Seen = parse(&read_line(&mut stream).await?)?;
                Ok(Self::Banner(stream, banner.into()))
            }
        }
    }

    pub(super) async fn request(&mut self, load: &Load) -> Result<Answer, String> {
        match self {
            Self::Http1(sender) => {
                sender.ready().await.map_err(hyper_failure)?;
                answer(sender.send_request(http_request(load, Version::HTTP_11)?).await).await
            }
            Self::Http2(sender) => {
                sender.ready().await.map_err(hyper_failure)?;
                answer(sender.send_request(http_request(load, Version::HTTP_2)?).await).await
            }
            Self::Grpc(client) => {
                let request = SayRequest { message: MESSAGE.to_owned() };
                let mut reply = client
                    .say(request)
                    .await
                    .map_err(|status| format!("grpc {:?}: {}", status.code(), status.message()))?
                    .into_inner();
                if reply.message != MESSAGE {
                    return Err("another message came back".to_owned());
                }
                Ok(Answer {
                    backend: reply.pod,
                    client_id: reply.headers.remove("l5d-client-id"),
                    seen_peer: reply.peer,
                })
            }
            Self::WebSocket(socket) => {
                socket.send(tungstenite::Message::text(MESSAGE)).await.map_err(websocket_failure)?;
                let message = socket.next().await.ok_or("closed")?.map_err(websocket_failure)?;
                let seen: Seen = parse(message.to_text().map_err(websocket_failure)?)?;
                Ok(seen.into())
            }
            Self::Banner(stream, answer) => {
                stream.write_all(format!("{MESSAGE}\n").as_bytes()).await.map_err(io_failure)?;
                let line = read_line(stream).await?;
                if line.trim_end() != format!("{} {MESSAGE}", answer.backend) {
                    return Err("another line came back".to_owned());
                }
                Ok(answer.clone())
            }
        }
    }
}

/// A gRPC channel over exactly this stream: it does not reconnect.
async fn channel(target: &str, stream: TcpStream) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{target}")).map_err(|error| error.to_string())?;
    let once = Arc::new(Mutex::new(Some(stream)));
    let connector = tower::service_fn(move |_| {
        let once = Arc::clone(&once);
        async move {
            let stream = once.lock().await.take().ok_or_else(|| std::io::Error::other("closed"))?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| format!("grpc: {error}"))
}

fn http_request(load: &Load, version: Version) -> Result<Request<Empty<Bytes>>, String> {
    let builder = Request::builder().method("GET");
    let builder = if version == Version::HTTP_2 {
        builder.uri(format!("http://{}{}", load.target, load.path))
    } else {
        builder.uri(&load.path).header(http::header::HOST, &load.target)
    };
    builder.version(version).body(Empty::new()).map_err(|error| format!("request: {error}"))
}

async fn answer(response: hyper::Result<http::Response<hyper::body::Incoming>>) -> Result<Answer, String> {
    let response = response.map_err(hyper_failure)?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(hyper_failure)?.to_bytes();
    if !status.is_success() {
        return Err(format!("status {}", status.as_u16()));
    }
    let seen: Seen = serde_json::from_slice(&body).map_err(|_| "not the application's answer".to_owned())?;
    Ok(seen.into())
}

async fn read_line(stream: &mut BufReader<TcpStream>) -> Result<String, String> {
    let mut line = String::new();
    match stream.read_line(&mut line).await {
        Ok(0) => Err("closed".to_owned()),
        Ok(_) => Ok(line),
        Err(error) => Err(io_failure(error)),
    }
}

fn parse(json: &str) -> Result<Seen, String> {
    serde_json::from_str(json).map_err(|_| "not the application's answer".to_owned())
}

#[expect(clippy::needless_pass_by_value, reason = "used as an argument of map_err")]
fn io_failure(error: std::io::Error) -> String {
    error.kind().to_string()
}

/// hyper's own text is too general; the innermost error names the cause.
fn hyper_failure(error: hyper::Error) -> String {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

fn websocket_failure(error: tungstenite::Error) -> String {
    match error {
        tungstenite::Error::Http(response) => format!("status {}", response.status().as_u16()),
        tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed => "closed".to_owned(),
        tungstenite::Error::Io(error) => io_failure(error),
        other => other.to_string(),
    }
}
