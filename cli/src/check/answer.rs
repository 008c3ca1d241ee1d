//! Results of a check other than problems: it has no answer, and why.

use crate::{cluster, problem::Problem};

/// Why a check has no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// A fact is unknown, and somebody has to act first.
    Unanswered(Problem),
    /// Another check reports the missing fact already.
    Skip,
}

/// The value of a fact, or why it could not be read.
pub(super) fn known<'a, T>(what: &str, fetched: &'a Result<T, String>) -> Result<&'a T, Stop> {
    fetched.as_ref().map_err(|error| {
        Stop::Unanswered(Problem::new(what, format!("cannot be read: {error}"), cluster::remedy_for(error)))
    })
}
