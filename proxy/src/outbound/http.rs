//! HTTP from the application: one server connection, and for each request route, backend, endpoint, response.
//!
//! ```text
//! Connection::route -> matching -> Routed::send (attempts) -> Routed::attempt (filters, backend, deadlines) -> Exchange (endpoint)
//! ```
//!
//! What may be sent again, and how long it may take, is decided in `request`; these modules do it.

mod attempt;
mod exchange;
mod response;
mod subject;

use std::sync::Arc;

use http::{Method, Request, Response, Version, header};
use tokio::time::Instant;
use weft_tls::identity::Identity;

use super::{Connection, target::TargetError};
use crate::{
    discover::route::Matched,
    http::{
        body::{Body, Observed, counted::Counted, error::is_own_reset},
        form,
        headers::{
            CLIENT_ID, DST_CANONICAL, ORIG_PROTO, REQUIRE_ID, has_mesh_headers, strip_for_upgrade, strip_hop_by_hop,
            wants_upgrade,
        },
        informational::Informational,
        respond::{Failure, RequestKind},
        serve::{HttpVersion, Reset, ServerSettings, serve as serve_http},
        upgrade::{self, Tunnel},
    },
    io::{Io, Stream},
    metrics::{Direction, label},
    route::matching::host,
    trace::Kind,
};

use attempt::Routed;
pub(super) use exchange::ExchangeError;
use response::ResponseObserver;

type ObservedResponse = Response<Observed<ResponseObserver>>;

/// Serves one connection to its end, or until it becomes a tunnel, which it returns. During a drain, requests in flight
/// finish.
pub(super) async fn serve(stream: Io<Stream>, version: HttpVersion, connection: Arc<Connection>) -> Option<Tunnel> {
    let shared = Arc::clone(&connection.worker.shared);
    let settings = ServerSettings {
        http1_timeout: shared.config.http1_client_timeout,
        http2: shared.config.http2.outbound_server,
        windows: Arc::clone(&shared.windows),
    };
    let served = Arc::clone(&connection);
    let answer = move |request, informational| {
        let connection = Arc::clone(&served);
        async move { connection.respond(request, informational).await }
    };
    if let Err(error) = serve_http(stream, version, settings, &shared.drain, &connection.closing, answer).await {
        let failures = &connection.worker.failures;
        failures.connection(&error, error.is_timeout(), connection.peer, &connection.target.destination);
    }
    connection.tunnel.lock().take()
}

impl Connection {
    /// Answers one request in every case.
    async fn respond(
        &self,
        mut request: Box<Request<Body>>,
        informational: Informational,
    ) -> Result<ObservedResponse, Reset> {
        let show_error = self.worker.shared.config.outbound.informational_headers;
        let kind = RequestKind::outbound(request.version(), request.headers(), show_error);
        let traced = self.worker.shared.tracing.begin(&mut *request, Kind::Server, Direction::Outbound);
        let failure = match self.route(request, kind, &informational).await {
            Ok(response) => {
                traced.responded(response.status());
                return Ok(response);
            }
            Err(ExchangeError::Reset(error)) if kind.version == Version::HTTP_2 => {
                if !is_own_reset(&error) {
                    self.worker.failures.failed_request(kind, &error, self.peer, &self.target.destination);
                }
                return Err(Reset(error));
            }
            Err(ExchangeError::Reset(error)) => Failure::BadGateway(error.to_string()),
            Err(ExchangeError::Failure(failure)) => failure,
        };
        let metrics = &self.worker.shared.metrics;
        if let Some(error) = failure.label() {
            metrics.outbound_http_errors.get_or_create(&vec![label("error", error)]).inc();
        }
        self.worker.failures.request(kind, &failure, &failure, self.peer, &self.target.destination);
        if failure.closes() {
            self.closing.begin();
        }
        let response = failure.respond(kind).map(|()| Observed::unwatched(Body::Empty));
        traced.responded(response.status());
        Ok(response)
    }

