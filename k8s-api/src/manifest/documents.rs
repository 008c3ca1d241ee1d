//! Splits a YAML stream into documents at their markers, so that a syntax error ends one document and not the stream.

/// The text of one document.
#[derive(Debug, PartialEq, Eq)]
pub struct Document<'a> {
    /// Lines of the file before it.
    pub lines_before: usize,
    /// The text, without its marker line.
    pub text: &'a str,
}

/// The documents of a YAML stream. A line that starts with `---` or `...` ends a document wherever it is (YAML 1.2
/// section 9.1.2), even in block scalars, so splitting needs no parser.
pub fn split(text: &str) -> Vec<Document<'_>> {
    let mut documents = Vec::new();
    let (mut start, mut lines_before, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if is_marker(line) {
            documents.push(Document { lines_before, text: &text[start..offset] });
            // Text after `--- ` on the marker's line belongs to the new document; after `...` only comments are
            // allowed.
            let after = line.trim_start_matches("---").trim();
            if line.starts_with("--- ") && !after.is_empty() && !after.starts_with('#') {
                (start, lines_before) = (offset + 4, number);
            } else {
                (start, lines_before) = (offset + line.len(), number + 1);
            }
        }
        offset += line.len();
    }
    documents.push(Document { lines_before, text: &text[start..] });
    documents
}

fn is_marker(line: &str) -> bool {
    ["---", "..."].iter().any(|marker| {
        line.strip_prefix(marker).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\n', '\r']))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(usize, &str)]) {
        let got: Vec<_> = split(text).into_iter().map(|document| (document.lines_before, document.text)).collect();
        assert_eq!(got, expected, "{text:?}");
    }

    #[test]
    fn cuts_at_markers_only() {
        check("a: 1\n", &[(0, "a: 1\n")]);
        check("a: 1\n---\nb: 2\n", &[(0, "a: 1\n"), (2, "b: 2\n")]);
        check("---\na: 1\n---\n", &[(0, ""), (1, "a: 1\n"), (3, "")]);
        check("--- {a: 1}\n", &[(0, ""), (0, "{a: 1}\n")]);
        check("a: |\n  ---\n  text\nb: ---x\n", &[(0, "a: |\n  ---\n  text\nb: ---x\n")]);
        check("a: 1\r\n---\r\nb: 2\r\n", &[(0, "a: 1\r\n"), (2, "b: 2\r\n")]);
    }
}
