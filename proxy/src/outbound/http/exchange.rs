//! One request and its response with one endpoint: the version on the wire, and the response for the application.
//!
//! A request that no endpoint has seen goes to another one here, whatever the route says about retries.

use std::{num::NonZeroU128, sync::Arc};

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header, uri::Authority};
use parking_lot::Mutex;
use tokio::time::Instant;
use weft_tls::identity::Identity;

use super::{response::ResponseObserver, subject::subject};
use crate::{
    discover::route::Action,
    failure_log::log_given_up,
    http::{
        body::{
            Body, End,
            error::{TIMEOUT, is_own_reset, reset_label, response_reset_label},
            response::CountResponse,
        },
        headers::{
            DST_CANONICAL, ORIG_PROTO, PROXY_CONNECTION_L5D, PROXY_ERROR, has_mesh_headers, log_request, log_response,
            strip_hop_by_hop,
        },
        informational::Informational,
        orig_proto::{
            can_be_carried, downgrade_request, downgrade_response, replace_authority, to_absolute_form, upgrade_request,
        },
        respond::Failure,
        upgrade::is_tunnel,
    },
    metrics::{BalancerKind, Outcome, StreamEnd},
    outbound::{
        Connection,
        backends::Resolved,
        balance::{Balanced, InFlight, Search, SelectError, breaker::Report},
        endpoint::{ConnectError, Endpoint, Unprocessed},
        h1, h2,
        target::RoutingPlan,
    },
    request::{classify::Classes, deadlines::Expired},
    tap::Tapped,
};

/// How often a request is sent again at once because an endpoint refused it, or because its connection had just ended.
const IMMEDIATE_ATTEMPTS: usize = 3;

/// A request for a backend.
pub(super) struct Exchange<'a> {
    pub(super) connection: &'a Connection,
    pub(super) plan: &'a RoutingPlan,
    pub(super) backend: &'a Resolved,
    /// The required identity of the endpoint.
    pub(super) required: Option<&'a Identity>,
    /// Whether the request asks for a tunnel.
    pub(super) upgrades: bool,
    /// Passes on what comes before the response.
    pub(super) informational: &'a Informational,
    /// For an endpoint.
    pub(super) search: Search,
    /// Which responses are failures.
    pub(super) classes: &'a Classes,
    /// What the matched route does with the request.
    pub(super) action: &'a Action,
    /// The request's trace, if it is collected.
    pub(super) trace_id: Option<NonZeroU128>,
    /// The endpoint that has the request.
    pub(super) current: Mutex<Option<Current>>,
    /// The endpoint to which the attempt is counted as a request.
    pub(super) counted: Mutex<Option<Arc<Endpoint>>>,
}

/// The endpoint that has a request, and the request's share of its load.
pub(super) struct Current {
    endpoint: Arc<Endpoint>,
    in_flight: Option<InFlight>,
    /// When it got the request.
    since: Instant,
}

/// Why there is no response.
#[derive(Debug)]
pub(in crate::outbound) enum ExchangeError {
    /// A response is generated instead of the endpoint's.
    Failure(Failure),
    /// The endpoint reset a native HTTP/2 request.
    Reset(::h2::Error),
}

