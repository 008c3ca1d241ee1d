//! Where the documents are that messages point to.

/// The address of the folder `docs` at this version. The program of a release is built with it; others name the folder
/// itself.
const DOCS: Option<&str> = option_env!("WEFT_DOCS");

/// A page of the documents, such as `troubleshooting.md`: its address in a release, else its path in the source tree.
pub(crate) fn page(name: &str) -> String {
    at(DOCS, name)
}

fn at(docs: Option<&str>, name: &str) -> String {
    format!("{}/{name}", docs.unwrap_or("docs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_names_an_address() {
        assert_eq!(at(Some("https://example.com/docs"), "a.md#b"), "https://example.com/docs/a.md#b");
        assert_eq!(at(None, "a.md"), "docs/a.md");
    }
}
