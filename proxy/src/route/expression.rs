//! Regular expressions of routes. Each has to match a whole value, as the Gateway API says. Those of one message take a
//! bounded amount of memory together, as a user who may write a route makes every proxy compile it.

use std::collections::HashMap;

use regex::{Error, Regex, RegexBuilder};

/// The longest expression, in bytes: as long as any that the Gateway API allows, whatever the characters.
const MAX_BYTES: usize = 16 * 1024;
/// The most memory that the compiled expressions of one message may take together, in bytes.
const MAX_COMPILED: usize = 32 * 1024 * 1024;
/// The most memory of one expression: the library's own limit, which Linkerd's proxy has.
const LARGEST: usize = 10 * 1024 * 1024;
/// What the smallest expression is counted as.
const SMALLEST: usize = 4 * 1024;

/// Compiles the expressions of one message.
#[derive(Debug)]
pub(crate) struct Expressions {
    /// How much more memory they may take.
    left: usize,
    /// Those that were compiled: routes are sent once for HTTP/1 and once for HTTP/2.
    known: HashMap<String, Regex>,
}

/// Why an expression is unusable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExpressionError {
    /// It is malformed, or too large by itself.
    #[error("compile a regular expression")]
    Compile(#[from] Error),
    /// It is too long.
    #[error("a regular expression has {0} bytes, expected at most {MAX_BYTES}")]
    TooLong(usize),
    /// With it, those of the message would take too much memory.
    #[error("the regular expressions of a policy take more than {MAX_COMPILED} bytes together")]
    TooMany,
}

impl Expressions {
    /// The expressions of another message.
    pub(crate) fn new() -> Self {
        Self { left: MAX_COMPILED, known: HashMap::new() }
    }

    /// Compiles an expression that has to match a whole value.
    ///
    /// # Errors
    /// When it does not compile, also when it does only together with the anchors (`a)|(b`); when there is no room for
    /// it.
    pub(crate) fn whole(&mut self, text: &str) -> Result<Regex, ExpressionError> {
        if let Some(known) = self.known.get(text) {
            return Ok(known.clone());
        }
        if text.len() > MAX_BYTES {
            return Err(ExpressionError::TooLong(text.len()));
        }
        // The syntax is checked before the size.
        if let Err(error @ Error::Syntax(_)) = RegexBuilder::new(text).size_limit(0).build() {
            return Err(error.into());
        }
        let anchored = format!("^(?:{text})$");
        let mut size = SMALLEST;
        // The library does not say how large an expression is, but whether it fits.
        let regex = loop {
            if size > self.left {
                return Err(ExpressionError::TooMany);
            }
            match RegexBuilder::new(&anchored).size_limit(size).build() {
                Err(Error::CompiledTooBig(_)) if size < LARGEST => size = (2 * size).min(LARGEST),
                built => break built?,
            }
        };
        self.left -= size;
        self.known.insert(text.to_owned(), regex.clone());
        Ok(regex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_matches_whole_values_and_cannot_leave_its_anchors() {
        let mut expressions = Expressions::new();
        assert!(expressions.whole("a|ab").unwrap().is_match("ab"));
        assert!(!expressions.whole("a|b").unwrap().is_match("ab"));
        for broken in ["a)|(b", "(", r"\p{Nothing}"] {
            assert!(matches!(expressions.whole(broken), Err(ExpressionError::Compile(Error::Syntax(_)))), "{broken}");
        }
    }

    #[test]
    fn an_expression_that_is_too_long_or_too_large_is_refused() {
        let too_long = Expressions::new().whole(&"a".repeat(MAX_BYTES + 1));
        assert!(matches!(too_long, Err(ExpressionError::TooLong(_))), "{too_long:?}");
        assert!(Expressions::new().whole(&"a".repeat(MAX_BYTES)).is_ok());
        let too_large = Expressions::new().whole("(a{1000}){1000}");
        assert!(matches!(too_large, Err(ExpressionError::Compile(Error::CompiledTooBig(_)))), "{too_large:?}");
    }

    #[test]
    fn the_expressions_of_a_message_take_bounded_memory_together() {
        let number_that_fits = |expression: fn(usize) -> String| {
            let mut expressions = Expressions { left: 64 * SMALLEST, ..Expressions::new() };
            let fitting = (0..100).take_while(|number| expressions.whole(&expression(*number)).is_ok()).count();
            assert!(matches!(expressions.whole(&expression(100)), Err(ExpressionError::TooMany)));
            assert!(expressions.whole(&expression(0)).is_ok(), "one that is known takes no more");
            fitting
        };
        assert_eq!(number_that_fits(|number| format!("/{number}")), 64);
        let large = number_that_fits(|number| format!(r"/{number}\w+"));
        assert!((1..=8).contains(&large), "{large}");
    }
}
