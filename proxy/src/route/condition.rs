//! Conditions on requests as ServiceProfiles combine them.

use http::{Method, Request};
use regex::Regex;

/// A condition on a request.
#[derive(Clone, Debug)]
pub(crate) enum RequestCondition {
    /// Every one holds; with an empty list, for every request.
    All(Vec<RequestCondition>),
    /// One holds.
    Any(Vec<RequestCondition>),
    /// It does not hold.
    Not(Box<RequestCondition>),
    /// The whole path matches.
    Path(Regex),
    /// The method is this one.
    Method(Method),
}

impl RequestCondition {
    /// Whether it holds for a request.
    pub(crate) fn holds<B>(&self, request: &Request<B>) -> bool {
        match self {
            Self::All(all) => all.iter().all(|one| one.holds(request)),
            Self::Any(any) => any.iter().any(|one| one.holds(request)),
            Self::Not(one) => !one.holds(request),
            Self::Path(regex) => regex.is_match(request.uri().path()),
            Self::Method(method) => request.method() == method,
        }
    }
}
