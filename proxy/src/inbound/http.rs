//! HTTP from one client: each request is checked against the current policy, forwarded to the application and counted.
//!
//! ```text
//! request -> in flight -> carried HTTP/1 restored -> l5d-client-id -> route -> authorization -> filters -> rate limit -> application
//! ```
//!
//! HTTP/2 goes to the application as HTTP/2, everything else as HTTP/1. Counters of a request are looked up once per
//! connection, route and authorization.

mod connection;
mod counters;
mod subject;

use std::{
    error::Error,
    future::poll_fn,
    num::NonZeroU128,
    pin::pin,
    sync::{Arc, OnceLock},
};

use ::http::{HeaderValue, Method, Request, Response, StatusCode, Version, header::HOST};
use parking_lot::Mutex;
use tokio::time::Instant;

pub(super) use connection::{serve, serve_gateway};

use super::{
    Inbound,
    gateway::Route,
    profiles::{LastNamed, ProfileRoute},
    target::{ApplicationPort, CheckedOut, ClientHttp2, SendError},
};
use crate::{
    access_log::Entry,
    failure_log::log_given_up,
    http::{
        body::{
            Body, End, Observed, Observer,
            counted::{Counted, RequestEnd},
            error::{is_own_reset, response_reset_label},
            response::CountResponse,
        },
        form,
        headers::{
            CLIENT_ID, ORIG_PROTO, log_request, log_response, remove_client_id, strip_for_upgrade, strip_hop_by_hop,
            wants_upgrade,
        },
        informational::Informational,
        orig_proto::{downgrade_request, to_absolute_form, upgrade_response},
        respond::{Failure, RequestKind},
        serve::{Closing, Reset},
        upgrade::{Tunnel, is_tunnel, strip_connect_response},
    },
    in_flight::{ClientShare, Permit},
    metrics::{Direction, InboundRouteMetrics, Outcome, StreamEnd},
    outbound::RelayError,
    policy::{
        PortPolicy,
        authz::Client,
        server::{Matched, ServerPolicy},
    },
    route::{Meta, filter::apply_to_request, readings::DotSegment},
    tap::Tapped,
    trace::Kind,
};

use counters::{Counters, Handles};

/// The body of responses to clients.
pub(super) type ResponseBody = Observed<Finish>;

/// Actions at a response's end.
pub(super) struct Finish {
    count: CountResponse,
    /// What is counted of the ServiceProfile's route.
    profile: Option<CountResponse>,
    route: Arc<InboundRouteMetrics>,
    arrived: Instant,
    /// When the request's body ended.
    sent: RequestEnd,
    /// Whether the application answered.
    is_answered: bool,
    /// Returned to the pool if the response was read to its end.
    checked_out: Option<CheckedOut>,
    /// The permit of the request in flight, unless a tunnel has it.
    _permit: Option<Permit>,
    tapped: Tapped,
    /// The line of the access log.
    access: Option<Box<Entry>>,
}

/// Properties that all requests of one connection share.
pub(super) struct HttpConnection {
    inbound: Arc<Inbound>,
    client: Client,
    /// The client's requests, over all of its connections.
    requests: ClientShare,
    /// The client's identity, as the application sees it.
    client_id: Option<HeaderValue>,
    target: Arc<ApplicationPort>,
    /// Its connections to the application, from its first request of HTTP/2 on.
    http2: OnceLock<Arc<ClientHttp2>>,
    policy: PortPolicy,
    counters: Counters,
    last_named: LastNamed,
    closing: Closing,
    /// What the connection becomes after an upgrade.
    tunnel: Mutex<Option<Tunnel>>,
    /// Where requests go instead of the application, at a gateway.
    gateway: Option<Route>,
}

/// A request that policy admits.
struct Admitted {
    request: Box<Request<Body>>,
    kind: RequestKind,
    counting: Counting,
}

/// What counts a request until its response ends.
struct Counting {
    /// `None` if a tunnel has it.
    permit: Option<Permit>,
    handles: Arc<Handles>,
    /// The route of the ServiceProfile.
    profile: Option<ProfileRoute>,
    arrived: Instant,
    /// When the request's body ended.
    sent: RequestEnd,
    tapped: Tapped,
}

