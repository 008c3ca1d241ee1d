//! What a check may answer beside problems: that there is no answer, and why.

use crate::problem::Problem;

/// Why a check has no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Somebody has to do something first.
    Unanswered(Problem),
    /// Another check says already what is missing.
    Skip,
}

/// What there is, or why it could not be read.
pub(super) fn known<'a, T>(what: &str, fetched: &'a Result<T, String>) -> Result<&'a T, Stop> {
    fetched.as_ref().map_err(|error| {
        let cure = "let this user get and list them, or use one who may (--context, --as)";
        Stop::Unanswered(Problem::new(what, format!("cannot be read: {error}"), cure))
    })
}
