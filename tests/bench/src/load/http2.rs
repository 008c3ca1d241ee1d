//! HTTP/2 requests and gRPC calls, on h2 alone.

use std::{net::SocketAddr, rc::Rc, time::Instant};

use anyhow::Context as _;
use bytes::{BufMut as _, Bytes, BytesMut};
use h2::{RecvStream, client::SendRequest};
use http::{Method, Request, StatusCode};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{EXCHANGE_WITHIN, Meter, PAUSE, connect, server};

/// Windows that no exchange here fills.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 1 << 24;
/// Bytes of a gRPC message, without its frame's head of five.
const MESSAGE_BYTES: u32 = 128;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// A GET.
    Get,
    /// A unary gRPC call.
    Unary,
    /// Messages on a gRPC stream that stays open.
    Messages,
}

/// Calls on one connection for ever.
pub(super) async fn keep_calling(target: SocketAddr, streams: u32, call: Call, meter: Rc<Meter>) {
    loop {
        if let Err(error) = call_until_it_fails(target, streams, call, &meter).await {
            meter.failed(&error);
        }
        sleep(PAUSE).await;
    }
}

async fn call_until_it_fails(target: SocketAddr, streams: u32, call: Call, meter: &Rc<Meter>) -> anyhow::Result<()> {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    let (requests, connection) = builder.handshake::<_, Bytes>(connect(target).await?).await?;
    // All end with the set, when one of them does.
    let mut tasks = JoinSet::new();
    tasks.spawn_local(async move { connection.await.context("the connection failed") });
    for _ in 0..streams {
        tasks.spawn_local(keep_stream(requests.clone(), call, Rc::clone(meter)));
    }
    tasks.join_next().await.context("a connection without tasks")??
}

async fn keep_stream(mut requests: SendRequest<Bytes>, call: Call, meter: Rc<Meter>) -> anyhow::Result<()> {
    let message = message();
    if call == Call::Messages {
        return keep_messages(requests, &message, &meter).await;
    }
    loop {
        let started = Instant::now();
        let exchange = async {
            match call {
                Call::Get => get(&mut requests).await,
                Call::Unary | Call::Messages => unary(&mut requests, &message).await,
            }
        };
        timeout(EXCHANGE_WITHIN, exchange).await.context("no response in time")??;
        meter.done(started);
    }
}

async fn get(requests: &mut SendRequest<Bytes>) -> anyhow::Result<()> {
    let request = Request::get(uri("/")).header("user-agent", "weft-bench").body(())?;
    let (response, _) = ready(requests).await?.send_request(request, true)?;
    let response = response.await?;
    anyhow::ensure!(response.status() == StatusCode::OK, "{}", response.status());
    let received = drain(&mut response.into_body()).await?;
    anyhow::ensure!(received == server::BODY_BYTES, "{received} bytes of {}", server::BODY_BYTES);
    Ok(())
}

async fn unary(requests: &mut SendRequest<Bytes>, message: &Bytes) -> anyhow::Result<()> {
    let (response, mut sending) = ready(requests).await?.send_request(grpc(server::UNARY)?, false)?;
    sending.send_data(message.clone(), true)?;
    let response = response.await?;
    anyhow::ensure!(response.status() == StatusCode::OK, "{}", response.status());
    let mut body = response.into_body();
    let received = drain(&mut body).await?;
    let trailers = body.trailers().await?.context("a gRPC response without trailers")?;
    let status = trailers.get("grpc-status").context("trailers without grpc-status")?;
    anyhow::ensure!(status.as_bytes() == b"0", "gRPC status {status:?}");
    anyhow::ensure!(received == message.len(), "{received} bytes of {}", message.len());
    Ok(())
}

async fn keep_messages(mut requests: SendRequest<Bytes>, message: &Bytes, meter: &Meter) -> anyhow::Result<()> {
    let (response, mut sending) = ready(&mut requests).await?.send_request(grpc(server::STREAM)?, false)?;
    // A proxy may hold the head of the response until its body begins.
    let mut started = Instant::now();
    sending.send_data(message.clone(), false)?;
    let response = timeout(EXCHANGE_WITHIN, response).await.context("no response in time")??;
    anyhow::ensure!(response.status() == StatusCode::OK, "{}", response.status());
    let mut body = response.into_body();
    loop {
        let mut missing = message.len();
        while missing > 0 {
            let data = timeout(EXCHANGE_WITHIN, body.data()).await.context("no message in time")?;
            let data = data.context("the stream ended")??;
            body.flow_control().release_capacity(data.len())?;
            missing = missing.checked_sub(data.len()).context("more than the message")?;
        }
        meter.done(started);
        started = Instant::now();
        sending.send_data(message.clone(), false)?;
    }
}

async fn ready(requests: &mut SendRequest<Bytes>) -> anyhow::Result<SendRequest<Bytes>> {
    Ok(requests.clone().ready().await?)
}

/// The length of a body.
async fn drain(body: &mut RecvStream) -> anyhow::Result<usize> {
    let mut received = 0;
    while let Some(data) = body.data().await {
        let data = data?;
        received += data.len();
        body.flow_control().release_capacity(data.len())?;
    }
    Ok(received)
}

fn grpc(path: &str) -> anyhow::Result<Request<()>> {
    let request = Request::builder().method(Method::POST).uri(uri(path));
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    Ok(request.header("user-agent", "weft-bench").body(())?)
}

fn uri(path: &str) -> String {
    format!("http://server.bench{path}")
}

/// A gRPC message in its frame: not compressed, length, bytes.
fn message() -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(0);
    message.put_u32(MESSAGE_BYTES);
    message.put_bytes(7, MESSAGE_BYTES as usize);
    message.freeze()
}
