//! HTTP from the application: one server connection, and per request route, backend, endpoint, response.
//!
//! [`Connection::route`] reads as that line. A request that reached no endpoint is tried on another one; one that may have been
//! processed never is.

mod exchange;
mod response;

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use http::{Method, Request, Response, Version};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use weft_tls::identity::Identity;

use super::Connection;
use super::target::Plan;
use crate::discover::route::Action;
use crate::http::body::{Body, Observed};
use crate::http::headers::{CLIENT_ID, ORIG_PROTO, REQUIRE_ID, strip_hop_by_hop, wants_upgrade};
use crate::http::respond::{Failure, RequestKind};
use crate::http::upgrade;
use crate::io::{Io, Stream};
use crate::metrics::label;
use crate::route::filter::{apply_to_request, apply_to_response};
use crate::route::matching::{self, Found};

use exchange::{Exchange, ExchangeError};
use response::ResponseObserver;

/// The version that a client speaks on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpVersion {
    /// HTTP/1.0 or 1.1.
    Http1,
    /// HTTP/2.
    Http2,
}

impl HttpVersion {
    /// The value of the metric label `protocol`.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Http1 => "http/1",
            Self::Http2 => "http/2",
        }
    }
}

/// The endpoint reset the request's stream; the client's is reset with the same reason.
#[derive(Debug)]
pub(super) struct Reset(::h2::Error);

impl fmt::Display for Reset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the endpoint reset the stream")
    }
}

impl std::error::Error for Reset {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// What the route of a request says.
struct Routed<'a> {
    action: &'a Action,
    /// How many bytes of the path the rule's prefix matched, if it matched by prefix.
    prefix: Option<usize>,
}

type ObservedResponse = Response<Observed<ResponseObserver>>;

