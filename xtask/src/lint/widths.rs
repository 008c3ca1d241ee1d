//! Columns of comments and documents, which no formatter bounds. Lines of code and of tables, which cannot be wrapped, are left alone.

use std::path::Path;

use super::{Document, Finding};

/// The widest line of text, as rustfmt's of code.
const COLUMNS: usize = 120;

/// Documents that `cargo run` writes from what `--help` prints.
const GENERATED: &str = "docs/reference";

/// Checks comments of sources, given with their paths, and the text of documents.
pub(crate) fn check(documents: &[Document], sources: &[(&Path, &str)]) -> Vec<Finding> {
    let written = documents.iter().filter(|document| !document.path.starts_with(GENERATED));
    let texts = written.map(|document| (document.path.as_path(), too_wide(document.text.lines().map(Some))));
    let comments = sources.iter().map(|(path, text)| (*path, too_wide(text.lines().map(comment))));
    let finding = |path: &Path, line| Finding {
        subject: path.display().to_string(),
        line: Some(line),
        message: format!("is wider than {COLUMNS} columns: wrap it"),
    };
    texts.chain(comments).flat_map(|(path, lines)| lines.into_iter().map(move |line| finding(path, line))).collect()
}

/// The line, if it is a comment.
fn comment(line: &str) -> Option<&str> {
    line.trim_start().starts_with("//").then_some(line)
}

/// The numbers of lines of text that are too wide.
fn too_wide<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<usize> {
    let mut is_code = false;
    let mut found = Vec::new();
    for (index, line) in lines.enumerate() {
        let Some(line) = line else {
            is_code = false;
            continue;
        };
        let text = line.trim_start().trim_start_matches(['/', '!']);
        if text.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code && line.chars().count() > COLUMNS && !text.starts_with("    ") && !is_whole(text) {
            found.push(index + 1);
        }
    }
    found
}

/// Whether it has to be one line: a row of a table, a comment of HTML, or a single word, such as a link.
fn is_whole(text: &str) -> bool {
    let text = text.trim();
    text.starts_with('|') || text.starts_with("<!--") || !text.contains(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let document = Document { path: path.into(), text: text.to_owned() };
        let (documents, sources) = match path.ends_with(".md") {
            true => (vec![document], vec![]),
            false => (vec![], vec![(Path::new(path), text)]),
        };
        check(&documents, &sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn text_beyond_the_width_is_found_in_comments_and_documents() {
        let wide = "word ".repeat(30);
        assert_eq!(found("a.md", &format!("# A\n\n{wide}\n")), ["a.md:3: is wider than 120 columns: wrap it"]);
        let comments = format!("//! {wide}\nfn f() {{\n    // {wide}\n}}\n");
        assert_eq!(found("a.rs", &comments).len(), 2);
        // The first line's fence ends with its comment.
        assert_eq!(found("a.rs", &format!("//! ```\nfn f() {{}}\n/// {wide}\n")).len(), 1);
    }

    #[test]
    fn what_cannot_be_wrapped_is_left_alone() {
        let wide = "word ".repeat(30);
        let link = format!("https://{}", "a".repeat(120));
        for text in
            [format!("```\n{wide}\n```\n"), format!("| {wide} |"), link, format!("    $ {wide}"), "─ ".repeat(60)]
        {
            assert_eq!(found("a.md", &text), Vec::<String>::new());
        }
        assert_eq!(
            found("a.rs", &format!("let a = \"{wide}\";\n//! ```text\n//! {wide}\n//! ```\n")),
            Vec::<String>::new()
        );
        assert_eq!(found("docs/reference/cli.md", &wide), Vec::<String>::new());
    }
}
