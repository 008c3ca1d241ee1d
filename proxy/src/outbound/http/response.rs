//! Actions while a response progresses and ends: load, failure accrual, metrics, the connection's return to its pool.

use std::sync::Arc;

use crate::{
    http::{
        body::{CountResponse, End, Observer},
        in_flight::Permit,
    },
    metrics::HttpMetrics,
    outbound::{
        balance::{InFlight, breaker::Report},
        h1::CheckedOut,
    },
    request::classify::Answer,
    tap::Tapped,
};

/// Accompanies a response's body.
pub(super) struct ResponseObserver {
    count: CountResponse,
    /// The route's, if it is a ServiceProfile's: of this attempt, and of the request.
    routes: Vec<Arc<HttpMetrics>>,
    in_flight: Option<InFlight>,
    checked_out: Option<CheckedOut>,
    permit: Option<Permit>,
    tapped: Tapped,
}

impl ResponseObserver {
    pub(super) fn new(
        count: CountResponse,
        in_flight: Option<InFlight>,
        checked_out: Option<CheckedOut>,
        tapped: Tapped,
    ) -> Self {
        Self { count, routes: Vec::new(), in_flight, checked_out, permit: None, tapped }
    }

    /// Counts the response under a route too.
    pub(super) fn count_under(&mut self, route: &Arc<HttpMetrics>) {
        self.routes.push(Arc::clone(route));
    }

    /// Keeps the request's permit until the response ends.
    pub(super) fn hold(&mut self, permit: Permit) {
        self.permit = Some(permit);
    }

    /// The response is not delivered, because the request is sent again.
    pub(super) fn discard(mut self, answer: Answer) {
        self.count.answer = answer;
        self.first_frame();
        self.ended(End::Dropped);
    }
}

impl Observer for ResponseObserver {
    fn first_frame(&mut self) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.finish();
        }
    }

    fn data(&mut self, bytes: usize) {
        self.tapped.data(bytes);
    }

    fn ended(self, end: End<'_>) {
        self.tapped.ended(end);
        if let (End::Whole(_), Some(checked_out)) = (end, self.checked_out) {
            checked_out.give_back();
        }
        for metrics in self.routes {
            CountResponse { metrics, ..self.count.clone() }.count(end);
        }
        let (answer, is_failure) = self.count.count(end);
        if let Some(in_flight) = self.in_flight {
            in_flight.report(match end {
                End::Failed => Report::Failed,
                End::Whole(_) | End::Dropped => Report::Answered { answer, is_failure },
            });
        }
    }
}
