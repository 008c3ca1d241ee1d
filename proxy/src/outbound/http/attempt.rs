//! A request that has a route: it is sent, under its deadlines, as often as its terms allow.

use std::{borrow::Cow, time::Duration};

use http::{HeaderValue, Request, Response, Version};
use rand::RngExt as _;
use tokio::time::Instant;
use weft_tls::identity::Identity;

use super::{
    exchange::{BackendError, Cause, Exchange, ExchangeError},
    response::{BackendStream, ResponseObserver},
};
use crate::{
    discover::route::Action,
    http::{
        body::{
            Body,
            counted::RequestEnd,
            error::UNCLASSIFIED,
            replay::{Replay, ReplayRoom},
            timed::Clock,
        },
        headers::{DST_CANONICAL, is_grpc},
        informational::Informational,
        respond::Failure,
    },
    metrics::{BalancerKind, Direction, ProfileMetrics, RequestMetrics},
    outbound::{Connection, balance::Search, rules::RuleMetrics, target::RoutingPlan},
    request::{
        attempts::{Attempts, Delivered, Next, Outcome},
        classify::Answer,
        deadlines::Deadlines,
        overrides,
        terms::{MAX_REPLAY_BYTES, Terms, Timeouts},
    },
    route::filter::{apply_to_request, apply_to_response},
    trace::Kind,
};

/// A response, and what has to happen when it ends.
type Exchanged = Result<(Response<Body>, Box<ResponseObserver>), ExchangeError>;

/// A request's route and what was found out about the request before it was sent.
pub(super) struct Routed<'a> {
    pub(super) connection: &'a Connection,
    pub(super) plan: &'a RoutingPlan,
    pub(super) action: &'a Action,
    /// How many bytes of the path the rule's prefix matched, if it matched by prefix.
    pub(super) prefix: Option<usize>,
    /// The identity that the application requires of its server.
    pub(super) required: Option<Identity>,
    /// Whether the request asks for a tunnel.
    pub(super) upgrades: bool,
    /// Passes on what comes before the response.
    pub(super) informational: &'a Informational,
    pub(super) arrived: Instant,
    /// What is counted of the rule, and of its requests.
    pub(super) rule: &'a RuleMetrics,
    pub(super) metrics: &'a RequestMetrics,
    /// When the request's body ended.
    pub(super) sent: RequestEnd,
}

