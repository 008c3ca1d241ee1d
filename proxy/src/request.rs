//! What happens to one request, decided without I/O and without a clock of its own: callers pass the time.
//!
//! ```text
//! rule of the route + the request's l5d-* headers -> Terms                     terms
//! how an attempt ended                            -> Attempts -> deliver, or again after a pause    attempts
//! request sent, frame seen, head received         -> Deadlines -> what expires next, and when       deadlines
//! status and grpc-status                          -> success or failure                             classify
//! ```
//!
//! `outbound::http` drives these for requests of the application: it sends, waits and reports what happened. Bodies
//! that can be sent again are `http::replay`, bodies under deadlines `http::timed`. Refuses sockets, tasks and timers.

pub(crate) mod attempts;
pub(crate) mod backoff;
pub(crate) mod classify;
pub(crate) mod deadlines;
pub(crate) mod overrides;
pub(crate) mod terms;

#[cfg(test)]
mod tests;