/// A request that the application has not answered. Dropping it logs that the request was given up.
struct Unanswered<'a> {
    connection: &'a HttpConnection,
    since: &'a Instant,
}

impl HttpConnection {
    /// Answers one request. `informational` passes on what comes before the response.
    ///
    /// # Errors
    /// When the application reset the request's stream and the client speaks HTTP/2 too.
    pub(super) async fn handle(
        self: Arc<Self>,
        request: Box<Request<Body>>,
        informational: Informational,
    ) -> Result<Response<ResponseBody>, Reset> {
        let access_log = self.inbound.shared.access_log.as_ref();
        let mut access = access_log.map(|log| log.begin(&request, self.client.addr, self.client.identity()));
        let mut answered = pin!(self.answer(request, &informational));
        let mut response = poll_fn(|cx| match &mut access {
            None => answered.as_mut().poll(cx),
            Some(access) => access.poll(answered.as_mut(), cx),
        })
        .await?;
        if let Some(mut access) = access {
            access.responded(response.status());
            if let Some(finish) = response.body_mut().observer() {
                finish.access = Some(access);
            }
        }
        Ok(response)
    }

    async fn answer(
        &self,
        mut request: Box<Request<Body>>,
        informational: &Informational,
    ) -> Result<Response<ResponseBody>, Reset> {
        let arrived = Instant::now();
        let traced = self.inbound.shared.tracing.begin(&mut *request, Kind::Server, Direction::Inbound);
        let is_carried = request.version() == Version::HTTP_2 && downgrade_request(&mut *request).is_some();
        // For HTTP/1 the header has no meaning; it never reaches the application.
        request.headers_mut().remove(ORIG_PROTO);
        let kind = RequestKind::inbound(request.version(), request.headers(), is_carried, self.client.is_meshed());

        // As in Linkerd, the limit comes before policy: what is denied takes part, too.
        let permit = self.inbound.limit.admit_from(&self.requests).ok_or(Failure::LoadShed);
        let admitted = permit.and_then(|permit| Ok((permit, self.admit(&mut request)?)));
        let mut response = match admitted {
            Err(failure) => self.refuse(&failure, &failure, kind, None),
            Ok((permit, handles)) => {
                handles.http.request();
                handles.route.requests.inc();
                let labels = handles.http.labels();
                let subject = || subject::subject(&self.client, self.target.addr, labels);
                let tapped = self.inbound.shared.taps.begin(&*request, subject);
                let profiles = self.inbound.profiles.as_ref().filter(|_| self.gateway.is_none());
                let mut profile = None;
                if let Some((profiles, named)) =
                    profiles.and_then(|profiles| Some((profiles, profiles.named_by(&self.last_named, &request)?)))
                {
                    named.answered().await;
                    profile = profiles.route(&named, &request);
                }
                if let Some(profile) = &profile {
                    profile.metrics.request();
                }
                let sent = Counted::wrap(request.body_mut(), &handles.route.request_frames);
                let counting = Counting { permit: Some(permit), handles, profile, arrived, sent, tapped };
                let admitted = Admitted { request, kind, counting };
                match &self.gateway {
                    None => self.forward(admitted, informational).await?,
                    // Boxed: a request of any other port would be as large as one that goes through the outbound side.
                    Some(gateway) => Box::pin(self.forward_to(gateway, admitted, informational)).await?,
                }
            }
        };
        traced.responded(response.status());
        response.headers_mut().remove(ORIG_PROTO);
        if is_carried {
            upgrade_response(&mut response);
        }
        Ok(response)
    }