impl ExchangeError {
    /// The status that it is counted with.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Failure(failure) => failure.status(),
            Self::Reset(_) => StatusCode::BAD_GATEWAY,
        }
    }

    /// Reports it to those who watch the request.
    fn report(&self, mut tapped: Tapped) {
        match self {
            Self::Failure(failure) => {
                let mut response = Response::new(());
                *response.status_mut() = failure.status();
                tapped.responded(&response);
                tapped.ended(End::Whole(None));
            }
            Self::Reset(error) => tapped.reset(error.reason().unwrap_or(::h2::Reason::INTERNAL_ERROR)),
        }
    }

    /// What `response_total` counts; `other` is the label `error` of what is neither reset nor expired.
    pub(super) fn outcome(&self, other: Option<&'static str>) -> Outcome {
        match self {
            // As a response of this proxy's to the client, which Linkerd's counts without an error.
            Self::Failure(failure @ (Failure::BadGateway(_) | Failure::Unusable { .. } | Failure::ConnectTimeout)) => {
                Outcome::failure(Some(failure.status().as_u16()), None)
            }
            Self::Failure(Failure::Timeout(_)) => Outcome::failure(None, Some(TIMEOUT)),
            Self::Failure(_) => Outcome::failure(None, other),
            Self::Reset(error) => Outcome::failure(None, Some(response_reset_label(error))),
        }
    }

    /// What the families of statuses count.
    pub(super) fn stream_end(&self) -> StreamEnd {
        match self {
            Self::Failure(failure) => failure.stream_end(),
            Self::Reset(error) => StreamEnd::failed(reset_label(error)),
        }
    }

    /// Whether a route that allows it may send the request again: nothing was processed, or only this attempt's time is
    /// over.
    pub(super) fn may_be_repeated(&self) -> bool {
        match self {
            Self::Failure(failure) => matches!(failure, Failure::FailFast | Failure::Timeout(Expired::Head)),
            Self::Reset(error) => error.is_reset() && error.reason() == Some(::h2::Reason::REFUSED_STREAM),
        }
    }
}

impl From<Failure> for ExchangeError {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// Why a backend has not answered.
pub(super) struct BackendError {
    pub(super) error: ExchangeError,
    /// The request and its search, if no endpoint of the backend could be reached and another backend has one.
    pub(super) unsent: Option<(Box<Request<Body>>, Search)>,
}

impl From<ExchangeError> for BackendError {
    fn from(error: ExchangeError) -> Self {
        Self { error, unsent: None }
    }
}

impl From<Failure> for BackendError {
    fn from(failure: Failure) -> Self {
        ExchangeError::from(failure).into()
    }
}

/// How one attempt ended without a response.
enum AttemptError {
    /// Nothing was processed.
    Unsent(Box<Request<Body>>, Unprocessed),
    Failed(ExchangeError, Cause),
}

/// Who ended an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Endpoint,
    /// It broke off its request, or is slow to send it.
    Client,
    /// This proxy, for its own bounds.
    Proxy,
}

impl Cause {
    fn of(error: &::h2::Error, is_own_bound: bool) -> Self {
        match (is_own_reset(error), is_own_bound) {
            (true, _) => Self::Client,
            (_, true) => Self::Proxy,
            (false, false) => Self::Endpoint,
        }
    }

    /// The answer to a request of HTTP/1. A client that is still there has sent a body that cannot be read.
    fn failure(self, reason: impl FnOnce() -> String) -> Failure {
        match self {
            Self::Client => Failure::BadRequest,
            Self::Endpoint | Self::Proxy => Failure::BadGateway(reason()),
        }
    }
}

