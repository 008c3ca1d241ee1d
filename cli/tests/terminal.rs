//! What a pipe gets of that which is for terminals: no colours unless they are forced, and no progress.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

/// A check that fails at once: there is no cluster.
fn check(arguments: &[&str]) -> Output {
    let mut weft = Command::new(env!("CARGO_BIN_EXE_weft"));
    weft.args(["check", "--pre", "--wait", "0s", "--kubeconfig", "/nonexistent/kubeconfig"]).args(arguments);
    let output = weft.env("TERM", "xterm-256color").env_remove("NO_COLOR").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    output
}

fn text(arguments: &[&str]) -> String {
    let output = check(arguments);
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "", "notes, and no progress");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_pipe_gets_colours_only_where_they_are_forced() {
    let plain = text(&[]);
    assert!(plain.contains("\n× ") && !plain.contains('\x1b'), "{plain}");
    assert_eq!(text(&["--color", "never"]), plain);
    let forced = text(&["--color", "always"]);
    assert!(forced.contains("\n\x1b[31m×\x1b[0m "), "{forced:?}");
    let codes = ["\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"];
    assert_eq!(codes.iter().fold(forced, |text, code| text.replace(code, "")), plain);
}

#[test]
fn programs_get_no_colours_even_where_they_are_forced() {
    for format in ["json", "yaml"] {
        let data = text(&["--color", "always", "-o", format]);
        assert!(data.contains("success") && !data.contains('\x1b'), "{data}");
    }
    assert!(text(&["-o", "yaml"]).starts_with("success: false\ncategories:\n"));
}
