//! Actions while a response progresses and ends: load, metrics, the connection's return to its pool.

use http::HeaderMap;

use crate::{
    http::{
        body::{CountResponse, Interrupted, Observer},
        in_flight::Permit,
    },
    outbound::{balance::InFlight, h1::CheckedOut},
};

/// Accompanies a response's body.
pub(super) struct ResponseObserver {
    count: CountResponse,
    in_flight: Option<InFlight>,
    checked_out: Option<CheckedOut>,
    permit: Option<Permit>,
}

impl ResponseObserver {
    pub(super) fn new(count: CountResponse, in_flight: Option<InFlight>, checked_out: Option<CheckedOut>) -> Self {
        Self { count, in_flight, checked_out, permit: None }
    }

    /// Keeps the request's permit until the response ends.
    pub(super) fn hold(&mut self, permit: Permit) {
        self.permit = Some(permit);
    }
}

impl Observer for ResponseObserver {
    fn first_frame(&mut self) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.finish();
        }
    }

    fn ended(self, end: Result<Option<&HeaderMap>, Interrupted>) {
        if let (Ok(_), Some(checked_out)) = (end, self.checked_out) {
            checked_out.give_back();
        }
        self.count.ended(end);
    }
}