impl Exchange<'_> {
    /// Sends the request, to another endpoint if one cannot be reached or refuses it.
    pub(super) async fn run(
        &self,
        mut request: Box<Request<Body>>,
    ) -> Result<(Response<Body>, Box<ResponseObserver>), BackendError> {
        let mut search = self.search;
        let mut immediate = 0;
        // The endpoint that did not process the request last.
        let mut avoided: Option<Arc<Balanced>> = None;
        loop {
            let (endpoint, in_flight) = self.select(&search, avoided.as_deref()).await?;
            let balanced = in_flight.as_ref().and_then(InFlight::balanced).cloned();
            self.check_identity(&endpoint)?;
            let taps = &self.connection.worker.shared.taps;
            let mut tapped = taps.begin(&*request, || subject(self.connection.peer, &endpoint, self.action));
            // As in Linkerd, what an endpoint takes begins when it was chosen.
            let since = Instant::now();
            *self.current.lock() = Some(Current { endpoint: Arc::clone(&endpoint), in_flight, since });
            let attempt = self.attempt(&endpoint, balanced.as_ref(), request).await;
            let mut in_flight = self.current.lock().take().and_then(|current| current.in_flight);
            let (again, reason) = match attempt {
                Ok((response, checked_out)) => {
                    if let Some(in_flight) = &mut in_flight {
                        in_flight.answered();
                    }
                    if let Some(balanced) = &balanced {
                        balanced.recovered();
                    }
                    let metrics = Arc::clone(&endpoint.http);
                    let (status, headers) = (response.status(), response.headers());
                    let count = CountResponse::new(metrics, since, status, headers, self.classes.clone());
                    let count = count.traced(self.trace_id);
                    tapped.responded(&response);
                    return Ok((response, ResponseObserver::new(count, in_flight, checked_out, tapped)));
                }
                Err(AttemptError::Failed(error, cause)) => {
                    error.report(tapped);
                    if cause != Cause::Client {
                        endpoint.http.failure(error.outcome(None), since.elapsed());
                    }
                    if let Some(in_flight) = in_flight.filter(|_| cause == Cause::Endpoint) {
                        in_flight.report(Report::Failed);
                    }
                    return Err(error.into());
                }
                Err(AttemptError::Unsent(request, reason)) => {
                    // Nothing was processed.
                    tapped.reset(::h2::Reason::REFUSED_STREAM);
                    (request, reason)
                }
            };
            request = again;
            let error = match reason {
                Unprocessed::Unreachable(error) => {
                    drop(in_flight);
                    let has_available = |avoided: Option<&Resolved>| {
                        self.plan.has_available(&self.action.backends, BalancerKind::Http, avoided)
                    };
                    if balanced.is_none() || error.is_local() || !search.goes_on(|| has_available(None)) {
                        return Err(connect_failure(&error).into());
                    }
                    if self.backend.is_reachable() || !has_available(Some(self.backend)) {
                        continue;
                    }
                    // This backend would be waited for, or what is left of it may take as long to fail.
                    return Err(BackendError {
                        error: connect_failure(&error).into(),
                        unsent: Some((request, search)),
                    });
                }
                // A connection may end at any time, and a burst may be larger than a new connection can take. The
                // endpoint is at fault if that happens on every attempt.
                Unprocessed::ConnectionEnded | Unprocessed::LimitUnknown(_) if immediate < IMMEDIATE_ATTEMPTS => None,
                Unprocessed::ConnectionEnded => {
                    Some(Failure::BadGateway("the endpoint keeps closing connections".to_owned()).into())
                }
                Unprocessed::Refused(error) | Unprocessed::LimitUnknown(error) => Some(ExchangeError::Reset(error)),
            };
            if let Some(error) = error {
                endpoint.http.failure(error.outcome(None), since.elapsed());
                *self.counted.lock() = None;
                if let Some(in_flight) = in_flight {
                    in_flight.report(Report::Failed);
                }
                if immediate == IMMEDIATE_ATTEMPTS {
                    return Err(error.into());
                }
            }
            immediate += 1;
            avoided = balanced;
        }
    }

    /// Counts the request when it is sent: once for an endpoint, also if its connection turns out to have ended.
    fn sent(&self, endpoint: &Arc<Endpoint>) {
        let mut counted = self.counted.lock();
        if counted.as_ref().is_none_or(|known| !Arc::ptr_eq(known, endpoint)) {
            endpoint.http.request();
            *counted = Some(Arc::clone(endpoint));
        }
    }

    /// The request's time is over, and the endpoint that has it has not answered.
    pub(super) fn expired(&self, cause: Cause) {
        let Some(Current { endpoint, in_flight, since }) = self.current.lock().take() else { return };
        self.sent(&endpoint);
        let outcome = Outcome::failure(None, Some(TIMEOUT));
        endpoint.http.failure(outcome, since.elapsed());
        if let Some(in_flight) = in_flight.filter(|_| cause == Cause::Endpoint) {
            in_flight.report(Report::Failed);
        }
    }

    /// The endpoint for an attempt; `avoided` only if no other is available.
    async fn select(
        &self,
        search: &Search,
        avoided: Option<&Balanced>,
    ) -> Result<(Arc<Endpoint>, Option<InFlight>), ExchangeError> {
        match self.backend {
            Resolved::Missing => Err(Failure::Internal("the route's backend does not exist").into()),
            Resolved::Forward(endpoint) => Ok((Arc::clone(endpoint), None)),
            Resolved::Balance(balancer) => {
                let in_flight = balancer.select(search.deadline(), avoided).await.map_err(|error| match error {
                    SelectError::FailFast => Failure::FailFast,
                    SelectError::QueueFull => Failure::LoadShed,
                    SelectError::PlaintextRefused(_) => Failure::PlaintextRefused(error.to_string()),
                })?;
                let balanced = in_flight.balanced().ok_or(Failure::Internal("an endpoint without a name"))?;
                Ok((Arc::clone(&balanced.endpoint), Some(in_flight)))
            }
        }
    }

    fn check_identity(&self, endpoint: &Endpoint) -> Result<(), ExchangeError> {
        match self.required {
            Some(required) if endpoint.identity() != Some(required) => {
                let reason = "the endpoint is not who the request requires".to_owned();
                Err(Failure::Unusable { reason, label: "identity required" }.into())
            }
            _ => Ok(()),
        }
    }

    async fn attempt(
        &self,
        endpoint: &Arc<Endpoint>,
        balanced: Option<&Arc<Balanced>>,
        mut request: Box<Request<Body>>,
    ) -> Result<(Response<Body>, Option<h1::CheckedOut>), AttemptError> {
        let Some(authority) = endpoint.authority_override() else {
            return self.attempt_as_it_is(endpoint, balanced, request).await;
        };
        let replaced = Replaced::by(&mut request, authority);
        let mut attempt = self.attempt_as_it_is(endpoint, balanced, request).await;
        if let (Err(AttemptError::Unsent(request, _)), Some(replaced)) = (&mut attempt, replaced) {
            replaced.restore(request);
        }
        attempt
    }

    async fn attempt_as_it_is(
        &self,
        endpoint: &Arc<Endpoint>,
        balanced: Option<&Arc<Balanced>>,
        mut request: Box<Request<Body>>,
    ) -> Result<(Response<Body>, Option<h1::CheckedOut>), AttemptError> {
        log_request(self.connection.worker.shared.config.log_headers, endpoint.info.addr, &*request);
        if request.version() == Version::HTTP_2 {
            to_absolute_form(&mut *request, None);
            return match h2::send(endpoint, balanced, request, self.informational, || self.sent(endpoint)).await {
                Ok(response) => Ok((self.restore(endpoint, response.map(Body::H2), false), None)),
                Err(h2::SendError::Failed { error, is_own_bound }) => {
                    let cause = Cause::of(&error, is_own_bound);
                    Err(AttemptError::Failed(ExchangeError::Reset(error), cause))
                }
                Err(h2::SendError::Unsent(mut request, reason)) => {
                    *request.version_mut() = Version::HTTP_2;
                    Err(AttemptError::Unsent(request, reason))
                }
            };
        }
        if endpoint.upgrades_http1() && !self.upgrades && can_be_carried(&*request) {
            upgrade_request(&mut *request);
            to_absolute_form(&mut *request, None);
            return match h2::send(endpoint, balanced, request, self.informational, || self.sent(endpoint)).await {
                Ok(response) => Ok((self.restore(endpoint, response.map(Body::H2), true), None)),
                Err(h2::SendError::Failed { error, is_own_bound }) => {
                    let cause = Cause::of(&error, is_own_bound);
                    let failure = cause.failure(|| format!("the endpoint's proxy failed: {error}"));
                    Err(AttemptError::Failed(failure.into(), cause))
                }
                Err(h2::SendError::Unsent(mut request, reason)) => {
                    downgrade_request(&mut *request);
                    Err(AttemptError::Unsent(request, reason))
                }
            };
        }
        let method = request.method().clone();
        // HTTP/1.0 servers, and requests without a host, get their own connection, as tunnels do.
        let named = request.uri().authority().is_some() || request.headers().contains_key(header::HOST);
        let reuse = request.version() == Version::HTTP_11 && named && !self.upgrades;
        match h1::send(endpoint, balanced, request, reuse, self.informational, || self.sent(endpoint)).await {
            Ok((response, checked_out)) => {
                let tunnel = self.upgrades && is_tunnel(&method, response.status());
                if response.status() == StatusCode::SWITCHING_PROTOCOLS && !tunnel {
                    let failure = Failure::BadGateway("the endpoint switches protocols unasked".to_owned());
                    return Err(AttemptError::Failed(failure.into(), Cause::Endpoint));
                }
                let mut response = response.map(Body::Incoming);
                if !tunnel {
                    strip_hop_by_hop(response.headers_mut());
                    response.headers_mut().remove(header::CONNECTION);
                }
                Ok((self.restore(endpoint, response, false), Some(checked_out)))
            }
            Err(h1::SendError::Failed(error)) => {
                // hyper calls the request's body the user's.
                let cause = if error.is_user() { Cause::Client } else { Cause::Endpoint };
                let failure = cause.failure(|| format!("the endpoint failed: {error}"));
                Err(AttemptError::Failed(failure.into(), cause))
            }
            Err(h1::SendError::Unsent(request, reason)) => Err(AttemptError::Unsent(request, reason)),
        }
    }

    /// Turns the response into the application's: removes mesh headers, restores HTTP/1.
    fn restore(&self, endpoint: &Endpoint, mut response: Response<Body>, carried: bool) -> Response<Body> {
        log_response(self.connection.worker.shared.config.log_headers, endpoint.info.addr, &response);
        if carried {
            downgrade_response(&mut response);
        }
        if !has_mesh_headers(response.headers()) {
            return response;
        }
        response.headers_mut().remove(ORIG_PROTO);
        if let Some(reason) = response.headers_mut().remove(PROXY_ERROR) {
            tracing::debug!(?reason, dst.addr = %endpoint.info.addr, "the endpoint's proxy answered in its place");
        }
        let close = response.headers_mut().remove(PROXY_CONNECTION_L5D).is_some_and(|value| value == "close");
        // Only a proxy may say so, and only one that all requests of this connection go to.
        if close && endpoint.identity().is_some() && matches!(self.backend, Resolved::Forward(_)) {
            self.connection.closing.begin();
            if response.version() < Version::HTTP_2 {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
        }
        response
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        if let Some(Current { endpoint, since, .. }) = self.current.get_mut() {
            log_given_up(self.connection.peer, endpoint.info.addr, *since);
        }
    }
}