    /// One request: check, match, send, observe. `informational` passes on what comes before the response.
    pub(super) async fn route(
        &self,
        mut request: Box<Request<Body>>,
        kind: RequestKind,
        informational: &Informational,
    ) -> Result<ObservedResponse, ExchangeError> {
        let arrived = Instant::now();
        let permit = self.worker.limit.admit().ok_or(Failure::LoadShed)?;
        form::normalize(&mut *request)?;
        let required = take_mesh_headers(&mut *request)?;
        let upgrades = wants_upgrade(&*request);
        let client_upgrade = upgrades.then(|| hyper::upgrade::on(&mut *request));
        if upgrades {
            strip_for_upgrade(&mut *request);
        } else if request.version() != Version::HTTP_2 {
            strip_hop_by_hop(request.headers_mut());
        }

        let named = self.named_by(&mut *request)?;
        let target = named.as_ref().unwrap_or(&self.target);
        let plan = target.ready().await.map_err(|error| match error {
            TargetError::Timeout(_) => Failure::DiscoveryTimeout,
            TargetError::Refused(_) => Failure::Unusable { reason: "no destination".to_owned(), label: error.label() },
        })?;
        let http2 = request.version() == Version::HTTP_2;
        let routes = plan.http_routes(http2).ok_or_else(|| self.not_for_http())?;
        let Matched { id: (route, rule), action, prefix } = routes.find(&*request).ok_or(Failure::NoRoute)?;
        let rule = plan.rule(http2, route, rule).ok_or(Failure::Internal("the route has no rule"))?;
        let rule = rule.metrics(&self.worker.shared, &plan.policy.parent, action);
        let by_host = self.worker.shared.config.outbound.hostname_labels;
        let metrics = rule.route.requests(by_host.then(|| host(&*request)));
        let method = request.method().clone();
        let sent = Counted::wrap(request.body_mut(), &metrics.frames);
        let routed = Routed {
            connection: self,
            plan: &plan,
            action,
            prefix,
            required,
            upgrades,
            informational,
            arrived,
            rule,
            metrics: &metrics,
            sent,
        };
        let exchanged = routed.send(request).await;
        if let Err(error) = &exchanged {
            metrics.ended(error.stream_end(), arrived.elapsed());
        }
        let (mut response, mut observer) = exchanged?;
        observer.count_request(&metrics, arrived);
        if let Some(client) = client_upgrade.filter(|_| upgrade::is_tunnel(&method, response.status())) {
            if method == Method::CONNECT {
                upgrade::strip_connect_response(&mut response);
            }
            let server = hyper::upgrade::on(&mut response);
            *self.tunnel.lock() = Some(Tunnel::new(client, server, Some(permit)));
            *response.body_mut() = Body::Empty;
        } else {
            observer.hold(permit);
        }
        Ok(response.map(|body| Observed::new(body, observer, kind)))
    }
}

/// Removes headers that applications must not send to the mesh; returns the identity that the application requires of
/// its server.
fn take_mesh_headers<B>(request: &mut Request<B>) -> Result<Option<Identity>, Failure> {
    let headers = request.headers_mut();
    if !has_mesh_headers(headers) {
        return Ok(None);
    }
    headers.remove(CLIENT_ID);
    headers.remove(ORIG_PROTO);
    headers.remove(DST_CANONICAL);
    let header::Entry::Occupied(required) = headers.entry(REQUIRE_ID) else { return Ok(None) };
    let (_, mut required) = required.remove_entry_mult();
    let only = required.next().filter(|_| required.next().is_none());
    let identity = only.and_then(|name| name.to_str().ok()?.parse().ok());
    // One that is unreadable, or one of several, cannot be proven.
    identity.map(Some).ok_or_else(|| Failure::Unusable {
        reason: "required identity is malformed".to_owned(),
        label: "identity required",
    })
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

    /// The size of what an asynchronous method returns.
    fn size<'a, R>(_: fn(&'a Connection, Box<Request<Body>>, Informational) -> R) -> usize {
        size_of::<R>()
    }

    #[test]
    fn a_request_takes_little_room_while_it_waits() {
        let bytes = size(Connection::respond);
        assert!(bytes <= 2624, "{bytes} bytes: each request copies them");
    }

    #[test]
    fn a_connection_takes_little_room() {
        /// The size of what the function returns.
        fn size<R>(_: fn(Io<Stream>, HttpVersion, Arc<Connection>) -> R) -> usize {
            size_of::<R>()
        }
        let bytes = size(serve);
        assert!(bytes <= 1792, "{bytes} bytes of each that is idle");
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
        for name in ["web.demo", "other.demo"] {
            request.headers_mut().append("l5d-require-id", name.parse().unwrap());
        }
        assert_eq!(take_mesh_headers(&mut request).unwrap_err().status(), 502, "nobody is two");
    }
}
