//! One client's HTTP connection: hyper's server over the decrypted stream, and its orderly end.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use ::http::HeaderValue;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::HttpConnection;
use super::counters::Counters;
use crate::inbound::Inbound;
use crate::inbound::accept::ConnectionError;
use crate::io::Io;
use crate::policy::PortPolicy;
use crate::policy::authz::Client;

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inbound) enum HttpVersion {
    /// HTTP/1.0 or 1.1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

/// Serves a connection until the client ends it, or the proxy ends and its requests are answered.
pub(in crate::inbound) async fn serve<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    version: HttpVersion,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let server = Arc::clone(&policy.borrow().meta);
    let stream = TokioIo::new(stream.with_metrics(inbound.source(&client, target, &server)));
    let connection = Arc::new(HttpConnection {
        client_id: client.identity().and_then(|id| HeaderValue::from_str(id.as_str()).ok()),
        target: inbound.targets.get(target),
        counters: Counters::default(),
        inbound: Arc::clone(inbound),
        client,
        policy,
    });
    match version {
        HttpVersion::Http1 => serve_http1(inbound, connection, stream).await,
        HttpVersion::Http2 => serve_http2(inbound, connection, stream).await,
    }
    .map_err(ConnectionError::Http)
}

async fn serve_http1<S>(
    inbound: &Inbound,
    connection: Arc<HttpConnection>,
    stream: TokioIo<Io<S>>,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| Arc::clone(&connection).handle(request));
    let mut server = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            // Clients keep connections for as long as they like, as with Linkerd.
            .header_read_timeout(None)
            .auto_date_header(false)
            .serve_connection(stream, service)
            .with_upgrades()
    );
    tokio::select! {
        served = server.as_mut() => return served,
        () = inbound.shared.drain.signaled() => {}
    }
    server.as_mut().graceful_shutdown();
    server.await
}

async fn serve_http2<S>(
    inbound: &Inbound,
    connection: Arc<HttpConnection>,
    stream: TokioIo<Io<S>>,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| Arc::clone(&connection).handle(request));
    let settings = inbound.shared.config.http2;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .initial_stream_window_size(settings.stream_window)
        .initial_connection_window_size(settings.connection_window)
        // The policy limits requests, not the connection; other proxies carry all of a pod's requests over one.
        .max_concurrent_streams(None);
    if let Some(keepalive) = settings.inbound_keepalive {
        builder.keep_alive_interval(keepalive.interval).keep_alive_timeout(keepalive.timeout);
    }
    let mut server = pin!(builder.serve_connection(stream, service));
    tokio::select! {
        served = server.as_mut() => return served,
        () = inbound.shared.drain.signaled() => {}
    }
    server.as_mut().graceful_shutdown();
    server.await
}