/// Serves one connection to its end. A drain lets requests in flight finish.
pub(super) async fn serve(stream: Io<Stream>, version: HttpVersion, connection: Arc<Connection>) {
    let shared = Arc::clone(&connection.worker.shared);
    let orig_dst = connection.target.addr;
    let ended = match version {
        HttpVersion::Http1 => {
            let service = service_fn(move |request| {
                let connection = Arc::clone(&connection);
                async move { Ok::<_, Infallible>(connection.respond(request).await.unwrap_or_else(bad_gateway)) }
            });
            let server = http1::Builder::new()
                .auto_date_header(false)
                .half_close(true)
                .pipeline_flush(true)
                .timer(TokioTimer::new())
                .header_read_timeout(None)
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades();
            tokio::pin!(server);
            tokio::select! {
                ended = &mut server => ended,
                () = shared.drain.signaled() => {
                    server.as_mut().graceful_shutdown();
                    server.await
                }
            }
        }
        HttpVersion::Http2 => {
            let service = service_fn(move |request| {
                let connection = Arc::clone(&connection);
                async move { connection.respond(request).await }
            });
            let config = &shared.config.http2;
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .auto_date_header(false)
                .timer(TokioTimer::new())
                .initial_stream_window_size(config.stream_window)
                .initial_connection_window_size(config.connection_window);
            if let Some(keepalive) = config.outbound_keepalive {
                builder.keep_alive_interval(keepalive.interval).keep_alive_timeout(keepalive.timeout);
            }
            let server = builder.serve_connection(TokioIo::new(stream), service);
            tokio::pin!(server);
            tokio::select! {
                ended = &mut server => ended,
                () = shared.drain.signaled() => {
                    server.as_mut().graceful_shutdown();
                    server.await
                }
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, orig_dst.addr = %orig_dst, "HTTP connection ended");
    }
}

/// HTTP/1 has no resets to pass on.
fn bad_gateway(_reset: Reset) -> ObservedResponse {
    let mut response = Response::new(Observed::unwatched(Body::Empty));
    *response.status_mut() = http::StatusCode::BAD_GATEWAY;
    response
}

impl Connection {
    /// Answers one request, whatever happens to it.
    async fn respond(&self, request: Request<Incoming>) -> Result<ObservedResponse, Reset> {
        let show_error = self.worker.shared.config.outbound.informational_headers;
        let kind = RequestKind::new(request.version(), request.headers(), false, show_error);
        let failure = match self.route(request).await {
            Ok(response) => return Ok(response),
            Err(ExchangeError::Reset(error)) if kind.version == Version::HTTP_2 => return Err(Reset(error)),
            Err(ExchangeError::Reset(error)) => Failure::BadGateway(error.to_string()),
            Err(ExchangeError::Failure(failure)) => failure,
        };
        let metrics = &self.worker.shared.metrics;
        metrics.outbound_http_errors.get_or_create(&vec![label("error", failure.label())]).inc();
        tracing::debug!(%failure, orig_dst.addr = %self.target.addr, "request failed");
        Ok(failure.respond(kind).map(Observed::unwatched))
    }

    /// One request: check, match, filter, pick, exchange, filter.
    async fn route(&self, mut request: Request<Incoming>) -> Result<ObservedResponse, ExchangeError> {
        let arrived = Instant::now();
        let permit = self.worker.admit().ok_or(Failure::LoadShed)?;
        check_form(&request)?;
        let required = take_mesh_headers(&mut request)?;
        let upgrades = wants_upgrade(&request);
        let client_upgrade = upgrades.then(|| hyper::upgrade::on(&mut request));
        if !upgrades && request.version() != Version::HTTP_2 {
            strip_hop_by_hop(request.headers_mut());
        }

        let plan = self.target.ready().await.map_err(|_| Failure::BadGateway("no destination".to_owned()))?;
        let http2 = request.version() == Version::HTTP_2;
        let routes = plan.http_routes(http2).ok_or(Failure::Internal("the destination is not HTTP any more"))?;
        let found = matching::find(routes, &request).ok_or(Failure::NoRoute)?;
        let Found { route, rule, prefix } = found;
        let routed = Routed { action: &routes[route].rules[rule].action, prefix };

        let exchanged = self.exchange(&plan, &routed, request, required, client_upgrade, arrived).await;
        let (status, error) = match &exchanged {
            Ok((response, _)) => (response.status().as_u16(), ""),
            Err(ExchangeError::Failure(failure)) => (failure.status().as_u16(), failure.label()),
            Err(ExchangeError::Reset(_)) => (0, "reset"),
        };
        plan.count_status(&self.worker.shared, (http2, route, rule), routed.action, status, error);
        let (response, mut observer) = exchanged?;
        observer.hold(permit);
        Ok(response.map(|body| Observed::new(body, observer)))
    }

    async fn exchange(
        &self,
        plan: &Plan,
        routed: &Routed<'_>,
        mut request: Request<Incoming>,
        required: Option<Identity>,
        client_upgrade: Option<hyper::upgrade::OnUpgrade>,
        arrived: Instant,
    ) -> Result<(Response<Body>, ResponseObserver), ExchangeError> {
        let Routed { action, prefix } = *routed;
        apply_to_request(&action.filters, prefix, &mut request)?;
        let (backend, resolved) = plan.pick(&action.backends).ok_or(Failure::Internal("the route has no backend"))?;
        apply_to_request(&backend.filters, prefix, &mut request)?;
        let method = request.method().clone();
        let exchange = Exchange {
            connection: self,
            backend: &resolved,
            required: required.as_ref(),
            upgrades: client_upgrade.is_some(),
            arrived,
        };
        let exchanged = match action.request_timeout {
            None => exchange.run(request.map(Body::Incoming)).await?,
            Some(timeout) => match tokio::time::timeout(timeout, exchange.run(request.map(Body::Incoming))).await {
                Ok(exchanged) => exchanged?,
                Err(_) => return Err(Failure::Timeout.into()),
            },
        };
        let (mut response, observer) = exchanged;
        if let Some(client) = client_upgrade.filter(|_| upgrade::is_tunnel(&method, response.status())) {
            if method == Method::CONNECT {
                upgrade::strip_connect_response(&mut response);
            }
            let server = hyper::upgrade::on(&mut response);
            upgrade::spawn_tunnel(&self.worker.shared.drain, client, server);
            *response.body_mut() = Body::Empty;
        }
        apply_to_response(&backend.filters, response.headers_mut());
        apply_to_response(&action.filters, response.headers_mut());
        Ok((response, observer))
    }
}

/// Refuses targets that do not fit their method (RFC 9112 section 3.2).
fn check_form<B>(request: &Request<B>) -> Result<(), Failure> {
    let uri = request.uri();
    if request.version() == Version::HTTP_2 {
        return Ok(());
    }
    let fits = if request.method() == Method::CONNECT {
        let authority_alone = uri.scheme().is_none() && uri.path_and_query().is_none() && uri.authority().is_some();
        request.version() == Version::HTTP_11 && authority_alone
    } else {
        uri.scheme().is_some() || uri.path_and_query().is_some()
    };
    if fits { Ok(()) } else { Err(Failure::BadRequest) }
}

/// Takes off what applications must not send to the mesh; answers the identity that the application demands of its server.
fn take_mesh_headers<B>(request: &mut Request<B>) -> Result<Option<Identity>, Failure> {
    let headers = request.headers_mut();
    headers.remove(CLIENT_ID);
    headers.remove(ORIG_PROTO);
    let Some(required) = headers.remove(REQUIRE_ID) else { return Ok(None) };
    let identity = required.to_str().ok().and_then(|name| name.parse().ok());
    // An identity that cannot be read cannot be proven.
    identity.map(Some).ok_or_else(|| Failure::BadGateway("required identity is malformed".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, target: &str, version: Version) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = method.parse().unwrap();
        *request.uri_mut() = target.parse().unwrap();
        *request.version_mut() = version;
        request
    }

    #[test]
    fn targets_have_to_fit_their_method() {
        for (method, target, version, fits) in [
            ("GET", "/", Version::HTTP_11, true),
            ("GET", "http://web/", Version::HTTP_11, true),
            ("GET", "example.com", Version::HTTP_11, false),
            ("OPTIONS", "*", Version::HTTP_11, true),
            ("CONNECT", "example.com:443", Version::HTTP_11, true),
            ("CONNECT", "example.com:443", Version::HTTP_10, false),
            ("CONNECT", "http://example.com:443/", Version::HTTP_11, false),
            ("CONNECT", "/", Version::HTTP_11, false),
        ] {
            assert_eq!(check_form(&request(method, target, version)).is_ok(), fits, "{method} {target} {version:?}");
        }
    }

    #[test]
    fn mesh_headers_are_taken_off() {
        let mut request = request("GET", "/", Version::HTTP_11);
        for (name, value) in [("l5d-client-id", "me"), ("l5d-orig-proto", "HTTP/1.1"), ("l5d-require-id", "web.demo")] {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        assert_eq!(take_mesh_headers(&mut request).unwrap(), Some("web.demo".parse().unwrap()));
        assert!(request.headers().is_empty());
    }

    #[test]
    fn a_malformed_required_identity_fails_the_request() {
        let mut request = request("GET", "/", Version::HTTP_11);
        request.headers_mut().insert("l5d-require-id", "not a name".parse().unwrap());
        assert_eq!(take_mesh_headers(&mut request).unwrap_err().status(), 502);
    }
}