    /// Applies policy to a request before it is sent: checks that may refuse it, and changes to it.
    fn admit(&self, request: &mut Request<Body>) -> Result<Arc<Handles>, Failure> {
        form::normalize(request)?;
        // The client's claim does not count, only its certificate.
        remove_client_id(request.headers_mut());
        if let Some(id) = &self.client_id {
            request.headers_mut().insert(CLIENT_ID, id.clone());
        }

        let policy = self.policy.borrow().clone();
        let no_route = || {
            self.counters.route_not_found(&self.inbound, &policy, &self.client, self.target.addr);
            Failure::NoRoute
        };
        // A port that policy calls opaque has no routes, whatever a peer's transport header says.
        let http = policy.http().ok_or_else(no_route)?;
        let matched = http.find(request).ok_or_else(no_route)?;
        let otherwise = http.find_otherwise(request).map_err(|DotSegment| {
            self.inbound.failures.denials.write(|suppressed| {
                tracing::info!(client.addr = %self.client.addr, orig_dst.addr = %self.target.addr, server = &*policy.meta.name, suppressed,
                    "request refused: its path has a segment of dots, and routes and applications may read that differently");
            });
            Failure::DotSegment
        })?;
        // However the application reads the path, the client must be allowed to send it.
        for route in otherwise {
            let route = route.ok_or_else(no_route)?;
            if route.authorize(&self.client).is_none() {
                return Err(self.deny(&policy, &route.meta));
            }
        }
        let handles = self.authorize(&policy, matched, request)?;
        apply_to_request(matched.filters, matched.prefix, request).map_err(inbound_failure)?;
        self.check_limit(&policy)?;
        Ok(handles)
    }

