//! Conventions that one file can break on its own.

use std::path::Path;

use super::{Finding, lexer::code_only, rust::RustFile};

/// A file longer than this is two files.
const LONGEST_FILE: usize = 600;

/// Where `unsafe` may stand, with the reason.
const UNSAFE_ALLOWED: [(&str, &str); 4] = [
    ("ebpf/", "kernel programs handle raw pointers"),
    ("ebpf-abi/src/user.rs", "the `Pod` implementations of what kernel and user space share"),
    ("agent/src/bpf.rs", "bpf(2) calls that the loader has no function for"),
    ("agent/tests/truth_table/raw.rs", "system calls of kinds of sockets that no safe crate offers"),
];

/// Where a line on standard output is the result rather than a log line that missed its subscriber.
const PRINTING_ALLOWED: [&str; 4] = ["cli/", "xtask/", "examples/", "tests/"];

/// Checks one file.
pub(crate) fn check(source: &RustFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |line: Option<usize>, message: String| {
        findings.push(Finding { subject: source.path.display().to_string(), line, message });
    };
    if !source.text.trim_start().starts_with("//!") {
        find(Some(1), "starts without `//!`: say what the file owns and what it refuses to do".to_owned());
    }
    let length = source.text.lines().count();
    if length > LONGEST_FILE {
        find(None, format!("has {length} lines, more than {LONGEST_FILE}: split it"));
    }
    if source.path.file_name() == Some("mod.rs".as_ref()) {
        find(None, "is a mod.rs: name it after the module and put it beside the module's directory".to_owned());
    }
    let code = code_only(&source.text);
    let lines: Vec<&str> = source.text.lines().collect();
    for (index, line) in code.lines().enumerate() {
        if has_word(line, "unsafe") && is_unsafe_code(line) {
            if !starts_with_any(&source.path, UNSAFE_ALLOWED.iter().map(|(path, _)| *path)) {
                find(Some(index + 1), "unsafe code outside the places that invariant 7 names".to_owned());
            } else if needs_safety(line) && !has_safety(&lines, index) {
                find(Some(index + 1), "unsafe without a `// SAFETY:` line above it".to_owned());
            }
        }
        if prints(line) && !may_print(&source.path) {
            find(Some(index + 1), "prints to standard output: log with tracing or write to a handle".to_owned());
        }
    }
    findings
}

/// `#![forbid(unsafe_code)]` and the like name the word in an attribute, which `has_word` tells apart already; a
/// function pointer type or a trait declaration is no code that runs.
fn is_unsafe_code(line: &str) -> bool {
    !line.trim_start().starts_with("type ")
}

/// Blocks and implementations; what an `unsafe fn` asks of its callers stands in its documentation.
fn needs_safety(line: &str) -> bool {
    let after = line.split("unsafe").nth(1).unwrap_or_default().trim_start();
    after.starts_with('{') || after.starts_with("impl") || after.is_empty()
}

/// A SAFETY comment on the line or, above it, before other code of the statement begins.
fn has_safety(lines: &[&str], index: usize) -> bool {
    const LOOK_BACK: usize = 8;
    let first = index.saturating_sub(LOOK_BACK);
    lines[first..=index].iter().any(|line| line.contains("SAFETY:"))
}

fn prints(line: &str) -> bool {
    ["println!", "print!", "dbg!"].iter().any(|name| {
        let word = name.trim_end_matches('!');
        line.match_indices(name).any(|(at, _)| !line[..at].ends_with(is_word) && line[at..].starts_with(word))
    })
}

fn may_print(path: &Path) -> bool {
    let main = ["main.rs", "build.rs"].iter().any(|name| path.file_name() == Some((*name).as_ref()));
    // A test program without libtest reports by itself.
    let test = path.components().nth(1).is_some_and(|part| part.as_os_str() == "tests");
    main || test || starts_with_any(path, PRINTING_ALLOWED.into_iter())
}

fn starts_with_any<'a>(path: &Path, mut prefixes: impl Iterator<Item = &'a str>) -> bool {
    prefixes.any(|prefix| path.starts_with(prefix))
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(is_word) && !line[at + word.len()..].starts_with(is_word))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_file(path: &str, text: &str) -> Vec<String> {
        check(&RustFile::parse(path.into(), text.to_owned()).expect("Rust")).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_file_that_keeps_the_conventions_passes() {
        let text = "//! Owns x.\n\n/// Prints nothing, is never unsafe.\nfn f() { eprintln!(\"println!\"); }\n";
        assert_eq!(check_file("proxy/src/x.rs", text), Vec::<String>::new());
    }

    #[test]
    fn each_breach_is_found_where_it_is() {
        let long = format!("//! x\n{}", "\n".repeat(LONGEST_FILE));
        let cases = [
            ("no module doc", "proxy/src/x.rs", "fn f() {}\n", "proxy/src/x.rs:1: starts without"),
            ("too long", "proxy/src/x.rs", long.as_str(), "proxy/src/x.rs: has 601 lines"),
            ("mod.rs", "proxy/src/x/mod.rs", "//! x\n", "proxy/src/x/mod.rs: is a mod.rs"),
            (
                "unsafe elsewhere",
                "proxy/src/x.rs",
                "//! x\nfn f() {\n unsafe { g() } }",
                "proxy/src/x.rs:3: unsafe code",
            ),
            ("no safety", "ebpf/src/x.rs", "//! x\nfn f() { unsafe { g() } }", "ebpf/src/x.rs:2: unsafe without"),
            ("printing", "proxy/src/x.rs", "//! x\nfn f() { println!(); }", "proxy/src/x.rs:2: prints"),
        ];
        for (name, path, text, expected) in cases {
            let found = check_file(path, text);
            assert_eq!(found.len(), 1, "{name}: {found:?}");
            assert!(found[0].starts_with(expected), "{name}: {found:?}");
        }
    }

    #[test]
    fn what_is_allowed_somewhere_is_not_found_there() {
        let unsafe_with_reason = "//! x\nfn f() {\n    // SAFETY: g is sound here.\n    unsafe { g() }\n}\n";
        assert_eq!(check_file("ebpf/src/x.rs", unsafe_with_reason), Vec::<String>::new());
        assert_eq!(check_file("ebpf/src/x.rs", "//! x\n/// # Safety\n/// x\nunsafe fn f() {}\n"), Vec::<String>::new());
        for path in ["cli/src/x.rs", "proxy/src/main.rs", "proto/build.rs", "agent/tests/x/y.rs"] {
            assert_eq!(check_file(path, "//! x\nfn f() { println!(); }"), Vec::<String>::new(), "{path}");
        }
        assert_eq!(check_file("tls/src/lib.rs", "//! x\n#![forbid(unsafe_code)]\n"), Vec::<String>::new());
    }
}
