//! Regular expressions of the charts: schemas and templates use the same few again and again, and to compile one takes
//! far longer than to match a value.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use regex::Regex;

/// Those that were compiled, as many as the charts in this program have.
static COMPILED: LazyLock<Mutex<HashMap<String, Arc<Regex>>>> = LazyLock::new(Mutex::default);

/// Whether a text matches.
///
/// # Errors
/// When the pattern is malformed.
pub(super) fn is_match(pattern: &str, text: &str) -> Result<bool> {
    let known = COMPILED.lock().get(pattern).cloned();
    let compiled = match known {
        Some(compiled) => compiled,
        None => {
            let compiled = Arc::new(Regex::new(pattern).with_context(|| format!("the pattern {pattern:?}"))?);
            Arc::clone(COMPILED.lock().entry(pattern.to_owned()).or_insert(compiled))
        }
    };
    Ok(compiled.is_match(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_alike_each_time_and_a_malformed_one_is_named() {
        for _ in 0..2 {
            assert!(is_match("^a+$", "aa").unwrap() && !is_match("^a+$", "ab").unwrap());
            assert_eq!(is_match("(", "").unwrap_err().to_string(), "the pattern \"(\"");
        }
    }
}