    /// The label `authority` of the request's metrics, if they have it.
    fn authority<'r, B>(&self, request: &'r Request<B>) -> Option<&'r str> {
        let shared = &self.inbound.shared;
        shared.config.inbound.authority_labels.then_some(())?;
        let host = || request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let authority = request.uri().authority().map(::http::uri::Authority::as_str).or_else(host)?;
        Some(shared.metrics.authorities.value(authority))
    }

    fn authorize(
        &self,
        policy: &Arc<ServerPolicy>,
        matched: Matched<'_>,
        request: &Request<Body>,
    ) -> Result<Arc<Handles>, Failure> {
        let route = &matched.details.meta;
        match matched.details.authorize(&self.client) {
            Some(authz) => {
                // Requests that are denied take no place among the labels' values.
                let handles = self.counters.handles(self, policy, matched, authz, self.authority(request));
                handles.allowed.1.inc();
                if authz.is_audit() {
                    self.inbound.failures.audits.write(|suppressed| {
                        tracing::info!(client.addr = %self.client.addr,
                            client.id = self.client.identity().map(weft_tls::identity::Identity::as_str),
                            orig_dst.addr = %self.target.addr, server = &*policy.meta.name, route = &*route.name,
                            authz = &*authz.name, suppressed, "Request allowed");
                    });
                }
                Ok(handles)
            }
            None => Err(self.deny(policy, route)),
        }
    }

    /// Counts and logs a denied request.
    fn deny(&self, policy: &Arc<ServerPolicy>, route: &Arc<Meta>) -> Failure {
        self.inbound.failures.denials.write(|suppressed| {
            tracing::info!(client.addr = %self.client.addr,
                client.id = self.client.identity().map(weft_tls::identity::Identity::as_str), orig_dst.addr = %self.target.addr,
                server = &*policy.meta.name, route = &*route.name, suppressed, "request denied");
        });
        self.counters.denied(&self.inbound, policy, route, &self.client, self.target.addr);
        Failure::Unauthorized
    }

    fn check_limit(&self, policy: &ServerPolicy) -> Result<(), Failure> {
        let Some(limit) = policy.http().and_then(|http| http.limit.as_ref()) else { return Ok(()) };
        limit.check(self.client.identity(), Instant::now()).map_err(|scope| {
            self.counters.rate_limited(&self.inbound, policy, limit, scope, &self.client, self.target.addr);
            Failure::RateLimited
        })
    }

    /// Sends a request to the application.
    async fn forward(
        &self,
        admitted: Admitted,
        informational: &Informational,
    ) -> Result<Response<ResponseBody>, Reset> {
        let Admitted { mut request, kind, mut counting } = admitted;
        let traced = self.inbound.shared.tracing.begin(&mut *request, Kind::Client, Direction::Inbound);
        log_request(self.inbound.shared.config.log_headers, self.target.addr, &*request);
        let unanswered = Unanswered { connection: self, since: &counting.arrived };
        let answered = if kind.version == Version::HTTP_2 {
            self.send_http2(request, informational).await.map(|response| (response, None))
        } else {
            self.send_http1(request, kind, informational, &mut counting.permit).await
        };
        std::mem::forget(unanswered);
        match answered {
            Ok((response, checked_out)) => {
                let trace_id = traced.trace_id();
                traced.responded(response.status());
                log_response(self.inbound.shared.config.log_headers, self.target.addr, &response);
                Ok(counting.watch(response, kind, Some(Answered { checked_out, trace_id })))
            }
            Err(error) => match error.reset() {
                Some(reason) if kind.version == Version::HTTP_2 => {
                    if !matches!(&error, SendError::Http2(error) if is_own_reset(error)) {
                        self.inbound.failures.failed_request(kind, &error, self.client.addr, &self.target.addr);
                    }
                    Err(counting.reset(Reset(reason.into())))
                }
                _ => {
                    let failure = error.failure();
                    traced.responded(failure.status());
                    Ok(self.refuse(&failure, &error, kind, Some(counting)))
                }
            },
        }
    }

    /// Sends a request to the Service that a gateway's client names.
    async fn forward_to(
        &self,
        gateway: &Route,
        admitted: Admitted,
        informational: &Informational,
    ) -> Result<Response<ResponseBody>, Reset> {
        let Admitted { request, kind, mut counting } = admitted;
        match gateway.send(*request, kind, informational, self.client.addr).await {
            Ok((response, tunnel)) => {
                if let Some(mut tunnel) = tunnel {
                    tunnel.hold(counting.permit.take());
                    *self.tunnel.lock() = Some(tunnel);
                }
                Ok(counting.watch(response, kind, Some(Answered::default())))
            }
            Err(RelayError::Failure(failure)) => Ok(self.refuse(&failure, &failure, kind, Some(counting))),
            Err(RelayError::Reset(reset)) => Err(counting.reset(reset)),
        }
    }

    async fn send_http2(
        &self,
        mut request: Box<Request<Body>>,
        informational: &Informational,
    ) -> Result<Response<Body>, SendError> {
        if request.uri().authority().is_none() {
            let fallback = self.target.addr.to_string().parse().ok();
            to_absolute_form(&mut *request, fallback.as_ref());
        }
        let response =
            self.http2.get_or_init(|| self.target.http2(&self.requests)).send(request, informational).await?;
        Ok(response.map(Body::H2))
    }

    async fn send_http1(
        &self,
        mut request: Box<Request<Body>>,
        kind: RequestKind,
        informational: &Informational,
        permit: &mut Option<Permit>,
    ) -> Result<(Response<Body>, Option<CheckedOut>), SendError> {
        let method = request.method().clone();
        let client_side = (!kind.orig_proto && wants_upgrade(&*request)).then(|| hyper::upgrade::on(&mut *request));
        if client_side.is_some() {
            strip_for_upgrade(&mut *request);
        } else {
            strip_hop_by_hop(request.headers_mut());
        }
        // HTTP/1.0 servers may not keep connections as expected, and neither may servers of requests without a host.
        let has_host = request.headers().contains_key(HOST) || request.uri().authority().is_some();
        let reuse = client_side.is_none() && has_host && request.version() == Version::HTTP_11;
        let (mut response, checked_out) = self.target.send_http1(request, reuse, &self.requests, informational).await?;

        match client_side {
            Some(client_side) if is_tunnel(&method, response.status()) => {
                if method == Method::CONNECT {
                    strip_connect_response(&mut response);
                }
                let server_side = hyper::upgrade::on(&mut response);
                *self.tunnel.lock() = Some(Tunnel::new(client_side, server_side, permit.take()));
                Ok((response.map(|_| Body::Empty), None))
            }
            _ if response.status() == StatusCode::SWITCHING_PROTOCOLS => Err(SendError::SwitchesProtocols),
            _ => {
                strip_hop_by_hop(response.headers_mut());
                Ok((response.map(Body::Incoming), checked_out))
            }
        }
    }

    /// Answers instead of the application, because of `reason`; counted as a response if the request was counted.
    fn refuse(
        &self,
        failure: &Failure,
        reason: &(dyn Error + 'static),
        kind: RequestKind,
        counting: Option<Counting>,
    ) -> Response<ResponseBody> {
        self.counters.failed(&self.inbound, failure, self.target.addr);
        self.inbound.failures.request(kind, failure, reason, self.client.addr, &self.target.addr);
        if failure.closes() {
            self.closing.begin();
        }
        let response = failure.respond(kind).map(|()| Body::Empty);
        match counting {
            // The rest of the request is not waited for.
            Some(counting) => Counting { sent: RequestEnd::default(), ..counting }.watch(response, kind, None),
            None => response.map(Observed::unwatched),
        }
    }
}

