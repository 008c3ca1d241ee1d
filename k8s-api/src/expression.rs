//! Regular expressions in policies and profiles: whether the proxy can compile one.

use regex::{Error, Regex};

/// Checks an expression with the library that the proxy uses.
///
/// # Errors
/// Says in one line what is wrong.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Regex::new(text).map(drop).map_err(|error| summary(&error))
}

/// The error in one line: the library's has several, which point at the place.
fn summary(error: &Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    format!("bad regular expression: {}", last.strip_prefix("error: ").unwrap_or(last))
}