impl Routed<'_> {
    /// Sends the request until its outcome is one that the application gets, and counts it under a ServiceProfile's
    /// route.
    pub(super) async fn send(&self, request: Box<Request<Body>>) -> Exchanged {
        let Some(profile) = &self.rule.profile else { return self.repeat(request, None).await };
        profile.route.request();
        let mut exchanged = self.repeat(request, Some(profile)).await;
        match &mut exchanged {
            Ok((_, observer)) => observer.count_under(&profile.route, self.arrived),
            Err(error) => profile.route.failure(error.outcome(Some(UNCLASSIFIED)), self.arrived.elapsed()),
        }
        exchanged
    }

    async fn repeat(&self, mut request: Box<Request<Body>>, profile: Option<&ProfileMetrics>) -> Exchanged {
        let terms = match &self.action.terms {
            terms if terms.allow_headers => Cow::Owned(overrides::apply(terms.clone(), request.headers_mut())),
            terms => Cow::Borrowed(terms),
        };
        let body = request.body_mut().take();
        let limit = terms.retry.as_ref().map_or(MAX_REPLAY_BYTES, |retry| retry.max_bytes);
        let body = match replayable(body, limit, &self.connection.worker.replay_room) {
            Ok(body) => body,
            // Too large to be kept: one attempt.
            Err(body) => {
                *request.body_mut() = body;
                return self.attempt(request, &terms, None, profile).await;
            }
        };
        match &terms.retry {
            // Boxed: requests that are sent once need no room for what repeats them.
            Some(retry) => {
                let attempts = Attempts::new(retry.clone());
                Box::pin(self.retry(request, body, attempts, &terms, profile)).await
            }
            None => {
                *request.body_mut() = reading(body.as_ref())?;
                self.attempt(request, &terms, None, profile).await
            }
        }
    }

    async fn retry(
        &self,
        request: Box<Request<Body>>,
        body: Option<Replay>,
        mut attempts: Attempts,
        terms: &Terms,
        profile: Option<&ProfileMetrics>,
    ) -> Exchanged {
        let (head, _) = request.into_parts();
        let mut next = reading(body.as_ref())?;
        loop {
            let request = Box::new(Request::from_parts(head.clone(), next));
            let exchanged = self.attempt(request, terms, attempts.timeout(), profile).await;
            let (exchanged, outcome) = peek(exchanged, &attempts).await;
            let is_replayable = body.as_ref().is_none_or(Replay::is_replayable);
            let chance = rand::rng().random();
            match attempts.judge(outcome, is_replayable, chance) {
                Next::Deliver(why) => {
                    self.count_delivered(why, &attempts, exchanged.is_ok(), profile);
                    return exchanged;
                }
                Next::Again(pause) => {
                    // Before the pause: this attempt must not read on meanwhile, until more has come than is kept.
                    let Ok(again) = reading(body.as_ref()) else { return exchanged };
                    next = again;
                    if let (Ok((_, observer)), Outcome::Answered(answer)) = (exchanged, outcome) {
                        observer.discard(answer);
                    }
                    match profile {
                        Some(profile) => profile.retried.1.inc(),
                        None => self.metrics.retries().requests.inc(),
                    };
                    self.pause(pause, terms.timeouts).await?;
                }
            }
        }
    }

    /// Waits for the next attempt, as long as there is time for it.
    async fn pause(&self, pause: Duration, timeouts: Timeouts) -> Result<(), Failure> {
        let until = Instant::now() + pause;
        match timeouts.answer_by(self.arrived) {
            Some((deadline, expired)) if deadline < until => {
                tokio::time::sleep_until(deadline).await;
                Err(Failure::Timeout(expired))
            }
            _ => {
                tokio::time::sleep_until(until).await;
                Ok(())
            }
        }
    }

    /// Sends the request to one of the route's backends, and to another one if no endpoint of it can be reached.
    async fn attempt(
        &self,
        mut request: Box<Request<Body>>,
        terms: &Terms,
        head: Option<Duration>,
        profile: Option<&ProfileMetrics>,
    ) -> Exchanged {
        let action = self.action;
        apply_to_request(&action.filters, self.prefix, &mut *request)?;
        let mut search = Search::begin(self.connection.worker.shared.config.outbound.http_queue.failfast_timeout);
        let deadline = search.deadline();
        let deadline = terms.timeouts.answer_by(self.arrived).map_or(deadline, |(by, _)| by.min(deadline));
        self.plan.settled(&action.backends, BalancerKind::Http, deadline).await;
        // Another backend gets them as they were before this one's filters and span.
        let is_changed = action.backends.has_filters() || self.connection.worker.shared.tracing.is_on();
        let headers = (is_changed && action.backends.is_choice()).then(|| Box::new(request.headers().clone()));
        let mut picked = self.plan.pick(&action.backends, BalancerKind::Http, None);
        loop {
            let (backend, resolved) = picked.ok_or(Failure::Internal("the route has no backend"))?;
            apply_to_request(&backend.filters, self.prefix, &mut *request)?;
            if let Some(profile) = &action.profile
                && let Ok(canonical) = HeaderValue::from_str(&profile.dst)
            {
                request.headers_mut().insert(DST_CANONICAL, canonical);
            }
            let counted = BackendStream {
                metrics: self.rule.backend(&backend.backend),
                begun: Instant::now(),
                sent: self.sent.clone(),
            };
            counted.metrics.requests.inc();
            let tracing = &self.connection.worker.shared.tracing;
            let traced = tracing.begin(&mut *request, Kind::Client, Direction::Outbound);
            let exchange = Exchange {
                connection: self.connection,
                plan: self.plan,
                backend: &resolved,
                required: self.required.as_ref(),
                upgrades: self.upgrades,
                informational: self.informational,
                search,
                classes: &terms.classes,
                action,
                trace_id: traced.trace_id(),
                current: parking_lot::Mutex::default(),
                counted: parking_lot::Mutex::default(),
            };
            if let Some(profile) = profile {
                profile.actual.request();
            }
            let (mut response, mut observer) = match self.exchange(&exchange, request, terms.timeouts, head).await {
                Ok(answered) => answered,
                Err(BackendError { error, unsent }) => {
                    traced.responded(error.status());
                    counted.ended(error.stream_end());
                    if let Some(profile) = profile {
                        profile.actual.failure(error.outcome(Some(UNCLASSIFIED)), counted.begun.elapsed());
                    }
                    let Some(unsent) = unsent else { return Err(error) };
                    (request, search) = unsent;
                    if let Some(headers) = &headers {
                        request.headers_mut().clone_from(headers);
                    }
                    picked = self.plan.pick(&action.backends, BalancerKind::Http, Some(&resolved));
                    continue;
                }
            };
            traced.responded(response.status());
            if let Some(profile) = profile {
                observer.count_under(&profile.actual, counted.begun);
            }
            observer.count_backend(counted);
            apply_to_response(&backend.filters, response.headers_mut())?;
            apply_to_response(&action.filters, response.headers_mut())?;
            return Ok((response, observer));
        }
    }

    /// The exchange with an endpoint, under deadlines if there are any.
    async fn exchange(
        &self,
        exchange: &Exchange<'_>,
        mut request: Box<Request<Body>>,
        timeouts: Timeouts,
        head: Option<Duration>,
    ) -> Result<(Response<Body>, Box<ResponseObserver>), BackendError> {
        if timeouts == Timeouts::default() && head.is_none() {
            return exchange.run(request).await;
        }
        let clock = Clock::new(Deadlines::new(timeouts, head, self.arrived, Instant::now()));
        // A client of gRPC may wait for the answer before it sends more.
        let is_answered_after_end = !is_grpc(request.version(), request.headers());
        let body = request.body_mut().take();
        *request.body_mut() = clock.watch_request(body);
        // Boxed, because it would be kept twice in the future.
        match clock.until_head(Box::pin(exchange.run(request))).await {
            Ok(exchanged) => {
                let (response, observer) = exchanged?;
                Ok((response.map(|body| clock.watch_response(body)), observer))
            }
            Err(expired) => {
                let is_clients = is_answered_after_end && clock.awaits_client();
                exchange.expired(if is_clients { Cause::Client } else { Cause::Endpoint });
                Err(Failure::Timeout(expired).into())
            }
        }
    }

    fn count_delivered(
        &self,
        why: Delivered,
        attempts: &Attempts,
        is_answered: bool,
        profile: Option<&ProfileMetrics>,
    ) {
        match (why, profile) {
            (Delivered::Overflow, Some(profile)) => profile.skipped.1.inc(),
            (_, Some(_)) => 0,
            (Delivered::LimitExceeded, None) => self.metrics.retries().limit_exceeded.inc(),
            (Delivered::Overflow, None) => self.metrics.retries().overflow.inc(),
            (Delivered::Final, None) if attempts.repeated() > 0 && is_answered => {
                self.metrics.retries().successes.inc()
            }
            (Delivered::Final | Delivered::NotReplayable, None) => 0,
        };
    }
}

