//! Errors as text for people and logs.

use std::error::Error;

/// An error and its causes on one line. A cause that the text names already is left out.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once() {
        let cause = anyhow::anyhow!("connection refused");
        assert_eq!(
            chain(&*cause.context("connect to 10.0.0.1").into_boxed_dyn_error()),
            "connect to 10.0.0.1: connection refused"
        );
        let told = anyhow::anyhow!("refused").context("it was refused");
        assert_eq!(chain(&*told.into_boxed_dyn_error()), "it was refused");
    }
}
