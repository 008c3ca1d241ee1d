//! The output of a program that has ended.

use std::process::Output;

/// The standard output of a program that must have succeeded.
///
/// # Panics
/// It failed; the message is its standard error.
#[track_caller]
pub fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", errors(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The standard error of a program.
pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
