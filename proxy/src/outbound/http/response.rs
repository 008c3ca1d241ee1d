//! Actions while a response progresses and ends: load, failure accrual, metrics, the connection's return to its pool.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{
    http::body::{End, Observer, counted::RequestEnd, response::CountResponse},
    in_flight::Permit,
    metrics::{BackendMetrics, HttpMetrics, RequestMetrics, StreamEnd},
    outbound::{
        balance::{InFlight, breaker::Report},
        h1::CheckedOut,
    },
    request::classify::Answer,
    tap::Tapped,
};

/// Accompanies a response's body.
pub(in crate::outbound) struct ResponseObserver {
    count: CountResponse,
    /// The route's, if it is a ServiceProfile's: of this attempt, and of the request.
    routes: Vec<CountResponse>,
    backend: Option<BackendStream>,
    /// The request's metrics, and when it arrived.
    request: Option<(Arc<RequestMetrics>, Instant)>,
    /// Whether the request is sent again instead of delivering this response.
    is_discarded: bool,
    in_flight: Option<InFlight>,
    checked_out: Option<CheckedOut>,
    permit: Option<Permit>,
    tapped: Tapped,
}

/// A request with a backend, as metrics see it.
pub(super) struct BackendStream {
    pub(super) metrics: Arc<BackendMetrics>,
    /// When it was sent.
    pub(super) begun: Instant,
    /// When its body ended.
    pub(super) sent: RequestEnd,
}

impl BackendStream {
    /// Counts the end of its response.
    pub(super) fn ended(&self, end: StreamEnd) {
        self.metrics.ended(end, self.sent.elapsed(self.begun));
    }
}

impl ResponseObserver {
    pub(super) fn new(
        count: CountResponse,
        in_flight: Option<InFlight>,
        checked_out: Option<CheckedOut>,
        tapped: Tapped,
    ) -> Box<Self> {
        // Boxed: every function on the response's way back would move it.
        Box::new(Self {
            count,
            routes: Vec::new(),
            backend: None,
            request: None,
            is_discarded: false,
            in_flight,
            checked_out,
            permit: None,
            tapped,
        })
    }

    /// Counts the response under a route too, for which the request began then.
    pub(super) fn count_under(&mut self, route: &Arc<HttpMetrics>, since: Instant) {
        self.routes.push(self.count.under(Arc::clone(route), since));
    }

    /// Counts the response as a backend's.
    pub(super) fn count_backend(&mut self, backend: BackendStream) {
        self.backend = Some(backend);
    }

    /// Counts the response as the answer to a request that arrived then.
    pub(super) fn count_request(&mut self, request: &Arc<RequestMetrics>, arrived: Instant) {
        self.request = Some((Arc::clone(request), arrived));
    }

    /// Keeps the request's permit until the response ends.
    pub(super) fn hold(&mut self, permit: Permit) {
        self.permit = Some(permit);
    }

    /// The response is not delivered, because the request is sent again.
    pub(super) fn discard(mut self, answer: Answer) {
        self.count.answer = answer;
        for route in &mut self.routes {
            route.answer = answer;
        }
        self.is_discarded = true;
        self.first_frame(false);
        self.ended(End::Dropped);
    }
}

impl Observer for ResponseObserver {
    fn first_frame(&mut self, is_error: bool) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.finish();
        }
        for count in self.routes.iter_mut().chain([&mut self.count]) {
            count.first_frame(is_error);
        }
    }

    fn data(&mut self, bytes: usize) {
        self.tapped.data(bytes);
        if let Some(backend) = &self.backend {
            backend.metrics.frames.count(bytes as u64);
        }
    }

    fn ended(self, end: End<'_>) {
        // The connection to the server cannot go on without the request, so that the response fails too.
        let is_broken_off = self.backend.as_ref().is_some_and(|backend| backend.sent.is_broken_off());
        let end = if matches!(end, End::Failed(_)) && is_broken_off { End::Dropped } else { end };
        self.tapped.ended(end);
        if let (End::Whole(_), Some(checked_out)) = (end, self.checked_out) {
            checked_out.give_back();
        }
        for count in self.routes {
            count.count(end);
        }
        let (answer, is_failure) = self.count.count(end);
        let error = match end {
            End::Whole(_) => None,
            End::Failed(error) => Some(error.status_label()),
            End::Dropped if self.is_discarded => None,
            End::Dropped => Some("UNKNOWN"),
        };
        let stream_end = StreamEnd { status: Some(answer.status.as_u16()), grpc: answer.grpc.map(u16::from), error };
        if let Some(backend) = self.backend {
            backend.ended(stream_end);
        }
        if let Some((request, arrived)) = self.request {
            request.ended(stream_end, arrived.elapsed());
        }
        let Some(in_flight) = self.in_flight else { return };
        match end {
            End::Failed(error) if error.is_unread() => {}
            End::Failed(_) => in_flight.report(Report::Failed),
            End::Whole(_) | End::Dropped => in_flight.report(Report::Answered { answer, is_failure }),
        }
    }
}