/// The body in a form that can be sent again, `None` for an empty one.
fn replayable(body: Body, limit: usize, room: &ReplayRoom) -> Result<Option<Replay>, Body> {
    if http_body::Body::is_end_stream(&body) {
        return Ok(None);
    }
    Replay::new(body, limit, room).map(Some)
}

/// The body from its beginning. The first reading is always there; a later one ends the earlier.
fn reading(body: Option<&Replay>) -> Result<Body, Failure> {
    match body {
        None => Ok(Body::Empty),
        Some(body) => body.body().map(Body::Replay).ok_or(Failure::Internal("the request's body is gone")),
    }
}

/// How an attempt ended, as far as a decision about the next one needs it.
async fn peek(exchanged: Exchanged, attempts: &Attempts) -> (Exchanged, Outcome) {
    let (response, observer) = match exchanged {
        Ok(answered) => answered,
        Err(error) => {
            let outcome = if error.may_be_repeated() { Outcome::Retryable } else { Outcome::Failed };
            return (Err(error), outcome);
        }
    };
    let mut answer = Answer::of_head(response.status(), response.headers());
    let is_grpc = is_grpc(response.version(), response.headers());
    let reads_trailers = attempts.retry().when.reads_trailers(response.status(), is_grpc);
    if response.version() != Version::HTTP_2 || answer.grpc.is_some() || !reads_trailers {
        return (Ok((response, observer)), Outcome::Answered(answer));
    }
    let (parts, body) = response.into_parts();
    let (body, trailers) = body.peek_trailers().await;
    answer = answer.with_trailers(trailers.as_ref());
    (Ok((Response::from_parts(parts, body), observer)), Outcome::Answered(answer))
}
