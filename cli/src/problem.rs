//! A problem: object, description and remedy.

use std::fmt;

use serde::Serialize;

/// A problem in one line, for the person who can solve it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    /// E.g. `Pod shop/web-0`, or `Secret linkerd/linkerd-identity-issuer, data["crt.pem"]`.
    pub(crate) object: String,
    pub(crate) problem: String,
    pub(crate) remedy: String,
}

impl Problem {
    pub(crate) fn new(object: impl Into<String>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { object: object.into(), problem: problem.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.object, self.problem)
    }
}