/// What is known of a response that the application, or a gateway's Service, sends.
#[derive(Default)]
struct Answered {
    checked_out: Option<CheckedOut>,
    /// The request's trace, if it is collected.
    trace_id: Option<NonZeroU128>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        log_given_up(self.connection.client.addr, self.connection.target.addr, *self.since);
    }
}

impl Counting {
    /// Counts a response to its end; without `answered` it is the proxy's own.
    fn watch(
        mut self,
        response: Response<Body>,
        kind: RequestKind,
        answered: Option<Answered>,
    ) -> Response<ResponseBody> {
        self.tapped.responded(&response);
        let Self { permit, handles, profile, arrived, sent, tapped } = self;
        let is_answered = answered.is_some();
        let Answered { checked_out, trace_id } = answered.unwrap_or_default();
        let (parts, body) = response.into_parts();
        let (profile, classes) = profile.map(|route| (route.metrics, route.classes)).unzip();
        let classes = classes.unwrap_or_default();
        let count = CountResponse::new(Arc::clone(&handles.http), arrived, parts.status, &parts.headers, classes);
        let count = count.traced(trace_id);
        let finish = Finish {
            profile: profile.map(|metrics| count.under(metrics, arrived)),
            count,
            route: Arc::clone(&handles.route),
            arrived,
            sent,
            is_answered,
            checked_out,
            _permit: permit,
            tapped,
            access: None,
        };
        Response::from_parts(parts, Observed::new(body, Box::new(finish), kind))
    }

    /// Counts a request whose stream is reset instead of answered.
    fn reset(self, reset: Reset) -> Reset {
        let outcome = || Outcome::failure(None, Some(response_reset_label(&reset.0)));
        self.tapped.reset(reset.0.reason().unwrap_or(::h2::Reason::INTERNAL_ERROR));
        self.handles.http.failure(outcome(), self.arrived.elapsed());
        if let Some(profile) = &self.profile {
            profile.metrics.failure(outcome(), self.arrived.elapsed());
        }
        self.handles.route.ended(StreamEnd::default(), self.arrived.elapsed(), self.sent.elapsed(self.arrived));
        reset
    }
}

/// Linkerd's inbound side answers every injected failure alike, regardless of the policy's status or code.
fn inbound_failure(failure: Failure) -> Failure {
    match failure {
        Failure::Injected { .. } => Failure::Internal("unexpected error"),
        other => other,
    }
}

impl Observer for Finish {
    fn first_frame(&mut self, is_error: bool) {
        for count in self.profile.iter_mut().chain([&mut self.count]) {
            count.first_frame(is_error);
        }
    }

    fn data(&mut self, bytes: usize) {
        self.tapped.data(bytes);
        if let Some(access) = &mut self.access {
            access.data(bytes);
        }
        self.route.response_frames.count(bytes as u64);
    }

    fn ended(self, end: End<'_>) {
        self.tapped.ended(end);
        if let (End::Whole(_), Some(checked_out)) = (end, self.checked_out) {
            checked_out.give_back();
        }
        if let Some(profile) = self.profile {
            profile.count(end);
        }
        let (answer, _) = self.count.count(end);
        let end = match self.is_answered {
            true => StreamEnd { status: Some(answer.status.as_u16()), grpc: answer.grpc.map(u16::from), error: None },
            false => StreamEnd::default(),
        };
        self.route.ended(end, self.arrived.elapsed(), self.sent.elapsed(self.arrived));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of what an asynchronous method returns.
    fn size<R>(_: fn(Arc<HttpConnection>, Box<Request<Body>>, Informational) -> R) -> usize {
        size_of::<R>()
    }

    #[test]
    fn a_request_takes_little_room_while_it_waits() {
        let bytes = size(HttpConnection::handle);
        assert!(bytes <= 1536, "{bytes} bytes: each request copies them");
    }
}