/// The answer to a request whose endpoint cannot be reached.
fn connect_failure(error: &ConnectError) -> Failure {
    match error {
        ConnectError::Timeout(_) => Failure::ConnectTimeout,
        ConnectError::PlaintextRefused(_) => Failure::PlaintextRefused(error.to_string()),
        ConnectError::Io { .. } | ConnectError::Http1 { .. } | ConnectError::Http2 { .. } => {
            Failure::BadGateway(error.to_string())
        }
        ConnectError::Loopback(_) | ConnectError::NoCredentials(_) | ConnectError::CertificateExpired { .. } => {
            Failure::Unusable { reason: error.to_string(), label: error.label() }
        }
    }
}

/// What a request named before a gateway's name for the Service replaced it.
struct Replaced {
    uri: Uri,
    host: Option<HeaderValue>,
    canonical: Option<HeaderValue>,
}

impl Replaced {
    /// Puts a gateway's name for the Service into the request; the one that is valid in this cluster means nothing
    /// there.
    fn by(request: &mut Request<Body>, authority: &Authority) -> Option<Self> {
        let value = HeaderValue::from_str(authority.as_str()).ok()?;
        let headers = request.headers_mut();
        let canonical = headers.remove(DST_CANONICAL);
        let host = headers.get(header::HOST).cloned();
        let uri = request.uri().clone();
        replace_authority(request, authority, &value);
        Some(Self { uri, host, canonical })
    }

    /// Restores a request that goes to another endpoint, which may be of this cluster.
    fn restore(self, request: &mut Request<Body>) {
        *request.uri_mut() = self.uri;
        let headers = request.headers_mut();
        for (name, value) in [(header::HOST, self.host), (DST_CANONICAL, self.canonical)] {
            match value {
                Some(value) => drop(headers.insert(name, value)),
                None => drop(headers.remove(name)),
            }
        }
    }
}
