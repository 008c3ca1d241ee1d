//! Conventions that a single file can break.

use syn::visit::Visit;

use super::{Finding, rust::RustFile};

/// A longer file should be split.
const LONGEST_FILE: usize = 600;

/// Files in which `unsafe` is allowed, with the reason; everywhere else the compiler refuses it.
const UNSAFE_ALLOWED: [(&str, &str); 4] = [
    ("ebpf/", "kernel programs handle raw pointers"),
    ("ebpf/abi/src/user.rs", "the `Pod` implementations of what kernel and user space share"),
    ("agent/src/datapath/bpf.rs", "bpf(2) calls that the loader has no function for"),
    ("agent/tests/truth_table/raw.rs", "system calls of kinds of sockets that no safe crate offers"),
];

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
    if !UNSAFE_ALLOWED.iter().any(|(path, _)| source.path.starts_with(path)) {
        let mut exceptions = UnsafeExceptions::default();
        exceptions.visit_file(&source.syntax);
        for line in exceptions.0 {
            find(Some(line), "lets unsafe code in outside the places that invariant 7 names".to_owned());
        }
    }
    findings
}

/// Places at which a file allows unsafe code again.
#[derive(Default)]
struct UnsafeExceptions(Vec<usize>);

impl<'ast> Visit<'ast> for UnsafeExceptions {
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        let syn::Meta::List(list) = &attribute.meta else { return };
        let is_exception = ["allow", "expect", "warn"].iter().any(|name| list.path.is_ident(name));
        if is_exception && list.tokens.to_string().contains("unsafe_code") {
            self.0.push(attribute.pound_token.span.start().line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_file(path: &str, text: &str) -> Vec<String> {
        let file = RustFile::parse(path.into(), text.to_owned()).expect("Rust");
        check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_file_that_keeps_the_conventions_passes() {
        let text = "//! Owns x.\n\n/// Is never unsafe_code.\nfn f() { g(\"expect(unsafe_code)\"); }\n";
        assert_eq!(check_file("proxy/src/x.rs", text), Vec::<String>::new());
        let forbidden = "//! x\n#![forbid(unsafe_code)]\n";
        assert_eq!(check_file("tls/src/lib.rs", forbidden), Vec::<String>::new());
        let reasoned = "//! x\n#![expect(unsafe_code, reason = \"system calls\")]\n";
        assert_eq!(check_file("agent/src/datapath/bpf.rs", reasoned), Vec::<String>::new());
    }

    #[test]
    fn each_breach_is_found_where_it_is() {
        let long = format!("//! x\n{}", "\n".repeat(LONGEST_FILE));
        let cases = [
            ("no module doc", "proxy/src/x.rs", "fn f() {}\n", "proxy/src/x.rs:1: starts without"),
            ("too long", "proxy/src/x.rs", long.as_str(), "proxy/src/x.rs: has 601 lines"),
            ("mod.rs", "proxy/src/x/mod.rs", "//! x\n", "proxy/src/x/mod.rs: is a mod.rs"),
            ("unsafe file", "proxy/src/x.rs", "//! x\n#![allow(unsafe_code)]\n", "proxy/src/x.rs:2: lets unsafe"),
            (
                "unsafe item",
                "proxy/src/x.rs",
                "//! x\n\n#[expect(unsafe_code, reason = \"fast\")]\nfn f() {}",
                "proxy/src/x.rs:3: lets unsafe",
            ),
        ];
        for (name, path, text, expected) in cases {
            let found = check_file(path, text);
            assert_eq!(found.len(), 1, "{name}: {found:?}");
            assert!(found[0].starts_with(expected), "{name}: {found:?}");
        }
    }
}
