//! Regular expressions in policies and profiles: whether the proxy can compile one.

use regex::{Error, RegexBuilder};

/// The most memory that a compiled expression may take, in bytes: a tenth of the library's own limit. Who may write a
/// route makes the control plane and every proxy compile it.
const MAX_COMPILED: usize = 1024 * 1024;

/// Checks an expression with the library that the proxy uses.
///
/// # Errors
/// Says in one line what is wrong.
pub(crate) fn check(text: &str) -> Result<(), String> {
    RegexBuilder::new(text).size_limit(MAX_COMPILED).build().map(drop).map_err(|error| summary(&error))
}

/// The error in one line: the library's has several, which point at the place.
fn summary(error: &Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    format!("bad regular expression: {}", last.strip_prefix("error: ").unwrap_or(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_that_is_expensive_to_compile_is_refused() {
        assert_eq!(check("/api/v[0-9]+/.*"), Ok(()));
        assert!(check("(").unwrap_err().starts_with("bad regular expression: "));
        for hostile in [r"\w{1000}", "(a{100}){100}{100}"] {
            let problem = check(hostile).unwrap_err();
            assert!(problem.contains("size limit"), "{problem}");
        }
    }
}
